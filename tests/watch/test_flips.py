"""The benchmark of flipped bits counts what the audit finds, and holds it to an exact interval."""

from __future__ import annotations

import math
import random

from andon.step.audit import NO_AUDIT, AuditSpec
from benchmarks.flips import central_interval, flips


def test_the_interval_leaves_at_most_half_of_a_hundredth_on_either_side() -> None:
    """By sums of the binomial's own terms; one step further in on either side would leave more."""
    for count, rate in ((1000, 0.01), (1000, 0.04), (40, 0.5)):
        terms = [math.comb(count, k) * rate**k * (1 - rate) ** (count - k) for k in range(count + 1)]
        low, high = central_interval(count, rate)
        assert sum(terms[:low]) <= 0.005 < sum(terms[: low + 1])
        assert sum(terms[high + 1 :]) <= 0.005 < sum(terms[high:])
    assert central_interval(7, 1.0) == (7, 7)


def test_flips_are_found_where_there_is_an_audit_and_nowhere_else() -> None:
    """All of them at full coverage; without an audit none, since the ranks agree on what they are given."""
    for what in ("gradient", "partial sum"):
        found = flips(what, 2, AuditSpec(1, None), 4, 1.0, random.Random(3))
        assert (found.found, found.holds) == (4, True)
        missed = flips(what, 2, NO_AUDIT, 4, 1.0, random.Random(3))
        assert (missed.found, missed.holds) == (0, False)
