"""What two updates have alike that are one update: the one list of it, for runs elsewhere and runs that were taken up.

Who promises bits is held to `bits`, who promises no more than numbers to `NUMBERS`, but for rounding. Whoever leaves
something out says so where he compares.
"""

from __future__ import annotations

from collections.abc import Mapping

from andon_falsify.history import StepEvent

NUMBERS: Mapping[str, str] = {
    "lr": "the learning rate",
    "grad_norm": "the norm of the reduced gradient",
    "loss": "the loss that is told",
    "weights_norm": "the norm of the weights after the update",
}
"""Fields of an update in words. A gradient of another scale explains the loss that differs too."""
DIGESTS = ("gradient", "weights", "optimizer")
"""What an update comes to, in causal order."""
GIVEN = frozenset({"rows", "learning rate", "content"})
"""What an update is fed: where it differs it is the cause, and alone it proves nothing."""


def bits(event: StepEvent) -> dict[str, str]:
    """What must be equal to the bit, in causal order; what was not recorded is absent."""
    gradient, weights, optimizer = map(event.digests.get, DIGESTS)
    found = {
        "rows": " ".join(map(str, event.ids)) or None,
        "content": event.digests.get("content"),
        "loss": event.loss.hex if event.loss else None,
        "gradient": gradient,
        "grad_norm": event.grad_norm.hex if event.grad_norm else None,
        "learning rate": event.lr.hex if event.lr else None,
        "weights": weights,
        "optimizer": optimizer,
    }
    return {name: value for name, value in found.items() if value is not None}
