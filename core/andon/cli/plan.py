"""Plan: the memory that a run needs and how busy it keeps its workers, before it starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from andon.model.memory import MemoryPlan
    from andon.training.forecast import Forecast, WorldPlan

_MOST_WORKERS = 4096
_WHERE = {"cpu": "{} on the CPU", "cuda": "{} on GPUs, each", "host": "{} that start on the CPU, before their GPUs"}


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
    counts = _numbers(workers) if workers is not None else ()
    in_a_child("plan")
    from andon.training.forecast import forecast, machine_here

    size = None if gpu_memory is None else int(gpu_memory * 2**30)
    loaded, _ = placed(loaded, None if size is None else max(counts, default=1))
    counts = counts or (loaded.run.workers,)
    found = forecast(loaded, counts, machine_here(size, max(counts)))
    if as_json:
        put(*json.dumps(found.as_dict(), indent=2).splitlines())
    else:
        for line in _lines(found):
            put(line)
    if not all(world.fits for world in found.worlds):
        raise typer.Exit(int(Exit.USAGE))


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(
        part.isascii() and part.isdigit() and len(part) <= 4 and 1 <= int(part) <= _MOST_WORKERS for part in parts
    ):
        raise InputError(
            [Problem("--workers", f"{text!r} is no list of numbers from 1 to {_MOST_WORKERS}, as in 1,2,4")]
        )
    return tuple(dict.fromkeys(map(int, parts)))


def _lines(found: Forecast) -> Iterator[str]:
    yield f"model: {found.weights:,} weights, {found.trained:,} of them trained"
    yield f"largest micro-batch: {found.rows} rows of {found.length} tokens"
    for world in found.worlds:
        yield from _of_world(world)
    if found.remedy is not None:
        yield f"would fit with --set {found.remedy.setting}: {_gib(found.remedy.needed)} ({found.remedy.price})"
    elif not all(world.fits or world.problem for world in found.worlds):
        yield "no single setting would make it fit"


def _of_world(world: WorldPlan) -> Iterator[str]:
    busiest = max(world.leaves)
    share = f"{world.efficiency:.0%} busy, at most {busiest} of {sum(world.leaves)} micro-batches on one"
    yield f"workers {world.workers}: {share}"
    if world.idle:
        yield f"  note: {world.idle}"
    elif world.efficiency < 1:
        waiting = sum(count < busiest for count in world.leaves)
        yield f"  note: {waiting} of {world.workers} workers would wait for the others in every step"
    if world.note:
        yield f"  note: {world.note}"
    if world.problem:
        yield f"  cannot be: {world.problem}"
    for need in world.needs:
        on = _WHERE[need.kind].format(need.ranks)
        if need.budget is None:
            verdict = "what is free is unknown"
        else:
            verdict = f"{'fits' if need.fits else 'DOES NOT FIT'} in the {_gib(need.budget)} that are free"
        yield f"  {on}: {_gib(need.needed)}, {verdict}"
        yield f"    a replica: {_parts(need.plan)}"


def _parts(plan: MemoryPlan) -> str:
    sizes = {
        "base": plan.base,
        "trained weights": plan.weights,
        "gradient": plan.gradient,
        "moments": plan.moments,
        "tree": plan.partials,
        "activations": plan.activations,
        "evaluation": plan.evaluation,
        "reduction": plan.reduction,
        "graphs": plan.graphs,
        "workspace": plan.workspace + plan.ramp,
        "outside of torch": plan.outside,
    }
    return ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in sizes.items() if size)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
