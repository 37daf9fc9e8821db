"""The arguments of `andon.watch`, and the checks of their values."""

from __future__ import annotations

import datetime
import difflib
import fnmatch
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, SupportsFloat, SupportsIndex, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from andon_contracts.clauses import CLAUSES
from andon_contracts.violation import Violation
from andon_contracts.watch.model_probe import ModelProbe

RAISING = ("raise", "strict")
Action = Literal["warn", "raise", "strict"] | Callable[[Violation], None]
Reference = Callable[[nn.Module, list[int]], tuple[torch.Tensor, int]]
Schedule = Callable[[int], float]
Plan = Callable[[int], Sequence[int]]


class Scaler(Protocol):
    """What a loss scaler must offer; `torch.amp.GradScaler` does."""

    def get_scale(self) -> float:
        """The scale that the next loss is multiplied with."""


@dataclass(frozen=True)
class Settings:
    """The arguments of `watch`, explained in its docstring, and three settings that are not arguments."""

    action: Action = "warn"
    allow: Mapping[str, str] = field(default_factory=dict)
    log: Callable[[dict[str, object]], None] | None = None
    group: dist.ProcessGroup | None = None
    folder: str | None = None
    ledger: str | os.PathLike[str] | None = None
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
    replicate: Any = None
    hard_stop: bool = False
    timeout: datetime.timedelta | float = datetime.timedelta(minutes=30)
    patience: datetime.timedelta | float = datetime.timedelta(seconds=30)
    verbose: bool = False
    budget: float | None = 0.01
    recording: bool = False  # whether rank 0 writes a ledger: then all ranks also read what only a ledger needs
    sketching: bool = False  # whether rank 0 writes a sketch of the first gradient beside the ledger
    by_command: bool = False  # whether the command `andon watch` opened the watch, so that messages name its options
    unknown: Iterable[str] = ()  # the names of arguments that do not exist

    def is_sampled(self, update: int) -> bool:
        """Whether costly checks run: counted from `start`, `update` is 1 to 4, a power of two or a multiple of 64."""
        made = update - self.start
        return made <= 4 or made & (made - 1) == 0 or made % 64 == 0

    def compared(self) -> dict[str, object]:
        """The arguments that must be equal on all ranks, so that all ranks make the same collectives, as plain values.
        A function counts as given or not. `log` and `folder` may differ.
        """
        functions = ("schedule", "scaler", "reference", "plan", "contents")
        compared: dict[str, object] = {name: getattr(self, name) is not None for name in functions}
        return compared | {
            "action": self.action if isinstance(self.action, str) else "callable",
            "allow": sorted(self.allow) if isinstance(self.allow, Mapping) else None,
            "trainable": self.trainable and list(self.trainable),
            "tied": list(self.tied),
            "clip": self.clip,
            "groups": sorted((name, sorted(values)) for name, values in self.groups.items()),
            **{name: getattr(self, name) for name in ("every", "rows", "start", "updates", "budget")},
        }

    def problems(self, subject: ModelProbe) -> list[str]:
        """All that is wrong with these settings for `subject`, in words."""
        problems = [f"there is no argument {name!r}{_hint(name, vars(self))}" for name in self.unknown]
        if self.action not in ("warn", *RAISING) and not callable(self.action):
            choices = "'warn', 'raise', 'strict' or a function that takes a violation"
            problems.append(f"action must be {choices}, not {self.action!r}")
        for name, least in (("every", 1), ("start", 0), ("rows", 1), ("updates", 0)):
            value = getattr(self, name)
            if _is_count(value):
                problems += [f"{name} must be at least {least}, not {value}"] * (value < least)
            elif value is not None or name in ("every", "start"):
                problems.append(f"{name} must be a whole number, not {type(value).__name__}")
        problems += subject.without_values()
        if _is_count(self.updates) and _is_count(self.start) and self.updates < self.start:
            problems.append(f"updates must be at least start ({self.start}), not {self.updates}")
        if self.clip is not None and not (isinstance(self.clip, SupportsFloat) and float(self.clip) > 0):
            problems.append(f"clip must be a number above 0, not {self.clip!r}")
        if not (self.budget is None or (isinstance(self.budget, float | int) and 0 < self.budget <= 1)):
            problems.append(f"budget must be a share of a step, such as 0.01, or None, not {self.budget!r}")
        if self.scaler is not None and not callable(getattr(self.scaler, "get_scale", None)):
            problems.append(f"scaler must have get_scale(), as torch.amp.GradScaler has; {self.scaler!r} has not")
        for name in ("schedule", "reference", "plan", "contents", "log"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                problems.append(f"{name} must be a function, not {type(value).__name__}")
        problems += allow_problems(self.allow)
        patterns = [*(self.trainable or ()), *self.groups, *(name for pair in self.tied for name in pair)]
        unknown = (name for name in patterns if not any(fnmatch.fnmatchcase(one, name) for one in subject.names))
        problems += [f"no parameter is named {name!r}" for name in unknown]
        if not subject.trainable:
            return [*problems, "the model has no trainable parameter"]
        what = "holds no parameter of this model: is it the optimizer of another one?"
        return problems + [f"optimizer {number} {what}" for number in subject.foreign_optimizers()]


def _hint(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def as_duration(name: str, value: datetime.timedelta | float) -> datetime.timedelta:
    """A duration from a `timedelta` or from seconds. Raises `ValueError` if `value` is neither, or not above 0."""
    with suppress(TypeError, ValueError, OverflowError):
        duration = value if isinstance(value, datetime.timedelta) else datetime.timedelta(seconds=value)
        if duration > datetime.timedelta(0):
            return duration
    raise ValueError(f"{name} must be seconds above 0, such as 30, or a datetime.timedelta, not {value!r}")


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, SupportsIndex) and not isinstance(value, bool | torch.Tensor)


def allow_problems(allow: object) -> list[str]:
    """All that is wrong with `allow`, in words: unknown clauses and empty reasons."""
    if not isinstance(allow, Mapping):
        return [f"allow must map a clause to a reason, not be a {type(allow).__name__}"]
    problems = []
    for name in allow:
        if name not in CLAUSES:
            problems.append(f"allow names {name!r}, which is not a clause{_hint(name, CLAUSES)}")
    return problems + [f"allow[{name!r}] must give a reason" for name, reason in allow.items() if not reason]
