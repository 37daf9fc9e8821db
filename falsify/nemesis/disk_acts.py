"""Acts of the trainer on its run folder, and the state that must remain after an interruption at any point.

`crash_points` performs `act` in a process that is killed or whose system calls fail, and `check` in a new process.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import safetensors.torch  # noqa: F401 - loaded before any process is forked, used by what is tried
import torch

from andon.console.messages import InputError
from andon.run import checkpoint
from andon.run.atomic import clean_leftovers, is_leftover, write_json
from andon.run.checkpoint import load_checkpoint, newest_valid, prune, save_checkpoint
from andon.run.folder import RunFolder, State
from andon.run.ledger import LedgerWriter, read_ledger
from andon_contracts.record import Broken
from andon_contracts.violation import Violation

from .left_behind import intact

DONE, CRASHED, REFUSED, BROKEN = 0, 1, 2, 70
"""How an act ends: normally, by an unforeseen error, by `InputError`, by `Violation`."""
Check = Callable[[Path, int | None], Iterable[str]]


@dataclass(frozen=True)
class Act:
    """prepare: writes the folder. act: what is interrupted. kills: False if it only reads, so a kill does not matter.

    check: yields what is wrong afterwards. It gets how the act ended; None: it was killed.
    """

    prepare: Callable[[Path], object]
    act: Callable[[Path], object]
    check: Check
    kills: bool = True


def _save(folder: Path, step: int, value: float) -> None:
    save_checkpoint(folder, step, {"w": torch.full((300,), value)}, {"value": value})


def _saved(last: int) -> Callable[[Path], object]:
    def prepare(folder: Path) -> None:
        for step in range(1, last + 1):
            _save(folder, step, float(step))

    return prepare


def _value(folder: Path) -> tuple[float | None, list[str]]:
    """The value of the newest valid checkpoint, and why the trainer's loader rejected others."""
    found, rejected = newest_valid(folder)
    if found is None:
        return None, rejected
    if not intact(found.path):
        return None, [f"{found.path.name} was accepted and is not whole"]
    value = float(found.state["value"])
    return (value if found.tensors["w"].tolist() == [value] * 300 else None), rejected


def _left_over(folder: Path, expected: set[str]) -> Iterable[str]:
    if (names := {path.name for path in folder.iterdir()}) != expected:
        yield f"left over: {sorted(names)}"


def _after_saving(step: int) -> Check:
    """The old state or the new one, nothing corrupt. The next save of the same step works and leaves no other file."""

    def check(folder: Path, code: int | None) -> Iterable[str]:
        value, rejected = _value(folder)
        if value not in ((2.0,) if code == DONE else (1.0, 2.0)):
            yield f"STATE LOST: {value} where {'2' if code == DONE else '1 or 2'} belongs"
        yield from (f"CORRUPT: {reason}" for reason in rejected)
        clean_leftovers(folder)  # as the next owner of the folder does
        if code in (REFUSED, BROKEN) and any(is_leftover(path.name) for path in folder.iterdir()):
            yield "a leftover cannot be cleaned"
        _save(folder, step, 3.0)
        if _value(folder) != (3.0, []):
            yield f"the next save does not work: {_value(folder)}"
        yield from _left_over(folder, {"step-00000001", f"step-{step:08d}"})

    return check


def _after_pruning(folder: Path, code: int | None) -> Iterable[str]:
    """The newest and the best are valid, the others valid or gone, and the next pruning finishes."""
    named = [path for path in sorted(folder.iterdir()) if not is_leftover(path.name)]
    yield from (f"CORRUPT: {path.name}" for path in named if not intact(path) or load_checkpoint(path).step < 1)
    steps = {int(path.name.removeprefix("step-")) for path in named}
    if not {1, 4} <= steps or (code == DONE and steps != {1, 4}):
        yield f"STATE LOST: steps {sorted(steps)}"
    clean_leftovers(folder)
    prune(folder, keep=1, best=1)
    yield from _left_over(folder, {"step-00000001", "step-00000004"})


def _append(folder: Path, first: int, count: int) -> None:
    ledger = LedgerWriter(folder / "ledger.jsonl")
    for number in range(first, first + count):
        ledger.append(Broken("finite", number, (), "", "x" * 200))
        ledger.sync()
    ledger.close()


def _numbers(folder: Path) -> list[int]:
    return [record.step for record in read_ledger(folder / "ledger.jsonl") if isinstance(record, Broken)]


def _after_appending(folder: Path, code: int | None) -> Iterable[str]:
    """Whole lines in order, with the old ones. The next writer cuts a torn line and appends."""
    seen = _numbers(folder)
    if seen != list(range(1, len(seen) + 1)) or len(seen) < (5 if code == DONE else 2):
        yield f"STATE LOST: lines {seen}"
    _append(folder, len(seen) + 1, 1)
    if (again := _numbers(folder)) != [*seen, len(seen) + 1]:
        yield f"the next line does not follow: {again} after {seen}"


def _write_file(folder: Path, value: int) -> None:
    write_json(folder / "summary.json", {"value": [value] * 100})


def _after_writing(folder: Path, code: int | None) -> Iterable[str]:
    text = (folder / "summary.json").read_text()
    if text.split() != f'{{ "value": [ {", ".join([str(2)] * 100)} ] }}'.split() and (
        code == DONE or text.count("1") != 100 or not text.endswith("}\n")
    ):
        yield f"CORRUPT: {text[:60]!r}"
    clean_leftovers(folder)
    yield from _left_over(folder, {"summary.json"})


def _own(folder: Path) -> None:
    with RunFolder(folder / "run").open_for_writing():
        pass


def _with_leftovers(folder: Path) -> None:
    _own(folder)
    checkpoints = folder / "run" / "checkpoints"
    _save(checkpoints, 1, 1.0)
    (checkpoints / "step-00000002.andon-tmp-1-ab").mkdir()
    (checkpoints / "step-00000002.andon-tmp-1-ab" / "state.json").touch()


def _after_owning(folder: Path, code: int | None) -> Iterable[str]:
    """Still a run folder with its checkpoint, which the next owner opens and cleans."""
    run = RunFolder(folder / "run")
    if run.state() is State.FOREIGN:
        yield "STATE LOST: the folder is not a run folder any more"
    _own(folder)
    names = sorted(path.name for path in run.checkpoints.iterdir())
    if names != ["step-00000001"] or _value(run.checkpoints) != (1.0, []):
        yield f"STATE LOST: {names}"


def _load(folder: Path) -> None:
    """Load the newest checkpoint, or the one before if the newest cannot be read and is reported."""
    found, rejected = newest_valid(folder)
    value = None if found is None else found.state["value"]
    if (value, len(rejected)) not in ((2.0, 0), (1.0, 1)):
        raise RuntimeError(f"loaded {value}; {rejected}")


def _after_loading(folder: Path, _code: int | None) -> Iterable[str]:
    if _value(folder) != (2.0, []):
        yield f"loading changed what is there: {_value(folder)}"


ACTS: dict[str, Act] = {
    "save a new step": Act(_saved(1), lambda folder: _save(folder, 2, 2.0), _after_saving(2)),
    "save a step again": Act(_saved(1), lambda folder: _save(folder, 1, 2.0), _after_saving(1)),
    "prune": Act(_saved(4), lambda folder: prune(folder, keep=1, best=1), _after_pruning),
    "append to the ledger": Act(lambda run: _append(run, 1, 2), lambda run: _append(run, 3, 3), _after_appending),
    "write a file": Act(lambda folder: _write_file(folder, 1), lambda folder: _write_file(folder, 2), _after_writing),
    "own the folder": Act(_with_leftovers, _own, _after_owning),
    "load": Act(_saved(2), _load, _after_loading, kills=False),
}


def _save_in_place(folder: Path) -> None:
    checkpoint.temporary_beside = lambda path: path  # type: ignore[attr-defined]
    checkpoint._put_in_place = lambda _temporary, _final: None  # type: ignore[assignment]
    _save(folder, 2, 2.0)


CONTROL = "save under the final name"
ACTS_AND_CONTROL = {**ACTS, CONTROL: Act(_saved(1), _save_in_place, _after_saving(2))}
"""The control writes without any protection against crashes."""


def play(name: str, folder: str, answers: Connection) -> None:
    """Prepare the folder and report it. Act when asked to, and report the code and the error."""
    torch.set_num_threads(1)
    act, place = ACTS_AND_CONTROL[name], Path(folder)
    place.mkdir()
    act.prepare(place)
    with tempfile.TemporaryDirectory() as rehearsal:  # loads everything before the trace begins
        act.prepare(Path(rehearsal))
        act.act(Path(rehearsal))
    answers.send_bytes(b"ready")
    answers.recv_bytes()
    code, error = DONE, ""
    try:
        act.act(place)
    except InputError as refused:
        code, error = REFUSED, str(refused)
    except Violation as broken:
        code, error = BROKEN, str(broken)
    except Exception:  # noqa: BLE001 - an unforeseen error is a finding
        code, error = CRASHED, traceback.format_exc()
    answers.send((code, error))


def look(name: str, folder: str, code: int | None, answers: Connection) -> None:
    try:
        answers.send(list(ACTS_AND_CONTROL[name].check(Path(folder), code)))
    except Exception:  # noqa: BLE001
        answers.send([f"the folder cannot be used again: {traceback.format_exc()}"])
