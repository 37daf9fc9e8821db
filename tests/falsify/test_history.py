"""Histories: what is read is what was written, and what cannot be read is reported and never raised."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon_falsify.checkers import chain_intact
from andon_falsify.history import History, Unread, read_history, read_lines
from andon_falsify.verdict import Outcome
from tests.falsify.notation import history

STEP = {"v": 1, "kind": "step", "seq": 0, "prev": "0" * 16, "step": 1}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


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
        "position": 4,
        "ids": [7, "b"],
        "count": 2,
        "correct": 1,
        "world": 2,
        "backend": "gloo",
        "lr": {"value": 0.5, "hex": "0x1.0p-1"},
        "loss": {"value": None, "hex": "nan"},
        "grad_norm": 0.25,
        "digests": {"weights": "00000000000000aa", "content": ""},
        "ranks": [{"rank": 1, "leaves": [3], "ids": [7], "weights": "00000000000000ab"}],
    }
    (event,) = one(text).steps
    assert (event.number, event.epoch, event.position, event.count, event.correct) == (1, 2, 4, 2, 1)
    assert (event.ids, event.world, event.backend) == ((7, "b"), 2, "gloo")
    assert event.digests == {"weights": "00000000000000aa"}
    assert (event.lr.value, event.grad_norm.hex) == (0.5, (0.25).hex())
    assert (event.loss.finite, event.finite) == (False, False)
    (rank,) = event.ranks
    assert (rank.rank, rank.leaves, rank.ids) == (1, (3,), (7,))
    assert (rank.weights, rank.optimizer, rank.gradient) == ("00000000000000ab", None, None)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ([], "a list where an object"),
        ({**STEP, "v": 6}, "version 6 is none of 1, 2, 3, 4, 5"),
        ({**STEP, "v": True}, "version True is none of"),
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
        ({**STEP, "ranks": [{"rank": 0, "leaves": ["a"]}]}, "leaves holds 'a'"),
        ({**STEP, "ranks": [{"rank": 0, "weights": 7}]}, "weights is 7, not text"),
        ({**STEP, "digests": []}, "digests is [], not an object"),
        ({**STEP, "prev": 3}, "prev is 3"),
        ({"v": 1, "kind": "start", "plan": {"rows": "x"}}, "rows is 'x'"),
        ({"v": 1, "kind": "start", "plan": {"rows": 1 << 63}}, "rows is 9223372036854775808"),
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
    """1e400 as an integer, bare NaN and infinity are values that were not finite, not errors."""
    for raw in ("1" + "0" * 400, "-1" + "0" * 400, "NaN", "Infinity"):
        line = json.dumps(STEP)[:-1] + f', "loss": {raw}, "lr": {{"value": {raw}, "hex": "x"}}}}\n'
        (event,) = read_lines([line.encode()], "x").steps
        assert (event.loss.finite, event.lr.finite) == (False, False)


@given(
    st.lists(
        st.one_of(JSON, st.dictionaries(st.sampled_from([*STEP, "ids", "loss", "ranks", "plan"]), JSON)), max_size=5
    )
)
def test_reading_never_raises(values: list[object]) -> None:
    lines = [json.dumps(STEP | value if isinstance(value, dict) else value).encode() + b"\n" for value in values]
    read = read_lines(lines, "x")
    assert len(read.events) + len(read.unread) == len(lines)


@given(st.lists(st.binary(max_size=20).filter(lambda raw: b"\n" not in raw), max_size=6))
def test_reading_bytes_never_raises(bodies: list[bytes]) -> None:
    read = read_lines([body + b"\n" for body in bodies], "x")
    assert len(read.events) + len(read.unread) == len(bodies)


def test_a_file_is_read_as_its_lines(tmp_path: Path) -> None:
    text = b""
    prev = "0" * 16
    for number in range(3):
        body = json.dumps({**STEP, "seq": number, "prev": prev, "step": number + 1}).encode()
        prev = hashlib.sha256(body).hexdigest()[:16]
        text += body + b"\n"
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(text + b'{"v":1,"ki')
    read = read_history(path)
    assert [event.number for event in read.steps] == [1, 2, 3]
    assert read.torn
    assert chain_intact.check(read).outcome is Outcome.HOLDS
    with pytest.raises(FileNotFoundError):
        read_history(tmp_path / "absent")


def test_reading_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
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
    """Steps done again appear twice in `steps`, count once in `trajectory`, and belong to the run that did them."""
    read = history("start | 1: 0[a] | 2: 0[b] w=5 | torn | resume step=1 | 2: 0[b] w=6 | 3: 0[c] | end")
    assert [event.number for event in read.steps] == [1, 2, 3]
    read = history("start | 1: 0[a] | 2: 0[b] w=5 | resume step=1 | 2: 0[b] w=6 | 3: 0[c] | end reason=finished")
    assert [event.number for event in read.steps] == [1, 2, 2, 3]
    assert list(read.trajectory) == [1, 2, 3]
    assert read.trajectory[2].digests["weights"].endswith("6")
    assert [[event.number for event in run.steps] for run in read.runs] == [[1, 2], [2, 3]]
    assert [(run.resumed, run.finished) for run in read.runs] == [(False, False), (True, True)]


def test_only_a_completed_run_is_finished() -> None:
    """Ended by a violation or preempted is not finished: nothing may be inferred from what is missing then."""
    ends = {"early-stopping": True, "violation": False, "preempted": False}
    assert {reason: history(f"1: 0[a] | end reason={reason}").runs[-1].finished for reason in ends} == ends
    assert history("1: 0[a] | end").runs[-1].finished
    read = history("")
    assert (read.runs, read.start, read.steps, read.torn, read.plan.rows) == ((), None, (), False, None)


def test_the_plan_and_the_initial_weights_of_a_start_line() -> None:
    read = history("start rows=4 ids=a,b steps=2 w=7")
    assert (read.plan.rows, read.plan.ids, read.plan.steps) == (4, ("a", "b"), 2)
    assert read.start.initial_weights == "7".rjust(16, "0")
    other = one({"v": 1, "kind": "start", "digests": {"weights": "8"}})
    assert other.start.initial_weights == "8"


def test_the_notation_says_what_it_shows() -> None:
    read = history(
        "3: 0@0,1[a 2] 1@2[c] w=7,8 o=- loss=nan d=5 epoch=1 | violation clause=finite step=4", backend="gloo"
    )
    (event,) = read.steps
    assert (event.number, event.epoch, event.ids, event.world, event.backend) == (3, 1, ("a", 2, "c"), 2, "gloo")
    assert [(rank.rank, rank.leaves, rank.ids) for rank in event.ranks] == [(0, (0, 1), ("a", 2)), (1, (2,), ("c",))]
    assert [rank.weights for rank in event.ranks] == ["7".rjust(16, "0"), "8".rjust(16, "0")]
    assert {rank.optimizer for rank in event.ranks} == {None}
    assert event.loss.hex == "nan"
    (broken,) = read.of_kind("violation")
    assert (broken.step, broken.fields["clause"]) == (4, "finite")


@pytest.mark.parametrize("text", ["1: 0[a] oops", "1: 0[a] 1[b] w=1,2,3", "x: 0[a]", "1: 0[a] loss=low"])
def test_what_is_not_in_the_notation_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        history(text)
