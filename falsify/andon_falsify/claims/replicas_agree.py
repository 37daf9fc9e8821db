"""Every rank holds the same weights, optimizer state and reduced gradient after every update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Literal, cast

from andon_falsify.claims.evidence import Evidence
from andon_falsify.history import History, StepEvent
from andon_falsify.verdict import Claim, Clause, Counterexample, Outcome, Verdict, conclude, merge, not_applicable

if TYPE_CHECKING:
    from andon_falsify.loops.sightings import LoopSightings
    from andon_falsify.subjects.trace import Trace


def _has_replicas(evidence: Evidence) -> str:
    alone = evidence.of_script and evidence.history.steps and all(step.world == 1 for step in evidence.history.steps)
    return "one rank has no other to agree with" if alone else ""


CLAIM = Claim(
    "replicas-agree",
    1,
    "All ranks hold the same reduced gradient before each update, and the same trainable weights and optimizer state "
    "after it, to the bit.",
    order=10,
    subjects=("trainer", "loop", "script", "ledger"),
    needs=(_has_replicas,),
    clauses=(
        Clause("replicas-agree", "same"),
        Clause("optimizers-agree"),
        Clause("gradients-agree"),
        Clause("start-agrees"),
        Clause("ranks-joined"),
        Clause("buffers-agree"),
    ),
)
_CAUSAL_ORDER: tuple[Literal["gradient", "optimizer", "weights"], ...] = ("gradient", "optimizer", "weights")
_NAMED = 16


def check(evidence: Evidence) -> Verdict:
    """Weights, optimizer state and gradient of all ranks at every update.

    Of a loop also the weights at the start, what does not train at the end, and running statistics before the first
    forward pass of an update, when DDP has just broadcast them.
    """
    verdict = check_history(evidence.history)
    if not evidence.of_loop:
        return verdict
    trace = evidence.observed
    first = cast("LoopSightings", trace.first)
    if first.sharded:
        return not_applicable(CLAIM, "the parameters are sharded: no rank has a replica")
    if verdict.outcome is Outcome.NOT_APPLICABLE:
        return verdict
    ends = {rank: end for rank, (_, end) in trace.gathered("frozen").items() if end}
    found = [
        *_differing("the initial weights differ between ranks", "before step 1", trace.gathered("start")),
        *_differing("frozen weights or buffers differ between ranks", "at the end", ends),
        *_statistics(trace, sorted(first.made)),
    ]
    return merge([conclude(CLAIM, len(ends), found), verdict] if found else [verdict])


def _statistics(trace: Trace, updates: list[int]) -> list[Counterexample]:
    held: dict[tuple[int, int], str] = trace.gathered("running")
    for step in updates:
        digests = {rank: digest for (rank, at), digest in held.items() if at == step}
        found = _differing("running statistics differ between ranks", f"before step {step}", digests)
        if found and 0 in digests:
            return found
    return []


def check_history(history: History) -> Verdict:
    """Compare the digests of all ranks at every update, repeated ones included.

    Not applicable to one rank. Unknown if a rank of the world left no digest; a watch reports none of what has no
    replica, as shards, at any update, and there none is required. A rank that is listed twice or beyond the world
    contradicts the world size and falsifies.
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
                found += _differing(f"the {field} differs between ranks", f"step {event.number}", digests, field)
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


def _differing(
    what: str,
    when: str,
    digests: Mapping[int, str],
    quantity: Literal["gradient", "optimizer", "weights"] = "weights",
) -> list[Counterexample]:
    """`what` of the ranks whose digest is not the most frequent one (that of rank 0, if two are as frequent)."""
    if len(set(digests.values())) <= 1:
        return []
    usual = Counter(digests[rank] for rank in sorted(digests)).most_common(1)[0][0]
    odd = {rank: digest for rank, digest in sorted(digests.items()) if digest != usual}
    where = f"{when}, rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))}"
    return [Counterexample(what, where, usual, ", ".join(dict.fromkeys(odd.values())), quantity=quantity)]
