"""Placeholder."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from andon_contracts.laws.law import Observations
from andon_contracts.laws.scale import SCALE
from andon_contracts.watch.check import LIVE, Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.gradient_scale import GradientScale, Passes


class Scale(Check):
    """The scale of one optimizer's gradient."""

    def __init__(self, context: Context, probe: OptimizerProbe, passes: Passes) -> None:
        super().__init__(context)
        self.scale = GradientScale(probe.optimizer, () if context.subject.sharded else probe.members, passes)
        self.place, self.see = self.scale.place, self.scale.see

    def cover(self) -> Mapping[str, Cover]:
        dark = Cover("not observable", "the shards show no raw gradient")
        return {"gradient-scale": dark if self.context.subject.sharded else LIVE}

    def reduced(self, probe: OptimizerProbe) -> None:
        self.scale.reduced()

    def look(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        self.scale.reduced()
        return self.scale.waiting()

    def before(self, probe: OptimizerProbe) -> Values:
        return self.scale.values()

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        scaled = self.scale.judged(said)
        if scaled.now is not None:
            self.context.verdicts.judge(SCALE, scaled, self.context.scene())

    def new_window(self, probe: OptimizerProbe) -> None:
        self.scale.clear()

    discarded = new_window
