"""Whether an update moved what it had to move: parameters that kept every bit although their update could be held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from andon_contracts.agree import bits_of, real_of
from andon_contracts.laws.law import Law, Seen
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, Check, Context, Cover, OptimizerProbe, Values, indexed
from andon_contracts.watch.motion import Motion, Unmoved


def _applied(seen: Seen[object]) -> Finding | None:
    first = next((each for each in seen.said if each.values["unmoved"]), None)
    if first is None:
        return None
    due, spacing = (real_of(first.values[f"unmoved {name}"]) for name in ("due", "spacing"))
    lost = due <= spacing / 2
    what = (
        f"kept every bit, although its gradient and learning rate call for an update of about {due:.2g}; the values "
        f"that its dtype holds are {spacing:.2g} apart there{', so that the update is rounded away' * lost}"
    )
    applied = "the optimizer holds other parameters than the model"
    likely = "the precision is too low for this learning rate" if lost else applied
    found = indexed(seen, "unmoved", what)
    return None if found is None else replace(found, likely=likely)


class Applied(Check):
    """What one optimizer's update moved."""

    after_laws = (Law("update-applied/after", ("unmoved", "unmoved due", "unmoved spacing"), _applied, suspicion=True),)

    def __init__(self, context: Context, probe: OptimizerProbe) -> None:
        super().__init__(context)
        self._motion = Motion(probe.optimizer, probe.members)

    def cover(self) -> Mapping[str, Cover]:
        sharded = self.context.subject.sharded and self.context.world > 1
        return {"update-applied": Cover("degraded", "this rank's shards only") if sharded else LIVE}

    def before(self, probe: OptimizerProbe) -> Values:
        self._motion.remember(probe.updates + 1 - self.context.settings.start)
        return {}

    def after(self, probe: OptimizerProbe) -> Callable[[], Values]:
        unmoved = self._motion.unmoved()
        first = unmoved[0] if unmoved else Unmoved(-1, 0.0, 0.0)
        found = {
            "unmoved": probe.place(first.member + 1),
            "unmoved due": bits_of(first.due),
            "unmoved spacing": bits_of(first.spacing),
        }
        return lambda: found
