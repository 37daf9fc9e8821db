"""What pytest needs for the compliance tests: the option, the fixtures, and the last line that counts the claims.

Registered by the conftest.py beside the tests; with `--pyargs` pytest reads that only after its command line, so there
`-p andon_falsify.compliance.plugin` brings in the option. Verdicts travel in the tests' reports, so that they arrive
from the workers of pytest-xdist too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from andon_falsify.compliance.claims import CLAIMS
from andon_falsify.compliance.power import Laboratory
from andon_falsify.ranks.pool import RankPools
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.protocol import Remembering
from andon_falsify.subjects.trace import Trace
from andon_falsify.subjects.trainer import CPU_BACKENDS, GPU_BACKENDS, AndonTrainer, why_not
from andon_falsify.verdict import Claim, Counterexample, Outcome, Verdict, closing_line, merge, not_applicable, unknown

_VERDICT, _CLAIMS, _RUNS = "andon verdict", "andon claims", "andon runs"
_ACCEPTED = (Outcome.HOLDS, Outcome.NOT_APPLICABLE)


class Court:
    """Runs cases for one test and holds their verdicts against the claims."""

    def __init__(self, request: pytest.FixtureRequest, subject: Remembering) -> None:
        self._node = request.node
        self._subject = subject

    def run(self, case: Case) -> Trace:
        """The trace of `case`. Fails the test where a rank ended with an error."""
        trace = self._subject.run(case)
        if trace.errors:
            pytest.fail("\n".join(f"rank {rank}: {text}" for rank, text in sorted(trace.errors.items())))
        return trace

    @property
    def subject(self) -> Remembering:
        """The trainer itself, for checks that run it several times."""
        return self._subject

    def hold(self, *verdicts: Verdict) -> None:
        """Enter `verdicts` into the count; the test fails unless each holds or does not apply."""
        for verdict in verdicts:
            entry = json.dumps([verdict.claim, verdict.outcome.value, verdict.checked, str(verdict)])
            self._node.user_properties.append((_VERDICT, entry))
        broken = [str(verdict) for verdict in verdicts if verdict.outcome not in _ACCEPTED]
        if broken:
            pytest.fail("\n".join(broken), pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--backend NAME`, more than once if need be."""
    parser.addoption(
        "--backend",
        action="append",
        choices=[*CPU_BACKENDS, *GPU_BACKENDS],
        help="the backend to try to falsify (again for another); all that run on a CPU if not given",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark and whoever counts."""
    config.addinivalue_line("markers", "claim(*names): the claims that a test checks")
    config.pluginmanager.register(Count(), "andon-falsify-count")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each selected backend, skipped with its reason where this machine cannot run it."""
    if "backend" not in metafunc.fixturenames:
        return
    chosen = metafunc.config.getoption("--backend", None) or CPU_BACKENDS
    metafunc.parametrize("backend", [_param(name) for name in dict.fromkeys(chosen)])


def _param(backend: str) -> Any:
    reason = why_not(backend)
    return pytest.param(backend, marks=[pytest.mark.skip(reason=reason)] if reason else [])


def pytest_itemcollected(item: pytest.Item) -> None:
    """Write a test's claims into its report."""
    names = [name for mark in item.iter_markers("claim") for name in mark.args]
    known = {claim.name for claim in CLAIMS}
    if unknown_names := [name for name in names if name not in known]:
        raise pytest.UsageError(f"{item.nodeid}: there is no claim {', '.join(unknown_names)}")
    item.user_properties.append((_CLAIMS, ",".join(names)))


@pytest.fixture(scope="session")
def pools() -> Iterator[RankPools]:
    """Where the ranks of `gloo` live."""
    with RankPools() as held:
        yield held


@pytest.fixture(scope="session")
def subject(pools: RankPools) -> Remembering:
    """Our trainer; it does not run a case twice."""
    return Remembering(AndonTrainer(pools))


@pytest.fixture
def court(request: pytest.FixtureRequest, subject: Remembering) -> Iterator[Court]:
    """Runs cases and holds verdicts for one test."""
    before = subject.runs
    yield Court(request, subject)
    request.node.user_properties.append((_RUNS, str(subject.runs - before)))


@pytest.fixture(scope="session")
def session_laboratory(subject: Remembering) -> Laboratory:
    """Plants faults in our trainer, and keeps the runs without them for the whole session."""
    return Laboratory(subject)


@pytest.fixture
def laboratory(session_laboratory: Laboratory, court: Court) -> Laboratory:
    """Plants faults in our trainer; the runs are counted with the test's."""
    del court
    return session_laboratory


class Count:
    """Collects what the reports say of claims, and closes the session with the count."""

    def __init__(self) -> None:
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
            if name == _VERDICT:
                claim, outcome, checked, text = json.loads(str(value))
                self._verdicts.setdefault(claim, []).append(_restored(claim, Outcome(outcome), checked, text))
            elif name == _CLAIMS:
                self._selected |= dict.fromkeys(filter(None, str(value).split(",")), report.nodeid)
            elif name == _RUNS:
                self._runs += int(str(value))

    def _skipped(self, report: pytest.TestReport) -> None:
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
        names = [value for name, value in report.user_properties if name == _CLAIMS]
        for name in filter(None, ",".join(map(str, names)).split(",")):
            self._verdicts.setdefault(name, []).append(not_applicable(_claim(name), reason))

    def verdicts(self) -> list[Verdict]:
        """One verdict for each claim that a test was to check; unknown where none did."""
        names = [claim.name for claim in CLAIMS if claim.name in {*self._selected, *self._verdicts}]
        return [
            merge(self._verdicts[name])
            if name in self._verdicts
            else unknown(_claim(name), f"no test said anything, {self._selected[name]} was to")
            for name in names
        ]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A claim that is unknown fails the session, as a falsified one does."""
        if hasattr(session.config, "workerinput") or session.exitstatus != pytest.ExitCode.OK:
            return
        if any(verdict.outcome not in _ACCEPTED for verdict in self.verdicts()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The claims that do not simply hold, and the count."""
        verdicts = self.verdicts()
        if not verdicts:
            return
        terminalreporter.section("claims")
        for verdict in verdicts:
            if verdict.outcome is not Outcome.HOLDS:
                terminalreporter.write_line(str(verdict))
        left_out = len(CLAIMS) - len(verdicts)
        terminalreporter.write_line(closing_line(verdicts, self._runs, left_out))


def _claim(name: str) -> Claim:
    return next(claim for claim in CLAIMS if claim.name == name)


def _restored(claim: str, outcome: Outcome, checked: int, text: str) -> Verdict:
    """A verdict as far as the count needs it; its counterexamples are in the report of the test that failed."""
    if outcome is Outcome.FALSIFIED:
        return Verdict(claim, outcome, "", checked, (Counterexample(text.partition("\n")[2].strip()),))
    why = text.partition("(")[2].removesuffix(")") if outcome is not Outcome.HOLDS else ""
    return Verdict(claim, outcome, why, checked)


def register(pluginmanager: pytest.PytestPluginManager) -> None:
    """Make this module a plugin, once, whichever conftest.py asks first."""
    this = sys.modules[__name__]
    if not pluginmanager.is_registered(this):
        pluginmanager.register(this)
