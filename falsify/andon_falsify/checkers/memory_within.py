"""No replica's live tensors outgrow the plan, and what rests between updates does not grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude

CLAIM = Claim(
    "memory-budget",
    1,
    "The peak of live tensor bytes of every replica is at most the plan's number and 10 %, and the bytes that "
    "stay alive between updates do not grow with each of them.",
    "seed F-HET-002",
)

_LEAST_UPDATES = 4


def check(
    peaks: Mapping[int, int],
    planned: int | Mapping[int, int],
    slack: float = 0.1,
    resting: Mapping[int, Sequence[int]] | None = None,
) -> Verdict:
    """Compare each rank's peak in bytes with the plan (one number, or one a rank).

    `resting` is, for each rank, the live bytes after each update. The first update allocates the optimizer's moments;
    from the second on, at least 4 values that rise with every update are growth. Unknown where a rank has no positive
    peak or plan: zero counted bytes mean that nothing was counted.
    """
    found: list[Counterexample] = []
    checked, missing = 0, ""
    for rank, peak in sorted(peaks.items()):
        budget = planned if isinstance(planned, int) else planned.get(rank, 0)
        if peak <= 0 or budget <= 0:
            missing = missing or f"rank {rank}: peak {peak} bytes, plan {budget} bytes"
            continue
        checked += 1
        if peak > budget * (1 + slack):
            what = f"the peak is {peak / budget:.3f} of the plan, {1 + slack:.2f} is allowed"
            found.append(Counterexample(what, f"rank {rank}", f"{budget} bytes", f"{peak} bytes", peak / budget))
    for rank, sizes in sorted((resting or {}).items()):
        settled = sizes[1:]
        if len(settled) < _LEAST_UPDATES:
            missing = missing or f"rank {rank}: {len(sizes)} updates are too few to see growth"
            continue
        checked += 1
        if all(later > earlier for earlier, later in pairwise(settled)):
            what = "the bytes alive between updates rise with every update"
            found.append(Counterexample(what, f"rank {rank}", f"{settled[0]} bytes", f"{settled[-1]} bytes"))
    return conclude(CLAIM, checked, found, missing)
