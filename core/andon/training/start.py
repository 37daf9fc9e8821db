"""From a checked configuration to a run that has ended: whose folder, which processes, and how it ended.

What `andon train` and `andon.train` have in common; how a user is told of the end is theirs.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from andon.config.schema import SFT, Config
from andon.console.exits import Exit
from andon.console.messages import command_line, say
from andon.console.problems import InputError, Problem
from andon.integrations.trackers import require
from andon.launch import preemption
from andon.launch.launcher import PRELOAD, LaunchResult, launch, warm_up
from andon.launch.rank import Report
from andon.run.folder import RUNS, RunFolder, State, new_folder
from andon.run.ledger import LedgerError, read_ledger
from andon.run.summary import quoted, read_summary
from andon.training.choices import placed
from andon.training.entry import ENTRY, payload_of
from andon.training.existing import (
    as_begun,
    go_on_with,
    how_far,
    newest_unfinished,
    require_same_as_finished,
    same_data,
)
from andon.training.given import kept
from andon.training.rows import Rows, cache_of, is_tokenised_as_read, notes, read_rows, told_of_task, with_task
from andon_contracts.record import Resume, Step

_PRELOAD = (
    "andon.launch.server_first",
    *PRELOAD,
    "torch._dynamo",
    "andon.training.run",
    "transformers.models.qwen3.modeling_qwen3",
    "peft.utils.transformers_weight_conversion",
    "andon.launch.server_last",
)
"""What ranks would otherwise each import for themselves: an optimizer needs `torch._dynamo`, as slow as torch."""


@dataclass(frozen=True)
class Ended:
    """How a run ended, and the folder that it left.

    why: for a reader, all of a user's mistakes where it were those; empty after `Exit.OK`. report: of the rank that
    failed first, where ranks are processes. asked_by: the signal to this process that asked for the end, or 0.
    """

    folder: RunFolder
    exit: Exit
    why: str = ""
    report: Report | None = None
    asked_by: int = 0


def start(
    config: Config,
    started: float,
    *,
    entry: str = ENTRY,
    given: Mapping[str, Path] | None = None,
) -> Ended:
    """Train as configured, or go on, and say how it ended; of a run that is finished the last lines tell what came out.

    started: when the command began, by `time.monotonic`. entry: what rank processes are started with, as
    "module:function". given: by key (`train`, `eval`), the files of `config.data` that are there for the time of this
    call alone; the run folder keeps them.

    Raises `InputError` before anything is started or written. Without rank processes also the run's own `InputError`
    and `Violation`, and whatever else it raised.
    """
    task = told_of_task(config)
    require(config.run.report_to)
    config = with_task(config)
    folder = _folder_of(config)
    config, chosen = placed(config if folder is None else as_begun(config, folder))
    if folder is not None and _nothing_to_do(config, folder):
        return Ended(folder, Exit.OK)
    if task:
        say(task)
    # All mistakes in the data at once, before ranks are started that would each find them.
    rows = None if is_tokenised_as_read(config) else read_rows(config)
    for note in filter(None, (*(() if rows is None else notes(rows)), chosen)):
        say(note)
    made = folder is None
    folder = _new_folder(config) if folder is None else folder
    try:
        ended = _train(config, folder, started, entry, rows, given or {}, made=made)
        if ended.exit is Exit.OK and folder.state() is not State.FINISHED:
            ended = _left(folder, "every rank ended with exit code 0")
    finally:
        if made:
            with suppress(OSError):  # it stays where anything is in it
                folder.path.rmdir()
    if ended.exit is Exit.OK:
        _report(folder, config)
    return ended


def _left(folder: RunFolder, how: str) -> Ended:
    """What a run is that nobody ended: whoever called `sys.exit(0)` in it must not have it look like success."""
    why = f"the run is not finished: {how} {how_far(folder)}; go on with: {go_on_with(folder)}"
    return Ended(folder, Exit.RANK_LOST, why)


def _train(
    config: Config,
    folder: RunFolder,
    started: float,
    entry: str,
    rows: Rows | None,
    given: Mapping[str, Path],
    *,
    made: bool,
) -> Ended:
    """Train as the one command of the folder, and leave nothing of a run that ended before it began."""
    before = folder.names() if not made and folder.path.exists() else None
    with folder.claimed():
        try:
            if given and same_data(folder, config):  # others are refused, and nothing of them stays
                config, rows = kept(config, folder, given), None
            if config.run.backend == "inline":
                return _train_here(config, folder, rows, started)
            return _train_in_ranks(config, folder, rows, started, entry)
        finally:
            folder.discard_unbegun(before=before)


def _folder_of(config: Config) -> RunFolder | None:
    """The folder that is named; else the run that there is to resume, where that was asked for; None: a new one."""
    if config.run.dir is not None:
        return RunFolder(Path(config.run.dir))
    if config.run.resume != "auto":
        return None
    found = newest_unfinished(config, RUNS)
    if found is not None:
        say(f"resume: {found.path} is the newest unfinished run of this configuration (another one: --run-dir)")
    return found


def _new_folder(config: Config) -> RunFolder:
    folder = RunFolder(new_folder())
    if config.run.resume == "auto":
        say(f"resume: no unfinished run of this configuration under {RUNS}/, starting anew in {folder.path}")
    return folder


def foreign(path: Path) -> Problem:
    """What is wrong with a folder that holds something else than a run."""
    return Problem(str(path), "holds something that is no run; name a new or an empty folder")


def _nothing_to_do(config: Config, folder: RunFolder) -> bool:
    """Whether the folder holds a finished run that was asked to be resumed. Refuses a folder that may not be used."""
    state = folder.state()
    if state is State.FOREIGN:
        raise InputError([foreign(folder.path)])
    if config.run.resume != "auto":
        if folder.begun():
            what = "a run" if state is State.FINISHED else f"a run that is not finished ({how_far(folder)})"
            raise InputError([Problem(str(folder.path), f"holds {what}; add --resume auto, or name another folder")])
        return False
    if state is State.FINISHED:
        require_same_as_finished(config, folder)
        say(f"resume: the run in {folder.path} is finished, nothing to do")
        return True
    return False


def _keep_rows(config: Config, folder: RunFolder, rows: Rows | None) -> None:
    """Keep what was read, so that ranks open no data file. Refuses a folder that cannot be or is being written."""
    with folder.open_for_writing():
        place = cache_of(config, folder.tokens)
        if rows is not None and place is not None:
            read_rows(config, folder=place, known=rows)


def _train_here(config: Config, folder: RunFolder, rows: Rows | None, started: float) -> Ended:
    """All ranks in this process; a signal ends the run at its next step boundary, a second SIGINT at once."""
    from andon.training.run import train

    preemption.begin()
    _keep_rows(config, folder, rows)
    asked: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if signal.SIGINT in asked and signum == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(signum)

    try:
        with ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():  # no other one may say what signals do
                for signum in preemption.PREEMPTION_SIGNALS:
                    stack.callback(signal.signal, signum, signal.signal(signum, note))
            asked.extend(preemption.taken())
            return Ended(folder, train(config, folder, lambda: bool(asked), started), asked_by=next(iter(asked), 0))
    except SystemExit as ended:
        code = "" if ended.code is None else repr(ended.code)
        return _left(folder, f"something in it called sys.exit({code})")
    except KeyboardInterrupt:
        saved = any(folder.checkpoints.glob("step-*"))
        left = "the last checkpoint stands" if saved else "no checkpoint had been written yet"
        why = f"ended at once: a second SIGINT asked for it; {left}"
        return Ended(folder, Exit.RANK_LOST, why, asked_by=signal.SIGINT)


def _train_in_ranks(config: Config, folder: RunFolder, rows: Rows | None, started: float, entry: str) -> Ended:
    """Launch ranks, and after a failure launch them again, as often as `run.max_restarts` allows.

    A restart resumes from the last checkpoint, so it repeats the same computation to the bit. If it fails by the same
    error at the same step, the error is deterministic and would only come again: the run ends.
    """
    # From here on no signal raises: where one did as the folder's lock is let go, this process would keep that, and
    # could not remove what it leaves.
    preemption.begin()
    _keep_rows(config, folder, rows)
    warm_up(_PRELOAD)
    most, failures = config.run.max_restarts, list[tuple[object, int]]()
    while True:
        result = launch(
            entry,
            payload_of(config, folder.path, started),
            workers=config.run.workers,
            run_folder=folder.path,
            timeout_s=config.run.grace_s,
            silence_s=config.run.timeout_s,
        )
        why = _why(result)
        if result.asked_by or result.exit not in _RESTARTED or not most:
            break
        failures.append((_error(result), _reached(folder)))
        if len(failures) > 1 and failures[-1] == failures[-2]:
            why += f"; the restart met the same error after the same step ({failures[-1][1]}), so no other follows"
            break
        if len(failures) > most:
            why += f"; run.max_restarts={most} allows no other restart"
            break
        say(f"{why}; restart {len(failures)} of {most} from the last checkpoint")
        config = config.model_copy(update={"run": config.run.model_copy(update={"resume": "auto"})})
    return Ended(folder, result.exit, why, result.report, result.asked_by)


_RESTARTED = (Exit.RANK_LOST, Exit.RANK_SILENT, Exit.CRASHED)
"""Ends after which ranks are started again. A user's mistake and a broken contract would only come again."""


def _error(result: LaunchResult) -> object:
    """What went wrong, without what differs between two occurrences of one error (ranks, seconds, addresses)."""
    if result.first is None:
        return result.cause
    if result.exit is Exit.CRASHED and result.report is not None:
        return result.report.cause.partition(":")[0]
    return result.exit, result.exits[result.first.rank]


def _reached(folder: RunFolder) -> int:
    """The last step before the run ended: trained, or resumed from."""
    step = 0
    with suppress(OSError, LedgerError):  # whoever resumes is told what is wrong with the ledger
        for record in read_ledger(folder.ledger):
            if isinstance(record, Step | Resume):
                step = record.step
    return step


def _why(result: LaunchResult) -> str:
    report = result.report
    if report is not None and result.exit is Exit.USAGE:
        return report.message
    if report is not None and result.exit is Exit.VIOLATION:
        return report.cause
    return result.cause


def _report(folder: RunFolder, config: Config) -> None:
    found = read_summary(folder.summary)
    told = ", ".join(f"{word} {value:.4f}" for word, value in [*quoted(found.eval).items()][:2])
    say(
        f"done: {found.steps} steps on {found.world_size} {found.backend} workers in {found.wall_s:.1f} s, "
        f"{found.evaluated_on} {told}"
    )
    if found.reason == "early-stopping":
        say(f"stopped early: the last {config.training.early_stopping_patience} evaluations had no better loss")
    broken = f"violations before it was resumed: {found.violations}" if found.violations else "no violation"
    if found.kept_step is not None:
        say(f"kept the weights of step {found.kept_step}, which has the lowest validation loss (training.keep=best)")
    say(f"weights {found.weights_digest}, {sum(found.contracts.values())} clause evaluations, {broken}")
    say(f"run folder {folder.path}")
    use = "generate" if config.task == SFT else "predict"
    say(f"next: {command_line('andon', use, folder.path, '--data', 'FILE')}")
