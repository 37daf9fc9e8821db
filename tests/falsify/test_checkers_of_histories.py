"""Histories, and what checkers say of them: each accepts the smallest good one, and rejects the smallest bad one."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andon_falsify.claims import (
    chain_intact,
    gradient_law,
    halt_together,
    layout_equal,
    loss_finite,
    losses_close,
    memory_budget,
    plan_followed,
    replicas_agree,
    resume_equal,
    same_everywhere,
    samples_once,
    schedule,
)
from andon_falsify.claims.explain import explain_ratio
from andon_falsify.history import History, Unread, read_history, read_lines
from andon_falsify.reference.published import PublishedSchedule
from andon_falsify.verdict import Outcome, Verdict
from tests.falsify.notation import FALSIFIED, HOLDS, INAPPLICABLE, UNKNOWN, history, ledger_lines, says, told

STEP = {"v": 5, "kind": "step", "seq": 0, "prev": "0" * 16, "step": 1}


def one(fields: object) -> History:
    return read_lines([json.dumps(fields).encode() + b"\n"], "one")


def unread(read: History) -> Unread:
    assert read.events == ()
    (line,) = read.unread
    return line


def test_a_step_line_is_read_field_by_field() -> None:
    text = {
        **STEP,
        "epoch": 2,
        "ids": [7, "b"],
        "count": 2,
        "world": 2,
        "backend": "gloo",
        "lr": {"value": 0.5, "hex": "0x1.0p-1"},
        "loss": {"value": None, "hex": "nan"},
        "grad_norm": 0.25,
        "digests": {"weights": "00000000000000aa", "content": ""},
        "ranks": [{"rank": 1, "ids": [7], "weights": "00000000000000ab"}],
    }
    (event,) = one(text).steps
    assert (event.number, event.epoch, event.count) == (1, 2, 2)
    assert (event.ids, event.world, event.backend) == ((7, "b"), 2, "gloo")
    assert event.digests == {"weights": "00000000000000aa"}
    assert (event.lr.value, event.grad_norm.hex) == (0.5, (0.25).hex())
    assert (event.loss.finite, event.finite) == (False, False)
    (rank,) = event.ranks
    assert (rank.rank, rank.ids) == (1, (7,))
    assert (rank.weights, rank.optimizer, rank.gradient) == ("00000000000000ab", None, None)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ([], "a list where an object"),
        ({**STEP, "v": 6}, "version 6 is not 5"),
        ({**STEP, "v": True}, "version True is not 5"),
        ({**STEP, "kind": "stop"}, "kind 'stop'"),
        ({**STEP, "kind": ["step"]}, "kind ['step']"),
        ({**STEP, "step": 0}, "step is 0"),
        ({**STEP, "step": True}, "step is True"),
        ({**STEP, "epoch": 1.5}, "epoch is 1.5"),
        ({**STEP, "step": 10**400}, "a step line whose step is 1000"),
        ({**STEP, "ids": [1 << 63]}, "ids holds 9223372036854775808"),
        ({**STEP, "ids": {"a": 1}}, "ids is {'a': 1}, not a list"),
        ({**STEP, "ids": [1.5]}, "ids holds 1.5"),
        ({**STEP, "loss": "low"}, "loss is 'low'"),
        ({**STEP, "loss": {"value": 1.0}}, "not value and hex"),
        ({**STEP, "loss": {"value": True, "hex": "x"}}, "not value and hex"),
        ({**STEP, "ranks": [3]}, "ranks holds 3"),
        ({**STEP, "ranks": [{"rank": "0"}]}, "rank '0'"),
        ({**STEP, "ranks": [{"rank": 0, "weights": 7}]}, "weights is 7, not text"),
        ({**STEP, "digests": []}, "digests is [], not an object"),
        ({**STEP, "prev": 3}, "prev is 3"),
        ({"v": 5, "kind": "start", "plan": {"rows": "x"}}, "rows is 'x'"),
        ({"v": 5, "kind": "start", "plan": {"rows": 1 << 63}}, "rows is 9223372036854775808"),
    ],
)
def test_what_does_not_fit_the_schema_is_reported(fields: object, why: str) -> None:
    assert why in unread(one(fields)).why


def test_what_is_no_json_or_huge_is_reported_in_few_words() -> None:
    read = read_lines([b"{oops\n", b"\xff\n", b"[" * 200_000 + b"\n"], "x")
    assert [line.why.split(":")[0] for line in read.unread] == ["not JSON", "not UTF-8", "not JSON"]
    assert not read.torn
    line = unread(one({**STEP, "loss": "x" * 1_000_000}))
    assert len(line.why) < 200
    assert len(line.excerpt) <= 80


def test_numbers_beyond_a_float_are_not_finite() -> None:
    for raw in ("1" + "0" * 400, "-1" + "0" * 400, "NaN", "Infinity"):
        line = json.dumps(STEP)[:-1] + f', "loss": {raw}, "lr": {{"value": {raw}, "hex": "x"}}}}\n'
        (event,) = read_lines([line.encode()], "x").steps
        assert (event.loss.finite, event.lr.finite) == (False, False)


def test_a_file_is_read_as_its_lines_up_to_a_bound(tmp_path: Path) -> None:
    text = b""
    prev = "0" * 16
    for number in range(3):
        body = json.dumps({**STEP, "seq": number, "prev": prev, "step": number + 1}).encode()
        prev = hashlib.sha256(body).hexdigest()[:16]
        text += body + b"\n"
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(text + b'{"v":5,"ki')
    read = read_history(path)
    assert [event.number for event in read.steps] == [1, 2, 3]
    assert read.torn
    assert chain_intact.check_history(read).outcome is Outcome.HOLDS
    with pytest.raises(FileNotFoundError):
        read_history(tmp_path / "absent")
    good = json.dumps(STEP).encode() + b"\n"
    path.write_bytes(good + b"x" * 1000 + b"\n" + good)
    read = read_history(path, max_line_bytes=100)
    assert len(read.steps) == 2
    assert [line.line for line in read.unread] == [2]
    assert not read.torn
    path.write_bytes(good * 3)
    read = read_history(path, max_lines=2)
    assert len(read.steps) == 2
    assert "more than 2 lines" in read.unread[0].why


def test_runs_and_trajectory_of_a_resumed_history() -> None:
    read = history("start | 1: 0[a] | 2: 0[b] w=5 | torn | resume step=1 | 2: 0[b] w=6 | 3: 0[c] | end")
    assert [event.number for event in read.steps] == [1, 2, 3]
    read = history("start | 1: 0[a] | 2: 0[b] w=5 | resume step=1 | 2: 0[b] w=6 | 3: 0[c] | end reason=finished")
    assert [event.number for event in read.steps] == [1, 2, 2, 3]
    assert list(read.trajectory) == [1, 2, 3]
    assert read.trajectory[2].digests["weights"].endswith("6")
    assert [[event.number for event in run.steps] for run in read.runs] == [[1, 2], [2, 3]]
    assert [(run.resumed, run.finished) for run in read.runs] == [(False, False), (True, True)]


def test_only_a_completed_run_is_finished() -> None:
    ends = {"early-stopping": True, "violation": False, "preempted": False}
    assert {reason: history(f"1: 0[a] | end reason={reason}").runs[-1].finished for reason in ends} == ends
    assert history("1: 0[a] | end").runs[-1].finished
    read = history("")
    assert (read.runs, read.start, read.steps, read.torn, read.plan.rows) == ((), None, (), False, None)


def test_the_plan_and_the_initial_weights_of_a_start_line() -> None:
    read = history("start rows=4 ids=a,b steps=2 w=7")
    assert (read.plan.rows, read.plan.ids, read.plan.steps) == (4, ("a", "b"), 2)
    assert read.start.initial_weights == "7".rjust(16, "0")
    other = one({"v": 5, "kind": "start", "digests": {"weights": "8"}})
    assert other.start.initial_weights == "8"


def raw(*lines: str) -> History:
    return read_lines([f"{line}\n".encode() for line in lines], "raw")


AGREED = "1: 0[a] 1[b] 2[c] | 2: 0[a] 1[b] 2[c] | 3: 0[a] 1[b] 2[c]"


@pytest.mark.parametrize("field", ["weights", "optimizer", "gradient"])
def test_replicas_agree(field: str) -> None:
    told(replicas_agree, AGREED, HOLDS)
    text = f"{AGREED} {field[0]}="
    told(replicas_agree, f"{text}7,8,7", FALSIFIED, f"step 3, rank 1: the {field} differ", "seen 0000000000000008")
    told(replicas_agree, f"{text}8,7,7", FALSIFIED, "step 3, rank 0")
    told(replicas_agree, f"{text}8,7,9", FALSIFIED, "step 3, ranks 1, 2")
    start = "start w=1 | violation clause=replicas-agree step=0 seen=x | 1: 0[a] 1[b] "
    told(replicas_agree, start, HOLDS)
    told(replicas_agree, f"{start}w=7,8", FALSIFIED, "before step 1: the initial weights differ between ranks")


def test_replicas_agree_infers_nothing_from_silence_and_notices_a_lie_about_the_world() -> None:
    told(replicas_agree, "1: 0[a]", INAPPLICABLE, "one rank")
    told(replicas_agree, "", UNKNOWN)
    told(replicas_agree, history("1: 0[a] 1[b]", world=3), UNKNOWN, "rank 2")
    told(replicas_agree, history("1: 0[a]", world=2), UNKNOWN, "rank 1")
    told(replicas_agree, history("1: ids=a,b", world=2), UNKNOWN, "any rank")
    told(replicas_agree, "1: 0[a] 1[b] o=-", UNKNOWN, "no optimizer digest of rank 0, 1")
    told(replicas_agree, "1: 0[a] 1[b] o=7,-", UNKNOWN, "no optimizer digest of rank 1")
    told(replicas_agree, "1: 0[a] 1[b] o=- w=1,2", FALSIFIED, "step 1, rank 1: the weights differ")
    told(replicas_agree, history("1: 0[a] 0[b]", world=2), FALSIFIED, "rank 0 is listed 2 times in a world of 2")
    told(replicas_agree, history("1: 0[a] 2[b]", world=2), FALSIFIED, "rank 2 is listed 1 times")
    rank = '{"rank":%d,"weights":"a","optimizer":"b","gradient":"%d"}'
    for second, outcome in ((1, HOLDS), (2, FALSIFIED)):
        listed = ",".join((rank % (0, 1), rank % (1, second)))
        told(replicas_agree, raw(f'{{"v":5,"kind":"step","step":1,"ranks":[{listed}]}}'), outcome)


EPOCHS = (
    "start rows=4 ids=1,2,3,4 steps=4 | 1: 0[3] 1[1] | 2: 0[2] 1[4] | 3: 0[4] 1[2] epoch=1 | 4: 0[1] 1[3] epoch=1 | end"
)
MANY = " ".join(map(str, range(12)))


def test_samples_once() -> None:
    told(samples_once, EPOCHS, HOLDS)
    told(samples_once, EPOCHS.replace(" ids=1,2,3,4", ""), HOLDS)
    again = "start rows=4 steps=2 | 1: 0[3] 1[1] | 2: 0[2] 1[4] | resume step=1 | 2: 0[2] 1[4] | end"
    told(samples_once, again, HOLDS)


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        ("0[3] 1[1]", "0[3] 1[3] ids=3,1", ("step 1: rows used more than once, by ranks 0, 1", "rows 3 (2 times)")),
        ("0[3] 1[1]", "0[3] 1[] ids=3,1", ("step 1: rows of the batch that no rank used", "expected rows 1")),
        ("0[3] 1[1]", "0[3] 1[9] ids=3,1", ("step 1: rows that are not in the batch", "seen rows 9")),
        ("0[3] 1[1]", "0[3] 1[1] count=3", ("step 1: the count", "expected 2, seen 3")),
        ("0[2] 1[4]", "0[2] 1[3]", ("epoch 0: 4 visits of 3 rows", "rows 3 (2 times)", "never visited", "rows 4")),
        ("0[2] 1[4]", "0[2]", ("epoch 0: rows that were never visited", "expected rows 4")),
        ("0[2] 1[4]", "0[2] 1[4 x]", ("epoch 0: rows outside the training set", "rows x")),
    ],
)
def test_samples_once_rejects(good: str, bad: str, words: tuple[str, ...]) -> None:
    told(samples_once, EPOCHS.replace(good, bad), FALSIFIED, *words)


def test_samples_once_by_the_number_of_rows_alone() -> None:
    text = EPOCHS.replace(" ids=1,2,3,4", "").replace("0[2] 1[4]", "0[2]")
    told(samples_once, text, FALSIFIED, "epoch 0: a different number of rows", "expected 4, seen 3")
    # Of accelerate's even batches, as measured: 16 visits of 10 rows at 2 ranks with batch 4.
    text = "start rows=10 | 1: 0[5 6 1 2] 1[0 8 9 3] | 2: 0[7 4 5 6] 1[1 2 0 8] | end"
    told(samples_once, text, FALSIFIED, "16 visits of 10 rows", "rows 0 (2 times), 1 (2 times), 2 (2 times)")
    told(samples_once, f"1: 0[{MANY}] 1[{MANY}] ids={MANY.replace(' ', ',')}", FALSIFIED, "and 4 more")


def test_samples_once_of_an_epoch_that_is_not_over_or_not_known() -> None:
    start = "start rows=4 ids=1,2,3,4 steps=2 | 1: 0[3] 1[1]"
    told(samples_once, start, UNKNOWN, "no epoch was complete")
    told(samples_once, f"{start} | end reason=violation", UNKNOWN, "no epoch was complete")
    told(samples_once, f"{start} | 2: 0[3] 1[2]", FALSIFIED, "4 visits of 3 rows")
    told(samples_once, "2: 0[3] 1[1] | end", UNKNOWN, "no epoch was complete")
    told(samples_once, "1: 0[3] 1[1] | end", UNKNOWN, "neither the training rows nor their number")
    told(samples_once, "start rows=4 batch_size=2 steps=1 | 1: 0[3] 1[1] | end", UNKNOWN, "no epoch")
    whole = "start rows=3 batch_size=2 steps=2 | 1: 0[3] 1[1] | 2: 0[2] | end"
    told(samples_once, whole, HOLDS)
    told(samples_once, whole.replace("0[2]", "0[2] 1[4]"), FALSIFIED, "expected 3, seen 4")
    told(samples_once, "1: ids=a", UNKNOWN, "step 1 lists no rows")
    told(samples_once, "1: ids=a | 2: ids=a", FALSIFIED, "epoch 0: 2 visits of 1 rows")
    step = '{"v":5,"kind":"step","step":1,"ids":[1],"ranks":[{"rank":0,"ids":[1]}]}'
    told(samples_once, raw(step), UNKNOWN, "no epoch was complete")
    start = '{"v":5,"kind":"start","writer":"watch","plan":{"rows":4}}'
    end = '{"v":5,"kind":"end","reason":"finished"}'
    told(samples_once, raw(start, step, end), UNKNOWN, "no epochs without rows= and plan=")


def epoch(number: int, rows: list[int], first: int) -> str:
    pairs = [rows[index : index + 2] for index in range(0, len(rows), 2)]
    return " | ".join(f"{first + i}: 0[{a}] 1[{b}] epoch={number}" for i, (a, b) in enumerate(pairs))


@given(st.permutations(range(8)), st.permutations(range(8)))
def test_two_epochs_differ_in_their_order(first: list[int], second: list[int]) -> None:
    """Falsified exactly where both came in one order; in fewer than eight rows that may be chance."""
    text = f"start rows=8 | {epoch(0, first, 1)} | {epoch(1, second, 5)} | end"
    told(samples_once, text, FALSIFIED if first == second else HOLDS)
    again = f"start rows=8 | {epoch(0, first, 1)} | {epoch(1, first, 5)} | end"
    told(samples_once, again, FALSIFIED, "epoch 1: the rows have the order of epoch 0")
    few = [row for row in first if row < 6]
    told(samples_once, f"start rows=6 | {epoch(0, few, 1)} | {epoch(1, few, 4)} | end", HOLDS)


PLAN = {1: ["a", "b"], 2: ["c", "d"]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1: 0[b] 1[a]", ("step 1: the planned rows in another order", "expected [a b], seen [b a]")),
        ("1: 0[a] 1[x]", ("step 1: other rows than planned",)),
        ("1: 0[c] 1[d]", ("other rows than planned: those of step 2",)),
        ("3: 0[a] 1[b]", ("step 3: an update that was not planned",)),
        ("1: 0[a] 1[b] | end", ("step 2: 1 planned updates were never made",)),
        ("2: 0[c] 1[d] | end reason=early-stopping", ("step 1: 1 planned updates were never made",)),
    ],
)
def test_plan_followed_rejects(text: str, words: tuple[str, ...]) -> None:
    told(plan_followed, text, FALSIFIED, *words, plan=PLAN)


def test_plan_followed() -> None:
    told(plan_followed, "1: 0[a] 1[b] | 2: 0[c] 1[d] | end", HOLDS, plan=PLAN)
    told(plan_followed, "1: 0[a] 1[b]", HOLDS, plan=PLAN)
    told(plan_followed, "1: 0[a] 1[b] | end reason=early-stopping", HOLDS, plan=PLAN)
    told(plan_followed, "1: loss=1", UNKNOWN, "step 1 lists no rows", plan=PLAN)
    told(plan_followed, "", UNKNOWN, plan=PLAN)
    told(plan_followed, "1: 0[a]", FALSIFIED, "11 ...]", plan={1: list(range(20))})


def test_halts() -> None:
    broken = "1: 0[a] 1[b] | violation clause=finite step=2 | end reason=violation"
    told(halt_together, broken, HOLDS)
    told(halt_together, broken, HOLDS, planted=2, clause="finite", stopped_at={0: 2, 1: 2})
    told(halt_together, f"{broken} | resume step=1 | 2: 0[c] 1[d]", HOLDS, planted=2)
    not_finite = "1: 0[a] 1[b] w=7 | 2: 0[c] 1[d] w=7 loss=nan | violation clause=finite step=2"
    told(halt_together, not_finite, HOLDS, planted=2)
    told(halt_together, "start w=7 | 1: 0[a] w=7 norm=inf | violation step=1", HOLDS)
    told(halt_together, "2: 0[a] w=7 norm=inf | violation step=2", HOLDS)
    told(halt_together, "1: 0[a] | end", UNKNOWN, "nothing is recorded that had to stop it")
    told(halt_together, "", UNKNOWN)
    told(halt_together, "", FALSIFIED, "step 2", "rank 0 at step 3, rank 1 at step 2", stopped_at={0: 3, 1: 2})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1: 0[a] w=7 loss=nan | violation step=1 | 2: 0[b]", "1 more updates after a non-finite"),
        ("1: 0[a] w=7 loss=nan | violation step=1 | 2: 0[b]", "after a violation"),
        ("1: 0[a] w=7 | 2: 0[b] w=8 norm=inf | violation step=2", "step 2: the weights changed in a non-finite step"),
        ("start w=7 | 1: 0[a] w=8 loss=nan | violation step=1", "step 1: the weights changed"),
        ("1: 0[a] loss=nan", "step 1: a non-finite step without a violation"),
        ("1: 0[a] | violation step=2 | 2: 0[b]", "step 2: 1 more updates after a violation"),
        ("1: 0[a] | violation step=1", "step 1: the violated step was recorded as an update"),
        ("1: 0[a] | violation step=2 | violation step=3", "at several steps; expected one step, seen 2, 3"),
    ],
)
def test_halts_rejects(text: str, said: str) -> None:
    told(halt_together, text, FALSIFIED, said)


def test_halts_judges_a_planted_fault() -> None:
    clean = "1: 0[a] | 2: 0[b] | 3: 0[c]"
    silent = "step 2: a planted fault left no violation"
    told(halt_together, clean, FALSIFIED, silent, "went on to step 3", planted=2)
    told(halt_together, "1: 0[a]", FALSIFIED, "its last update is step 1", planted=2)
    told(halt_together, f"{clean} | violation step=4", FALSIFIED, "expected 2, seen 4", planted=2)
    other = "1: 0[a] | violation clause=x step=2"
    told(halt_together, other, FALSIFIED, "expected finite, seen x", planted=2, clause="finite")
    told(halt_together, "1: 0[a]", UNKNOWN, "never reached step 3", planted=3)


def test_what_a_watch_says_is_taken_as_it_means_it() -> None:
    """A warning stops nothing; a violation after an update does not deny it; what has no replica is not compared."""
    applied = "start w=1 | 1: 0[a] 1[b] | violation clause=replicas-agree step=1 action={}"
    told(halt_together, f"{applied.format('warned')} | 2: 0[c] 1[d]", UNKNOWN, "nothing is recorded")
    told(halt_together, f"{applied.format('raised')} | 2: 0[c] 1[d]", FALSIFIED, "1 more updates after a violation")
    told(halt_together, applied.format("raised"), FALSIFIED, "the violated step was recorded as an update")
    sharded = "start {}| 1: 0[a] 1[b] w=- o=- g=- | 2: 0[c] 1[d] w=- o=- g=-"
    told(replicas_agree, sharded.format("writer=watch "), INAPPLICABLE, "no shard has a replica")
    told(replicas_agree, sharded.format(""), UNKNOWN, "no gradient digest")
    dealt = "start writer=watch | 1: 0[a] 1[b] o=- | 2: 0[c] 1[d] o=- w={}"
    told(replicas_agree, dealt.format("7"), HOLDS)
    told(replicas_agree, dealt.format("7,8"), FALSIFIED, "step 2, rank 1: the weights")
    step, broken = (
        '{"v":5,"kind":"step","step":1}',
        '{"v":5,"kind":"violation","clause":"x","step":1,"action":"raised"%s}',
    )
    told(halt_together, raw(step, broken % ',"applied":true'), HOLDS)
    told(halt_together, raw(step, broken % ""), FALSIFIED, "recorded as an update")


def test_chain_intact() -> None:
    told(chain_intact, "start | 1: 0[a] | resume step=1 | 2: 0[b]", HOLDS)
    told(chain_intact, "start | 1: 0[a] | torn", HOLDS, "line 2 was cut short")
    told(chain_intact, "", UNKNOWN)
    told(chain_intact, "start | garbage | 1: 0[a]", FALSIFIED, "line 2: unreadable: not JSON")
    told(chain_intact, "start | 1: 0[a] | torn | 2: 0[b]", FALSIFIED, "line 2: unreadable")
    told(chain_intact, "start | garbage", FALSIFIED, "line 2: unreadable")
    told(chain_intact, raw('{"v":5,"kind":"end","prev":"%s"}' % ("0" * 16)), FALSIFIED, "seq None")


def lines_of(text: str) -> list[str]:
    return [line.decode().removesuffix("\n") for line in ledger_lines(text)]


def test_chain_intact_rejects_every_way_to_tamper() -> None:
    lines = lines_of("start | 1: 0[a] | 2: 0[b] | 3: 0[c] | end")
    told(chain_intact, raw(*lines), HOLDS)
    changed = lines[1].replace('"epoch": 0', '"epoch": 1')
    assert changed != lines[1]
    told(chain_intact, raw(lines[0], changed, *lines[2:]), FALSIFIED, "line 3: it or the line before it was changed")
    told(chain_intact, raw(*lines[1:]), FALSIFIED, "line 1: it or the line before it was changed", "seq 0, seen seq 1")
    told(chain_intact, raw(*lines[:2], *lines[3:]), FALSIFIED, "line 3", "expected seq 2, seen seq 3")
    told(chain_intact, raw(lines[0], lines[2], lines[1], *lines[3:]), FALSIFIED)
    told(chain_intact, raw(*lines[:2], lines[1], *lines[2:]), FALSIFIED, "seen seq 1")


@given(st.integers(0, 4), st.data())
def test_chain_intact_rejects_any_changed_byte(line: int, data: st.DataObject) -> None:
    lines = lines_of("start | 1: 0[a] | 2: 0[b] | 3: 0[c] | end | end")
    place = data.draw(st.integers(0, len(lines[line]) - 1))
    byte = data.draw(st.integers(32, 126).map(chr).filter(lambda value: value != lines[line][place]))
    lines[line] = lines[line][:place] + byte + lines[line][place + 1 :]
    told(chain_intact, raw(*lines), FALSIFIED)


def test_loss_finite() -> None:
    told(loss_finite, "1: 0[a] loss=0.5 norm=1e30", HOLDS)
    told(loss_finite, "1: 0[a] | 2: 0[b] loss=nan", FALSIFIED, "step 2: the loss", "seen nan")
    told(loss_finite, "1: 0[a] norm=-inf", FALSIFIED, "step 1: the gradient norm", "seen -inf")
    told(loss_finite, "end", UNKNOWN)


def test_a_loop_that_tells_no_loss_is_judged_by_its_norms() -> None:
    """A watch may know no loss at all; of the trainer, or where some updates have one, silence is unknown."""
    start = '{"v":5,"kind":"start","writer":"watch"}'
    first = '{"v":5,"kind":"step","step":1,"grad_norm":1.0}'
    second = first.replace('"step":1', '"step":2')
    told(loss_finite, raw(start, first, second), HOLDS, "gradient norms only")
    told(loss_finite, raw(first, second), UNKNOWN, "step 1 records no loss")
    told(loss_finite, raw(start, first, second.replace("1.0", '1.0,"loss":0.5')), UNKNOWN, "step 1 records no loss")
    infinite = second.replace("1.0", '{"value":null,"hex":"inf"}')
    told(loss_finite, raw(start, first, infinite), FALSIFIED, "step 2: the gradient norm")


LAW = PublishedSchedule(peak=1.0, total=10, fraction=0.2, minimum=0.1)


def test_the_closed_form_of_the_schedule() -> None:
    assert [LAW(1), LAW(2)] == [0.5, 1.0]
    assert LAW(6) == pytest.approx(0.55, rel=1e-15)
    assert [LAW(10), LAW(11)] == pytest.approx([0.1, 0.1], rel=1e-15)
    assert PublishedSchedule(1.0, 2, 1.0)(3) == 0.0
    assert PublishedSchedule(1.0, 4, 0.0, 2.0)(4) == 1.0
    half = PublishedSchedule(1.0, 5, 0.5)
    assert [half(1), half(2), half(5)] == pytest.approx([0.5, 1.0, 0.0])
    assert half(2) > half(3) > half(4) > half(5)
    line, level = (PublishedSchedule(1.0, 20, 0.9, 0.2, kind, steps=4) for kind in ("linear", "constant"))
    assert [line(step) for step in (2, 8, 12, 21)] == pytest.approx([0.5, 0.8, 0.6, 0.2])
    assert [level(step) for step in (2, 5, 21)] == [0.5, 1.0, 1.0]


def rates(*steps: int, of: int = 1) -> str:
    return " | ".join(f"{step}: 0[a] lr={LAW(of * step)!r}" for step in steps)


def test_schedule() -> None:
    """Advanced once a micro-batch, or restarted on resume, the rate is another step's, and named as that."""
    told(schedule, rates(*range(1, 11)), HOLDS, law=LAW)
    near = f"1: 0[a] lr={0.5 * (1 + 1e-9)!r}"
    told(schedule, near, FALSIFIED, "step 1", law=LAW)
    told(schedule, "1: 0[a] lr=nan", FALSIFIED, "seen nan", law=LAW)
    told(schedule, rates(3, 4, of=2), FALSIFIED, "step 3: the learning rate", "that of step 6", law=LAW)
    restarted = f"{rates(1, 2, 3)} | resume step=3 | 4: 0[a] lr={LAW(1)!r}"
    told(schedule, restarted, FALSIFIED, "step 4", "it is that of step 1;", law=LAW)
    told(schedule, "1: 0[a] lr=7", FALSIFIED, "off the schedule; expected", law=LAW)
    told(schedule, "", UNKNOWN, law=LAW)
    told(schedule, raw('{"v":5,"kind":"step","step":1}'), UNKNOWN, "no learning rate", law=LAW)


ONE = "start fingerprint=x w=5 | 1: 0[a b] | 2: 0[c d] | end"
TWO = "start fingerprint=x w=5 | 1: 0[a] 1[b] | 2: 0[c] 1[d] | end"


def pair(other: str) -> list[History]:
    return [history(ONE, "alone"), history(other, "other", backend="gloo")]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("w=9", "other (world 2 gloo) against alone (world 1 inline): the weights differs first"),
        ("w=9", "seen 0000000000000009"),
        ("o=9", "the optimizer differs first (content, loss, gradient, grad_norm, learning rate, weights agree)"),
        ("g=9 w=9 o=9", "the gradient differs first (content, loss, grad_norm, learning rate agree)"),
        ("loss=2 w=9", "the loss differs first"),
        ("lr=2 w=9", "the learning rate differs first"),
        ("norm=2", "the grad_norm differs first"),
        ("d=9 loss=2", "the content differs first"),
        ("ids=d,c", "the rows differ first, at place 0 of the batch; expected c, seen d"),
        ("ids=c,d,e", "at place 2 of the batch; expected None, seen e"),
    ],
)
def test_same_everywhere_rejects(change: str, said: str) -> None:
    says(same_everywhere.compare(pair(TWO.replace("1[d]", f"1[d] {change}"))), FALSIFIED, "step 2", said)


def test_same_everywhere() -> None:
    says(same_everywhere.compare(pair(TWO)), HOLDS)
    says(same_everywhere.compare([*pair(TWO), history("start fingerprint=x | 1: 0[a] 1[b]", "cut")]), HOLDS)
    verdict = same_everywhere.compare(pair(TWO.replace("1[b]", "1[b] w=9").replace("1[d]", "1[d] w=9")))
    says(verdict, FALSIFIED, "step 1,")
    assert len(verdict.counterexamples) == 1
    says(same_everywhere.compare(pair(TWO.replace("w=5", "w=6"))), FALSIFIED, "the initial weights differ")
    shorter = "start fingerprint=x w=5 | 1: 0[a] 1[b] | end"
    says(same_everywhere.compare(pair(shorter)), FALSIFIED, "different number of updates", "expected 2 updates, seen 1")


def test_same_everywhere_infers_nothing_from_what_is_not_comparable() -> None:
    says(same_everywhere.compare(pair(TWO.replace("=x", "=y"))), INAPPLICABLE, "not comparable")
    says(same_everywhere.compare([history(ONE), history(ONE)]), UNKNOWN, "every history ran on world 1 inline")
    says(same_everywhere.compare([history(ONE)]), UNKNOWN, "at least two")
    says(same_everywhere.compare(pair("start fingerprint=x | 3: 0[e] 1[f]")), UNKNOWN, "nothing that can be compared")
    bare = raw('{"v":5,"kind":"step","step":1,"world":9,"digests":{"content":"00000000000000d1"}}')
    says(same_everywhere.compare([history("1: 0[a b]"), bare]), UNKNOWN, "nothing that can be compared")


WHOLE = "1: 0[a] | 2: 0[b] | 3: 0[c] | 4: 0[d] | end"
RESUMED = "1: 0[a] | 2: 0[b] | 3: 0[c] | resume step=1 | 2: 0[b] | 3: 0[c] | 4: 0[d] | end"


@pytest.mark.parametrize("change", ["w=9", "o=9", "g=9", "d=9", "loss=3", "lr=3", "norm=3", "ids=x"])
def test_resume_equal_rejects_any_difference(change: str) -> None:
    again = RESUMED.replace("4: 0[d]", f"4: 0[d] {change}")
    told(resume_equal, again, FALSIFIED, "step 4 of history", "uninterrupted", uninterrupted=history(WHOLE))
    before, _, after = RESUMED.partition("resume")
    changed = f"{before}resume{after.replace('2: 0[b]', f'2: 0[b] {change}')}"
    told(resume_equal, changed, FALSIFIED, "step 2 of history", "done again after a resume")


def test_resume_equal() -> None:
    whole = history(WHOLE)
    told(resume_equal, RESUMED, HOLDS, uninterrupted=whole)
    told(resume_equal, RESUMED, HOLDS)
    short = history("1: 0[a] | 2: 0[b] | end")
    told(resume_equal, "1: 0[a] | resume step=1 | 2: 0[b] | end", HOLDS, uninterrupted=short)
    for skipped in ("1: 0[a] | 2: 0[b] | resume step=2 | 4: 0[d] | end", "1: 0[a] | resume step=1 | 2: 0[b] | 4: 0[d]"):
        told(resume_equal, skipped, FALSIFIED, "step 4: step 3 is missing", uninterrupted=whole)
    early = "1: 0[a] | resume step=1 | 2: 0[b] | end"
    told(resume_equal, early, FALSIFIED, "ended early", "expected 4 updates, seen 2", uninterrupted=whole)
    told(resume_equal, early.removesuffix(" | end"), UNKNOWN, "got to step 2 of 4", uninterrupted=whole)
    told(resume_equal, WHOLE, UNKNOWN, "was never resumed", uninterrupted=whole)
    told(resume_equal, "1: 0[a] | resume step=1 | 2: 0[b]", UNKNOWN)
    told(resume_equal, "resume step=1 | 5: 0[b]", FALSIFIED, "step 1 is missing", uninterrupted=whole)


BROKEN = "1: 0[a] | checkpoint step=1 | 2: 0[b] w=9 | violation clause=base-frozen step=2 applied=True"
UNBROKEN = BROKEN.partition(" | violation")[0]
TAKEN = "retraction step=1 last=2 clause=base-frozen"
AGAIN = "resume step=1 | 2: 0[b] | 3: 0[c] | end"


def test_what_a_violation_took_back_is_not_compared() -> None:
    """It is nobody's truth; without the line that takes it back it would be. Over two lives, both are taken back."""
    whole = history("1: 0[a] | 2: 0[b] | 3: 0[c] | end")
    told(resume_equal, f"{BROKEN} | {TAKEN} | {AGAIN}", HOLDS, uninterrupted=whole)
    told(resume_equal, f"{BROKEN} | {AGAIN}", FALSIFIED, "done again after a resume")
    assert list(history(f"{BROKEN} | {TAKEN}").trajectory) == [1]
    lives = "1: 0[a] | 2: 0[b] | 3: 0[c] | resume step=1 | 2: 0[b] | violation clause=x step=2"
    found = history(f"{lives} | retraction step=1 last=3 clause=x")
    assert list(found.trajectory) == [1]
    told(resume_equal, found, UNKNOWN)


@pytest.mark.parametrize(
    "text",
    [
        f"{UNBROKEN} | {TAKEN} | {AGAIN}",
        f"{UNBROKEN} | {TAKEN}",
        f"{BROKEN} | {TAKEN.replace('base-frozen', 'finite')} | {AGAIN}",
        f"{BROKEN} | {TAKEN.replace('step=1 last=2', 'step=0 last=1')} | {AGAIN}",
        f"{BROKEN} | resume step=1 | {TAKEN} | 2: 0[b]",
        f"{BROKEN.replace('applied=True', 'action=suspected')} | {TAKEN} | {AGAIN}",
        "1: 0[a] | 2: 0[b] | 3: 0[c] | violation clause=x step=3 | retraction step=2 last=3 clause=x | resume step=0",
    ],
    ids=range(7),
)
def test_updates_cannot_be_disowned(text: str) -> None:
    told(resume_equal, text, FALSIFIED, "retracted without a violation")


LAYOUT_SIZES = {"world": 2, "accumulation": 2}


def losses(seen: list[float], law: list[float], bound: float = 0.01) -> Verdict:
    return losses_close.compare(dict(enumerate(seen, 1)), dict(enumerate(law, 1)), bound, LAYOUT_SIZES)


def test_losses_close() -> None:
    says(losses([1.0, 1.009, 0.991], [1.0, 1.0, 1.0]), HOLDS)
    says(losses([1.0, 1.02], [1.0, 1.0]), FALSIFIED, "step 2", "1 of 2 updates", "expected 1, seen 1.02")
    says(losses([0.75, 0.0], [1.0, 0.0], 0.25), FALSIFIED, "step 1")
    says(losses([1.0, 0.0], [1.0, 0.0]), HOLDS)
    says(losses([], []), UNKNOWN)
    says(losses([1.0], [1.0, 1.0]), UNKNOWN, "1 losses against 2")
    says(losses([1.0, 2.0], [1.0, 1.0, 1.0]), FALSIFIED)


def test_losses_close_names_one_factor() -> None:
    says(losses([4.0, 2.0, 1.0], [1.0, 0.5, 0.25]), FALSIFIED, "ratio 4.000 = accumulation 2 x world 2")
    assert losses([4.0, 2.0, 0.25], [1.0, 0.5, 0.25]).counterexamples[0].ratio is None
    assert losses([1.0, 2.0], [0.0, 1.0]).counterexamples[0].ratio is None


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_losses_close_and_what_is_not_finite(broken: float) -> None:
    says(losses([broken, 1.0], [1.0, 1.0]), FALSIFIED, "step 1: the loss is not finite")
    says(losses([1.0, 1.0], [1.0, broken]), UNKNOWN, "reference's loss at step 2")


def test_memory_within() -> None:
    """Rising from the second update on is growth; the first jump is the optimizer's, and a plateau is none."""
    over = memory_budget.check_bytes({0: 100, 1: 111}, 100)
    says(over, FALSIFIED, "rank 1: the peak is 1.110 of the plan, 1.10 is allowed")
    says(memory_budget.check_bytes({0: 110, 1: 100}, 100), HOLDS)
    says(memory_budget.check_bytes({}, 100), UNKNOWN)
    says(memory_budget.check_bytes({0: 0}, 100), UNKNOWN, "peak 0 bytes")
    says(memory_budget.check_bytes({0: 1}, 0), UNKNOWN, "plan 0 bytes")
    says(memory_budget.check_bytes({0: 9}, 9, resting={0: [1, 5, 5, 5, 5]}), HOLDS)
    says(memory_budget.check_bytes({0: 9}, 9, resting={0: [1, 5, 6, 7, 7]}), HOLDS)
    growing = memory_budget.check_bytes({0: 9}, 9, resting={0: [1, 5, 6, 7, 8]})
    says(growing, FALSIFIED, "rise with every update", "seen 8 bytes")
    says(memory_budget.check_bytes({0: 9}, 9, resting={0: [1, 5, 6, 7]}), UNKNOWN, "4 updates are too few")


LAYOUT = [("a", (2, 3), "float32"), ("b", (3,), "float32")]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ([("x", (2, 3), "float32"), LAYOUT[1]], ("tensor 0, gpu against cpu", "seen x [2, 3] float32")),
        ([("a", (3, 2), "float32"), LAYOUT[1]], ("seen a [3, 2] float32",)),
        ([LAYOUT[0], ("b", (3,), "float16")], ("tensor 1", "seen b [3] float16")),
        (LAYOUT[::-1], ("tensor 0",)),
        (LAYOUT[:1], ("tensor 1", "seen no tensor")),
        ([*LAYOUT, LAYOUT[0]], ("tensor 2", "expected no tensor")),
    ],
)
def test_layout_equal_rejects(other: list[layout_equal.Tensor], words: tuple[str, ...]) -> None:
    says(layout_equal.check_layouts({"cpu": LAYOUT, "gpu": other}), FALSIFIED, *words)


def test_layout_equal() -> None:
    says(layout_equal.check_layouts({"rank 0": LAYOUT, "rank 1": list(LAYOUT)}), HOLDS)
    says(layout_equal.check_layouts({"rank 0": LAYOUT}), INAPPLICABLE)
    says(layout_equal.check_layouts({}), UNKNOWN)
    says(layout_equal.check_layouts({"rank 0": [], "rank 1": []}), UNKNOWN, "the layout of rank 0 is empty")


Gradient = dict[str, Any]
GRADIENT: Gradient = {"a": [3.0, 4.0], "b": [[1.0], [2.0]]}
VALUES = st.floats(-1e6, 1e6).filter(lambda value: abs(value) > 1e-6)
GRADIENTS = st.dictionaries(st.sampled_from("abcd"), st.lists(VALUES, min_size=1, max_size=5), min_size=1)


def gradients(seen: Gradient, expected: Gradient, **named: Any) -> Verdict:
    both = (
        {name: torch.tensor(value, dtype=torch.float64) for name, value in side.items()} for side in (seen, expected)
    )
    return gradient_law.compare(*both, 2e-6, **named)


@given(GRADIENTS, st.sampled_from([2.0, 0.5, 3.0, 12.0, -1.0]))
def test_gradient_law_names_the_factor(expected: Gradient, factor: float) -> None:
    verdict = gradients({name: [factor * value for value in values] for name, values in expected.items()}, expected)
    says(verdict, FALSIFIED)
    assert verdict.counterexamples[0].ratio == pytest.approx(factor, rel=1e-9)
    says(gradients(expected, expected), HOLDS)


@pytest.mark.parametrize(
    "seen",
    [
        {"a": [6.0, 8.0], "b": [[1.0], [2.0]]},
        {"a": [8.0, 6.0], "b": [[2.0], [1.0]]},
        {"a": [3.0, 4.0], "b": [[1.0], [2.1]]},
        {"a": [6.0, 8.0], "b": [[2.0], [1.0]]},
        {"a": [3.00002, 4.00002], "b": [[1.00001], [2.00001]]},
    ],
    ids=["one-tensor-doubled", "permuted", "one-value", "one-doubled-one-permuted", "nearly-1"],
)
def test_gradient_law_names_no_factor_where_there_is_none(seen: Gradient) -> None:
    assert gradients(seen, GRADIENT).counterexamples[0].ratio is None


def test_gradient_law() -> None:
    says(gradients(GRADIENT, GRADIENT), HOLDS, "largest relative error 0.00e+00")
    for error, outcome in ((1e-6, HOLDS), (3e-6, FALSIFIED)):
        says(gradients({**GRADIENT, "a": [3.0 + 5.0 * error, 4.0]}, GRADIENT), outcome)
    swapped = gradients({**GRADIENT, "a": [4.0, 3.0]}, GRADIENT, where="step 7")
    says(swapped, FALSIFIED, "step 7: 1 of 2 tensors", "a 0.283")
    summed = gradients({"a": [12.0, 16.0], "b": [4.0, 8.0]}, GRADIENT, factors=LAYOUT_SIZES)
    says(summed, FALSIFIED, "ratio 4.000 = accumulation 2 x world 2")
    nothing = gradients({"a": [0.0, 0.0], "b": [0.0, 0.0]}, GRADIENT)  # a mutant that survived the seed
    says(nothing, FALSIFIED, "2 of 2 tensors", "ratio 0")
    seen = {name: [1.0 + 0.1 * place] for place, name in enumerate("abcde", start=1)}
    says(gradients(seen, {name: [1.0] for name in seen}), FALSIFIED, "e 0.5, d 0.4, c 0.3 and 2 more")


def test_gradient_law_of_other_tensors() -> None:
    says(gradients({"a": [3.0, 4.0]}, GRADIENT), FALSIFIED, "b has a different layout", "seen no gradient")
    more = gradients({**GRADIENT, "c": [1.0]}, GRADIENT)
    says(more, FALSIFIED, "c has a different layout", "expected no gradient")
    says(gradients({**GRADIENT, "b": [1.0]}, GRADIENT), FALSIFIED, "expected 2 elements, seen 1 elements")
    says(gradients({**GRADIENT, "b": [1.0, math.nan]}, GRADIENT), FALSIFIED, "b inf")


def test_gradient_law_of_a_tensor_whose_law_is_zero() -> None:
    law = {**GRADIENT, "z": [0.0, 0.0]}
    says(gradients(law, law), HOLDS)
    says(gradients({**law, "z": [0.0, 1e-9]}, law), FALSIFIED, "z inf")
    says(gradients({**law, "z": [0.0, 1e-9]}, law, floor=1e-3), HOLDS)
    says(gradients({**law, "z": [0.0, 1e-1]}, law, floor=1e-3), FALSIFIED)
    says(gradients({"z": [0.0]}, {"z": [0.0]}), UNKNOWN, "0 everywhere")
    says(gradients({}, {}), UNKNOWN)
    says(gradients(GRADIENT, {**GRADIENT, "a": [math.inf, 0.0]}), UNKNOWN, "expected gradient is not finite")


@pytest.mark.parametrize(
    ("ratio", "factors", "expected"),
    [
        (1.5, {"world": 3, "accumulation": 2}, "1.500 = world 3 / accumulation 2"),
        (9.0, {"world": 3}, "9.000 = world 3 squared"),
        (0.25, {"world": 2, "accumulation": 1}, "0.250 = 1 / world 2 squared"),
        (5.0, {}, "5.000"),
        (0.0, {"world": 2}, "0"),
        (1e-5, {"world": 2}, "1e-05"),
        (math.nan, {"world": 2}, "nan"),
    ],
)
def test_ratios_in_words(ratio: float, factors: dict[str, int], expected: str) -> None:
    assert explain_ratio(ratio, factors) == expected
