"""Which steps of a ledger a resumed run must repeat."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from andon.run.checkpoint import Checkpoint
from andon.run.ledger import LedgerWriter
from andon.training.history import read_history
from andon_contracts.fields import Real
from andon_contracts.record import Broken, Record, Resume, Retraction, Saved, Step, StepDigests
from andon_falsify.checkers.resume_equal import disowned
from andon_falsify.history import read_history as ledger_of

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
    with LedgerWriter(path) as ledger:
        for record in records:
            ledger.append(record)
    return path


def repeated(ledger: Path, after: int, fingerprint: Mapping[str, str]) -> Mapping[int, Step]:
    """What a run that goes on from a checkpoint of step `after` has to repeat."""
    checkpoint = Checkpoint(ledger.parent, after, {}, {}, DIGEST, (after, DIGEST)) if after else None
    return read_history(ledger, fingerprint, checkpoint).steps


def test_the_last_record_of_each_later_step_counts(tmp_path: Path) -> None:
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


def violation(step: int) -> Broken:
    return Broken("base-frozen", step, (), "", "other weights")


def test_what_was_taken_back_is_not_repeated(tmp_path: Path) -> None:
    """Updates between the last checkpoint and a violation need not come out again; those before the checkpoint, where a
    run goes on from an older one, do. A violation that took nothing back in its ledger is taken for one that should."""
    done = [resume(0, HERE), update(1), update(2), Saved(2, "step-00000002", DIGEST), update(3), violation(3)]
    told = written(tmp_path / "told.jsonl", *done, Retraction(2, 3, "base-frozen", "other weights"))
    silent = written(tmp_path / "silent.jsonl", *done)
    for path in (told, silent):
        assert repeated(path, 2, HERE) == {}
        assert repeated(path, 1, HERE) == {2: update(2)}
    assert read_history(told, HERE).retraction is None
    assert read_history(silent, HERE).retraction == Retraction(2, 3, "base-frozen", "other weights")


def test_what_is_done_after_a_retraction_counts(tmp_path: Path) -> None:
    path = written(
        tmp_path / "ledger.jsonl",
        *(resume(0, HERE), update(1), violation(1), Retraction(0, 1, "base-frozen", "other weights")),
        *(resume(0, HERE), update(1, loss=0.25), update(2)),
    )
    assert repeated(path, 0, HERE) == {1: update(1, loss=0.25), 2: update(2)}
    assert read_history(path, HERE).last == 2


def test_a_violation_of_a_resumed_run_takes_back_what_was_done_before_it(tmp_path: Path) -> None:
    """Killed after update 3, resumed after 1, broken at 2: neither account of 2 is known to be right, nor of 3."""
    path = written(
        tmp_path / "ledger.jsonl",
        *(resume(0, HERE), update(1), Saved(1, "step-00000001", DIGEST), update(2), update(3)),
        *(resume(1, HERE), violation(2)),
    )
    assert repeated(path, 1, HERE) == {}
    assert read_history(path, HERE).retraction == Retraction(1, 3, "base-frozen", "other weights")


def test_a_run_that_could_not_go_on_takes_back_all_that_stands(tmp_path: Path) -> None:
    """Written before there were retractions: broken at 4, resumed after 2, broken again as 3 came out otherwise. The
    line that takes both lives back names the highest of them, as `andon verify` demands of it."""
    path = written(
        tmp_path / "ledger.jsonl",
        *(resume(0, HERE), update(1), update(2), Saved(2, "step-00000002", DIGEST), update(3), update(4), violation(4)),
        *(resume(2, HERE), update(3, loss=0.25), violation(4)),
    )
    found = read_history(path, HERE)
    assert found.retraction == Retraction(2, 4, "base-frozen", "other weights")
    assert found.last == 2
    with LedgerWriter(path) as ledger:
        ledger.append(found.retraction)
        ledger.append(resume(2, HERE))
    assert disowned(ledger_of(path)) == []
    assert read_history(path, HERE).retraction is None
    assert list(read_history(path, HERE).steps) == [1, 2]


def test_without_a_ledger_there_is_nothing_to_repeat(tmp_path: Path) -> None:
    assert repeated(tmp_path / "ledger.jsonl", 0, HERE) == {}
