"""`andon train`: check everything, then start ranks, or be one."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from andon.config.load import load_config
from andon.config.schema import IN_PROCESS, Config
from andon.console.exits import Exit
from andon.console.messages import say
from andon.console.problems import InputError, Problem, ProblemList
from andon.launch import preemption
from andon.launch.context import RankContext, is_rank
from andon.launch.elastic import launch_elastic
from andon.launch.launcher import PRELOAD, LaunchResult, launch, warm_up
from andon.launch.rank import report_to, run_rank
from andon.launch.sizes import Sizing
from andon.run.folder import RUNS, RunFolder, State, new_folder
from andon.run.summary import quoted, read_summary
from andon.training.entry import ENTRY, payload_of, train_rank
from andon.training.existing import go_on_with, how_far, newest_unfinished, require_same_as_finished
from andon.training.rows import read_rows

_PRELOAD = (
    "andon.launch.server_first",
    *PRELOAD,
    "torch._dynamo",
    "andon.training.run",
    "transformers.models.qwen3.modeling_qwen3",
    "peft.utils.transformers_weight_conversion",
    "andon.launch.worker_agents",
    "andon.launch.server_last",
)
"""What ranks would otherwise each import for themselves: an optimizer needs `torch._dynamo`, as slow as torch."""


def run_training(
    config_path: Path | None,
    overrides: Sequence[str],
    flags: Mapping[str, Any],
    *,
    sizing: Sizing | None = None,
    entry: str = ENTRY,
) -> Exit:
    """Train as configured and return how it ended. Raises `InputError` before anything is started or written.

    sizing: how the number of workers may change; None: it may not. entry: what rank processes are started with, as
    "module:function".
    """
    started = time.time()
    if is_rank():
        _be_a_rank(config_path, overrides, flags, sizing, started)
    config = load_config(config_path, overrides, flags)
    if sizing is not None:
        _require_elastic(config)
    folder = _folder_of(config)
    if folder is not None and _nothing_to_do(config, folder):
        return Exit.OK
    read_rows(config)  # all mistakes in the data at once, before ranks are started that would each find them
    made = folder is None
    folder = _new_folder(config) if folder is None else folder
    try:
        code = _train(config, folder, started, sizing, entry, made=made)
        if code is Exit.OK and folder.state() is not State.FINISHED:
            code = _left(folder, "every rank ended with exit code 0")
    finally:
        if made:
            with suppress(OSError):  # it stays where anything is in it
                folder.path.rmdir()
    _report(folder, code)
    return code


def _left(folder: RunFolder, how: str) -> Exit:
    """What a run is that nobody ended: whoever called `sys.exit(0)` in it must not have it look like success."""
    say(f"the run is not finished: {how} {how_far(folder)}; go on with: {go_on_with(folder)}")
    return Exit.RANK_LOST


def _train(config: Config, folder: RunFolder, started: float, sizing: Sizing | None, entry: str, *, made: bool) -> Exit:
    """Train as the one command of the folder, and leave nothing of a run that ended before it began."""
    before = folder.names() if not made and folder.path.exists() else None
    with folder.claimed():
        try:
            if config.run.backend in IN_PROCESS:
                return _train_here(config, folder, started)
            return _train_in_ranks(config, folder, started, sizing, entry)
        finally:
            folder.discard_unbegun(before=before)


def _require_elastic(config: Config) -> None:
    """Refuse, all at once, what lets a run not be the same on another number of workers."""
    found = ProblemList()
    if config.run.backend in IN_PROCESS:
        found.add("run.backend", f"{config.run.backend} has no ranks; --workers MIN:MAX needs gloo or nccl")
    if config.run.devices is not None:
        found.add("run.devices", "names a device for each worker; with --workers MIN:MAX leave it to the backend")
    if not config.training.exact:
        found.add("training.exact", "false: the result depends on the number of workers, so --workers must be one")
    found.raise_if_any()


def _be_a_rank(
    config_path: Path | None,
    overrides: Sequence[str],
    flags: Mapping[str, Any],
    sizing: Sizing | None,
    started: float,
) -> None:
    """One rank of torchrun; does not return. torchrun decides the number of workers."""

    def work(context: RankContext) -> int:
        if sizing is not None:
            elastic = f"torchrun decides how many there are: --nnodes {sizing.bounds} --max-restarts N"
            raise InputError([Problem("--workers", elastic)])
        asked = flags.get("run.workers")
        if asked not in (None, context.world_size):
            raise InputError([Problem("--workers", f"{asked} were asked for, torchrun started {context.world_size}")])
        config = load_config(config_path, overrides, {**flags, "run.workers": context.world_size})
        if config.run.backend in IN_PROCESS:
            raise InputError(
                [Problem("run.backend", f"{config.run.backend} has no ranks; torchrun needs gloo or nccl")]
            )
        if config.run.dir is None:
            raise InputError([Problem("run.dir", "name a run folder (--run-dir): all ranks of torchrun must share it")])
        if context.rank == 0 and asked is None:
            with suppress(InputError):  # what only that number makes wrong is not asked for
                _tell_of_others(load_config(config_path, overrides, flags), context.world_size)
        folder = Path(config.run.dir)
        if RunFolder(folder).state() is State.FOREIGN:
            raise InputError([_foreign(folder)])
        RunFolder(folder).refuse_claimed()  # before a report is written among those of the command that has it
        report_to(folder)
        return train_rank(payload_of(config, folder, started))

    # Those that come from here on wait until the rank has handlers of its own.
    signal.pthread_sigmask(signal.SIG_BLOCK, preemption.PREEMPTION_SIGNALS)
    preemption.begin()
    run_rank(work)


def _tell_of_others(written: Config, started: int) -> None:
    """That torchrun started another number of workers than the configuration names: some may not have come."""
    wanted = written.run.workers
    if "workers" in written.run.model_fields_set and wanted != started:
        missing = f"; {wanted - started} are missing" if wanted > started else ""
        say(f"warning: run.workers is {wanted}, torchrun started {started}{missing} (--workers {wanted} refuses that)")


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


def _foreign(path: Path) -> Problem:
    return Problem(str(path), "holds something that is no run; name a new or an empty folder")


def _nothing_to_do(config: Config, folder: RunFolder) -> bool:
    """Whether the folder holds a finished run that was asked to be resumed. Refuses a folder that may not be used."""
    state = folder.state()
    if state is State.FOREIGN:
        raise InputError([_foreign(folder.path)])
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


def _train_here(config: Config, folder: RunFolder, started: float) -> Exit:
    """All ranks in this process; a signal ends the run at its next step boundary, a second SIGINT at once."""
    from andon.training.run import train

    preemption.begin()
    asked: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if signal.SIGINT in asked and signum == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(signum)

    try:
        with ExitStack() as stack:
            for signum in preemption.PREEMPTION_SIGNALS:
                stack.callback(signal.signal, signum, signal.signal(signum, note))
            asked.extend(preemption.taken())
            return train(config, folder, lambda: bool(asked), started)
    except SystemExit as ended:
        code = "" if ended.code is None else repr(ended.code)
        return _left(folder, f"something in it called sys.exit({code})")
    except KeyboardInterrupt:
        kept = any(folder.checkpoints.glob("step-*"))
        left = "the last checkpoint stands" if kept else "no checkpoint had been written yet"
        say(f"ended at once: a second SIGINT asked for it; {left}")
        return Exit.RANK_LOST


def _train_in_ranks(config: Config, folder: RunFolder, started: float, sizing: Sizing | None, entry: str) -> Exit:
    with folder.open_for_writing():
        pass  # only to refuse, before ranks are started, a folder that cannot be written or is being written
    preemption.begin()
    warm_up(_PRELOAD)
    bounds = {"timeout_s": config.run.grace_s, "silence_s": config.run.timeout_s}
    if sizing is None:
        payload = payload_of(config, folder.path, started)
        result = launch(entry, payload, workers=config.run.workers, run_folder=folder.path, **bounds)
    else:

        def payload_for(workers: int, again: bool) -> dict[str, Any]:
            run = config.run.model_copy(update={"workers": workers} | ({"resume": "auto"} if again else {}))
            return payload_of(config.model_copy(update={"run": run}), folder.path, started)

        result = launch_elastic(entry, payload_for, sizing, run_folder=folder.path, **bounds)
    if result.exit is not Exit.OK:
        say(_why(result))
    return result.exit


def _why(result: LaunchResult) -> str:
    """Why a launch ended, for a reader: a user's mistakes all of them, a violation as one line."""
    report = result.report
    if report is not None and result.exit is Exit.USAGE:
        return report.message
    if report is not None and result.exit is Exit.VIOLATION:
        return report.cause
    return result.cause


def _report(folder: RunFolder, code: Exit) -> None:
    """The last lines: what came out and where it is."""
    if code is Exit.PREEMPTED:
        say(f"ended at a step boundary; go on with: {go_on_with(folder)}")
    if code is not Exit.OK:
        return
    found = read_summary(folder.summary)
    told = ", ".join(f"{word} {value:.4f}" for word, value in [*quoted(found.eval).items()][:2])
    say(
        f"done: {found.steps} steps on {found.world_size} {found.backend} workers in {found.wall_s:.1f} s, "
        f"{found.evaluated_on} {told}"
    )
    broken = f"violations before it was resumed: {found.violations}" if found.violations else "no violation"
    say(f"weights {found.weights_digest}, {sum(found.contracts.values())} clause evaluations, {broken}")
    say(f"run folder {folder.path}")
