"""Which steps of a ledger a resumed run must repeat."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from andon.run.checkpoint import Checkpoint
from andon.run.ledger import LedgerWriter
from andon.training.history import read_history
from andon_contracts.fields import Real
from andon_contracts.record import Record, Resume, Step, StepDigests

HERE: Mapping[str, str] = {"cpu": "this"}
ELSEWHERE: Mapping[str, str] = {"cpu": "another"}
DIGEST = "0123456789abcdef"


def update(number: int, loss: float = 0.5) -> Step:
    """A step of which only number and loss matter."""
    one = Real.of(1.0)
    digests = StepDigests(DIGEST, DIGEST, DIGEST, DIGEST)
    return Step(number, 0, 0, (1,), 1, one, Real.of(loss), one, 0, 1, "inline", digests, ())


def resume(after: int, fingerprint: Mapping[str, str]) -> Resume:
    """A process group that goes on after step `after` on the machine of `fingerprint`."""
    return Resume(after, "run", fingerprint, {}, 1, "inline")


def written(path: Path, *records: Record) -> Path:
    """A ledger of `records`."""
    with LedgerWriter(path) as ledger:
        for record in records:
            ledger.append(record)
    return path


def repeated(ledger: Path, after: int, fingerprint: Mapping[str, str]) -> Mapping[int, Step]:
    """What a run that goes on from a checkpoint of step `after` has to repeat."""
    checkpoint = Checkpoint(ledger.parent, after, {}, {}, DIGEST, (after, DIGEST)) if after else None
    return read_history(ledger, fingerprint, checkpoint).steps


def test_the_last_record_of_each_later_step_counts(tmp_path: Path) -> None:
    """Of a step done twice the second record stands, and steps up to the checkpoint are not done again."""
    path = written(
        tmp_path / "ledger.jsonl",
        *(resume(0, HERE), update(1), update(2), update(3)),
        *(resume(1, HERE), update(2, loss=0.25)),
    )
    assert repeated(path, 1, HERE) == {2: update(2, loss=0.25), 3: update(3)}
    assert repeated(path, 3, HERE) == {}


def test_steps_of_another_machine_are_not_comparable(tmp_path: Path) -> None:
    """A step that was last done elsewhere need not be repeated, even if it was done here before that."""
    path = written(
        tmp_path / "ledger.jsonl",
        *(resume(0, HERE), update(1), update(2)),
        *(resume(1, ELSEWHERE), update(2), update(3)),
    )
    assert repeated(path, 0, HERE) == {1: update(1)}
    assert repeated(path, 0, ELSEWHERE) == {2: update(2), 3: update(3)}


def test_without_a_ledger_there_is_nothing_to_repeat(tmp_path: Path) -> None:
    """A run that left no ledger starts anew."""
    assert repeated(tmp_path / "ledger.jsonl", 0, HERE) == {}
