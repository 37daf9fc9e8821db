"""Start a run of a checked configuration: choose its folder, start its processes, and report how it ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from andon.config.schema import CAUSAL, Config
from andon.console.messages import Exit, InputError, Problem, command_line, say
from andon.data.origins import Stamp, require_unchanged, stamps
from andon.integrations.trackers import require
from andon.launch import context as preemption
from andon.launch.launcher import PRELOAD, launch, warm_up
from andon.launch.portable import portable_environment
from andon.launch.rank import preempted
from andon.launch.report import Report
from andon.run.folder import RUNS, RunFolder, State, new_folder
from andon.run.ledger import LedgerError, read_ledger
from andon.run.summary import LAST_VALIDATION, quoted, read_summary
from andon.training.choices import placed, portable_demo
from andon.training.existing import (
    as_begun,
    holds_a_run,
    how_to_resume,
    newest_unfinished,
    progress_text,
    require_same_as_finished,
    same_data,
    taken_over,
)
from andon.training.given import kept
from andon.training.rows import (
    cache_of,
    data_files,
    inferred_task,
    is_tokenised_as_read,
    notes,
    read_rows,
    set_inferred_task,
    task_notice,
    with_task,
)
from andon_contracts.legible import counted
from andon_contracts.record import Resume, Step

ENTRY = "andon.training.start:train_rank"
_PRELOAD = (
    "andon.launch.server_first",
    *PRELOAD,
    "torch._dynamo",
    "andon.training.run",
    "transformers.models.qwen3.modeling_qwen3",
    "peft.utils.transformers_weight_conversion",
    "andon.launch.server_last",
)
"""Imported once, before ranks are forked. Optimizers need `torch._dynamo`, which imports as slowly as torch."""
_RESTARTED = (Exit.RANK_LOST, Exit.RANK_SILENT, Exit.CRASHED)
"""Exit codes after which ranks are restarted. After a user error or a violation, a restart would fail the same way."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended, and its folder. why: the cause, or all user errors; empty after `Exit.OK`. report: of the rank
    that failed first. asked_by: the signal to this process that requested the end, or 0."""

    folder: RunFolder
    exit: Exit
    why: str = ""
    report: Report | None = None
    asked_by: int = 0


def start(config: Config, started: float, *, entry: str = ENTRY, given: Mapping[str, Path] | None = None) -> RunOutcome:
    """Start or resume the run of `config`, and return how it ended.

    started: the command's start by `time.monotonic`. entry: the function that rank processes call, as
    "module:function". given: temporary files of `config.data`, by key (`train`, `eval`), to copy into the run folder.
    Raises `InputError` before anything is started or written, and without rank processes the run's own exceptions.
    """
    task = task_notice(config)
    require(config.run.report_to, config.model.quantize)
    config = with_task(config)
    folder, resuming = None, config.run.resume == "auto"
    if config.run.dir is not None:
        folder = RunFolder(Path(config.run.dir))
    elif resuming:
        folder = newest_unfinished(config, RUNS)
        if folder is not None:
            say(f"resume: {folder.path} is the newest unfinished run of this configuration (for another: --run-dir)")
    asked = config
    config, chosen = placed(config if folder is None else as_begun(config, folder))
    config, not_portable = portable_demo(config)
    if folder is not None:
        state = folder.state()
        if state is State.FOREIGN:
            raise InputError([foreign(folder.path)])
        if resuming and state is State.FINISHED:
            require_same_as_finished(config, folder)
            say(f"resume: the run in {folder.path} is finished, nothing to do")
            return RunOutcome(folder, Exit.OK)
        if resuming and (line := taken_over(asked, folder)):
            say(line)
        if not resuming and folder.begun():
            raise holds_a_run(folder)
    if task:
        say(task)
    # Report all errors in the data once, before ranks start, each of which would report them.
    files: list[Stamp] = []
    with suppress(InputError):  # reading names every missing file
        files = stamps(data_files(config))
    rows = None if is_tokenised_as_read(config) else read_rows(config)
    for note in filter(None, (*(() if rows is None else notes(rows)), chosen, not_portable)):
        say(note)
    is_new = folder is None
    if folder is None:
        folder = RunFolder(new_folder())
        if resuming:
            say(f"resume: no unfinished run of this configuration under {RUNS}/, starting anew in {folder.path}")
    before = folder.names() if not is_new and folder.path.exists() else None
    try:
        with portable_environment(config.run), folder.claimed():
            try:
                if given and same_data(folder, config):  # other rows are refused later, so they are not copied
                    config, rows = kept(config, folder, given), None
                    files = stamps(data_files(config))
                # From here on signals raise no exception. Raised while the folder's lock is being released, one would
                # leave the folder locked and its files in place.
                preemption.begin()
                with folder.open_for_writing():
                    cache = cache_of(config, folder.tokens)
                    if rows is not None and cache is not None:  # ranks then read the cache and no data file
                        read_rows(config, folder=cache, known=rows)
                require_unchanged(data_files(config), files)
                if config.run.backend == "inline":
                    ended = _train_here(config, folder, started)
                else:
                    ended = _train_in_ranks(config, folder, started, entry, files)
            finally:
                folder.discard_unbegun(before=before)
        if ended.exit is Exit.OK and folder.state() is not State.FINISHED:
            ended = _unfinished(folder, "every rank ended with exit code 0")
    finally:
        if is_new:
            with suppress(OSError):  # fails if the folder is not empty
                folder.path.rmdir()
    if ended.exit is Exit.OK:
        report_result(folder, config)
    return ended


def foreign(path: Path) -> Problem:
    """The problem of a run folder at `path` that holds files which are not a run's."""
    return Problem(str(path), "is not a run folder of Andon; name a new or an empty folder")


def _unfinished(folder: RunFolder, how: str) -> RunOutcome:
    why = f"the run is not finished: {how} {progress_text(folder)}; {how_to_resume(folder)}"
    return RunOutcome(folder, Exit.RANK_LOST, why)


def _train_here(config: Config, folder: RunFolder, started: float) -> RunOutcome:
    from andon.training.run import train

    received: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if signal.SIGINT in received and signum == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(signum)

    try:
        with ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():  # only this thread may install handlers
                for signum in preemption.PREEMPTION_SIGNALS:
                    stack.callback(signal.signal, signum, signal.signal(signum, note))
            received.extend(preemption.taken())
            code = train(config, folder, lambda: bool(received), started)
            return RunOutcome(folder, code, asked_by=next(iter(received), 0))
    except SystemExit as ended:
        argument = "" if ended.code is None else repr(ended.code)
        return _unfinished(folder, f"code in the run called sys.exit({argument})")
    except KeyboardInterrupt:
        return RunOutcome(folder, Exit.RANK_LOST, "stopped at once by a second SIGINT", asked_by=signal.SIGINT)


def payload_of(config: Config, folder: Path, started: float, files: Sequence[Stamp] | None = None) -> dict[str, Any]:
    """The payload of `train_rank`. started: the command's start by `time.monotonic`. files: the stamps of the data
    files when they were read; None: as they are now.

    Settings that the user did not set are left out: every rank chooses the same values from the data and the base.
    """
    values = config.model_dump(mode="json", exclude_unset=True)
    files = stamps(data_files(config)) if files is None else files
    return {"config": values, "folder": str(folder), "started": started, "task": inferred_task(config), "files": files}


def train_rank(payload: Mapping[str, Any]) -> int:
    """Run one rank; returns an `Exit`. The launcher calls it in each rank process.

    Raises `InputError` if a data file has changed since `payload_of`.
    """
    from andon.training.run import train

    config = Config.model_validate(payload["config"])
    require_unchanged(data_files(config), payload["files"])
    set_inferred_task(config, tuple(payload["task"]))
    return int(train(config, RunFolder(Path(payload["folder"])), lambda: preempted() is not None, payload["started"]))


def _train_in_ranks(
    config: Config, folder: RunFolder, started: float, entry: str, files: Sequence[Stamp]
) -> RunOutcome:
    """Launch ranks, and relaunch them from the last checkpoint after a failure, at most `run.max_restarts` times. The
    same error after the same step is deterministic, so it ends the run."""
    warm_up(_PRELOAD)
    most, failures = config.run.max_restarts, list[tuple[object, int]]()
    while True:
        result = launch(
            entry,
            payload_of(config, folder.path, started, files),
            workers=config.run.workers,
            run_folder=folder.path,
            timeout_s=config.run.grace_s,
            silence_s=config.run.timeout_s,
        )
        report, why = result.report, result.cause
        if report is not None and result.exit is Exit.USAGE:
            why = report.message
        elif report is not None and result.exit is Exit.VIOLATION:
            why = report.cause
        if result.asked_by or result.exit not in _RESTARTED or not most:
            break
        reached = 0
        with suppress(OSError, LedgerError):  # a resume reports what is wrong with the ledger
            for record in read_ledger(folder.ledger):
                if isinstance(record, Step | Resume):
                    reached = record.step
        # Compare errors without details that vary between occurrences: ranks, seconds, addresses.
        error: object = result.cause
        if result.first is not None:
            error = result.exit, result.exits[result.first.rank]
            if result.exit is Exit.CRASHED and report is not None:
                error = report.cause.partition(":")[0]
        failures.append((error, reached))
        if len(failures) > 1 and failures[-1] == failures[-2]:
            why += f"; the restart met the same error after the same step ({reached}), so no other follows"
            break
        if len(failures) > most:
            why += f"; run.max_restarts={most} allows no other restart"
            break
        say(f"{why}; restart {len(failures)} of {most} from the last checkpoint")
        config = config.model_copy(update={"run": config.run.model_copy(update={"resume": "auto"})})
    return RunOutcome(folder, result.exit, why, report, result.asked_by)


def report_result(folder: RunFolder, config: Config) -> None:
    summary = read_summary(folder.summary)
    scores = ", ".join(f"{word} {value:.4f}" for word, value in [*quoted(summary.eval).items()][:2])
    if rows := [one["support"] for one in summary.eval.get("classes") or () if "accuracy" in summary.eval]:
        scores += f" (accuracy {max(rows) / max(sum(rows), 1):.4f} by always naming the largest class)"
    if summary.skipped:
        scores += f" (without {counted(summary.skipped, 'unusable row')}, see skipped_rows.txt)"
    last = "" if summary.updates in (None, summary.steps) else f", the last {summary.updates} of them"
    say(
        f"done: {counted(summary.steps, 'step')} on {counted(summary.world_size, 'worker')} ({summary.backend})"
        f"{last} in {summary.wall_s:.1f} s, {summary.evaluated_on} {scores}"
    )
    if summary.reason == "early-stopping":
        say(f"stopped early: the last {config.training.early_stopping_patience} evaluations had no lower loss")
    if summary.kept_step is not None:
        say(f"kept the weights of step {summary.kept_step}, with the lowest validation loss (training.keep=best)")
        if summary.evaluated_on == LAST_VALIDATION:
            say("note: the validation rows also chose these weights, so their scores are optimistic; see --eval-data")
    if summary.violations:
        say(f"warning: violations before the run was resumed: {summary.violations}; see andon show {folder.path}")
    if config.run.progress == "verbose":
        say(f"weights {summary.weights_digest}, {sum(summary.contracts.values())} checks of contracts")
    say(f"run folder {folder.path}")
    use = "generate" if config.task in CAUSAL else "predict"
    say(f"next: {command_line('andon', use, folder.path, '--data', 'FILE')}")
