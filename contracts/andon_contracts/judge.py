"""Pure clauses over what all ranks observed. Every rank judges the same tuple, so all raise or none does.

No function here communicates, reads a tensor or knows a trainer. A judge returns what it was given; its postconditions
are the clauses. icontract evaluates them from the function upwards, so that the one nearest to the function is the
first to be reported: whether the messages belong together at all, then causes before effects.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from andon_contracts.agree import Observation, real_of
from andon_contracts.policy import clause, ensure
from andon_contracts.violation import Finding

Observations = Sequence[Observation]
Details = Mapping[str, Mapping[str, Sequence[int]]]
"""Second looks after a mismatch: by what was observed, then by tensor, the digests by rank."""

V = TypeVar("V", bound=Hashable)


def majority(values: Sequence[V]) -> V:
    """The value that most ranks have; of several, that of the lowest rank. The same on all ranks that judge."""
    return Counter(values).most_common(1)[0][0]


def minority(values: Sequence[Hashable]) -> tuple[int, ...]:
    """The ranks that differ from the strict majority; none without one (as 1 against 1), where nobody can tell."""
    most = majority(values)
    odd = tuple(rank for rank, value in enumerate(values) if value != most)
    return odd if 2 * len(odd) < len(values) else ()


def _column(observations: Observations, name: str) -> list[int]:
    return [observation.values[name] for observation in observations]


def _equal(observations: Observations, name: str) -> bool:
    return all(o.values[name] == observations[0].values[name] for o in observations)


def _differing(details: Details, name: str) -> tuple[str, ...]:
    return tuple(tensor for tensor, digests in details.get(name, {}).items() if len(set(digests)) > 1)


def _difference(observations: Observations, names: Sequence[str], what: str, details: Details) -> Finding:
    name = next(n for n in names if n in observations[0].values and not _equal(observations, n))
    values = _column(observations, name)
    looked = details.get(name, {})
    tensors = _differing(details, name)
    shown = ", ".join(f"rank {rank}: {value % (1 << 64):016x}" for rank, value in enumerate(values))
    return Finding(
        seen=f"{what} ({shown})" + (f"; {len(tensors)} of {len(looked)} tensors differ" if tensors else ""),
        step=observations[0].step,
        ranks=minority(values),
        tensor=(*tensors, name)[0],
        details=tuple((t, " ".join(f"{d % (1 << 64):016x}" for d in looked[t])) for t in tensors),
    )


def _explain_lockstep(result: Observations) -> Finding:
    seen = [
        (o.step, o.sequence, o.point if o.names_match else "another point", o.rank == rank)
        for rank, o in enumerate(result)
    ]
    shown = ", ".join(
        f"rank {rank}: step {step} message {sequence} ({point})" + ("" if own else f" from rank {result[rank].rank}")
        for rank, (step, sequence, point, own) in enumerate(seen)
    )
    step = majority([o.step for o in result])
    return Finding(seen=f"the ranks are not at the same point: {shown}", step=step, ranks=minority(seen))


@clause("halt-together", _explain_lockstep)
def in_lockstep(result: Observations) -> bool:
    """All ranks sent the message of the same step, sequence number and point, and each rank sent its own."""
    first = result[0]
    return all(
        o.names_match and o.rank == rank and o.step == first.step and o.sequence == first.sequence
        for rank, o in enumerate(result)
    )


def _explain_weights(result: Observations, details: Details) -> Finding:
    return _difference(result, ["weights"], "the trainable weights are not the same on every rank", details)


@clause("replicas-agree", _explain_weights)
def replicas_agree(result: Observations, details: Details) -> bool:
    """Every rank's `weights` digest is the same."""
    return _equal(result, "weights")


def _explain_optimizers(result: Observations, details: Details) -> Finding:
    return _difference(result, ["updates", "optimizer"], "the optimizer states are not the same", details)


@clause("optimizers-agree", _explain_optimizers)
def optimizers_agree(result: Observations, details: Details) -> bool:
    """Every rank's `optimizer` digest and count of `updates` are the same."""
    return _equal(result, "optimizer") and _equal(result, "updates")


def _explain_gradients(result: Observations, details: Details) -> Finding:
    return _difference(result, ["gradient"], "the reduced gradients are not the same", details)


@clause("gradients-agree", _explain_gradients)
def gradients_agree(result: Observations, details: Details) -> bool:
    """Every rank's `gradient` digest is the same."""
    return _equal(result, "gradient")


def _explain_unmoved(result: Observations, details: Details, expected_weights: int | None) -> Finding:
    if expected_weights is None:
        return _difference(result, ["weights"], "the weights before the update are not the same", details)
    moved = tuple(o.rank for o in result if o.values["weights"] != expected_weights)
    return Finding(
        seen=f"the weights are not those that the last update left (digest {expected_weights % (1 << 64):016x}); "
        "something outside the step changed them",
        step=result[0].step,
        ranks=moved,
        tensor=(*_differing(details, "weights"), "weights")[0],
    )


@clause("replicas-agree", _explain_unmoved)
def weights_unmoved(result: Observations, details: Details, expected_weights: int | None) -> bool:
    """Before an update all ranks have the weights that the last one left; None: those that most ranks have."""
    if expected_weights is None:
        return _equal(result, "weights")
    return all(o.values["weights"] == expected_weights for o in result)


def _explain_finite(result: Observations) -> Finding:
    ranks = tuple(o.rank for o in result if o.values["nonfinite"] or not math.isfinite(real_of(o.values["norm"])))
    norm = real_of(result[0].values["norm"])
    return Finding(
        seen=f"the reduced gradient or its norm ({norm}) is not finite although every part was",
        step=result[0].step,
        ranks=ranks if len(ranks) < len(result) else (),
        tensor="reduced gradient",
    )


@clause("finite", _explain_finite)
def reduced_finite(result: Observations) -> bool:
    """The reduced gradient and its norm are finite on every rank."""
    return all(not o.values["nonfinite"] and math.isfinite(real_of(o.values["norm"])) for o in result)


def _not_clipped(observations: Observations, limit: float | None) -> list[Observation]:
    norm = real_of(majority(_column(observations, "norm")))
    # The law of torch.nn.utils.clip_grad_norm_, whose 1e-6 counts where the limit is small.
    wanted = norm if limit is None else norm * min(1.0, limit / (norm + 1e-6))
    close = 1e-4 * wanted + 1e-30
    return [o for o in observations if not abs(real_of(o.values["clipped"]) - wanted) <= close]


def _explain_clip(result: Observations, limit: float | None) -> Finding:
    odd = _not_clipped(result, limit)
    shown = ", ".join(
        f"rank {o.rank}: {real_of(o.values['clipped'])!r} from {real_of(o.values['norm'])!r}" for o in odd
    )
    return Finding(
        seen=f"the norm after clipping is not what one clipping to {limit} gives ({shown})",
        step=result[0].step,
        ranks=tuple(o.rank for o in odd),
        tensor="clipped gradient",
    )


@clause("clip-once", _explain_clip)
def clipped_once(result: Observations, limit: float | None) -> bool:
    """On every rank the norm after clipping is what one clipping of `norm` gives, up to fp32 rounding."""
    return not _not_clipped(result, limit)


def _explain_rate(result: Observations) -> Finding:
    plans = _column(result, "planned")
    planned = majority(plans)
    odd = tuple(o.rank for o in result if o.values["rate"] != planned)
    shown = ", ".join(f"rank {o.rank}: {real_of(o.values['rate'])!r}" for o in result if o.rank in odd)
    certain = plans.count(planned) * 2 > len(plans)
    return Finding(
        seen=f"the learning rate is not the schedule's {real_of(planned)!r} ({shown})",
        step=result[0].step,
        ranks=odd if certain else (),
        tensor="learning rate",
    )


@clause("learning-rate-planned", _explain_rate)
def rate_planned(result: Observations) -> bool:
    """Every rank's optimizer holds the `rate` that is `planned` (most ranks' schedule), compared as 64 bits."""
    planned = majority(_column(result, "planned"))
    return all(o.values["rate"] == planned for o in result)


def _explain_updates(result: Observations, planned_updates: int) -> Finding:
    shown = ", ".join(f"rank {o.rank}: {o.values['updates']}" for o in result)
    return Finding(
        seen=f"{planned_updates} updates were due, taken were {shown}",
        step=result[0].step,
        ranks=tuple(o.rank for o in result if o.values["updates"] != planned_updates),
        tensor="count of updates",
    )


@clause("one-update", _explain_updates)
def one_update(result: Observations, planned_updates: int) -> bool:
    """Every rank's optimizer has taken exactly the planned number of updates."""
    return all(o.values["updates"] == planned_updates for o in result)


def _explain_base(result: Observations, details: Details, expected_base: int) -> Finding:
    ranks = tuple(o.rank for o in result if o.values["base"] != expected_base)
    tensor = (*_differing(details, "base"), "base")[0]
    return Finding(seen="a frozen weight or buffer changed", step=result[0].step, ranks=ranks, tensor=tensor)


@clause("base-frozen", _explain_base)
def base_frozen(result: Observations, details: Details, expected_base: int) -> bool:
    """Every rank's digest of frozen weights and buffers is still the one of the start."""
    return all(o.values["base"] == expected_base for o in result)


def _explain_layout(result: Observations) -> Finding:
    return _difference(result, ["layout"], "the trainable tensors differ in name, shape, dtype or order", {})


@clause("layout-equal", _explain_layout)
def layouts_equal(result: Observations) -> bool:
    """Every rank trains tensors of the same names, shapes, dtypes, in the same order."""
    return _equal(result, "layout")


def _explain_start(result: Observations) -> Finding:
    names = [name for name in result[0].values if not _equal(result, name)]
    return _difference(result, names, f"the ranks start from different {', '.join(names)}", {})


@clause("start-agrees", _explain_start)
def starts_agree(result: Observations) -> bool:
    """Whatever the ranks observed of their start is the same on all of them."""
    return all(_equal(result, name) for name in result[0].values)


@ensure(starts_agree)
@ensure(layouts_equal)
@ensure(in_lockstep)
def judge_start(observations: Observations) -> Observations:
    """Before step 1: same layout, same everything that was observed. Raises `Violation`."""
    return observations


@ensure(clipped_once)
@ensure(reduced_finite)
@ensure(gradients_agree)
@ensure(weights_unmoved)
@ensure(rate_planned)
@ensure(in_lockstep)
def judge_reduced(
    observations: Observations, details: Details, expected_weights: int | None, limit: float | None
) -> Observations:
    """Before the update: same finite gradient, clipped once, weights as the last update left them. Raises `Violation`.

    limit: the norm to which the gradient was to be clipped; None: it was not.
    """
    return observations


# An update too many moves moments and weights, wrong moments move weights: the cause is judged before its effects.
@ensure(replicas_agree)
@ensure(optimizers_agree)
@ensure(one_update)
@ensure(in_lockstep)
def judge_update(observations: Observations, details: Details, planned_updates: int) -> Observations:
    """After the update: same weights, same moments, one update more. Raises `Violation`."""
    return observations


@ensure(base_frozen)
@ensure(in_lockstep)
def judge_base(observations: Observations, details: Details, expected_base: int) -> Observations:
    """Now and then: the base is what it was. Raises `Violation`."""
    return observations
