"""Ranks that should not be alone, or whose clocks are apart: told at the start, with numbers."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from andon.backend.group import GroupBackend
from andon.backend.inprocess import InlineBackend
from andon.training.run import clocks_apart
from tests.launch.pipes import PATIENCE_S
from tests.repository.sources import ROOT
from tests.support.ranks import run_ranks
from tests.training.runs import Runs, summary


def _late_clock(seconds: float) -> str:
    if dist.get_rank() == 1:
        true = time.time_ns
        time.time_ns = lambda: true() - int(seconds * 1e9)
    return clocks_apart(GroupBackend("gloo", torch.device("cpu")))


@pytest.mark.parametrize(("seconds", "words"), [(0.0, ""), (20.0, "rank 1's is 20.0 s behind"), (-3600.0, "ahead")])
def test_clocks_that_are_apart_are_told(seconds: float, words: str) -> None:
    """Whose, by how much and which way, on every rank alike; those of one host are not."""
    said = [outcome.get() for outcome in run_ranks(3, _late_clock, seconds)]
    assert len(set(said)) == 1
    assert (words in said[0]) if words else said[0] == ""


def test_one_process_has_one_clock() -> None:
    """Where all ranks are in one process nothing is asked."""
    assert clocks_apart(InlineBackend([torch.device("cpu")] * 2)) == ""


def test_another_number_of_workers_is_told(
    runs: Runs, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By a run that goes on, whose ledger has another, and by ranks of torchrun, whose configuration has."""
    folder = tmp_path / "run"
    assert runs.train(folder, "training.max_steps=6", backend="threads", workers=2) == 0
    config = tmp_path / "config.yaml"
    config.write_text((folder / "config.yaml").read_text())
    shutil.rmtree(folder)
    capfd.readouterr()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "andon"]
    command += ["train", str(config), "--backend", "gloo", "--run-dir", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "run.workers is 2, torchrun started 1; 1 are missing (--workers 2 refuses that)" in ended.stderr
    refused = subprocess.run(
        [*command, "--workers", "2"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert "--workers: 2 were asked for, torchrun started 1" in refused.stderr
    assert refused.returncode != 0


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *);
    *(void **)&real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && clock == CLOCK_REALTIME) now->tv_sec += atol(getenv("CLOCK_AHEAD_S"));
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    int failed = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *at) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (at) *at = exact.tv_sec;
    return exact.tv_sec;
}
"""
"""In front of the C library's: the clock of a process is CLOCK_AHEAD_S seconds ahead of the machine's."""


@pytest.fixture(scope="session")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that puts a process's clock ahead, to be loaded before all others."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a C compiler (cc) is needed, to put the clock of one process ahead")
    source = tmp_path_factory.mktemp("clock") / "clock.c"
    source.write_text(CLOCK)
    built = source.with_suffix(".so")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(built), str(source), "-ldl"], check=True)
    return built


def _agent(folder: Path, number: int, port: int, clock: Path, ahead: int, train: list[str]) -> subprocess.Popen[bytes]:
    """One of two agents of torchrun, of one rank each; the first has the rendezvous, and a clock of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    command += ["--rdzv-id", "apart", "--rdzv-conf", f"is_host={int(number == 0)},join_timeout=30"]
    command += ["-m", "andon", "train", "--run-dir", str(folder / "run"), *train]
    own = {"LD_PRELOAD": str(clock), "CLOCK_AHEAD_S": str(ahead)} if number == 0 else {}
    with (folder / f"agent-{number}").open("wb") as said:
        return subprocess.Popen(command, env=os.environ | own | {"LOGLEVEL": "INFO"}, stdout=said, stderr=said)


def _wait_for(agent: subprocess.Popen[bytes], said: Path, words: str) -> int | None:
    """Until the agent has said so, which gives None, or ended, which gives how."""
    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while words not in said.read_text():
        if agent.poll() is not None:
            return agent.returncode
        assert time.monotonic() < deadline, said.read_text()
        pause.wait(0.02)
    return None


def _end_of_rank(agent: subprocess.Popen[bytes], said: Path) -> int:
    """How the agent's one rank ended. Agents that have said that theirs succeeded meet once more in torch's own exit
    barrier, which with clocks an hour apart lasts its 300 s now and then: nothing of ours runs by then."""
    code = _wait_for(agent, said, "Local worker group finished (WorkerState.SUCCEEDED)")
    return 0 if code is None else code


@pytest.mark.parametrize("ahead", [20, -3600])
def test_agents_whose_clocks_are_apart_do_not_succeed_alone(
    runs: Runs, clock: Path, tmp_path: Path, ahead: int
) -> None:
    """torchrun's c10d takes an agent of another clock for dead, or not, as it happens: by the line of the docs either
    both train, and the clocks are told, or none ends with 0, and what is missing is told."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    overrides = [part for each in runs.overrides("training.max_steps=2") for part in ("--set", each)]
    train = ["--backend", "gloo", "--workers", "2", *overrides]
    agents = []
    try:
        agents.append(_agent(tmp_path, 0, port, clock, ahead, train))
        assert _wait_for(agents[0], tmp_path / "agent-0", "Rendezvous'ing worker group") is None
        agents.append(_agent(tmp_path, 1, port, clock, ahead, train))
        codes = [_end_of_rank(agent, tmp_path / f"agent-{number}") for number, agent in enumerate(agents)]
    finally:
        for agent in agents:
            agent.terminate()  # it ends its rank, if that still runs
            with suppress(subprocess.TimeoutExpired):
                agent.wait(5)
            agent.kill()  # one that waits in the barrier does not hear the other signal
            agent.wait()
    said = "".join((tmp_path / f"agent-{number}").read_text() for number in (0, 1))
    if 0 in codes:
        assert codes == [0, 0]
        assert summary(tmp_path / "run")["world_size"] == 2
        assert "andon: warning: the clocks of the ranks are apart" in said
    else:
        assert "--workers: 2 were asked for, torchrun started 1" in said
        assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_the_lines_of_the_docs_name_the_number_of_workers() -> None:
    """Each that begins on a fixed number of machines; one for machines that come and go cannot."""
    text = (ROOT / "docs" / "multi-node.md").read_text()
    blocks = [part for part in re.split(r"\n(?! {4})", text) if re.search(r"torchrun.*andon", part, re.DOTALL)]
    lines = [block for block in blocks if block.count("\n    ") and not re.search(r"--nnodes \d+:\d+", block)]
    assert len(lines) == 2
    lines += re.findall(
        r"(?m)^[^#\n]*\bandon train\b(?:.*\\\n)*.*", (ROOT / "examples" / "engines" / "andon.sbatch").read_text()
    )
    assert len(lines) == 3
    assert [block for block in lines if "--workers" not in block] == []
