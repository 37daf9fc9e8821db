"""Every rank holds the same weights, optimizer state and reduced gradient after every update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice

from andon_falsify.history import History, StepEvent
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude, not_applicable

CLAIM = Claim(
    "replicas-agree",
    1,
    "After every update all ranks hold bitwise the same trainable weights and optimizer state, "
    "and before it the same reduced gradient.",
    "seed C-DP-001, F-DP-001, DTEC6C-INV-002",
)

_CAUSAL_ORDER = ("gradient", "optimizer", "weights")
_NAMED = 16


def check(history: History) -> Verdict:
    """Compare the digests of all ranks at every update, repeated ones included.

    Not applicable to a history of one rank. Unknown where a rank of the world left no digest, since what it did not
    report cannot agree; a watch says nothing of what has no replica, as shards, at any update, and that is not asked.
    A rank listed twice, or beyond the world, is a lie about the world size and falsifies.
    """
    if history.steps and all(event.world == 1 and len(event.ranks) == 1 for event in history.steps):
        return not_applicable(CLAIM, "one rank has nothing to agree with")
    fields = [field for field in _CAUSAL_ORDER if not _without_replica(history, field)]
    if not fields:
        return not_applicable(CLAIM, "what the ranks hold is sharded: no shard has a replica")
    checked, found, missing = 0, [], ""
    for event in history.steps:
        found += _wrong_world(event)
        for field in fields:
            digests = _digests(event, field)
            absent = _absent(event, digests)
            if absent:
                missing = missing or f"step {event.number}: no {field} digest of {absent}"
            if len(digests) > 1:
                checked += 1
                found += differing(f"the {field} differs between ranks", f"step {event.number}", digests)
    return conclude(CLAIM, checked, found, missing)


def _without_replica(history: History, field: str) -> bool:
    watched = history.start is not None and history.start.watched
    return watched and bool(history.steps) and not any(_digests(event, field) for event in history.steps)


def _wrong_world(event: StepEvent) -> list[Counterexample]:
    listed = [entry.rank for entry in event.ranks]
    if listed == [*range(len(listed))] and event.world in (None, len(listed)):
        return []
    times = Counter(listed)
    size = len(times) if event.world is None else event.world
    wrong = sorted(rank for rank, count in times.items() if count > 1 or not 0 <= rank < size)
    if not wrong:
        return []
    what = f"rank {wrong[0]} is listed {times[wrong[0]]} times in a world of {size}"
    return [Counterexample(what, f"step {event.number}", f"ranks 0 to {size - 1} once each", f"ranks {listed}")]


def _digests(event: StepEvent, field: str) -> dict[int, str]:
    held: dict[int, str | None] = {entry.rank: getattr(entry, field) for entry in event.ranks}
    return {rank: digest for rank, digest in held.items() if digest is not None}


def _absent(event: StepEvent, digests: Mapping[int, str]) -> str:
    size = len(event.ranks) if event.world is None else event.world
    if size < 1 or not event.ranks:
        return "any rank"
    # A damaged line may speak of a thousand million ranks.
    absent = list(islice((rank for rank in range(size) if rank not in digests), _NAMED + 1))
    more = f" and {size - len(digests) - _NAMED} more" if len(absent) > _NAMED else ""
    return f"rank {', '.join(map(str, absent[:_NAMED]))}{more}" if absent else ""


def differing(what: str, when: str, digests: Mapping[int, str]) -> list[Counterexample]:
    """`what` of the ranks that do not hold what most do (rank 0, where two digests are as frequent); else none."""
    if len(set(digests.values())) <= 1:
        return []
    counts = Counter(digests[rank] for rank in sorted(digests))
    usual = counts.most_common(1)[0][0]
    odd = {rank: digest for rank, digest in sorted(digests.items()) if digest != usual}
    where = f"{when}, rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))}"
    return [Counterexample(what, where, usual, ", ".join(dict.fromkeys(odd.values())))]
