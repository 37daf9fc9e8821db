"""What `andon plan` prints, and how a command whose memory grows with its input is run in a child process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from andon.console.exits import Exit
from andon.console.messages import say
from andon.console.problems import InputError, Problem
from andon.launch.orphan import bind_to_parent
from andon_contracts.liveness.process import exit_text

if TYPE_CHECKING:
    from andon.model.memory import MemoryPlan
    from andon.training.forecast import Forecast, WorldPlan

_MOST_WORKERS = 4096
_WHERE = {"cpu": "{} on the CPU", "cuda": "{} on GPUs, each", "host": "{} that start on the CPU, before their GPUs"}


def in_a_child(command: str) -> None:
    """Fork: the child returns and runs the command; the parent waits and ends as the child does (`typer.Exit`).

    A child that a signal killed is reported with the signal, and with what the kernel says of its memory; the exit
    code is 71 then. Ctrl-C and the parent's death end the child. A process that runs torch, which must not fork, runs
    the command itself.
    """
    if "torch" in sys.modules:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        bind_to_parent(parent)
        return
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except KeyboardInterrupt:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    if code < 0:
        say(f"{command} {exit_text(code)}")
    raise typer.Exit(code if code >= 0 else int(Exit.RANK_LOST))


def numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(
        part.isascii() and part.isdigit() and len(part) <= 4 and 1 <= int(part) <= _MOST_WORKERS for part in parts
    ):
        raise InputError(
            [Problem("--workers", f"{text!r} is no list of numbers from 1 to {_MOST_WORKERS}, as in 1,2,4")]
        )
    return tuple(dict.fromkeys(map(int, parts)))


def lines_of(found: Forecast) -> Iterator[str]:
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
