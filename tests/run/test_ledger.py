"""The ledger: whole appends, verified on opening, damage named by line; and which fields a repeated step must match."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import pytest

from andon.console.messages import InputError
from andon.run.ledger import (
    REPEATED,
    UNKNOWN,
    Difference,
    LedgerError,
    LedgerWriter,
    Repeats,
    differing,
    digested_ledger,
    lacks,
    read_ledger,
)
from andon_contracts.fields import Real
from andon_contracts.record import GENESIS, End, LedgerFile, RankPart, Step, StepDigests, chain
from andon_contracts.violation import Violation
from tests.run.crash import Mode, every_failure
from tests.support.ledger_lines import verify_chain

H = "0123456789abcdef"


def step(number: int, loss: float = 0.5) -> Step:
    return Step(
        step=number,
        epoch=0,
        position=2 * number,
        ids=(number, number + 1),
        count=2,
        lr=Real.of(1e-3),
        loss=Real.of(loss),
        grad_norm=Real.of(1.0),
        correct=1,
        terms=7,
        world=1,
        backend="inline",
        digests=StepDigests(H, H, H, H),
        ranks=(RankPart(0, (0,), (number, number + 1), H),),
    )


def written(path: Path, *records: Step | End) -> bytes:
    ledger = LedgerWriter(path)
    for record in records:
        ledger.append(record)
    ledger.close()
    return path.read_bytes()


def test_lines_are_on_disk_at_their_step(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with closing(LedgerWriter(path)) as ledger:
        assert ledger.head == (0, GENESIS)
        for number in (1, 2, 3):
            ledger.append(step(number))
            lines = path.read_bytes().splitlines(keepends=True)
            assert len(lines) == number
            assert ledger.head == verify_chain(lines) == (number, chain(lines[-1]))
    assert list(read_ledger(path)) == [step(1), step(2), step(3)]
    assert [digest for _, digest in digested_ledger(path)] == list(map(chain, lines))


def test_a_torn_tail_is_cut_and_told(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first = written(path, step(1))
    both = written(path, step(2))
    for size in (len(first), len(first) + 1, (len(first) + len(both)) // 2, len(both) - 1):
        path.write_bytes(both[:size])
        assert list(read_ledger(path)) == [step(1)]
        with closing(LedgerWriter(path)) as ledger:
            assert ledger.torn == size - len(first)
            assert ledger.head == (1, chain(first))
        assert path.read_bytes() == first
    path.write_bytes(first + bytes(1000))
    with closing(LedgerWriter(path)) as ledger:
        assert ledger.torn == 1000
        ledger.append(step(2))
    assert path.read_bytes() == both


@pytest.mark.parametrize("text", ["my notes", '{"name": "x"}', "{", '{"back'])
def test_of_a_file_of_something_else_nothing_is_cut_off(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    if '{"backend":'.startswith(text):
        written(path, step(1))
        assert list(read_ledger(path)) == [step(1)]
        return
    with pytest.raises(LedgerError, match=r"notes.txt:1: not the beginning of a ledger"):
        LedgerWriter(path)
    assert path.read_text() == text


def test_damage_is_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    lines = written(path, step(1), step(2), step(3)).splitlines(keepends=True)
    changed = lines[1].replace(b'"correct":1', b'"correct":2')
    assert changed != lines[1]
    for damaged, number in (
        ([lines[0], changed, lines[2]], 3),
        ([lines[0], lines[2]], 2),
        ([*lines, lines[2]], 4),
        ([b"garbage\n", *lines], 1),
        ([lines[0], b"\n", lines[1]], 2),
    ):
        data = b"".join(damaged)
        path.write_bytes(data)
        with pytest.raises(LedgerError, match=rf"ledger.jsonl:{number}: "):
            LedgerWriter(path)
        with pytest.raises(LedgerError):
            list(read_ledger(path))
        assert path.read_bytes() == data


@pytest.mark.parametrize("mode", ["kill", "disk full"])
def test_a_failed_append_leaves_whole_lines(tmp_path: Path, mode: Mode) -> None:
    def append(number: int) -> Callable[[Path], bytes]:
        return lambda folder: written(folder / "ledger.jsonl", step(number))

    def check(folder: Path, finished: bool, error: Exception | None) -> None:
        assert error is None or (mode == "disk full" and isinstance(error, InputError))
        assert finished or error or mode == "kill"
        written(folder / "ledger.jsonl", End(2, "finished", {}))
        found = list(read_ledger(folder / "ledger.jsonl"))
        assert found[0] == step(1)
        assert found[1:-1] in ([], [step(2)])
        assert not finished or len(found) == 3

    assert every_failure(tmp_path, append(1), append(2), mode, check) >= 3


def test_a_refused_record_leaves_the_ledger_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with closing(LedgerWriter(path)) as ledger:
        ledger.append(step(1))
        with pytest.raises(ValueError, match="count"):
            ledger.append(replace(step(2), count=-1))
        ledger.append(step(2))
    assert list(read_ledger(path)) == [step(1), step(2)]


def test_a_ledger_that_is_cut_while_it_is_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    whole = written(path, step(1), step(2), step(3))
    sizes = {round(len(whole) * part / 20) for part in range(20)}
    assert len(sizes) == 20
    for size in sizes:
        path.write_bytes(whole)
        with closing(LedgerWriter(path)) as ledger:
            os.truncate(path, size)
            what = f"ledger.jsonl: was truncated by another program while the run wrote to it: it has {size} bytes"
            for work in (lambda: ledger.append(step(4)), ledger.sync):
                with pytest.raises(InputError, match=what):
                    work()
            assert path.stat().st_size == size
            path.write_bytes(whole)
    path.write_bytes(whole)
    with closing(LedgerWriter(path)) as ledger:
        path.write_bytes(whole + b"more")
        with pytest.raises(InputError, match="was written to by another program"):
            ledger.append(step(4))
        path.write_bytes(whole)


def test_a_ledger_stays_in_its_place_where_the_process_leaves_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(LedgerFile(Path("ledger.jsonl"))) as ledger:
        monkeypatch.chdir("/")
        ledger.append(step(1))
    assert list(read_ledger(tmp_path / "ledger.jsonl")) == [step(1)]


def test_a_linked_or_unwritable_ledger_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "link", tmp_path / "none" / "ledger.jsonl"):
        with pytest.raises(InputError, match="cannot be written"):
            LedgerWriter(path)
    assert not (tmp_path / "elsewhere").exists()


def test_handles_are_returned(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    before = set(os.listdir("/proc/self/fd"))
    ledger = LedgerWriter(path)
    ledger.close()
    ledger.close()
    path.write_bytes(b"garbage\n")
    with pytest.raises(LedgerError):
        LedgerWriter(path)
    assert set(os.listdir("/proc/self/fd")) <= before


# Fields that a repeated step must match.

CHANGED = {
    "epoch": 1,
    "position": 5,
    "ids": (2, 4),
    "count": 3,
    "lr": Real.of(1e-4),
    "loss": Real.of(0.5000000000000001),
    "correct": 2,
    "terms": 8,
    "grad_norm": Real.of(-1.0),
    **{each.name: "ab" * 8 for each in fields(StepDigests)},
}
"""Another value for each field; real values differ in the last bit if possible."""


def changed(record: Step, name: str, value: object) -> Step:
    if hasattr(record, name):
        return replace(record, **{name: value})  # type: ignore[arg-type]
    return replace(record, digests=replace(record.digests, **{name: value}))  # type: ignore[arg-type]


def test_where_a_step_was_done_is_no_difference() -> None:
    old = step(2)
    elsewhere = replace(old, world=4, backend="gloo", ranks=())
    assert differing(old, elsewhere) == ()
    Repeats({2: old}).judge(elsewhere)


@pytest.mark.parametrize("name", REPEATED)
def test_a_run_is_held_to_each_field_of_the_list(name: str) -> None:
    old = step(2)
    new = changed(old, name, CHANGED[name])
    (found,) = differing(old, new)
    assert (found.name, found.now) == (name, CHANGED[name])
    with pytest.raises(Violation, match=f"resume-exact broken at step 2: .*other results: {name}: .*, now ") as caught:
        Repeats({2: old}).judge(new)
    assert caught.value.clause == "resume-exact"
    Repeats({3: old}).judge(new)


def test_causes_come_before_effects() -> None:
    old = step(2)
    new = changed(changed(changed(old, "weights", "ab" * 8), "content", "ab" * 8), "loss", Real.of(2.0))
    assert [each.name for each in differing(old, new)] == ["content", "loss", "weights"]


def test_what_was_not_looked_at_is_no_difference_and_the_rest_is_compared() -> None:
    old = replace(step(2), digests=StepDigests(*[UNKNOWN] * 4))
    assert lacks(old, "weights")
    assert not lacks(old, "loss")
    assert differing(old, step(2)) == differing(step(2), old) == ()
    with pytest.raises(Violation, match="loss: "):
        Repeats({2: old}).judge(step(2, loss=0.25))


def test_a_difference_shows_reals_with_their_bits_and_cuts_what_is_long() -> None:
    assert str(Difference("loss", Real.of(0.5), Real.of(0.25))) == (
        "loss: 0.5 (0x1.0000000000000p-1), now 0.25 (0x1.0000000000000p-2)"
    )
    assert len(str(Difference("ids", tuple(range(9999)), ()))) < 1100


def test_the_list_has_all_of_a_step_but_where_it_was_done() -> None:
    of_a_watch = {"weights_norm", "gradient_at", "optimizer_index", "skipped", "draws", "state"}
    places = {"step", "world", "backend", "ranks", "tensors"}
    known = {each.name for each in (*fields(Step), *fields(StepDigests))} - {"digests"}
    assert known - {*REPEATED} == of_a_watch | places
    assert {*REPEATED} == {*CHANGED}
