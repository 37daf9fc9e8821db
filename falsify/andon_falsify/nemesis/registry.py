"""All nemeses by name. A module of this package with a `NEMESES` of its own is entered in `MODULES`, and is found."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from andon_falsify.nemesis.protocol import Nemesis, Tier

MODULES = ("signals", "launches", "starts", "figures", "rows", "storage", "traced", "damaged", "partitions", "network")
"""In the order of the table."""

UNPLAYED: Mapping[int, str] = {
    19: "no run meets an old one: keys of a store carry an identity of their own, and ports are the kernel's choice",
}
"""Rows of the catalogue (reliability, issue 5) that have no nemesis, and why."""


def nemeses(tier: Tier = "minutes", only: Sequence[str] = ()) -> tuple[Nemesis, ...]:
    """Those of a tier (minutes: all), or those whose name holds one of `only`. Raises `ValueError` for none."""
    modules = [importlib.import_module(f"andon_falsify.nemesis.{name}") for name in MODULES]
    found: list[Nemesis] = [each for module in modules for each in module.NEMESES]
    if only:
        chosen = [each for each in found if any(part in each.name for part in only)]
    else:
        chosen = [each for each in found if tier == "minutes" or each.tier == "seconds"]
    if not chosen:
        raise ValueError(f"no nemesis is called {' or '.join(only)}; there are: {', '.join(n.name for n in found)}")
    return tuple(chosen)
