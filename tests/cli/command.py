"""The `andon` command in processes of its own."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PATIENCE_S = 240


@dataclass(frozen=True)
class Ended:
    """How a command ended, with the lines that it wrote."""

    code: int
    out: list[str]
    said: list[str]


def andon(
    *arguments: str | Path, folder: Path | None = None, stdin: bytes = b"", largest_file: int | None = None
) -> Ended:
    """Run `python -m andon` in `folder`; it and its ranks may write no file above `largest_file` bytes."""
    limit: Callable[[], None] | None = None
    if largest_file is not None:
        size = largest_file

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    done = subprocess.run(
        [sys.executable, "-m", "andon", *map(str, arguments)],
        cwd=folder,
        input=stdin,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
        preexec_fn=limit,
        env=_unmeasured() if largest_file is not None else None,
    )
    return Ended(done.returncode, done.stdout.decode().splitlines(), done.stderr.decode().splitlines())


def _unmeasured() -> dict[str, str]:
    """The environment without what makes coverage start in a child: its data file would meet the limit, too."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("COVERAGE_", "COV_"))}


def tree(folder: Path) -> set[str]:
    """Everything below a folder, by its path."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
