"""All nemeses, in the order of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import disk, inside, network, rows, signals
from .language import Nemesis, Tier

UNPLAYED: Mapping[int, str] = {
    19: "no run meets an old one: keys of a store carry an identity of their own, and ports are the kernel's choice",
}
"""Rows of the catalogue (reliability, issue 5) without a nemesis, and the reason."""


def nemeses(tier: Tier = "minutes", only: Sequence[str] = ()) -> tuple[Nemesis, ...]:
    """The nemeses of a tier (minutes: all), or those with one of `only` in their names. Raises `ValueError` if none."""
    found = [each for module in (signals, inside, rows, disk, network) for each in module.NEMESES]
    if only:
        chosen = [each for each in found if any(part in each.name for part in only)]
    else:
        chosen = [each for each in found if tier == "minutes" or each.tier == "seconds"]
    if not chosen:
        raise ValueError(f"no nemesis is called {' or '.join(only)}; there are: {', '.join(n.name for n in found)}")
    return tuple(chosen)
