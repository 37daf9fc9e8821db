"""Torch's error file: what its launcher prints as the root cause."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from andon_contracts.legible import legible

_LATE_S = 5
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def report_to_launcher(message: str, *, late: bool, path: str | None = None) -> None:
    """Write the error file that torch's launcher named for this process, if it named one, or the one at `path`.

    Torch takes the earliest failure, in whole seconds, for the root cause. late: another rank is the cause, so that
    this one's file must not look like the first; it then replaces what was written of the consequence here.
    """
    path = path or os.environ.get(ERROR_FILE_VARIABLE)
    if not path or (Path(path).exists() and not late):
        return
    with contextlib.suppress(OSError):
        write_error_file(Path(path), message, message, int(time.time()) + _LATE_S * late)


def write_error_file(path: Path, message: str, stack: str, when: int, **more: object) -> None:
    """The file in the form of torch's own error handler, whole or not at all: a torn one stops torchrun.

    stack: what torch prints, as it stands, so that what is invisible in it is written out here. when: seconds since the
    epoch, by which it orders the failures of all ranks. Raises `OSError`.
    """
    extra = {"py_callstack": legible(stack), "timestamp": str(when)}
    body = {"message": legible(message), **more, "extraInfo": extra}
    part = Path(f"{path}.{os.getpid()}.{time.monotonic_ns()}")
    part.write_text(json.dumps({"message": body}), encoding="utf-8")
    part.replace(path)
