"""Every claim of a run once: what it needs, and which account of the run it judges.

The same entry judges a ledger, a script, a loop and our own trainer. What evidence lacks makes a claim not applicable,
by its needs and not by a list that somebody keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Literal

from andon_falsify import checkers
from andon_falsify.claims.between import everywhere, resumed
from andon_falsify.claims.evidence import Evidence, Need, tensors
from andon_falsify.claims.one_run import finite, halted, layouts, memory, rates, replicas
from andon_falsify.claims.rows import plan, samples
from andon_falsify.claims.statements import BASE, EVALUATION, NORM, RANDOMNESS, UPDATE
from andon_falsify.verdict import Claim, Verdict, judge, not_applicable

Account = Literal["witness", "accused", "either"]
"""Whose word is judged; "either": the witness's where there was one, else that of the accused."""


@dataclass(frozen=True)
class Checker:
    """What judges one claim. needs: why it does not apply, asked in order before `check`."""

    claim: Claim
    check: Callable[[Evidence], Verdict]
    account: Account = "either"
    needs: tuple[Need, ...] = ()


def _of(module: str, name: str) -> Callable[[Evidence], Verdict]:
    """A check whose module needs torch, which is not loaded where ledgers alone are judged: when it is first asked."""

    def check(evidence: Evidence) -> Verdict:
        found: Callable[[Evidence], Verdict] = getattr(import_module(f"andon_falsify.claims.{module}"), name)
        return found(evidence)

    return check


def _a_ledger(evidence: Evidence) -> str:
    return "" if evidence.ledger is not None else "the accused keeps no ledger"


def _a_law(evidence: Evidence) -> str:
    return evidence.law.why_not


def _losses_told(evidence: Evidence) -> str:
    if evidence.of_loop and not getattr(evidence.sightings.first, "told_losses", ()):
        return "the loop tells no loss (told.loss)"
    silent = evidence.of_script and all(step.loss is None for step in evidence.told.steps)
    return "the script tells no loss (w.loss)" if silent else ""


def _somebody_to_agree_with(evidence: Evidence) -> str:
    alone = evidence.of_script and evidence.told.steps and all(step.world == 1 for step in evidence.told.steps)
    return "one rank has nobody to agree with" if alone else ""


def _halts(evidence: Evidence) -> str:
    silent = not evidence.declares("halts")
    return "the loop does not say that it stops at what is not finite (`halts`)" if silent else ""


def _evaluates(evidence: Evidence) -> str:
    evaluates = evidence.of_loop and evidence.declares("evaluates")
    return "" if evaluates else "the loop does not evaluate (`evaluate`)"


def _restores(evidence: Evidence) -> str:
    return "" if evidence.declares("restores") else "the loop does not save and load (`save`, `load`)"


def chain(evidence: Evidence) -> Verdict:
    """The links of the ledger of the accused; what a resume had cut off of it is said."""
    assert evidence.ledger is not None
    verdict = checkers.chain_intact.check(evidence.ledger)
    resumes = evidence.ledger.of_kind("resume")
    cut = [(each.line, each.fields.get("torn")) for each in resumes if each.fields.get("torn")]
    said = [f"the resume at line {line} had cut off {size} bytes of a torn line" for line, size in cut]
    return replace(verdict, reasons=(*verdict.reasons, *said))


_CHECKERS = (
    Checker(checkers.replicas_agree.CLAIM, replicas, needs=(_somebody_to_agree_with,)),
    Checker(checkers.samples_once.CLAIM, samples),
    Checker(checkers.plan_followed.CLAIM, plan),
    Checker(checkers.same_everywhere.CLAIM, everywhere),
    Checker(checkers.halts.CLAIM, halted, needs=(_halts,)),
    Checker(checkers.resume_equal.CLAIM, resumed, needs=(_restores,)),
    Checker(checkers.chain_intact.CLAIM, chain, "accused", needs=(_a_ledger,)),
    Checker(checkers.loss_finite.CLAIM, finite, needs=(_losses_told,)),
    Checker(checkers.schedule.CLAIM, rates),
    Checker(checkers.losses_close.CLAIM, _of("gradient", "losses"), "witness", needs=(tensors("loss of a reference"),)),
    Checker(checkers.memory_within.CLAIM, memory, "witness", needs=(tensors("bytes of memory"),)),
    Checker(checkers.layout_equal.CLAIM, layouts, "witness", needs=(tensors("layout of tensors"),)),
    Checker(checkers.gradient_law.CLAIM, _of("gradient", "gradient"), "witness", needs=(tensors("gradient"), _a_law)),
    Checker(
        UPDATE,
        _of("update", "update"),
        "witness",
        needs=(tensors("weights"), lambda evidence: evidence.law.why_no_update),
    ),
    Checker(NORM, _of("gradient", "norms"), "witness", needs=(tensors("norm of a reference"), _a_law)),
    Checker(BASE, _of("update", "base"), "witness", needs=(tensors("frozen tensors"),)),
    Checker(
        EVALUATION,
        _of("evaluation", "evaluation"),
        "witness",
        needs=(tensors("evaluation"), _evaluates),
    ),
    Checker(
        RANDOMNESS,
        _of("randomness", "randomness"),
        "witness",
        needs=(tensors("state of a generator"),),
    ),
)
CHECKERS: Mapping[str, Checker] = {checker.claim.name: checker for checker in _CHECKERS}
"""By the name of its claim."""


def unmet(claim: Claim, evidence: Evidence) -> str:
    """Why `claim` does not apply to `evidence`: the first need of its checker that is not met; "" where it applies."""
    return next(filter(None, (need(evidence) for need in CHECKERS[claim.name].needs)), "")


def judged_by(claim: Claim, evidence: Evidence) -> Verdict:
    """What the checker of `claim` says of `evidence`: not applicable where a need is unmet, unknown where it throws."""

    def check() -> Verdict:
        why = unmet(claim, evidence)
        return not_applicable(claim, why) if why else CHECKERS[claim.name].check(evidence)

    return judge(claim, check)


def judged(evidence: Evidence, claims: Iterable[Claim]) -> dict[str, Verdict]:
    """What is to be said of each of `claims`, by name."""
    return {claim.name: judged_by(claim, evidence) for claim in claims}
