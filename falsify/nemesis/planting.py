"""Change the trainer inside its own processes, and record that the change took effect.

`python -m falsify.nemesis.planting train ...` is the `andon` command with plants in the launcher and in every rank.
Under torchrun each rank is such a command; otherwise the launcher starts ranks by `planted_rank`.
"""

from __future__ import annotations

import functools
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
"""Environment variable with the plants as JSON. Ranks inherit it from the launcher."""
ACTS = "acts.jsonl"
"""A file in a run's `scratch`: the plants that the trainer reached, and their strikes."""


class NotStruckError(RuntimeError):
    """The fault did not happen: the run ended first, or has no such process. Says nothing about the trainer."""


class ClosingError(NotStruckError):
    """This command must end: it starts nothing, waits for nothing, and undoes its faults."""


class UnavailableError(RuntimeError):
    """This machine lacks what a fault or a place needs: rights, a tool."""


@dataclass(frozen=True)
class Plant:
    """`function` ("module:name") is called with a `Planting` in the launcher and in every rank, before all else."""

    function: str
    options: tuple[tuple[str, Option], ...] = ()

    @classmethod
    def of(cls, function: str, **options: Option) -> Plant:
        """`Plant.of("module:function", rank=1, step=7)`; without a module, a function of `plants`."""
        return cls(function if ":" in function else f"{__package__}.plants:{function}", tuple(options.items()))


@dataclass(frozen=True)
class Struck:
    """A fault that happened: its `time.monotonic()`, the number of updates accepted before it, and the proof."""

    at: float
    step: int
    proof: str


@dataclass(frozen=True)
class Planting:
    """The argument of a plant: its options, the run's `scratch`, and its own name."""

    options: Mapping[str, Any]
    scratch: Path
    function: str = ""

    @property
    def here(self) -> bool:
        """True in the rank that the option `rank` names."""
        return os.environ.get("RANK") == str(self.options["rank"])

    def struck(self, step: int, proof: str) -> None:
        self._write(strike={"at": time.monotonic(), "step": step, "proof": proof})

    def acted(self) -> None:
        """Record, once per process, that the trainer reached the plant."""
        if (os.getpid(), self.function) not in _noted:
            _noted.add((os.getpid(), self.function))
            self._write()

    def _write(self, **fields: object) -> None:
        with (self.scratch / ACTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"function": self.function, **fields}) + "\n")


_noted: set[tuple[int, str]] = set()


def written(plants: Sequence[Plant], scratch: Path) -> str:
    listed = [{"function": plant.function, "options": dict(plant.options)} for plant in plants]
    return json.dumps({"plants": listed, "scratch": str(scratch)})


def _acts(scratch: Path) -> list[dict[str, Any]]:
    path = scratch / ACTS
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def idle(plants: Sequence[Plant], scratch: Path) -> tuple[str, ...]:
    """The functions of those plants that the trainer never reached."""
    acted = {act["function"] for act in _acts(scratch)}
    return tuple(plant.function for plant in plants if plant.function not in acted)


def first_strike(scratch: Path) -> Struck | None:
    return next((Struck(**act["strike"]) for act in _acts(scratch) if "strike" in act), None)


def plant_all() -> None:
    found = json.loads(os.environ.get(VARIABLE) or '{"plants": []}')
    for each in found["plants"]:
        module, _, name = each["function"].partition(":")
        plan = Planting(each["options"], Path(found["scratch"]), each["function"])
        getattr(importlib.import_module(module), name)(plan)


def planted_rank(payload: Mapping[str, Any]) -> int:
    """An entry of `andon.launch`: a rank with the plants."""
    from andon.training.start import train_rank

    plant_all()
    return train_rank(payload)


def main() -> None:
    import andon.cli.train
    from andon.cli.app import main as run_command

    entry = f"{__package__}.planting:{planted_rank.__name__}"
    andon.cli.train.run_training = functools.partial(andon.cli.train.run_training, entry=entry)
    plant_all()
    run_command()


if __name__ == "__main__":
    main()
