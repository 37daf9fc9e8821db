"""The lines that a watch prints at its opening and at its close: which clauses it checks here, and what it found."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

import torch.distributed as dist

from andon_contracts.clauses import CLAUSES
from andon_contracts.legible import counted
from andon_contracts.liveness.open_store import open_store
from andon_contracts.watch.check import Check, Context, Cover
from andon_contracts.watch.judging import Verdicts
from andon_contracts.watch.settings import Settings


def coverage(context: Context, checks: Sequence[Check]) -> dict[str, Cover]:
    """Each clause of a watch, in the order of the registry, and whether it is checked here."""
    covers = {"halt-together": context.between_ranks()}
    for check in checks:
        covers |= check.cover()
    return {name: covers[name] for name in CLAUSES if name in covers}


def opening_lines(
    covers: Mapping[str, Cover], world: int, trainable: int, settings: Settings, beside: int = 0
) -> list[str]:
    """The lines at the opening: what is watched, what is not, and which arguments would change that.

    `settings.verbose` adds a table of all clauses. beside: the number of tensors of the optimizers outside the model.
    """
    head = f"andon.watch: {world} rank{'s' * (world > 1)}, {trainable} trainable tensors"
    live = sum(cover.live for cover in covers.values())
    table, where = "verbose=True", "these arguments would"
    if settings.by_command:
        table, where = "--verbose", "a line in the script would: andon.watch(model, optimizer, ...)"
    missing = [f"{name} ({cover.remedy})" for name, cover in covers.items() if cover.remedy and not cover.live]
    whys = dict.fromkeys(c.why for c in covers.values() if c.state == "not observable" and not c.remedy)
    unseen = [f"{', '.join(n for n, c in covers.items() if c.why == why and not c.live)} ({why})" for why in whys]
    lines = [f"{head}; {live} of {len(covers)} clauses are held" + f", {table} lists them" * (not settings.verbose)]
    if missing or unseen:
        lines.append(f"  not watched: {', '.join([*unseen, *missing])}" + f"; {where}" * bool(missing))
    if beside:
        tensors = counted(beside, "tensor")
        lines.append(f"  not watched: the updates of {tensors} of the optimizers beside the model's parameters")
    if settings.verbose:
        width = max(map(len, covers))
        lines += [f"  {name:<{width}}  {cover.state:<14}  {cover.why}".rstrip() for name, cover in covers.items()]
    launched = os.environ.get("WORLD_SIZE", "")
    joined = dist.is_available() and dist.is_initialized()
    if not joined and launched.isdecimal() and int(launched) > 1:
        apart = "but no process group was made: the ranks train apart, not compared"
        lines.append(f"  warning: WORLD_SIZE is {launched}, {apart}")
    return lines


def closing_lines(
    covers: Mapping[str, Cover], verdicts: Verdicts, steps: int, spent: float, untold: Collection[str] = ()
) -> list[str]:
    """The lines at the close: what was checked, how often, at what cost, and what was not checked.

    spent: seconds that the watch took. untold: clauses for which the loop passed no values; they count as unchecked.
    """
    evaluated = {name: count for name, count in verdicts.evaluations.items() if count and name not in untold}
    unchecked = [name for name in covers if name not in evaluated]
    times, first = counted(sum(evaluated.values()), "time"), verdicts.first_steps
    findings = f"{counted(len(verdicts.counts), 'violation')}, {counted(len(verdicts.suspected), 'suspicion')}"
    clauses = f"{len(covers) - len(unchecked)} of {len(covers)} clauses"
    repeated = (verdicts.counts + verdicts.suspected).items()
    lines = [
        f"andon.watch: {counted(steps, 'step')}, {clauses} evaluated {times}",
        f"  {findings}, {1000 * spent / max(steps, 1):.3g} ms per step",
        *(f"  {name}: {counted(count, 'time')}, first at step {first[name]}" for name, count in repeated),
        *(f"  {name}: {counted(count, 'time')}, silenced by allow" for name, count in verdicts.silenced.items()),
    ]
    return [*lines, f"  not checked: {', '.join(unchecked)}"] if unchecked else lines


def port_warning() -> str:
    """A warning if other machines can reach the port of the process group's store; else empty."""
    reached = open_store() if dist.is_available() and dist.is_initialized() else ""
    return reached and f"  warning: {reached}"
