"""The checkpoints that stand: what a run falls back to when its disk refuses a newer one (`run.on_save_error`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from andon.messages import say
from andon.problems import InputError
from andon.run.checkpoint import Checkpoint, require_intact
from andon.run.folder import RunFolder
from andon.run.ledger import read_ledger
from andon_contracts.record import Saved


@dataclass
class Standing:
    """passing_over: whether to go on where the disk refuses a checkpoint. best: the step of the best that is on disk.

    last: path, step and `tree_digest` of the one that was saved, or loaded, last.
    """

    passing_over: bool
    best: int | None = None
    last: tuple[Path, int, str] | None = None

    @classmethod
    def of(cls, folder: RunFolder, checkpoint: Checkpoint | None, best: int, *, passing_over: bool) -> Standing:
        """What stands when a run begins, or goes on from `checkpoint`. best: the step of the best evaluation, or 0.

        The disk may have refused that one; the best is then the one that the ledger names before it.
        """
        if checkpoint is None:
            return cls(passing_over)
        there = best if _path(folder, best).is_dir() else _best_saved(folder, best)
        return cls(passing_over, there or None, (checkpoint.path, checkpoint.step, checkpoint.digest))

    def saved(self, path: Path, step: int, digest: str, *, best: bool) -> None:
        """One more is there."""
        self.last = path, step, digest
        if best:
            self.best = step

    def go_on_without(self, refused: InputError) -> None:
        """Say that a checkpoint is not there. Raises `Violation` where the one before is not intact."""
        kept = "there is no checkpoint yet"
        if self.last is not None:
            require_intact(*self.last)
            kept = f"the last one, {self.last[0].name}, is intact"
        say(f"warning: {refused}; going on without it (run.on_save_error=continue); {kept}")


def _best_saved(folder: RunFolder, before: int) -> int:
    """The step of the best checkpoint that is there, of those that the ledger names up to `before`; 0 for none."""
    records = read_ledger(folder.ledger) if folder.ledger.exists() else ()
    best = [each.step for each in records if isinstance(each, Saved) and each.best and each.step <= before]
    return next((step for step in reversed(best) if _path(folder, step).is_dir()), 0)


def _path(folder: RunFolder, step: int) -> Path:
    return folder.checkpoints / f"step-{step:08d}"
