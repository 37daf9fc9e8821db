"""Random choices from a seed that are the same on any machine and in any version of Python."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

_Item = TypeVar("_Item")


class Draw:
    """Random choices seeded by a name. Uses only `Random.random`, whose sequence Python promises to keep."""

    def __init__(self, name: str) -> None:
        self._random = random.Random(name).random

    def below(self, bound: int) -> int:
        """A number from 0 to `bound` - 1."""
        return int(self._random() * bound)

    def pick(self, items: Sequence[_Item]) -> _Item:
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[_Item]) -> list[_Item]:
        keyed = [(self._random(), place) for place in range(len(items))]
        return [items[place] for _, place in sorted(keyed)]
