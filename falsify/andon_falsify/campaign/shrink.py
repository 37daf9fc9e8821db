"""Searches for a smaller counterexample: reduces a case step by step while the claim stays falsified."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from andon_falsify.campaign.trial import RESUME, Trial
from andon_falsify.subjects.case import Case, Rows, make_rows

_PLAIN: dict[str, Any] = {
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
    for smaller in _smaller(case, worlds, accumulations):
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


def _smaller(case: Case, worlds: Collection[int], accumulations: Collection[int]) -> Iterator[Case]:
    """Fewer ranks, less accumulation, fewer rows and updates, a smaller model, less switched on, the first seeds."""
    classes, (whole, rest) = case.rows.classes, divmod(len(case.rows), case.batch_size)

    def first(count: int) -> Rows:
        return case.rows if count == len(case.rows) else make_rows(count, classes=classes)

    def as_many_batches(batch: int) -> Rows:
        return first(max(whole * batch + min(rest, batch - 1), classes))

    layouts = [(world, case.accumulation) for world in sorted(set(worlds) or range(2, case.world))]
    layouts += [(case.world, number) for number in sorted(set(accumulations) or range(1, case.accumulation))]
    for world, accumulation in layouts:
        if world < case.world or accumulation < case.accumulation:
            batch = case.local_batch * world * accumulation
            leaves = world * accumulation
            yield case.but(rows=as_many_batches(batch), batch_size=batch, world=world, micro_batches=leaves)
    sizes = {case.batch_size, case.batch_size + rest, (whole - 1) * case.batch_size + rest, rest, len(case.rows) - 1}
    sizes |= {whole * case.batch_size + 1, whole * case.batch_size}
    yield from (case.but(rows=first(size)) for size in sorted(sizes) if classes <= size < len(case.rows))
    for local in sorted({1, case.local_batch // 2, case.local_batch - 1}):
        if 0 < local < case.local_batch:
            batch = local * case.world * case.accumulation
            yield case.but(rows=as_many_batches(batch), batch_size=batch)
            yield case.but(batch_size=batch)
    most = case.updates()
    if case.epochs > 1:
        yield case.but(epochs=1)
    yield from (case.but(max_steps=steps) for steps in sorted({1, most // 2, most - 1}) if 0 < steps < most)
    if case.layers > 1:
        yield case.but(layers=1)
    if case.hidden > 8:
        yield case.but(hidden=8, heads=1, inner=8)
    if case.rank > 1:
        yield case.but(rank=1)
    yield from (case.but(**{name: value}) for name, value in _PLAIN.items())
    yield case.but(rows=make_rows(len(case.rows), classes=classes))
