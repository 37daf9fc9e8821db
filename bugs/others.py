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


def open_test(model: nn.Module, optimizer: torch.optim.Optimizer, found: Callable[[dict[str, object]], None]) -> None:
    """torchtest2's `check_model` on the first batch of the model inside the wrapper. It restores what it changes.

    The loss of a case is not known here, so that its own one is used. Failures count, and warnings do not.
    """
    from torchtest2 import check_model  # type: ignore[import-not-found]

    inner = getattr(model, "module", model)

    def check(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        handle.remove()
        for each in check_model(module, args or kwargs, optimizer=optimizer).failures:
            found({"andon/clause": f"{each.name}: {each.message}"[:120]})

    handle = inner.register_forward_pre_hook(check, with_kwargs=True)
