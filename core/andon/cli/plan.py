"""`andon plan`: the memory that a run needs and how busy it keeps its workers, before it starts."""

from __future__ import annotations

import json
import re
from typing import Annotated

import typer

from andon.cli.apart import in_a_child
from andon.cli.options import (
    Backend,
    BaseModel,
    ConfigFile,
    EvalData,
    LabelColumn,
    Overrides,
    Task,
    TextColumn,
    TrainData,
    material,
)
from andon.config.load import load_config
from andon.console.exits import Exit
from andon.console.messages import put
from andon.console.problems import InputError, Problem
from andon.training.choices import placed

_MOST_WORKERS = 4096


def plan(
    config: ConfigFile = None,
    workers: Annotated[
        str | None, typer.Option(help="Numbers of workers, as in 1,2,4; run.workers by default.")
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(metavar="GIB", help="Plan for GPUs with so much memory, whatever is here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, in bytes.")] = False,
    backend: Backend = None,
    task: Task = None,
    data: TrainData = None,
    eval_data: EvalData = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    model: BaseModel = None,
    overrides: Overrides = None,
) -> None:
    """Say what memory a run needs on each device. Ends with 0 where it fits, with 2 where not."""
    if gpu_memory is not None and not 0 < gpu_memory < 2**20:
        raise InputError([Problem("--gpu-memory", f"{gpu_memory} is no size of a GPU in GiB")])
    made_of = material(task, data, eval_data, text_column, label_column, model)
    loaded = load_config(config, overrides or (), {"run.backend": backend, **made_of})
    parts = [part.strip() for part in workers.split(",")] if workers is not None else []
    if not all(re.fullmatch("[0-9]{1,4}", part) and 1 <= int(part) <= _MOST_WORKERS for part in parts):
        what = f"{workers!r} is no list of numbers from 1 to {_MOST_WORKERS}, as in 1,2,4"
        raise InputError([Problem("--workers", what)])
    counts = tuple(dict.fromkeys(map(int, parts)))
    in_a_child("plan")
    from andon.training.forecast import forecast, machine_here

    size = None if gpu_memory is None else int(gpu_memory * 2**30)
    loaded, _ = placed(loaded, None if size is None else max(counts, default=1))
    counts = counts or (loaded.run.workers,)
    found = forecast(loaded, counts, machine_here(size, max(counts)))
    if as_json:
        put(*json.dumps(found.as_dict(), indent=2).splitlines())
    else:
        put(*found.lines())
    if not all(world.fits for world in found.worlds):
        raise typer.Exit(int(Exit.USAGE))
