"""How one rank ends: where the place for its report takes nothing, and where its work leaves the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from andon.console.exits import Exit
from tests.launch.pipes import PATIENCE_S

RANK = """
import os, sys
from pathlib import Path
from andon.launch import rank
from andon.launch.report import path_of

rank._RECORD_S = 0.1  # a disk that takes nothing takes nothing in 10 s either

def work(context):
    if sys.argv[2] == "leaves":
        sys.exit(0)
    place = path_of(Path(sys.argv[1]), context.rank)
    place.parent.mkdir()
    os.mkfifo(place.with_name(f".{place.name}.{os.getpid()}"))  # whoever opens it waits for a reader for ever
    if sys.argv[2] == "fails":
        raise LookupError("its own error")
    return 0

rank.run_rank(work, run_folder=Path(sys.argv[1]))
"""
UNWRITTEN = " (its report could not be written: the disk took nothing for "


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("fails", Exit.CRASHED, "LookupError: its own error" + UNWRITTEN),
        ("finishes", Exit.OK, "finished" + UNWRITTEN),
        ("leaves", Exit.RANK_LOST, "left by sys.exit(0)"),
    ],
)
def test_a_rank_ends_with_its_own_code_and_one_line(tmp_path: Path, what: str, code: Exit, words: str) -> None:
    """A rank does not wait for a disk that hangs. `sys.exit(0)` in the middle of the work does not count as success."""
    environ = dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    command = [sys.executable, "-c", RANK, str(tmp_path), what]
    environ |= {**os.environ, "TORCHELASTIC_RUN_ID": "alone"}
    done = subprocess.run(command, env=environ, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == code
    assert f"rank 0: {words}" in done.stderr
