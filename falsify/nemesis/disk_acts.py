"""Acts of the trainer on its run folder, and the state that must remain if an act is cut off anywhere.

`crash_points` runs `act` in a process that is killed or whose system calls fail, and `check` in a new process.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import safetensors.torch  # noqa: F401 - loaded before any process is forked, used by what is tried
import torch

from andon.console.problems import InputError
from andon.run import checkpoint
from andon.run.atomic import clean_leftovers, is_leftover, write_json
from andon.run.checkpoint import load_checkpoint, newest_valid, prune, save_checkpoint
from andon.run.folder import RunFolder, State
from andon.run.ledger import LedgerWriter, read_ledger
from andon_contracts.record import Broken
from andon_contracts.violation import Violation

from .left_behind import whole

DONE, CRASHED, REFUSED, BROKEN = 0, 1, 2, 70
"""How an act ends: well, by an error that nobody foresaw, by `InputError`, by `Violation`."""


@dataclass(frozen=True)
class Act:
    """prepare: the folder before. act: what is cut off. check: what is wrong after; it gets how the act ended.

    None for that where the process was killed. `kills`: whether being killed can matter: not to one that only reads.
    """

    prepare: Callable[[Path], object]
    act: Callable[[Path], object]
    check: Callable[[Path, int | None], Iterable[str]]
    kills: bool = True


def _save(folder: Path, step: int, value: float) -> None:
    save_checkpoint(folder, step, {"w": torch.full((300,), value)}, {"value": value})


def _saved_before(folder: Path) -> None:
    _save(folder, 1, 1.0)


def _value(folder: Path) -> tuple[float | None, list[str]]:
    """The value of the newest valid checkpoint, by the trainer's loader, and why others were rejected."""
    found, rejected = newest_valid(folder)
    if found is None:
        return None, rejected
    if not whole(found.path):
        return None, [f"{found.path.name} was accepted and is not whole"]
    value = float(found.state["value"])
    return (value if found.tensors["w"].tolist() == [value] * 300 else None), rejected


def _after_saving(step: int) -> Callable[[Path, int | None], Iterable[str]]:
    """Old or new, nothing corrupt; the next save of the same step works, and leaves nothing of what was before."""

    def check(folder: Path, code: int | None) -> Iterable[str]:
        value, rejected = _value(folder)
        if value not in ((2.0,) if code == DONE else (1.0, 2.0)):
            yield f"STATE LOST: {value} where {'2' if code == DONE else '1 or 2'} belongs"
        yield from (f"CORRUPT: {reason}" for reason in rejected)
        if code in (REFUSED, BROKEN) and any(is_leftover(path.name) for path in folder.iterdir()):
            yield from _unless_cleaned(folder)
        clean_leftovers(folder)
        _save(folder, step, 3.0)
        if _value(folder) != (3.0, []):
            yield f"the next save does not work: {_value(folder)}"
        left = sorted(path.name for path in folder.iterdir())
        if left != sorted({"step-00000001", f"step-{step:08d}"}):
            yield f"left over: {left}"

    return check


def _unless_cleaned(folder: Path) -> Iterable[str]:
    """A temporary that an act which could still act did not remove is cleaned by the next owner of the folder."""
    clean_leftovers(folder)
    if any(is_leftover(path.name) for path in folder.iterdir()):
        yield "a leftover cannot be cleaned"


def _four_saved(folder: Path) -> None:
    for step in (1, 2, 3, 4):
        _save(folder, step, float(step))


def _after_pruning(folder: Path, code: int | None) -> Iterable[str]:
    """The newest and the best are valid, every other is valid or gone, and the next pruning finishes."""
    named = [path for path in sorted(folder.iterdir()) if not is_leftover(path.name)]
    yield from (f"CORRUPT: {path.name}" for path in named if not whole(path) or load_checkpoint(path).step < 1)
    steps = {int(path.name.removeprefix("step-")) for path in named}
    if not {1, 4} <= steps or (code == DONE and steps != {1, 4}):
        yield f"STATE LOST: steps {sorted(steps)}"
    clean_leftovers(folder)
    prune(folder, keep=1, best=1)
    if sorted(path.name for path in folder.iterdir()) != ["step-00000001", "step-00000004"]:
        yield f"left over: {sorted(path.name for path in folder.iterdir())}"


def _lines(folder: Path, first: int, count: int) -> None:
    ledger = LedgerWriter(folder / "ledger.jsonl")
    for number in range(first, first + count):
        ledger.append(Broken("finite", number, (), "", "x" * 200))
        ledger.sync()
    ledger.close()


def _after_appending(folder: Path, code: int | None) -> Iterable[str]:
    """Whole lines in order, the old ones among them; the next writer cuts what is torn, and appends."""
    seen = [record.step for record in read_ledger(folder / "ledger.jsonl") if isinstance(record, Broken)]
    if seen != list(range(1, len(seen) + 1)) or len(seen) < (5 if code == DONE else 2):
        yield f"STATE LOST: lines {seen}"
    _lines(folder, len(seen) + 1, 1)
    again = [record.step for record in read_ledger(folder / "ledger.jsonl") if isinstance(record, Broken)]
    if again != [*seen, len(seen) + 1]:
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
    if [path.name for path in folder.iterdir()] != ["summary.json"]:
        yield f"left over: {[path.name for path in folder.iterdir()]}"


def _own(folder: Path) -> None:
    with RunFolder(folder / "run").open_for_writing():
        pass


def _with_leftovers(folder: Path) -> None:
    _own(folder)
    _save(folder / "run" / "checkpoints", 1, 1.0)
    (folder / "run" / "checkpoints" / "step-00000002.andon-tmp-1-ab").mkdir()
    (folder / "run" / "checkpoints" / "step-00000002.andon-tmp-1-ab" / "state.json").touch()


def _after_owning(folder: Path, code: int | None) -> Iterable[str]:
    """Still a run's folder, with its checkpoint, that the next one owns and cleans."""
    run = RunFolder(folder / "run")
    if run.state() is State.FOREIGN:
        yield "STATE LOST: the folder is no run's any more"
    _own(folder)
    names = sorted(path.name for path in run.checkpoints.iterdir())
    if names != ["step-00000001"] or _value(run.checkpoints) != (1.0, []):
        yield f"STATE LOST: {names}"


def _two_saved(folder: Path) -> None:
    _save(folder, 1, 1.0)
    _save(folder, 2, 2.0)


def _load(folder: Path) -> None:
    """The newest, or the one before where the newest cannot be read, which is said."""
    found, rejected = newest_valid(folder)
    value = None if found is None else found.state["value"]
    if (value, len(rejected)) not in ((2.0, 0), (1.0, 1)):
        raise RuntimeError(f"loaded {value}; {rejected}")


def _after_loading(folder: Path, _code: int | None) -> Iterable[str]:
    if _value(folder) != (2.0, []):
        yield f"loading changed what is there: {_value(folder)}"


ACTS: dict[str, Act] = {
    "save a new step": Act(_saved_before, lambda folder: _save(folder, 2, 2.0), _after_saving(2)),
    "save a step again": Act(_saved_before, lambda folder: _save(folder, 1, 2.0), _after_saving(1)),
    "prune": Act(_four_saved, lambda folder: prune(folder, keep=1, best=1), _after_pruning),
    "append to the ledger": Act(
        lambda folder: _lines(folder, 1, 2), lambda folder: _lines(folder, 3, 3), _after_appending
    ),
    "write a file": Act(lambda folder: _write_file(folder, 1), lambda folder: _write_file(folder, 2), _after_writing),
    "own the folder": Act(_with_leftovers, _own, _after_owning),
    "load": Act(_two_saved, _load, _after_loading, kills=False),
}


def _save_in_place(folder: Path) -> None:
    checkpoint.temporary_beside = lambda path: path  # type: ignore[attr-defined]
    checkpoint._put_in_place = lambda _temporary, _final: None  # type: ignore[assignment]
    _save(folder, 2, 2.0)


CONTROL = "save under the final name"
ACTS_AND_CONTROL = {**ACTS, CONTROL: Act(_saved_before, _save_in_place, _after_saving(2))}
"""The control writes as one does without thinking of crashes."""


def play(name: str, folder: str, answers: Connection) -> None:
    """Prepare the folder and say so; act when told to, and say how it ended: its code and the error."""
    torch.set_num_threads(1)
    act, place = ACTS_AND_CONTROL[name], Path(folder)
    rehearsal = place.with_name(place.name + "-rehearsal")  # so that everything is loaded before anybody counts
    for each in (place, rehearsal):
        each.mkdir()
        act.prepare(each)
    act.act(rehearsal)
    answers.send_bytes(b"ready")
    answers.recv_bytes()
    code, error = DONE, ""
    try:
        act.act(place)
    except InputError as refused:
        code, error = REFUSED, str(refused)
    except Violation as broken:
        code, error = BROKEN, str(broken)
    except Exception:  # noqa: BLE001 - what nobody foresaw is what is looked for
        code, error = CRASHED, traceback.format_exc()
    answers.send((code, error))


def look(name: str, folder: str, code: int | None, answers: Connection) -> None:
    """Say what is wrong in the folder after the act ended by `code`."""
    try:
        answers.send(list(ACTS_AND_CONTROL[name].check(Path(folder), code)))
    except Exception:  # noqa: BLE001
        answers.send([f"the folder cannot be used again: {traceback.format_exc()}"])
