"""Whether another process lives, is stopped or is gone, read from the system."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from andon_contracts.liveness.process import Process, ending, memory_kills, who_kills

BY_HAND = "by hand or by another program: the kernel killed nothing for want of memory"


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[bytes], Process]]:
    program = "import json, dataclasses, sys; from andon_contracts.liveness.process import Process; "
    program += "print(json.dumps(dataclasses.asdict(Process.here())), flush=True); sys.exit(int(input()))"
    started = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert started.stdout is not None
    yield started, Process(**json.loads(started.stdout.readline()))
    started.kill()
    started.communicate()


def test_a_process_says_what_others_see_of_it(child: tuple[subprocess.Popen[bytes], Process]) -> None:
    started, process = child
    assert (process.pid, process.machine) == (started.pid, Process.here().machine)
    assert process.look() == "runs"
    assert process.exit_code() is None


def test_a_stopped_process_is_told_from_a_gone_one(child: tuple[subprocess.Popen[bytes], Process]) -> None:
    started, process = child
    started.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, started.pid, os.WSTOPPED | os.WNOWAIT)
    assert process.look() == "stopped"
    assert process.kill()
    os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)
    assert (process.look(), process.exit_code()) == ("gone", -signal.SIGKILL)
    assert not process.kill()
    started.wait()
    assert (process.look(), process.exit_code()) == ("gone", None)


def test_a_signal_to_a_process_that_ends_meanwhile_reached_nobody(
    child: tuple[subprocess.Popen[bytes], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    started, process = child

    def too_late(pid: int) -> int:
        started.kill()
        started.wait()
        raise OSError(errno.ENOSYS, "no handles of processes here")

    monkeypatch.setattr(os, "pidfd_open", too_late)
    assert not process.send(signal.SIGTERM)


def test_an_exit_code_is_read(child: tuple[subprocess.Popen[bytes], Process]) -> None:
    started, process = child
    assert started.stdin is not None
    started.stdin.write(b"7\n")
    started.stdin.flush()
    os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)
    assert process.exit_code() == 7


def test_another_process_with_the_same_id_is_another(child: tuple[subprocess.Popen[bytes], Process]) -> None:
    started, process = child
    earlier = replace(process, started=process.started - 1)
    assert earlier.look() == "gone"
    assert not earlier.kill()
    assert started.poll() is None


def test_a_process_elsewhere_is_not_judged(child: tuple[subprocess.Popen[bytes], Process]) -> None:
    far = replace(child[1], machine="another boot")
    assert far.look() == "elsewhere"
    assert not far.kill()
    assert replace(far, machine="").look() == "elsewhere"
    assert child[0].poll() is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "is gone"),
        (3, "ended with exit code 3"),
        (-2, "was killed by SIGINT"),
        (-99, "was killed by signal 99"),
    ],
)
def test_an_end_in_words(code: int | None, words: str) -> None:
    assert ending(code) == words
    assert ending(-9).startswith("was killed by SIGKILL (")


@pytest.mark.parametrize(
    ("before", "now", "limit", "words"),
    [
        ((0, 0), (1, 1), 3 << 30, "of its memory cgroup, whose limit is 3.0 GiB"),
        ((2, 5), (4, 7), None, "out of memory: the kernel killed 2 of the processes of its memory cgroup"),
        ((None, 0), (None, 1), None, "or killed by hand: the kernel killed 1 for want of memory on this machine"),
        ((0, 0), (0, 1), None, BY_HAND),
        ((None, 3), (None, 3), None, BY_HAND),
        ((None, None), (None, None), None, "out of memory, or killed by hand"),
    ],
)
def test_who_sent_a_kill(
    before: tuple[int | None, int | None], now: tuple[int | None, int | None], limit: int | None, words: str
) -> None:
    assert words in who_kills(before, now, limit)


@pytest.mark.skipif(not os.access("/sys/fs/cgroup/memory/tasks", os.W_OK), reason="needs root and a memory cgroup")
def test_a_process_that_its_cgroup_has_killed_is_told_by_its_kernel() -> None:
    group = Path(f"/sys/fs/cgroup/memory/andon-{os.getpid()}")
    group.mkdir()
    code = f"""
import os, pathlib, subprocess, sys
pathlib.Path({str(group / "tasks")!r}).write_text(str(os.getpid()))
from andon_contracts.liveness.process import ending
child = subprocess.run([sys.executable, "-c", "b = bytearray(1 << 28); b[::4096] = b'1' * (1 << 16)"], check=False)
print(ending(child.returncode))
"""
    try:
        (group / "memory.limit_in_bytes").write_text(str(1 << 26))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    finally:
        group.rmdir()
    assert done.stdout.strip() == (
        "was killed by SIGKILL (out of memory: the kernel killed 1 of the processes of its memory cgroup, "
        "whose limit is 0.1 GiB)"
    )


def test_the_systems_own_count_of_memory_kills() -> None:
    known = "oom_kill " in Path("/proc/vmstat").read_text()
    assert (memory_kills() is not None) == known
