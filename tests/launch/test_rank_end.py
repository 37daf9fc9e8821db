"""How one rank ends: where the place for its report takes nothing, and where its work leaves the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from andon.console.messages import Exit, InputError
from andon.launch.context import RankContext, is_rank
from andon.launch.report import Report
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
    environ = dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    command = [sys.executable, "-c", RANK, str(tmp_path), what]
    environ |= {**os.environ, "TORCHELASTIC_RUN_ID": "alone"}
    done = subprocess.run(command, env=environ, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == code
    assert f"rank 0: {words}" in done.stderr


# A rank under a user's own torchrun: it ends with its code, and torchrun names the right cause.


SCRIPT = """
import os
import sys
from pathlib import Path
from andon.console.messages import Exit
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


# Who a rank is, read from the variables of torch's launcher.


GOOD = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "r"}


def test_the_variables_of_torchrun_are_read() -> None:
    assert RankContext.from_environment(GOOD) == RankContext(3, 1, 4, 2, "r", os.getppid())
    assert RankContext.from_environment(GOOD | {"ANDON_LAUNCHER_PID": "77"}).launcher_pid == 77


NEEDED = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"]


@pytest.mark.parametrize("missing", [*([name] for name in NEEDED), NEEDED])
def test_missing_variables_are_named_at_once(missing: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        RankContext.from_environment({key: value for key, value in GOOD.items() if key not in missing})
    found = {each.where for each in caught.value.problems if each.what.startswith("is not set")}
    assert found == set(missing)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "4"),
        ("RANK", "-1"),
        ("RANK", "one"),
        ("LOCAL_RANK", "2"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_WORLD_SIZE", "5"),
        ("ANDON_LAUNCHER_PID", "0"),
    ],
)
def test_a_senseless_variable_is_named_with_its_value(name: str, value: str) -> None:
    with pytest.raises(InputError) as caught:
        RankContext.from_environment(GOOD | {name: value})
    assert any(problem.where == name and value in problem.what for problem in caught.value.problems)


def test_a_rank_is_told_from_a_plain_process() -> None:
    assert is_rank(GOOD)
    assert not is_rank({"RANK": "0"})
