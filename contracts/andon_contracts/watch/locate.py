"""Something does not hold in a watched step: where, by tensor and element, is found with further collectives; and the
tensors of a bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
_Look = Callable[[], Details]


@dataclass
class Locator:
    """Judges what ranks observed clause by clause, with all that a message can say. All ranks call alike.

    `last_equal` is the last update after which several ranks had the same weights, all of them.
    """

    exchange: Exchange
    replicas: Replicas
    verdicts: Verdicts
    subject: ModelProbe
    rows: Rows
    last_equal: int | None = None

    def start(self, judgement: Judgement[Seen[object]]) -> None:
        """At the start something is broken."""
        tensors: dict[str, Tensor] = dict(self.subject.parameters)
        looks: dict[str, _Look] = {
            "layout": partial(self._layout, 0, tensors),
            "weights": partial(self._tensors, 0, "weights", tensors),
        }
        self._look(judgement, START, looks)
        scene = Scene(self.exchange.world_size, tensors=len(tensors))
        closer = closer_look(self.exchange, 0, scene, {"replicas-agree": tensors})
        self.verdicts.take_all(judgement, scene, closer)

    def before(
        self, probe: OptimizerProbe, judgement: Judgement[Seen[Reduced]], laws: Sequence[Law[Seen[Reduced]]]
    ) -> None:
        """Before an update of `probe`'s optimizer something is broken of `laws`."""
        said, buffers = judgement.seen.said, self.subject.buffers_by_name()
        none = torch.empty(0, device="cpu")
        there = {name: p.grad for name, p in probe.parameters.items() if p.grad is not None}
        gradients = {name: there.get(name, none) for name in probe.parameters}
        step = said[0].step
        looks: dict[str, _Look] = {
            "layout": partial(self._layout, step, dict(probe.parameters)),
            "weights": partial(self._tensors, step, "weights", dict(probe.parameters)),
            "gradient": partial(self._tensors, step, "gradient", gradients),
            "buffers": partial(self._buffers, step, buffers),
            "caches": partial(self._buffers, step, buffers),
            "modes": lambda: {"modes": self.exchange.spread(step, "modes of modules", self.subject.modes_by_name())},
            "hyperparameters": lambda: {
                "hyperparameters": self.exchange.spread(
                    step, "hyperparameters", hyperparameters_by_key(probe.optimizer)
                )
            },
        }
        self._look(judgement, laws, looks)
        tensors: dict[str, Mapping[str, Tensor]] = {
            "replicas-agree": probe.parameters,
            "gradients-agree": there,
            "buffers-agree": buffers,
        }
        scene = self.scene(probe, said, applied=False)
        closer = closer_look(self.exchange, probe.updates + 1, scene, tensors)
        self.verdicts.take_all(judgement, scene, closer, self._facts())

    def after(
        self,
        probe: OptimizerProbe,
        judgement: Judgement[Seen[object]],
        laws: Sequence[Law[Seen[object]]],
        before: Observations,
    ) -> None:
        """After an update of `probe`'s optimizer, before which the ranks observed `before`, `laws` are broken."""
        step = judgement.seen.step
        looks = {
            "weights": partial(self._tensors, step, "weights", dict(probe.parameters)),
            "optimizer": partial(self._states, step, probe),
        }
        self._look(judgement, laws, looks)
        scene = self.scene(probe, before, applied=True)
        # Of what is only suspected no element is looked for: that they differ is not what is to be said.
        certain: dict[str, Mapping[str, Tensor]] = {} if PARTED[0] in laws else {"replicas-agree": probe.parameters}
        closer = closer_look(self.exchange, probe.updates, scene, certain, probe)
        self.verdicts.take_all(judgement, scene, closer, self._facts())

    def note_equal(self, step: int, seen: Seen[object]) -> None:
        """Remember `step` where the ranks, if there are several, have the same weights after it."""
        if len(seen.said) > 1 and "weights" not in seen.differing:
            self.last_equal = step

    def scene(self, probe: OptimizerProbe, before: Observations, *, applied: bool) -> Scene:
        """What a message says beside its finding; `before`: what the ranks observed before the update."""
        # Of ranks at different points nothing was observed that could be held to each other.
        said = agreed(before, moments=probe.moments_equal) if before and in_lockstep(before) else ""
        return Scene(self.exchange.world_size, applied, self.last_equal, tensors=len(probe.names), before=said)

    def _facts(self) -> dict[str, object]:
        return {"ids": list(self.rows.ids)}

    def _look(self, judgement: Judgement[Seen[W]], laws: Sequence[Law[Seen[W]]], looks: Mapping[str, _Look]) -> None:
        """Add to what was seen what `looks` give of each value that differs between ranks, the first time it does."""
        seen = judgement.seen
        # Of ranks at different points nothing was observed that could be held to each other.
        if not in_lockstep(seen.said):
            return
        found: dict[str, Mapping[str, Sequence[int]]] = {}
        for law in self.verdicts.alive(laws):
            if not self.verdicts.known(law.clause):
                for name in law.look:
                    if name in seen.differing:
                        found.update(looks[name]())
        judgement.seen = replace(seen, details=found)

    def _tensors(self, step: int, name: str, tensors: Mapping[str, Tensor]) -> Details:
        return {name: self.replicas.align_tensors(self.exchange.look(step, name, tensors))}

    def _layout(self, step: int, tensors: Mapping[str, Tensor]) -> Details:
        roles = {name: roles_digest({"": tensor}) for name, tensor in tensors.items()}
        return {"layout": self.replicas.align_tensors(self.exchange.spread(step, "tensors of layout", roles))}

    def _states(self, step: int, probe: OptimizerProbe) -> Details:
        states = {n: state_digest(probe.optimizer.state.get(p, {})) for n, p in probe.parameters.items()}
        spread = self.exchange.spread(step, "tensors of optimizer", states)
        return {"optimizer": self.replicas.align_tensors(spread)}

    def _buffers(self, step: int, buffers: Mapping[str, Tensor]) -> Details:
        shapes = {name: layout_digest({"": buffer}) for name, buffer in buffers.items()}
        return {
            **self._tensors(step, "buffers", buffers),
            "shapes of buffers": self.replicas.align_tensors(self.exchange.spread(step, "shapes of buffers", shapes)),
        }


def tensors_of(
    subject: ModelProbe, probes: Sequence[OptimizerProbe], named: str, *, gone_on: bool
) -> Iterator[tuple[str, Tensor]]:
    """`named`'s weights, gradient, optimizer state or buffer on this rank, then those of all that is trained.

    Names say what a tensor is: `weights NAME`, `gradient NAME`, `optimizer NAME KEY`, `buffer NAME`. gone_on: gradients
    and buffers are of a later update than the one that is told of, and left out.
    """
    trained = [name for probe in probes for name in probe.names]
    for names in ([named], trained):
        for kind in (_weights, _states) if gone_on else (_weights, _gradients, _states):
            for probe in probes:
                yield from kind(probe, [name for name in names if name in probe.parameters])
    if named in subject.frozen:
        yield f"weights {named}", plain(subject.frozen[named])
    if not gone_on:
        yield from ((f"buffer {name}", plain(buffer)) for name, buffer in subject.buffers_by_name().items())


def _weights(probe: OptimizerProbe, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    return ((f"weights {name}", plain(probe.parameters[name])) for name in names)


def _gradients(probe: OptimizerProbe, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        gradient = probe.parameters[name].grad
        if gradient is not None:
            yield f"gradient {name}", plain(gradient)


def _states(probe: OptimizerProbe, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        for key, value in states_of(probe, name).items():
            yield f"optimizer {name} {key}", value


def states_of(probe: OptimizerProbe, name: str) -> dict[str, Tensor]:
    """The tensors that the optimizer keeps for the parameter, by their keys."""
    state = probe.optimizer.state.get(probe.parameters[name], {})
    return {str(key): plain(value) for key, value in state.items() if isinstance(value, Tensor)}


def closer_look(
    exchange: Exchange,
    step: int,
    scene: Scene,
    tensors: Mapping[str, Mapping[str, Tensor]],
    probe: OptimizerProbe | None = None,
) -> Callable[[Violation], Scene]:
    """What adds to `scene` the first element that differs in the tensor of a finding. Collective when it is called.

    tensors: those that each clause compares, by name. probe: whose optimizer states were compared, if they were.
    """

    def look(found: Violation) -> Scene:
        # What a rank has of its own (a gradient, an optimizer state) must not decide whether it takes part.
        named, name, key = tensors.get(found.clause), found.tensor, ""
        if found.clause == "optimizers-agree" and probe is not None:
            named = states_of(probe, name) if name in probe.parameters else {}
            spread = exchange.look(step, "state", named)
            name = key = next((one for one, digests in spread.items() if len(set(digests)) > 1), "")
        if named is None:
            return scene
        noun = "gradient" if found.clause == "gradients-agree" else "tensor"
        element = exchange.first_difference(step, named.get(name), noun)
        return replace(scene, element=" ".join(filter(None, [key, "" if element is None else str(element)])))

    return look
