"""Finds where a broken law does not hold, by tensor and element, with more collectives; and the tensors of a bundle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
"""By the name of a value that all replicas share, the clause that compares it."""


def report_start(context: Context, judgement: Judgement[Seen[object]], laws: Laws) -> None:
    """Report what is broken of `laws` at the start, with the tensor and element that differ. Collective."""
    tensors = context.subject.parameters
    scene = Scene(context.world, tensors=len(tensors))
    _report(context, judgement, laws, None, scene, {"replicas-agree": tensors})


def report_before(probe: OptimizerProbe, judgement: Judgement[Seen[object]], laws: Laws) -> None:
    """Report what is broken of `laws` before an update of `probe`'s optimizer. Collective."""
    tensors: dict[str, Mapping[str, Tensor]] = {
        "replicas-agree": probe.parameters,
        "gradients-agree": {name: p.grad for name, p in probe.parameters.items() if p.grad is not None},
        "buffers-agree": probe.context.subject.buffers_by_name(),
    }
    scene = probe.context.scene_of(probe, judgement.seen.observations, applied=False)
    _report(probe.context, judgement, laws, probe, scene, tensors)


def report_after(probe: OptimizerProbe, judgement: Judgement[Seen[object]], laws: Laws, before: Observations) -> None:
    """Report what is broken of `laws` after an update of `probe`'s optimizer. `before`: observed before it."""
    # If a difference of the weights is only a suspicion, its element is not searched for.
    tensors = {} if PARTED in laws else {"replicas-agree": probe.parameters}
    scene = probe.context.scene_of(probe, before, applied=True)
    _report(probe.context, judgement, laws, probe, scene, tensors)


def _report(
    context: Context,
    judgement: Judgement[Seen[object]],
    laws: Laws,
    probe: OptimizerProbe | None,
    scene: Scene,
    tensors: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Compare the values that differ tensor by tensor, then report. tensors: by clause, those that it compares."""
    exchange, verdicts, seen = context.exchange, context.verdicts, judgement.seen
    # Ranks at different points cannot be compared.
    if in_lockstep(seen.observations):
        details: dict[str, Mapping[str, Sequence[int]]] = {}
        for law in verdicts.live_laws(laws):
            for name in () if verdicts.is_reported(law.clause) else law.look:
                if name in seen.differing:
                    details.update(_details(context, name, seen.step, probe))
        judgement.seen = replace(seen, details=details)

    def locate(violation: Violation) -> Scene:
        """The scene with the first element that differs in the tensor of the finding. Collective."""
        # What only some ranks have (a gradient, an optimizer state) must not decide whether a rank takes part.
        named, name, key = tensors.get(violation.clause), violation.tensor, ""
        if violation.clause == "optimizers-agree" and scene.applied and probe is not None:
            named = _states_of(probe, name) if name in probe.parameters else {}
            digests = exchange.gather_digests(seen.step, "state", named)
            name = key = next((one for one, by_rank in digests.items() if len(set(by_rank)) > 1), "")
        if named is None:
            return scene
        noun = "gradient" if violation.clause == "gradients-agree" else "tensor"
        element = exchange.first_difference(seen.step, named.get(name), noun)
        return replace(scene, element=" ".join(filter(None, [key, element])))

    facts = {} if probe is None else {"ids": list(context.rows.ids)}
    verdicts.report_all(judgement, scene, locate, facts)


def _details(context: Context, name: str, step: int, probe: OptimizerProbe | None) -> Details:
    """The digests, by tensor and rank, of what the observed value `name` summarizes. Collective.

    probe: whose parameters are compared; None: those of the model.
    """
    subject, look, spread = context.subject, context.exchange.gather_digests, context.exchange.gather_named
    parameters = subject.parameters if probe is None else probe.parameters
    details: dict[str, Mapping[str, Sequence[int]]] = {}
    if name == "weights":
        details[name] = look(step, name, parameters)
    elif name == "layout":
        details[name] = spread(
            step, "tensors of layout", {n: trainable_layout_digest({"": p}) for n, p in parameters.items()}
        )
    elif name == "gradient":
        none = torch.empty(0, device="cpu")
        details[name] = look(step, name, {n: none if p.grad is None else p.grad for n, p in parameters.items()})
    elif name == "optimizer" and probe is not None:
        states = {n: state_digest(probe.optimizer.state.get(p, {})) for n, p in parameters.items()}
        details[name] = spread(step, "tensors of optimizer", states)
    elif name in ("buffers", "caches"):
        buffers = subject.buffers_by_name()
        details["buffers"] = look(step, "buffers", buffers)
        shapes = {n: layout_digest({"": buffer}) for n, buffer in buffers.items()}
        details["shapes of buffers"] = spread(step, "shapes of buffers", shapes)
    elif name == "modes":
        modes = {name or "the model": int(each.training) for name, each in subject.inner.named_modules()}
        return {name: spread(step, "modes of modules", modes)}
    elif name == "hyperparameters" and probe is not None:
        return {name: spread(step, name, hyperparameters_by_key(probe.optimizer))}
    return {each: context.replicas.align_tensors(digests) for each, digests in details.items()}


def bundle_tensors(context: Context, named: str) -> Iterator[tuple[str, Tensor]]:
    """The weights, gradient, optimizer state or buffer called `named` on this rank, then those of all that is trained.

    They are called `weights NAME`, `gradient NAME`, `optimizer NAME KEY`, `buffer NAME`. Gradients and buffers are
    left out if they belong to a later update than the finding.
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
    state = probe.optimizer.state.get(probe.parameters[name], {})
    return {str(key): plain(value) for key, value in state.items() if isinstance(value, Tensor)}
