"""Finds where a broken law does not hold, by tensor and element, with more collectives; and the tensors of a bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from andon_contracts.act import Scene, agreed
from andon_contracts.laws.law import Details, Judgement, Law, Observations, Seen, in_lockstep
from andon_contracts.laws.loop import PARTED, START
from andon_contracts.laws.update import GRADIENTS, OPTIMIZERS, REPLICAS, Reduced
from andon_contracts.observe import plain
from andon_contracts.violation import Violation
from andon_contracts.watch.exchange import Exchange
from andon_contracts.watch.judging import Verdicts
from andon_contracts.watch.model_probe import ModelProbe
from andon_contracts.watch.optimizer_probe import OptimizerProbe, hyperparameters_by_key
from andon_contracts.watch.replicas import Replicas
from andon_contracts.watch.rows import Rows
from andon_contracts.watch.values import layout_digest, roles_digest, state_digest

W = TypeVar("W")
REPLICATED = {name: law.clause for law in (REPLICAS, GRADIENTS, OPTIMIZERS) for name in law.look}
"""The clause that compares what is observed under a name, of what every replica holds."""


@dataclass
class Locator:
    """Acts upon broken laws, clause by clause, with all that a message can say. All ranks must make the same calls."""

    exchange: Exchange
    replicas: Replicas
    verdicts: Verdicts
    subject: ModelProbe
    rows: Rows
    last_equal: int | None = None
    """The last update after which all ranks had the same weights, if there are several ranks."""

    def start(self, judgement: Judgement[Seen[object]]) -> None:
        tensors = self.subject.parameters
        self._look(judgement, START, 0, None)
        scene = Scene(self.exchange.world_size, tensors=len(tensors))
        self.verdicts.take_all(judgement, scene, self._closer(0, scene, {"replicas-agree": tensors}))

    def before(
        self, probe: OptimizerProbe, judgement: Judgement[Seen[Reduced]], laws: Sequence[Law[Seen[Reduced]]]
    ) -> None:
        said = judgement.seen.said
        self._look(judgement, laws, said[0].step, probe)
        tensors: dict[str, Mapping[str, Tensor]] = {
            "replicas-agree": probe.parameters,
            "gradients-agree": {name: p.grad for name, p in probe.parameters.items() if p.grad is not None},
            "buffers-agree": self.subject.buffers_by_name(),
        }
        scene = self.scene(probe, said, applied=False)
        closer = self._closer(probe.updates + 1, scene, tensors)
        self.verdicts.take_all(judgement, scene, closer, {"ids": list(self.rows.ids)})

    def after(
        self,
        probe: OptimizerProbe,
        judgement: Judgement[Seen[object]],
        laws: Sequence[Law[Seen[object]]],
        before: Observations,
    ) -> None:
        """Act upon what is broken of `laws` after an update of `probe`'s optimizer. `before`: observed before it."""
        self._look(judgement, laws, judgement.seen.step, probe)
        scene = self.scene(probe, before, applied=True)
        # No element is looked for if a difference is only a suspicion: that the weights differ is not the point then.
        certain: dict[str, Mapping[str, Tensor]] = {} if PARTED[0] in laws else {"replicas-agree": probe.parameters}
        closer = self._closer(probe.updates, scene, certain, probe)
        self.verdicts.take_all(judgement, scene, closer, {"ids": list(self.rows.ids)})

    def note_equal(self, step: int, seen: Seen[object]) -> None:
        """Remember `step` if several ranks have the same weights after it."""
        if len(seen.said) > 1 and "weights" not in seen.differing:
            self.last_equal = step

    def scene(self, probe: OptimizerProbe, before: Observations, *, applied: bool) -> Scene:
        """What a message says beside its finding; `before`: what the ranks observed before the update."""
        # Ranks at different points cannot be compared.
        said = agreed(before, moments=probe.moments_equal) if before and in_lockstep(before) else ""
        return Scene(self.exchange.world_size, applied, self.last_equal, tensors=len(probe.names), before=said)

    def _look(
        self, judgement: Judgement[Seen[W]], laws: Sequence[Law[Seen[W]]], step: int, probe: OptimizerProbe | None
    ) -> None:
        """Add to what was seen the details of each value that differs between ranks, the first time it does."""
        seen = judgement.seen
        # Ranks at different points cannot be compared.
        if not in_lockstep(seen.said):
            return
        found: dict[str, Mapping[str, Sequence[int]]] = {}
        for law in self.verdicts.alive(laws):
            if not self.verdicts.known(law.clause):
                for name in law.look:
                    if name in seen.differing:
                        found.update(self._details(name, step, probe))
        judgement.seen = replace(seen, details=found)

    def _details(self, name: str, step: int, probe: OptimizerProbe | None) -> Details:
        """What each rank holds of that which is observed as `name`, tensor by tensor. Collective.

        probe: whose parameters are looked at; None: those of the model.
        """
        look, spread = self.exchange.look, self.exchange.spread
        parameters = self.subject.parameters if probe is None else probe.parameters
        found: dict[str, Mapping[str, Sequence[int]]] = {}
        if name == "weights":
            found[name] = look(step, name, parameters)
        elif name == "layout":
            found[name] = spread(step, "tensors of layout", {n: roles_digest({"": p}) for n, p in parameters.items()})
        elif name == "gradient":
            none = torch.empty(0, device="cpu")
            gradients = {n: none if p.grad is None else p.grad for n, p in parameters.items()}
            found[name] = look(step, name, gradients)
        elif name == "optimizer" and probe is not None:
            states = {n: state_digest(probe.optimizer.state.get(p, {})) for n, p in parameters.items()}
            found[name] = spread(step, "tensors of optimizer", states)
        elif name in ("buffers", "caches"):
            buffers = self.subject.buffers_by_name()
            found["buffers"] = look(step, "buffers", buffers)
            shapes = {n: layout_digest({"": buffer}) for n, buffer in buffers.items()}
            found["shapes of buffers"] = spread(step, "shapes of buffers", shapes)
        elif name == "modes":
            return {name: spread(step, "modes of modules", self.subject.modes_by_name())}
        elif name == "hyperparameters" and probe is not None:
            return {name: spread(step, name, hyperparameters_by_key(probe.optimizer))}
        return {each: self.replicas.align_tensors(digests) for each, digests in found.items()}

    def _closer(
        self,
        step: int,
        scene: Scene,
        tensors: Mapping[str, Mapping[str, Tensor]],
        probe: OptimizerProbe | None = None,
    ) -> Callable[[Violation], Scene]:
        """What adds to `scene` the first element that differs in the tensor of a finding. Collective when called.

        tensors: those that each clause compares, by name. probe: whose optimizer states were compared, if any were.
        """

        def look(found: Violation) -> Scene:
            # What only some ranks hold (a gradient, an optimizer state) must not decide whether a rank takes part.
            named, name, key = tensors.get(found.clause), found.tensor, ""
            if found.clause == "optimizers-agree" and probe is not None:
                named = _states_of(probe, name) if name in probe.parameters else {}
                spread = self.exchange.look(step, "state", named)
                name = key = next((one for one, digests in spread.items() if len(set(digests)) > 1), "")
            if named is None:
                return scene
            noun = "gradient" if found.clause == "gradients-agree" else "tensor"
            element = self.exchange.first_difference(step, named.get(name), noun)
            return replace(scene, element=" ".join(filter(None, [key, element])))

        return look


def tensors_of(
    subject: ModelProbe, probes: Sequence[OptimizerProbe], named: str, *, gone_on: bool
) -> Iterator[tuple[str, Tensor]]:
    """`named`'s weights, gradient, optimizer state or buffer on this rank, then those of all that is trained.

    Names say what a tensor is: `weights NAME`, `gradient NAME`, `optimizer NAME KEY`, `buffer NAME`. gone_on: gradients
    and buffers are of a later update than the finding, and left out.
    """
    for names in ([named], [name for probe in probes for name in probe.names]):
        for kind in ("weights", "gradient", "optimizer"):
            for probe, name in ((probe, name) for probe in probes for name in names if name in probe.parameters):
                parameter = probe.parameters[name]
                if kind == "weights":
                    yield f"weights {name}", plain(parameter)
                elif kind == "optimizer":
                    yield from ((f"optimizer {name} {key}", each) for key, each in _states_of(probe, name).items())
                elif parameter.grad is not None and not gone_on:
                    yield f"gradient {name}", plain(parameter.grad)
    if named in subject.frozen:
        yield f"weights {named}", plain(subject.frozen[named])
    if not gone_on:
        yield from ((f"buffer {name}", plain(buffer)) for name, buffer in subject.buffers_by_name().items())


def _states_of(probe: OptimizerProbe, name: str) -> dict[str, Tensor]:
    """The tensors that the optimizer keeps for the parameter, by their keys."""
    state = probe.optimizer.state.get(probe.parameters[name], {})
    return {str(key): plain(value) for key, value in state.items() if isinstance(value, Tensor)}
