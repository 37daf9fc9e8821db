"""How one rank ends where the place for its report takes nothing."""

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
    place = path_of(Path(sys.argv[1]), context.rank)
    place.parent.mkdir()
    os.mkfifo(place.with_name(f".{place.name}.{os.getpid()}"))  # whoever opens it waits for a reader for ever
    if sys.argv[2] == "fails":
        raise LookupError("its own error")
    return 0

rank.run_rank(work, run_folder=Path(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [("fails", Exit.CRASHED, "LookupError: its own error"), ("finishes", Exit.OK, "finished")],
)
def test_a_disk_that_hangs_holds_up_no_end(tmp_path: Path, what: str, code: Exit, words: str) -> None:
    """The rank ends with its own code, and standard error has the cause and what became of the report."""
    numbers = dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    numbers["TORCHELASTIC_RUN_ID"] = "alone"
    found = subprocess.run(
        [sys.executable, "-c", RANK, str(tmp_path), what],
        env={**os.environ, **numbers},
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert found.returncode == code
    assert f"rank 0: {words} (its report could not be written: the disk took nothing for " in found.stderr
