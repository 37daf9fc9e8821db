"""The ledger of a run, and the fields of a step that must be the same when it is repeated (`resume-exact`).

The ledger holds hash-chained lines, one per step, from a single writer. A resumed run must reproduce the fields.
`replay` and `diff` use them to find the first record at which two runs differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from andon.console.messages import InputError
from andon.run.atomic import storage
from andon_contracts.fields import Real
from andon_contracts.policy import clause, require
from andon_contracts.record import LedgerError as LedgerError
from andon_contracts.record import LedgerFile, Record, Step, chain, read_lines
from andon_contracts.violation import Finding


class LedgerWriter(LedgerFile):
    """A `LedgerFile` that raises `InputError` if the disk fails or another program changed the file.

    Only the owner of the run folder may open one.
    """

    def __init__(self, path: Path) -> None:
        with storage(path):
            super().__init__(path)

    def append(self, record: Record) -> None:
        with _refusals(self.path):
            super().append(record)

    def sync(self) -> None:
        with _refusals(self.path):
            super().sync()

    def close(self) -> None:
        with storage(self.path):
            super().close()


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    try:
        with storage(path):
            yield
    except LedgerError as error:
        raise InputError.at("", str(error)) from error


def read_ledger(path: Path) -> Iterator[Record]:
    """The records of the ledger at `path`, verified as they are read, without a torn last line.

    Raises `LedgerError` at the first wrong line, and `OSError` as `open_regular`.
    """
    for record, _ in read_lines(path):
        yield record


def digested_ledger(path: Path) -> Iterator[tuple[Record, str]]:
    """As `read_ledger`, with the digest of each record's line. A checkpoint stores that of the line before it."""
    for record, raw in read_lines(path):
        yield record, chain(raw)


REPEATED = (
    *("epoch", "position", "ids", "count", "terms", "content", "lr", "loss", "correct"),
    *("gradient", "grad_norm", "weights", "optimizer"),
)
"""Causes before their effects. World size, backend and each rank's share of the work may differ."""
UNKNOWN = "0" * 16
"""The digest of a value that was not computed, because the contracts were off."""


@dataclass(frozen=True)
class Difference:
    """One field in which two records of one step differ."""

    name: str
    then: object
    now: object

    def __str__(self) -> str:
        return f"{self.name}: {shown(self.then)}, now {shown(self.now)}"


def differing(then: Step, now: Step) -> tuple[Difference, ...]:
    """The fields of `REPEATED` that differ between two records of one step, in that order.

    A field that one of the records lacks is skipped.
    """
    return tuple(each for name in REPEATED for each in apart(name, _value_of(then, name), _value_of(now, name)))


def apart(name: str, then: object, now: object) -> tuple[Difference, ...]:
    """The difference between two values of `name`; none if they are equal, or one is missing."""
    return () if then == now or _is_missing(then) or _is_missing(now) else (Difference(name, then, now),)


def lacks(record: Step, name: str) -> bool:
    """Whether the record has no value for the field: the records of a watch have fewer than those of a run."""
    return _is_missing(_value_of(record, name))


def _is_missing(value: object) -> bool:
    return value in (None, (), UNKNOWN)


def _value_of(record: Step, name: str) -> object:
    return getattr(record if hasattr(record, name) else record.digests, name)


def shown(value: object, most: int = 1000) -> str:
    """The value as text of at most `most` characters; a real with its bits."""
    text = f"{value.value:.9g} ({value.hex})" if isinstance(value, Real) else str(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def _explain(step: int, found: Sequence[Difference]) -> Finding:
    return Finding(seen=f"the step was done before with other results: {'; '.join(map(str, found))}", step=step)


@clause("resume-exact", _explain)
def _repeated_exactly(step: int, found: Sequence[Difference]) -> bool:
    return not found


@require(_repeated_exactly)
def require_repeated(step: int, found: Sequence[Difference]) -> None:
    """Raises `Violation` (`resume-exact`) if `found` has any difference, of `step` or of a later step."""


class Repeats:
    """The records of steps that an interrupted run completed after the point from which it resumes."""

    def __init__(self, earlier: Mapping[int, Step] | None = None) -> None:
        self._earlier = dict(earlier or {})

    def judge(self, record: Step) -> None:
        """Raises `Violation` (`resume-exact`) if `record` differs from the earlier record of its step."""
        earlier = self._earlier.pop(record.step, None)
        if earlier is not None:
            require_repeated(record.step, differing(earlier, record))
