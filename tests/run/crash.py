"""A disk that fails, and a machine that dies, at the k-th change: for every k, in one process."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

Mode = Literal["kill", "power cut", "disk full"]
_CHANGES = ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir", "ftruncate")


class Died(BaseException):
    """The machine is dead: nothing after this moment reached the disk."""


class Machine:
    """Counts changes to the disk and fails at number `at` (from 0).

    `kill`: the process is gone, nothing later happens, a write is cut in the middle. `power cut`: as well, what was
    written and not fsynced is lost. `disk full`: one call fails with ENOSPC, later ones succeed.
    """

    def __init__(self, at: int, mode: Mode) -> None:
        self.at, self.mode = at, mode
        self.changes = 0
        self.failed = False
        self._unsynced: set[int] = set()

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **options: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_CREAT:
                return real(*arguments, **options)
            self._count(name, real, arguments)
            result = real(*arguments, **options)
            if name == "write":
                self._unsynced.add(os.fstat(arguments[0]).st_ino)
            if name == "fsync":
                self._unsynced.discard(os.fstat(arguments[0]).st_ino)
            return result

        return changed

    def _count(self, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if self.failed and self.mode != "disk full":
            raise Died
        self.changes += 1
        if self.changes - 1 != self.at:
            return
        self.failed = True
        if self.mode == "disk full":
            raise OSError(errno.ENOSPC, "No space left on device")
        if name == "write":
            real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            self._unsynced.add(os.fstat(arguments[0]).st_ino)
        raise Died

    def lose_what_was_not_synced(self, folder: Path) -> None:
        for path in folder.rglob("*"):
            if path.is_file() and path.stat().st_ino in self._unsynced:
                os.truncate(path, 0)


@contextmanager
def machine(at: int, mode: Mode, folder: Path) -> Iterator[Machine]:
    failing = Machine(at, mode)
    with ExitStack() as patches:
        for name in _CHANGES:
            patches.enter_context(patch.object(os, name, failing.wrap(name, getattr(os, name))))
        with suppress(Died):
            yield failing
    if mode == "power cut":
        failing.lose_what_was_not_synced(folder)


def every_failure(
    place: Path,
    prepare: Callable[[Path], object],
    act: Callable[[Path], object],
    mode: Mode,
    check: Callable[[Path, bool, Exception | None], None],
) -> int:
    """Let `act` fail at each of its changes in turn, each time on what `prepare` put into a folder under `place`.

    `check` gets the folder, whether the act ran to its end, and the error that it raised. Returns the number of points.
    """
    prepared = place / "prepared"
    prepared.mkdir()
    prepare(prepared)
    at = 0
    while True:
        folder, finished, error = Path(shutil.copytree(prepared, place / str(at))), False, None
        with machine(at, mode, folder) as failing:
            try:
                act(folder)
                finished = True
            except Exception as raised:  # noqa: BLE001
                error = raised
        check(folder, finished, error)
        if not failing.failed:
            return at
        at += 1
