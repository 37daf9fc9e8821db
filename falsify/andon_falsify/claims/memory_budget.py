"""No replica's live tensors outgrow the plan, and what stays alive between updates does not grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from andon_falsify.claims.evidence import Evidence, tensors
from andon_falsify.verdict import Claim, Clause, Counterexample, Verdict, conclude

CLAIM = Claim(
    "memory-budget",
    1,
    "No replica's peak of live tensor bytes is more than 10 % above the plan. The bytes that stay allocated between "
    "updates do not grow.",
    order=110,
    subjects=("trainer",),
    trial="memory",
    needs=(
        tensors("bytes of memory"),
        lambda run: "" if run.observed.place == "cpu" else ON_GPUS,
        lambda run: "" if run.observed.case.memory else "bytes were not counted",
    ),
    clauses=(Clause("memory-budget", "same"),),
)
ON_GPUS = "bytes are counted on the CPU alone; on GPUs every run holds its peak against its plan"
_ALLOWED = 1.1
"""Of the plan."""


def check(evidence: Evidence) -> Verdict:
    trace = evidence.observed
    return check_bytes(trace.gathered("peaks"), trace.first.planned_bytes, trace.gathered("resting"))


def check_bytes(peaks: Mapping[int, int], planned: int, resting: Mapping[int, Sequence[int]] | None = None) -> Verdict:
    """Compare each rank's peak in bytes with the plan; zero bytes were not counted.

    resting: for each rank, the live bytes after each update. The first update allocates the optimizer's moments; from
    the second on, at least 4 values that rise with every update are growth.
    """
    found: list[Counterexample] = []
    checked, missing = 0, ""

    def fail(what: str, rank: int, expected: int, seen: int, ratio: float | None = None) -> None:
        shown = (f"rank {rank}", f"{expected} bytes", f"{seen} bytes", ratio)
        found.append(Counterexample(what, *shown, quantity="memory"))

    for rank, peak in sorted(peaks.items()):
        if peak <= 0 or planned <= 0:
            missing = missing or f"rank {rank}: peak {peak} bytes, plan {planned} bytes"
            continue
        checked += 1
        if peak > planned * _ALLOWED:
            what = f"the peak is {peak / planned:.3f} of the plan, {_ALLOWED:.2f} is allowed"
            fail(what, rank, planned, peak, peak / planned)
    for rank, sizes in sorted((resting or {}).items()):
        settled = sizes[1:]
        if len(settled) < 4:
            missing = missing or f"rank {rank}: {len(sizes)} updates are too few to see growth"
            continue
        checked += 1
        if all(later > earlier for earlier, later in pairwise(settled)):
            fail("the bytes alive between updates rise with every update", rank, settled[0], settled[-1])
    return conclude(CLAIM, checked, found, missing)
