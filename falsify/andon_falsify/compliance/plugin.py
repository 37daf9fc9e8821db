"""The pytest plugin of the compliance tests: options, fixtures, and the last line that counts the claims.

The entry point `andon_falsify` (entry.py) loads it for `--pyargs andon_falsify`, and falsify/conftest.py in a checkout.
Without `--subject` or `--script` the tests of our own trainer are collected; with one of them the claims about that
subject.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from andon.console.messages import InputError
from andon_contracts.legible import legible, legible_line
from andon_falsify.campaign.request import Request, read_request
from andon_falsify.campaign.run import Campaign, opened
from andon_falsify.campaign.trial import Trial
from andon_falsify.campaign.warm_bench import AndonBench
from andon_falsify.claims import claims_of
from andon_falsify.ranks.pool import RankPools
from andon_falsify.report.findings import counterexample_lines, reasons
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.placing import CPU_BACKENDS, GPU_BACKENDS, room_for, why_not
from andon_falsify.subjects.trace import Remembering, Trace
from andon_falsify.verdict import Claim, Outcome, Verdict, closing_line, merge

_VERDICT, _RUNS = "andon verdict", "andon runs"
"""Properties of a test's report, which arrives from the workers of pytest-xdist too."""
_ACCEPTED = (Outcome.HOLDS, Outcome.NOT_APPLICABLE)
_JSON = TypeAdapter(Verdict)
_SINGLE = ("subject", "script", "world", "accumulation", "seed", "budget", "name")
_REPEATED = ("claim", "expected_failed")

Place = tuple[str, int, int]


@dataclass(frozen=True)
class ClaimAtPlace:
    """One test. place: backend, world size, accumulation."""

    place: Place
    claim: str

    def __str__(self) -> str:
        backend, world, accumulation = self.place
        return f"{backend} world {world} accumulation {accumulation}: {self.claim}"


class Suite:
    """The tests of a request, and their verdicts. Raises `InputError` for a request that its subject does not allow.

    No rank is started before the first verdict is requested; `close` ends them.
    """

    def __init__(self, request: Request) -> None:
        held = ExitStack()
        self._campaign = held.enter_context(opened(request))
        self._verdicts: dict[Place, dict[str, Verdict]] = {}
        self.close = held.close
        self.expected_failed: Mapping[str, str] = request.expected_failed
        self.claims: tuple[Claim, ...] = self._campaign.bench.claims

    @property
    def runs(self) -> int:
        return self._campaign.bench.runs

    def tests(self) -> Iterator[ClaimAtPlace]:
        """Every selected claim at every place with a trial that judges it, place by place."""
        for place in dict.fromkeys(trial.place for trial in self._campaign.trials):
            judged = self._at(place).claims
            yield from (ClaimAtPlace(place, claim.name) for claim in self.claims if claim.name in judged)

    def verdict(self, tried: ClaimAtPlace) -> Verdict:
        """The verdict of the trials of the place on the claim. They are run once in a process."""
        if tried.place not in self._verdicts:
            campaign = self._at(tried.place)
            for _ in campaign.run():
                pass
            self._verdicts[tried.place] = {cell.claim: cell.verdict for cell in campaign.report().cells}
        return self._verdicts[tried.place][tried.claim]

    def _at(self, place: Place) -> Campaign:
        whole = self._campaign
        trials = [trial for trial in whole.trials if trial.place == place]
        judged = frozenset().union(*(whole.bench.kinds[trial.kind] for trial in trials))
        share = whole.budget.shrink_s / len({trial.place for trial in whole.trials})
        budget = replace(whole.budget, shrink_s=share)
        return replace(whole, trials=trials, claims=whole.claims & judged, budget=budget)


_SUITE = pytest.StashKey[Suite]()
"""Absent if the options name no subject."""


class Count:
    """The verdicts of a session. claims: every claim about its subject, which the closing line counts.

    expected_failed: the claims that may be falsified, with the reason; one that holds everywhere fails the session.
    must_apply: the session fails if no claim applies.
    """

    def __init__(self, claims: Sequence[Claim], expected_failed: Mapping[str, str], *, must_apply: bool) -> None:
        self._expected_failed, self._must_apply = expected_failed, must_apply
        self._claims = claims
        self._verdicts: dict[str, list[Verdict]] = {}
        self._runs = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties if report.when == "teardown" else ():
            if name == _VERDICT:
                verdict = _JSON.validate_json(str(value))
                self._verdicts.setdefault(verdict.claim, []).append(verdict)
            elif name == _RUNS:
                self._runs += int(str(value))

    def _merged(self) -> list[Verdict]:
        return [merge(self._verdicts[claim.name]) for claim in self._claims if claim.name in self._verdicts]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the session for a falsified or unknown claim, and for a claim that holds but was expected to fail."""
        if hasattr(session.config, "workerinput") or session.exitstatus != pytest.ExitCode.OK:
            return
        merged = self._merged()
        if self._must_apply and {verdict.outcome for verdict in merged} == {Outcome.NOT_APPLICABLE}:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        for verdict in merged:
            expected = verdict.claim in self._expected_failed and verdict.outcome is not Outcome.UNKNOWN
            if verdict.outcome is Outcome.HOLDS if expected else verdict.outcome not in _ACCEPTED:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The claims that do not simply hold, with the counterexample of the first failed test, and the count."""
        verdicts = self._merged()
        if not verdicts:
            return
        if self._expected_failed or any(each.outcome is not Outcome.HOLDS for each in verdicts):
            terminalreporter.section("claims")
        for verdict in verdicts:
            if verdict.outcome is not Outcome.HOLDS:
                terminalreporter.write_line(shown(replace(verdict, counterexamples=verdict.counterexamples[:1])))
            failed = [each for each in self._verdicts[verdict.claim] if each.outcome is Outcome.FALSIFIED]
            if len(failed) > 1:
                terminalreporter.write_line(f"  and in {len(failed) - 1} more failed tests")
            if reason := self._expected_failed.get(verdict.claim):
                expected = "as expected" if verdict.outcome is Outcome.FALSIFIED else "but expected to be falsified"
                terminalreporter.write_line(f"{verdict.claim}: {verdict.outcome.value}, {expected}: {reason}")
        terminalreporter.write_line(closing_line(verdicts, self._runs, len(self._claims) - len(verdicts)))


def shown(verdict: Verdict) -> str:
    """A verdict with its smallest counterexample, and how many more there are, in lines that any terminal can show."""
    head = f"{verdict.claim}: {verdict.outcome.value}" + (f" ({why})" if (why := reasons(verdict)) else "")
    lines = [head, *counterexample_lines(verdict, "in the file of andon falsify --json")]
    return "\n".join(map(legible_line, lines))


class ClaimRunner:
    """Runs our trainer for one test, and records verdicts in the test's report. A run is not repeated in a session."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request

    @cached_property
    def bench(self) -> AndonBench:
        return AndonBench(self._request.getfixturevalue("subject"))

    def run(self, case: Case) -> Trace:
        """Skips the test if this machine has no room for the ranks, and fails it if a rank ended with an error."""
        if reason := why_not(case.backend, case.world):
            pytest.skip(reason)
        trace: Trace = self._request.getfixturevalue("subject").run(case)
        if trace.errors:
            pytest.fail(legible("\n".join(f"rank {rank}: {text}" for rank, text in sorted(trace.errors.items()))))
        return trace

    def attempt(self, trial: Trial, backend: str) -> None:
        """Judge `trial` on as many of its ranks as `backend` has room for; the test fails unless its claims hold."""
        case = trial.case.but(backend=backend, world=room_for(backend, trial.case.world))
        placed = replace(trial, case=case, then_world=trial.then_world and room_for(backend, trial.then_world))
        if placed.lacking:
            pytest.skip(placed.lacking)
        self.require(*self.bench.attempt(placed).values())

    def record(self, *verdicts: Verdict) -> None:
        self._request.node.user_properties += [(_VERDICT, _JSON.dump_json(verdict).decode()) for verdict in verdicts]

    def require(self, *verdicts: Verdict) -> None:
        """Record `verdicts`; the test fails unless each holds or does not apply."""
        self.record(*verdicts)
        if broken := [shown(verdict) for verdict in verdicts if verdict.outcome not in _ACCEPTED]:
            pytest.fail("\n".join(broken), pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of `andon falsify` that make sense for tests."""
    group = parser.getgroup("andon", "try to prove a data-parallel trainer wrong (andon_falsify)")
    backends = "a backend to run on; repeat it for more (default: all CPU backends)"
    group.addoption("--backend", action="append", choices=[*CPU_BACKENDS, *GPU_BACKENDS], help=backends)
    group.addoption("--subject", help="the trainer: a bundled name, package.module:make, or andon for our own")
    group.addoption("--script", help="or a command that trains, with {world}, {local_batch} and {accumulation} in it")
    group.addoption("--world", help="numbers of ranks, as in 2,3")
    group.addoption("--accumulation", help="micro-batches of a rank in an update, as in 1,2")
    group.addoption("--seed", help="random seed, or a range such as 0-199")
    group.addoption("--budget", help="quick, standard or deep")
    group.addoption("--claim", action="append", help="test only this claim; repeat it for more")
    group.addoption("--name", help="what to call the trainer")
    known = '"CLAIM: REASON": a known failure, which is no failed test; repeat it for more'
    group.addoption("--expected-failed", action="append", help=known)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """If none of the named backends can run on this machine, print one line with the reasons and start no workers."""
    chosen = dict.fromkeys(config.getoption("backend") or ())
    lacking = [why_not(name) for name in chosen]
    if not chosen or not all(lacking) or config.getoption("subject") or config.getoption("script"):
        return None
    print(f"nothing was run: {'; '.join(lacking)}")
    return int(pytest.ExitCode.NO_TESTS_COLLECTED)


def pytest_configure(config: pytest.Config) -> None:
    """Start the count, and the campaign if the options ask for one. Raises `UsageError` for wrong options."""
    count = Count(claims_of("trainer"), {}, must_apply=False)
    if (suite := _suite(config)) is not None:
        config.stash[_SUITE] = suite
        count = Count(suite.claims, suite.expected_failed, must_apply=True)
    config.pluginmanager.register(count, "andon-falsify-count")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks of the campaign."""
    if (suite := config.stash.get(_SUITE, None)) is not None:
        suite.close()


def _suite(config: pytest.Config) -> Suite | None:
    given = {name: config.getoption(name) for name in (*_SINGLE, *_REPEATED)}
    given = {name: tuple(value) if name in _REPEATED else value for name, value in given.items() if value is not None}
    if not given:
        return None
    if "subject" not in given and "script" not in given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise pytest.UsageError(f"{options}: also give --subject or --script (--subject andon tests Andon's trainer)")
    given["claims"] = given.pop("claim", ())
    try:
        return Suite(read_request(**given, backend=",".join(config.getoption("backend") or ()) or None))
    except InputError as error:
        raise pytest.UsageError(*(legible(str(problem)) for problem in error.problems)) from None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect the tests of our own trainer, or the test of the subject that the options name: never both."""
    folder = collection_path.parent
    ours = folder.name == "compliance" or (folder.name == "falsify" and (folder / "andon_falsify").is_dir())
    if not ours or not collection_path.match("test_*.py"):
        return None
    return True if (collection_path.name == "test_subject.py") != (_SUITE in config.stash) else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With xdist: all claims at one layout go to one worker, since they are judged from the same runs."""
    if _SUITE not in config.stash:
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class ByLayout(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.rpartition(": ")[0] or nodeid

    return ByLayout(config, log)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each claim and layout of a subject; for each selected backend, skipped if it cannot run here."""
    if "claim_at_place" in metafunc.fixturenames:
        metafunc.parametrize("claim_at_place", list(metafunc.config.stash[_SUITE].tests()), ids=str)
    if {"runner", "backend"} <= {*metafunc.fixturenames}:
        lacking = {name: why_not(name) for name in metafunc.config.getoption("backend") or CPU_BACKENDS}
        skips = {name: [pytest.mark.skip(reason=reason)] if reason else [] for name, reason in lacking.items()}
        metafunc.parametrize("backend", [pytest.param(name, marks=marks) for name, marks in skips.items()])


@pytest.fixture(scope="session")
def subject() -> Iterator[Remembering]:
    """Our trainer; it does not run a case twice. The extra `judge` does not install the libraries that it needs."""
    from andon_falsify.ranks.trainer import AndonTrainer

    with RankPools() as pools:
        yield Remembering(AndonTrainer(pools))


@pytest.fixture(scope="session")
def suite(pytestconfig: pytest.Config) -> Suite:
    """The campaign against the subject that the options name."""
    return pytestconfig.stash[_SUITE]


@pytest.fixture
def runner(request: pytest.FixtureRequest) -> Iterator[ClaimRunner]:
    """Runs cases and records verdicts for one test; the number of runs goes into the report."""
    counted: Remembering | Suite = request.config.stash.get(_SUITE, None) or request.getfixturevalue("subject")
    before = counted.runs
    yield ClaimRunner(request)
    request.node.user_properties.append((_RUNS, str(counted.runs - before)))


def register(pluginmanager: pytest.PytestPluginManager) -> None:
    """Make this module a plugin, once, whichever conftest.py asks first."""
    this = sys.modules[__name__]
    if not pluginmanager.is_registered(this):
        pluginmanager.register(this)
