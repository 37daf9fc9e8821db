"""What there is to judge a run by: two testimonies that are never merged, tensors and facts, and why it failed.

The one is the witness's, who looked from outside; the other is the ledger of the accused. A claim says which of them it
judges. A ledger or a script has only the second, so that what needs tensors does not apply there, for that reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from andon_falsify.history import History

if TYPE_CHECKING:
    from andon_falsify.claims.laws import RunLaw
    from andon_falsify.subjects.trace import Trace

_ELSEWHERE = "a ledger holds no {} to compare; andon falsify runs the trainer to see"


@dataclass(frozen=True)
class Noise:
    """What rounding alone may do, relatively, to what a kind of source reports.

    A value for each source and not one loose one: a wrong average of a small job is 1e-4 of its gradient.
    """

    gradient: float
    loss: float
    norm: float
    update: float = 1e-3
    """Of the length of an optimizer's step from the seen gradient: a small second moment makes much of a rounding."""


TRAINER = Noise(gradient=2e-6, loss=1e-6, norm=2e-6)
"""fp32 against float64, with a margin that the gradient benchmark prints: our trainer sums in one fixed order."""
LOOP = Noise(gradient=2e-5, loss=1e-5, norm=1e-4)
"""Ten times as much, for means of means of fp32 losses."""
SCRIPT = Noise(gradient=1e-4, loss=1e-4, norm=1e-4)
"""Of norms and losses between two layouts at the first update: rounding gives 1e-6, a wrong average 1e-2 and more."""


@dataclass(frozen=True)
class Evidence:
    """One run. seen: what the witness saw. ledger: what the accused wrote. trace: the witness's tensors and facts.

    noise: of its source. others: further runs that a claim asks for, by what they are: "alone" (on one rank),
    "elsewhere" (other layouts of the same batches), "cut" and "taken up" (one that is killed, and what goes on from its
    files), "poisoned"; who runs the subject makes them, and a claim never does. configuration: reads what lies beside
    the ledger, by dotted key; only a claim that asks for it may fail by it. of_script: the ledger is that of a user's
    own command, whose plan and promises nobody knows. layout: the numbers of its layout by name. of_loop: it is of
    anyone's loop, of which only what it declares is known.

    Tensors and torch are not at hand where a ledger is judged, so that `andon verify` need not load them.
    """

    seen: History | None
    ledger: History | None
    noise: Noise
    trace: Trace | None = None
    others: Mapping[str, tuple[Evidence, ...]] = field(default_factory=dict)
    configuration: Callable[[], Mapping[str, object]] = dict
    of_script: bool = False
    layout: Mapping[str, int] = field(default_factory=dict)
    of_loop: bool = False

    @cached_property
    def settings(self) -> Mapping[str, object]:
        """The configuration, read where somebody asks. Raises `InputError` for one that is no configuration of ours."""
        return self.configuration()

    @property
    def told(self) -> History:
        """The witness's account, or where nobody looked, the accused's own. Raises `LookupError` for neither."""
        found = self.seen if self.seen is not None else self.ledger
        if found is None:
            msg = "there is no account of the run"
            raise LookupError(msg)
        return found

    @property
    def sightings(self) -> Trace:
        """Tensors and facts of the witness. Raises `LookupError` where there was none."""
        if self.trace is None:
            msg = "nobody looked at the run but who made it"
            raise LookupError(msg)
        return self.trace

    def declares(self, name: str) -> bool:
        """Whether a loop offers or says this of itself, as "halts"; True of what is no loop and promises it all."""
        return not self.of_loop or name in getattr(self.sightings.first, "claims", ())

    @cached_property
    def law(self) -> RunLaw:
        """The reference of its updates; computed where somebody asks, and once."""
        from andon_falsify.claims.laws import LoopLaw, TrainerLaw

        return LoopLaw(self.sightings) if self.of_loop else TrainerLaw(self.sightings)


def of_trace(trace: Trace) -> Evidence:
    """The evidence of a run that the witness saw."""
    from andon_falsify.loops.sightings import LoopSightings

    loop = bool(trace.parts) and isinstance(trace.first, LoopSightings)
    return Evidence(trace.seen, trace.ledger, LOOP if loop else TRAINER, trace, of_loop=loop)


Need = Callable[[Evidence], str]
"""Why a claim does not apply to this evidence, "" where it does."""


def tensors(what: str) -> Need:
    """That a witness looked, who alone has `what`."""
    return lambda evidence: _ELSEWHERE.format(what) if evidence.trace is None else ""


def has_law(evidence: Evidence) -> str:
    """That the float64 law of the run can be computed."""
    return evidence.law.why_not
