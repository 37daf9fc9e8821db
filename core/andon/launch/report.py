"""The end report of each rank, and which rank failed first. Imports no torch, because the launcher reads it."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from andon.console.messages import Exit, InputError
from andon.run.folder import REPORTS
from andon_contracts.legible import write_error_file
from andon_contracts.liveness.diagnosis import NOTICED
from andon_contracts.liveness.process import exit_text
from andon_contracts.untrusted import read_json
from andon_contracts.violation import Violation, consequence, named_ranks

UNSEEN = 255  # multiprocessing's exit code if the fork server, which reports exit codes, died too


@dataclass(frozen=True)
class Report:
    """One rank's end. exit: its code. cause: one line. message: the details (a traceback, or all input errors). time:
    seconds since the epoch at which it failed or finished. launch: the id of its launch (`TORCHELASTIC_RUN_ID`). left:
    the process exited with 0 in the middle of its work, which would otherwise look like success."""

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
        """The report of a rank; None if it left no readable one.

        launch: only of this launch; empty: of any. Raises `ValueError` if the file is not a report.
        """
        path = path_of(run_folder, rank)
        try:
            report = cls(**read_json(path))
        except OSError:
            return None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a report of a rank: {error}") from error
        return report if launch in ("", report.launch) else None


@dataclass(frozen=True)
class FirstCause:
    """The rank that failed first, its exit code, and one line that describes its end."""

    rank: int
    exit: Exit
    text: str
    report: Report | None = field(default=None, repr=False)


def path_of(run_folder: Path, rank: int) -> Path:
    return run_folder / REPORTS / f"rank-{rank}.json"


def clear(run_folder: Path) -> None:
    """Remove the reports of an earlier launch. Only for the launcher that claimed the folder (`RunFolder.claimed`)."""
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

    exits: each rank's exit code as multiprocessing reports it (minus the signal number for a signal). died: when a rank
    was seen dead (seconds since the epoch). ended: the ranks that the launcher killed. launch: whose reports count
    (empty: all). A rank that only noticed the loss of another never precedes it, whatever the clocks say.
    """
    reports = {rank: Report.read(run_folder, rank, launch) for rank in exits}
    chosen = {rank: 0 if report is None else report.exit for rank, report in reports.items()}
    # A finished rank leaves a report. Exit code 0 without one is an end that bypassed Python.
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
    same_end = [rank for rank in failed if sentences[rank] == sentences[first]]
    text = f"{named_ranks(same_end if left else [first])} {sentences[first]}"
    silent = sorted(rank for rank in failed if rank in ended and reports[rank] is None)
    if chosen[first] in NOTICED.values() and silent:
        # Others timed out on this rank, and it had to be killed: it is the cause, but could not report it.
        text = f"rank {silent[0]} of {len(exits)} gave no answer; {text}"
        return FirstCause(silent[0], Exit.RANK_SILENT, text, report)
    return FirstCause(first, Exit.RANK_LOST if left else exit_of(exits[first], report), text, report)


def describe(error: BaseException, rank: int) -> Report:
    """The report of a rank that ended with this error."""
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # torch's compiler puts the error on the second line, after an announcement.
    head = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    report = Report(rank, Exit.CRASHED, head, time.time(), message="".join(traceback.format_exception(error)))
    if isinstance(error, InputError):
        return replace(report, exit=Exit.USAGE, message=text)
    if isinstance(error, Violation):
        return replace(report, exit=Exit.VIOLATION, clause=error.clause, step=error.step)
    if isinstance(error, SystemExit) and error.code in (None, 0):
        # Finished work returns. A library or a callback exited before it was done.
        return replace(report, exit=Exit.RANK_LOST, cause="left by sys.exit(0)", left=True)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        code = code if 0 <= code <= 255 else Exit.CRASHED  # the system would turn 256 into 0
        return replace(report, exit=code, cause=head or f"ended with exit code {code}")
    peer, of_another = getattr(error, "ends_with", None), consequence(error)
    if not isinstance(peer, Exit):
        peer = Exit.CRASHED if of_another is None else Exit(NOTICED[of_another])
    return replace(report, exit=peer, cause=f"{type(error).__name__}: {head}" if head else type(error).__name__)


def watchdog_failed(error: Exception, rank: int) -> Report:
    """The report of a rank whose watchdog failed: it can no longer notice deadlines or other ranks' ends."""
    report = describe(error, rank)
    return replace(report, exit=Exit.CRASHED, cause=f"the watch over this rank failed: {report.cause}")


def exit_of(code: int, report: Report | None = None) -> Exit:
    """The meaning of a rank's end, from a failure's report or else from its exit code (negative: a signal)."""
    if report is not None and report.exit != 0:
        code = report.exit
    if code < 0 or code == UNSEEN:
        return Exit.RANK_LOST
    return Exit(code) if code in set(Exit) else Exit.CRASHED


def write_for_torch(report: Report, path: Path) -> None:
    """Write the cause for torchrun, in the format of its error handler (`TORCHELASTIC_ERROR_FILE`).

    Torch considers the earliest failure in whole seconds the root cause, and the lowest rank in a tie. So a rank that
    only noticed the loss of another is dated one second later.
    """
    when = int(report.time) + (report.exit in NOTICED.values())
    write_error_file(path, report.cause, report.message, when, errorCode=report.exit)


def _blame_order(code: int, report: Report | None, ended: bool) -> int:
    if report is not None and report.exit != 0:
        # After a failure the launcher asks the others to end, so being preempted may be a consequence too.
        return 2 if (report.exit in NOTICED.values() and not report.left) or report.exit == Exit.PREEMPTED else 0
    if ended:
        return 3
    # Gloo aborts a process because of its peer (a size mismatch, an exit in the middle of an error).
    return {-signal.SIGTERM: 2, -signal.SIGABRT: 1}.get(code, 0)


def _sentence(code: int, report: Report | None, world: int, run_folder: Path) -> str:
    if report is not None and report.exit != 0:
        return f"of {world}: {report.cause}"
    if code == UNSEEN:
        return f"of {world} was lost together with the process that started it"
    if code == 0:
        return f"of {world} ended with exit code 0 before the end of the run, and left no report"
    if code == Exit.USAGE:  # our ranks exit with it only after a report, if the disk works
        where = f"it could not write why to {run_folder / REPORTS}, and says it above"
        return f"of {world} ended with exit code {code}; {where}: make that folder writable, then resume"
    if code > 0:
        return f"of {world} ended with exit code {code} and left no report"
    return f"of {world} {exit_text(code)}"
