"""Subjects that misbehave: the verdict is unknown and says in which way, nothing stays behind, other cases go on."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from andon_falsify.campaign.loop_bench import LoopBench
from andon_falsify.campaign.trial import LAW, Trial
from andon_falsify.loops.subject import LoopSubject
from andon_falsify.loops.task import loop_case
from andon_falsify.ranks.pool import RankPools
from andon_falsify.verdict import Outcome
from tests.falsify.misbehaving import COMMAND

HERE = "tests.falsify.misbehaving"
TRIAL = Trial(LAW, loop_case(epochs=1))


@pytest.fixture
def pools() -> Iterator[RankPools]:
    with RankPools(deadline_s=60.0, grace_s=1.0) as held:
        yield held


def bench(make: str, pools: RankPools) -> LoopBench:
    return LoopBench(LoopSubject(make if ":" in make else f"{HERE}:{make}", make, pools), make)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        ("tests.falsify.absent:make", "No module named 'tests.falsify.absent'"),
        ("tests.falsify.broken_subject:make", "OSError: no licence was found"),
        ("not_a_function", "names no function"),
        ("nothing", "NoneType is no loop"),
        ("WithoutTrain", "has no method `train(told)`"),
        ("WithoutModel", "it has no attribute `model` (needed are `model`, a torch module, wrapped"),
        ("WithEmptyModel", "its `model` is None"),
        ("killed", "rank 1 was killed by SIGKILL"),
        ("exiting", "rank 1 ended with exit code 7"),
        ("leaving", "rank 1: SystemExit: enough at "),
        ("raising", "rank 1: ArithmeticError: nothing adds up at "),
        ("lying", "it says it is one of 1 ranks, but 2 were started"),
    ],
)
def test_what_a_subject_does_wrong_is_named(pools: RankPools, make: str, said: str) -> None:
    """Every claim of the trial is unknown for one reason in one line: the first cause, not what other ranks saw."""
    found = bench(make, pools).attempt(TRIAL)
    assert {verdict.outcome for verdict in found.values()} == {Outcome.UNKNOWN}
    (why,) = {verdict.why for verdict in found.values()}
    assert said in why
    assert "\n" not in why
    assert len(found) > 5


def test_what_a_subject_leaves_running_is_named_and_ended(pools: RankPools) -> None:
    found = bench("littering", pools).attempt(TRIAL)
    assert {verdict.outcome for verdict in found.values()} == {Outcome.UNKNOWN}
    assert all(f"({' '.join(COMMAND)})" in verdict.why for verdict in found.values())
    assert [process.pid for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == [*COMMAND]] == []


@pytest.mark.parametrize("make", ["Waiting", "Alone"])
def test_a_deadlock_ends_with_the_deadline(make: str) -> None:
    with RankPools(deadline_s=1.0, grace_s=0.1) as pools:
        found = bench(make, pools).attempt(TRIAL)
        assert all("no answer in time (1 s); killed" in verdict.why for verdict in found.values())
        assert pools.of(2).pids == []


def test_nonsense_on_the_standard_streams_changes_nothing(pools: RankPools, capfd: pytest.CaptureFixture[str]) -> None:
    found = bench("Garbling", pools).attempt(TRIAL)
    assert {verdict.outcome for verdict in found.values()} == {Outcome.HOLDS}, found
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")
