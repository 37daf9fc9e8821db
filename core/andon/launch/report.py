"""The report that each rank leaves of its end, and which rank failed first. Read without torch, by the launcher too."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from andon.console.exits import Exit
from andon.console.problems import InputError
from andon.run.folder import REPORTS
from andon_contracts.legible import write_error_file
from andon_contracts.liveness.diagnosis import NOTICED
from andon_contracts.liveness.process import exit_text
from andon_contracts.untrusted import read_json
from andon_contracts.violation import Violation, consequence, named_ranks

UNSEEN = 255  # the exit code that multiprocessing gives if the process that would have reported it died too


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
