"""Finds where a broken law does not hold, by tensor and element, with more collectives; and the tensors of a bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from andon_contracts.act import Scene
from andon_contracts.laws.law import Details, Judgement, Observations, Seen, in_lockstep
from andon_contracts.laws.update import GRADIENTS, OPTIMIZERS, REPLICAS
from andon_contracts.observe import plain
from andon_contracts.violation import Violation
from andon_contracts.watch.check import Context, Laws, OptimizerProbe
from andon_contracts.watch.checks.optimizer import hyperparameters_by_key
from andon_contracts.watch.checks.weights import PARTED
from andon_contracts.watch.values import layout_digest, state_digest, trainable_layout_digest

REPLICATED = {name: law.clause for law in (REPLICAS, GRADIENTS, OPTIMIZERS) for name in law.look}
"""The clause that compares what is observed under a name, of what every replica holds."""


class Locator:
    """Acts upon broken laws, clause by clause, with all that a message can say. All ranks must make the same calls."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._exchange, self._verdicts, self._subject = context.exchange, context.verdicts, context.subject

    def start(self, judgement: Judgement[Seen[object]], laws: Laws) -> None:
        """Act upon what is broken at the start."""
        tensors = self._subject.parameters
        self._look(judgement, laws, 0, None)
        scene = Scene(self._exchange.world_size, tensors=len(tensors))
        self._verdicts.take_all(judgement, scene, self._closer(0, scene, {"replicas-agree": tensors}))

    def before(self, probe: OptimizerProbe, judgement: Judgement[Seen[object]], laws: Laws) -> None:
        """Act upon what is broken of `laws` before an update of `probe`'s optimizer."""
        said = judgement.seen.said
        self._look(judgement, laws, said[0].step, probe)
        tensors: dict[str, Mapping[str, Tensor]] = {
            "replicas-agree": probe.parameters,
            "gradients-agree": {name: p.grad for name, p in probe.parameters.items() if p.grad is not None},
            "buffers-agree": self._subject.buffers_by_name(),
        }
        scene = self._context.scene_of(probe, said, applied=False)
        closer = self._closer(probe.updates + 1, scene, tensors)
        self._verdicts.take_all(judgement, scene, closer, {"ids": list(self._context.rows.ids)})

    def after(
        self, probe: OptimizerProbe, judgement: Judgement[Seen[object]], laws: Laws, before: Observations
    ) -> None:
        """Act upon what is broken of `laws` after an update of `probe`'s optimizer. `before`: observed before it."""
        self._look(judgement, laws, judgement.seen.step, probe)
        scene = self._context.scene_of(probe, before, applied=True)
        # No element is looked for if a difference is only a suspicion: that the weights differ is not the point then.
        certain: dict[str, Mapping[str, Tensor]] = {} if PARTED in laws else {"replicas-agree": probe.parameters}
        closer = self._closer(probe.updates, scene, certain, probe)
        self._verdicts.take_all(judgement, scene, closer, {"ids": list(self._context.rows.ids)})

    def _look(self, judgement: Judgement[Seen[object]], laws: Laws, step: int, probe: OptimizerProbe | None) -> None:
        """Add to what was seen the details of each value that differs between ranks, the first time it does."""
        seen = judgement.seen
        # Ranks at different points cannot be compared.
        if not in_lockstep(seen.said):
            return
        found: dict[str, Mapping[str, Sequence[int]]] = {}
        for law in self._verdicts.alive(laws):
            if not self._verdicts.known(law.clause):
                for name in law.look:
                    if name in seen.differing:
                        found.update(self._details(name, step, probe))
        judgement.seen = replace(seen, details=found)

    def _details(self, name: str, step: int, probe: OptimizerProbe | None) -> Details:
        """What each rank holds of that which is observed as `name`, tensor by tensor. Collective.

        probe: whose parameters are looked at; None: those of the model.
        """
        look, spread = self._exchange.look, self._exchange.spread
        parameters = self._subject.parameters if probe is None else probe.parameters
        found: dict[str, Mapping[str, Sequence[int]]] = {}
        if name == "weights":
            found[name] = look(step, name, parameters)
        elif name == "layout":
            found[name] = spread(
                step, "tensors of layout", {n: trainable_layout_digest({"": p}) for n, p in parameters.items()}
            )
        elif name == "gradient":
            none = torch.empty(0, device="cpu")
            gradients = {n: none if p.grad is None else p.grad for n, p in parameters.items()}
            found[name] = look(step, name, gradients)
        elif name == "optimizer" and probe is not None:
            states = {n: state_digest(probe.optimizer.state.get(p, {})) for n, p in parameters.items()}
            found[name] = spread(step, "tensors of optimizer", states)
        elif name in ("buffers", "caches"):
            buffers = self._subject.buffers_by_name()
            found["buffers"] = look(step, "buffers", buffers)
            shapes = {n: layout_digest({"": buffer}) for n, buffer in buffers.items()}
            found["shapes of buffers"] = spread(step, "shapes of buffers", shapes)
        elif name == "modes":
            return {name: spread(step, "modes of modules", self._subject.modes_by_name())}
        elif name == "hyperparameters" and probe is not None:
            return {name: spread(step, name, hyperparameters_by_key(probe.optimizer))}
        return {each: self._context.replicas.align_tensors(digests) for each, digests in found.items()}

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
                spread = self._exchange.look(step, "state", named)
                name = key = next((one for one, digests in spread.items() if len(set(digests)) > 1), "")
            if named is None:
                return scene
            noun = "gradient" if found.clause == "gradients-agree" else "tensor"
            element = self._exchange.first_difference(step, named.get(name), noun)
            return replace(scene, element=" ".join(filter(None, [key, element])))

        return look


def tensors_of(context: Context, named: str) -> Iterator[tuple[str, Tensor]]:
    """`named`'s weights, gradient, optimizer state or buffer on this rank, then those of all that is trained.

    Names say what a tensor is: `weights NAME`, `gradient NAME`, `optimizer NAME KEY`, `buffer NAME`. Gradients
    and buffers are left out if they are already of a later update than the finding.
    """
    subject, probes, is_past = context.subject, context.probes, context.rows.is_past
    for names in ([named], [name for probe in probes for name in probe.names]):
        for kind in ("weights", "gradient", "optimizer"):
            for probe, name in ((probe, name) for probe in probes for name in names if name in probe.parameters):
                parameter = probe.parameters[name]
                if kind == "weights":
                    yield f"weights {name}", plain(parameter)
                elif kind == "optimizer":
                    yield from ((f"optimizer {name} {key}", each) for key, each in _states_of(probe, name).items())
                elif parameter.grad is not None and not is_past:
                    yield f"gradient {name}", plain(parameter.grad)
    if named in subject.frozen:
        yield f"weights {named}", plain(subject.frozen[named])
    if not is_past:
        yield from ((f"buffer {name}", plain(buffer)) for name, buffer in subject.buffers_by_name().items())


def _states_of(probe: OptimizerProbe, name: str) -> dict[str, Tensor]:
    """The tensors that the optimizer keeps for the parameter, by their keys."""
    state = probe.optimizer.state.get(probe.parameters[name], {})
    return {str(key): plain(value) for key, value in state.items() if isinstance(value, Tensor)}
