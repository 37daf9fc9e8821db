"""What a fault of a foreign loop is: its loop, what a watch inside finds of it, and what a claim outside says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from andon_falsify.loops.task import loop_case
from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case, make_rows

from .right import RIGHT_LOOPS

SGD = loop_case(
    rows=make_rows(13), batch_size=8, micro_batches=4, optimizer="sgd", lr=0.05, clip_norm=None, weight_decay=0.0
)
"""Batches of 8 and 5 rows, twice: on 2 ranks x 2 micro-batches of 2 rows, of which the last ones are 2, 1 and 2.

Without clipping and moments, which hide scale.
"""
ADAMW = loop_case(rows=make_rows(13), batch_size=8, micro_batches=4)
"""The same with AdamW, clipped."""
WATCHED = loop_case(rows=make_rows(37), batch_size=8, micro_batches=4, max_steps=6, clip_norm=0.05)
"""Six updates with AdamW, clipped, on 2 ranks x 2 micro-batches; the fifth has 5 rows and ends the epoch."""


@dataclass(frozen=True)
class Inside:
    """What `andon.watch` finds of a fault.

    clause: what must name it, at the update `by` at the latest (0: at the start). lines: what the loop tells its watch
    beside the one line `andon.watch(model, optimizer)`: names of arguments and of calls. at: the update from which it
    acts, where that is another than outside. resumed: after which update all is saved, lost, and loaded again.
    alone: the clause by which the one line sees it without these lines; "" where it does not. alone_by: the update at
    the latest, where that is later than `by`.
    """

    clause: str
    by: int
    lines: tuple[str, ...] = ()
    case: Case = WATCHED
    at: int | None = None
    resumed: int | None = None
    alone: str = ""
    alone_by: int = 0


@dataclass(frozen=True)
class Outside:
    """What is judged of a fault from outside.

    claim: what must fall by it. reason: a regular expression that the text of a counterexample must match. case: what
    is trained.
    """

    claim: str
    reason: str
    case: Case = SGD


@dataclass(frozen=True)
class LoopFault:
    """A right loop with one thing wrong, declared once for whoever is to notice it.

    code: of the catalogue in docs/watch-faults.md and docs/loop-faults.md. loop: the loop that has it; the class that
    it changes is the right one. inside and outside: what must catch it there, or why nothing there can.
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
        """The loop without it."""
        return next(kind for kind in self.loop.__mro__[1:] if kind in (PlainLoop, *RIGHT_LOOPS))


def changed(
    right: type[PlainLoop] = PlainLoop,
    *,
    at: int = 2,
    made: Callable[[Any], object] = lambda loop: None,
    **methods: Callable[..., Any],
) -> type[PlainLoop]:
    """The loop `right` with one thing wrong.

    A method that is named calls change(loop, inner, *arguments) instead; `inner` is that of the right loop. made(loop)
    runs after the right loop was made. at: the update at which the fault acts; `loop.due` says whether it is this one.
    """

    def start(self: PlainLoop, case: Case) -> None:
        right.__init__(self, case)
        made(self)

    def around(inner: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *arguments: change(self, partial(inner, self), *arguments)

    wrong = {name: around(getattr(right, name), change) for name, change in methods.items()}
    due = property(lambda self: self.done + 1 == self.at)
    return type(right.__name__, (right,), {"__init__": start, "at": at, "due": due, **wrong})
