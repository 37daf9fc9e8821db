"""Ledgers of a few steps, written record by record, so that what is looked for is known."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from andon.run.ledger import LedgerWriter
from andon_contracts.fields import Real
from andon_contracts.record import (
    Broken,
    End,
    Evaluation,
    Plan,
    RankPart,
    Record,
    Resume,
    Retraction,
    Saved,
    Start,
    Step,
    StepDigests,
)

FINGERPRINT = {"torch": "2.13.0", "cpu": "a", "machine": "x86_64"}
ROWS = 4
PLAN = Plan(rows=ROWS, batch_size=2, micro_batches=2, seed=3, epochs=1, steps=2)


def digest(number: int) -> str:
    return f"{number:016x}"


def start(**changes: object) -> Start:
    plain = Start(
        run="r",
        fingerprint=FINGERPRINT,
        identity="0" * 64,
        plan=PLAN,
        digests={"weights": digest(100)},
        world=2,
        backend="gloo",
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def step(number: int, ids: Sequence[int], weights: int | None = None, **changes: object) -> Step:
    """Update `number` on two rows, one on each of two ranks; `weights` replaces the digest of the weights."""
    held = digest(10 * number + 3 if weights is None else weights)
    digests = StepDigests(digest(10 * number + 1), digest(10 * number + 2), held, digest(10 * number + 4))
    ranks = tuple(
        RankPart(rank, (rank,), (row,), held, gradient=digests.gradient, optimizer=digests.optimizer)
        for rank, row in enumerate(ids)
    )
    plain = Step(
        step=number,
        epoch=0,
        position=2 * (number - 1),
        ids=tuple(ids),
        count=2,
        lr=Real.of(0.5),
        loss=Real.of(1.0 / number),
        grad_norm=Real.of(2.0),
        correct=1,
        world=2,
        backend="gloo",
        digests=digests,
        ranks=ranks,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def whole_run() -> list[Record]:
    return [
        start(),
        step(1, (2, 0)),
        Saved(1, "step-00000001", digest(7), best=True),
        step(2, (1, 3)),
        Evaluation(2, 0, 5, {"accuracy": Real.of(0.25)}),
        End(2, "finished", {"weights": digest(23)}),
    ]


def resumed_run(torn: int = 17) -> list[Record]:
    """The same run, cut short in step 2's line, and resumed after step 1."""
    cut = whole_run()[:4]
    again = Resume(1, "0" * 64, FINGERPRINT, {"weights": digest(13)}, 1, "inline", name="step-00000001", torn=torn)
    return [*cut, again, step(2, (1, 3)), End(2, "finished", {"weights": digest(23)})]


def retracted_run() -> list[Record]:
    """A run whose second step was taken back for a violation, and done again with other results."""
    before = [*whole_run()[:3], step(2, (1, 3), weights=99)]
    broken = Broken("base-frozen", 2, (1,), "w", "other weights", applied=True)
    again = Resume(1, "0" * 64, FINGERPRINT, {"weights": digest(13)}, 1, "inline", name="step-00000001")
    return [*before, broken, Retraction(1, 2, "base-frozen", "other weights"), again, *whole_run()[3:]]


def write(path: Path, records: Sequence[Record]) -> Path:
    with closing(LedgerWriter(path)) as ledger:
        for record in records:
            ledger.append(record)
    return path
