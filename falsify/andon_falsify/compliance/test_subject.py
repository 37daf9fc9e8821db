"""The claims about the subject that `--subject` or `--script` names, with the trials of `andon falsify`."""

from __future__ import annotations

import pytest

from andon_contracts.legible import legible
from andon_falsify.compliance.plugin import ClaimAtPlace, ClaimRunner, Suite, shown
from andon_falsify.verdict import Outcome


def test_the_claim(runner: ClaimRunner, suite: Suite, claim_at_place: ClaimAtPlace) -> None:
    """The claim holds in every trial of its layout. Falsified and unknown fail; a claim that does not apply is skipped.

    A claim that is expected to fail may be falsified here; the end of the session fails if it holds everywhere.
    """
    verdict = suite.verdict(claim_at_place)
    reason = suite.expected_failed.get(verdict.claim)
    if reason is not None and verdict.outcome is Outcome.FALSIFIED:
        runner.record(verdict)
        pytest.xfail(legible(f"{reason}: {shown(verdict)}"))
    runner.require(verdict)
    if verdict.outcome is Outcome.NOT_APPLICABLE:
        pytest.skip(legible(verdict.why))
