"""`andon` with a leak that is planted in its launcher, for the control of the soak: `python -m benchmarks.soak_leak`.

The first argument says what each generation of workers leaves behind: `handle`, an open file, or `memory`, 256 KiB.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from andon.cli.app import main
from andon.launch import elastic

LEAKS = ("handle", "memory")
_BYTES = 256 * 1024
_kept: list[object] = []


def plant(leak: str) -> None:
    """From now on every generation that begins leaves something behind."""
    original = elastic._Generations._generation

    def leaking(generations: Any, number: int) -> Any:
        _kept.append(os.open(os.devnull, os.O_RDONLY) if leak == "handle" else os.urandom(_BYTES))
        return original(generations, number)

    setattr(elastic._Generations, "_generation", leaking)  # noqa: B010 - not for the type checker


if __name__ == "__main__":
    plant(sys.argv.pop(1))
    main()
