"""What ranks are forked from: one that does not run holds up neither a launch nor its end; signals do not end it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from andon.console.messages import Exit
from andon.launch.context import LAUNCHER, PREEMPTION_SIGNALS
from andon.training.start import _PRELOAD
from tests.launch.driver import WITHOUT_TORCH
from tests.launch.pipes import PATIENCE_S
from tests.launch.sessions import wait_until_empty
from tests.repository.sources import ROOT


def importing(dies: str) -> dict[str, str]:
    """The environment of a fork server that finds the modules of the tests, in whichever folder it is started."""
    where = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": where, "ANDON_TEST_DIES": dies}


def launched(folder: Path, *, stopped: bool = False, dies: str = "") -> tuple[int, list[dict[str, str]], str]:
    """Launch two ranks. Returns exit code, results, stderr.

    dies: how the fork server ends while it imports. Nothing of the launch is left.
    """
    modules = ("andon.launch.server_first", "tests.launch.dying") if dies else WITHOUT_TORCH
    requested = {"modules": modules, "folder": str(folder), "stopped": stopped, "entries": [("end", {"how": {}})]}
    command = [sys.executable, "-m", "tests.launch.driver", json.dumps(requested)]
    environ = importing(dies)
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=environ)
    try:
        said, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    wait_until_empty(process.pid)
    return process.returncode, [json.loads(line.removeprefix("result ")) for line in said.splitlines()], errors


SERVER = "the process that ranks are forked from"


@pytest.mark.parametrize(
    ("how", "end", "cause"),
    [
        ({"stopped": True}, Exit.RANK_SILENT, "the fork server did not run for 0.3 s, stopped by a"),
        ({"dies": "SIGKILL"}, Exit.RANK_LOST, f"{SERVER} was killed by SIGKILL ("),
        # As transformers' imports do with PYTHONOPTIMIZE=2, which takes docstrings away.
        ({"dies": "no such docstring"}, Exit.RANK_LOST, f"{SERVER} ended with exit code 1"),
    ],
    ids=["stopped", "killed", "its imports fail"],
)
def test_a_server_that_ends_before_a_rank_starts(tmp_path: Path, how: dict[str, Any], end: Exit, cause: str) -> None:
    code, (result,), errors = launched(tmp_path, **how)
    assert (code, result["exit"]) == (end, end.name)
    assert result["cause"].startswith(f"no rank could be started: {cause}")
    if how.get("dies", "SIGKILL") != "SIGKILL":
        why = f"{SERVER} cannot import what they need: ValueError: no such docstring"
        assert set(errors.splitlines()) == {f"andon: {why}"}


def test_a_server_whose_launcher_is_gone_before_it_looks_ends_at_once() -> None:
    """It has another parent then, whose end would tell it nothing."""
    nobody = subprocess.Popen(["true"])
    nobody.wait()
    command = [sys.executable, "-c", "import andon.launch.server_first, sys; sys.exit(5)"]
    environment = os.environ | {LAUNCHER: str(nobody.pid)}
    assert subprocess.run(command, env=environment, timeout=PATIENCE_S).returncode == -signal.SIGKILL
    assert subprocess.run(command, env=environment | {LAUNCHER: str(os.getpid())}, timeout=PATIENCE_S).returncode == 5


def test_a_server_that_still_imports_ends_with_its_launcher() -> None:
    start = f"import time; from andon.launch.launcher import warm_up; warm_up({(_PRELOAD[0], 'tests.launch.dying')!r})"
    command = [sys.executable, "-c", f"{start}; time.sleep({PATIENCE_S})"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=importing("never")
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.kill()
        process.wait()
        wait_until_empty(process.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_the_server_imports_nothing_that_initialises_cuda(tmp_path: Path) -> None:
    """peft imports bitsandbytes if it is installed, which asks CUDA for the GPU. A forked rank could use none then."""
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").write_text("")
    code = "from multiprocessing import forkserver; from andon.launch.launcher import warm_up; "
    code += (
        "forkserver.ensure_running = int; warm_up(('json', 'peft')); print(*forkserver._forkserver._preload_modules)"
    )
    known = os.environ | {"PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=known, stdout=subprocess.PIPE, timeout=PATIENCE_S)
    assert done.stdout == b"json\n"


def test_the_folder_of_a_killed_launcher_is_removed_by_the_next() -> None:
    warm = "from andon.launch.launcher import warm_up; warm_up(('json', 'andon.launch.server_last'))"
    with tempfile.TemporaryDirectory(prefix="andon-") as place:  # short: names of sockets have some hundred bytes
        environment, other = os.environ | {"TMPDIR": place}, Path(place) / "pymp-other"
        other.mkdir()

        def launcher(then: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", f"{warm}; print('warm', flush=True); {then}"]
            return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def warmed(then: str) -> tuple[subprocess.Popen[str], set[Path]]:
            before, process = set(Path(place).iterdir()), launcher(then)
            assert process.stdout is not None
            assert process.stdout.readline() == "warm\n"
            return process, set(Path(place).iterdir()) - before

        killed, left = warmed("input()")
        killed.kill()
        killed.communicate()
        assert len(left) == 1
        running, kept = warmed("input()")
        assert set(Path(place).iterdir()) == {other} | kept
        last, _ = warmed("pass")
        last.communicate(timeout=PATIENCE_S)
        running.communicate("\n", timeout=PATIENCE_S)
        assert set(Path(place).iterdir()) == {other}


def test_a_server_that_is_started_again_imports_what_the_first_did() -> None:
    done = subprocess.run([sys.executable, "-c", _AGAIN], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True json andon.launch.server_last\n", "")


def test_a_folder_for_temporary_files_of_a_long_path_is_refused_in_words(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    command = [sys.executable, "-m", "andon", "train", "--workers", "2", "--run-dir", str(tmp_path / "run")]
    environment = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    what = f"no socket can be made in {folder}: AF_UNIX path too long; name another folder, of a short path"
    assert (done.returncode, done.stderr) == (Exit.USAGE, f"andon: TMPDIR: {what}\n")
    assert not (tmp_path / "run").exists()


_AGAIN = """
import os
from multiprocessing import forkserver
from andon.launch.fork_server import running
from andon.launch.launcher import warm_up

warm_up(("json", "andon.launch.server_last"))
first = running().pid
os.kill(first, 9)
os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
warm_up()
print(running().pid != first, *forkserver._forkserver._preload_modules, flush=True)
os._exit(0)
"""


def test_signals_to_the_group_do_not_end_the_tracker_of_semaphores() -> None:
    command = [sys.executable, "-c", _TRACKED, *(str(int(signum)) for signum in PREEMPTION_SIGNALS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended with 0\n", "")


_TRACKED = """
import os, sys
from multiprocessing import resource_tracker
from andon.launch.launcher import warm_up

warm_up(("json", "andon.launch.server_last"))
tracker = resource_tracker._resource_tracker
for signum in map(int, sys.argv[1:]):
    os.kill(tracker._pid, signum)
os.close(tracker._fd)
_, status = os.waitpid(tracker._pid, 0)
print("ended with", os.waitstatus_to_exitcode(status), flush=True)
os._exit(0)
"""
