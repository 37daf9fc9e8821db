"""How something is changed in the trainer's own processes, launcher and ranks, and how it says that it happened."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from andon_falsify.nemesis.protocol import Launch, Nemesis, NotStruckError, Plant, Struck

if TYPE_CHECKING:
    from andon_falsify.nemesis.run import Run

PLANTS, GUARDS = "andon_falsify.nemesis.plants", "andon_falsify.nemesis.guards"
"""Modules of plants: of faults, and of what switches protections off."""
INLINE = ("run.backend=inline",)
"""All ranks in one process."""
VARIABLE = "ANDON_NEMESIS"
"""Holds what is planted, as JSON; the launcher's environment is that of its ranks."""


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


def wait_for_strike(run: Run) -> Struck:
    """Wait until a plant of `run` strikes. Raises `NotStruckError` where the run ends without."""
    try:
        run.wait_for(lambda: first_strike(run.scratch) is not None, "the planted fault happened")
    except NotStruckError:
        late = first_strike(run.scratch)
        if late is None:
            raise
        return late
    found = first_strike(run.scratch)
    assert found is not None
    return found


@dataclass(frozen=True, kw_only=True)
class Planted(Nemesis):
    """A fault inside a rank, with its own proof. off, off_settings: what switches its guard off."""

    plant: Plant
    workers: str = "2"
    settings: tuple[str, ...] = ()
    off: tuple[Plant, ...] = ()
    off_settings: tuple[str, ...] = ()

    def launch(self, *, guarded: bool) -> Launch:
        """The run with the plant in it."""
        settings, plants = ((), ()) if guarded else (self.off_settings, self.off)
        return Launch(self.workers, (*self.settings, *settings), (self.plant, *plants))

    def heal(self, *, guarded: bool) -> Launch:
        """All ranks in one process, with the bench's own settings and nothing planted: the bits are the same there."""
        return Launch(self.workers, INLINE)

    def inject(self, run: Run) -> Struck:
        """Wait until it strikes."""
        return wait_for_strike(run)
