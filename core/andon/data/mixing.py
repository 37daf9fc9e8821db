"""How often the rows of each file stand in an epoch: whole copies, and of a fraction so many rows, drawn once."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from andon.console.problems import InputError, Problem


def mixed(ids: Sequence[int], sizes: Sequence[int], weights: Sequence[float], seed: int) -> tuple[int, ...]:
    """The ids of an epoch, ascending: of each file its rows among `ids`, as often as its weight says.

    sizes: the rows of each file, ids and others; files follow each other, so that together they have the ids 0 to
    N - 1. Copy k of row r has the id r + k * N: ids stay unique, and are those of the rows where all weights are 1.

    n rows of weight w give n * w of them, rounded to the nearest, halves up, by the decimal digits of w: each row as
    often as all can stand there, and those that stand there once more are drawn by the seed and the file's place
    alone. Raises `InputError` for a file of which no row would be left.
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
        draw = random.Random(f"andon mix {seed} {place}").random  # whose sequence Python keeps between versions
        order = sorted((draw(), row) for row in rows)
        found += [row + copies * total for _, row in order[:rest]]
    return tuple(sorted(found))
