"""One run of a command: started, watched by the clock, ended with all that it started, and its ledger read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from andon_contracts.liveness.process import Process
from andon_falsify.history import History, read_history

_MARK = "ANDON_FALSIFY_RUN"
"""Set for the command: whatever it starts has it too, wherever it may have gone."""
_POLL_S, _CLOSE_POLL_S = 0.02, 0.001
_YIELDING = 10
"""How nice a run is to the suite that is to stop it at a certain update."""
_GRACE_S = 2.0
_SHOWN = 300
_NO_REASON = re.compile(r"\W*$|[DIWEF]\d{4} [\d:.]+ \d+ \S*torch/distributed/|traceback : To enable|error_file: <N/A>")
"""Decoration, and what torchrun logs and reports whatever the reason was."""
_TRACEBACK, _LAUNCHERS_END = "Traceback (most recent call last):", "ChildFailedError:"


@dataclass(frozen=True)
class Done:
    """What a run came to. error: why it gives nothing to judge, "" where it does. stray: what it left running."""

    history: History
    error: str = ""
    stray: tuple[str, ...] = ()


def run(words: Sequence[str], folder: Path, deadline_s: float, stop: Callable[[Path], bool] | None = None) -> Done:
    """Run `words` with `ANDON_LEDGER` set to a new ledger in `folder`, and read that.

    stop: is asked all the time, with the ledger's path, and kills the run (SIGKILL, all of it at once) where it says
    so. Every process that has come of the run has ended afterwards, after an interruption too, and what they left in
    the folder for temporary files lies in `folder`.
    """
    ledger, output = folder / f"ledger-{uuid.uuid4().hex[:8]}.jsonl", folder / "output.txt"
    temporary, mark = folder / "tmp", uuid.uuid4().hex
    temporary.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, _MARK: mark, "ANDON_LEDGER": str(ledger), "TMPDIR": str(temporary)}
    with output.open("wb") as said:
        try:
            process = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
            )
        except OSError as error:
            return Done(History("no run", ()), f"the command cannot be started: {error}")
        try:
            ended = _watched(process, deadline_s, None if stop is None else partial(stop, ledger))
        except BaseException:
            _end_all(mark, process)
            raise
        stray = _end_all(mark, process)
    history = read_history(ledger) if ledger.exists() else History(str(ledger), ())
    return Done(history, _fault(process, ended, ledger, output), stray)


def _watched(process: subprocess.Popen[bytes], deadline_s: float, stop: Callable[[], bool] | None) -> str:
    """ "": it ended by itself; else `stopped` or `late`."""
    deadline = time.monotonic() + deadline_s
    if stop is not None:  # on a machine that is busy the run would else be over before it is looked at
        os.setpriority(os.PRIO_PROCESS, process.pid, _YIELDING)
    while process.poll() is None:
        if stop is not None and stop():
            return "stopped"
        if time.monotonic() > deadline:
            return f"late: no end within {deadline_s:.0f} s"
        time.sleep(_POLL_S if stop is None else _CLOSE_POLL_S)
    return ""


def _end_all(mark: str, process: subprocess.Popen[bytes]) -> tuple[str, ...]:
    left_alone = process.poll() is not None
    deadline = time.monotonic() + (_GRACE_S if left_alone else 0.0)
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    names = tuple(f"{pid} ({_command(pid)})" for pid in found) if left_alone else ()
    while found := _marked(mark):
        for pid in found:
            held = Process.of(pid)
            if held is not None:
                held.send(signal.SIGKILL)
        time.sleep(_POLL_S)
    process.wait()
    return names


def _marked(mark: str) -> list[int]:
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:  # it has ended, or is somebody else's
                continue
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()[:80]
    except OSError:
        return "ended"


def _fault(process: subprocess.Popen[bytes], ended: str, ledger: Path, output: Path) -> str:
    if ended == "stopped":
        return ""
    if ended:
        return ended.removeprefix("late: ")
    if process.returncode:
        return f"the command ended with {process.returncode}: {_last_words(output)}"
    if not ledger.exists():
        return "it left no ledger: no watch was opened; call andon.watch in it, or put `-m andon watch` before it"
    return ""


def _last_words(output: Path) -> str:
    """The error itself where there is a traceback, else the last line that says something; a rank's if one said any."""
    found = [line.strip() for line in output.read_bytes().decode("utf-8", "backslashreplace").splitlines()]
    lines = [line for line in found if not _NO_REASON.match(line)]
    lines = _without_launcher(lines) or lines or ["it said nothing"]
    raised = lines[lines.index(_TRACEBACK) :] if _TRACEBACK in lines else lines  # what was only printed is no error
    return next(filter(_is_error, raised), lines[-1]).removeprefix("traceback : ")[:_SHOWN]


def _without_launcher(lines: list[str]) -> list[str]:
    """`lines` before the report of torchrun, which begins with a traceback of its own; all where there is none."""
    end = next((index for index, line in enumerate(lines) if line.endswith(_LAUNCHERS_END)), None)
    if end is None:
        return lines
    return lines[: max((index for index, line in enumerate(lines[:end]) if line == _TRACEBACK), default=end)]


def _is_error(line: str) -> bool:
    name, colon, _ = line.rpartition("]: ")[2].partition(":")
    return bool(colon) and name.isidentifier() and name.endswith(("Error", "Exception", "Violation", "Interrupt"))
