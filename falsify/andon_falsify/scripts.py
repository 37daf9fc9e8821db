"""Script mode: runs a user's training command on several layouts of one global batch, and reads the ledgers.

    andon falsify --script "torchrun --nproc-per-node {world} -m andon watch train.py
        --batch {local_batch} --accumulate {accumulation}"

`andon.watch` writes the ledgers, in the script or around it. No reference is needed: a correct script has the same
gradients on every layout.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from andon.console.messages import InputError, Problem
from andon_falsify.history import History, read_history
from andon_falsify.subjects.case import Case

_RESUME = "{resume:"
_MARK = "ANDON_FALSIFY_RUN"
"""Set in the command's environment: every process that descends from the run inherits it."""
_POLL_S, _CLOSE_POLL_S = 0.02, 0.001
_NICENESS = 10
_GRACE_S = 2.0
_SHOWN = 300
_NO_REASON = re.compile(r"\W*$|[DIWEF]\d{4} [\d:.]+ \d+ \S*torch/distributed/|traceback : To enable|error_file: <N/A>")
"""Decoration, and what torchrun logs and reports after every failure."""
_TRACEBACK, _LAUNCHERS_END = "Traceback (most recent call last):", "ChildFailedError:"


@dataclass(frozen=True)
class Command:
    """A command line with the placeholders `{world}`, `{local_batch}` and, optionally, `{accumulation}`, `{folder}` and
    `{resume:WORDS}`.

    `{folder}` becomes a folder that is new for every run, and shared by a run and its resumption. `{resume:WORDS}`
    becomes `WORDS` when a killed run is resumed, and is empty otherwise. `WORDS` may contain placeholders and balanced
    braces. A path with `*` in it becomes the newest file that matches.
    """

    text: str

    @classmethod
    def read(cls, text: str) -> Command:
        """Raises `InputError` with everything that is missing or malformed."""
        wrong = [
            Problem("--script", f"has no {{{name}}}, {why}")
            for name, why in (
                ("world", "so that the number of ranks cannot be varied"),
                ("local_batch", "so that the global batch would grow with the number of ranks"),
            )
            if f"{{{name}}}" not in text
        ]
        if _RESUME in text and "{folder}" not in text:
            wrong.append(Problem("--script", "has {resume:...} but no {folder}: where is what is to be resumed?"))
        try:
            parts = list(_parts(text))
            shlex.split("".join(part for part, _ in parts))
            shlex.split("".join(part for part, resuming in parts if not resuming))
        except ValueError as error:
            wrong.append(Problem("--script", f"cannot be split into words: {str(error).lower()}"))
        if wrong:
            raise InputError(wrong)
        return cls(text)

    @property
    def accumulates(self) -> bool:
        """Whether the command takes a number of micro-batches."""
        return "{accumulation}" in self.text

    @property
    def resumes(self) -> bool:
        """Whether the command says how a run is resumed."""
        return _RESUME in self.text

    def words(self, case: Case, folder: str, *, resumed: bool = False) -> list[str]:
        """The command for the layout of `case`, split into words."""
        values = {
            "world": str(case.world),
            "local_batch": str(case.local_batch),
            "accumulation": str(case.accumulation),
            "folder": shlex.quote(folder),
        }
        filled = ""
        for part, resuming in _parts(self.text):
            for name, value in values.items():
                part = part.replace(f"{{{name}}}", value)
            if not resuming:
                filled += part
            elif resumed:
                filled += shlex.join(map(_newest, shlex.split(part)))
        return shlex.split(filled)


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """The text outside of `{resume:...}` (False) and inside (True), in order. Raises `ValueError` if one is open."""
    outside, found, rest = text.partition(_RESUME)
    yield outside, False
    while found:
        depth, end = 1, 0
        while depth:
            if end == len(rest):
                msg = "a {resume: is not closed"
                raise ValueError(msg)
            depth += {"{": 1, "}": -1}.get(rest[end], 0)
            end += 1
        yield rest[: end - 1], True
        outside, found, rest = rest[end:].partition(_RESUME)
        yield outside, False


def _newest(word: str) -> str:
    """The newest path that matches the pattern `word`; `word` itself if nothing matches."""
    return max(glob.glob(word), key=os.path.getmtime) if "*" in word and glob.glob(word) else word


@dataclass(frozen=True)
class Done:
    """A finished run. error: why its ledger cannot be judged, or "". stray: the processes that it left running."""

    history: History
    error: str = ""
    stray: tuple[str, ...] = ()


def run(words: Sequence[str], folder: Path, deadline_s: float, stop: Callable[[Path], bool] | None = None) -> Done:
    """Run `words` with `ANDON_LEDGER` set to a new file in `folder`, and read that ledger.

    stop: called with the ledger's path while the run goes on; the run is killed (SIGKILL, all processes at once) when
    it returns True. Every process of the run has ended on return, also after an exception. Temporary files of the run
    are in `folder`.
    """
    ledger, output = folder / f"ledger-{uuid.uuid4().hex[:8]}.jsonl", folder / "output.txt"
    temporary, mark = folder / "tmp", uuid.uuid4().hex
    temporary.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, _MARK: mark, "ANDON_LEDGER": str(ledger), "TMPDIR": str(temporary)}
    with output.open("wb") as printed:
        try:
            process = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, start_new_session=True
            )
        except OSError as error:
            return Done(History("no run", ()), f"the command cannot be started: {error}")
        try:
            stopped = _wait(process, deadline_s, ledger, stop)
            code = process.poll()
        finally:
            stray = _end_all(mark, process)
    history = read_history(ledger) if ledger.exists() else History(str(ledger), ())
    if stopped:
        return Done(history, stray=stray)
    if code is None:
        return Done(history, f"no end within {deadline_s:.0f} s", stray)
    if code:
        return Done(history, f"the command ended with {code}: {_last_words(output)}", stray)
    if not ledger.exists():
        why = "it left no ledger: no watch was opened; call andon.watch in it, or put `-m andon watch` before it"
        return Done(history, why, stray)
    return Done(history, stray=stray)


def _wait(
    process: subprocess.Popen[bytes], deadline_s: float, ledger: Path, stop: Callable[[Path], bool] | None
) -> bool:
    """Wait for the end of `process`, or for the deadline. Returns whether `stop` asked to kill it."""
    deadline = time.monotonic() + deadline_s
    if stop is not None:  # on a busy machine a short run could end before its ledger is read
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
    while process.poll() is None and time.monotonic() <= deadline:
        if stop is not None and stop(ledger):
            return True
        time.sleep(_POLL_S if stop is None else _CLOSE_POLL_S)
    return False


def _end_all(mark: str, process: subprocess.Popen[bytes]) -> tuple[str, ...]:
    """Kill all processes of the run. Returns those that were still running after the command had ended by itself."""
    ended = process.poll() is not None
    deadline = time.monotonic() + (_GRACE_S if ended else 0.0)
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    names = tuple(f"{each.pid} ({_command_line(each)})" for each in found) if ended else ()
    while found := _marked(mark):
        for each in found:
            with suppress(psutil.Error):
                each.send_signal(signal.SIGKILL)
        time.sleep(_POLL_S)
    process.wait()
    return names


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # the process has ended, or belongs to another user
            if process.environ().get(_MARK) == mark:
                found.append(process)
    return found


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:80]
    except psutil.Error:
        return "ended"


def _last_words(output: Path) -> str:
    """The error, if the output has a traceback; otherwise the last line that says something."""
    found = [line.strip() for line in output.read_bytes().decode("utf-8", "backslashreplace").splitlines()]
    lines = [line for line in found if not _NO_REASON.match(line)]
    lines = _without_launcher(lines) or lines or ["it said nothing"]
    raised = lines[lines.index(_TRACEBACK) :] if _TRACEBACK in lines else lines
    return next(filter(_is_error, raised), lines[-1]).removeprefix("traceback : ")[:_SHOWN]


def _without_launcher(lines: list[str]) -> list[str]:
    """`lines` without the final report of torchrun, which begins with its own traceback."""
    end = next((index for index, line in enumerate(lines) if line.endswith(_LAUNCHERS_END)), None)
    if end is None:
        return lines
    return lines[: max((index for index, line in enumerate(lines[:end]) if line == _TRACEBACK), default=end)]


def _is_error(line: str) -> bool:
    name, colon, _ = line.rpartition("]: ")[2].partition(":")
    return bool(colon) and name.isidentifier() and name.endswith(("Error", "Exception", "Violation", "Interrupt"))
