"""Checkers of one history: each accepts the smallest good one, and rejects the smallest bad one for its reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon_falsify.checkers import (
    halts,
    plan_followed,
    replicas_agree,
    samples_once,
)
from andon_falsify.history import read_lines
from andon_falsify.verdict import Outcome, Verdict
from tests.falsify.notation import history, says

HOLDS, FALSIFIED, UNKNOWN, INAPPLICABLE = Outcome.HOLDS, Outcome.FALSIFIED, Outcome.UNKNOWN, Outcome.NOT_APPLICABLE


@pytest.mark.parametrize("field", ["weights", "optimizer", "gradient"])
def test_replicas_agree(field: str) -> None:
    good = "1: 0[a] 1[b] 2[c] | 2: 0[a] 1[b] 2[c] | 3: 0[a] 1[b] 2[c]"
    says(replicas_agree.check(history(good)), HOLDS)
    says(
        replicas_agree.check(history(f"{good} {field[0]}=7,8,7")),
        FALSIFIED,
        f"step 3, rank 1: the {field} differs",
        "seen 0000000000000008",
    )
    says(replicas_agree.check(history(f"{good} {field[0]}=8,7,7")), FALSIFIED, "step 3, rank 0")
    says(replicas_agree.check(history(f"{good} {field[0]}=8,7,9")), FALSIFIED, "step 3, ranks 1, 2")


def test_replicas_agree_infers_nothing_from_silence() -> None:
    says(replicas_agree.check(history("1: 0[a]")), INAPPLICABLE, "one rank")
    says(replicas_agree.check(history("")), UNKNOWN)
    says(replicas_agree.check(history("1: 0[a] 1[b]", world=3)), UNKNOWN, "rank 2")
    says(replicas_agree.check(history("1: 0[a]", world=2)), UNKNOWN, "rank 1")
    says(replicas_agree.check(history("1: ids=a,b", world=2)), UNKNOWN, "any rank")
    says(replicas_agree.check(history("1: 0[a] 1[b] o=-")), UNKNOWN, "no optimizer digest of rank 0, 1")
    says(replicas_agree.check(history("1: 0[a] 1[b] o=7,-")), UNKNOWN, "no optimizer digest of rank 1")
    says(replicas_agree.check(history("1: 0[a] 1[b] o=- w=1,2")), FALSIFIED, "step 1, rank 1: the weights differs")


def test_replicas_agree_notices_a_lie_about_the_world() -> None:
    says(replicas_agree.check(history("1: 0[a] 0[b]", world=2)), FALSIFIED, "rank 0 is listed 2 times in a world of 2")
    says(replicas_agree.check(history("1: 0[a] 2[b]", world=2)), FALSIFIED, "rank 2 is listed 1 times")


def test_replicas_agree_without_a_stated_world() -> None:
    line = b'{"v":1,"kind":"step","step":1,"ranks":[%s]}\n'
    rank = b'{"rank":%d,"weights":"a","optimizer":"b","gradient":"%d"}'
    for second, outcome in ((1, HOLDS), (2, FALSIFIED)):
        read = read_lines([line % b",".join((rank % (0, 1), rank % (1, second)))], "x")
        says(replicas_agree.check(read), outcome)


EPOCHS = (
    "start rows=4 ids=1,2,3,4 steps=4 | 1: 0[3] 1[1] | 2: 0[2] 1[4] | 3: 0[4] 1[2] epoch=1 | 4: 0[1] 1[3] epoch=1 | end"
)


def test_samples_once() -> None:
    says(samples_once.check(history(EPOCHS)), HOLDS)
    says(samples_once.check(history(EPOCHS.replace(" ids=1,2,3,4", ""))), HOLDS)


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        ("0[3] 1[1]", "0[3] 1[3] ids=3,1", ("step 1: rows used more than once, by ranks 0, 1", "rows 3 (2 times)")),
        ("0[3] 1[1]", "0[3] 1[] ids=3,1", ("step 1: rows of the batch that no rank used", "expected rows 1")),
        ("0[3] 1[1]", "0[3] 1[9] ids=3,1", ("step 1: rows that are not in the batch", "seen rows 9")),
        ("0[3] 1[1]", "0[3] 1[1] count=3", ("step 1: the count", "expected 2, seen 3")),
        ("0[2] 1[4]", "0[2] 1[3]", ("epoch 0: 4 visits of 3 rows", "rows 3 (2 times)", "never visited", "rows 4")),
        ("0[2] 1[4]", "0[2]", ("epoch 0: rows that were never visited", "expected rows 4")),
        ("0[2] 1[4]", "0[2] 1[4 x]", ("epoch 0: rows that are not for training", "rows x")),
    ],
)
def test_samples_once_rejects(good: str, bad: str, words: tuple[str, ...]) -> None:
    says(samples_once.check(history(EPOCHS.replace(good, bad))), FALSIFIED, *words)


def test_samples_once_by_the_number_of_rows_alone() -> None:
    text = EPOCHS.replace(" ids=1,2,3,4", "").replace("0[2] 1[4]", "0[2]")
    says(samples_once.check(history(text)), FALSIFIED, "epoch 0: another number of rows", "expected 4, seen 3")


def test_samples_once_of_accelerates_even_batches() -> None:
    """16 visits of 10 rows at 2 ranks with batch 4, as measured of accelerate, are named with the rows."""
    text = "start rows=10 | 1: 0[5 6 1 2] 1[0 8 9 3] | 2: 0[7 4 5 6] 1[1 2 0 8] | end"
    says(
        samples_once.check(history(text)),
        FALSIFIED,
        "16 visits of 10 rows",
        "rows 0 (2 times), 1 (2 times), 2 (2 times)",
    )


def test_samples_once_names_many_rows_briefly() -> None:
    rows = " ".join(map(str, range(12)))
    says(samples_once.check(history(f"1: 0[{rows}] 1[{rows}] ids={rows.replace(' ', ',')}")), FALSIFIED, "and 4 more")


def test_samples_once_of_an_epoch_that_is_not_over() -> None:
    start = "start rows=4 ids=1,2,3,4 steps=2 | 1: 0[3] 1[1]"
    says(samples_once.check(history(start)), UNKNOWN, "no epoch was complete")
    says(samples_once.check(history(f"{start} | end reason=violation")), UNKNOWN, "no epoch was complete")
    says(samples_once.check(history(f"{start} | 2: 0[3] 1[2]")), FALSIFIED, "4 visits of 3 rows")
    says(samples_once.check(history("2: 0[3] 1[1] | end")), UNKNOWN, "no epoch was complete")
    says(samples_once.check(history("1: 0[3] 1[1] | end")), UNKNOWN, "neither the training rows nor their number")


def test_samples_once_of_an_epoch_that_a_limit_on_updates_ends() -> None:
    says(samples_once.check(history("start rows=4 batch_size=2 steps=1 | 1: 0[3] 1[1] | end")), UNKNOWN, "no epoch")
    whole = "start rows=3 batch_size=2 steps=2 | 1: 0[3] 1[1] | 2: 0[2] | end"
    says(samples_once.check(history(whole)), HOLDS)
    says(samples_once.check(history(whole.replace("0[2]", "0[2] 1[4]"))), FALSIFIED, "expected 3, seen 4")


def test_samples_once_counts_a_step_done_again_once() -> None:
    text = "start rows=4 steps=2 | 1: 0[3] 1[1] | 2: 0[2] 1[4] | resume step=1 | 2: 0[2] 1[4] | end"
    says(samples_once.check(history(text)), HOLDS)


def test_samples_once_infers_nothing_from_lines_without_rows_or_epochs() -> None:
    says(samples_once.check(history("1: ids=a")), UNKNOWN, "step 1 lists no rows")
    says(samples_once.check(history("1: ids=a | 2: ids=a")), FALSIFIED, "epoch 0: 2 visits of 1 rows")
    line = b'{"v":1,"kind":"step","step":1,"ids":[1],"ranks":[{"rank":0,"ids":[1]}]}\n'
    says(samples_once.check(read_lines([line], "x")), UNKNOWN, "no epoch was complete")


@pytest.mark.parametrize(
    ("rows", "said"), [("", "was not told how many rows an epoch has (rows=)"), ('"rows":4', "no epoch was")]
)
def test_samples_once_of_a_watch_that_does_not_know_epochs(rows: str, said: str) -> None:
    text = f'{{"v":2,"kind":"start","writer":"watch","plan":{{{rows}}}}}'
    step = '{"v":2,"kind":"step","step":1,"ids":[1],"ranks":[{"rank":0,"ids":[1]}]}'
    end = '{"v":2,"kind":"end","reason":"finished"}'
    says(samples_once.check(read_lines([f"{line}\n".encode() for line in (text, step, end)], "x")), UNKNOWN, said)


def epoch(number: int, rows: list[int], first: int) -> str:
    pairs = [rows[index : index + 2] for index in range(0, len(rows), 2)]
    return " | ".join(f"{first + i}: 0[{a}] 1[{b}] epoch={number}" for i, (a, b) in enumerate(pairs))


@given(st.permutations(range(8)), st.permutations(range(8)))
def test_two_epochs_differ_in_their_order(first: list[int], second: list[int]) -> None:
    """Falsified exactly where both came in one order; in fewer than eight rows that may be chance."""
    text = f"start rows=8 | {epoch(0, first, 1)} | {epoch(1, second, 5)} | end"
    says(samples_once.check(history(text)), FALSIFIED if first == second else HOLDS)
    again = f"start rows=8 | {epoch(0, first, 1)} | {epoch(1, first, 5)} | end"
    says(samples_once.check(history(again)), FALSIFIED, "epoch 1: the rows came in the order of epoch 0")
    few = [row for row in first if row < 6]
    says(samples_once.check(history(f"start rows=6 | {epoch(0, few, 1)} | {epoch(1, few, 4)} | end")), HOLDS)


@given(st.integers(1, 4), st.integers(1, 12), st.data())
def test_samples_once_accepts_any_split_and_rejects_any_single_change(
    world: int, rows: int, data: st.DataObject
) -> None:
    owners = data.draw(st.lists(st.integers(0, world - 1), min_size=rows, max_size=rows))
    shares = [[row for row in range(rows) if owners[row] == rank] for rank in range(world)]
    batch = ",".join(map(str, range(rows)))

    def verdict() -> Verdict:
        text = " ".join(f"{rank}[{' '.join(map(str, share))}]" for rank, share in enumerate(shares))
        return samples_once.check(history(f"start rows={rows} | 1: {text} ids={batch} | end"))

    says(verdict(), HOLDS)
    row = data.draw(st.integers(0, rows - 1))
    share = shares[owners[row]]
    change = data.draw(st.sampled_from(["double", "drop", "replace"]))
    if change == "double":
        data.draw(st.sampled_from(shares)).append(row)
    else:
        share.remove(row)
        share.extend([rows] if change == "replace" else [])
    says(verdict(), FALSIFIED)


PLAN = {1: ["a", "b"], 2: ["c", "d"]}


def test_plan_followed() -> None:
    says(plan_followed.check(history("1: 0[a] 1[b] | 2: 0[c] 1[d] | end"), PLAN), HOLDS)
    says(plan_followed.check(history("1: 0[a] 1[b]"), PLAN), HOLDS)


def test_plan_followed_up_to_where_a_run_stopped_early() -> None:
    """A rule of the run's own ends it with planned updates left: that is no fault, and one left out before it is."""
    says(plan_followed.check(history("1: 0[a] 1[b] | end reason=early-stopping"), PLAN), HOLDS)
    left_out = history("2: 0[c] 1[d] | end reason=early-stopping")
    says(plan_followed.check(left_out, PLAN), FALSIFIED, "step 1: 1 planned updates were never made")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1: 0[b] 1[a]", ("step 1: the planned rows in another order", "expected [a b], seen [b a]")),
        ("1: 0[a] 1[x]", ("step 1: other rows than planned",)),
        ("1: 0[c] 1[d]", ("other rows than planned: those of step 2",)),
        ("3: 0[a] 1[b]", ("step 3: an update that was not planned",)),
        ("1: 0[a] 1[b] | end", ("step 2: 1 planned updates were never made",)),
    ],
)
def test_plan_followed_rejects(text: str, words: tuple[str, ...]) -> None:
    says(plan_followed.check(history(text), PLAN), FALSIFIED, *words)


def test_plan_followed_infers_nothing_without_a_plan_or_rows() -> None:
    says(plan_followed.check(history("1: 0[a]"), None), INAPPLICABLE)
    says(plan_followed.check(history("1: loss=1"), PLAN), UNKNOWN, "step 1 lists no rows")
    says(plan_followed.check(history(""), PLAN), UNKNOWN)


def test_plan_followed_shows_long_batches_briefly() -> None:
    rows = list(range(20))
    says(plan_followed.check(history("1: 0[a]"), {1: rows}), FALSIFIED, "11 ...]")


def test_halts() -> None:
    broken = "1: 0[a] 1[b] | violation clause=finite step=2 | end reason=violation"
    says(halts.check(history(broken)), HOLDS)
    says(halts.check(history(broken), planted=2, clause="finite", stopped_at={0: 2, 1: 2}), HOLDS)
    says(halts.check(history(f"{broken} | resume step=1 | 2: 0[c] 1[d]"), planted=2), HOLDS)
    poisoned = "1: 0[a] 1[b] w=7 | 2: 0[c] 1[d] w=7 loss=nan | violation clause=finite step=2"
    says(halts.check(history(poisoned), planted=2), HOLDS)
    says(halts.check(history("start w=7 | 1: 0[a] w=7 norm=inf | violation step=1")), HOLDS)
    says(halts.check(history("2: 0[a] w=7 norm=inf | violation step=2")), HOLDS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "1: 0[a] w=7 loss=nan | violation step=1 | 2: 0[b]",
            ("1 more updates after a non-finite", "after a violation"),
        ),
        (
            "1: 0[a] w=7 | 2: 0[b] w=8 norm=inf | violation step=2",
            ("step 2: the weights changed in a non-finite step",),
        ),
        ("start w=7 | 1: 0[a] w=8 loss=nan | violation step=1", ("step 1: the weights changed",)),
        ("1: 0[a] loss=nan", ("step 1: a non-finite step without a violation",)),
        ("1: 0[a] | violation step=2 | 2: 0[b]", ("step 2: 1 more updates after a violation",)),
        ("1: 0[a] | violation step=1", ("step 1: the violated step was recorded as an update",)),
        ("1: 0[a] | violation step=2 | violation step=3", ("violations of one run at several steps", "seen 2, 3")),
    ],
)
def test_halts_rejects(text: str, words: tuple[str, ...]) -> None:
    says(halts.check(history(text)), FALSIFIED, *words)


def test_halts_judges_a_planted_fault() -> None:
    clean = "1: 0[a] | 2: 0[b] | 3: 0[c]"
    says(
        halts.check(history(clean), planted=2),
        FALSIFIED,
        "step 2: a planted fault left no violation",
        "went on to step 3",
    )
    says(halts.check(history("1: 0[a]"), planted=2), FALSIFIED, "its last update is step 1")
    says(halts.check(history(f"{clean} | violation step=4"), planted=2), FALSIFIED, "expected 2, seen 4")
    says(
        halts.check(history("1: 0[a] | violation clause=x step=2"), planted=2, clause="finite"),
        FALSIFIED,
        "expected finite, seen x",
    )
    says(halts.check(history("1: 0[a]"), planted=3), UNKNOWN, "never reached step 3")


def test_halts_needs_something_to_halt() -> None:
    says(halts.check(history("1: 0[a] | end")), UNKNOWN, "nothing ever went wrong")
    says(halts.check(history("")), UNKNOWN)


def test_halts_together() -> None:
    says(halts.check(history(""), stopped_at={0: 3, 1: 2}), FALSIFIED, "step 2", "rank 0 at step 3, rank 1 at step 2")


def test_what_a_watch_says_is_taken_as_it_means_it() -> None:
    """A warning stops nothing; a violation after an update does not deny it; what has no replica is not compared.

    The same lines from the trainer falsify, or leave something unknown.
    """
    warned = "start w=1 | 1: 0[a] 1[b] | violation clause=replicas-agree step=1 action={} | 2: 0[c] 1[d]"
    says(halts.check(history(warned.format("warned"))), UNKNOWN, "nothing ever went wrong")
    says(halts.check(history(warned.format("raised"))), FALSIFIED, "1 more updates after a violation")
    applied = "start w=1 | 1: 0[a] 1[b] | violation clause=replicas-agree step=1 action=raised"
    says(halts.check(history(applied)), FALSIFIED, "the violated step was recorded as an update")
    sharded = "start {}| 1: 0[a] 1[b] w=- o=- g=- | 2: 0[c] 1[d] w=- o=- g=-"
    says(replicas_agree.check(history(sharded.format("writer=watch "))), INAPPLICABLE, "no shard has a replica")
    says(replicas_agree.check(history(sharded.format(""))), UNKNOWN, "no gradient digest")
    dealt = "start writer=watch | 1: 0[a] 1[b] o=- | 2: 0[c] 1[d] o=- w={}"
    says(replicas_agree.check(history(dealt.format("7"))), HOLDS)
    says(replicas_agree.check(history(dealt.format("7,8"))), FALSIFIED, "step 2, rank 1: the weights")


def test_a_violation_after_an_update_does_not_deny_it() -> None:
    """A watch finds some things only in the weights that an update left; the update stays one."""
    lines = [
        b'{"v":2,"kind":"step","step":1}\n',
        b'{"v":2,"kind":"violation","clause":"replicas-agree","step":1,"action":"raised","applied":true}\n',
    ]
    says(halts.check(read_lines(lines, "applied")), HOLDS)
    lines[1] = lines[1].replace(b',"applied":true', b"")
    says(halts.check(read_lines(lines, "not applied")), FALSIFIED, "recorded as an update")
