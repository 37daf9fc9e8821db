"""Checks of a plan before training: notes to the user, and errors for files that would be too large. No torch."""

from __future__ import annotations

import json

from andon.config.schema import CLASSIFICATION, REGRESSION, Config
from andon.config.source import MOST_BYTES as MOST_SETTINGS
from andon.console.problems import ProblemList
from andon.metrics import confusion
from andon.step.plan import BatchPlan, Schedule
from andon.training.rows import Rows
from andon_contracts.record import MAX_LINE
from andon_contracts.untrusted import MOST_JSON

_FEW_UPDATES = 100
_CLASS = 250
"""The most bytes of a class's scores in a summary, without its name: four numbers, indented."""
_RANK = 300
"""The most bytes of one rank in a step's line, without its rows and micro-batches: digests and names."""
_REST = 1 << 16
"""The most bytes of everything else in a summary or in a step's line."""


def idleness(plan: BatchPlan, workers: int) -> str:
    """A note with the number of workers that would never train on a row, and why; empty if every worker has rows."""
    idle = plan.idle_ranks(workers)
    rows = min(plan.batch_size, len(plan.ids))
    unit = "row" if plan.updates is None else "pack"
    why = f"an update has {rows} {unit}{'s' * (rows != 1)} in {plan.micro_batches} micro-batches"
    return f"{idle} of {workers} workers have no row in any update: {why}" if idle else ""


def few_updates(plan: BatchPlan, config: Config) -> str:
    """A note if a run on a pretrained base has too few updates to learn much; else empty."""
    few = config.model.base is not None and config.training.max_steps is None and plan.total_steps < _FEW_UPDATES
    return f"note: {plan.total_steps} updates are few; for so few rows raise training.epochs" if few else ""


def learns_nothing(plan: BatchPlan, config: Config) -> str:
    """A warning if the run's only update is the last of its schedule, with the lowest learning rate; else empty."""
    rate, peak = Schedule(config, plan.total_steps).rate(1), config.optimizer.lr
    if plan.total_steps > 1 or rate >= peak:
        return ""
    return (
        f"warning: the run has one update, and its learning rate is {rate:g} (optimizer.lr is {peak:g}): the schedule "
        "ends at schedule.min_lr with the last update. Set training.epochs higher or training.batch_size lower, or "
        "schedule.type=constant for one update at the full rate"
    )


def require_records_fit(config: Config, rows: Rows, plan: BatchPlan, evaluated: int) -> None:
    """Raise `InputError` if the run's ledger lines, confusion matrix, summary or label names may exceed their limits.

    evaluated: the most rows of one evaluation. Sizes are worst cases.
    """
    problems = ProblemList()
    labels = rows.train.labels
    if rows.task == CLASSIFICATION:
        size = confusion.most_bytes(len(labels), evaluated)
        if size > confusion.MOST_BYTES:
            what = f"the confusion matrix of {evaluated} rows of {len(labels)} classes may take {size} bytes"
            fewer = "evaluate on fewer rows (training.eval_rows)"
            problems.add("data.eval", f"{what}, more than {confusion.MOST_BYTES}; {fewer}")
    if rows.task != REGRESSION:
        names = [len(json.dumps(label, ensure_ascii=False).encode("utf-8", "surrogatepass")) for label in labels]
        for file, size, most in (
            ("summary.json", 2 * sum(names) + _CLASS * len(names) + _REST, MOST_JSON),
            ("adapter/config.json", 2 * (sum(names) + len("    00000000: ,\n") * len(names)) + _REST, MOST_SETTINGS),
        ):
            if size > most:
                what = f"{len(names)} labels of {sum(names)} bytes in all may make {file} {size} bytes long"
                problems.add("data.train", f"{what}, more than {most}; shorten the labels, or train on fewer")
    count = min(plan.batch_size, len(plan.ids))
    digits = len(str(max(plan.ids, default=0))) + 1
    size = 2 * count * digits + plan.micro_batches * digits + config.run.workers * _RANK + _REST
    if size > MAX_LINE:
        what = f"the ledger's line of a step of {count} rows on {config.run.workers} workers may take {size} bytes"
        problems.add("training.batch_size", f"{what}, more than {MAX_LINE}; make the batch smaller")
    problems.raise_if_any()
