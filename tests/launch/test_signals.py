"""A launcher as a process of its own: signalled, killed, and twice at the same time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.pipes import PATIENCE_S, Pipe

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    """A pipe from all ranks to the test."""
    found = Pipe(tmp_path / "pipe")
    yield found
    found.close()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts launchers, each in a session of its own, and ends what is left of them."""
    started: list[subprocess.Popen[str]] = []

    def start_one(entry: str, payload: dict[str, Any], folder: Path, timeout_s: float = 60) -> subprocess.Popen[str]:
        asked = {"entry": f"tests.launch.entries:{entry}", "payload": payload, "workers": 2}
        asked |= {"folder": str(folder), "timeout_s": timeout_s}
        command = [sys.executable, "-m", "tests.launch.driver", json.dumps(asked)]
        # The launcher sees to it that ranks have one thread, not whoever runs the tests.
        environ = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environ)
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def result_of(launcher: subprocess.Popen[str]) -> dict[str, Any]:
    """What the driver printed last."""
    out, _ = launcher.communicate(timeout=PATIENCE_S)
    assert out, f"the launcher ended with {launcher.returncode} and said nothing"
    found: dict[str, Any] = json.loads(out.splitlines()[-1].removeprefix("result "))
    return found


@pytest.mark.parametrize("whole_group", [False, True])
def test_no_rank_outlives_a_killed_launcher(pipe: Pipe, start: Start, whole_group: bool) -> None:
    """SIGKILL of the launcher, or of its whole process group: ranks that listen to nothing are gone all the same."""
    launcher = start("end", {"pipe": str(pipe.path), "how": {"0": "deaf", "1": "deaf"}}, pipe.path.parent)
    pipe.lines(2)
    (os.killpg if whole_group else os.kill)(launcher.pid, signal.SIGKILL)
    pipe.wait_until_all_are_gone()


@pytest.mark.parametrize(
    ("signum", "whole_group"),
    [(signal.SIGTERM, True), (signal.SIGUSR1, False), (signal.SIGINT, True), (signal.SIGHUP, True)],
)
def test_a_preemption_signal_ends_ranks_at_a_boundary(
    pipe: Pipe, start: Start, signum: signal.Signals, whole_group: bool
) -> None:
    """Sent to the launcher it reaches the ranks; sent to the whole group (by a terminal, a scheduler) it kills no rank,
    neither itself nor through the forkserver, which every rank has asked to die with."""
    launcher = start("end", {"pipe": str(pipe.path), "how": {}}, pipe.path.parent)
    pipe.lines(2)
    (os.killpg if whole_group else os.kill)(launcher.pid, signum)
    found = result_of(launcher)
    assert found["exit"] == "PREEMPTED"
    assert found["exits"] == {"0": 75, "1": 75}
    assert found["cause"].endswith(f"ended at a step boundary on {signum.name}")
    assert launcher.returncode == 75


@pytest.mark.parametrize(("prefix", "listened"), [([], "True"), (["nohup"], "False")])
def test_a_run_under_nohup_outlives_its_terminal(prefix: list[str], listened: str) -> None:
    """What `nohup` has ignored stays ignored; else a closed terminal asks for the end as SIGTERM does."""
    code = "import signal; from andon.launch.preemption import *; print(signal.SIGHUP in PREEMPTION_SIGNALS)"
    command = [*prefix, sys.executable, "-c", code]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [listened]


def test_a_second_interrupt_ends_at_once(pipe: Pipe, start: Start) -> None:
    """Ranks that do not come to a boundary are killed by the second Ctrl-C, an hour before their time is over."""
    payload = {"pipe": str(pipe.path), "how": {"0": "deaf", "1": "deaf"}}
    launcher = start("end", payload, pipe.path.parent, timeout_s=3600)
    pipe.lines(2)
    launcher.send_signal(signal.SIGINT)
    # A second one while the first is pending would be lost, so see the first arrive.
    while signal.SIGINT in _pending(launcher.pid):
        os.sched_yield()
    launcher.send_signal(signal.SIGINT)
    found = result_of(launcher)
    assert found["exit"] == "RANK_LOST"
    assert "second SIGINT" in found["cause"]
    pipe.wait_until_all_are_gone()


def test_ranks_that_do_not_come_to_a_boundary_are_ended_in_time(pipe: Pipe, start: Start) -> None:
    """The wait for a step boundary is bounded, and the ranks that missed it are named."""
    payload = {"pipe": str(pipe.path), "how": {"1": "deaf"}}
    launcher = start("end", payload, pipe.path.parent, timeout_s=0.2)
    pipe.lines(2)
    launcher.send_signal(signal.SIGTERM)
    found = result_of(launcher)
    assert found["exit"] == "RANK_SILENT"
    assert found["cause"] == "rank 1 did not end within 1.7 s of SIGTERM"
    assert found["exits"] == {"0": 75, "1": -9}


def test_two_launches_at_once_do_not_meet(tmp_path: Path, start: Start) -> None:
    """Each has a port, a store and a run of its own, and what ranks print reaches the launcher's stdout."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    launchers = [start("echo", {"folder": str(folder), "say": folder.name}, folder) for folder in folders]
    stores, runs = set(), set()
    for folder, launcher in zip(folders, launchers, strict=True):
        out, _ = launcher.communicate(timeout=PATIENCE_S)
        *said, result = sorted(out.splitlines(), key=lambda line: line.startswith("result"))
        assert sorted(said) == [f"rank {rank} says {folder.name}" for rank in (0, 1)]
        assert json.loads(result.removeprefix("result "))["exit"] == "OK"
        found = [json.loads((folder / f"echo-{rank}.json").read_text()) for rank in (0, 1)]
        runs |= {one["run_id"] for one in found}
        stores |= {tuple(one["store"]) for one in found}
        assert {(one["omp"], one["threads_of_the_forking_process"]) for one in found} == {("1", 1)}
    assert len(runs) == 2
    assert len(stores) == 2


def _pending(pid: int) -> set[signal.Signals]:
    """Signals that were sent to a process and have not been taken (`ShdPnd` in `/proc/PID/status`)."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(status.split("ShdPnd:")[1].split()[0], 16)
    return {signum for signum in (signal.SIGINT, signal.SIGTERM) if mask >> (signum - 1) & 1}
