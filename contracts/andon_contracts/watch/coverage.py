"""What a watch can see here, said before it begins, and what it saw, said at the end."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from andon_contracts.legible import counted
from andon_contracts.liveness.open_store import open_store
from andon_contracts.watch.judging import Verdicts
from andon_contracts.watch.model_probe import ModelProbe, Several
from andon_contracts.watch.replicas import Replicas
from andon_contracts.watch.settings import Settings

State = Literal["live", "degraded", "not applicable", "not observable"]
_REPLICAS = ("replicas-agree", "gradients-agree", "optimizers-agree")
_BETWEEN = ("hyperparameters-agree", "modes-agree", "buffers-agree", "collectives-agree", "copies-agree")
_ALONE = (
    "parameters-kept",
    "finite",
    "gradient-fresh",
    "gradient-present",
    "update-applied",
    "precision-sufficient",
    "order-renewed",
    "training-mode",
    "clip-placed",
    "gradient-scale",
    "ranks-joined",
)


@dataclass(frozen=True)
class Cover:
    """Whether a clause is looked at here, and why not or not wholly."""

    state: State
    why: str = ""
    remedy: str = ""
    """What a user would add so that it is looked at."""

    @property
    def live(self) -> bool:
        """Whether the clause is evaluated at all."""
        return self.state in ("live", "degraded")


def coverage(
    subject: ModelProbe,
    optimizers: Sequence[torch.optim.Optimizer],
    settings: Settings,
    world: int,
    replicas: Replicas,
) -> dict[str, Cover]:
    """Each clause that a watch knows, with whether it is looked at here."""
    alone = Cover("not observable", "one process: there is nothing to compare with")
    found = dict.fromkeys(_REPLICAS + _BETWEEN + ("halt-together",), Cover("live") if world > 1 else alone)
    found |= dict.fromkeys(_ALONE, Cover("live"))
    found["base-frozen"] = Cover("live") if subject.frozen else Cover("not applicable", "no parameter is frozen")
    if world > 1:
        found |= _limits(subject, optimizers, replicas)
    if subject.unused_expected:
        why = "find_unused_parameters says that some have none: only an adapter wholly without one is reported"
        found["gradient-present"] = Cover("degraded", why)
    if subject.sharded:
        found["finite"] = Cover("degraded", "what the optimizer gets: the shards show no raw gradient")
        found |= dict.fromkeys(
            ("gradient-fresh", "gradient-scale"), Cover("not observable", "the shards show no raw gradient")
        )
    if settings.trainable is None:
        found["parameters-kept"] = Cover("degraded", "trainable= declares nothing: held to the set of the start only")
    found |= _declared(settings, world)
    if subject.sharded:
        dark = Cover("not observable", "each rank has only shards of the gradient")
        found |= {name: dark for name in ("gradient-law", "clip-once") if found[name].live}
    return found


def _limits(subject: ModelProbe, optimizers: Sequence[torch.optim.Optimizer], replicas: Replicas) -> dict[str, Cover]:
    found: dict[str, Cover] = {}
    if replicas.cut:
        why = f"between the {replicas.copies} replicas of each of {len(set(replicas.parts))} parts"
        found |= dict.fromkeys(_REPLICAS, Cover("live", why))
    elif subject.sharded:
        found |= dict.fromkeys(_REPLICAS, Cover("not applicable", "the parameters are sharded: no shard has a replica"))
    if subject.sharded:
        found["update-applied"] = Cover("degraded", "this rank's shards only")
    if not subject.reducers and isinstance(subject.inner, Several):
        found["buffers-agree"] = Cover("not observable", "several modules: no one forward pass after which to look")
    elif not subject.homes:
        found["buffers-agree"] = Cover("not applicable", "DDP was told not to share buffers: each rank has its own")
    elif not subject.buffers_by_name():
        found["buffers-agree"] = Cover("not applicable", "the model has no buffers")
    elif subject.begins_unseen:
        found["buffers-agree"] = Cover("not observable", "compiled code broadcasts them, and hooks in it do not run")
    if subject.reducers:
        found["collectives-agree"] = Cover("degraded", "DDP's own reductions run below Python")
    return found


def _declared(settings: Settings, world: int) -> dict[str, Cover]:
    def when(given: object, word: str) -> Cover:
        return Cover("live") if given else Cover("not observable", f"{word} was not given", word)

    return {
        "learning-rate-planned": when(settings.schedule, "schedule="),
        "groups-planned": when(settings.groups, "groups="),
        "scaler-agrees": when(settings.scaler if world > 1 else None, "scaler="),
        "clip-once": when(settings.clip, "clip="),
        "gradient-law": when(settings.reference, "reference="),
        "samples-once": Cover(
            "degraded" if settings.plan is None else "live",
            "of torch's data loaders and w.batch; no plan=: no row twice" * (settings.plan is None),
        ),
        "content-planned": Cover(
            "live" if settings.contents else "degraded",
            "" if settings.contents else "needs w.batch(content=); no contents=: held to what the same row was before",
        ),
        "updates-planned": when(settings.updates, "updates="),
        "loss-reported": Cover("live", "where w.loss tells one"),
        "randomness-declared": Cover("live", "where w.rng declares streams"),
        "evaluation-once": Cover("live", "where w.evaluated tells one"),
        "checkpoint-whole": Cover("live", "where w.saved and w.loaded tell one"),
    }


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
