"""What a gradient is that is not the law's: a multiple of it, another mean, or rows that count more than others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from andon_falsify.checkers.ratio import explain_ratio
from andon_falsify.loops.law import LoopLaw, matrix, vector
from andon_falsify.loops.relabelled import relabelled
from andon_falsify.loops.sightings import Law
from andon_falsify.loops.windows import short_window

_FITS = 1e-3
_SHOWN = 6


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
    if step - 1 not in law.updates or not any(map(any, law.visits(step - 1))):
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


def _shares(law: Law, rows: Tensor, seen: Tensor) -> dict[int, float]:
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
