"""What a step that is done again has as before (`resume-exact`): one list of fields, and one comparison of records.

A resumed run is held to it; `replay` and `diff` say by it where records part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from andon_contracts.fields import Real
from andon_contracts.policy import clause, require
from andon_contracts.record import Step
from andon_contracts.violation import Finding

REPEATED = (
    *("epoch", "position", "ids", "count", "terms", "content", "lr", "loss", "correct"),
    *("gradient", "grad_norm", "weights", "optimizer"),
)
"""What a step that is done again has as before, each digest by itself, causes before their effects. Where it ran
(world size, backend, who did what) may differ."""
UNKNOWN = "0" * 16
"""The digest of what was not looked at, because the contracts were off."""
_MOST = 1000
"""Characters of a value that are shown."""


@dataclass(frozen=True)
class Difference:
    """One field in which two records of one step are not the same."""

    name: str
    then: object
    now: object

    def __str__(self) -> str:
        return f"{self.name}: {shown(self.then)}, now {shown(self.now)}"


def differing(then: Step, now: Step) -> tuple[Difference, ...]:
    """The fields of `REPEATED` that differ between two records of one step, in that order.

    A field that only one of both records has is no difference: it was not told to the other's writer, or not looked at.
    """
    return tuple(each for name in REPEATED for each in apart(name, value_of(then, name), value_of(now, name)))


def apart(name: str, then: object, now: object) -> tuple[Difference, ...]:
    """The difference between two values of `name`; none where they are equal, or one of both lacks."""
    return () if then == now or _lack(then) or _lack(now) else (Difference(name, then, now),)


def lacks(record: Step, name: str) -> bool:
    """Whether the record has nothing for the field: a watch writes what it was told, a run what it looked at."""
    return _lack(value_of(record, name))


def _lack(value: object) -> bool:
    return value in (None, (), UNKNOWN)


def value_of(record: Step, name: str) -> object:
    """A field of `record`, or one of its digests."""
    return getattr(record, name) if hasattr(record, name) else getattr(record.digests, name)


def shown(value: object, most: int = _MOST) -> str:
    """The value for a reader, in at most so many characters: a real with its bits, anything else as it is."""
    text = f"{value.value:.9g} ({value.hex})" if isinstance(value, Real) else str(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def _explain(step: int, found: Sequence[Difference]) -> Finding:
    return Finding(seen=f"the step was done before with other results: {'; '.join(map(str, found))}", step=step)


@clause("resume-exact", _explain)
def _repeated_exactly(step: int, found: Sequence[Difference]) -> bool:
    return not found


@require(_repeated_exactly)
def require_repeated(step: int, found: Sequence[Difference]) -> None:
    """Nothing of `step`, or of what followed it, was found to differ. Raises `Violation` (`resume-exact`)."""


class Repeats:
    """The records of steps that an interrupted run did after the point from which it goes on."""

    def __init__(self, earlier: Mapping[int, Step] | None = None) -> None:
        self._earlier = dict(earlier or {})

    def judge(self, record: Step) -> None:
        """Raises `Violation` (`resume-exact`) where `record` is of a step that was done before with other results."""
        earlier = self._earlier.pop(record.step, None)
        if earlier is not None:
            require_repeated(record.step, differing(earlier, record))
