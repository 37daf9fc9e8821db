"""Signals to `andon train` before its ranks train: a code that is documented, one line, and nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from andon.console.exits import Exit
from andon.launch import preemption
from andon.launch.supervisor import Wake
from tests.launch.pipes import PATIENCE_S
from tests.launch.sessions import wait_until_empty
from tests.training.runs import Runs, write_jsonl

Moment = Callable[[int, Path], bool]


def heeds(pid: int, run: Path) -> bool:
    """Its handler of SIGTERM is there (`SigCgt` in `/proc/PID/status`), and next to nothing has been imported."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1)


def imports(pid: int, run: Path) -> bool:
    """It is in the middle of its imports: those of the configuration have begun."""
    return "pydantic_core" in Path(f"/proc/{pid}/maps").read_text()


def has_the_folder(pid: int, run: Path) -> bool:
    """The run folder is its own: training begins now, or has."""
    return run.exists()


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


def signalled(command: subprocess.Popen[str], run: Path, moment: Moment, signum: int) -> list[str]:
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
    said = signalled(command, tmp_path / "run", moment, signum)
    assert (command.returncode, said) == (code, [f"andon: ended by {signum.name} before training began"])
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]


# By default: what comes between two handlers (below), and a signal to ranks that run (test_signals).
@pytest.mark.deep
def test_a_signal_while_ranks_are_started_is_not_lost(tmp_path: Path, command: subprocess.Popen[str]) -> None:
    """Before training begins 130 and nothing is left; else 75 and it may be resumed; no traceback either way."""
    said = signalled(command, tmp_path / "run", has_the_folder, signal.SIGINT)
    assert [line for line in said if not line.startswith(("andon: ", "step ", "validation "))] == []
    begun = (tmp_path / "run" / "ledger.jsonl").exists()
    assert command.returncode == (Exit.PREEMPTED if begun else Exit.INTERRUPTED), said
    assert (tmp_path / "run").exists() == begun


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
    wake = Wake()
    with wake.listening():
        assert wake.wait(0) == [signal.SIGINT]
    signal.raise_signal(signal.SIGTERM)  # all has ended: it changes nothing
    wake.close()


def test_what_was_lost_on_the_way_is_raised_again(heeding: None, capfd: pytest.CaptureFixture[str]) -> None:
    """In a destructor nothing can be raised, and Python would print a traceback: training does not begin after it."""

    made = type("Made", (), {"__del__": lambda self: os.kill(os.getpid(), signal.SIGTERM)})()
    del made
    with pytest.raises(preemption.Interrupted, match="SIGTERM"):
        preemption.begin()
    assert capfd.readouterr().err == ""
