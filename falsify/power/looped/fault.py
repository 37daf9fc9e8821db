"""A fault of a loop: the right loop that it changes, what a watch inside finds, and which claim falls outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from andon_falsify.loops.task import loop_case
from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case, make_rows

from .right import RIGHT_LOOPS

SGD = loop_case(
    rows=make_rows(13), batch_size=8, micro_batches=4, optimizer="sgd", lr=0.05, clip_norm=None, weight_decay=0.0
)
"""Batches of 8 and 5 rows, twice: on 2 ranks x 2 micro-batches of 2 rows. The short batch has 2, 1 and 2 rows.

Without clipping and moments, because they hide scale.
"""
ADAMW = loop_case(rows=make_rows(13), batch_size=8, micro_batches=4)
"""The same with AdamW, clipped."""
WATCHED = loop_case(rows=make_rows(37), batch_size=8, micro_batches=4, max_steps=6, clip_norm=0.05)
"""Six updates with AdamW, clipped, on 2 ranks x 2 micro-batches; the fifth has 5 rows and ends the epoch."""


@dataclass(frozen=True)
class Inside:
    """What `andon.watch` finds of a fault.

    clause: must name it, at the update `by` at the latest (0: at the start). lines: what the loop reports to its watch
    beside the one line `andon.watch(model, optimizer)`: names of arguments and of calls. at: the first update with the
    fault, if it is another than outside. resumed: the update after which all is saved, lost, and loaded again.
    alone: the clause by which the one line sees it without these lines, "" if it does not; at the update `alone_by` at
    the latest, if that is later than `by`. says: a pattern of its line in the log, at a resume or at the close.
    continued: another process with the same ledger continues from the save after this update. The first process makes
    one update more. With other lines this is how the one line sees the fault alone.
    """

    clause: str
    by: int
    lines: tuple[str, ...] = ()
    case: Case = WATCHED
    at: int | None = None
    resumed: int | None = None
    alone: str = ""
    alone_by: int = 0
    says: str = ""
    continued: int | None = None


@dataclass(frozen=True)
class Outside:
    """The claim that must fall on `case`, with a counterexample whose text matches the regular expression `reason`."""

    claim: str
    reason: str
    case: Case = SGD


@dataclass(frozen=True)
class LoopFault:
    """A right loop with one thing wrong.

    code: of the catalogue. loop: has the fault; its base class is the
    right loop. inside and outside: what must see it there, or why nothing there can.
    """

    code: str
    what: str
    loop: type[PlainLoop]
    inside: Inside | str
    outside: Outside | str

    @property
    def name(self) -> str:
        """As `Case.fault` names it."""
        return f"{self.code} {self.what}"

    @property
    def right(self) -> type[PlainLoop]:
        """The loop without the fault."""
        return next(kind for kind in self.loop.__mro__[1:] if kind in (PlainLoop, *RIGHT_LOOPS))


def changed(
    right: type[PlainLoop] = PlainLoop,
    *,
    at: int = 2,
    made: Callable[[Any], object] = lambda loop: None,
    **methods: Callable[..., Any],
) -> type[PlainLoop]:
    """The loop `right` with one thing wrong.

    Each named method calls change(loop, inner, *arguments) instead; `inner` is the right loop's own method. made(loop)
    runs after the right loop was made. at: the update with the fault; `loop.due` says whether it is the next one.
    """

    def start(self: PlainLoop, case: Case) -> None:
        right.__init__(self, case)
        made(self)

    def around(inner: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *arguments: change(self, partial(inner, self), *arguments)

    wrong = {name: around(getattr(right, name), change) for name, change in methods.items()}
    due = property(lambda self: self.done + 1 == self.at)
    return type(right.__name__, (right,), {"__init__": start, "at": at, "due": due, **wrong})


def disturbed(
    act: Callable[[Any], object], right: type[PlainLoop] = PlainLoop, *, at: int = 2, on: int | None = None
) -> type[PlainLoop]:
    """The loop `right`, with act(loop) before the update `at`. on: the only rank that does this; None: every rank."""

    def update(loop: Any, inner: Callable[..., Tensor], batch: list[int]) -> Tensor:
        if loop.due and on in (None, dist.get_rank()):
            act(loop)
        return inner(batch)

    return changed(right, at=at, _update=update)
