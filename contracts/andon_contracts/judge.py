"""Pure clauses over what all ranks observed. Every rank judges the same tuple, so all raise or none does.

No function here communicates, reads a tensor or knows a trainer. A judge returns what it was given; its postconditions
are the clauses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from andon_contracts.agree import Observation, real_of
from andon_contracts.policy import clause, ensure, require
from andon_contracts.violation import Finding

Observations = Sequence[Observation]
Details = Mapping[str, Sequence[int]]
"""A second look after a mismatch: for each tensor the digests by rank."""


def minority(values: Sequence[int]) -> tuple[int, ...]:
    """The ranks that differ from the strict majority; without one (as 1 against 1) all ranks."""
    most, count = Counter(values).most_common(1)[0]
    if count * 2 <= len(values):
        return tuple(range(len(values)))
    return tuple(rank for rank, value in enumerate(values) if value != most)


def _column(observations: Observations, name: str) -> list[int]:
    return [observation.values[name] for observation in observations]


def _equal(observations: Observations, name: str) -> bool:
    return all(o.values[name] == observations[0].values[name] for o in observations)


def _difference(observations: Observations, names: Sequence[str], what: str, details: Details) -> Finding:
    name = next(n for n in names if n in observations[0].values and not _equal(observations, n))
    values = _column(observations, name)
    ranks = minority(values)
    tensors = tuple(t for t, digests in details.items() if len(set(digests)) > 1)
    shown = ", ".join(f"rank {rank}: {value % (1 << 64):016x}" for rank, value in enumerate(values))
    who = f"ranks {', '.join(map(str, ranks))} differ" if len(ranks) > 1 else f"rank {ranks[0]} differs from the others"
    return Finding(
        seen=f"{what}: {who} ({shown})" + (f"; {len(tensors)} of {len(details)} tensors differ" if tensors else ""),
        step=observations[0].step,
        ranks=ranks if len(ranks) < len(values) else (),
        tensor=tensors[0] if tensors else name,
        details=tuple((t, " ".join(f"{d % (1 << 64):016x}" for d in details[t])) for t in tensors),
    )


def _explain_lockstep(result: Observations) -> Finding:
    seen = [(o.step, o.sequence, o.point if o.names_match else "another point") for o in result]
    odd = minority([hash(s) for s in seen])
    shown = ", ".join(f"rank {i}: step {s} message {q} ({p})" for i, (s, q, p) in enumerate(seen))
    return Finding(seen=f"the ranks are not at the same point: {shown}", step=result[0].step, ranks=odd)


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


def _explain_unmoved(result: Observations, expected_weights: int) -> Finding:
    moved = tuple(o.rank for o in result if o.values["weights"] != expected_weights)
    return Finding(
        seen=f"the weights are not those that the last update left (digest {expected_weights % (1 << 64):016x}); "
        "something outside the step changed them",
        step=result[0].step,
        ranks=moved,
        tensor="weights",
    )


@clause("replicas-agree", _explain_unmoved)
def weights_unmoved(result: Observations, expected_weights: int) -> bool:
    """Between two updates nothing changed any rank's weights."""
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


def _explain_clip(norm: float, clipped_norm: float, limit: float | None, step: int) -> Finding:
    return Finding(
        seen=f"after clipping, the norm is {clipped_norm!r}, before it {norm!r}, with the limit {limit}",
        step=step,
        tensor="clipped gradient",
    )


@clause("clip-once", _explain_clip)
def clipped_to_limit(norm: float, clipped_norm: float, limit: float | None, step: int) -> bool:
    """The norm after clipping is that of min(norm, limit), up to fp32 rounding."""
    wanted = norm if limit is None else min(norm, limit)
    return abs(clipped_norm - wanted) <= 1e-4 * wanted + 1e-30


def _explain_rate(result: Observations, planned_rate: int) -> Finding:
    odd = [o for o in result if o.values["rate"] != planned_rate]
    shown = ", ".join(f"rank {o.rank}: {real_of(o.values['rate'])!r}" for o in odd)
    return Finding(
        seen=f"the learning rate is not the schedule's {real_of(planned_rate)!r} ({shown})",
        step=result[0].step,
        ranks=tuple(o.rank for o in odd) if len(odd) < len(result) else (),
        tensor="learning rate",
    )


@clause("learning-rate-planned", _explain_rate)
def rate_planned(result: Observations, planned_rate: int) -> bool:
    """Every rank's optimizer was given the schedule's learning rate (compared as 64 bits)."""
    return all(o.values["rate"] == planned_rate for o in result)


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


def _explain_base(result: Observations, expected_base: int) -> Finding:
    ranks = tuple(o.rank for o in result if o.values["base"] != expected_base)
    return Finding(seen="a frozen weight or buffer changed", step=result[0].step, ranks=ranks, tensor="base")


@clause("base-frozen", _explain_base)
def base_frozen(result: Observations, expected_base: int) -> bool:
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


@ensure(reduced_finite)
@ensure(gradients_agree)
@ensure(weights_unmoved)
@ensure(rate_planned)
@ensure(in_lockstep)
def judge_reduced(
    observations: Observations, details: Details, expected_weights: int, planned_rate: int
) -> Observations:
    """Before the update: same finite gradient, weights as the last update left them. Raises `Violation`."""
    return observations


@require(clipped_to_limit)
def judge_clip(norm: float, clipped_norm: float, limit: float | None, step: int) -> None:
    """After clipping: the norm is what one clipping of `norm` gives. Raises `Violation`."""


@ensure(one_update)
@ensure(optimizers_agree)
@ensure(replicas_agree)
@ensure(in_lockstep)
def judge_update(observations: Observations, details: Details, planned_updates: int) -> Observations:
    """After the update: same weights, same moments, one update more. Raises `Violation`."""
    return observations


@ensure(base_frozen)
@ensure(in_lockstep)
def judge_base(observations: Observations, expected_base: int) -> Observations:
    """Now and then: the base is what it was. Raises `Violation`."""
    return observations
