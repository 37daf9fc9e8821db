"""The search for bugs in a data-parallel trainer: subjects, campaigns, claims, a reference, and tests that ship.

What the author of a subject needs is importable from here and loaded on first use. `claims`, `history`, `verdict`
and `reference` import neither the trainer nor its contracts.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from andon_falsify.loops.protocol import Loop as Loop
    from andon_falsify.loops.protocol import Told as Told
    from andon_falsify.loops.task import collate as collate
    from andon_falsify.loops.task import dataset as dataset
    from andon_falsify.loops.task import model as model
    from andon_falsify.loops.task import optimizer as optimizer
    from andon_falsify.subjects.case import Case as Case

_HOME = {
    "Case": "andon_falsify.subjects.case",
    "Loop": "andon_falsify.loops.protocol",
    "Told": "andon_falsify.loops.protocol",
    "collate": "andon_falsify.loops.task",
    "dataset": "andon_falsify.loops.task",
    "model": "andon_falsify.loops.task",
    "optimizer": "andon_falsify.loops.task",
}

__all__ = sorted(_HOME)
NO_NUMPY = "ignore:Failed to initialize NumPy"
"""torch warns of a missing NumPy, which the extra `judge` does not install and nothing here uses."""
warnings.filterwarnings("ignore", NO_NUMPY.partition(":")[2])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        msg = f"module 'andon_falsify' has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
