"""Something does not hold in a watched step: where, by tensor and element, is found with further collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from andon_contracts.act import Scene, agreed
from andon_contracts.judge import Details, Observations, in_lockstep
from andon_contracts.loop_clauses import same
from andon_contracts.watch.evidence import closer_look
from andon_contracts.watch.exchange import Exchange
from andon_contracts.watch.judging import AFTER, BEFORE, START, Verdicts
from andon_contracts.watch.lane import Lane
from andon_contracts.watch.reading import layout_digest
from andon_contracts.watch.replicas import Replicas
from andon_contracts.watch.rows import Rows
from andon_contracts.watch.subject import Subject

REPLICATED = {"weights": "replicas-agree", "gradient": "gradients-agree", "optimizer": "optimizers-agree"}
"""The clause that compares what is observed under a name."""


@dataclass
class SecondLook:
    """Judges what ranks observed clause by clause, with all that a message can say. All ranks call alike.

    `last_equal` is the last update after which several ranks had the same weights, all of them.
    """

    exchange: Exchange
    replicas: Replicas
    verdicts: Verdicts
    subject: Subject
    rows: Rows
    last_equal: int | None = None

    def start(self, observations: Observations) -> bool:
        """Whether all holds at the start."""
        tensors: dict[str, Tensor] = dict(self.subject.parameters)
        details = self._look(observations, {"weights": tensors})
        scene = Scene(self.exchange.world_size, tensors=len(tensors))
        closer = closer_look(self.exchange, 0, scene, {"replicas-agree": tensors})
        return self.verdicts.judge(START, observations, details, scene, closer)

    def before(self, lane: Lane, observations: Observations) -> None:
        """Before an update of `lane`'s optimizer."""
        gradients = lane.gradients_by_name()
        buffers = self.subject.buffers_by_name()
        looked_at = {"weights": dict(lane.parameters), "gradient": gradients, "buffers": buffers}
        details = self._look(observations, looked_at)
        if self._first_time(observations, "hyperparameters", "hyperparameters-agree"):
            keys = lane.hyperparameters_by_key()
            spread = self.exchange.spread(observations[0].step, "hyperparameters", keys)
            details = {**details, "hyperparameters": spread}
        tensors: dict[str, Mapping[str, Tensor]] = {
            "replicas-agree": lane.parameters,
            "gradients-agree": {name: g for name, g in gradients.items() if g.numel()},
            "buffers-agree": buffers,
        }
        scene = self.scene(lane, observations, applied=False)
        closer = closer_look(self.exchange, lane.updates + 1, scene, tensors)
        self.verdicts.judge(BEFORE, observations, details, scene, closer, self._facts())

    def after(self, lane: Lane, observations: Observations, before: Observations) -> None:
        """After an update of `lane`'s optimizer, before which the ranks observed `before`."""
        details = self._look(observations, {"weights": dict(lane.parameters), "optimizer": lane.state_by_name})
        scene = self.scene(lane, before, applied=True)
        closer = closer_look(self.exchange, lane.updates, scene, {"replicas-agree": lane.parameters}, lane)
        self.verdicts.judge(AFTER, observations, details, scene, closer, self._facts())

    def note_equal(self, step: int, observations: Observations) -> None:
        """Remember `step` where the ranks, if there are several, have the same weights after it."""
        if len(observations) > 1 and same(observations, "weights"):
            self.last_equal = step

    def scene(self, lane: Lane, before: Observations, *, applied: bool) -> Scene:
        """What a message says beside its finding; `before`: what the ranks observed before the update."""
        # Of ranks at different points nothing was observed that could be held to each other.
        said = agreed(before, moments=lane.moments_equal) if before and in_lockstep(before) else ""
        return Scene(self.exchange.world_size, applied, self.last_equal, tensors=len(lane.names), before=said)

    def _facts(self) -> dict[str, object]:
        return {"ids": list(self.rows.ids)}

    def _first_time(self, observations: Observations, name: str, clause: str) -> bool:
        """Whether the ranks have other values for `name`, which `clause` has not reported yet."""
        return in_lockstep(observations) and not same(observations, name) and not self.verdicts.known(clause)

    def _look(self, observations: Observations, tensors: Mapping[str, Any]) -> Details:
        """The digests by tensor of what differs between ranks, the first time that it does."""
        if not in_lockstep(observations):
            return {}
        found = {}
        for name, of in tensors.items():
            named = REPLICATED.get(name, "buffers-agree")
            if same(observations, name) or self.verdicts.known(named) or named not in self.verdicts.live:
                continue
            step = observations[0].step
            if callable(of):
                looked = self.exchange.spread(step, f"tensors of {name}", of())
            else:
                looked = self.exchange.look(step, name, of)
            found[name] = self.replicas.align_tensors(looked)
            if name == "buffers":
                shapes = {buffer: layout_digest({"": tensor}) for buffer, tensor in of.items()}
                looked = self.exchange.spread(step, "shapes of buffers", shapes)
                found["shapes of buffers"] = self.replicas.align_tensors(looked)
        return found
