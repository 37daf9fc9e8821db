"""The checkpoints that stand: what a run falls back to when its disk refuses a newer one (`run.on_save_error`)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from andon.messages import say
from andon.problems import InputError
from andon.run.atomic import fsync_folder, storage
from andon.run.checkpoint import is_complete, require_intact
from andon.run.folder import RunFolder
from andon.training.resume import Standpoint


@dataclass
class Standing:
    """passing_over: whether to go on where the disk refuses a checkpoint. best: the step of the best that is on disk.

    last: path, step and `tree_digest` of the one that was saved, or loaded, last.
    """

    passing_over: bool
    best: int | None = None
    last: tuple[Path, int, str] | None = None

    @classmethod
    def of(cls, folder: RunFolder, standpoint: Standpoint, best: int, *, passing_over: bool) -> Standing:
        """What stands when a run begins, or goes on. best: the step of the best evaluation, or 0.

        The disk may have refused that one; the best is then the one that the ledger names before it.
        """
        checkpoint = standpoint.checkpoint
        if checkpoint is None:
            return cls(passing_over)
        saved = (step for step in (best, *reversed(standpoint.past.best)) if step <= best)
        there = next((step for step in saved if _path(folder, step).is_dir()), None)
        return cls(passing_over, there, (checkpoint.path, checkpoint.step, checkpoint.digest))

    def make_again(self, folder: Path) -> None:
        """Make the folder of checkpoints where it was removed and the run is to go on. Raises `InputError`."""
        if not self.passing_over or os.path.lexists(folder):
            return
        with storage(folder):
            folder.mkdir()
            fsync_folder(folder.parent)
        lost = f", and {self.last[0].name} with it" if self.last is not None else ""
        self.last = self.best = None
        say(f"warning: {folder} was removed while the run wrote to it{lost}; made again (run.on_save_error=continue)")

    def saved(self, path: Path, step: int, digest: str, *, best: bool) -> None:
        """One more is there."""
        self.last = path, step, digest
        if best:
            self.best = step

    def go_on_without(self, refused: InputError) -> None:
        """Say that a checkpoint is not there. Raises `Violation` where the one before is not intact.

        One that somebody has removed, or is removing, is not there: that is said, and is no fault of the system.
        """
        kept = "there is no checkpoint yet"
        if self.last is not None and not is_complete(self.last[0]):
            named = self.last[0].parent.glob("step-" + 8 * "[0-9]")  # not what is still being written
            before = max(filter(is_complete, named), default=None)
            left = "there is none to resume from" if before is None else f"the newest that is there is {before.name}"
            kept = f"the last one, {self.last[0].name}, was removed: {left}"
        elif self.last is not None:
            require_intact(*self.last)
            kept = f"the last one, {self.last[0].name}, is intact"
        say(f"warning: {refused}; going on without it (run.on_save_error=continue); {kept}")


def _path(folder: RunFolder, step: int) -> Path:
    return folder.checkpoints / f"step-{step:08d}"
