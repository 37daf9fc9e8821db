"""Every fault of a data-parallel loop, a small change of a right loop: the catalogue for the watch and the falsifier.

`andon falsify --subject falsify.power.looped:make --case '{"fault": "F16 sum instead of mean", ...}'`.
"""

from __future__ import annotations

from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case

from . import ending, gradients, parameters, replicas, rows
from .fault import LoopFault
from .right import RIGHT_LOOPS

FAULTS: tuple[LoopFault, ...] = (
    *replicas.FAULTS,
    *gradients.FAULTS,
    *rows.FAULTS,
    *parameters.FAULTS,
    *ending.FAULTS,
)
_RIGHT = {kind.__name__: kind for kind in (PlainLoop, *RIGHT_LOOPS)}
_BY_NAME = {fault.name: fault for fault in FAULTS}


def named(name: str) -> LoopFault:
    """The fault with this name. Raises `KeyError`."""
    return _BY_NAME[name]


def make(case: Case) -> PlainLoop:
    """The loop that `case.fault` names: a fault or the class of a right loop, by default `PlainLoop`.

    Raises `KeyError` for another name.
    """
    name = case.fault or PlainLoop.__name__
    return (_RIGHT[name] if name in _RIGHT else named(name).loop)(case)
