"""The life of one rank process, how it ends, and which rank failed first.

A rank ends by `os._exit`: after a gloo error an ordinary interpreter exit is turned into SIGABRT more often than not,
and the exit code that was chosen is lost. Its report and its output are written and flushed before.

Each rank leaves one small JSON file, written whole: `RUN/reports/rank-0.json`. A launcher reads these together with the
exit codes that it saw and names the first cause, not the ranks that fell after it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from andon.console.exits import Exit
from andon.console.messages import write
from andon.console.problems import InputError
from andon.launch.context import RUN_ID, RankContext
from andon.launch.orphan import die_with_parent
from andon.launch.preemption import PREEMPTION_SIGNALS
from andon.run.folder import REPORTS
from andon_contracts.legible import ERROR_FILE_VARIABLE, legible_line, write_error_file
from andon_contracts.liveness.diagnosis import NOTICED
from andon_contracts.liveness.process import exit_text, run_within
from andon_contracts.untrusted import read_json
from andon_contracts.violation import Violation, consequence, named_ranks

if TYPE_CHECKING:
    from andon.launch.heartbeat import Heartbeat

TRACEBACK = "ANDON_TRACEBACK"  # set to 1 to see a traceback on stderr; the report holds it in any case
_LAST_WORDS_S = 0.7  # how long the report of a rank that ends by an error may take: others wait for it to be gone
_RECORD_S = 10.0
"""How long the report of a rank that ends in order may take: its launcher takes a rank without a report for dead."""
_DESTROY_S = 0.5  # how long leaving may wait for the process group to be taken down
UNSEEN = 255  # the exit code that multiprocessing gives if the process that would have reported it died too


@dataclass
class _State:
    """What signals and `report_to` told this process, and its heartbeat. The thread that holds `ending` ends it.

    says: whether the line of its end is this process's to write, and not its launcher's.
    """

    asked_by: int = 0
    folder: Path | None = None
    says: bool = False
    heartbeat: Heartbeat | None = None
    ending: threading.Lock = field(default_factory=threading.Lock)


_state = _State()


def preempted() -> signal.Signals | None:
    """The signal that asked this rank to end, if any. Look at it at every step boundary.

    Signals reach ranks at different times: agree on the answer before acting on it.
    """
    return signal.Signals(_state.asked_by) if _state.asked_by else None


def report_to(run_folder: Path) -> None:
    """Where this rank's end report belongs (under torchrun it is known only once the configuration was read)."""
    _state.folder = run_folder
    with contextlib.suppress(OSError):
        path_of(run_folder, RankContext.from_environment().rank).unlink(missing_ok=True)


def run_rank(work: Callable[[RankContext], int], *, run_folder: Path | None = None) -> NoReturn:
    """Be one rank of torchrun: guard, work, report, end with the code that `work` returns or its error means.

    `InputError` ends with `Exit.USAGE`, `Violation` with `Exit.VIOLATION`, a lost or silent peer with
    `Exit.RANK_LOST` or `Exit.RANK_SILENT`, any other error with `Exit.CRASHED`; one line on stderr says why.
    """
    _state.says = True
    _live(work, run_folder)


def watched_by(heartbeat: Heartbeat) -> None:
    """Have `heartbeat` tell the others of this rank's end, and explain that end by what it knows of them."""
    _state.heartbeat = heartbeat


def dropped_values() -> int:
    """How many values of the ranks' store this rank has dropped so far because no rank wrote them."""
    return 0 if _state.heartbeat is None else _state.heartbeat.dropped


def end_now(report: Report) -> None:
    """End this process, whose main thread hangs, from another thread; do nothing if it is ending already."""

    def last_words() -> None:
        _record(report)
        _say_end(report)

    if _state.ending.acquire(blocking=False):
        run_within(_LAST_WORDS_S, last_words)
        os._exit(report.exit)


def serve(entry: str, payload: str, run_folder: str, environment: Mapping[str, str], rank: int) -> NoReturn:
    """Be this rank of `andon.launch.launcher`. payload: JSON. environment: all that ranks have in common."""
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))

    def work(context: RankContext) -> int:
        module, _, name = entry.partition(":")
        code: int = getattr(importlib.import_module(module), name)(json.loads(payload))
        return code

    _live(work, Path(run_folder))


def _live(work: Callable[[RankContext], int], run_folder: Path | None) -> NoReturn:
    """A rank from its first line to its last: guards, signals, work, report, farewell, exit code."""
    rank, _state.folder = 0, run_folder

    def end_unguarded(error: Exception) -> None:
        report = watchdog_failed(error, rank)
        if _state.heartbeat is not None:
            _state.heartbeat.leave(report.exit, report.cause)
        end_now(report)

    def note_signal(signum: int, frame: FrameType | None) -> None:
        _state.asked_by = _state.asked_by or signum

    try:
        context = RankContext.from_environment()
        rank = context.rank
        die_with_parent(context.launcher_pid, end_unguarded)
        with contextlib.suppress(ValueError, OSError):  # stderr may have been closed
            faulthandler.enable(all_threads=False)
        # Kernels of a CPU share a sum among their threads, so that its order depends on how many there are.
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        for signum in PREEMPTION_SIGNALS:
            signal.signal(signum, note_signal)
        # The launcher has blocked these until now, so that no signal is lost, or kills a rank without handlers.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PREEMPTION_SIGNALS)
        code = Exit(work(context))
        _take_the_end()
        asked = preempted()
        cause = "finished" if code == Exit.OK else f"ended with {code.name} ({int(code)})"
        if code == Exit.PREEMPTED and asked is not None:
            cause = f"ended at a step boundary on {asked.name}"
        report = Report(rank=rank, exit=code, cause=cause, time=time.time())
    except BaseException as error:  # noqa: BLE001 - whatever it is, this rank must leave a report and end
        _take_the_end()
        report = describe(error, rank)
        if _state.heartbeat is not None and report.left:
            told = _state.heartbeat.clock.read()
            report = replace(report, step=told.step, cause=f"{report.cause} in {told.where}, before the end of the run")
        elif _state.heartbeat is not None and report.exit in (Exit.RANK_LOST, Exit.RANK_SILENT):
            who = _state.heartbeat.explain(Exit(report.exit))  # the error only says that another rank is lost or silent
            report = replace(report, cause=f"{who} ({report.cause})") if who else report
        if os.environ.get(TRACEBACK) == "1":
            traceback.print_exc()
    # The main thread has the end, and no other thread could end it any more: nothing here may wait without a bound.
    seconds = _RECORD_S if report.exit in (Exit.OK, Exit.PREEMPTED) else _LAST_WORDS_S
    if not run_within(seconds, lambda: _record(report)):
        late = f"its report could not be written: the disk took nothing for {seconds:g} s"
        run_within(_LAST_WORDS_S, lambda: write(f"rank {rank}: {report.cause} ({late})\n"))
    if _state.heartbeat is not None:
        _state.heartbeat.leave(report.exit, report.cause if report.exit != Exit.OK else "")
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():

        def destroy() -> None:
            # The group may be broken already; the report has been written, and nothing can be done about it here.
            with contextlib.suppress(RuntimeError):
                distributed.destroy_process_group()

        run_within(_DESTROY_S, destroy)
    _say_end(report)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(report.exit)


def _take_the_end() -> None:
    """The main thread ends this process, unless another thread has begun to: that one ends it now."""
    if not _state.ending.acquire(blocking=False):
        threading.Event().wait()


def _say_end(report: Report) -> None:
    if _state.says and report.exit != Exit.OK:
        # The message of an `InputError` has a line for each problem, and no other line break.
        line = report.message if report.exit == Exit.USAGE else legible_line(report.cause)
        write(f"rank {report.rank}: {line}\n")


def _record(report: Report) -> None:
    """Write the report, and torch's own form of it; a disk that takes neither must not hide the exit code."""
    report = replace(report, launch=os.environ.get(RUN_ID, ""))
    torch_file = os.environ.get(ERROR_FILE_VARIABLE)
    writes = [] if _state.folder is None else [partial(report.write, _state.folder)]
    if torch_file and report.exit != Exit.OK:
        writes.append(partial(write_for_torch, report, Path(torch_file)))
    for writing in writes:
        try:
            writing()
        except OSError as error:
            write(f"rank {report.rank}: {report.cause} (its report could not be written: {error})\n")


@dataclass(frozen=True)
class Report:
    """One rank's end: `exit` is the code it chose, `cause` one line, `message` all that is known (a traceback, all
    of a user's mistakes), `time` seconds since the epoch at which it failed or finished, `launch` the id of the launch
    that it was a rank of (`TORCHELASTIC_RUN_ID`), `left` that the process asked for its end in the middle of its work,
    with 0, which would otherwise look like success."""

    rank: int
    exit: int
    cause: str
    time: float
    clause: str = ""
    step: int = 0
    message: str = ""
    launch: str = ""
    left: bool = False

    def write(self, run_folder: Path) -> None:
        """Write it whole: a reader sees the file complete or not at all."""
        target = path_of(run_folder, self.rank)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}")
        text = json.dumps(asdict(self), ensure_ascii=False) + "\n"
        try:
            part.write_text(text, encoding="utf-8", errors="backslashreplace")
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def read(cls, run_folder: Path, rank: int, launch: str = "") -> Report | None:
        """The report of a rank; None if it left none that can be read.

        launch: of this launch alone; empty: of any. Raises ValueError if the file is none of ours.
        """
        path = path_of(run_folder, rank)
        try:
            found = cls(**read_json(path))
        except OSError:
            return None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a report of a rank: {error}") from error
        return found if launch in ("", found.launch) else None


@dataclass(frozen=True)
class FirstCause:
    """The rank that failed first, what became of it, and the line that says so."""

    rank: int
    exit: Exit
    text: str
    report: Report | None = field(default=None, repr=False)


def path_of(run_folder: Path, rank: int) -> Path:
    return run_folder / REPORTS / f"rank-{rank}.json"


def clear(run_folder: Path) -> None:
    """Remove what ranks of an earlier launch have left. For the one launcher of the folder (`RunFolder.claimed`)."""
    for old in sorted((run_folder / REPORTS).glob("*rank-*.json*")):
        old.unlink(missing_ok=True)


def first_cause(
    run_folder: Path,
    exits: Mapping[int, int],
    *,
    died: Mapping[int, float] | None = None,
    ended: Collection[int] = (),
    launch: str = "",
) -> FirstCause | None:
    """Which rank failed first, and why; None if no rank failed.

    `exits` gives each rank's exit code as multiprocessing does (minus the signal number for a signal), `died` when a
    rank was seen dead (seconds since the epoch), `ended` the ranks that the launcher itself killed, `launch` whose
    reports count (empty: all). A rank that only noticed the loss of another never wins over that other, whatever the
    clocks say.
    """
    reports = {rank: Report.read(run_folder, rank, launch) for rank in exits}
    chosen = {rank: 0 if report is None else report.exit for rank, report in reports.items()}
    # A rank that finished leaves a report: without one, exit code 0 is an end in a way that Python does not see.
    failed = [rank for rank, code in exits.items() if code != 0 or reports[rank] is None or chosen[rank] != 0]
    if not failed:
        return None

    def order(rank: int) -> tuple[int, float, int]:
        report = reports[rank]
        seen = report.time if report is not None else (died or {}).get(rank, float("inf"))
        return _blame_order(exits[rank], report, rank in ended), seen, rank

    first = min(failed, key=order)
    sentences = {rank: _sentence(exits[rank], reports[rank], len(exits), run_folder) for rank in failed}
    report = reports[first]
    left = report.left if report is not None else exits[first] == 0
    alike = [rank for rank in failed if sentences[rank] == sentences[first]]
    text = f"{named_ranks(alike if left else [first])} {sentences[first]}"
    silent = sorted(rank for rank in failed if rank in ended and reports[rank] is None)
    if chosen[first] in NOTICED.values() and silent:
        # Others timed out on it or lost those who did, and it had to be killed: it is the cause, and could not say so.
        text = f"rank {silent[0]} of {len(exits)} gave no answer; {text}"
        return FirstCause(silent[0], Exit.RANK_SILENT, text, report)
    return FirstCause(first, Exit.RANK_LOST if left else exit_of(exits[first], report), text, report)


def describe(error: BaseException, rank: int) -> Report:
    """The report of a rank that ended with this error."""
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # torch's compiler announces in the first line which error follows in the second.
    head = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    report = Report(rank, Exit.CRASHED, head, time.time(), message="".join(traceback.format_exception(error)))
    if isinstance(error, InputError):
        return replace(report, exit=Exit.USAGE, message=text)
    if isinstance(error, Violation):
        return replace(report, exit=Exit.VIOLATION, clause=error.clause, step=error.step)
    if isinstance(error, SystemExit) and error.code in (None, 0):
        # Work that is done returns: a library or a callback that called this left it undone.
        return replace(report, exit=Exit.RANK_LOST, cause="left by sys.exit(0)", left=True)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        code = code if 0 <= code <= 255 else Exit.CRASHED  # of 256 the system would make 0
        return replace(report, exit=code, cause=head or f"ended with exit code {code}")
    peer, of_another = getattr(error, "ends_with", None), consequence(error)
    if not isinstance(peer, Exit):
        peer = Exit.CRASHED if of_another is None else Exit(NOTICED[of_another])
    return replace(report, exit=peer, cause=f"{type(error).__name__}: {head}" if head else type(error).__name__)


def watchdog_failed(error: Exception, rank: int) -> Report:
    """The end of a rank whose guard failed with this error: it would not see a deadline pass, or others end."""
    found = describe(error, rank)
    return replace(found, exit=Exit.CRASHED, cause=f"the watch over this rank failed: {found.cause}")


def exit_of(code: int, report: Report | None = None) -> Exit:
    """What a rank's end means: its report's word first, then the exit code that was seen (negative: a signal)."""
    if report is not None and report.exit != 0:
        code = report.exit
    if code < 0 or code == UNSEEN:
        return Exit.RANK_LOST
    return Exit(code) if code in set(Exit) else Exit.CRASHED


def write_for_torch(report: Report, path: Path) -> None:
    """Tell torchrun the cause in the form of its own error handler (`TORCHELASTIC_ERROR_FILE`).

    Torch takes the earliest failure in whole seconds for the root cause, and the lowest rank among equals; so a rank
    that only noticed the loss of another is dated one second later.
    """
    when = int(report.time) + (report.exit in NOTICED.values())
    write_error_file(path, report.cause, report.message, when, errorCode=report.exit)


def _blame_order(code: int, report: Report | None, ended: bool) -> int:
    """How far a rank's end is from the first cause: 0 for a failure of its own."""
    if report is not None and report.exit != 0:
        # A launcher asks the others to end once one has failed, so being preempted may be a consequence too.
        noticed = report.exit in NOTICED.values() and not report.left
        return 2 if noticed or report.exit == Exit.PREEMPTED else 0
    if ended:
        return 3
    # Gloo aborts a process on its peer's account (a size mismatch, an exit in the middle of an error).
    return {-signal.SIGTERM: 2, -signal.SIGABRT: 1}.get(code, 0)


def _sentence(code: int, report: Report | None, world: int, run_folder: Path) -> str:
    if report is not None and report.exit != 0:
        return f"of {world}: {report.cause}"
    if code == UNSEEN:
        return f"of {world} was lost together with the process that started it"
    if code == 0:
        return f"of {world} ended with exit code 0 before the end of the run, and left no report"
    if code == Exit.USAGE:  # which a rank of ours gives with a report, if the disk takes one
        where = f"it could not write why to {run_folder / REPORTS}, and says it above"
        return f"of {world} ended with exit code {code}; {where}: make that folder writable, then resume"
    if code > 0:
        return f"of {world} ended with exit code {code} and left no report"
    return f"of {world} {exit_text(code)}"
