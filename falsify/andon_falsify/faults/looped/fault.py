"""What a fault of a foreign loop is, and the cases that show one."""

from __future__ import annotations

from dataclasses import dataclass

from andon_falsify.faults.looped.right import RIGHT_LOOPS
from andon_falsify.loops.task import loop_case
from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case, make_rows

SGD = loop_case(
    rows=make_rows(13), batch_size=8, micro_batches=4, optimizer="sgd", lr=0.05, clip_norm=None, weight_decay=0.0
)
"""Batches of 8 and 5 rows, twice: on 2 ranks x 2 micro-batches of 2 rows, of which the last ones are 2, 1 and 2.

Without clipping and moments, which hide scale.
"""
ADAMW = loop_case(rows=make_rows(13), batch_size=8, micro_batches=4)
"""The same with AdamW, clipped."""


@dataclass(frozen=True)
class LoopFault:
    """A right loop with one thing wrong.

    code: of the catalogue that docs/loop-faults.md tells of. loop: the loop that has it; the class that it changes is
    the right one. claim: what must fall by it. says: a regular expression that a counterexample of that claim must
    match, so that it falls for the right reason. case: what is trained.
    """

    code: str
    what: str
    loop: type[PlainLoop]
    claim: str
    says: str
    case: Case = SGD

    @property
    def name(self) -> str:
        """As `Case.fault` names it."""
        return f"{self.code} {self.what}"

    @property
    def right(self) -> type[PlainLoop]:
        """The loop without it."""
        return next(kind for kind in self.loop.__mro__[1:] if kind in (PlainLoop, *RIGHT_LOOPS))


def on_both(code: str, what: str, loop: type[PlainLoop], claim: str, says: str) -> tuple[LoopFault, LoopFault]:
    """The same fault with SGD, and with AdamW and clipping, where the weights hardly show a wrong scale."""
    return (
        LoopFault(code, what, loop, claim, says),
        LoopFault(code, f"{what}, AdamW clipped", loop, claim, says, ADAMW),
    )
