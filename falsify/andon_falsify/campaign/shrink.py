"""The smallest counterexample: a case is made smaller in one respect at a time while the claim stays falsified."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from andon_falsify.campaign.trial import RESUME, Trial
from andon_falsify.subjects.case import Case, make_rows

_PLAIN = {
    "dropout": 0.0,
    "class_weights": None,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "clip_norm": None,
    "optimizer": "sgd",
    "architecture": "decoder",
    "seed": 0,
}


def shrink(
    trial: Trial,
    falls: Callable[[Trial], bool],
    limit_s: float,
    worlds: Collection[int] = (),
    accumulations: Collection[int] = (),
) -> Trial:
    """The smallest trial found in `limit_s` seconds; `trial` itself if none of its smaller ones falls.

    Greedy: the first smaller trial that falls is made smaller in turn. `worlds` and `accumulations` are those that may
    be tried (empty: any smaller one, of two ranks at least).
    """
    deadline = time.monotonic() + limit_s
    smaller = candidates(trial, worlds, accumulations)
    while time.monotonic() < deadline and (candidate := next(smaller, None)) is not None:
        if falls(candidate):
            trial, smaller = candidate, candidates(candidate, worlds, accumulations)
    return trial


def candidates(trial: Trial, worlds: Collection[int] = (), accumulations: Collection[int] = ()) -> Iterator[Trial]:
    """Trials of the same kind that are smaller than `trial` in one respect, the greatest steps first."""
    case = trial.case
    for smaller in (
        *_layouts(case, worlds, accumulations),
        *(case.but(**changes) for changes in (*_fewer_rows(case), *_shorter(case), *_plainer(case))),
    ):
        if smaller != case and _is_one_of_its_kind(replace(trial, case=smaller)):
            yield replace(trial, case=smaller)
    if trial.then_world > 1 and trial.then_world != case.world:
        yield replace(trial, then_world=case.world)


def _is_one_of_its_kind(trial: Trial) -> bool:
    case, updates = trial.case, trial.case.updates()
    if case.poison is not None and (case.poison.leaf >= case.micro_batches or case.poison.step > updates):
        return False
    if trial.kind == RESUME and not (case.checkpoint_every or 0) < (case.stop_after or 0) < updates:
        return False
    return case.batch_size >= case.micro_batches and len(case.rows) >= case.rows.classes


def _layouts(case: Case, worlds: Collection[int], accumulations: Collection[int]) -> Iterator[Case]:
    """Fewer ranks, then less accumulation, with as many rows in a micro-batch and as many batches as before."""
    smaller = [
        (world, case.accumulation) for world in sorted(set(worlds) or range(2, case.world)) if world < case.world
    ]
    smaller += [
        (case.world, accumulation)
        for accumulation in sorted(set(accumulations) or range(1, case.accumulation))
        if accumulation < case.accumulation
    ]
    for world, accumulation in smaller:
        batch = case.local_batch * world * accumulation
        rows = _first_rows(case, _as_many_batches(case, batch))
        yield case.but(rows=rows, batch_size=batch, world=world, micro_batches=world * accumulation)


def _as_many_batches(case: Case, batch: int) -> int:
    whole, rest = divmod(len(case.rows), case.batch_size)
    return max(whole * batch + min(rest, batch - 1), case.rows.classes)


def _fewer_rows(case: Case) -> Iterator[dict[str, Any]]:
    whole, rest = divmod(len(case.rows), case.batch_size)
    sizes = [case.batch_size, case.batch_size + rest, (whole - 1) * case.batch_size + rest]
    sizes += [whole * case.batch_size + 1, whole * case.batch_size, rest, len(case.rows) - 1]
    for size in sorted({size for size in sizes if case.rows.classes <= size < len(case.rows)}):
        yield {"rows": _first_rows(case, size)}
    for local in sorted({1, case.local_batch // 2, case.local_batch - 1}):
        if 0 < local < case.local_batch:
            batch = local * case.world * case.accumulation
            yield {"rows": _first_rows(case, _as_many_batches(case, batch)), "batch_size": batch}
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
    for name, value in _PLAIN.items():
        yield {name: value}
    yield {"rows": make_rows(len(case.rows), classes=case.rows.classes)}


def _first_rows(case: Case, count: int) -> Any:
    """`count` rows drawn with the first seed; the case's own if that is their number."""
    return case.rows if count == len(case.rows) else make_rows(count, classes=case.rows.classes)
