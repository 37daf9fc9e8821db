"""What is said of slow, hung, silent and dead ranks, from what one rank knows: plain values in, words out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from andon.console.exits import Exit
from andon_contracts.liveness.diagnosis import (
    Sign,
    View,
    behind,
    gone,
    informed,
    lasts_s,
    lost,
    slowness,
    speaks,
    whom,
)
from andon_contracts.liveness.rules import NOTICED

WAITS = Sign(ticks=9, step=4, phase="update", waits=True, since_s=6.0, phase_s=7.0, state="runs")
WORKS = replace(WAITS, ticks=8, waits=False, place="train.py:7 load")
SILENCE_S = 3.0


def view(*signs: Sign, rank: int = 0) -> View:
    return View(rank, len(signs), dict(enumerate(signs)), SILENCE_S)


def test_who_only_noticed_another_ends_with_an_exit_that_says_so() -> None:
    assert NOTICED == {"lost": Exit.RANK_LOST, "silent": Exit.RANK_SILENT}


def test_ranks_that_have_come_less_far_are_behind() -> None:
    assert behind({0: WAITS, 1: WORKS, 2: WAITS}) == [1]
    assert behind({0: WAITS, 1: WAITS}) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(WORKS, state="stopped"), "rank 1 of 3 is stopped (by a signal, a debugger), last seen in"),
        (replace(WORKS, silent_s=SILENCE_S), "rank 1 of 3 gave no sign of life for 3.0 s, last seen in the update of"),
        (WORKS, "rank 1 of 3 hangs in the update of step 4 for 7.0 s, train.py:7 load"),
        (replace(WORKS, state="gone"), "rank 1 of 3 is gone without a word, last seen in the update of step 4"),
        (replace(WORKS, ended="LookupError: x", exit=1), "rank 1 of 3 ended: LookupError: x"),
        (WAITS, "all ranks give signs of life, and none got through to the others in the update of step 4"),
    ],
)
def test_a_wait_in_vain_has_one_explanation(other: Sign, words: str) -> None:
    assert whom(view(WAITS, other, WAITS)).startswith(words)


def test_an_error_of_its_own_comes_before_those_that_only_noticed() -> None:
    noticed = replace(WAITS, ended="rank 2 is gone", exit=71)
    assert gone(view(WAITS, noticed, replace(WAITS, ended="LookupError: x", exit=1))) == (
        "rank 2 of 3 ended: LookupError: x"
    )
    assert gone(view(WAITS, noticed, WAITS)) == ""
    assert lost(view(WAITS, noticed, WAITS)) == "rank 1 of 3 ended: rank 2 is gone"


def test_ranks_that_finished_are_not_missed() -> None:
    finished = replace(WAITS, ended="finished", silent_s=60.0)
    assert gone(view(WORKS, finished)) == ""
    assert "rank 1" not in slowness(view(WORKS, finished), 0.0)


def test_hosts_are_named_where_they_are_others() -> None:
    here, there = replace(WAITS, host="a"), replace(WORKS, host="b", silent_s=SILENCE_S)
    found = view(here, there, replace(there, host="c"), replace(here, silent_s=SILENCE_S))
    assert whom(found).startswith("ranks 1, 2, 3 of 4 (on b, c) gave no sign of life")


@pytest.mark.parametrize(
    ("signs", "words"),
    [
        (
            (WAITS, WORKS, WAITS),
            "rank 1 of 3 is slow: in the update of step 4 for 7.0 s, train.py:7 load; 2 wait for it",
        ),
        (
            (WAITS, replace(WAITS, ticks=7, since_s=5.0)),
            "all 2 ranks exchange in the update of step 4 for 6.0 s, 7.0 s",
        ),
        ((WAITS, WAITS), "all 2 ranks exchange in the update of step 4 for 6.0 s, 7.0 s after it began: what connects"),
        ((WORKS, WORKS), "all 2 ranks are slow: in the update of step 4 for 7.0 s, train.py:7 load"),
        ((WAITS, replace(WORKS, silent_s=4.0)), "rank 1 of 2 has given no sign of life for 4.0 s, last seen in"),
        ((WAITS, replace(WORKS, silent_s=4.0, state="stopped")), "rank 1 of 2 is stopped, last seen in"),
    ],
)
def test_slowness_has_a_rank_or_the_network_for_its_cause(signs: tuple[Sign, ...], words: str) -> None:
    assert slowness(view(*signs), 0.1).startswith(words)
    assert slowness(view(*signs), 0.1).endswith("; a step usually takes 0.1 s")


SLOW_ENDED = replace(WORKS, ended="rank 1 of 4 is slow: in the update of step 4", exit=Exit.RANK_SILENT)


@pytest.mark.parametrize(
    ("signs", "words"),
    [
        ((WAITS, SLOW_ENDED, WAITS, WAITS), "rank 1 of 4 ended: rank 1 of 4 is slow: in the update of step 4; 3 wait"),
        ((WAITS, SLOW_ENDED, replace(WAITS, silent_s=SILENCE_S)), "rank 1 of 3 ended: rank 1 of 4 is slow: in"),
        (
            (WAITS, SLOW_ENDED, replace(WAITS, ended="LookupError: x", exit=Exit.CRASHED)),
            "rank 2 of 3 ended: LookupError: x; 1 waits",
        ),
        (
            (WAITS, replace(WORKS, state="gone")),
            "rank 1 of 2 is gone without a word, last seen in the update of step 4",
        ),
        (
            (WAITS, replace(WAITS, ended="finished"), WAITS),
            "ranks 0, 2 of 3 exchange in the update of step 4 for 6.0 s",
        ),
        ((WORKS, replace(WAITS, ended="finished")), "rank 0 of 2 is slow: in the update of step 4 for 7.0 s"),
        ((WORKS,), "rank 0 is slow: in the update of step 4 for 7.0 s, train.py:7 load"),
        ((WAITS,), "rank 0 is slow: in the update of step 4 for 6.0 s"),
    ],
)
def test_a_network_is_not_slow_where_a_rank_has_ended(signs: tuple[Sign, ...], words: str) -> None:
    assert slowness(view(*signs), 0.0).startswith(words)


def test_only_what_cannot_be_seen_may_be_lost() -> None:
    late = replace(WAITS, silent_s=SILENCE_S)
    assert lost(view(WAITS, late, late)) == ""
    assert lost(view(WAITS, late, replace(late, state="elsewhere"))).startswith("rank 2 of 3 gave no sign of life for")
    ended = replace(late, ended="finished")
    assert lost(view(WAITS, replace(late, state="stopped"), ended)) == "rank 2 of 3 ended: finished"


@pytest.mark.parametrize("explanation", [whom, lost])
def test_nobody_is_silent_where_nobody_can_be_heard(explanation: Callable[[View], str]) -> None:
    far = replace(WAITS, silent_s=60.0, state="elsewhere")
    deaf = replace(view(WAITS, far, far), deaf="the ranks' store is gone (x)")
    assert explanation(deaf) == "the ranks' store is gone (x)"
    assert slowness(deaf, 0.0) == "the ranks' store is gone (x); rank 0 of 3 is in the update of step 4 for 6.0 s"
    said = replace(deaf, signs={**deaf.signs, 1: replace(far, ended="LookupError: x", exit=Exit.CRASHED)})
    assert explanation(said) == "rank 1 of 3 ended: LookupError: x"
    assert slowness(said, 0.0).startswith("rank 1 of 3 ended: LookupError: x")
    stopped = replace(deaf, signs={**deaf.signs, 2: replace(far, state="stopped")})
    assert slowness(stopped, 0.0).startswith("rank 2 of 3 is stopped")


def test_a_sign_of_before_says_nothing_of_this_step() -> None:
    assert informed(view(WAITS, replace(WORKS, silent_s=2.9)))
    short = replace(WAITS, phase_s=4.0)
    assert not informed(view(short, WORKS, replace(WORKS, silent_s=2.0)))
    assert informed(view(short, replace(WORKS, silent_s=SILENCE_S)))
    assert informed(view(short, replace(WORKS, silent_s=2.5, ended="finished")))


def test_one_rank_speaks_for_all_that_are_heard() -> None:
    unheard = replace(WAITS, silent_s=SILENCE_S)
    assert speaks(view(WAITS, WAITS, WAITS))
    assert not speaks(view(WAITS, WAITS, WAITS, rank=1))
    assert speaks(view(unheard, WAITS, WAITS, rank=1))


def test_what_lasts_is_a_wait_of_anyone_or_an_update() -> None:
    evaluates = replace(WORKS, phase="evaluation", phase_s=99.0)
    assert lasts_s(view(evaluates, evaluates)) == 0.0
    assert lasts_s(view(evaluates, WAITS)) == WAITS.phase_s
    assert lasts_s(view(evaluates, replace(WAITS, phase="evaluation"))) == WAITS.since_s
