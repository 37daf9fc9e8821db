"""All faults of loops by name, and those of the catalogue that no run of a loop can show."""

from __future__ import annotations

from collections.abc import Mapping

from andon_falsify.faults.looped.arithmetic import FAULTS as ARITHMETIC
from andon_falsify.faults.looped.fault import LoopFault
from andon_falsify.faults.looped.parameters import FAULTS as PARAMETERS
from andon_falsify.faults.looped.precision import FAULTS as PRECISION
from andon_falsify.faults.looped.replicas import FAULTS as REPLICAS
from andon_falsify.faults.looped.reporting import FAULTS as REPORTING
from andon_falsify.faults.looped.resuming import FAULTS as RESUMING
from andon_falsify.faults.looped.right import RIGHT_LOOPS
from andon_falsify.faults.looped.rows import FAULTS as ROWS
from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case

FAULTS: tuple[LoopFault, ...] = (
    *REPLICAS,
    *ARITHMETIC,
    *PRECISION,
    *ROWS,
    *PARAMETERS,
    *RESUMING,
    *REPORTING,
)
"""Every fault, in the order of the matrix."""

NOT_SHOWN: Mapping[str, str] = {
    "F71": "whether two tensors are tied is a matter of the model that a loop brings, and a run with them untied is "
    "that of another model, of which every claim holds; `andon.watch(tied=...)` and our trainer's own checks see it",
}
"""By code, why no run of a loop shows it."""

RIGHT: Mapping[str, type[PlainLoop]] = {kind.__name__: kind for kind in (PlainLoop, *RIGHT_LOOPS)}
"""The right loops by the names of their classes."""
_BY_NAME = {fault.name: fault for fault in FAULTS}


def named(name: str) -> LoopFault:
    """The fault of that name. Raises `KeyError` for another."""
    return _BY_NAME[name]


def make(case: Case) -> PlainLoop:
    """The loop that `case.fault` names: a fault, or the class of a right loop; without one the plain right loop.

    Raises `KeyError` for another name.
    """
    name = case.fault or PlainLoop.__name__
    return (RIGHT[name] if name in RIGHT else named(name).loop)(case)
