"""`andon train`: check everything, then start ranks, or be one."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from andon.config.load import load_config
from andon.exits import Exit
from andon.launch.context import RankContext, is_rank
from andon.launch.launcher import launch, warm_up
from andon.problems import InputError, Problem
from andon.run.folder import RunFolder, State, default_folder
from andon.training.entry import ENTRY, payload_of, train_rank

if TYPE_CHECKING:
    from andon.config.schema import Config

_IN_PROCESS = ("inline", "threads")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def run_training(config_path: Path | None, overrides: Sequence[str], flags: Mapping[str, Any]) -> Exit:
    """Train as configured and return how it ended. Raises `InputError` before anything is started or written."""
    if is_rank():
        _be_a_rank(config_path, overrides, flags)
    config = load_config(config_path, overrides, flags)
    in_process = config.run.backend in _IN_PROCESS
    if not in_process:
        warm_up()
    folder = RunFolder(Path(config.run.dir) if config.run.dir is not None else default_folder())
    if _nothing_to_do(config, folder):
        return Exit.OK
    _check_data(config)
    if in_process:
        code = _train_here(config, folder)
    else:
        code = _train_in_ranks(config, folder)
    _report(folder, code)
    return code


def _be_a_rank(config_path: Path | None, overrides: Sequence[str], flags: Mapping[str, Any]) -> None:
    """One rank of torchrun; does not return. torchrun decides the number of workers."""
    from andon.launch.rank import report_to, run_rank

    def work(context: RankContext) -> int:
        config = load_config(config_path, overrides, {**flags, "run.workers": context.world_size})
        if config.run.backend in _IN_PROCESS:
            raise InputError([Problem("run.backend", f"{config.run.backend} has no ranks; torchrun needs gloo or nccl")])
        if config.run.dir is None:
            raise InputError([Problem("run.dir", "name a run folder (--run-dir): all ranks of torchrun must share it")])
        report_to(Path(config.run.dir))
        return train_rank(payload_of(config, Path(config.run.dir)))

    run_rank(work)


def _nothing_to_do(config: Config, folder: RunFolder) -> bool:
    """Whether the folder holds a finished run that was asked to be resumed. Refuses a folder that may not be used."""
    state = folder.state()
    if state is State.FOREIGN:
        raise InputError([Problem(str(folder.path), "holds something that is no run; name a new or an empty folder")])
    if config.run.resume != "auto":
        if state is not State.EMPTY:
            raise InputError(
                [Problem(str(folder.path), "already holds a run; add --resume auto, or name another folder")]
            )
        return False
    if state is State.FINISHED:
        _say(f"resume: the run in {folder.path} is finished, nothing to do")
        return True
    return False


def _check_data(config: Config) -> None:
    """All of a user's mistakes in the data at once, before ranks are started that would each find them."""
    from andon.training.rows import read_rows

    read_rows(config)


def _train_here(config: Config, folder: RunFolder) -> Exit:
    """All ranks in this process; a signal ends the run at its next step boundary."""
    from andon.training.session import train

    asked: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if asked and signum == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(signum)

    with ExitStack() as stack:
        for signum in _SIGNALS:
            stack.callback(signal.signal, signum, signal.signal(signum, note))
        return train(config, folder, lambda: bool(asked))


def _train_in_ranks(config: Config, folder: RunFolder) -> Exit:
    with folder.open_for_writing():
        pass  # only to refuse, before ranks are started, a folder that cannot be written or is being written
    result = launch(
        ENTRY,
        payload_of(config, folder.path),
        workers=config.run.workers,
        run_folder=folder.path,
        timeout_s=config.run.grace_s,
    )
    if result.exit is not Exit.OK:
        report = result.report
        if result.exit is Exit.USAGE and report is not None:
            _say(report.message)
        else:
            _say(result.cause)
    return result.exit


def _report(folder: RunFolder, code: Exit) -> None:
    """The last lines: what came out and where it is."""
    if code is Exit.PREEMPTED:
        _say(f"ended at a step boundary; go on with: andon train {folder.config} --run-dir {folder.path} --resume auto")
    if code is not Exit.OK:
        return
    from andon.run.summary import read_summary

    found = read_summary(folder.summary)
    checks = sum(found.contracts.values())
    _say(
        f"done: {found.steps} steps on {found.world_size} {found.backend} workers in {found.wall_s:.1f} s, "
        f"held-out accuracy {found.eval['accuracy']:.4f}, macro-F1 {found.eval['macro_f1']:.4f}"
    )
    _say(f"weights {found.weights_digest}, {checks} clause evaluations, {found.violations} violations")
    _say(f"run folder {folder.path}")


def _say(text: str) -> None:
    print("\n".join(f"andon: {line}" for line in text.splitlines()), file=sys.stderr, flush=True)
