"""This process's rank, from the environment variables of torchrun or of our launcher, which no rank outlives.

torchrun starts each rank in a new session, and ranks of our launcher have the fork server as parent. So neither a
signal to the launcher's group nor the death of the direct parent is enough: a rank requests a death signal from the
kernel *and* polls its launcher five times a second.

Signals that ask `andon train` to end: before training one ends the command at once. `Interrupted` is raised once, in
the main thread, so that partial work is undone. From `begin` on, signals are collected until the trainer handles them
itself. After `end` they change nothing.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from andon.console.messages import ProblemList
from andon_contracts.liveness.process import Process

RUN_ID = "TORCHELASTIC_RUN_ID"
LAUNCHER = "ANDON_LAUNCHER_PID"
"""The process id of our launcher. Ranks cannot take it from their parent, which is the fork server."""
STORE = "ANDON_STORE"  # the address of the ranks' `unix_store`; our launcher sets it

_MOST = 1 << 31


@dataclass(frozen=True)
class RankContext:
    """One rank: 0 <= rank < world_size; 0 <= local_rank < local_world_size, the number of ranks on this host."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    run_id: str
    launcher_pid: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> RankContext:
        """Read `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `TORCHELASTIC_RUN_ID`; raise `InputError` listing all problems.

        The launcher is this process's parent (torchrun's agent) unless `LAUNCHER` names ours.
        """
        variables = os.environ if environ is None else environ
        problems = ProblemList()
        unset = "is not set; start ranks by `andon train --workers N` or by torchrun"

        def number(name: str, least: int, most: int = _MOST, default: int | None = None) -> int:
            """The variable as an integer; `most` (a harmless stand-in) if it is invalid."""
            text = variables.get(name, "")
            if name not in variables and default is not None:
                return default
            if not text:
                problems.add(name, unset)
            elif not re.fullmatch(r"\s*[+-]?\d+\s*", text):
                problems.add(name, f"must be an integer, not {text!r}")
            elif least <= int(text) <= most:
                return int(text)
            else:
                top = "" if most == _MOST else f" and at most {most}"
                problems.add(name, f"must be at least {least}{top}, not {int(text)}")
            return most

        world = number("WORLD_SIZE", 1)
        local_world = number("LOCAL_WORLD_SIZE", 1, world, default=world)
        rank = number("RANK", 0, world - 1)
        local_rank = number("LOCAL_RANK", 0, local_world - 1)
        launcher = number(LAUNCHER, 1, default=max(os.getppid(), 1))
        if not variables.get(RUN_ID):
            problems.add(RUN_ID, unset)
        problems.raise_if_any()
        return cls(rank, local_rank, world, local_world, variables[RUN_ID], launcher)


def is_rank(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process was started as a rank by torch's launcher (`torchrun`, or `andon.launch`)."""
    return RUN_ID in (os.environ if environ is None else environ)


_PR_SET_PDEATHSIG = 1


def die_with_parent(
    launcher_pid: int, failed: Callable[[Exception], None] | None = None, *, poll_s: float = 0.2
) -> None:
    """End this process by SIGKILL as soon as its direct parent or its launcher is gone.

    The kernel's death signal covers the direct parent (torchrun's agent, or our fork server). A daemon thread polls the
    launcher every `poll_s` seconds. If the launcher is gone already, this process ends immediately. failed: called in
    that thread with an error that ends the thread; None: such an error ends this process.
    """
    if launcher_pid < 1:
        raise ValueError(f"launcher_pid must be a process id, not {launcher_pid}")
    _ask_for_death_signal()
    launcher = Process.of(launcher_pid)

    def watch() -> None:
        try:
            while launcher is not None and launcher.state() != "gone":
                time.sleep(poll_s)
        except Exception as error:  # noqa: BLE001 - any error: this process must not outlive its launcher
            if failed is not None:
                failed(error)
                return
            traceback.print_exception(error)
        _end_now()

    if launcher is None:
        _end_now()
    else:
        threading.Thread(target=watch, name="orphan-guard", daemon=True).start()


def bind_to_parent(parent_pid: int) -> None:
    """Have the kernel end this process by SIGKILL when its parent ends; immediately if it has ended already."""
    _ask_for_death_signal()
    if os.getppid() != parent_pid:
        _end_now()


def bind_to_launcher() -> None:
    """`bind_to_parent` for the fork server. The launcher's pid is in `LAUNCHER`, because a fork server whose launcher
    is gone already has another parent."""
    bind_to_parent(int(os.environ.get(LAUNCHER, os.getppid())))


def _ask_for_death_signal() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")


def _end_now() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_HANGUP = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
"""Sent when the terminal is closed. Under `nohup` it is ignored, and the run must continue."""
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, *_HANGUP)
"""Signals that ask a rank to end at its next step boundary, with a checkpoint."""


class Interrupted(BaseException):
    """A signal asked this command to end before training. Not caught by `except Exception`, so nothing swallows it."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(signal.Signals(signum).name)


class _State:
    on = False  # handlers are installed
    ends = False  # a signal ends this process
    received: list[int] = []  # noqa: RUF012 - the state of this process


def _note(signum: int, frame: FrameType | None) -> None:
    _State.received.append(signum)
    if _State.ends and len(_State.received) == 1:
        raise Interrupted(signum)


def heed() -> None:
    """From now on the preemption signals raise `Interrupted`. Must be called in the main thread."""
    _State.on = _State.ends = True
    previous = sys.unraisablehook

    def unraisable(unraised: sys.UnraisableHookArgs) -> None:
        # Raised in a destructor, where Python discards errors: `begin` raises it again.
        if unraised.exc_type is not Interrupted:
            previous(unraised)

    sys.unraisablehook = unraisable
    for signum in PREEMPTION_SIGNALS:
        signal.signal(signum, _note)


def heeded() -> bool:
    """True after `heed`: this process then handles signals until it ends."""
    return _State.on


def begin() -> None:
    """Collect signals from now on. Raises `Interrupted` if one has arrived whose error was lost."""
    if _State.ends:
        _State.ends = False
        if _State.received:
            raise Interrupted(_State.received[0])


def end() -> None:
    """The command has ended: signals no longer change its exit code."""
    _State.ends = False


@contextmanager
def collected() -> Iterator[None]:
    """Context manager: collect signals instead of ending this process. Only the main thread can do this.

    The system merges signals of one kind that arrive at once.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {signum: signal.signal(signum, _note) for signum in PREEMPTION_SIGNALS} if main else {}
    if _note not in before.values():
        taken()  # discard signals that an earlier launch in this process did not handle
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def taken() -> list[int]:
    """The signals collected so far, in order; they are then cleared."""
    received, _State.received = _State.received, []
    return received
