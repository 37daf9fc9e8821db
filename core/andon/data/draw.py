"""Seeded random choices that are the same on any machine: the validation split and the rows of an epoch."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import TypeVar

from andon.console.problems import InputError

_Item = TypeVar("_Item")


class Draw:
    """Random choices seeded by `name`. Uses only `Random.random`, whose sequence is stable across Python versions."""

    def __init__(self, name: str) -> None:
        self._random = random.Random(name).random

    def below(self, bound: int) -> int:
        """An integer from 0 to `bound` - 1."""
        return int(self._random() * bound)

    def pick(self, items: Sequence[_Item]) -> _Item:
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[_Item]) -> list[_Item]:
        keyed = [(self._random(), place) for place in range(len(items))]
        return [items[place] for _, place in sorted(keyed)]


def frozen_split(count: int, fraction: float, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split positions 0 to `count` - 1 into (train, validation), both ascending. Depends only on the arguments.

    Validation gets round(count * fraction) positions, at least 1 and at most count - 1; none if `fraction` is 0.
    Raises `InputError` for a fraction outside [0, 1), and for a positive fraction of fewer than 2 rows.
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
    """The ids of an epoch, ascending: the rows `ids`, repeated by the weight of their file.

    sizes: the number of rows of each file; together the files have the row ids 0 to N - 1. Copy k of row r has the id
    r + k * N, so ids are unique. With all weights 1, the result is `ids`.

    n rows of weight w give m = n * w entries (w as its exact decimal value, m rounded half up): each row m // n times,
    and m % n rows, drawn by the seed and the file's position, once more. Raises `InputError` if a file's rows give no
    entry.
    """
    total, starts = sum(sizes), [0, *accumulate(sizes)]
    by_file: list[list[int]] = [[] for _ in sizes]
    for id_ in ids:
        by_file[bisect_right(starts, id_) - 1].append(id_)
    entries: list[int] = []
    for place, (rows, weight) in enumerate(zip(by_file, weights, strict=True)):
        wanted = math.floor(len(rows) * Fraction(repr(weight)) + Fraction(1, 2))
        if rows and not wanted:
            what = f"{weight:g} leaves none of the {len(rows)} rows of that file to train on"
            raise InputError.at(f"data.train.{place}.weight", what)
        copies, rest = divmod(wanted, max(len(rows), 1))
        entries += [row + copy * total for copy in range(copies) for row in rows]
        sample = Draw(f"andon mix {seed} {place}").shuffled(sorted(rows))[:rest]
        entries += [row + copies * total for row in sample]
    return tuple(sorted(entries))
