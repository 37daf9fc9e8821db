"""The smallest counterexample: a case is made smaller, one thing at a time, while the same claim stays falsified."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from andon_falsify.campaign.trial import RESUME, Trial
from andon_falsify.subjects.case import Case, make_rows

Falls = Callable[[Trial], bool]
"""Whether the claim, for the same reason, is falsified by this trial too."""


def shrink(
    trial: Trial, falls: Falls, limit_s: float, worlds: Collection[int] = (), accumulations: Collection[int] = ()
) -> Trial:
    """The smallest trial found in `limit_s` seconds; `trial` itself where none of its smaller ones falls.

    Greedy: the first smaller trial that still falls is taken, and made smaller in turn. `worlds` and `accumulations`
    are those that may be tried (none: any smaller one, of two ranks at least).
    """
    deadline = time.monotonic() + limit_s
    while (found := _first(trial, falls, deadline, worlds, accumulations)) is not None:
        trial = found
    return trial


def _first(
    trial: Trial, falls: Falls, deadline: float, worlds: Collection[int], accumulations: Collection[int]
) -> Trial | None:
    for smaller in candidates(trial, worlds, accumulations):
        if time.monotonic() >= deadline:
            return None
        if falls(smaller):
            return smaller
    return None


def candidates(trial: Trial, worlds: Collection[int] = (), accumulations: Collection[int] = ()) -> Iterator[Trial]:
    """Trials that are smaller than `trial` in one respect, the greatest steps first. Each is a trial by itself."""
    case = trial.case
    for layout in _layouts(case, worlds, accumulations):
        yield from _sound(trial, layout)
    for changes in (*_fewer_rows(case), *_shorter(case), *_plainer(case)):
        yield from _sound(trial, case.but(**changes))
    if trial.then_world > 1 and trial.then_world != case.world:
        yield replace(trial, then_world=case.world)


def _sound(trial: Trial, case: Case) -> Iterator[Trial]:
    """The trial with `case`, if that is still one of its kind."""
    updates = case.updates()
    if case.poison is not None and (case.poison.leaf >= case.micro_batches or case.poison.step > updates):
        return
    if trial.kind == RESUME and not (case.checkpoint_every or 0) < (case.stop_after or 0) < updates:
        return
    if case.batch_size < case.micro_batches or len(case.rows) < case.rows.classes:
        return
    if case != trial.case:
        yield replace(trial, case=case)


def _layouts(case: Case, worlds: Collection[int], accumulations: Collection[int]) -> Iterator[Case]:
    """Fewer ranks, then less accumulation, with micro-batches of as many rows and as many batches as before."""
    for world in sorted(set(worlds) or range(2, case.world)):
        if world < case.world:
            yield _laid_out(case, world, case.accumulation)
    for accumulation in sorted(set(accumulations) or range(1, case.accumulation)):
        if accumulation < case.accumulation:
            yield _laid_out(case, case.world, accumulation)


def _laid_out(case: Case, world: int, accumulation: int) -> Case:
    batch = case.local_batch * world * accumulation
    whole, rest = divmod(len(case.rows), case.batch_size)
    rows = max(whole * batch + min(rest, batch - 1), case.rows.classes)
    rows_of = _drawn(case, rows)
    return case.but(rows=rows_of, batch_size=batch, world=world, micro_batches=world * accumulation)


def _fewer_rows(case: Case) -> Iterator[dict[str, Any]]:
    whole, rest = divmod(len(case.rows), case.batch_size)
    sizes = [case.batch_size, case.batch_size + rest, (whole - 1) * case.batch_size + rest]
    sizes += [whole * case.batch_size + 1, whole * case.batch_size, rest, len(case.rows) - 1]
    for size in sorted({size for size in sizes if case.rows.classes <= size < len(case.rows)}):
        yield {"rows": _drawn(case, size)}
    for local in sorted({1, case.local_batch // 2, case.local_batch - 1}):
        if 0 < local < case.local_batch:
            batch = local * case.world * case.accumulation
            rows = max(whole * batch + min(rest, batch - 1), case.rows.classes)
            yield {"rows": _drawn(case, rows), "batch_size": batch}
            yield {"batch_size": batch}


def _shorter(case: Case) -> Iterator[dict[str, Any]]:
    most = case.updates()
    if case.epochs > 1:
        yield {"epochs": 1}
    for steps in sorted({1, most // 2, most - 1}):
        if 0 < steps < most:
            yield {"max_steps": steps}


def _plainer(case: Case) -> Iterator[dict[str, Any]]:
    """A smaller model, then fewer things switched on, then the first seeds."""
    if case.layers > 1:
        yield {"layers": 1}
    if case.hidden > 8:
        yield {"hidden": 8, "heads": 1, "inner": 8}
    if case.rank > 1:
        yield {"rank": 1}
    plain = {
        "dropout": 0.0,
        "class_weights": None,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "clip_norm": None,
        "optimizer": "sgd",
        "architecture": "decoder",
        "seed": 0,
    }
    for name, value in plain.items():
        if getattr(case, name) != value:
            yield {name: value}
    rows = make_rows(len(case.rows), classes=case.rows.classes)
    if case.rows != rows:
        yield {"rows": rows}


def _drawn(case: Case, count: int) -> Any:
    """`count` rows: the first that are drawn with the first seed, where their number changes."""
    return case.rows if count == len(case.rows) else make_rows(count, classes=case.rows.classes)
