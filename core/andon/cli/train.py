"""`andon train`: load the configuration, launch the run or be one of torchrun's ranks, and report how it ended."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from andon.config.load import load_config
from andon.config.schema import Config
from andon.console.messages import Exit, InputError, put, say
from andon.integrations.trackers import require
from andon.launch import context as preemption
from andon.launch.context import RankContext, is_rank
from andon.launch.portable import portable_environment
from andon.launch.rank import report_to, run_rank
from andon.run.folder import RunFolder, State
from andon.training.choices import placed, portable_demo
from andon.training.existing import as_begun, how_to_resume, settings_for
from andon.training.rows import task_notice, with_task
from andon.training.start import ENTRY, foreign, payload_of, report_result, start, train_rank


def run_training(
    config_path: Path | None, overrides: Sequence[str], flags: Mapping[str, Any], *, entry: str = ENTRY
) -> Exit:
    """Train as configured and return the exit code. Raises `InputError` before a process starts or a file is written.

    entry: as for `start`.
    """
    started = time.monotonic()
    own = Path(str(flags.get("run.dir"))) / "config.yaml"
    set_flags = [key for key, value in flags.items() if value is not None and not key.startswith("run.")]
    if not (config_path or overrides or set_flags) and flags.get("run.resume") == "auto" and own.is_file():
        config_path = own  # resume by the run's own configuration
    if is_rank():
        _run_as_rank(config_path, overrides, flags, started)
    config = settings_for(config_path, overrides, flags)
    ended = start(config, started, entry=entry)
    if ended.exit in (Exit.RANK_LOST, Exit.RANK_SILENT) and ended.folder.begun() and " with: andon " not in ended.why:
        say(f"{ended.why}; {how_to_resume(ended.folder)}")
    elif ended.why and not (ended.exit is Exit.PREEMPTED and ended.asked_by):
        say(*(ended.why.split("\n") if ended.exit is Exit.USAGE else [ended.why]))
    if config.run.progress == "json":
        put(json.dumps({"what": "end", "exit": int(ended.exit), "run": str(ended.folder.path)}))
    if ended.exit is Exit.PREEMPTED:
        say(f"ended at a step boundary; {how_to_resume(ended.folder)}")
    return ended.exit


def _run_as_rank(config_path: Path | None, overrides: Sequence[str], flags: Mapping[str, Any], started: float) -> None:

    def work(context: RankContext) -> int:
        count = flags.get("run.workers")
        if count not in (None, context.world_size):
            raise InputError.at("--workers", f"{count} were requested, torchrun started {context.world_size}")
        config = load_config(config_path, overrides, {**flags, "run.workers": context.world_size})
        if context.rank == 0 and task_notice(config):
            say(task_notice(config))
        config = with_task(config)
        require(config.run.report_to, config.model.quantize)
        if config.run.backend == "inline":
            raise InputError.at("run.backend", f"{config.run.backend} is one process; torchrun needs gloo or nccl")
        if config.run.dir is None:
            raise InputError.at("run.dir", "name a run folder (--run-dir): all ranks of torchrun must share it")
        if context.rank == 0 and config.run.max_restarts:
            say("run.max_restarts is not used here: torchrun restarts its ranks itself (torchrun --max-restarts N)")
        if context.rank == 0 and count is None:
            with suppress(InputError):  # an error of the configured number of workers does not matter
                _warn_of_other_world_size(load_config(config_path, overrides, flags), context.world_size)
        folder = Path(config.run.dir)
        config, chosen_places = placed(as_begun(config, RunFolder(folder)))
        config, not_portable = portable_demo(config)
        if context.rank == 0:
            say(*filter(None, (chosen_places, not_portable)))
        if RunFolder(folder).state() is State.FOREIGN:
            raise InputError([foreign(folder)])
        RunFolder(folder).refuse_claimed()  # before a report overwrites one of the command that owns it
        report_to(folder)
        with portable_environment(config.run):
            code = train_rank(payload_of(config, folder, started))
        if context.rank == 0 and code == Exit.OK:
            report_result(RunFolder(folder), config)
        return code

    # From here on signals wait until the rank has installed its handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, preemption.PREEMPTION_SIGNALS)
    preemption.begin()
    run_rank(work)


def _warn_of_other_world_size(config: Config, started: int) -> None:
    wanted = config.run.workers
    if "workers" in config.run.model_fields_set and wanted != started:
        missing = f"; {wanted - started} are missing" if wanted > started else ""
        say(f"warning: run.workers is {wanted}, torchrun started {started}{missing} (--workers {wanted} refuses this)")
