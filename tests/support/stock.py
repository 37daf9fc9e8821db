"""A process with stock transformers and without Andon, which runs the programs of many tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

_SERVER = """
import contextlib, io, json, sys, traceback
sys.modules["andon"] = None
for line in sys.stdin:
    error, out = "", io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(json.loads(line), "program", "exec"), {"__name__": "program"})
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps([error, out.getvalue()]), flush=True)
"""


class Stock:
    """Runs programs one after another in `folder`, offline; the process ends with the `with` block."""

    def __init__(self, folder: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with (folder / "stderr").open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVER],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, program: str) -> str:
        """The last line that `program` prints. Fails with the traceback of the program."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(program), file=self._process.stdin, flush=True)
        error, out = json.loads(self._process.stdout.readline())
        assert not error, error
        last: str = out.splitlines()[-1]
        return last
