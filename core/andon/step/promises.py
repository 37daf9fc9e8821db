"""The contract of a phase, as icontract decorators on the phase's function.

A phase returns a `Report`: the record of all ranks' messages, without a verdict. `requires` and `ensures` name laws of
`andon_contracts.laws.update` and check the record against them. On CPUs the record is read and checked before the phase
returns. On GPUs a phase must not wait for its device: the record is read and checked a step later, and until then the
device's gate keeps a broken update from being applied.
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
    """The messages of all ranks at the end of a phase, and how to check them.

    table: int64, still on its device. record: builds the record from the table on the CPU. reader: calls its second
    argument with the table on the CPU, now or later. keep: receives the record after the contract held. look: compares
    differing values tensor by tensor, for the message of a violation; a collective. checked: false if contracts were
    suspended during the phase. result: the output of the phase, for the next one.
    """

    table: torch.Tensor
    record: Callable[[torch.Tensor], Record]
    reader: Reader = lambda table, then: then(table.cpu())
    keep: Callable[[Any], None] = lambda record: None
    look: Callable[[Record], Details] = lambda record: {}
    checked: bool = True
    result: Any = None


def requires(*laws: Law[Any]) -> Callable[[F], F]:
    """Preconditions: `laws` hold for the state at the start of the phase, as its record shows it."""
    return lambda phase: _with_condition(phase, require, laws, lambda record: record)


def ensures(*laws: Law[Any], of: Callable[[Any], Any] = lambda record: record) -> Callable[[F], F]:
    """Postconditions: `laws` hold for the record. Evaluated after all preconditions.

    of: the part of the record that the laws check. With several of these decorators, the one closest to the function is
    evaluated first. Both kinds raise the `Violation` of the first broken law.
    """
    return lambda phase: _with_condition(phase, ensure, laws, of)


def _with_condition(
    phase: F,
    contract: Callable[[Predicate], Callable[[Any], Any]],
    laws: tuple[Law[Any], ...],
    of: Callable[[Any], Any],
) -> F:
    # One condition for all laws of a decorator: icontract takes 5 microseconds per condition.
    def rows_hold(record: Record, look: Callable[[Record], Details]) -> bool:
        return Judgement(laws, of(record)).first is None

    def violation(record: Record, look: Callable[[Record], Details]) -> Violation:
        broken = next(law for law in laws if law.check(of(record)) is not None)
        finding = broken.check(of(replace(record, details=look(record))))
        assert finding is not None
        return Violation.of(broken.clause, finding)

    rows_hold.__name__ = ", ".join(law.id for law in laws)
    rows_hold.__andon_error__ = violation  # type: ignore[attr-defined]  # the attribute that `policy.clause` sets too
    run: Any = phase if hasattr(phase, "judge") else _judged(phase)
    run.judge = contract(rows_hold)(run.judge)
    return run  # type: ignore[no-any-return]


def _judged(phase: Callable[..., Report | None]) -> Callable[..., Report | None]:
    """Wrap `phase` to pass its record through `judge` when it is read. The decorators add conditions to `judge`."""

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
