"""What a watch can see here, said before it begins, and what it saw, said at the end."""

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
    """Each clause that a watch knows, in the order of the registry, with whether it is checked here."""
    found = {"halt-together": context.between_ranks()}
    for check in checks:
        found |= check.cover()
    return {name: found[name] for name in CLAUSES if name in found}


def opening_lines(
    found: Mapping[str, Cover], world: int, trainable: int, settings: Settings, beside: int = 0
) -> list[str]:
    """What a watch prints when it begins: what is watched, and what is not with the line that would change it.

    With `verbose` a table of all clauses besides. beside: how many tensors the optimizers hold beside the model.
    """
    head = f"andon.watch: {world} rank{'s' * (world > 1)}, {trainable} trainable tensors"
    live = sum(cover.live for cover in found.values())
    table = "--verbose" if settings.by_command else "verbose=True"
    missing = [f"{name} ({cover.remedy})" for name, cover in found.items() if cover.remedy and not cover.live]
    whys = dict.fromkeys(c.why for c in found.values() if c.state == "not observable" and not c.remedy)
    unseen = [f"{', '.join(n for n, c in found.items() if c.why == why and not c.live)} ({why})" for why in whys]
    where = (
        "a line in the script would: andon.watch(model, optimizer, ...)"
        if settings.by_command
        else "these arguments would"
    )
    lines = [
        f"{head}; {live} of {len(found)} clauses are held" + f", {table} lists them" * (not settings.verbose),
        f"  not watched: {', '.join([*unseen, *missing])}" + f"; {where}" * bool(missing) if missing or unseen else "",
    ]
    if beside:
        held = counted(beside, "tensor")
        lines.append(f"  not watched: the updates of {held} of the optimizers beside the model's parameters")
    if settings.verbose:
        width = max(map(len, found))
        lines += [f"  {name:<{width}}  {cover.state:<14}  {cover.why}".rstrip() for name, cover in found.items()]
    return [*filter(None, [*lines, _apart()])]


def _apart() -> str:
    """What is said where a launcher started several ranks, and this one has not joined the others."""
    asked = os.environ.get("WORLD_SIZE", "")
    joined = dist.is_available() and dist.is_initialized()
    if joined or not asked.isdecimal() or int(asked) < 2:
        return ""
    return f"  warning: WORLD_SIZE is {asked}, but no process group was made: the ranks train apart, not compared"


def closing_lines(
    found: Mapping[str, Cover], verdicts: Verdicts, steps: int, spent: float, untold: Collection[str] = ()
) -> list[str]:
    """What was checked, how often, at what cost, and what was not checked.

    spent: seconds that the watch took. untold: clauses of what the loop may tell and did not: they count as unchecked.
    """
    evaluated = {name: count for name, count in verdicts.evaluations.items() if count and name not in untold}
    ran = [name for name in found if name in evaluated]
    unchecked = [name for name in found if name not in evaluated]
    total, first = sum(evaluated.values()), verdicts.first_steps
    seen = f"{counted(len(verdicts.counts), 'violation')}, {counted(len(verdicts.suspected), 'suspicion')}"
    lines = [
        f"andon.watch: {counted(steps, 'step')}, {len(ran)} of {len(found)} clauses evaluated {counted(total, 'time')}",
        f"  {seen}, {1000 * spent / max(steps, 1):.3g} ms per step",
    ]
    repeated = (verdicts.counts + verdicts.suspected).items()
    lines += [f"  {name}: {counted(count, 'time')}, first at step {first[name]}" for name, count in repeated]
    lines += [f"  {name}: {counted(count, 'time')}, silenced by allow" for name, count in verdicts.silenced.items()]
    if unchecked:
        lines.append(f"  not checked: {', '.join(unchecked)}")
    return lines


def port_warning() -> str:
    """A warning if other machines can reach the port of the process group's store; else empty."""
    reached = open_store() if dist.is_available() and dist.is_initialized() else ""
    return reached and f"  warning: {reached}"
