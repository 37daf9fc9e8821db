"""Torch's error file: what its launcher prints as the root cause."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

_LATE_S = 5
VARIABLE = "TORCHELASTIC_ERROR_FILE"


def tell_launcher(message: str, *, late: bool, path: str | None = None) -> None:
    """Write the error file that torch's launcher named for this process, if it named one, or the one at `path`.

    Whole or not at all: a torn one stops torchrun. Torch takes the earliest failure, in whole seconds, for the root
    cause. late: another rank is the cause, so that this one's file must not look like the first; it then replaces what
    was written of the consequence here.
    """
    path = path or os.environ.get(VARIABLE)
    if not path or (Path(path).exists() and not late):
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()) + _LATE_S * late)}
    part = Path(f"{path}.{os.getpid()}.{time.monotonic_ns()}")
    with contextlib.suppress(OSError):
        part.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
        part.replace(path)
