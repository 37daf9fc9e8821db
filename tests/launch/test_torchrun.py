"""A rank under a user's own torchrun: it ends with its code, and torchrun names the right cause."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from andon.launch.report import Report
from tests.launch.pipes import PATIENCE_S

SCRIPT = """
import os
import sys
from pathlib import Path
from andon.console.exits import Exit
from andon.launch.context import RankContext
from andon.launch.rank import run_rank

def wait_for(path: Path) -> None:
    while not path.exists():
        os.sched_yield()

def work(context: RankContext) -> int:
    folder = Path(sys.argv[1])
    if context.rank == 1:
        wait_for(folder / "rank-0-is-here")  # torchrun ends a rank that still starts before it can say anything
        raise LookupError("rank 1 has an error of its own")
    (folder / "rank-0-is-here").touch()
    wait_for(folder / "reports" / "rank-1.json")
    raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")

run_rank(work, run_folder=Path(sys.argv[1]))
"""


def test_torchrun_names_the_rank_with_its_own_error(tmp_path: Path) -> None:
    """Torchrun's root cause is rank 1, not rank 0, which fell after it; each says one line and leaves a report."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--log-dir", str(tmp_path), str(script), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 1, ended.stderr
    _, root = ended.stderr.split("Root Cause")
    assert "rank      : 1" in root
    assert "rank 1 has an error of its own" in root
    assert "rank 1: LookupError: rank 1 has an error of its own" in ended.stderr.splitlines()
    reports = [Report.read(tmp_path, rank) for rank in (0, 1)]
    assert [report.exit for report in reports if report is not None] == [71, 1]
