"""What a law is, and how the laws of one point of a step are judged.

The trainer's host path, its gate and the watch read the same laws. A table of laws lists causes before effects, so a
message names the first law that is broken. Nothing here communicates, reads a tensor or knows a trainer. Every rank
judges the observations of all ranks, so all ranks reach the same finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, Generic, TypeVar

from andon_contracts.agree import Observation, majority, minority, real_of
from andon_contracts.clauses import CLAUSES
from andon_contracts.digest import hex64
from andon_contracts.policy import count, enforced
from andon_contracts.violation import Finding, Violation

Observations = Sequence[Observation]
Details = Mapping[str, Mapping[str, Sequence[int]]]
"""Digests compared after a mismatch: by the name of the observed value, then by tensor, one for each rank."""

W_co = TypeVar("W_co", covariant=True)
S_contra = TypeVar("S_contra", contravariant=True)
S = TypeVar("S")


class Rule(IntEnum):
    """What a device may require of a value in its table, besides one known integer."""

    ANY = 0
    SAME = 2  # the value of rank 0
    FINITE = 3  # the bits of a finite fp64
    PREVIOUS = 4  # the value that the device kept from the update before
    CLIPPED = 5  # the bits of an fp64 norm: the majority's norm, one column earlier, clipped once
    MAJORITY = 6  # the value that most ranks have one column earlier


Rules = Mapping[str, int]  # by the name of a value: the integer or the `Rule` that a device requires of it


@dataclass(frozen=True)
class Seen(Generic[W_co]):
    """The observations of all ranks at one point, by rank, and the required values. Equal on every rank.

    want: what the plan requires; None if ranks are only compared with each other. names: the parameters' names, for
    values that are an index. details: digests by tensor of the values that differ.
    """

    observations: Observations
    want: W_co
    names: Sequence[str] = ()
    details: Details = field(default_factory=dict)

    @cached_property
    def differing(self) -> frozenset[str]:
        """The names of the values that are not the same on all ranks."""
        first, *others = (each.values for each in self.observations)
        return frozenset(name for other in others if other != first for name, _ in first.items() - other.items())

    @property
    def step(self) -> int:
        return self.observations[0].step

    def column(self, name: str) -> list[int]:
        return [each.values[name] for each in self.observations]

    def any(self, name: str) -> bool:
        return any(self.column(name))

    def ranks(self, name: str) -> tuple[int, ...]:
        """The ranks whose value `name` is not 0; empty if these are all ranks, and there are several."""
        ranks = tuple(each.rank for each in self.observations if each.values[name])
        return ranks if len(self.observations) == 1 else self.unless_all(ranks)

    def unless_all(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return unless_all(ranks, len(self.observations))

    def differing_tensors(self, name: str) -> tuple[str, ...]:
        """The tensors in which the ranks differ, if the value `name` was compared by tensor."""
        return tuple(tensor for tensor, digests in self.details.get(name, {}).items() if len(set(digests)) > 1)


@dataclass(frozen=True)
class Law(Generic[S_contra]):
    """One law at one point. `id` is its clause in the registry and the point: `finite/reduced`.

    reads: the names of the values that `check` reads. check: the finding, or None if the law holds; it is called again
    after `details` were added. device: from `want`, the rules by which a device decides the same for a table that the
    host reads later; None: this law is never judged late. by_tensor: the values that the ranks compare tensor by tensor
    if they differ, before the finding is shown. suspicion: a right loop can break this law too, so it only warns.
    stops: if this law is broken, the laws after it in the table cannot be judged. of_shards: it compares
    how ranks treat their shards of one tensor; without shards of equal size a watch leaves it out.

    Raises `KeyError` for a clause that is not registered.
    """

    id: str
    reads: tuple[str, ...]
    check: Callable[[S_contra], Finding | None]
    device: Callable[[Any], Rules] | None = None
    by_tensor: tuple[str, ...] = ()
    suspicion: bool = False
    stops: bool = False
    of_shards: bool = False
    clause: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "clause", CLAUSES[self.id.partition("/")[0]].name)


class Judgement(Generic[S]):
    """Evaluates laws lazily and in order against one `seen`. Each law is evaluated, and counted, at most once.

    A caller may add details to `seen` before it calls `violation`. tally: counts evaluations by clause, in addition to
    the counts of the process. While contracts are suspended no law is evaluated.
    """

    def __init__(self, laws: Sequence[Law[S]], seen: S, tally: Counter[str] | None = None) -> None:
        self.laws, self.seen = laws, seen
        self._pending = iter(laws if enforced() else ())
        self._broken: list[Law[S]] = []
        self._tally = Counter[str]() if tally is None else tally

    @property
    def first(self) -> Law[S] | None:
        """The first law that is broken; None if all hold. It does not evaluate the laws after it."""
        return next(self.broken(), None)

    def broken(self) -> Iterator[Law[S]]:
        """The broken laws in order. A law that `stops` is the last."""
        yield from self._broken
        while (law := next(self._pending, None)) is not None:
            self._tally[law.clause] += 1
            count(law.clause)
            if law.check(self.seen) is not None:
                self._broken.append(law)
                if law.stops:
                    self._pending = iter(())
                yield law

    def violation(self, law: Law[S]) -> Violation:
        """The violation of `law`, which is broken."""
        finding = law.check(self.seen)
        assert finding is not None
        return Violation.of(law.clause, replace(finding, suspicion=law.suspicion))


def enforce(judgement: Judgement[Any]) -> None:
    """Raises `Violation` of the first law that is broken, if any."""
    if (law := judgement.first) is not None:
        raise judgement.violation(law)


def rules_of(laws: Sequence[Law[Any]], want: object) -> dict[str, int]:
    """The rules by which a device decides what `laws` decide, by the name of a value.

    Raises `ValueError` for a law without a device form, and for laws whose rules for one value cannot be combined.
    """
    rules: dict[str, int] = {}
    for law in laws:
        if law.device is None:
            raise ValueError(f"{law.id} cannot be checked on a device")
        for name, rule in law.device(want).items():
            known = rules.setdefault(name, rule)
            if known is Rule.SAME and _is_one_value(rule):
                rules[name] = rule
            elif known != rule and not (rule is Rule.SAME and _is_one_value(known)):
                raise ValueError(f"the rules for {name} conflict: {known!r} and {rule!r}")
    return rules


def _is_one_value(rule: int) -> bool:
    return not isinstance(rule, Rule) or rule in (Rule.SAME, Rule.PREVIOUS)


def unless_all(ranks: Iterable[int], world: int) -> tuple[int, ...]:
    """The distinct `ranks` in order; empty if they are all ranks, because then all are equally to blame."""
    distinct = tuple(sorted(set(ranks)))
    return distinct if len(distinct) < world else ()


def difference(seen: Seen[object], name: str, what: str, *, real: bool = False) -> Finding:
    """The finding that the ranks differ in `name`, with the tensors if known. real: its value has the bits of a float.

    The ranks of the minority are the culprits.
    """
    values, compared, tensors = seen.column(name), seen.details.get(name, {}), seen.differing_tensors(name)
    words = [repr(real_of(value)) if real else hex64(value) for value in values]
    what = f"{what} ({', '.join(f'rank {rank}: {word}' for rank, word in enumerate(words))})"
    if tensors:
        what = f"{what}; {len(tensors)} of {len(compared)} tensors differ"
    details = tuple((tensor, " ".join(map(hex64, compared[tensor]))) for tensor in tensors)
    return Finding(what, seen.step, minority(values), (*tensors, name)[0], details)


def agreeing(
    law: str, names: Sequence[str], what: str, *, device: bool = False, by_tensor: bool = False, real: bool = False
) -> Law[Seen[object]]:
    """The law that every rank has the same value under each of `names`; by_tensor: the last of them is compared so."""

    def check(seen: Seen[object]) -> Finding | None:
        name = next((name for name in names if name in seen.differing), None)
        return None if name is None else difference(seen, name, what, real=real)

    same = dict.fromkeys(names, Rule.SAME)
    return Law(law, tuple(names), check, (lambda _: same) if device else None, (names[-1],) if by_tensor else ())


def in_lockstep(observations: Observations) -> bool:
    """Whether all ranks sent the message of the same step, sequence number and point, and each rank its own."""
    step, sequence = observations[0].step, observations[0].sequence
    # A plain loop for speed, because every update calls this several times.
    for rank, each in enumerate(observations):
        if not each.names_match or each.rank != rank or each.step != step or each.sequence != sequence:
            return False
    return True


def _lockstep(seen: Seen[object]) -> Finding | None:
    if in_lockstep(seen.observations):
        return None
    parts = []
    shown = []
    for rank, each in enumerate(seen.observations):
        own, point = each.rank == rank, each.point if each.names_match else "another point"
        parts.append((each.step, each.sequence, point, own))
        sender = "" if own else f" from rank {each.rank}"
        shown.append(f"rank {rank}: step {each.step} message {each.sequence} ({point}){sender}")
    step = majority([each.step for each in seen.observations])
    return Finding(f"the ranks are not at the same point: {', '.join(shown)}", step, minority(parts))


# A device compares the whole header of each message with the header that it must have, before it applies any rule.
LOCKSTEP: Law[Seen[object]] = Law("halt-together/any", (), _lockstep, lambda _: {}, stops=True)
"""The first law at every point, so that messages of different points are never compared."""
