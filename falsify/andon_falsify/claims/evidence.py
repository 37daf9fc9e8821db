"""The evidence about a run: two accounts that are never merged, tensors, and further runs of the same subject.

The witness observed the run from outside and gives one account; the subject's own ledger is the other. A ledger or a
script has only the second, so claims that need tensors do not apply to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from andon_falsify.history import History
from andon_falsify.verdict import ExtraRun, Kind

if TYPE_CHECKING:
    from andon_falsify.claims.laws import LoopLaw, RunLaw
    from andon_falsify.subjects.trace import Trace


@dataclass(frozen=True)
class Noise:
    """The relative differences that rounding alone may cause. An error must exceed them to be seen.

    gradient, loss, norm: against the float64 law; of scripts, between two layouts. update: of the length of an
    optimizer's step from the observed gradient; a small second moment magnifies rounding.
    """

    gradient: float
    loss: float
    norm: float
    update: float = 1e-3


SCRIPT = Noise(gradient=1e-4, loss=1e-4, norm=1e-4)
"""Between two layouts at the first update, where rounding gives 1e-6. A sum that is divided by a wrong number of ranks
or micro-batches changes a norm by 1e-2 and more. A mean of unequal means may change it by less than this; only the
tensors show that, which a script does not report."""
NOISE: Mapping[Kind, Noise] = {
    "trainer": Noise(gradient=2e-6, loss=1e-6, norm=2e-6),
    "loop": Noise(gradient=2e-5, loss=1e-5, norm=1e-4),
    "script": SCRIPT,
    "ledger": SCRIPT,
}
"""Our trainer sums fp32 in one fixed order; a loop may compute means of means of fp32 losses. Both are compared with
float64 per tensor, since a wrong mean of a small job may differ by as little as 1e-4 of its gradient."""


class RunUnavailable(LookupError):
    """A further run could not be made, or failed: why, and so why a claim stays unknown. remedy: for the user."""

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(why)
        self.remedy = remedy


@dataclass(frozen=True)
class Evidence:
    """One run of one kind of subject.

    seen: what the witness saw. ledger: what the subject wrote. trace: the witness's tensors. others: the further runs
    that were made so far. further: makes one by name when a check asks for it, and returns it with those made together
    with it ("cut" and "resumed"); {} if there is no such run. elsewhere: other ledgers of the same run. configuration:
    reads the settings of a run folder, by dotted key; a malformed file affects only the claims that read it. folder:
    the run folder of a ledger. layout: of a script, its numbers by name.
    """

    seen: History | None
    ledger: History | None
    kind: Kind
    trace: Trace | None = None
    others: dict[ExtraRun, Evidence] = field(default_factory=dict)
    further: Callable[[ExtraRun], Mapping[ExtraRun, Evidence]] = lambda name: {}
    elsewhere: tuple[Evidence, ...] = ()
    configuration: Callable[[], Mapping[str, object]] = dict
    folder: Path | None = None
    layout: Mapping[str, int] = field(default_factory=dict)

    @property
    def of_loop(self) -> bool:
        return self.kind == "loop"

    @property
    def of_script(self) -> bool:
        return self.kind == "script"

    @property
    def noise(self) -> Noise:
        return NOISE[self.kind]

    @cached_property
    def settings(self) -> Mapping[str, object]:
        """The configuration, read on first use. Raises `InputError` if it is not a configuration of Andon."""
        return self.configuration()

    @property
    def history(self) -> History:
        """The witness's account, else the subject's own."""
        if (found := self.seen or self.ledger) is None:
            raise LookupError("the run left no account")
        return found

    @property
    def observed(self) -> Trace:
        """Tensors and facts of the witness. Raises `LookupError` if there was no witness."""
        if self.trace is None:
            raise LookupError("no witness observed the run")
        return self.trace

    def find(self, name: ExtraRun) -> Evidence | None:
        """The further run `name`, made once; None if this run has no such run. Raises `RunUnavailable` if it failed."""
        if name not in self.others:
            self.others.update(self.further(name))
        return self.others.get(name)

    def other(self, name: ExtraRun) -> Evidence:
        """The further run `name`. Raises `RunUnavailable` if it failed or does not exist."""
        if (found := self.find(name)) is None:
            raise RunUnavailable(f"the run {name!r} to compare with is missing")
        return found

    def declares(self, name: str) -> bool:
        """Whether a loop offers or promises `name`, as "halts". Always true of other subjects."""
        return not self.of_loop or name in getattr(self.observed.first, "claims", ())

    @cached_property
    def law(self) -> RunLaw:
        """The float64 reference of the updates, computed on first use."""
        from andon_falsify.claims.laws import TrainerLaw

        return self.loop_law if self.of_loop else TrainerLaw(self.observed)

    @cached_property
    def loop_law(self) -> LoopLaw:
        from andon_falsify.claims.laws import LoopLaw

        return LoopLaw(self.observed)


def of_trace(trace: Trace) -> Evidence:
    """The evidence of a run that the witness saw."""
    from andon_falsify.loops.sightings import LoopSightings

    kind: Kind = "loop" if trace.parts and isinstance(trace.first, LoopSightings) else "trainer"
    return Evidence(trace.seen, trace.ledger, kind, trace)


def tensors(what: str, *, of_updates: bool = False) -> Callable[[Evidence], str]:
    """A need of a claim: `what`, which only a witness has. of_updates: also the tensors of every update."""

    def need(evidence: Evidence) -> str:
        if evidence.trace is None:
            return f"a ledger holds no {what} to compare; andon falsify runs the trainer to see"
        case = evidence.trace.case
        if of_updates and not evidence.of_loop and (case.poison is not None or not case.values):
            return "a NaN was planted" if case.poison is not None else "the tensors of the updates were not kept"
        return ""

    return need


def has_law(evidence: Evidence) -> str:
    """The need of a claim for the float64 law of the run."""
    return evidence.law.why_not
