"""The life of one rank process: guards, work, report and exit.

A rank ends by `os._exit`: after a gloo error a normal interpreter exit mostly ends in SIGABRT and loses the chosen exit
code. Its report and its output are written and flushed before.

Each rank atomically writes one small JSON file: `RUN/reports/rank-0.json`. A launcher combines these with the exit
codes that it saw and names the first cause instead of its consequences.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from andon.console.messages import Exit, silence_bitsandbytes, write
from andon.launch.context import PREEMPTION_SIGNALS, RUN_ID, RankContext, die_with_parent
from andon.launch.report import Report, describe, path_of, watchdog_failed, write_for_torch
from andon_contracts.legible import ERROR_FILE_VARIABLE, legible_line
from andon_contracts.liveness.process import run_within

if TYPE_CHECKING:
    from andon.launch.heartbeat import Heartbeat

silence_bitsandbytes()  # the fork server imports this module before peft
TRACEBACK = "ANDON_TRACEBACK"  # set to 1 to see a traceback on stderr; the report holds it in any case
_LAST_WORDS_S = 0.7  # time limit for the report after an error: other ranks wait for this rank's end
_RECORD_S = 10.0
"""Time limit for the report of an orderly end: the launcher considers a rank without a report dead."""
_DESTROY_S = 0.5  # time limit for destroying the process group


@dataclass
class _State:
    """asked_by: the signal that asked this process to end. folder: for its report. says: whether it, not its launcher,
    prints why it ended. ending: held by the thread that ends it."""

    asked_by: int = 0
    folder: Path | None = None
    says: bool = False
    heartbeat: Heartbeat | None = None
    ending: threading.Lock = field(default_factory=threading.Lock)


_state = _State()


def preempted() -> signal.Signals | None:
    """The signal that asked this rank to end, if any. Check it at every step boundary.

    Signals reach ranks at different times: ranks must agree on the answer before they act on it.
    """
    return signal.Signals(_state.asked_by) if _state.asked_by else None


def report_to(run_folder: Path) -> None:
    """Set the folder of this rank's end report; under torchrun it is known only after the configuration is read."""
    _state.folder = run_folder
    with contextlib.suppress(OSError):
        path_of(run_folder, RankContext.from_environment().rank).unlink(missing_ok=True)


def run_rank(work: Callable[[RankContext], int], *, run_folder: Path | None = None) -> NoReturn:
    """Run `work` as one rank of torchrun, write a report, and exit with the code of `work` or of its error.

    `InputError` ends with `Exit.USAGE`, `Violation` with `Exit.VIOLATION`, a lost or silent peer with `Exit.RANK_LOST`
    or `Exit.RANK_SILENT`, any other error with `Exit.CRASHED`; one line on stderr says why.
    """
    _state.says = True
    _live(work, run_folder)


def watched_by(heartbeat: Heartbeat) -> None:
    """Use `heartbeat` to publish this rank's end and to explain it by the state of the other ranks."""
    _state.heartbeat = heartbeat


def dropped_values() -> int:
    """How many values of the ranks' store this rank has ignored so far because no rank wrote them."""
    return 0 if _state.heartbeat is None else _state.heartbeat.dropped


def end_now(report: Report) -> None:
    """End this process from another thread, while its main thread hangs. Does nothing if it is already ending."""

    def last_words() -> None:
        _record(report)
        _say_end(report)

    if _state.ending.acquire(blocking=False):
        run_within(_LAST_WORDS_S, last_words)
        os._exit(report.exit)


def serve(entry: str, payload: str, run_folder: str, environment: Mapping[str, str], rank: int) -> NoReturn:
    """Run one rank of `andon.launch.launcher`. payload: JSON. environment: the variables shared by all ranks."""
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))

    def work(context: RankContext) -> int:
        module, _, name = entry.partition(":")
        code: int = getattr(importlib.import_module(module), name)(json.loads(payload))
        return code

    _live(work, Path(run_folder))


def _live(work: Callable[[RankContext], int], run_folder: Path | None) -> NoReturn:
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
        # CPU kernels split a sum among threads, so the order of additions depends on their number.
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        for signum in PREEMPTION_SIGNALS:
            signal.signal(signum, note_signal)
        # Blocked by the launcher until now, so that no signal is lost, or kills a rank without handlers.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PREEMPTION_SIGNALS)
        code = Exit(work(context))
        _take_the_end()
        signal_received = preempted()
        cause = "finished" if code == Exit.OK else f"ended with {code.name} ({int(code)})"
        if code == Exit.PREEMPTED and signal_received is not None:
            cause = f"ended at a step boundary on {signal_received.name}"
        report = Report(rank=rank, exit=code, cause=cause, time=time.time())
    except BaseException as error:  # noqa: BLE001 - any error: this rank must leave a report and end
        _take_the_end()
        report = describe(error, rank)
        if _state.heartbeat is not None and report.left:
            now = _state.heartbeat.clock.read()
            report = replace(report, step=now.step, cause=f"{report.cause} in {now.where}, before the end of the run")
        elif _state.heartbeat is not None and report.exit in (Exit.RANK_LOST, Exit.RANK_SILENT):
            who = _state.heartbeat.explain(Exit(report.exit))  # the error only says that another rank is lost or silent
            report = replace(report, cause=f"{who} ({report.cause})") if who else report
        if os.environ.get(TRACEBACK) == "1":
            traceback.print_exc()
    # No other thread can end this process any more, so every wait below needs a timeout.
    seconds = _RECORD_S if report.exit in (Exit.OK, Exit.PREEMPTED) else _LAST_WORDS_S
    if not run_within(seconds, lambda: _record(report)):
        late = f"its report could not be written: the disk took nothing for {seconds:g} s"
        run_within(_LAST_WORDS_S, lambda: write(f"rank {rank}: {report.cause} ({late})\n"))
    if _state.heartbeat is not None:
        _state.heartbeat.leave(report.exit, report.cause if report.exit != Exit.OK else "")
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():

        def destroy() -> None:
            # The group may be broken already. The report is written, so the error is ignored.
            with contextlib.suppress(RuntimeError):
                distributed.destroy_process_group()

        run_within(_DESTROY_S, destroy)
    _say_end(report)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(report.exit)


def _take_the_end() -> None:
    """Make this thread the one that ends the process. Any later caller blocks for ever."""
    if not _state.ending.acquire(blocking=False):
        threading.Event().wait()


def _say_end(report: Report) -> None:
    if _state.says and report.exit != Exit.OK:
        # The message of an `InputError` has a line for each problem, and no other line break.
        line = report.message if report.exit == Exit.USAGE else legible_line(report.cause)
        write(f"rank {report.rank}: {line}\n")


def _record(report: Report) -> None:
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
