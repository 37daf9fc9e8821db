"""How something is changed in the trainer's own processes, launcher and ranks, and how it says that it happened."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Option: TypeAlias = "bool | int | float | str | tuple[Option, ...] | None"
VARIABLE = "ANDON_NEMESIS"
"""Holds what is planted, as JSON; the launcher's environment is that of its ranks."""


@dataclass(frozen=True)
class Plant:
    """Something that is changed in the trainer's own processes: `function` ("module:name") is called as
    `function(plan: Planting)` in the launcher and in every rank, before anything of it runs."""

    function: str
    options: tuple[tuple[str, Option], ...] = ()

    @classmethod
    def of(cls, function: str, **options: Option) -> Plant:
        """`Plant.of("package.module:function", rank=1, step=7)`; without a module one of `plants`."""
        return cls(function if ":" in function else f"{__package__}.plants:{function}", tuple(options.items()))


@dataclass(frozen=True)
class Struck:
    """A fault that happened: when (`time.monotonic()`), after how many accepted updates, and what proves it."""

    at: float
    step: int
    proof: str


@dataclass(frozen=True)
class Planting:
    """What a plant is given: its options, where it says that it struck, and its own name ("module:function")."""

    options: Mapping[str, Any]
    proofs: Path
    function: str = ""

    @property
    def here(self) -> bool:
        """Whether this process is the rank that the option `rank` names."""
        return os.environ.get("RANK") == str(self.options["rank"])

    def struck(self, step: int, proof: str) -> None:
        """Note that the fault happens now: after so many updates, and what it did."""
        line = json.dumps({"at": time.monotonic(), "step": step, "proof": proof}) + "\n"
        with self.proofs.open("a", encoding="utf-8") as file:
            file.write(line)
        self.acted()

    def acted(self) -> None:
        """Note that what was planted is reached by the trainer, and does what it is for; once for each process."""
        if (os.getpid(), self.function) not in _noted:
            _noted.add((os.getpid(), self.function))
            with acts_in(self.proofs.parent).open("a", encoding="utf-8") as file:
                file.write(f"{self.function}\n")


_noted: set[tuple[int, str]] = set()


def written(plants: Sequence[Plant], scratch: Path) -> str:
    """The value of `VARIABLE` for a run with these plants."""
    return json.dumps(
        {
            "plants": [{"function": p.function, "options": dict(p.options)} for p in plants],
            "proofs": str(proofs_in(scratch)),
        }
    )


def proofs_in(scratch: Path) -> Path:
    """Where the plants of a run say that they struck."""
    return scratch / "struck.jsonl"


def acts_in(scratch: Path) -> Path:
    """Where the plants of a run say that they act."""
    return scratch / "acted"


def idle(plants: Sequence[Plant], scratch: Path) -> tuple[str, ...]:
    """Those of these plants, by function, that no process of the run said to act."""
    path = acts_in(scratch)
    acted = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return tuple(plant.function for plant in plants if plant.function not in acted)


def plant_all() -> None:
    """Plant in this process what `VARIABLE` says; nothing where it is not set."""
    found = json.loads(os.environ.get(VARIABLE) or '{"plants": []}')
    for each in found["plants"]:
        module, _, name = each["function"].partition(":")
        getattr(importlib.import_module(module), name)(
            Planting(each["options"], Path(found["proofs"]), each["function"])
        )


def first_strike(scratch: Path) -> Struck | None:
    """The first strike that a plant of this run noted; None while there is none."""
    path = proofs_in(scratch)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return Struck(**json.loads(lines[0])) if lines else None
