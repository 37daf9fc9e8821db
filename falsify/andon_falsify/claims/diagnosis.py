"""Why a loop's gradient is not the law's: another mean, a short window, rows that count more, or other labels.

A short window is a last update of fewer rows or micro-batches, divided as a full one: its ratio is chance, unless it is
read as what the window has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose

import torch
from torch import Tensor

from andon_falsify.checkers import gradient_law
from andon_falsify.checkers.ratio import explain_ratio, show_ratio
from andon_falsify.claims.loop_law import LoopLaw
from andon_falsify.loops.parameters import trained
from andon_falsify.reference.training import RowGradients
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import Trace
from andon_falsify.verdict import Counterexample, Outcome, Verdict, conclude, first_of_many, merge, unknown

_FITS = 1e-3
_SHOWN = 6
_WHOLE = 0.02
_RELABELLED = 4
_EARLY = "it is what the optimizer got: torch's clip was called before it was whole"
CAUSE = "a short window is divided as a full one"


@dataclass(frozen=True)
class Comparison:
    """The seen gradient of one update against the law's, over all trained elements.

    relative: |seen - law| / |law|. cosine: of the angle between them. ratio: |seen| / |law| where they point the same
    way (to 1e-3), else None. shares: for each row how often it counts, 1 by the law; empty where that cannot be told.
    words: what the gradient is instead, "" where it is the law's or nothing fits.
    """

    step: int
    relative: float
    cosine: float
    ratio: float | None
    shares: Mapping[int, float]
    words: str


def diagnosed(law: LoopLaw, found: Mapping[int, Verdict]) -> Verdict:
    """The verdicts on the gradients of the updates as one, each wrong gradient with what it is instead."""
    verdicts = named_by_window(law, {step: _told(law, step, verdict) for step, verdict in found.items()})
    lost = list(_left_out(law))
    if lost:
        verdicts.append(conclude(gradient_law.CLAIM, 1, lost))
    if law.unknown_updates:
        why = f"the rows of update {min(law.unknown_updates)} are not all known"
        verdicts.append(unknown(gradient_law.CLAIM, why))
    if not verdicts:
        return unknown(gradient_law.CLAIM, "no update with known rows was made")
    merged = merge(verdicts)
    return replace(merged, reasons=tuple(filter(None, (_worst(merged), law.note))))


def _told(law: LoopLaw, step: int, verdict: Verdict) -> Verdict:
    if verdict.outcome is not Outcome.FALSIFIED:
        return verdict
    told = compare(law, step, law.factors)
    early = _EARLY if law.first.made[step].early else ""
    overall = "; ".join(filter(None, (f"relative error {told.relative:.3g} over all tensors", early, told.words)))
    named = tuple(replace(each, what=f"{each.what}; {overall}") for each in verdict.counterexamples)
    return replace(verdict, counterexamples=named)


def _left_out(law: LoopLaw) -> Iterator[Counterexample]:
    """What is to train and has no gradient, since it was frozen."""
    lost = set() if law.why_no_model else set(trained(law.plain)) - law.made_trainable
    if lost:
        what = f"{len(lost)} tensors that are to train have no gradient"
        yield Counterexample(what, "from the start", "requires_grad", f"frozen: {first_of_many(sorted(lost), 3)}")


def _worst(verdict: Verdict) -> str:
    told = "largest relative error "
    notes = [note for note in verdict.why.split("; ") if note.startswith(told)]
    return max(notes, key=lambda note: float(note.removeprefix(told).partition(",")[0]), default=verdict.why)


def comparisons(trace: Trace) -> list[Comparison]:
    """The gradient of every update against the law's; empty where there is no law."""
    law = LoopLaw(trace)
    return [] if law.why_not else [compare(law, step, law.factors) for step in law.updates if law.rows(step)]


def compare(law: LoopLaw, step: int, factors: Mapping[str, int]) -> Comparison:
    """Compare the gradient of `step`, and say in terms of `factors` (world 2, accumulation 2) what it is."""
    of_rows = law.of(step)
    rows, seen = matrix(of_rows), vector(of_rows, law.seen(step))
    planned = rows.mean(0)
    size = float(planned.norm())
    relative = float((seen - planned).norm()) / size if size else float("inf")
    cosine = float(seen @ planned) / (size * float(seen.norm()) or 1.0)
    factor, residual = _fit(seen, planned)
    ratio = factor if residual <= _FITS else None
    shares = _shares(of_rows, rows, seen)
    words = "" if relative <= _FITS or ratio is not None else _instead(law, step, seen, factors)
    if not words and ratio is None and relative > _FITS:
        words = _remembered(law, step, seen, planned) or relabelled(law, step, seen) or _counted(shares)
    return Comparison(step, relative, cosine, ratio, shares, words)


def matrix(law: RowGradients) -> Tensor:
    """float64 [rows, all trained elements]: the gradient of each row."""
    return torch.cat([tensor.reshape(len(law.rows), -1) for tensor in law.gradients.values()], dim=1)


def vector(law: RowGradients, gradients: Mapping[str, Tensor]) -> Tensor:
    """`gradients` as one vector, in the order of `matrix`."""
    return torch.cat([gradients[name].reshape(-1) for name in law.gradients])


def _fit(seen: Tensor, other: Tensor) -> tuple[float, float]:
    """The c for which c * other is nearest to seen, and what is left of seen then, relatively."""
    size = float(other @ other)
    factor = float(seen @ other) / size if size else 0.0
    return factor, float((seen - factor * other).norm()) / (float(seen.norm()) or 1.0)


def _instead(law: LoopLaw, step: int, seen: Tensor, factors: Mapping[str, int]) -> str:
    """Which other mean over the visited rows it is, times what."""
    visits, rows = law.visits(step), matrix(law.of(step))
    place = {row: at for at, row in enumerate(law.of(step).rows)}
    leaves = [leaf for of_rank in visits for leaf in of_rank if leaf]
    ranks = [[row for leaf in of_rank for row in leaf] for of_rank in visits]
    candidates: dict[str, Sequence[Sequence[int]]] = {
        "the mean over all visits, repeated rows counted again": [[row for leaf in leaves for row in leaf]],
        f"the mean of the means of {len(leaves)} micro-batches (of {_sizes(leaves)} rows)": leaves,
        f"the mean of the means of {len(ranks)} ranks (with {_sizes(ranks)} rows)": [rank for rank in ranks if rank],
    }
    for words, parts in candidates.items():
        weights = torch.zeros(len(rows), dtype=torch.float64)
        for part in parts:
            for row, visited in Counter(part).items():
                weights[place[row]] += visited / (len(part) * len(parts))
        factor, residual = _fit(seen, weights @ rows)
        if residual <= _FITS:
            equals = short_window(factor, visits, law.case) or explain_ratio(factor, factors)
            times = "" if abs(factor - 1) <= _FITS else f", times {equals}"
            return f"it is {words}{times}"
    return ""


def _remembered(law: LoopLaw, step: int, seen: Tensor, planned: Tensor) -> str:
    """Whether something of the update before is in it: all of its gradient, or one rank's part of it."""
    now, rows = law.of(step), matrix(law.of(step))
    if step - 1 not in law.updates or not law.rows(step - 1):
        return ""
    factor, residual = _fit(seen - planned, vector(now, law.seen(step - 1)))
    if residual <= _FITS:
        times = "" if abs(factor - 1) <= _FITS else f", {factor:.3g} times"
        return f"the gradient of the update before is still in it{times}"
    before, earlier = law.of(step - 1), matrix(law.of(step - 1))
    for rank, (visited, past) in enumerate(zip(law.visits(step), law.visits(step - 1), strict=True)):
        own = sum((rows[now.rows.index(row)] for leaf in visited for row in leaf), torch.zeros_like(seen))
        old = sum((earlier[before.rows.index(row)] for leaf in past for row in leaf), torch.zeros_like(seen))
        instead = planned - own / len(now.rows) + old / len(before.rows)
        if float((seen - instead).norm()) <= _FITS * float(seen.norm()):
            return f"rank {rank}'s part is that of the update before"
    return ""


def _sizes(parts: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(len(part)) for part in parts)


def _shares(law: RowGradients, rows: Tensor, seen: Tensor) -> dict[int, float]:
    """How often each row counts, by least squares; empty where rows cannot be told apart or it is no sum of theirs."""
    if rows.shape[0] > rows.shape[1]:
        return {}
    smallest = float(torch.linalg.svdvals(rows)[-1])
    if smallest * 1e-3 <= 1e-6 * float(seen.norm()):
        return {}
    weights = torch.linalg.lstsq(rows.T, seen[:, None]).solution[:, 0]
    if float((weights @ rows - seen).norm()) > _FITS * float(seen.norm()):
        return {}
    return {row: round(float(weight) * len(law.rows), 4) for row, weight in zip(law.rows, weights, strict=True)}


def _counted(shares: Mapping[int, float]) -> str:
    """`rows 3, 5 count 2 times, row 7 not at all`."""
    by_times: dict[float, list[int]] = {}
    for row, times in shares.items():
        by_times.setdefault(round(times, 2) + 0.0, []).append(row)
    if not by_times or len(by_times) > _SHOWN:
        return ""
    parts = [
        f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows))} count{'s' * (len(rows) == 1)} "
        + (f"{times:g} times" if times else "not at all")
        for times, rows in sorted(by_times.items())
        if abs(times - 1) > 0.005
    ]
    return f"by the law every row counts once, here {'; '.join(parts)}" if parts else ""


def short_window(ratio: float, visits: Sequence[Sequence[tuple[int, ...]]], case: Case) -> str:
    """`0.667 = 2 of 3 micro-batches: a short window ...`, where that is what the ratio of an update is; else "".

    visits: the rows of each micro-batch of each rank. A sum that should be divided by what there is, is divided by the
    micro-batches, rows or ranks of a full window instead.
    """
    windows = [sum(map(bool, leaves)) for leaves in visits]
    rows = sum(len(leaf) for leaves in visits for leaf in leaves)
    alike = len(set(windows)) == 1
    there = {
        "micro-batches": (windows[0], case.accumulation) if alike else (sum(windows), case.accumulation * case.world),
        "rows": (rows, case.global_batch),
        "ranks with rows": (sum(map(bool, windows)), case.world),
    }
    fitting = [
        f"{held} of {full} {name}"
        for name, (held, full) in there.items()
        if 0 < held < full and isclose(ratio, held / full, rel_tol=1e-3)
    ]
    return f"{show_ratio(ratio)} = {' or '.join(fitting)}: {CAUSE}" if fitting else ""


def named_by_window(law: LoopLaw, found: Mapping[int, Verdict]) -> list[Verdict]:
    """The verdicts on updates, with ratios that are due to short windows named so: full windows are right then.

    Without a full window, or with one that fell, nothing tells a short one from a wrong average, and all stay.
    """
    full = [step for step in found if law.visited(step) == law.case.global_batch]
    if not full or any(found[step].outcome is Outcome.FALSIFIED for step in full):
        return list(found.values())
    return [
        replace(verdict, counterexamples=tuple(_named_so(law, step, each) for each in verdict.counterexamples))
        for step, verdict in found.items()
    ]


def _named_so(law: LoopLaw, step: int, found: Counterexample) -> Counterexample:
    equals = "" if found.ratio is None else short_window(found.ratio, law.visits(step), law.case)
    return replace(found, equals=equals) if equals else found


def relabelled(law: LoopLaw, step: int, seen: Tensor) -> str:
    """`row 3 as label 2 instead of 1`, where that is what the gradient `seen` of `step` is; else "".

    With the gradient of every row for every label, `seen` is a sum of them; which, least squares tell. Only of a model
    that the reference knows, and where the rows' gradients are independent.
    """
    if law.why_no_model:
        return ""
    rows = law.of(step).rows
    *others, last = [matrix(law.labelled(step, label)) for label in range(law.case.rows.classes)]
    rest = seen * len(rows) - last.sum(0)
    columns = torch.cat([each - last for each in others]).T
    if not others or columns.shape[0] < columns.shape[1]:
        return ""
    times = torch.linalg.lstsq(columns, rest[:, None]).solution[:, 0]
    if float((columns @ times - rest).norm()) > _FITS * len(rows) * float(seen.norm()):
        return ""
    shares = times.view(len(others), len(rows)).T
    shares = torch.cat([shares, 1 - shares.sum(1, keepdim=True)], dim=1)
    if float((shares - shares.round()).abs().max()) > _WHOLE or float(shares.min()) < -_WHOLE:
        return ""
    held = law.case.rows.labels
    said = [
        f"row {row} as label {label} instead of {held[row]}"
        for row, label in zip(rows, shares.argmax(1).tolist(), strict=True)
        if label != held[row]
    ]
    return f"it is the mean with {first_of_many(said, _RELABELLED)}" if said else ""
