"""Claims: one module for each, from the evidence of a run to a verdict, for every kind of subject.

A claim's module has, from top to bottom, `CLAIM` (a `Claim`, with the further runs and the needs of its check),
`check(evidence: Evidence) -> Verdict`, and the helpers of that check. It imports torch, and modules that import torch,
inside functions, since `andon verify` judges ledgers without torch. Every module here that is not in `_SHARED` is a
claim. A check is called only if no need of the claim gives a reason not to.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from importlib import import_module

from andon_falsify.claims.evidence import Evidence, RunUnavailable
from andon_falsify.verdict import Claim, Kind, Verdict, not_applicable, unknown

_SHARED = {"alike", "clauses", "evidence", "explain", "laws", "ledgers", "rounding", "updates"}
"""Modules that several claims use, or that use the claims; two of them import torch."""
_NAMES = [module.name for module in pkgutil.iter_modules(__path__) if module.name not in _SHARED]
_MODULES = [import_module(f"{__name__}.{name}") for name in _NAMES]
CLAIMS: tuple[Claim, ...] = tuple(sorted((each.CLAIM for each in _MODULES), key=lambda each: (each.order, each.name)))
"""Every claim, in the order of reports."""
CHECKS: dict[str, Callable[[Evidence], Verdict]] = {module.CLAIM.name: module.check for module in _MODULES}


def claims_of(kind: Kind) -> tuple[Claim, ...]:
    """The claims that are judged of a kind of subject."""
    return tuple(claim for claim in CLAIMS if kind in claim.subjects)


def unmet(claim: Claim, evidence: Evidence) -> str:
    """Why `claim` does not apply to `evidence`: the first need that is not met; "" if it applies."""
    return next(filter(None, (need(evidence) for need in claim.needs)), "")


def judged_by(claim: Claim, evidence: Evidence) -> Verdict:
    """The verdict of the check of `claim`: not applicable if a need is unmet, unknown if the check raises."""
    try:
        why = unmet(claim, evidence)
        return not_applicable(claim, why) if why else CHECKS[claim.name](evidence)
    except RunUnavailable as error:
        return unknown(claim, str(error), remedy=error.remedy)
    except Exception as error:  # noqa: BLE001 -- a check that raises proves nothing: unknown
        return unknown(claim, f"the checker failed: {type(error).__name__}: {error}")


def judged(evidence: Evidence, claims: Iterable[Claim] | None = None) -> dict[str, Verdict]:
    """The verdicts on `evidence` by claim: of `claims`, by default all that there are of its kind of subject."""
    return {each.name: judged_by(each, evidence) for each in (claims_of(evidence.kind) if claims is None else claims)}
