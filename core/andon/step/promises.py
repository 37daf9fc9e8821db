"""The contract of a phase, as icontract decorators on the function that keeps it.

A phase returns a `Report`: a plain record of what all ranks sent, and no verdict. `requires` and `ensures` name rows of
the tables in `andon_contracts.laws.update`, and hold the record to them. On CPUs the record is read and judged before
the phase returns. On GPUs a phase must not wait for its device: the same conditions are evaluated when the record is
read, a step later, and until then the device's own gate keeps a broken update from being applied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from andon_contracts.laws.law import Details, Judgement, Law, Seen
from andon_contracts.policy import Predicate, ensure, require
from andon_contracts.violation import Violation

Record = Seen[Any]
Reader = Callable[[torch.Tensor, Callable[[torch.Tensor], None]], None]
F = TypeVar("F", bound=Callable[..., "Report | None"])


@dataclass(frozen=True)
class Report:
    """What all ranks send at the end of a phase.

    table: int64, still on its device. record: makes the record of the table on the CPU. reader: calls its second
    argument with the table on the CPU, now or later. keep: receives the record after the contract held. look: compares
    differing values tensor by tensor, for the message of a violation; a collective. checked: false if the phase ran
    while contracts were suspended. result: what the phase computed, for the next one.
    """

    table: torch.Tensor
    record: Callable[[torch.Tensor], Record]
    reader: Reader = lambda table, then: then(table.cpu())
    keep: Callable[[Any], None] = lambda record: None
    look: Callable[[Record], Details] = lambda record: {}
    checked: bool = True
    result: Any = None


def requires(*laws: Law[Any]) -> Callable[[F], F]:
    """Preconditions: the rows `laws` hold for the state with which the phase began, as its record shows it."""
    return lambda phase: _with_condition(phase, require, laws, lambda record: record)


def ensures(*laws: Law[Any], of: Callable[[Any], Any] = lambda record: record) -> Callable[[F], F]:
    """Postconditions: the rows `laws` hold for the record. Evaluated after all preconditions.

    of: the part of the record that the laws judge. If a phase has several of these decorators, the one closest to the
    function is evaluated first. Both raise the `Violation` of the first row that is broken.
    """
    return lambda phase: _with_condition(phase, ensure, laws, of)


def _with_condition(
    phase: F,
    contract: Callable[[Predicate], Callable[[Any], Any]],
    laws: tuple[Law[Any], ...],
    of: Callable[[Any], Any],
) -> F:
    # One condition for all rows of a decorator, because icontract takes 5 microseconds for each.
    def rows_hold(record: Record, look: Callable[[Record], Details]) -> bool:
        return Judgement(laws, of(record)).first is None

    def violation(record: Record, look: Callable[[Record], Details]) -> Violation:
        broken = next(law for law in laws if law.check(of(record)) is not None)
        finding = broken.check(of(replace(record, details=look(record))))
        assert finding is not None
        return Violation.of(broken.clause, finding)

    rows_hold.__name__ = ", ".join(law.id for law in laws)
    rows_hold.__andon_error__ = violation  # type: ignore[attr-defined]  # as `policy.clause` marks one of a single law
    run: Any = phase if hasattr(phase, "judge") else _judged(phase)
    run.judge = contract(rows_hold)(run.judge)
    return run  # type: ignore[no-any-return]


def _judged(phase: Callable[..., Report | None]) -> Callable[..., Report | None]:
    """`phase`, whose record goes through `judge` when it is read. The decorators put their conditions on `judge`."""

    @functools.wraps(phase)
    def run(*args: Any, **kwargs: Any) -> Report | None:
        report = phase(*args, **kwargs)
        if report is not None:
            record, look, keep, checked = report.record, report.look, report.keep, report.checked

            def read(values: torch.Tensor) -> None:
                seen = record(values)
                keep(run.judge(seen, look) if checked else seen)  # type: ignore[attr-defined]

            report.reader(report.table, read)
        return report

    run.judge = lambda record, look: record  # type: ignore[attr-defined]
    return run
