"""The validation split: drawn once from the run's seed, and the same on every start of that run."""

from __future__ import annotations

import random

from andon.problems import InputError


def frozen_split(count: int, fraction: float, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Places 0 to `count` - 1 as (train, validation), both ascending, disjoint and together complete.

    Validation holds round(count * fraction) places, but at least 1 and at most count - 1; with `fraction` 0 none.
    Only `Random.random` is used, whose sequence Python keeps between versions.
    Raises `InputError` for a fraction outside [0, 1), and where no row would remain to train on.
    """
    if not 0.0 <= fraction < 1.0:
        raise InputError(f"the validation fraction must be at least 0 and less than 1 ({fraction})")
    if fraction == 0.0:
        return tuple(range(count)), ()
    if count < 2:
        raise InputError(f"a validation split needs at least 2 rows, there are {count}; set data.validation_fraction=0")
    draw = random.Random(f"andon validation split {seed}").random
    order = sorted((draw(), place) for place in range(count))
    held = min(max(round(count * fraction), 1), count - 1)
    validation = {place for _, place in order[:held]}
    return tuple(place for place in range(count) if place not in validation), tuple(sorted(validation))
