"""Random choices from a seed that are the same on any machine: the validation split, and the rows of an epoch."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import TypeVar

from andon.console.problems import InputError, Problem

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


def frozen_split(count: int, fraction: float, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split positions 0 to `count` - 1 into (train, validation), both ascending; a function of the arguments alone.

    Validation gets round(count * fraction) positions, at least 1 and at most count - 1; none if `fraction` is 0.
    Raises `InputError` for a fraction outside [0, 1), or if no row would remain to train on.
    """
    if not 0.0 <= fraction < 1.0:
        raise InputError(f"the validation fraction must be at least 0 and less than 1 ({fraction})")
    if fraction == 0.0:
        return tuple(range(count)), ()
    if count < 2:
        raise InputError(f"a validation split needs at least 2 rows, there are {count}; set data.validation_fraction=0")
    held = min(max(round(count * fraction), 1), count - 1)
    validation = {*Draw(f"andon validation split {seed}").shuffled(range(count))[:held]}
    return tuple(place for place in range(count) if place not in validation), tuple(sorted(validation))


def mixed(ids: Sequence[int], sizes: Sequence[int], weights: Sequence[float], seed: int) -> tuple[int, ...]:
    """The ids of an epoch, ascending: of each file its rows among `ids`, repeated by the file's weight.

    sizes: all rows of each file; the rows of all files together have the ids 0 to N - 1. Copy k of row r has the id
    r + k * N, so ids are unique, and are those of the rows if all weights are 1.

    n rows of weight w give n * w entries, rounded half up by the decimal digits of w: each row floor(w) times, and the
    rest is a sample of the rows that depends only on the seed and the file's position. Raises `InputError` for a file
    without an entry.
    """
    total, starts = sum(sizes), [0, *accumulate(sizes)]
    by_file: list[list[int]] = [[] for _ in sizes]
    for id_ in ids:
        by_file[bisect_right(starts, id_) - 1].append(id_)
    found: list[int] = []
    for place, (rows, weight) in enumerate(zip(by_file, weights, strict=True)):
        wanted = math.floor(len(rows) * Fraction(repr(weight)) + Fraction(1, 2))
        if rows and not wanted:
            what = f"{weight:g} leaves none of the {len(rows)} rows of that file to train on"
            raise InputError([Problem(f"data.train.{place}.weight", what)])
        copies, rest = divmod(wanted, max(len(rows), 1))
        found += [row + copy * total for copy in range(copies) for row in rows]
        sample = Draw(f"andon mix {seed} {place}").shuffled(sorted(rows))[:rest]
        found += [row + copies * total for row in sample]
    return tuple(sorted(found))
