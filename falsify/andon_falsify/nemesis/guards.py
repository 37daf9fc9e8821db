"""Protections of the trainer that a control switches off, so that the judge can be seen to notice. Each is a plant."""

from __future__ import annotations

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

    Replica.restore = forgetful  # type: ignore[assignment, method-assign]
