"""When the ranks of a loop must agree: before each update, after it, or where the loop synchronises its weights.

If DDP, FSDP2 or collectives of the loop were seen to reduce, the ranks must agree before the update. Otherwise they
must agree after it: an optimizer may reduce inside its `step`. If nothing was seen to reduce and weights differ, the
loop may average them later, as local SGD does: a suspicion until they agree again, and at the close a violation.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from andon_contracts.laws.law import Seen

_SEVERAL = 2
"""After so many updates that left equal weights, weights that differ are a fault, even if nothing seems to reduce."""
_GAPS, _SLACK = 4, 16
"""Weights that agree now and then are overdue after four times the longest time apart, and sixteen updates."""
_OF_GRADIENTS = frozenset({"gradients-agree"})
_OF_STATES = frozenset({"optimizers-agree", "buffers-agree"})
_OF_WEIGHTS = frozenset({"replicas-agree"})


class Reducer(Enum):
    """Whether anything was seen to reduce the gradients of an update."""

    UNKNOWN = 0
    KNOWN = 1
    LEFT_OUT = 2  # a wrapper that reduces was told not to, or has a communication hook of the loop's


class State(Enum):
    """How the ranks' weights are."""

    TOGETHER = "equal after every update, as far as the loop is known"
    APART = "different for the first time: a fault, unless the loop averages them later"
    LOCAL = "different between the updates at which the loop averages them"


class Synchrony:
    """How the ranks of one optimizer agree, by its updates so far; the same on all ranks.

    since: the update after which the weights parted last. met: how often they agreed again. longest: the most updates
    after which they did. known: in the window at hand, the ranks must agree before the update.
    """

    def __init__(self) -> None:
        self.state = State.TOGETHER
        self.since = self.met = self.longest = 0
        self.known = True
        self._reduced_before = self._left_out = self._states_equal = False
        self._agreed = self._alike = self._unlike = self._written_apart = 0
        self._left: Sequence[int] = ()

    def before(self, seen: Seen[object]) -> frozenset[str]:
        """The clauses that do not apply before this update."""
        how = {Reducer(value) for value in seen.column("reduces")}
        seen_to = len(seen.said) == 1 or Reducer.KNOWN in how
        alike = "gradient" not in seen.differing
        self._left_out = Reducer.LEFT_OUT in how or (self._reduced_before and not seen_to)
        self._reduced_before |= seen_to
        # If the gradients agreed in every update so far, something reduces them before it.
        learned = self._alike > 0 and not (self._unlike or self._left_out)
        self._alike += alike and any(seen.column("norm"))
        self._unlike += not alike
        self.known = seen_to or alike or learned
        self._left = seen.column("weights")
        if self.state is State.TOGETHER:
            return frozenset() if self.known else _OF_GRADIENTS
        if "weights" not in seen.differing:
            self._meet(seen.step - 1)
        elif self.state is State.APART and self.known:
            # A loop that averages weights does not reduce gradients as well: these weights must agree all the time.
            self.state = State.TOGETHER
            return frozenset()
        elif all(seen.column("written")):
            if self.state is State.LOCAL and not self._written_apart:
                return _OF_GRADIENTS | _OF_STATES
            self._written_apart += self.state is State.APART
        return _OF_GRADIENTS | _OF_STATES | _OF_WEIGHTS

    def after(self, seen: Seen[object]) -> frozenset[str]:
        """The clauses that do not apply after this update. `parted` says whether it is a suspicion instead."""
        equal = "weights" not in seen.differing
        if self.state is not State.TOGETHER:
            if equal:
                self._meet(seen.step)
            return frozenset() if self.overdue(seen.step) else _OF_STATES | _OF_WEIGHTS
        if equal:
            # An update that moves nothing, as the first of a warm-up, shows nothing.
            self._agreed += seen.column("weights") != self._left
            # Equal weights: optimizers that never kept the same each have a part of the states, as sharded ones do.
            self._states_equal |= "optimizer" not in seen.differing
            apart = "optimizer" in seen.differing and "updates" not in seen.differing
            return _OF_STATES if apart and not self._states_equal else frozenset()
        if self.known or (self._agreed >= _SEVERAL and not self._left_out):
            return frozenset()
        self.state, self.since = State.APART, seen.step
        return _OF_STATES | _OF_WEIGHTS

    def parted(self, step: int) -> bool:
        """Whether the weights parted just after update `step`: a fault, or local SGD."""
        return self.state is State.APART and self.since == step

    def overdue(self, step: int) -> bool:
        """Whether weights that a loop averages now and then have been apart for far longer than ever before."""
        return self.state is State.LOCAL and step - self.since > _GAPS * self.longest + _SLACK

    @property
    def watchful(self) -> bool:
        """Whether the weights must be read before every update, even if their versions did not change."""
        return self.state is not State.TOGETHER

    def _meet(self, step: int) -> None:
        self.longest = max(self.longest, step - self.since + 1)
        self.met += 1
        self.state, self.since = State.LOCAL, step + 1

    def closing_line(self) -> str:
        """The closing line of a loop that averages its weights now and then; "" for others."""
        if self.state is not State.LOCAL:
            return ""
        apart = f"at most {self.longest} update{'s' * (self.longest > 1)} apart"
        return f"  replicas-agree: held where the loop synchronises its weights, {self.met} times, {apart}"
