"""Collects the verdicts from the reports of tests, and closes the session with the number of claims checked.

A test writes its verdicts and the number of its runs into the properties of its report, under the names below, so that
they arrive from the workers of pytest-xdist too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from andon_contracts.legible import legible_line
from andon_falsify.report.findings import counterexample_lines, reasons
from andon_falsify.verdict import Claim, Outcome, Verdict, closing_line, merge

VERDICT, RUNS = "andon verdict", "andon runs"
ACCEPTED = (Outcome.HOLDS, Outcome.NOT_APPLICABLE)
_JSON = TypeAdapter(Verdict)


class Count:
    """The verdicts of a session. claims: every claim about its subject, which the closing line counts.

    expected_failed: the claims that may be falsified, with the reason; one that holds everywhere fails the session.
    """

    def __init__(self, claims: Sequence[Claim], expected_failed: Mapping[str, str]) -> None:
        self._expected_failed = expected_failed
        self._claims = claims
        self._verdicts: dict[str, list[Verdict]] = {}
        self._runs = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties if report.when == "teardown" else ():
            if name == VERDICT:
                verdict = _JSON.validate_json(str(value))
                self._verdicts.setdefault(verdict.claim, []).append(verdict)
            elif name == RUNS:
                self._runs += int(str(value))

    def _merged(self) -> list[Verdict]:
        return [merge(self._verdicts[claim.name]) for claim in self._claims if claim.name in self._verdicts]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the session for a falsified or unknown claim, and for a claim that holds but was expected to fail."""
        if hasattr(session.config, "workerinput") or session.exitstatus != pytest.ExitCode.OK:
            return
        if any(self._fails(verdict) for verdict in self._merged()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _fails(self, verdict: Verdict) -> bool:
        if verdict.claim in self._expected_failed and verdict.outcome is not Outcome.UNKNOWN:
            return verdict.outcome is Outcome.HOLDS
        return verdict.outcome not in ACCEPTED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The claims that do not simply hold, with the counterexample of the first failed test, and the count."""
        verdicts = self._merged()
        if not verdicts:
            return
        terminalreporter.section("claims")
        for verdict in verdicts:
            if verdict.outcome is not Outcome.HOLDS:
                terminalreporter.write_line(shown(replace(verdict, counterexamples=verdict.counterexamples[:1])))
            failed = [each for each in self._verdicts[verdict.claim] if each.outcome is Outcome.FALSIFIED]
            if len(failed) > 1:
                terminalreporter.write_line(f"  and in {len(failed) - 1} more failed tests")
            if reason := self._expected_failed.get(verdict.claim):
                expected = "as expected" if verdict.outcome is Outcome.FALSIFIED else "but expected to fall"
                terminalreporter.write_line(f"{verdict.claim}: {verdict.outcome.value}, {expected}: {reason}")
        terminalreporter.write_line(closing_line(verdicts, self._runs, len(self._claims) - len(verdicts)))


def recorded(verdict: Verdict) -> tuple[str, object]:
    """The property of a report that `Count` reads."""
    return VERDICT, _JSON.dump_json(verdict).decode()


def shown(verdict: Verdict) -> str:
    """A verdict with its smallest counterexample, and how many more there are, in lines that any terminal can show."""
    head = f"{verdict.claim}: {verdict.outcome.value}" + (f" ({why})" if (why := reasons(verdict)) else "")
    lines = [head, *counterexample_lines(verdict, "in the file of andon falsify --json")]
    return "\n".join(map(legible_line, lines))
