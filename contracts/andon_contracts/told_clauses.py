"""The clauses that need to be told something: which rows, which loss, which law of the gradient, which randomness.

Pure functions over what all ranks observed, as in `loop_clauses`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from andon_contracts.agree import real_of
from andon_contracts.judge import Details, Observations, majority, minority
from andon_contracts.loop_clauses import Names, column, same
from andon_contracts.policy import clause, ensure
from andon_contracts.violation import Finding

STREAMS = 4
"""How many random streams can be declared."""


@dataclass(frozen=True)
class BatchTold:
    """The rows of one update as all ranks told them, and what they were to be.

    `ids` and `contents` by rank; `planned` the ids of the plan (None: no plan); `epoch` the rows that the present
    epoch has had, of `rows` (None: unknown); `expected` the content of each id (empty: unknown).
    """

    step: int
    ids: tuple[tuple[int, ...], ...]
    contents: tuple[tuple[int, ...], ...]
    planned: tuple[int, ...] | None = None
    epoch: frozenset[int] = frozenset()
    rows: int | None = None
    expected: Mapping[int, int] | None = None

    def union(self) -> list[int]:
        """All ids, in order of rank."""
        return [row for part in self.ids for row in part]


def _rows_fault(told: BatchTold) -> tuple[str, tuple[int, ...]]:
    """What is wrong with the ids, and on which ranks; empty where nothing is."""
    union = Counter(told.union())

    def holders(rows: Sequence[int]) -> tuple[int, ...]:
        found = tuple(rank for rank, part in enumerate(told.ids) if set(part) & set(rows))
        return found if len(found) < len(told.ids) else ()

    repeated = [row for row, count in union.items() if count > 1]
    if repeated:
        return f"rows {repeated[:8]} were used more than once", holders(repeated)
    if told.planned is not None and union != Counter(told.planned):
        extra, lacking = sorted(union - Counter(told.planned)), sorted(Counter(told.planned) - union)
        return f"rows {lacking[:8]} were planned and not used, rows {extra[:8]} used and not planned", holders(extra)
    if told.rows is None:
        return "", ()
    outside = [row for row in union if row >= told.rows]
    again = [row for row in union if row in told.epoch]
    if outside:
        return f"rows {outside[:8]} are none of the {told.rows}", holders(outside)
    if again:
        return (
            f"rows {again[:8]} came again when {told.rows - len(told.epoch)} rows of the epoch had not come",
            holders(again),
        )
    return "", ()


def _explain_rows(told: BatchTold) -> Finding:
    seen, ranks = _rows_fault(told)
    return Finding(seen, told.step, ranks, "global batch")


@clause("samples-once", _explain_rows)
def rows_once(told: BatchTold) -> bool:
    """The union of the ranks' rows is the planned batch, or at least has each row once, also within its epoch."""
    return not _rows_fault(told)[0]


def _odd_contents(told: BatchTold) -> list[tuple[int, int]]:
    expected = told.expected or {}
    return [
        (rank, row)
        for rank, (ids, contents) in enumerate(zip(told.ids, told.contents, strict=True))
        for row, content in zip(ids, contents, strict=False)
        if expected.get(row, content) != content
    ]


def _explain_content(told: BatchTold) -> Finding:
    odd = _odd_contents(told)
    ranks = tuple(sorted({rank for rank, _ in odd}))
    shown = [row for _, row in odd][:8]
    return Finding(
        f"rows {shown} had other contents than the data set has for them",
        told.step,
        ranks if len(ranks) < len(told.ids) else (),
        f"row {odd[0][1]}",
    )


@clause("content-planned", _explain_content)
def told_content_planned(told: BatchTold) -> bool:
    """Every row had the content that the data set has for its id."""
    return not _odd_contents(told)


@ensure(told_content_planned)
def judge_contents(told: BatchTold) -> BatchTold:
    """Rows have the contents of their ids. Raises `Violation`."""
    return told


@ensure(rows_once)
def judge_rows(told: BatchTold) -> BatchTold:
    """Each planned row once. Raises `Violation`."""
    return told


def _explain_data(result: Observations) -> Finding:
    values = column(result, "data")
    return Finding(
        "the ranks' data sets have different contents for the rows of this batch",
        result[0].step,
        minority(values),
        "data set",
    )


@clause("content-planned", _explain_data)
def data_sets_agree(result: Observations) -> bool:
    """Every rank's data set has the same contents for the rows of the batch."""
    return len(set(column(result, "data"))) == 1


@ensure(data_sets_agree)
def judge_data(observations: Observations, details: Details, names: Names) -> Observations:
    """One data set on all ranks. Raises `Violation`."""
    return observations


_NORM_TOLERANCE = 1e-3
"""Norms that are further apart, as a part of the larger, are not rounded from one."""


def _wanted_norm(norm: float, limit: float) -> float:
    # The law of torch.nn.utils.clip_grad_norm_, whose 1e-6 counts where the limit is small.
    return norm * min(1.0, limit / (norm + 1e-6))


def _not_clipped(result: Observations) -> list[int]:
    odd = []
    for o in result:
        wanted = _wanted_norm(real_of(o.values["norm"]), real_of(o.values["limit"]))
        if not abs(real_of(o.values["clipped"]) - wanted) <= _NORM_TOLERANCE * wanted + 1e-30:
            odd.append(o.rank)
    return odd


def _clipped_apart(result: Observations) -> bool:
    """Whether ranks clipped by different norms. A reduced gradient has one: what they clipped was not reduced yet."""
    norms = [real_of(o.values["norm"]) for o in result]
    # Ranks whose reduced gradient has other bits are no matter of clipping; a norm that is not finite is none either.
    return same(result, "gradient") and max(norms) - min(norms) > _NORM_TOLERANCE * max(norms)


def _explain_clip(result: Observations) -> Finding:
    odd = _not_clipped(result)
    if not odd:
        norms = ", ".join(f"rank {o.rank}: {real_of(o.values['norm']):.6g}" for o in result)
        return Finding(
            f"the ranks clipped by different norms ({norms}): each its own gradient, before the reduction",
            result[0].step,
            (),
            "clipped gradient",
        )
    first = result[odd[0]].values
    norm, limit, found = (real_of(first[name]) for name in ("norm", "limit", "clipped"))
    return Finding(
        f"the gradient had norm {norm:.6g}; clipped once to {limit:g} it has {_wanted_norm(norm, limit):.6g}, "
        f"the optimizer got {found:.6g}",
        result[0].step,
        tuple(odd) if len(odd) < len(result) else (),
        "clipped gradient",
    )


@clause("clip-once", _explain_clip)
def loop_clipped_once(result: Observations) -> bool:
    """On every rank the norm that the optimizer got is what one clipping of the reduced gradient gives, the same norm
    on all.
    """
    return not _not_clipped(result) and not _clipped_apart(result)


@ensure(loop_clipped_once)
def judge_clip(observations: Observations, details: Details, names: Names) -> Observations:
    """Clipped once, after the reduction. Raises `Violation`."""
    return observations


def _mean_loss(result: Observations) -> float:
    rows = sum(column(result, "loss rows"))
    return sum(real_of(v) for v in column(result, "loss sum")) / max(rows, 1)


def _wrong_reports(result: Observations) -> list[int]:
    mean = _mean_loss(result)
    return [
        o.rank
        for o in result
        if o.values["reports"] and not math.isclose(real_of(o.values["reported"]), mean, rel_tol=1e-4, abs_tol=1e-7)
    ]


def _explain_loss(result: Observations) -> Finding:
    odd = _wrong_reports(result)
    value = real_of(result[odd[0]].values["reported"])
    return Finding(
        f"the loss reported is {value!r}, the mean over the rows of all ranks is {_mean_loss(result)!r}",
        result[0].step,
        tuple(odd) if len(odd) < len(result) else (),
        "loss",
    )


@clause("loss-reported", _explain_loss)
def loss_reported(result: Observations) -> bool:
    """Every loss that was reported is the mean over the rows of all ranks."""
    return not _wrong_reports(result)


@ensure(loss_reported)
def judge_loss(observations: Observations, details: Details, names: Names) -> Observations:
    """The reported loss is the global mean. Raises `Violation`."""
    return observations


def _odd_stream(result: Observations) -> int | None:
    for stream in range(STREAMS):
        declared = column(result, f"stream {stream} must")
        if not any(declared):
            continue
        must, values = majority(declared), column(result, f"stream {stream}")
        if (must == 1 and len(set(values)) > 1) or (must == 2 and len(set(values)) < len(values)):
            return stream
    return None


def _explain_streams(result: Observations) -> Finding:
    stream = _odd_stream(result) or 0
    values = column(result, f"stream {stream}")
    if majority(column(result, f"stream {stream} must")) == 1:
        return Finding(
            "the ranks have different states of it, and must agree",
            result[0].step,
            minority(values),
            f"stream {stream}",
        )
    same = tuple(rank for rank, value in enumerate(values) if values.count(value) > 1)
    return Finding(
        f"ranks {list(same)} have the same state of it, and must differ", result[0].step, (), f"stream {stream}"
    )


@clause("randomness-declared", _explain_streams)
def streams_as_declared(result: Observations) -> bool:
    """Streams that must differ between ranks differ between any two, streams that must agree agree on all."""
    return _odd_stream(result) is None


@ensure(streams_as_declared)
def judge_streams(observations: Observations, details: Details, names: Names) -> Observations:
    """Randomness as declared. Raises `Violation`."""
    return observations


RATIO_TOLERANCE = 1e-3
_LONGEST_WINDOW = 64
"""Micro-batches of an update; with more, a quotient fits by chance."""


def name_ratio(ratio: float, world: int, micro_batches: int) -> str:
    """A factor in words, with everything that gives it: `= world size 2`, `= 1 / world size 2 or 1 of 2 micro-batches`.

    A window of `micro_batches` that is divided as one of more gives their quotient, whatever the world size.
    """
    factors = {
        "world size": world,
        "accumulation": micro_batches,
        "accumulation x world size": world * micro_batches if min(world, micro_batches) > 1 else 1,
        "world size squared": world**2,
    }
    named = list[str]()
    for word, value in factors.items():
        if value > 1 and math.isclose(ratio, value, rel_tol=RATIO_TOLERANCE):
            named.append(f"{word} {value}")
        if value > 1 and math.isclose(ratio, 1 / value, rel_tol=RATIO_TOLERANCE):
            named.append(f"1 / {word} {value}")
    full = round(micro_batches / ratio) if 0 < ratio < 1 else 0
    if micro_batches < full <= _LONGEST_WINDOW and math.isclose(ratio, micro_batches / full, rel_tol=RATIO_TOLERANCE):
        named.append(f"{micro_batches} of {full} micro-batches")
    return f" = {' or '.join(named)}" if named else ""


def _size(error: float) -> float:
    """Of an error that is no number, as of the worst there is."""
    return error if math.isfinite(error) else math.inf


def _explain_law(result: Observations) -> Finding:
    worst = max(result, key=lambda o: _size(real_of(o.values["error"])))
    ratio, error, rest = (real_of(worst.values[name]) for name in ("ratio", "error", "rest"))
    if rest <= RATIO_TOLERANCE:
        factor = name_ratio(ratio, len(result), worst.values["micro-batches"])
        seen = f"the reduced gradient is {ratio:.3f} x the law{factor}"
    else:
        seen = f"the reduced gradient is off the law by {error:.3g} of its norm, and by no factor"
    return Finding(f"{seen}: the law is the gradient of one process over all rows", result[0].step, (), "gradient")


@clause("gradient-law", _explain_law)
def gradient_is_law(result: Observations) -> bool:
    """On every rank the reduced gradient before clipping is that of one process, up to rounding."""
    return all(real_of(o.values["error"]) <= real_of(o.values["tolerance"]) for o in result)


@ensure(gradient_is_law)
def judge_law(observations: Observations, details: Details, names: Names) -> Observations:
    """The gradient of one process. Raises `Violation`."""
    return observations
