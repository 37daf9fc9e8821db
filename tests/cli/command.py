"""Runs the `andon` command in the process of the test, or as a process."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from click.testing import CliRunner

from andon.cli.app import _run, guarded

PATIENCE_S = 240


@dataclass(frozen=True)
class Ended:
    code: int
    out: list[str]
    said: list[str]


def cli(
    *arguments: str | Path, folder: Path | None = None, stdin: bytes = b"", largest_file: int | None = None
) -> Ended:
    """Run `andon` in `folder` in this process, by the code that turns errors into messages and exit codes.

    largest_file: the most bytes that a file may have meanwhile.
    """
    with (
        patch.object(sys, "argv", ["andon", *map(str, arguments)]),
        contextlib.chdir(folder) if folder else contextlib.nullcontext(),
        CliRunner().isolation(input=stdin) as (out, said, _),
        files_up_to(largest_file),
    ):
        code = guarded(_run)
        sys.stdout.flush()
        sys.stderr.flush()
        return Ended(code, *(stream.getvalue().decode().splitlines() for stream in (out, said)))


@contextlib.contextmanager
def files_up_to(size: int | None) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def andon(*arguments: str | Path, folder: Path | None = None, stdin: bytes = b"") -> Ended:
    done = subprocess.run(
        [sys.executable, "-m", "andon", *map(str, arguments)],
        cwd=folder,
        input=stdin,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return Ended(done.returncode, done.stdout.decode().splitlines(), done.stderr.decode().splitlines())


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
