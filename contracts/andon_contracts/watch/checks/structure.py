"""The set of parameters: the same on all ranks, all of them in an optimizer, none replaced, added, frozen or untied."""

from __future__ import annotations

from collections.abc import Mapping

from andon_contracts.laws.law import LOCKSTEP, Law, Seen, difference
from andon_contracts.laws.update import REPLICAS
from andon_contracts.observe import Observer
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, Check, Cover, OptimizerProbe, Values, none_has, parameter_name
from andon_contracts.watch.model_probe import PARAMETER_BITS, Change
from andon_contracts.watch.values import trainable_layout_digest


def _toggled_alike(seen: Seen[object]) -> bool:
    """All ranks froze or unfroze the same: a loop may mean that (gradual unfreezing)."""
    code = seen.column("change")[0] >> PARAMETER_BITS
    return "change" not in seen.differing and code == Change.TOGGLED_BY_THE_LOOP


def _changed(seen: Seen[object]) -> Finding:
    first = next(value for value in seen.column("change") if value)
    tensor = parameter_name(seen.names, first & ((1 << PARAMETER_BITS) - 1))
    what = f"{tensor} is {Change(first >> PARAMETER_BITS).text}"
    return Finding(what, seen.step, seen.ranks("change"), tensor)


def _kept(seen: Seen[object]) -> Finding | None:
    if seen.any("change") and not _toggled_alike(seen):
        return _changed(seen)
    if "layout" in seen.differing:
        return difference(seen, "layout", "the tensors differ in name, shape, dtype, order or in which are trained")
    return None


def _not_toggled(seen: Seen[object]) -> Finding | None:
    if not _toggled_alike(seen):
        return None
    found = _changed(seen)
    what = f"{found.seen}, on all ranks alike; this watch sees what was trained when it was opened, a new one the rest"
    return Finding(what, found.step, (), found.tensor)


_PARAMETERS = Law("parameters-kept/before", ("change", "layout"), _kept, look=("layout",))
_TOGGLED = Law("parameters-kept/alike", ("change",), _not_toggled, suspicion=True)

START = (
    LOCKSTEP,
    _PARAMETERS,
    REPLICAS,
    none_has(
        "precision-sufficient/start",
        "imprecise",
        "is trained in 16 bits: an update below half a unit in the last place is lost",
        suspicion=True,
    ),
)
"""What the loop starts from: the parameters and their values."""


class Structure(Check):
    before_laws = (_PARAMETERS, _TOGGLED)

    def cover(self) -> Mapping[str, Cover]:
        why = "trainable= declares nothing: held to the set of the start only"
        kept = LIVE if self.context.settings.trainable is not None else Cover("degraded", why)
        return {"parameters-kept": kept, "precision-sufficient": LIVE}

    def start(self, *, portable: bool) -> Values:
        """The values that `START` judges, of the whole model."""
        subject = self.context.subject
        held = frozenset[int]().union(*(probe.held for probe in self.context.probes))  # others may have a master weight
        low = (i for i, s in enumerate(subject.slots) if id(s.parameter) in held and s.parameter.element_size() < 4)
        return {
            "change": subject.fault_at_start(),
            "layout": trainable_layout_digest(subject.parameters),
            "weights": Observer(portable=portable).look(list(subject.parameters.values())).digest,
            "imprecise": next(low, -1) + 1,
        }

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        return {"change": self.context.subject.change(probe.optimizer), "layout": probe.layout}
