"""Collects what the reports of tests say of claims, and closes the session with the count.

What it needs of a test travels in the properties of its report, under the names below.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from andon_contracts.legible import legible_line
from andon_falsify.campaign.wording import counterexample_lines, said_besides
from andon_falsify.verdict import Claim, Counterexample, Outcome, Verdict, closing_line, merge, not_applicable, unknown

VERDICT, CLAIMS, RUNS = "andon verdict", "andon claims", "andon runs"
ACCEPTED = (Outcome.HOLDS, Outcome.NOT_APPLICABLE)


class Count:
    """The verdicts of a session. `claims` are all that there are of its subject, for the count's N.

    expected_failed: why some may fall, by name; one that is falsified nowhere fails the session.
    """

    def __init__(self, claims: Sequence[Claim], expected_failed: Mapping[str, str] | None = None) -> None:
        self._expected_failed = expected_failed or {}
        self._claims = {claim.name: claim for claim in claims}
        self._verdicts: dict[str, list[Verdict]] = {}
        self._selected: dict[str, str] = {}
        self._runs = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the verdicts out of a test's last report."""
        if report.when != "teardown":
            if report.skipped:
                self._skipped(report)
            return
        for name, value in report.user_properties:
            if name == VERDICT:
                claim, outcome, checked, text = json.loads(str(value))
                self._verdicts.setdefault(claim, []).append(_restored(claim, Outcome(outcome), checked, text))
            elif name == CLAIMS:
                self._selected |= dict.fromkeys(filter(None, str(value).split(",")), report.nodeid)
            elif name == RUNS:
                self._runs += int(str(value))

    def _skipped(self, report: pytest.TestReport) -> None:
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
        names = [value for name, value in report.user_properties if name == CLAIMS]
        for name in filter(None, ",".join(map(str, names)).split(",")):
            self._verdicts.setdefault(name, []).append(not_applicable(self._claims[name], reason))

    def verdicts(self) -> list[Verdict]:
        """One verdict for each claim that a test was to check; unknown where none did."""
        names = [name for name in self._claims if name in {*self._selected, *self._verdicts}]
        return [
            merge(self._verdicts[name])
            if name in self._verdicts
            else unknown(self._claims[name], f"no test said anything, {self._selected[name]} was to")
            for name in names
        ]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A claim that is unknown fails the session, as a falsified one does, and one that was to fall and holds."""
        if hasattr(session.config, "workerinput") or session.exitstatus != pytest.ExitCode.OK:
            return
        if any(self._fails(verdict) for verdict in self.verdicts()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _fails(self, verdict: Verdict) -> bool:
        if verdict.claim in self._expected_failed and verdict.outcome is not Outcome.UNKNOWN:
            return verdict.outcome is Outcome.HOLDS
        return verdict.outcome not in ACCEPTED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The claims that do not simply hold, and the count."""
        verdicts = self.verdicts()
        if not verdicts:
            return
        terminalreporter.section("claims")
        for verdict in verdicts:
            if verdict.outcome is not Outcome.HOLDS:
                terminalreporter.write_line(_summed_up(verdict))
            if reason := self._expected_failed.get(verdict.claim):
                expected = "as expected" if verdict.outcome is Outcome.FALSIFIED else "but expected to fall"
                terminalreporter.write_line(f"{verdict.claim}: {verdict.outcome.value}, {expected}: {reason}")
        left_out = len(self._claims) - len(verdicts)
        terminalreporter.write_line(closing_line(verdicts, self._runs, left_out))


def shown(verdict: Verdict) -> str:
    """A verdict in lines that can be shown anywhere: its smallest counterexample, and how many more there are."""
    why = said_besides(verdict)
    head = f"{verdict.claim}: {verdict.outcome.value}" + (f" ({why})" if why else "")
    lines = [head, *counterexample_lines(verdict, "in the file of andon falsify --json")]
    return "\n".join(map(legible_line, lines))


def _summed_up(verdict: Verdict) -> str:
    """The first failed test of a claim stands for the others."""
    others = len(verdict.counterexamples) - 1
    kept = replace(verdict, counterexamples=verdict.counterexamples[:1])
    return f"{kept}\n  and in {others} more failed tests" if others > 0 else str(kept)


def _restored(claim: str, outcome: Outcome, checked: int, text: str) -> Verdict:
    """A verdict as far as the count needs it; its counterexamples are in the report of the test that failed."""
    if outcome is Outcome.FALSIFIED:
        return Verdict(claim, outcome, (), checked, (Counterexample(text.partition("\n")[2].strip()),))
    why = text.partition("(")[2].removesuffix(")") if outcome is not Outcome.HOLDS else ""
    return Verdict(claim, outcome, (why,) if why else (), checked)
