"""Every rank holds the same weights, optimizer state and reduced gradient after every update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Literal

from andon_falsify.claims.evidence import Evidence
from andon_falsify.history import History, StepEvent
from andon_falsify.verdict import Claim, Clause, Counterexample, Outcome, Verdict, conclude, merge, not_applicable

_ALONE = "one rank has no other to agree with"
CLAIM = Claim(
    "replicas-agree",
    1,
    "All ranks hold the same reduced gradient before each update, and the same trainable weights and optimizer state "
    "after it, to the bit.",
    order=10,
    subjects=("trainer", "loop", "script", "ledger"),
    needs=(lambda run: _ALONE if run.of_script and {step.world for step in run.history.steps} == {1} else "",),
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


def check(evidence: Evidence) -> Verdict:
    """Weights, optimizer state and gradient of all ranks at every update.

    Of a loop also the weights at the start, what does not train at the end, and running statistics before the first
    forward pass of an update, when DDP has just broadcast them.
    """
    verdict = check_history(evidence.history)
    if not evidence.of_loop:
        return verdict
    from andon_falsify.loops.sightings import first_of

    trace, first = evidence.observed, first_of(evidence.observed)
    if first.sharded:
        return not_applicable(CLAIM, "the parameters are sharded: no rank has a replica")
    if verdict.outcome is Outcome.NOT_APPLICABLE:
        return verdict
    ends = {rank: end for rank, (_, end) in trace.gathered("frozen").items() if end}
    found = [
        *_differing("the initial weights differ between ranks", "before step 1", trace.gathered("start")),
        *_differing("frozen weights or buffers differ between ranks", "at the end", ends),
    ]
    held: dict[tuple[int, int], str] = trace.gathered("running")
    for step in sorted(first.made):
        digests = {rank: digest for (rank, at), digest in held.items() if at == step}
        apart = _differing("running statistics differ between ranks", f"before step {step}", digests)
        if apart and 0 in digests:
            found += apart
            break
    return merge([conclude(CLAIM, len(ends), found), verdict] if found else [verdict])


def check_history(history: History) -> Verdict:
    """Compare the digests of all ranks at every update, repeated ones included.

    Not applicable to one rank. Unknown if a rank of the world left no digest; a watch reports none of what has no
    replica, as shards, at any update, and there none is required. A rank that is listed twice or beyond the world
    contradicts the world size and falsifies.
    """
    if history.steps and all(event.world == 1 and len(event.ranks) == 1 for event in history.steps):
        return not_applicable(CLAIM, "one rank has nothing to agree with")
    watched = history.start is not None and history.start.watched and bool(history.steps)
    fields = [name for name in _CAUSAL_ORDER if not watched or any(_digests(event, name) for event in history.steps)]
    if not fields:
        return not_applicable(CLAIM, "what the ranks hold is sharded: no shard has a replica")
    checked, found, missing = 0, [], ""
    for event in history.steps:
        found += _wrong_world(event)
        for field in fields:
            digests = _digests(event, field)
            if absent := _absent(event, digests):
                missing = missing or f"step {event.number}: no {field} digest of {absent}"
            if len(digests) > 1:
                checked += 1
                what = f"the {field} differ{'s' * (field != 'weights')} between ranks"
                found += _differing(what, f"step {event.number}", digests, field)
    if found and found[0].where.startswith("step 1,"):
        what = "the initial weights differ between ranks"
        before = [each.fields for each in history.of_kind("violation") if each.step == 0]
        seen = [str(each["seen"]) for each in before if each.get("clause") == CLAIM.name and each.get("seen")]
        found[:0] = [Counterexample(what, "before step 1", "equal weights", each, quantity="weights") for each in seen]
    return conclude(CLAIM, checked, found, missing)


def _wrong_world(event: StepEvent) -> list[Counterexample]:
    listed = [entry.rank for entry in event.ranks]
    if listed == [*range(len(listed))] and event.world in (None, len(listed)):
        return []
    times = Counter(listed)
    size = len(times) if event.world is None else event.world
    if not (wrong := sorted(rank for rank, count in times.items() if count > 1 or not 0 <= rank < size)):
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
    absent = list(islice((rank for rank in range(size) if rank not in digests), 17))
    more = f" and {size - len(digests) - 16} more" if len(absent) > 16 else ""
    return f"rank {', '.join(map(str, absent[:16]))}{more}" if absent else ""


def _differing(
    what: str, when: str, digests: Mapping[int, str], quantity: Literal["gradient", "optimizer", "weights"] = "weights"
) -> list[Counterexample]:
    if len(set(digests.values())) <= 1:
        return []
    usual = Counter(digests[rank] for rank in sorted(digests)).most_common(1)[0][0]
    odd = {rank: digest for rank, digest in sorted(digests.items()) if digest != usual}
    where = f"{when}, rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))}"
    return [Counterexample(what, where, usual, ", ".join(dict.fromkeys(odd.values())), quantity=quantity)]
