"""The claims about any subject that `--subject` or `--script` names, case by case as `andon falsify` tries them."""

from __future__ import annotations

import pytest

from andon_contracts.legible import legible
from andon_falsify.campaign.suite import ClaimAtPlace, Suite
from andon_falsify.compliance import counting
from andon_falsify.compliance.plugin import Court
from andon_falsify.verdict import Outcome


def test_the_claim(court: Court, suite: Suite, claim_at_place: ClaimAtPlace) -> None:
    """It holds in every case at its place; falsified and unknown fail, what does not apply is skipped and says why.

    One that may fall does so without failing; that it falls nowhere is for the end of the session.
    """
    verdict = suite.verdict(claim_at_place)
    reason = suite.expected_failed.get(verdict.claim)
    if reason is not None and verdict.outcome is Outcome.FALSIFIED:
        court.enter(verdict)
        pytest.xfail(legible(f"{reason}: {counting.shown(verdict)}"))
    court.hold(verdict)
    if verdict.outcome is Outcome.NOT_APPLICABLE:
        pytest.skip(legible(verdict.why))
