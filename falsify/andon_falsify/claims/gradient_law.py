"""Compares the gradient of every update with the reference. For a loop, also says what a wrong gradient is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import hypot, inf, isclose, isfinite
from typing import TYPE_CHECKING, NamedTuple

from andon_falsify.claims.evidence import Evidence, has_law, tensors
from andon_falsify.claims.explain import explain_ratio, explain_window, name_short_windows
from andon_falsify.verdict import Claim, Clause, Counterexample, Outcome, Verdict, conclude, first_of_many, merge

if TYPE_CHECKING:
    from torch import Tensor

    from andon_falsify.claims.laws import LoopLaw
    from andon_falsify.reference.training import RowGradients

CLAIM = Claim(
    "gradient-law",
    1,
    "The gradient before clipping is that of one float64 process: the weighted losses of all rows of the global "
    "batch, summed and divided once by the number of rows.",
    order=130,
    subjects=("trainer", "loop"),
    needs=(tensors("gradient", of_updates=True), has_law),
    clauses=(
        Clause("gradient-law", "same"),
        Clause("gradient-average"),
        Clause("clip-placed"),
        Clause("parameters-kept"),
        Clause("gradient-present"),
        Clause("gradient-fresh"),
        Clause("gradient-scale"),
    ),
)
FLOOR = 0.1
"""A tensor that has less than this share of all that was summed is measured by the sum: where rows cancel, rounding
errors are left."""
_FITS = 1e-3
_WHOLE = 0.02
_SHOWN = 3
Explanation = tuple[str, str]
"""The cause of a wrong gradient, which a smaller counterexample must keep, and the same in words with its numbers."""
_NONE = ("", "")
_EARLY = "it is what the optimizer got: torch's clip was called before it was whole"


def check(evidence: Evidence) -> Verdict:
    """Rank 0's reduced gradient of every update against the law."""
    law, allowed = evidence.law, evidence.noise.gradient
    verdicts = {
        expected.step: compare(
            law.seen(expected.step),
            expected.gradients,
            allowed,
            floor=FLOOR * max(1.0, expected.summed / (expected.norm or 1.0)),
            factors=law.factors,
            where=f"step {expected.step}",
        )
        for expected in law.expected
    }
    if evidence.of_loop:
        return _of_loop(evidence.loop_law, verdicts)
    return merge(verdicts.values()) if verdicts else conclude(CLAIM, 0, [], "no update was made")


class _Gap(NamedTuple):
    """relative: |seen - expected| / scale. factor: the c for which c * expected is nearest to seen, None without one.

    residual: |seen - c * expected| / |seen|, which is about 0 if seen is expected times c.
    """

    relative: float
    factor: float | None
    residual: float


def _gap(seen: Tensor, expected: Tensor, floor: float) -> _Gap:
    """The distance of `seen` from `expected` (float64, of one shape), relative to max(|expected|, floor)."""
    size, off = float(expected.norm()), float((seen - expected).norm())
    if not isfinite(off):
        return _Gap(inf, None, inf)
    scale = max(size, floor)
    relative = off / scale if scale else (0.0 if off == 0.0 else inf)
    if not size:
        return _Gap(relative, None, inf)
    factor, held = float(((seen / size) * (expected / size)).sum()), float(seen.norm())
    return _Gap(relative, factor, float((seen - factor * expected).norm()) / held if held else 0.0)


def compare(
    seen: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float,
    *,
    floor: float = 0.0,
    factors: Mapping[str, int] | None = None,
    where: str = "",
) -> Verdict:
    """Compare by relative L2 norm per tensor, and name the factor between the two, if there is a single one.

    A tensor's scale is its expected norm, or `floor` times the norm of the whole expected gradient if that is more.
    With a floor of 0, a tensor whose law is exactly 0 must be 0. Unknown if the law is not finite, or 0 everywhere.
    """
    law, held = ({name: each.double().flatten() for name, each in side.items()} for side in (expected, seen))
    total = hypot(*(float(tensor.norm()) for tensor in law.values()))
    if not isfinite(total):
        return conclude(CLAIM, 0, [], "the expected gradient is not finite")
    if total == 0:
        return conclude(CLAIM, 0, [], "the expected gradient is 0 everywhere: nothing can be told from it")
    found = []
    for name in sorted(held.keys() | law.keys()):
        wanted, size = (f"{len(side[name])} elements" if name in side else "no gradient" for side in (law, held))
        if wanted != size:
            found.append(Counterexample(f"{name} has a different layout", where, wanted, size, quantity="gradient"))
    alike = [name for name in law if name in held and len(held[name]) == len(law[name])]
    gaps = {name: _gap(held[name], law[name], floor * total) for name in alike}
    wrong = sorted((name for name in gaps if gaps[name].relative > tolerance), key=lambda name: -gaps[name].relative)
    if wrong:
        named = first_of_many([f"{name} {gaps[name].relative:.3g}" for name in wrong], _SHOWN)
        what = f"{len(wrong)} of {len(gaps)} tensors differ from the float64 reference"
        limit = f"relative error <= {tolerance:.3g}"
        ratio = _common_factor([gap for gap in gaps.values() if gap.factor is not None])
        equals = "" if ratio is None else explain_ratio(ratio, factors or {})
        found.append(Counterexample(what, where, limit, named, ratio, equals, quantity="gradient"))
    worst = max((each.relative for each in gaps.values()), default=0.0)
    note = "" if wrong else f"{tolerance:.2e} is allowed"
    return conclude(CLAIM, sum(bool(law[name].any()) for name in gaps), found, note=note, worst=worst)


def _common_factor(gaps: Sequence[_Gap]) -> float | None:
    factors = sorted(gap.factor for gap in gaps if gap.factor is not None and gap.residual <= _FITS)
    middle = factors[len(factors) // 2] if len(factors) == len(gaps) > 0 else 1.0
    shared = all(isclose(factor, middle, rel_tol=_FITS) for factor in factors)
    return middle if shared and abs(middle - 1.0) > _FITS else None


def _of_loop(law: LoopLaw, found: Mapping[int, Verdict]) -> Verdict:
    verdicts = name_short_windows(law, {step: _explained(law, step, verdict) for step, verdict in found.items()})
    if lost := law.to_train - law.made_trainable:
        what, held = f"{len(lost)} trainable tensors have no gradient", first_of_many(sorted(lost), 3)
        shown = (what, "from the start", "requires_grad", f"frozen: {held}")
        verdicts.append(conclude(CLAIM, 1, [Counterexample(*shown, quantity="gradient")]))
    if law.unknown_updates:
        verdicts.append(conclude(CLAIM, 0, [], f"the rows of update {min(law.unknown_updates)} are not all known"))
    if not verdicts:
        return conclude(CLAIM, 0, [], "no update with known rows was made")
    merged = merge(verdicts)
    return replace(merged, reasons=tuple(filter(None, (*merged.reasons, law.note))))


def _explained(law: LoopLaw, step: int, verdict: Verdict) -> Verdict:
    if verdict.outcome is not Outcome.FALSIFIED:
        return verdict
    rows = _matrix(law.of(step))
    seen, planned = _vector(law, step), rows.mean(0)
    size, off = float(planned.norm()), float((seen - planned).norm())
    relative = off / size if size else inf
    cause = words = ""
    if relative > _FITS and _fit(seen, planned)[1] > _FITS:
        explained = (explain(law, step, rows, seen) for explain in (_other_mean, _of_before, _relabelled, _counted))
        cause, words = next((each for each in explained if each[1]), _NONE)
    early = _EARLY if law.first.made[step].early else ""
    overall = "; ".join(filter(None, (f"relative error {relative:.3g} over all tensors", early, words)))
    named = tuple(replace(each, what=f"{each.what}; {overall}", cause=cause) for each in verdict.counterexamples)
    return replace(verdict, counterexamples=named)


def _matrix(law: RowGradients) -> Tensor:
    import torch

    return torch.cat([tensor.reshape(len(law.rows), -1) for tensor in law.gradients.values()], dim=1)


def _vector(law: LoopLaw, step: int) -> Tensor:
    import torch

    seen = law.seen(step)
    return torch.cat([seen[name].reshape(-1) for name in law.of(step).gradients])


def _fit(seen: Tensor, other: Tensor) -> tuple[float, float]:
    """The c for which c * other is nearest to seen, and the norm of what is left, relative to that of seen."""
    size = float(other @ other)
    factor = float(seen @ other) / size if size else 0.0
    return factor, float((seen - factor * other).norm()) / (float(seen.norm()) or 1.0)


def _other_mean(law: LoopLaw, step: int, rows: Tensor, seen: Tensor) -> Explanation:
    visits, place = law.visits(step), {row: index for index, row in enumerate(law.rows(step))}
    leaves = [leaf for of_rank in visits for leaf in of_rank if leaf]
    ranks = [[row for leaf in of_rank for row in leaf] for of_rank in visits]

    of_leaves, of_ranks = (", ".join(str(len(part)) for part in parts) for parts in (leaves, ranks))
    means: list[tuple[str, str, Sequence[Sequence[int]]]] = [
        ("visits", "the mean over all visits, repeated rows counted again", [[row for leaf in leaves for row in leaf]]),
        ("micro-batches", f"the mean of the means of {len(leaves)} micro-batches (of {of_leaves} rows)", leaves),
        ("ranks", f"the mean of the means of {len(ranks)} ranks (with {of_ranks} rows)", list(filter(None, ranks))),
    ]
    for name, words, parts in means:
        weights = rows.new_zeros(len(rows))
        for part in parts:
            for row, visited in Counter(part).items():
                weights[place[row]] += visited / (len(part) * len(parts))
        factor, residual = _fit(seen, weights @ rows)
        if residual <= _FITS:
            equals = explain_window(factor, law, step) or explain_ratio(factor, law.factors)
            times = "" if abs(factor - 1) <= _FITS else f", times {equals}"
            return f"a mean of means of {name}", f"it is {words}{times}"
    return _NONE


def _of_before(law: LoopLaw, step: int, rows: Tensor, seen: Tensor) -> Explanation:
    """A stale gradient: it still contains the previous update's, or one rank contributed its previous part again."""
    if step - 1 not in law.updates or not law.rows(step - 1):
        return _NONE
    planned, cause = rows.mean(0), "the gradient of the update before"
    factor, residual = _fit(seen - planned, _vector(law, step - 1))
    if residual <= _FITS:
        times = "" if abs(factor - 1) <= _FITS else f", {factor:.3g} times"
        return cause, f"the gradient of the update before is still in it{times}"

    def part(of: int, gradients: Tensor, visited: Sequence[tuple[int, ...]]) -> Tensor:
        place = [law.rows(of).index(row) for leaf in visited for row in leaf]
        return gradients[place].sum(0) / len(gradients)

    before = _matrix(law.of(step - 1))
    for rank, (visited, past) in enumerate(zip(law.visits(step), law.visits(step - 1), strict=True)):
        instead = planned - part(step, rows, visited) + part(step - 1, before, past)
        if float((seen - instead).norm()) <= _FITS * float(seen.norm()):
            return cause, f"rank {rank}'s part is that of the update before"
    return _NONE


def _relabelled(law: LoopLaw, step: int, rows: Tensor, seen: Tensor) -> Explanation:
    """Other labels: `row 3 as label 2 instead of 1`.

    With the gradient of every row for every label, `seen` is a sum of some of them, which least squares find. Needs a
    model that the reference knows, and rows whose gradients are independent.
    """
    import torch

    if law.why_no_model:
        return _NONE
    count, labels = len(rows), law.case.rows.labels
    *others, last = [_matrix(law.labelled(step, label)) for label in range(law.case.rows.classes)]
    if not others or len(seen) < len(others) * count:
        return _NONE
    rest, columns = seen * count - last.sum(0), torch.cat([each - last for each in others]).T
    times = torch.linalg.lstsq(columns, rest[:, None]).solution[:, 0]
    if float((columns @ times - rest).norm()) > _FITS * count * float(seen.norm()):
        return _NONE
    shares = times.view(len(others), count).T
    shares = torch.cat([shares, 1 - shares.sum(1, keepdim=True)], dim=1)
    if float((shares - shares.round()).abs().max()) > _WHOLE or float(shares.min()) < -_WHOLE:
        return _NONE
    said = [
        f"row {row} as label {label} instead of {labels[row]}"
        for row, label in zip(law.rows(step), shares.argmax(1).tolist(), strict=True)
        if label != labels[row]
    ]
    return ("other labels", f"it is the mean with {first_of_many(said, 4)}") if said else _NONE


def _counted(law: LoopLaw, step: int, rows: Tensor, seen: Tensor) -> Explanation:
    """Rows that do not count exactly once, by least squares: `rows 3, 5 count 2 times, row 7 not at all`."""
    import torch

    if rows.shape[0] > rows.shape[1] or float(torch.linalg.svdvals(rows)[-1]) * 1e-3 <= 1e-6 * float(seen.norm()):
        return _NONE
    weights = torch.linalg.lstsq(rows.T, seen[:, None]).solution[:, 0]
    if float((weights @ rows - seen).norm()) > _FITS * float(seen.norm()):
        return _NONE
    by_times: dict[float, list[int]] = {}
    for row, weight in zip(law.rows(step), weights.tolist(), strict=True):
        by_times.setdefault(round(weight * len(rows), 2) + 0.0, []).append(row)
    parts = [
        f"row{'s' * (len(held) > 1)} {', '.join(map(str, held))} count{'s' * (len(held) == 1)} "
        + (f"{times:g} times" if times else "not at all")
        for times, held in sorted(by_times.items())
        if abs(times - 1) > 0.005
    ]
    if not parts or len(by_times) > 6:
        return _NONE
    return "rows do not count once", f"every row must count once; here {'; '.join(parts)}"
