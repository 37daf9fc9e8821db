"""Checks that each backward pass of the loop is applied by one update, and clipped before it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from torch import Tensor

from andon_contracts.agree import real_of
from andon_contracts.laws.law import Law, Observations, Seen
from andon_contracts.legible import counted
from andon_contracts.violation import Finding
from andon_contracts.watch.check import Check, Context, OptimizerProbe, Values
from andon_contracts.watch.checks.gradients import Gradients

_TWICE = "the loop calls step twice for one backward pass, for example scaler.step(optimizer) and optimizer.step()"
_NO_EFFECT = "the gradients were clipped after the update that used them, and then discarded: this clip has no effect"


def _second(what: str, likely: str) -> Callable[[Seen[Sequence[int]]], Finding | None]:
    # A loop may step twice once, for example to create the optimizer's state.
    return lambda seen: (
        Finding(f"{what}, since step {seen.want[0]}", seen.step, (), "gradient", likely=likely)
        if seen.want[1:]
        else None
    )


_same = _second("this step uses the gradient of the last one again: no backward pass came between them", _TWICE)
_late = _second(_NO_EFFECT, "the clip call is after optimizer.step()")
_AGAIN = Law("gradient-fresh/again", ("passes", "raw", "norm", "gradient"), _same, suspicion=True)
_LATE = Law("clip-placed/late", ("clipped late",), _late, suspicion=True)


class Passes(Check):
    """The backward passes of one optimizer, until an update applies their gradients or the loop discards them.

    A gradient is applied again if no pass was called since the last update and its bits are the same. So loops that use
    a batch twice with a fresh pass, or that set gradients by hand, are right. A clip is late if the loop discards the
    gradients before any other pass. Clipping to infinity only measures, and so may a second clip of one window.

    Loops discard passes on purpose (a NaN, a saliency). So only the closing lines count them, and only if the discarded
    window is shorter than most.
    """

    def __init__(self, context: Context, probe: OptimizerProbe) -> None:
        super().__init__(context)
        self._probe = probe
        self._calls = self._window = 0
        """The loop's backward passes since the last update, and those whose gradients the optimizer still has."""
        self._applied: list[int] = []
        self._clipped = self._clipped_after = self._wasted = False
        """Since the first pass of the window: a clip before the update, one after it, and it had no effect."""
        self._cases = defaultdict[str, list[int]](list)  # by law, the steps at which it was broken
        self._lengths, self._lost = Counter[int](), Counter[int]()
        """By the number of its passes, how many windows an update ended, and a discard."""

    def backward(self, loss: Tensor | None) -> None:
        if not self.context.muted:
            if not self._calls:
                self._wasted |= self._clipped_after and not self._clipped and not self._probe.gradients()
                self._clipped = self._clipped_after = False
            self._calls += 1

    def backward_over(self) -> None:
        if self.context.backward is not None:
            shards = self._probe.gradients() if self.context.subject.sharded else []  # these have no hooks
            self._window += bool(shards) or self._probe.check(Gradients).raw_hooks.gradient_arrived

    def limiting(self, parameters: Sequence[Tensor]) -> None:
        clipped, held = [id(each) for each in parameters if each.grad is not None], self._probe.held
        if self._calls:
            self._clipped = self._clipped or not held.isdisjoint(clipped)
        else:
            self._clipped_after |= bool(clipped) and held.issuperset(clipped)

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        return {"passes": self._calls, "clipped late": int(self._wasted)}

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        seen, before = Seen[object](said, None), self._applied
        self._applied = seen.column("gradient")
        is_new = seen.any("passes") or seen.any("raw") or not all(real_of(norm) > 0 for norm in seen.column("norm"))
        is_new |= probe.unread > 0
        for law, found in ((_AGAIN, not is_new and before == self._applied), (_LATE, seen.any("clipped late"))):
            if found:
                self._cases[law.id].append(said[0].step - (law is _LATE))
                self.context.verdicts.judge((law,), Seen(said, self._cases[law.id]), self.context.scene())

    def updated(self, probe: OptimizerProbe) -> None:
        self._lengths[self._window] += 1

    def new_window(self, probe: OptimizerProbe) -> None:
        self._calls = self._window = 0
        self._clipped_after = self._wasted = False

    def discarded(self, probe: OptimizerProbe) -> None:
        self._wasted |= self._clipped_after and not self._clipped
        self._clipped_after = False
        self._lost[self._window] += 1
        self._window = 0

    def closing_lines(self) -> list[str]:
        self.discarded(self._probe)
        ((full, updates),) = self._lengths.most_common(1) or [(0, 0)]
        # With several optimizers, one may discard what another applied, as a critic does.
        if full < 2 or 2 * updates <= self._lengths.total() or len(self.context.probes) > 1:
            return []
        short = Counter({length: count for length, count in self._lost.items() if 0 < length < full})
        longer = Counter({length: count for length, count in self._lengths.items() if length > full})
        passes, windows = sum(short.elements()), counted(short.total(), "window")
        lost = f"{passes} backward pass{'es' * (passes > 1)} computed and never applied: {windows} ended after fewer"
        kept = f"{counted(longer.total(), 'update')} of more (up to {max(longer, default=0)}): are backward passes left"
        return [
            *[f"  accumulation: {lost} than {full}"] * bool(short),
            *[f"  accumulation: {full} backward passes, but {kept} over from an epoch?"] * bool(longer),
        ]
