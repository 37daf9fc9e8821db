"""Signals to a launch: to the launcher alone, to its whole process group, and SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from andon.console.messages import Exit
from andon.launch import context as preemption
from andon.launch import fork_server
from andon.launch.context import PREEMPTION_SIGNALS
from andon.launch.launcher import launch, warm_up
from andon_contracts.liveness.process import start_time
from tests.launch.driver import PRELOAD
from tests.launch.pipes import PATIENCE_S, Pipe
from tests.launch.sessions import wait_until_empty
from tests.training.runs import Runs, write_jsonl

warm_up(PRELOAD)
TERM, INT, USR1, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP
AT_A_BOUNDARY = {0: 75, 1: 75}


def parent_of(pid: int) -> int:
    return psutil.Process(pid).ppid()


@pytest.fixture
def not_ended() -> Iterator[None]:
    """A signal that no launcher handles fails the test and does not end the process that runs it."""

    def fail(signum: int, frame: object) -> None:
        raise AssertionError(f"no launcher handled {signal.Signals(signum).name}")

    before = {signum: signal.signal(signum, fail) for signum in PREEMPTION_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@contextmanager
def signalled(pipe: Pipe, signals: list[signal.Signals], group: bool) -> Iterator[None]:
    """Once both ranks run, send the signals to this process; group: and to all that was started for the launch."""

    def send() -> None:
        ranks = [int(pid) for _, pid in pipe.lines(2)]
        server = fork_server.running()
        assert server is not None
        for number, signum in enumerate(signals):
            time.sleep(number)  # two at once would count as one
            signal.raise_signal(signum)
            for pid in {*ranks, *map(parent_of, ranks), server.pid} if group else ():
                os.kill(pid, signum)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join(PATIENCE_S)


@pytest.mark.parametrize(
    ("signals", "group", "link_error", "timeout_s", "expected", "exits"),
    [
        ([USR1], False, "", 60, (Exit.PREEMPTED, "ended at a step boundary on SIGUSR1"), AT_A_BOUNDARY),
        ([TERM], True, "", 60, (Exit.PREEMPTED, "ended at a step boundary on SIGTERM"), AT_A_BOUNDARY),
        ([HUP], True, "", 60, (Exit.PREEMPTED, "ended at a step boundary on SIGHUP"), AT_A_BOUNDARY),
        ([INT, INT], False, "01", 3600, (Exit.RANK_LOST, "a second SIGINT asked for it"), {0: -9, 1: -9}),
        ([TERM], False, "1", 0.1, (Exit.RANK_SILENT, "rank 1 did not end within 1.6 s of SIGTERM"), {0: 75, 1: -9}),
    ],
    ids=["USR1", "TERM to the group", "HUP to the group", "two INT", "too late"],
)
def test_a_signal_ends_ranks_at_a_step_boundary(
    pipe: Pipe,
    not_ended: None,
    signals: list[signal.Signals],
    group: bool,
    link_error: str,
    timeout_s: float,
    expected: tuple[Exit, str],
    exits: dict[int, int],
) -> None:
    payload = {"pipe": str(pipe.path), "how": dict.fromkeys(link_error, "link_error")}
    entry, folder = "tests.launch.entries:end", pipe.path.parent
    with signalled(pipe, signals, group):
        result = launch(entry, payload, workers=2, run_folder=folder, timeout_s=timeout_s)
    pipe.wait_until_all_are_gone()
    assert result.exit == expected[0]
    assert result.cause.endswith(expected[1])
    assert result.exits == exits


@contextmanager
def launcher(folder: Path, *entries: tuple[str, dict[str, Any]]) -> Iterator[subprocess.Popen[str]]:
    requested = {"entries": entries, "folder": str(folder), "modules": PRELOAD}
    command = [sys.executable, "-m", "tests.launch.driver", json.dumps(requested)]
    # The launcher sets the number of threads of its ranks, not the environment of the tests.
    environ = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environ)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_nothing_outlives_a_killed_launcher(pipe: Pipe) -> None:
    payload = {"pipe": str(pipe.path), "how": {"0": "link_error", "1": "link_error"}}
    with launcher(pipe.path.parent, ("end", payload)) as process:
        parents = {parent_of(int(pid)) for _, pid in pipe.lines(2)}
        assert len(parents) == 1
        process.kill()
        pipe.wait_until_all_are_gone()
        while any(start_time(each) is not None for each in parents):
            os.sched_yield()


def test_launches_of_one_process_do_not_meet_and_the_last_ends_with_its_group(pipe: Pipe, tmp_path: Path) -> None:
    echoes = [("echo", {"folder": str(tmp_path / name), "say": name}) for name in ("a", "b")]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with launcher(tmp_path, *echoes, ("end", {"pipe": str(pipe.path), "how": {}})) as process:
        pipe.lines(2)
        os.killpg(process.pid, signal.SIGHUP)
        out, _ = process.communicate(timeout=PATIENCE_S)
    said = [line for line in out.splitlines() if not line.startswith("result ")]
    assert sorted(said) == [f"rank {rank} says {name}" for rank in (0, 1) for name in ("a", "b")]
    results = [json.loads(line.removeprefix("result ")) for line in out.splitlines() if line.startswith("result ")]
    assert [each["exit"] for each in results] == ["OK", "OK", "PREEMPTED"]
    assert (process.returncode, results[2]["exits"]) == (75, {"0": 75, "1": 75})
    found = [json.loads((tmp_path / name / f"echo-{rank}.json").read_text()) for name in ("a", "b") for rank in (0, 1)]
    assert {(each["omp"], each["threads_of_the_forking_process"]) for each in found} == {("1", 1)}
    for what in ("run_id", "store"):
        first, second = ({str(each[what]) for each in pair} for pair in (found[:2], found[2:]))
        assert len(first) == len(second) == 1
        assert first != second


@pytest.mark.parametrize(("prefix", "listened"), [([], "True"), (["nohup"], "False")])
def test_a_run_under_nohup_outlives_its_terminal(prefix: list[str], listened: str) -> None:
    code = "import signal; from andon.launch.context import *; print(signal.SIGHUP in PREEMPTION_SIGNALS)"
    command = [*prefix, sys.executable, "-c", code]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [listened]


# Signals to `andon train` before its ranks train: a code that is documented, one line, and nothing left.


Moment = Callable[[int, Path], bool]


def heeds(pid: int, run: Path) -> bool:
    """Its handler of SIGTERM is there (`SigCgt` in `/proc/PID/status`), and next to nothing has been imported."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1)


def imports(pid: int, run: Path) -> bool:
    """It is in the middle of its imports: those of the configuration have begun."""
    return "pydantic_core" in Path(f"/proc/{pid}/maps").read_text()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    runs = Runs(write_jsonl(tmp_path / "train.jsonl"))
    sets = [part for each in runs.overrides() for part in ("--set", each)]
    arguments = ["train", *sets, "--run-dir", str(tmp_path / "run"), "--workers", "2", "--backend", "gloo"]
    process = subprocess.Popen(
        [sys.executable, "-m", "andon", *arguments], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    yield process
    process.kill()
    process.communicate()


def said_after(command: subprocess.Popen[str], run: Path, moment: Moment, signum: int) -> list[str]:
    """The lines that it says when the signal comes at this moment; of its session nothing may be left."""
    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not moment(command.pid, run):
        assert command.poll() is None, command.communicate()
        assert time.monotonic() < deadline, "this moment never comes"
        pause.wait(0.001)
    command.send_signal(signum)
    _, said = command.communicate(timeout=PATIENCE_S)
    wait_until_empty(command.pid)
    return said.splitlines()


@pytest.mark.parametrize(
    ("moment", "signum", "code"),
    [
        (heeds, signal.SIGTERM, Exit.PREEMPTED),
        (heeds, signal.SIGINT, Exit.INTERRUPTED),
        (imports, signal.SIGUSR1, Exit.PREEMPTED),
        (imports, signal.SIGINT, Exit.INTERRUPTED),
    ],
)
def test_a_signal_before_training_began_ends_it_by_one_line(
    tmp_path: Path, command: subprocess.Popen[str], moment: Moment, signum: signal.Signals, code: Exit
) -> None:
    said = said_after(command, tmp_path / "run", moment, signum)
    assert (command.returncode, said) == (code, [f"andon: ended by {signum.name} before training began"])
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]


@pytest.fixture
def heeding() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in preemption.PREEMPTION_SIGNALS}
    hook = sys.unraisablehook
    preemption.heed()
    yield
    preemption.end()
    preemption.taken()
    sys.unraisablehook = hook
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_what_comes_between_two_handlers_reaches_the_supervisor(heeding: None) -> None:
    """Noted after training began, and taken once: a Ctrl-C that counted twice would kill the ranks."""
    preemption.begin()
    signal.raise_signal(signal.SIGINT)
    with preemption.collected():
        assert preemption.taken() == [signal.SIGINT]
        assert preemption.taken() == []
    signal.raise_signal(signal.SIGTERM)  # all has ended: it changes nothing


def test_what_was_lost_on_the_way_is_raised_again(heeding: None, capfd: pytest.CaptureFixture[str]) -> None:
    """In a destructor nothing can be raised, and Python would print a traceback: training does not begin after it."""

    made = type("Made", (), {"__del__": lambda self: os.kill(os.getpid(), signal.SIGTERM)})()
    del made
    with pytest.raises(preemption.Interrupted, match="SIGTERM"):
        preemption.begin()
    assert capfd.readouterr().err == ""
