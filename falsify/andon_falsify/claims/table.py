"""Every claim of a run once: what it needs, and which account of the run it judges.

The same entry judges a ledger, a script, a loop and our own trainer. What evidence lacks makes a claim not applicable,
by its needs and not by a list that somebody keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from andon_falsify import checkers
from andon_falsify.claims import (
    base_frozen,
    evaluation_law,
    gradient_law,
    loss_finite,
    losses_close,
    norm_law,
    plan_followed,
    randomness_apart,
    samples_once,
    schedule,
    update_law,
)
from andon_falsify.claims.between import everywhere, resumed
from andon_falsify.claims.evidence import Evidence, Need, tensors
from andon_falsify.claims.one_run import halted, layouts, memory, replicas
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


def _of(module: Any) -> Checker:
    """What judges the claim of a module that has `CLAIM` and `check`."""
    return Checker(module.CLAIM, module.check, module.CLAIM.account, module.CLAIM.needs)


def _a_ledger(evidence: Evidence) -> str:
    return "" if evidence.ledger is not None else "the accused keeps no ledger"


def _somebody_to_agree_with(evidence: Evidence) -> str:
    alone = evidence.of_script and evidence.told.steps and all(step.world == 1 for step in evidence.told.steps)
    return "one rank has nobody to agree with" if alone else ""


def _halts(evidence: Evidence) -> str:
    silent = not evidence.declares("halts")
    return "the loop does not say that it stops at what is not finite (`halts`)" if silent else ""


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
    _of(samples_once),
    _of(plan_followed),
    Checker(checkers.same_everywhere.CLAIM, everywhere),
    Checker(checkers.halts.CLAIM, halted, needs=(_halts,)),
    Checker(checkers.resume_equal.CLAIM, resumed, needs=(_restores,)),
    Checker(checkers.chain_intact.CLAIM, chain, "accused", needs=(_a_ledger,)),
    _of(loss_finite),
    _of(schedule),
    _of(losses_close),
    Checker(checkers.memory_within.CLAIM, memory, "witness", needs=(tensors("bytes of memory"),)),
    Checker(checkers.layout_equal.CLAIM, layouts, "witness", needs=(tensors("layout of tensors"),)),
    *map(_of, (gradient_law, update_law, norm_law, base_frozen, evaluation_law, randomness_apart)),
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
