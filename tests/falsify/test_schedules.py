"""Random schedules are judged by what happened: no end is taken that no fault explains, and no idle one counts."""

from __future__ import annotations

import signal

import pytest

from benchmarks.schedules import Outcome, told, unexplained
from falsify.nemesis.run import Ending
from falsify.nemesis.schedule import KILL, PAUSE, PREEMPT, RESIZE, STOP, Fault, Schedule

KILLED = -signal.SIGKILL
ENDS = {
    (KILL, "rank"): {0, 71},
    (KILL, "agent"): {0, 71},
    (KILL, "launcher"): {0, KILLED},
    (STOP, "rank"): {0, 71, 72},
    (PREEMPT, "launcher"): {0, 75},
    (PAUSE, "rank"): {0},
    (RESIZE, "rank"): {0},
}
"""How a launch may end after a fault; a short pause and another number of workers end none."""


@pytest.mark.parametrize(("fault", "ends"), ENDS.items(), ids=map(" of a ".join, ENDS))
def test_an_end_is_taken_only_where_a_fault_leads_to_it(fault: tuple[str, str], ends: set[int]) -> None:
    """Every other code is wrong, and said; so is one that the fault explains where it did not happen."""
    kind, victim = fault
    happened = [Fault(3, kind, victim, 1)]
    taken = {code for code in (0, 1, 2, 70, 71, 72, 75, KILLED) if not unexplained(happened, Ending((code,), "said"))}
    assert taken == ends
    assert unexplained([], Ending((71,), "rank 1 was killed")).startswith("exit 71: rank 1 was killed")


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (Ending((KILLED,), "", left=2), "2 processes left"),
        (Ending((KILLED,), "", hung=True, seconds=300.0), "not over 300.0 s after it began"),
        (Ending((KILLED,), "Traceback (most recent call last):\n"), "a traceback"),
    ],
    ids=["left", "hung", "traceback"],
)
def test_what_a_fault_does_not_explain_is_wrong_whatever_the_code(ending: Ending, said: str) -> None:
    """Processes that stay, a launch that had to be ended from here, an error that nobody foresaw."""
    assert said in unexplained([Fault(3, KILL, "launcher", 0)], ending)


def test_schedules_whose_faults_did_not_happen_are_no_success() -> None:
    """Half of the faults must have happened; one result that is not the same is enough to fail."""
    plan = Schedule(0, "2", (Fault(3, KILL, "rank", 0), Fault(9, KILL, "rank", 1)), 3)
    good, idle = Outcome(plan, (True, False), (71, 0), ""), Outcome(plan, (False, False), (0,), "")
    other = Outcome(plan, (True, True), (71, 0), "other bits")
    cases: tuple[list[Outcome], ...] = ([good], [], [idle], [good, idle], [good, other])
    assert [told(found, 60.0)[1] for found in cases] == [True, False, False, False, False]
    assert "1 of 4 faults happened, none in 1 schedules; 60 s, 2.0 schedules a minute" in told([good, idle], 60.0)[0]
    assert str(good) == "0: 2 workers, kill rank 0 at 3, kill rank 1 at 9 (not reached); exits 71 0: same"
