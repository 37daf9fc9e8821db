"""Tools of others on the same programs, if they are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def open_audit(model: nn.Module, optimizer: torch.optim.Optimizer, found: Callable[[dict[str, object]], None]) -> None:
    """torch-audit as its page shows it, at every update. Findings of the grade INFO are advice and not counted."""
    from torch_audit import autopatch  # type: ignore[import-not-found]

    class Kept:
        """A reporter."""

        def report(self, result: Any) -> None:
            """Keep the findings."""
            for each in result.findings:
                if each.severity.name != "INFO":
                    found({"andon/clause": f"{each.rule_id} {each.message}"[:120]})

    autopatch(model, optimizer=optimizer, every_n_steps=1, reporters=[Kept()], suppress_internal_errors=True)
