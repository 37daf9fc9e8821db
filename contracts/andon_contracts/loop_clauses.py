"""The clauses that anyone's training loop can be held to: pure functions over what all ranks observed of a step.

One judge holds one clause, so that a clause that a user silenced hides no other. The names of the values are those
that `watch` observes; an index travels as its number plus one, and 0 says that there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from andon_contracts import judge
from andon_contracts.agree import real_of
from andon_contracts.judge import Details, Observations, minority
from andon_contracts.policy import clause, ensure
from andon_contracts.violation import Finding

Names = Sequence[str]
Judge = Callable[[Observations, Details, Names], Observations]

CHANGES = (
    "kept",
    "replaced by another parameter",
    "frozen or unfrozen",
    "added, or another one was removed",
    "trainable but not in the optimizer",
    "in the optimizer but not a trainable parameter of the model",
    "trainable, which was not declared",
    "declared trainable but frozen",
    "no longer tied to the tensor that it was declared to share",
)
"""What can have happened to a parameter, by code."""

PARAMETER_BITS = 32
OTHER_SHAPES = "have not the same shapes on all ranks"


def change_of(code: int, index: int) -> int:
    """A code of `CHANGES` and the index of the parameter, as one integer."""
    return code << PARAMETER_BITS | index


def column(result: Observations, name: str) -> list[int]:
    """The value `name` of each rank, by rank."""
    return [observation.values[name] for observation in result]


def same(result: Observations, name: str) -> bool:
    """Whether all ranks have one value for `name`."""
    return len(set(column(result, name))) == 1


def _ranks_with(result: Observations, name: str) -> tuple[int, ...]:
    ranks = tuple(o.rank for o in result if o.values[name])
    return ranks if len(ranks) < len(result) or len(result) == 1 else ()


def _named(names: Names, index: int) -> str:
    return names[index] if 0 <= index < len(names) else f"parameter {index}"


def _indexed(result: Observations, name: str, names: Names, seen: str) -> Finding:
    first = next(o.values[name] for o in result if o.values[name])
    tensor = _named(names, first - 1)
    return Finding(seen=f"{tensor} {seen}", step=result[0].step, ranks=_ranks_with(result, name), tensor=tensor)


def _differs(result: Observations, name: str, seen: str, *, real: bool = False) -> Finding:
    values = column(result, name)
    shown = ", ".join(
        f"rank {rank}: {real_of(v)!r}" if real else f"rank {rank}: {v % (1 << 64):016x}"
        for rank, v in enumerate(values)
    )
    return Finding(seen=f"{seen} ({shown})", step=result[0].step, ranks=minority(values), tensor=name)


def _explain_kept(result: Observations, names: Names) -> Finding:
    if any(column(result, "change")):
        first = next(v for v in column(result, "change") if v)
        code, index = first >> PARAMETER_BITS, first & ((1 << PARAMETER_BITS) - 1)
        tensor = _named(names, index)
        ranks = _ranks_with(result, "change")
        return Finding(seen=f"{tensor} is {CHANGES[code]}", step=result[0].step, ranks=ranks, tensor=tensor)
    return _differs(result, "layout", "the trainable tensors differ in name, shape, dtype or order")


@clause("parameters-kept", _explain_kept)
def parameters_kept(result: Observations, names: Names) -> bool:
    """No rank saw a change of the set of parameters, and all ranks have one layout."""
    return not any(column(result, "change")) and same(result, "layout")


def _explain_hyper(result: Observations, details: Details) -> Finding:
    if not same(result, "rate"):
        return _differs(result, "rate", "the learning rates are not the same", real=True)
    odd = [key for key, digests in details.get("hyperparameters", {}).items() if len(set(digests)) > 1]
    named = f": {', '.join(odd[:4])}" if odd else ""
    return _differs(result, "hyperparameters", f"the hyperparameters of the optimizers are not the same{named}")


@clause("hyperparameters-agree", _explain_hyper)
def hyperparameters_agree(result: Observations, details: Details) -> bool:
    """Every rank's digest of hyperparameters, and the learning rate among them, is the same."""
    return same(result, "hyperparameters") and same(result, "rate")


def _explain_planned_rate(result: Observations) -> Finding:
    odd = [o for o in result if not _close(o.values["rate"], o.values["planned"])]
    shown = ", ".join(
        f"rank {o.rank}: {real_of(o.values['rate'])!r}, not {real_of(o.values['planned'])!r}" for o in odd
    )
    ranks = tuple(o.rank for o in odd)
    return Finding(
        seen=f"the learning rate is not the schedule's ({shown})",
        step=result[0].step,
        ranks=ranks if len(ranks) < len(result) else (),
        tensor="learning rate",
    )


def _close(found: int, wanted: int) -> bool:
    # A schedule that is written twice may round differently in its last bits.
    return math.isclose(real_of(found), real_of(wanted), rel_tol=1e-9, abs_tol=1e-15)


@clause("learning-rate-planned", _explain_planned_rate)
def loop_rate_planned(result: Observations) -> bool:
    """Every rank's learning rate is what the declared schedule gives for this update."""
    return all(_close(o.values["rate"], o.values["planned"]) for o in result)


def _explain_groups(result: Observations, names: Names) -> Finding:
    return _indexed(result, "ungrouped", names, "has not the hyperparameters that were declared for its name")


@clause("groups-planned", _explain_groups)
def groups_planned(result: Observations, names: Names) -> bool:
    """On no rank is a parameter in a group with other values than those declared for its name."""
    return not any(column(result, "ungrouped"))


def _explain_modes(result: Observations) -> Finding:
    return _differs(result, "modes", "some modules are in training mode on some ranks and in evaluation mode on others")


@clause("modes-agree", _explain_modes)
def modes_agree(result: Observations) -> bool:
    """Every rank's digest of the modules' modes is the same."""
    return same(result, "modes")


_OTHER_BUFFERS = "the buffers with which the forward pass began are not the same"


def _explain_buffers(result: Observations, details: Details) -> Finding:
    looked = details.get("buffers", {})
    odd = [name for name, digests in looked.items() if len(set(digests)) > 1]
    reshaped = [name for name, layouts in details.get("shapes of buffers", {}).items() if len(set(layouts)) > 1]
    seen = f"the buffers with which the forward pass began {OTHER_SHAPES}" if reshaped else _OTHER_BUFFERS
    odd = reshaped or odd
    found = _differs(result, "buffers", seen)
    # What a forward pass begins with is what the update before it left.
    return Finding(found.seen, max(found.step - 1, 0), found.ranks, (*odd, "buffers")[0])


@clause("buffers-agree", _explain_buffers)
def buffers_agree(result: Observations, details: Details) -> bool:
    """All ranks that had a forward pass began the first one of the step with the same digest of buffers."""
    return len({value for value in column(result, "buffers") if value}) <= 1


def _explain_raw(result: Observations, names: Names) -> Finding:
    found = _indexed(result, "nonfinite", names, "has a raw local gradient that is not finite")
    if any(o.values["repaired"] for o in result):
        return Finding(
            f"{found.seen}, and it was made finite before it was used", found.step, found.ranks, found.tensor
        )
    return found


@clause("finite", _explain_raw)
def raw_finite(result: Observations, names: Names) -> bool:
    """On every rank the raw gradient of every backward pass is finite, and so is its norm."""
    return not any(column(result, "nonfinite"))


def _explain_norm(result: Observations) -> Finding:
    shown = ", ".join(f"rank {o.rank}: {real_of(o.values['norm'])!r}" for o in result)
    ranks = tuple(o.rank for o in result if not math.isfinite(real_of(o.values["norm"])))
    return Finding(
        seen=f"the norm of the gradient is not finite ({shown}); clipping by it gives zero or NaN",
        step=result[0].step,
        ranks=ranks if len(ranks) < len(result) else (),
        tensor="gradient",
    )


@clause("finite", _explain_norm)
def norm_finite(result: Observations) -> bool:
    """The norm of the whole gradient, before clipping where that was seen, is finite on every rank."""
    return all(math.isfinite(real_of(o.values["norm"])) for o in result)


def _explain_collectives(result: Observations, names: Names) -> Finding:
    if any(column(result, "strided")):
        return _indexed(result, "strided", names, "was given to a collective although it is not contiguous in memory")
    return _differs(result, "collectives", "the ranks reduced different tensors, or in a different order")


@clause("collectives-agree", _explain_collectives)
def collectives_agree(result: Observations, names: Names) -> bool:
    """Every rank reduced the same tensors in the same order, and all of them contiguous."""
    return not any(column(result, "strided")) and same(result, "collectives")


def _explain_stale(result: Observations, names: Names) -> Finding:
    return _indexed(result, "stale", names, "still had a gradient of the step before when this one began")


@clause("gradient-fresh", _explain_stale)
def gradient_fresh(result: Observations, names: Names) -> bool:
    """On no rank did a gradient other than zero stand where this step's was to be accumulated."""
    return not any(column(result, "stale"))


def _explain_missing(result: Observations, names: Names) -> Finding:
    return _indexed(result, "missing", names, "has had no gradient, or none but zero, since the start")


@clause("gradient-present", _explain_missing)
def gradient_present(result: Observations, names: Names) -> bool:
    """On no rank is there a trainable parameter that never got a gradient."""
    return not any(column(result, "missing"))


def _explain_scaler(result: Observations) -> Finding:
    return _differs(result, "scale", "the loss scales are not the same", real=True)


@clause("scaler-agrees", _explain_scaler)
def scaler_agrees(result: Observations) -> bool:
    """Every rank has the same loss scale."""
    return same(result, "scale")


def _explain_unmoved(result: Observations, names: Names) -> Finding:
    return _indexed(result, "unmoved", names, "kept every bit although its gradient and learning rate are not zero")


@clause("update-applied", _explain_unmoved)
def update_applied(result: Observations, names: Names) -> bool:
    """On no rank did the update leave a parameter with a gradient and a learning rate as it was."""
    return not any(column(result, "unmoved"))


def _explain_frozen(result: Observations, details: Details) -> Finding:
    ranks = tuple(o.rank for o in result if o.values["base"] != o.values["first base"])
    alone = len(result) == 1
    odd = [name for name, digests in details.get("base", {}).items() if len(set(digests)) > 1]
    return Finding(
        seen="a frozen weight changed" + ", read once more at the close" * (result[0].point == "close"),
        step=result[0].step,
        ranks=ranks if len(ranks) < len(result) or alone else (),
        tensor=(*odd, "frozen weights")[0],
    )


@clause("base-frozen", _explain_frozen)
def loop_base_frozen(result: Observations, details: Details) -> bool:
    """Every rank's digest of the frozen weights is the one that it had at the start."""
    return all(o.values["base"] == o.values["first base"] for o in result)


def _explain_precision(result: Observations, names: Names) -> Finding:
    return _indexed(
        result, "imprecise", names, "is trained in 16 bits: an update below half a unit in the last place is lost"
    )


@clause("precision-sufficient", _explain_precision)
def precision_sufficient(result: Observations, names: Names) -> bool:
    """No rank trains a tensor of 16 bits."""
    return not any(column(result, "imprecise"))


@ensure(judge.in_lockstep)
def judge_lockstep(observations: Observations, details: Details, names: Names) -> Observations:
    """All ranks are at the same step and point. Raises `Violation`."""
    return observations


@ensure(judge.replicas_agree)
def judge_weights(observations: Observations, details: Details, names: Names) -> Observations:
    """The same trainable weights on every rank. Raises `Violation`."""
    return observations


@ensure(judge.gradients_agree)
def judge_gradients(observations: Observations, details: Details, names: Names) -> Observations:
    """The same reduced gradient on every rank. Raises `Violation`."""
    return observations


@ensure(judge.optimizers_agree)
def judge_optimizers(observations: Observations, details: Details, names: Names) -> Observations:
    """The same optimizer state and number of updates on every rank. Raises `Violation`."""
    return observations


@ensure(parameters_kept)
def judge_parameters(observations: Observations, details: Details, names: Names) -> Observations:
    """The parameters of the start, in the optimizer. Raises `Violation`."""
    return observations


@ensure(hyperparameters_agree)
def judge_hyperparameters(observations: Observations, details: Details, names: Names) -> Observations:
    """One set of hyperparameters. Raises `Violation`."""
    return observations


@ensure(loop_rate_planned)
def judge_rate(observations: Observations, details: Details, names: Names) -> Observations:
    """The schedule's learning rate. Raises `Violation`."""
    return observations


@ensure(groups_planned)
def judge_groups(observations: Observations, details: Details, names: Names) -> Observations:
    """The declared groups. Raises `Violation`."""
    return observations


@ensure(modes_agree)
def judge_modes(observations: Observations, details: Details, names: Names) -> Observations:
    """One mode of every module. Raises `Violation`."""
    return observations


@ensure(buffers_agree)
def judge_buffers(observations: Observations, details: Details, names: Names) -> Observations:
    """The same buffers before the forward pass. Raises `Violation`."""
    return observations


@ensure(raw_finite)
def judge_raw(observations: Observations, details: Details, names: Names) -> Observations:
    """Finite raw gradients. Raises `Violation`."""
    return observations


@ensure(norm_finite)
def judge_norm(observations: Observations, details: Details, names: Names) -> Observations:
    """A finite norm. Raises `Violation`."""
    return observations


@ensure(collectives_agree)
def judge_collectives(observations: Observations, details: Details, names: Names) -> Observations:
    """The same reductions. Raises `Violation`."""
    return observations


@ensure(gradient_fresh)
def judge_fresh(observations: Observations, details: Details, names: Names) -> Observations:
    """Nothing left over. Raises `Violation`."""
    return observations


@ensure(gradient_present)
def judge_present(observations: Observations, details: Details, names: Names) -> Observations:
    """A gradient for every parameter. Raises `Violation`."""
    return observations


@ensure(scaler_agrees)
def judge_scaler(observations: Observations, details: Details, names: Names) -> Observations:
    """One loss scale. Raises `Violation`."""
    return observations


@ensure(update_applied)
def judge_applied(observations: Observations, details: Details, names: Names) -> Observations:
    """The update moved what it had to. Raises `Violation`."""
    return observations


@ensure(loop_base_frozen)
def judge_frozen(observations: Observations, details: Details, names: Names) -> Observations:
    """The frozen weights of the start. Raises `Violation`."""
    return observations


@ensure(precision_sufficient)
def judge_precision(observations: Observations, details: Details, names: Names) -> Observations:
    """Enough bits to train in. Raises `Violation`."""
    return observations
