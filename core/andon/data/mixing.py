"""How often an epoch has the rows of each file: whole copies, and for a fraction a sample of rows, drawn once."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from andon.console.problems import InputError, Problem


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
        draw = random.Random(f"andon mix {seed} {place}").random  # whose sequence Python keeps between versions
        order = sorted((draw(), row) for row in rows)
        found += [row + copies * total for _, row in order[:rest]]
    return tuple(sorted(found))
