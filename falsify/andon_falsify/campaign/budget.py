"""How much is tried: which claims, worlds and accumulations, how many cases of which kinds, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from andon_falsify.campaign.trial import HALT, LAW, MEMORY, RESUME


@dataclass(frozen=True)
class Flavour:
    """How a case is trained. ragged: the last batch of an epoch has fewer rows, and not equally many on each rank."""

    name: str
    settings: Mapping[str, Any]
    ragged: bool = True

    @property
    def remembers(self) -> bool:
        """Whether its optimizer keeps something of each update for the next."""
        return self.settings.get("optimizer") != "sgd" or bool(self.settings.get("momentum"))


_SGD = {"optimizer": "sgd", "clip_norm": None, "lr": 0.05, "weight_decay": 0.0}
_EVEN = Flavour("SGD, no clipping, even batches", _SGD, ragged=False)
_RAGGED = Flavour("SGD, no clipping, ragged", _SGD)
_ADAMW = Flavour("AdamW, clipped, ragged", {"optimizer": "adamw", "clip_norm": 0.5, "lr": 1e-2, "weight_decay": 0.01})
_MOMENTUM = Flavour("SGD with momentum, encoder", {**_SGD, "momentum": 0.9, "lr": 0.02, "architecture": "encoder"})
_EVERY_WEIGHT = Flavour("AdamW, every weight", {"rank": 0, "lr": 1e-3, "clip_norm": None, "weight_decay": 0.01})
_WEIGHTED = Flavour("SGD, class weights, two layers", {**_SGD, "class_weights": (0.5, 1.0, 2.0), "layers": 2})
_AT_THE_LIMIT = Flavour("SGD, norms on both sides of the clip, ragged", {**_SGD, "clip_norm": 1.3})
"""Such gradients have norms of 0.7 to 3.5: one that is scaled UP to the limit shows."""


@dataclass(frozen=True)
class Budget:
    """A size of campaign.

    kinds: of trials; claims that none of them judges are not selected. draws: cases for each layout and flavour.
    deadline_s: what one run of a subject may take. patience: runs out of that time at one world size, after which no
    more is tried there. shrink_s: seconds that the search for smaller counterexamples may take, for all claims.
    """

    name: str
    kinds: tuple[str, ...]
    worlds: tuple[int, ...]
    accumulations: tuple[int, ...]
    flavours: tuple[Flavour, ...]
    draws: int
    deadline_s: float
    shrink_s: float
    patience: int = 2


BUDGETS: Mapping[str, Budget] = {
    budget.name: budget
    for budget in (
        Budget("quick", (LAW, HALT, RESUME), (2, 3), (1, 2), (_EVEN, _RAGGED, _ADAMW), 1, 60.0, 30.0),
        Budget(
            "standard",
            (LAW, HALT, RESUME, MEMORY),
            (2, 3, 4),
            (1, 2, 3),
            (_EVEN, _RAGGED, _ADAMW, _MOMENTUM, _EVERY_WEIGHT, _WEIGHTED, _AT_THE_LIMIT),
            1,
            90.0,
            120.0,
        ),
        Budget(
            "deep",
            (LAW, HALT, RESUME, MEMORY),
            (1, 2, 3, 4),
            (1, 2, 3),
            (_EVEN, _RAGGED, _ADAMW, _MOMENTUM, _EVERY_WEIGHT, _WEIGHTED, _AT_THE_LIMIT),
            8,
            180.0,
            600.0,
        ),
    )
}
"""By name, smallest first."""
