"""What all ranks of a loop must have alike: weights, optimizer state, gradients, statistics, and learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from andon_falsify.checkers import replicas_agree, schedule
from andon_falsify.loops.sightings import LoopSightings, first_of
from andon_falsify.subjects.trace import Trace
from andon_falsify.verdict import Counterexample, Outcome, Verdict, conclude, merge, not_applicable


def replicas(trace: Trace) -> Verdict:
    """Weights at the start; these, optimizer state and gradient at every update; what does not train at the end.

    Running statistics are compared before the first forward pass of an update, where DDP has just sent them round.
    """
    claim = replicas_agree.CLAIM
    if first_of(trace).sharded:
        return not_applicable(claim, "the parameters are sharded: no rank has a replica")
    verdict = replicas_agree.check(trace.seen)
    if verdict.outcome is Outcome.NOT_APPLICABLE:
        return verdict
    ends = {rank: end for rank, (_, end) in trace.gathered("frozen").items() if end}
    found = [
        *_apart("the initial weights differ between ranks", "before step 1", trace.gathered("start")),
        *_apart("frozen weights or buffers differ between ranks", "at the end", ends),
        *_statistics(trace),
    ]
    return merge([conclude(claim, len(ends), found), verdict] if found else [verdict])


def _apart(what: str, when: str, digests: Mapping[int, str]) -> Iterator[Counterexample]:
    odd = [rank for rank, digest in sorted(digests.items()) if digest != digests[0]]
    if odd:
        where = f"{when}, rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))}"
        yield Counterexample(what, where, digests[0], digests[odd[0]])


def _statistics(trace: Trace) -> Iterator[Counterexample]:
    """The first update before which running statistics are not those of rank 0."""
    held: dict[tuple[int, int], str] = trace.gathered("running")
    for step in sorted(first_of(trace).made):
        digests = {rank: digest for (rank, at), digest in held.items() if at == step}
        if 0 in digests and len(set(digests.values())) > 1:
            yield from _apart("running statistics differ between ranks", f"before step {step}", digests)
            return


def rates(trace: Trace) -> Verdict:
    """The declared rate of every update, or that of the case throughout in every group; and the same on all ranks."""
    claim, first = schedule.CLAIM, first_of(trace)
    apart = [*_rates_apart(trace), *_rates_of_groups(trace)]
    if "schedules" in first.claims:
        declared = schedule.check(trace.seen, lambda step: _held(first, step, first.rates.get(step, math.nan)))
    elif len({made.rate for made in first.made.values()}) > 1:
        why = "the rate changes, and the loop declares no schedule (`rate`)"
        declared = not_applicable(claim, why)
    else:
        declared = schedule.check(trace.seen, lambda step: _held(first, step, trace.case.lr))
    return merge([declared, conclude(claim, len(first.made), apart)]) if apart else declared


def _held(first: LoopSightings, step: int, wanted: float) -> float:
    """`wanted`, or the rate that `step` had where that is `wanted` in fp32: optimizers may keep it as a tensor."""
    seen = first.made[step].rate if step in first.made else wanted
    rounded = float(torch.tensor(seen, dtype=torch.float32)) == seen
    return seen if rounded and math.isclose(seen, wanted, rel_tol=2.0**-22) else wanted


def _rates_of_groups(trace: Trace) -> Iterator[Counterexample]:
    """The first update with a group at another rate than the first, of a loop that declares no schedule of its own."""
    first = first_of(trace)
    for step, made in sorted(first.made.items()) if "schedules" not in first.claims else ():
        odd = [place for place, rate in enumerate(made.rates) if not math.isclose(rate, made.rate, rel_tol=2.0**-22)]
        if odd:
            what = f"group {odd[0]} of the optimizer has another learning rate than group 0"
            yield Counterexample(what, f"step {step}", f"{made.rate:.9g}", f"{made.rates[odd[0]]:.9g}")
            return


def _rates_apart(trace: Trace) -> Iterator[Counterexample]:
    for part in trace.parts[1:]:
        assert isinstance(part, LoopSightings)
        for step, made in sorted(first_of(trace).made.items()):
            theirs = part.made.get(step)
            if theirs is not None and theirs.rates != made.rates:
                where = f"step {step}, rank {part.ranks[0]}"
                mine, own = (", ".join(f"{rate:.9g}" for rate in each.rates) for each in (made, theirs))
                yield Counterexample("another learning rate than on rank 0", where, mine, own)
                break
