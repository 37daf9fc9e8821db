"""What a user can say to a watch, checked before anything is hooked."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, SupportsFloat, SupportsIndex, TypeGuard

import torch
from torch import nn

from andon_contracts.clauses import CLAUSES
from andon_contracts.violation import Violation
from andon_contracts.watch.model_probe import ModelProbe, unknown_names
from andon_contracts.watch.values import text_digest

Action = Literal["warn", "raise"] | Callable[[Violation], None]
Reference = Callable[[nn.Module, Sequence[int]], tuple[torch.Tensor, int]]
"""From the model and the ids of a global batch to the sum of their losses and their number."""
Schedule = Callable[[int], float]
"""From the number of an update, 1 being the first, to its learning rate."""
Plan = Callable[[int], Sequence[int]]
"""From the number of an update to the ids of its global batch."""


_GIVEN = ("schedule", "scaler", "reference", "plan", "contents")


class Scaler(Protocol):
    """What a loss scaler must offer; `torch.amp.GradScaler` does."""

    def get_scale(self) -> float:
        """The scale that the next loss is multiplied with."""


@dataclass(frozen=True)
class Settings:
    """All that was said to `watch`; its docstring says what each means."""

    action: Action = "warn"
    allow: Mapping[str, str] = field(default_factory=dict)
    log: Callable[[dict[str, object]], None] | None = None
    folder: str | None = None
    trainable: Sequence[str] | None = None
    tied: Sequence[tuple[str, str]] = ()
    clip: float | None = None
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    schedule: Schedule | None = None
    scaler: Scaler | None = None
    reference: Reference | None = None
    every: int = 100
    plan: Plan | None = None
    rows: int | None = None
    contents: Callable[[Sequence[int]], Sequence[Any]] | None = None
    start: int = 0
    updates: int | None = None
    hard_stop: bool = False
    recording: bool = False
    """Whether rank 0 writes a ledger: all ranks then look at what only a ledger needs."""
    verbose: bool = False
    """Whether the opening lines list every clause."""
    by_command: bool = False
    """Whether the command `andon watch` asked for it, so that messages name its options."""

    def digests(self) -> dict[str, int]:
        """What must be the same on all ranks, so that they make the same collectives, by name; in [0, 2^62).

        Of functions it is whether they were given; `log` and `folder` are each rank's own affair.
        """
        given = {name: getattr(self, name) is not None for name in _GIVEN}
        shown = {
            "action": self.action if isinstance(self.action, str) else "callable",
            "allow": sorted(self.allow),
            "trainable": self.trainable and list(self.trainable),
            "tied": list(self.tied),
            "clip": self.clip,
            "groups": sorted((n, sorted(v)) for n, v in self.groups.items()),
            "every": self.every,
            "rows": self.rows,
            "start": self.start,
            "updates": self.updates,
        }
        return {name: text_digest(value) for name, value in (given | shown).items()}

    def problems(self, subject: ModelProbe) -> list[str]:
        """All that is wrong with what was said about `subject`, in words."""
        found: list[str] = []
        if self.action not in ("warn", "raise") and not callable(self.action):
            found.append(f"action must be 'warn', 'raise' or a function of a violation, not {self.action!r}")
        found += self._not_counts() + subject.without_values()
        if _is_count(self.every) and self.every < 1:
            found.append(f"every must be at least 1, not {self.every}")
        if _is_count(self.updates) and _is_count(self.start) and self.updates < self.start:
            found.append(f"updates must be at least start ({self.start}), not {self.updates}")
        if self.clip is not None and not (isinstance(self.clip, SupportsFloat) and float(self.clip) > 0):
            found.append(f"clip must be above 0, not {self.clip!r}")
        if self.scaler is not None and not callable(getattr(self.scaler, "get_scale", None)):
            found.append(f"scaler must have get_scale(), as torch.amp.GradScaler has; {self.scaler!r} has not")
        found += self._not_callable() + allow_problems(self.allow)
        named = [*(self.trainable or ()), *self.groups, *(name for pair in self.tied for name in pair)]
        found += [f"no parameter is named {name!r}" for name in unknown_names(named, subject.names)]
        if not subject.trainable:
            found.append("the model has no trainable parameter")
        else:
            found += [
                f"optimizer {number} holds no parameter of this model: is it the optimizer of another one?"
                for number in subject.strange_optimizers()
            ]
        return found

    def _not_counts(self) -> list[str]:
        """What must be a whole number and is none; what may be left out is None then."""
        counts = {"every": self.every, "start": self.start, "rows": self.rows, "updates": self.updates}
        return [
            f"{name} must be a whole number, not {type(given).__name__}"
            for name, given in counts.items()
            if not _is_count(given) and not (given is None and name in ("rows", "updates"))
        ]

    def _not_callable(self) -> list[str]:
        functions = {name: getattr(self, name) for name in ("schedule", "reference", "plan", "contents", "log")}
        return [
            f"{name} must be a function, not {type(given).__name__}"
            for name, given in functions.items()
            if given is not None and not callable(given)
        ]


def _is_count(given: object) -> TypeGuard[int]:
    return isinstance(given, SupportsIndex) and not isinstance(given, bool | torch.Tensor)


def allow_problems(allow: Mapping[str, str]) -> list[str]:
    """All that is wrong with `allow`, in words: names that are no clause, reasons that are none."""
    found = [_unknown_clause(name) for name in allow if name not in CLAUSES]
    return found + [f"allow[{n!r}] must give a reason" for n, reason in allow.items() if not reason]


def _unknown_clause(name: str) -> str:
    close = difflib.get_close_matches(name, CLAUSES, 1)
    return f"allow names {name!r}, which is no clause" + (f"; did you mean {close[0]!r}?" if close else "")
