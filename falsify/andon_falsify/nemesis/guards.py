"""Protections of the trainer that a control switches off, so that the judge can be seen to notice. Each is a plant.

Each notes when it acts: a control in which the trainer never came by what was planted proves nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

from andon_falsify.nemesis.planting import Planting


def moments_lost(plan: Planting) -> None:
    """A resume restores the weights and the place in the data, and begins with moments of zero."""
    import torch

    from andon.step.replica import Replica

    restore = Replica.restore

    def forgetful(self: Replica, weights: Any, state: Any, updates: int) -> None:
        kept = {name: value if name == "step" else torch.zeros_like(value) for name, value in state.items()}
        restore(self, weights, kept, updates)
        plan.acted()

    Replica.restore = forgetful  # type: ignore[assignment, method-assign]


def no_orphan_guard(plan: Planting) -> None:
    """Ranks do not end with their launcher or agent."""
    from andon.launch import orphan

    if "RANK" in os.environ:
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG, which may have been asked for already
    orphan._end_now = plan.acted
    orphan._ask_for_death_signal = lambda: None


def slow_steps(plan: Planting) -> None:
    """Every update takes half a second more, so that an orphan is still there when it is looked for."""
    from andon.training.trainer import Trainer

    advance = Trainer._advance

    def slow(self: Trainer, batch: Any) -> bool:
        plan.acted()
        time.sleep(0.5)
        return advance(self, batch)

    Trainer._advance = slow  # type: ignore[method-assign]


def deaf_ranks(plan: Planting) -> None:
    """Signals do to ranks what they do to any process that does not listen: they end it."""
    if "RANK" in os.environ:
        for signum in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, signal.SIG_DFL)
        plan.acted()


def no_reports(plan: Planting) -> None:
    """Ranks do not write down why they ended."""
    from andon.launch import rank

    rank._record = lambda report: plan.acted()


def lenient_reader(plan: Planting) -> None:
    """Rows that cannot be used are passed over in silence."""
    from andon.problems import ProblemList

    ProblemList.add = lambda self, where, what: plan.acted()  # type: ignore[method-assign]
