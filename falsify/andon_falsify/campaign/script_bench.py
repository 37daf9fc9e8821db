"""Script mode: a user's training command on several layouts of one global batch, judged by the ledgers that it leaves.

    andon falsify --script "torchrun --nproc-per-node {world} -m andon watch train.py
        --batch {local_batch} --accumulate {accumulation}"

`andon.watch` writes the ledgers, in the script or around it. No reference is needed: a correct script has the same
gradients on every layout.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import re
import shlex
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import IO

from andon.console.messages import InputError, Problem
from andon_falsify import NO_NUMPY
from andon_falsify.campaign.bench import Bench
from andon_falsify.campaign.trial import RESUME, Trial
from andon_falsify.claims.evidence import Evidence, RunUnavailable
from andon_falsify.claims.rounding import PERTURBED
from andon_falsify.history import History, read_history
from andon_falsify.ranks.processes import Process, descendants, kill
from andon_falsify.subjects.case import Case, make_rows
from andon_falsify.verdict import ExtraRun

_GLOBAL_BATCH = 12
"""Rows of a global batch: divisible by 1, 2, 3, 4 and 6 micro-batches."""
_PLAIN = Case(make_rows(3), max_steps=1, optimizer="sgd", weight_decay=0.0, clip_norm=None, backend="script").but(
    hidden=8, heads=1, inner=8, rank=1, dropout=0.0
)
"""A script receives only the layout of a case: rows, model and seed are its own."""
_RESUME, _ELASTIC = "{resume:", "{resume_any:"
_PLACES = ("world", "local_batch", "accumulation", "folder")
PLACE = re.compile(r"\$\{\w+\}|\{(?P<literal>\{\w+\})\}|\{(?P<name>[^\W\d]\w*)\}")
_MALFORMED, _CLOSE = re.compile(r"(?<!\$)\{\s*(\w+)([:\s])"), 0.8
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
UNPERTURBED = "0:0"
"""The value of ANDON_PROBE with which the watch writes a sketch, and leaves the weights as they are."""
_POLL_S, _CLOSE_POLL_S = 0.02, 0.001
_NICENESS = 10
_GRACE_S, _KILLING_S = 2.0, 10.0
_SHOWN, _MOST_OUTPUT = 300, 1 << 18
_NO_REASON = re.compile(r"\W*$|[DIWEF]\d{4} [\d:.]+ \d+ \S*torch/distributed/|traceback : To enable|error_file: <N/A>")
"""Decoration, and what torchrun logs and reports after every failure."""
_TRACEBACK, _LAUNCHERS_END = "Traceback (most recent call last):", "ChildFailedError:"
_OF_THE_WATCH = re.compile(r"rank \S+ of \d+ .*\(not a contract violation\): ")

Layout = tuple[int, int, int]
"""Ranks, rows of a micro-batch, micro-batches of a rank in an update: all that distinguishes two runs of a script."""


class ScriptBench(Bench):
    """Runs trials with a user's command, see `Command`. Each layout is run once, and resumed once.

    deadline_s: the budget's; a run may take `late_after` of it. Raises `InputError` for a malformed command.
    """

    kind = "script"
    every_backend: tuple[str, ...] = ("script", "nccl")  # nccl: the script trains on GPUs, a rank on each
    late_after = 6.0  # a script starts torch on every rank

    def __init__(self, text: str, deadline_s: float) -> None:
        super().__init__(text, words=("--script", text))
        self.backends = ("script",)
        self._command = Command.read(text)
        self._deadline_s = self.late_after * deadline_s
        self._runs = 0
        self._done: dict[tuple[Layout, str], Done] = {}
        self._resumed: dict[tuple[Layout, Layout], Mapping[ExtraRun, Evidence]] = {}

    @property
    def runs(self) -> int:
        return self._runs

    def suited(self, trial: Trial) -> Trial:
        """See `Bench.suited`: only the layout is kept. The global batch has 12 rows if these divide evenly."""
        case, then = trial.case, trial.then_world
        leaves = case.world * (case.accumulation if self._command.accumulates else 1)
        batch = _GLOBAL_BATCH if _GLOBAL_BATCH % leaves == 0 else leaves
        backend = case.backend if case.backend in self.every_backend else "script"
        plain = _PLAIN.but(world=case.world, micro_batches=leaves, batch_size=batch, backend=backend)
        elsewhere = self._command.elastic and then != case.world and then and batch % (then * plain.accumulation) == 0
        return replace(trial, case=plain, then_world=then if elsewhere else 0)

    def inapplicable(self, trial: Trial) -> str:
        if trial.kind == RESUME and not self._command.resumes:
            return "the command does not say how it resumes ({resume:WORDS} and {folder})"
        return trial.lacking

    def evidence(self, trial: Trial) -> Evidence:
        return replace(self._run(trial.case), further=partial(self._further, trial))

    def _further(self, trial: Trial, name: ExtraRun) -> Mapping[ExtraRun, Evidence]:
        case, alone = trial.case, trial.case.but(world=1, micro_batches=1)
        if name == "alone":
            return {name: self._run(alone, what="the run on one rank to compare with: ")}
        if name == "again":
            return {name: self._run(alone, again=name, what="the run on one rank, once more: ")}
        if name in PERTURBED:
            probe = f"{1 + PERTURBED.index(name)}:{self._run(alone).history.bits}"
            return {name: self._run(alone, again=probe, what="the run on one rank, with perturbed weights: ")}
        if name not in ("cut", "cut again", "resumed"):
            return {}
        elsewhere = case.but(world=trial.then_world, micro_batches=trial.then_world * case.accumulation)
        key = _layout(case), _layout(then := elsewhere if trial.then_world else case)
        if key not in self._resumed:
            self._resumed[key] = self._cut_and_resume(case, then)
        return self._resumed[key]

    def _run(self, case: Case, *, again: str = "", what: str = "") -> Evidence:
        """again: of a further run of the layout; "SEED:BITS" if its weights are perturbed."""
        key = _layout(case), again
        if key not in self._done:
            with tempfile.TemporaryDirectory(prefix="andon-script-") as folder:
                self._runs += 1
                words = self._command.words(case, new_folder(folder))
                probe = again if ":" in again else UNPERTURBED
                self._done[key] = run(words, Path(folder), self._deadline_s, probe=probe)
        return _sound(self._done[key], case, what, shlex.join(self._command.words(case, "run")))

    def _cut_and_resume(self, case: Case, then: Case) -> Mapping[ExtraRun, Evidence]:
        """Kill a run after a quarter of its updates, resume it in the same folder, kill it after a sixth more, resume.

        So in a run of one or two epochs both resumptions begin in the first, and the last one goes on to the second.
        then: `case` on the ranks of the first resume. If that run ends before it is killed, it is not resumed again.
        """
        updates = len(self._run(case).history.trajectory)
        for after in (-(-updates // 4), 1, 1):  # a short run may be over before it is killed
            with tempfile.TemporaryDirectory(prefix="andon-script-") as folder:
                base, own = Path(folder), new_folder(folder)
                self._runs += 1
                cut = run(self._command.words(case, own), base / "cut", self._deadline_s, partial(_reached, after))
                if not cut.error and len(cut.history.trajectory) < updates:
                    found: dict[ExtraRun, Evidence] = {"cut": _evidence(cut, case)}
                    left = updates - len(cut.history.trajectory)
                    # Words are filled in before each run: a pattern in them means the newest checkpoint.
                    for at, stop in ((then, partial(_reached, -(-updates // 6))), (case, None)):
                        self._runs += 1
                        words = self._command.words(at, own, resumed=True)
                        again = run(words, base / f"{self._runs}", self._deadline_s, stop)
                        if stop is None or again.error or again.code is not None:
                            break
                        found["cut again"] = _evidence(again, at)
                    if stop is None and not again.history.steps and len(found["cut again"].history.trajectory) >= left:
                        found["resumed"] = found.pop("cut again")  # it was killed after its last update
                        return found
                    return found | {"resumed": _sound(again, at, "the resumed run: ")}
        raise RunUnavailable(cut.error or "three times it ended before it could be killed: train for more updates")


def new_folder(folder: str) -> str:
    """Make the folder that stands for `{folder}`."""
    (made := Path(folder) / "run").mkdir()
    return str(made)


def _sound(done: Done, case: Case, what: str = "", command: str = "") -> Evidence:
    worlds = {step.world for step in done.history.steps} - {case.world}
    why = unusable(done)
    if not why and worlds:
        why = f"it should have trained on {case.world} ranks, but its ledger says {worlds.pop()}"
    if why:
        raise RunUnavailable(f"{what}{why}", f"Repeat it with: {command}" if command else "")
    return _evidence(done, case)


def unusable(done: Done) -> str:
    """Why the ledger of a run cannot be judged, or ""."""
    if not done.error and done.stray:
        return f"it left processes running, which were killed: {', '.join(done.stray)}"
    if not done.error and not done.history.steps:
        return "its ledger has no update: the watch observed no step of its optimizer"
    return done.error


def _evidence(done: Done, case: Case) -> Evidence:
    parts = f"{case.accumulation} micro-batches x " * (case.accumulation > 1)
    name = f"{case.world} rank{'s' * (case.world > 1)} x {parts}{case.local_batch} rows"
    layout = {"world": case.world, "accumulation": case.accumulation}
    return Evidence(None, replace(done.history, name=name), "script", layout=layout)


def _layout(case: Case) -> Layout:
    return case.world, case.local_batch, case.accumulation


def _reached(step: int, ledger: Path) -> bool:
    return ledger.exists() and ledger.read_bytes().count(b'"kind":"step"') >= step


@dataclass(frozen=True)
class Command:
    """A command line with the placeholders `{world}`, `{local_batch}` and, optionally, `{accumulation}`, `{folder}` and
    `{resume:WORDS}`. elastic: it has `{resume_any:WORDS}`, and so promises to resume on any number of ranks.

    A run and its resumption share `{folder}`. `{resume:WORDS}` is empty unless a killed run is resumed. `WORDS` may
    have placeholders, balanced braces, and `*`: the newest file that matches. `{{name}}` is `{name}`; `${name}` stays.
    """

    text: str
    elastic: bool = False

    @classmethod
    def read(cls, text: str) -> Command:
        """Raises `InputError` with everything that is missing or malformed."""
        text, elastic = text.replace(_ELASTIC, _RESUME), _ELASTIC in text
        names = {match["name"] for match in PLACE.finditer(text) if match["name"]}
        needed = {"world": "the number of ranks", "local_batch": "the rows of one micro-batch of one rank"}
        wrong = [
            Problem("--script", f"has no placeholder {{{name}}}; put it where the command takes {what}")
            for name, what in needed.items()
            if name not in names
        ]
        known = f"{', '.join(f'{{{name}}}' for name in _PLACES)}, {{resume:WORDS}} and {{resume_any:WORDS}}"
        for name in sorted(names - {*_PLACES}):
            what = f"is not a placeholder; known are {known}. For a literal {{{name}}} write {{{{{name}}}}}"
            wrong.append(Problem("--script", f"{{{name}}} {what}"))
        for found in _MALFORMED.finditer(text):
            words, close = ("resume", "resume_any"), _CLOSE if found[2] == ":" else 1.0
            for name in get_close_matches(found[1], (*words, *_PLACES), 1, close) if found[0] != _RESUME else ():
                meant = f"{{{name}{':WORDS' if name in words else ''}}}"
                wrong.append(Problem("--script", f"{found[0]}...}} is not a placeholder; did you mean {meant}?"))
        if _RESUME in text and "{folder}" not in text:
            wrong.append(Problem("--script", "has {resume:...} but no {folder}, where checkpoints are written"))
        try:
            parts = list(_parts(text))
            shlex.split("".join(part for part, _ in parts))
            shlex.split("".join(part for part, resuming in parts if not resuming))
        except ValueError as error:
            wrong.append(Problem("--script", f"cannot be split into words: {str(error).lower()}"))
        if wrong:
            raise InputError(wrong)
        return cls(text, elastic)

    @property
    def accumulates(self) -> bool:
        return any(match["name"] == "accumulation" for match in PLACE.finditer(self.text))

    @property
    def resumes(self) -> bool:
        return _RESUME in self.text

    def words(self, case: Case, folder: str, *, resumed: bool = False) -> list[str]:
        """The command for the layout of `case`, split into words."""
        values = dict(zip(_PLACES, (case.world, case.local_batch, case.accumulation, shlex.quote(folder)), strict=True))
        filled = ""
        for text, resuming in _parts(self.text):
            part = PLACE.sub(lambda match: str(values.get(match["name"], match["literal"] or match[0])), text)
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
                raise ValueError("a {resume: is not closed")
            depth += {"{": 1, "}": -1}.get(rest[end], 0)
            end += 1
        yield rest[: end - 1], True
        outside, found, rest = rest[end:].partition(_RESUME)
        yield outside, False


def _newest(word: str) -> str:
    return max(glob.glob(word), key=os.path.getmtime) if "*" in word and glob.glob(word) else word


@dataclass(frozen=True)
class Done:
    """A finished run. error: why its ledger cannot be judged, or "". stray: the processes that it left running.

    code: its exit code, None if it was killed.
    """

    history: History
    error: str = ""
    stray: tuple[str, ...] = ()
    code: int | None = None


def run(
    words: Sequence[str],
    folder: Path,
    deadline_s: float,
    stop: Callable[[Path], bool] | None = None,
    probe: str = UNPERTURBED,
) -> Done:
    """Run `words` with `ANDON_LEDGER` set to a new file in `folder`, and read that ledger.

    stop: called with the ledger's path while the run goes on; the run is killed (SIGKILL, all processes at once) when
    it returns True. On return, also after an exception, every process that descends from the run has ended, whatever
    session or environment it chose. Temporary files of the run are in `folder`. Of its output only the end is kept.
    """
    ledger, temporary = folder / f"ledger-{uuid.uuid4().hex[:8]}.jsonl", folder / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "ANDON_LEDGER": str(ledger), "ANDON_PROBE": probe, "TMPDIR": str(temporary)}
    environment["PYTHONWARNINGS"] = f"{NO_NUMPY},{os.environ.get('PYTHONWARNINGS', '')}".strip(",")
    output, process = bytearray(), None
    with _adopting_orphans() as running:
        try:  # a signal can end falsify as soon as the process exists
            process = subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return Done(History("no run", ()), f"the command cannot be started: {error}")
        else:
            reader = threading.Thread(target=_keep_end, args=(process.stdout, output), daemon=True)
            reader.start()
            stopped = _wait(process, deadline_s, ledger, stop)
            code = process.poll()
        finally:
            stray = _end_all(running, process)
        reader.join(_GRACE_S)
    history, why = read_history(ledger) if ledger.exists() else History(str(ledger), ()), ""
    if code is None and not stopped:
        why = f"the command did not end within {deadline_s:.0f} s"
    elif code and not stopped:
        why = f"the command ended with {code}: {_last_words(bytes(output))}"
    elif not ledger.exists() and not stopped:
        why = "it left no ledger: no watch was opened; call andon.watch in it, or put `-m andon watch` before it"
    return Done(_with_sketch(history, ledger), why, stray, None if stopped else code)


def _with_sketch(history: History, ledger: Path) -> History:
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(Path(f"{ledger}.sketch").read_bytes())
        return replace(history, sketch=tuple(map(float, found["sums"])), bits=int(found["bits"]))
    return history


@contextmanager
def _adopting_orphans() -> Iterator[Callable[[], list[Process]]]:
    """Context manager: a process that loses its parent becomes a child of this one instead of init's.

    Yields a function that lists the descendants of this process that began inside, and reaps the dead ones. Each of
    these is listed once: before it died it may have started one that is not listed yet.
    """
    libc, before, this = ctypes.CDLL(None), ctypes.c_int(), os.getpid()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    older = {(each.pid, each.started) for each in descendants(this)}

    def younger() -> list[Process]:
        found = [each for each in descendants(this) if (each.pid, each.started) not in older]
        for dead in (each for each in found if each.zombie):
            with suppress(ChildProcessError):  # its parent lives
                os.waitpid(dead.pid, os.WNOHANG)
        return found

    try:
        yield younger
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _keep_end(pipe: IO[bytes], output: bytearray) -> None:
    with pipe:
        while part := pipe.read1(_MOST_OUTPUT):  # type: ignore[attr-defined]
            output += part
            del output[:-_MOST_OUTPUT]


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


def _end_all(running: Callable[[], list[Process]], process: subprocess.Popen[bytes] | None) -> tuple[str, ...]:
    """Kill all processes of the run. Returns those that were still running after the command had ended by itself."""
    ended = process is not None and process.poll() is not None
    deadline = time.monotonic() + (_GRACE_S if ended else 0.0)
    while (found := running()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    living = [each for each in found if not each.zombie]
    names = tuple(f"{each.pid} ({each.command[:80] or 'ended'})" for each in living) if ended else ()
    deadline = time.monotonic() + _KILLING_S  # in the kernel, no signal reaches a process
    while (found := running()) and time.monotonic() < deadline:
        kill(found, _POLL_S)
    if process is not None:
        process.poll()
    return names


def _last_words(output: bytes) -> str:
    found = [line.strip() for line in output.decode("utf-8", "backslashreplace").splitlines()]
    lines = [line for line in found if not _NO_REASON.match(line)]
    for place, line in enumerate(lines):
        if match := _OF_THE_WATCH.search(line):
            told = [line[match.start() :], *(each for each in lines[place + 1 : place + 9] if each[:6] == "state ")][:2]
            return "; ".join(each.removeprefix("state ").strip(" .") for each in told)[:_SHOWN]
    lines = _without_launcher(lines) or lines or ["it printed nothing"]
    raised = lines[lines.index(_TRACEBACK) :] if _TRACEBACK in lines else lines
    return next(filter(_is_error, raised), lines[-1]).removeprefix("traceback : ")[:_SHOWN]


def _without_launcher(lines: list[str]) -> list[str]:
    end = next((index for index, line in enumerate(lines) if line.endswith(_LAUNCHERS_END)), None)
    if end is None:
        return lines
    return lines[: max((index for index, line in enumerate(lines[:end]) if line == _TRACEBACK), default=end)]


def _is_error(line: str) -> bool:
    name, colon, _ = line.rpartition("]: ")[2].partition(":")
    ends = ("Error", "Exception", "Violation", "Interrupt")
    return bool(colon) and name.replace(".", "").isidentifier() and name.endswith(ends)
