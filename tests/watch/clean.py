"""What a right loop is to a watch: its number of steps, how often a clause was evaluated, and that none complained."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from andon_contracts.violation import Violation
from andon_contracts.watch import Watch


@dataclass(frozen=True)
class Seen:
    evaluations: int
    violations: tuple[str, ...]
    suspicions: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """A right loop of so many steps.

    needs: the packages that it uses beside torch. weight: "light"; "heavy", where it loads large libraries; "slow",
    where it compiles for many seconds, and "many", where it is one of many of its family: both only the benchmark runs.
    """

    run: Callable[[int], Seen]
    needs: tuple[str, ...] = ()
    weight: Literal["light", "heavy", "slow", "many"] = "light"
    suspected: frozenset[str] = frozenset()
    """Clauses of which docs/watch-reference.md announces one suspicion, until the loop has shown what it is."""


def seen_by(*watches: Watch) -> Seen:
    found = [(each.clause in w._context.verdicts.counts, str(each)) for w in watches for each in w.findings]
    return Seen(
        sum(sum(w.evaluations.values()) for w in watches),
        tuple(said for certain, said in found if certain),
        tuple(said for certain, said in found if not certain),
    )


def ignore(_: Violation) -> None:
    """The watch itself remembers what it found."""


def path_of_all_ranks() -> Path:
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name, 0)
    return Path(str(name[0])) / "checkpoint.pt"
