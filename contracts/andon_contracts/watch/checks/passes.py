"""What becomes of the loop's backward passes: each is applied by one update, and clipped before it, not after it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from andon_contracts.agree import real_of
from andon_contracts.laws.law import Law, Observations, Seen
from andon_contracts.legible import counted
from andon_contracts.violation import Finding
from andon_contracts.watch.check import Check, Context, OptimizerProbe, Values
from andon_contracts.watch.checks.gradients import Gradients

_SURE = 2
"""A loop may step twice once, for example to create the optimizer's state. So the second time is reported."""


def _applied_again(seen: Seen[int]) -> Finding | None:
    if seen.want < _SURE:
        return None
    before = f"step {seen.step} uses the same gradient as step {seen.step - 1}: no backward pass came between them"
    what = f"{before}, now for the {'second' if seen.want == 2 else f'{seen.want}th'} time"
    likely = "the loop calls step twice for one backward pass, for example scaler.step(optimizer) and optimizer.step()"
    return Finding(what, seen.step, (), "gradient", likely=likely)


def _clipped_late(seen: Seen[int]) -> Finding | None:
    if seen.want < _SURE:
        return None
    what = "the gradients were clipped after the update that used them, and then discarded: this clip has no effect"
    return Finding(what, seen.step, (), "gradient", likely="the clip call is after optimizer.step()")


_AGAIN = Law("gradient-fresh/again", ("passes", "raw", "norm", "gradient"), _applied_again, suspicion=True)
_LATE = Law("clip-placed/late", ("clipped late",), _clipped_late, suspicion=True)


class _Pass(NamedTuple):
    """A backward pass that no update has applied. reached: the optimizers that have its gradients."""

    line: str
    reached: set[OptimizerProbe]


class Passes(Check):
    """Follows each backward pass from the loop's call until an update applies it or the loop discards it.

    A gradient counts as applied again if no pass was called since the update before and its bits are the same. So loops
    that use a batch twice with a fresh pass, or that set gradients by hand, are right. A clip counts as late if it
    follows the update of all its parameters, no other pass was called, and the loop then discards the gradients. A
    limit of infinity only measures a norm, and a loop may measure at any time.

    A pass is lost if no optimizer applied it. Loops discard passes on purpose (a NaN, a saliency), so lost passes are
    only counted, and only if they are the shorter end of an accumulation that is else of one length.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._pending: list[_Pass] = []
        self._calls = 0
        self._calls_before: dict[OptimizerProbe, int] = {}
        """The number of backward passes before the last update of each optimizer."""
        self._applied: dict[OptimizerProbe, list[int]] = {}
        """The digests of the gradient that each optimizer applied last."""
        self._again: Counter[OptimizerProbe] = Counter()
        self._late: Counter[OptimizerProbe] = Counter()
        self._clipped: set[OptimizerProbe] = set()
        """The optimizers whose gradients were clipped since their first pass after an update."""
        self._clipped_after: set[OptimizerProbe] = set()
        self._wasted: set[OptimizerProbe] = set()
        self._lengths: defaultdict[str, Counter[int]] = defaultdict(Counter)
        """By line: how many updates applied how many passes."""
        self._lost: defaultdict[str, list[int]] = defaultdict(list)
        """By line: the number of passes that were discarded together."""

    def backward(self, loss: Tensor | None) -> None:
        if self.context.muted:
            return
        for probe in [probe for probe, calls in self._calls_before.items() if calls == self._calls]:
            if not probe.gradients():
                self._waste(probe)
            self._clipped_after.discard(probe)
            self._clipped.discard(probe)
        self._calls += 1

    def backward_over(self) -> None:
        now = self.context.backward
        if now is not None and (reached := set(filter(self._has_gradient, self.context.probes))):
            self._pending.append(_Pass(now.line, reached))

    def _has_gradient(self, probe: OptimizerProbe) -> bool:
        # Shards have no hooks.
        return bool(probe.gradients()) if self.context.subject.sharded else probe.check(Gradients).arrived

    def limiting(self, parameters: Sequence[Tensor]) -> None:
        clipped = set(map(id, parameters))
        probes = {probe for probe in self.context.probes if not probe.held.isdisjoint(clipped)}
        used = all(self._calls_before.get(probe) == self._calls for probe in probes)
        (self._clipped_after if used else self._clipped).update(probes)

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        passes = self._calls - self._calls_before.get(probe, 0)
        return {"passes": passes, "clipped late": int(probe in self._wasted)}

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        seen = Seen[object](said, None)
        before, self._applied[probe] = self._applied.get(probe), seen.column("gradient")
        is_nonzero = all(real_of(norm) > 0 for norm in seen.column("norm"))
        is_fresh = seen.any("passes") or seen.any("raw")
        for law, counts, found in (
            (_AGAIN, self._again, is_nonzero and not is_fresh and before == self._applied[probe]),
            (_LATE, self._late, seen.any("clipped late")),
        ):
            if found:
                counts[probe] += 1
                self.context.verdicts.judge((law,), Seen(said, counts[probe]), self.context.scene())

    def updated(self, probe: OptimizerProbe) -> None:
        used = [each.line for each in self._pending if probe in each.reached]
        if len(set(used)) == 1:
            self._lengths[used[0]][len(used)] += 1

    def new_window(self, probe: OptimizerProbe) -> None:
        self._pending = [each for each in self._pending if probe not in each.reached]
        self._calls_before[probe] = self._calls
        self._clipped_after.discard(probe)
        self._wasted.discard(probe)

    def discarded(self, probe: OptimizerProbe) -> None:
        self._waste(probe)
        for each in self._pending:
            each.reached.discard(probe)
        self._lose([each for each in self._pending if not each.reached])
        self._pending = [each for each in self._pending if each.reached]

    def _waste(self, probe: OptimizerProbe) -> None:
        """The gradients of `probe` are gone. A loop that clips before the update too may clip once more to measure."""
        if probe in self._clipped_after and probe not in self._clipped:
            self._wasted.add(probe)
        self._clipped_after.discard(probe)

    def _lose(self, passes: Sequence[_Pass]) -> None:
        for line, count in Counter(each.line for each in passes).items():
            self._lost[line].append(count)

    def closing_lines(self) -> list[str]:
        self._lose(self._pending)
        self._pending = []
        return [text for line, lengths in self._lengths.items() for text in _uneven(lengths, self._lost[line])]


def _uneven(lengths: Counter[int], lost: Sequence[int]) -> list[str]:
    """Closing lines about the accumulation windows of one line. lengths: the number of updates by length."""
    ((full, updates),) = lengths.most_common(1)
    if full < 2 or 2 * updates <= lengths.total():
        return []
    short = [count for count in lost if count < full]
    longer = {length: count for length, count in lengths.items() if length > full}
    lines = []
    if short:
        what = f"{sum(short)} backward pass{'es' * (sum(short) > 1)} computed and never applied"
        lines.append(f"  accumulation: {what}: {counted(len(short), 'window')} ended after fewer than {full}")
    if longer:
        what = f"{counted(sum(longer.values()), 'update')} of more than {full} backward passes (up to {max(longer)})"
        lines.append(f"  accumulation: {what}: are those left over from an epoch added to the next window?")
    return lines
