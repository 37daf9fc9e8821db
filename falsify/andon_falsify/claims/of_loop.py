"""What is claimed of anyone's loop, and what one run of it decides."""

from __future__ import annotations

from dataclasses import replace

from andon_falsify.checkers import (
    gradient_law,
    halts,
    layout_equal,
    loss_finite,
    losses_close,
    replicas_agree,
    resume_equal,
    same_everywhere,
    samples_once,
    schedule,
)
from andon_falsify.claims.eligibility import outside
from andon_falsify.claims.evidence import of_trace
from andon_falsify.claims.statements import BASE, EVALUATION, RANDOMNESS, UPDATE
from andon_falsify.claims.table import judged
from andon_falsify.loops.sightings import first_of
from andon_falsify.subjects.trace import Trace
from andon_falsify.verdict import Claim, Verdict, unknown

_SHOWN = 4

ONE_RUN: tuple[Claim, ...] = (
    replicas_agree.CLAIM,
    samples_once.CLAIM,
    gradient_law.CLAIM,
    UPDATE,
    losses_close.CLAIM,
    loss_finite.CLAIM,
    schedule.CLAIM,
    BASE,
    layout_equal.CLAIM,
    EVALUATION,
)
"""What one run of a case decides."""
MORE_RUNS: tuple[Claim, ...] = (same_everywhere.CLAIM, resume_equal.CLAIM, halts.CLAIM, RANDOMNESS)
"""What needs further runs: see `campaign.further`."""
CLAIMS: tuple[Claim, ...] = (*ONE_RUN, *MORE_RUNS)
"""Every claim that is judged of a loop."""


def verdicts(trace: Trace) -> dict[str, Verdict]:
    """What one run says of every claim in `ONE_RUN`, by name. Where a rank failed, all of them are unknown."""
    why = failed(trace)
    if why:
        return {claim.name: unknown(claim, why) for claim in ONE_RUN}
    return {name: shortened(verdict) for name, verdict in judged(of_trace(trace), ONE_RUN).items()}


def failed(trace: Trace) -> str:
    """What went wrong with the ranks, in words; "" where all of them came to the end."""
    if trace.errors:
        return "; ".join(f"rank {rank}: {head_of(text)}" for rank, text in sorted(trace.errors.items()))
    if not first_of(trace).made and not first_of(trace).resumed_from:
        return "no step of an optimizer over parameters of the loop's `model` was seen"
    return outside(trace)


def head_of(text: str) -> str:
    """An error without its traceback."""
    return text.partition("\nTraceback")[0].strip()


def shortened(verdict: Verdict) -> Verdict:
    """The first counterexamples of many, with the number of the others."""
    more = len(verdict.counterexamples) - _SHOWN
    if more <= 0:
        return verdict
    why = f"{verdict.why}; {more} more counterexamples" if verdict.why else f"{more} more counterexamples"
    return replace(verdict, counterexamples=verdict.counterexamples[:_SHOWN], why=why)
