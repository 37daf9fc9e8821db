"""The pytest plugin of the compliance tests: options, fixtures, and the last line that counts the claims.

The entry point `andon_falsify` (entry.py) loads it for `--pyargs andon_falsify`, and falsify/conftest.py in a checkout.
Without `--subject` or `--script` the tests of our own trainer are collected; with one of them the claims about that
subject.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from andon.console.messages import InputError
from andon_contracts.legible import legible
from andon_falsify.campaign.request import read_request
from andon_falsify.campaign.suite import Suite
from andon_falsify.campaign.trainer_bench import AndonBench
from andon_falsify.campaign.trial import Trial
from andon_falsify.claims import claims_of
from andon_falsify.compliance.counting import ACCEPTED, RUNS, Count, recorded, shown
from andon_falsify.ranks.pool import RankPools
from andon_falsify.ranks.trainer import AndonTrainer
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.placing import CPU_BACKENDS, GPU_BACKENDS, room_for, why_not
from andon_falsify.subjects.trace import Remembering, Trace
from andon_falsify.verdict import Verdict

_SUITE = pytest.StashKey[Suite]()
"""The campaign against the subject that the options name; absent if they name none."""
_SINGLE = ("subject", "script", "world", "accumulation", "seed", "budget", "name")
_REPEATED = ("claim", "expected_failed")


class ClaimRunner:
    """Runs our trainer for one test, and records verdicts in the test's report. A run is not repeated in a session."""

    def __init__(self, node: pytest.Item, subject: Remembering) -> None:
        self._node = node
        self._subject = subject
        self.bench = AndonBench(subject)

    def run(self, case: Case) -> Trace:
        """Skips the test if this machine has no room for the ranks, and fails it if a rank ended with an error."""
        if reason := why_not(case.backend, case.world):
            pytest.skip(reason)
        trace = self._subject.run(case)
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
        self._node.user_properties.extend(map(recorded, verdicts))

    def require(self, *verdicts: Verdict) -> None:
        """Record `verdicts`; the test fails unless each holds or does not apply."""
        self.record(*verdicts)
        if broken := [shown(verdict) for verdict in verdicts if verdict.outcome not in ACCEPTED]:
            pytest.fail("\n".join(broken), pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of `andon falsify` that make sense for tests."""
    group = parser.getgroup("andon", "the attempt to prove a data-parallel trainer wrong (andon_falsify)")
    group.addoption(
        "--backend",
        action="append",
        choices=[*CPU_BACKENDS, *GPU_BACKENDS],
        help="the backend to try to falsify (again for another); all that run on a CPU if not given",
    )
    group.addoption("--subject", help="the trainer: a bundled name, package.module:make, or andon for our own")
    group.addoption("--script", help="or a command that trains, with {world}, {local_batch} and {accumulation} in it")
    group.addoption("--world", help="numbers of ranks, as in 2,3")
    group.addoption("--accumulation", help="micro-batches of a rank in an update, as in 1,2")
    group.addoption("--seed", help="random seed, or a range such as 0-199")
    group.addoption("--budget", help="quick, standard or deep")
    group.addoption("--claim", action="append", help="only this claim about it (again for another)")
    group.addoption("--name", help="what to call the trainer")
    group.addoption(
        "--expected-failed",
        action="append",
        help='"CLAIM: REASON": a known failure, which does not affect the exit code (again for another)',
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """If none of the named backends can run on this machine, print one line with the reasons and start no workers."""
    chosen = dict.fromkeys(config.getoption("backend") or ())
    reasons = [why_not(name) for name in chosen]
    if not chosen or not all(reasons) or config.getoption("subject") or config.getoption("script"):
        return None
    print(f"nothing was run: {'; '.join(reasons)}")
    return int(pytest.ExitCode.NO_TESTS_COLLECTED)


def pytest_configure(config: pytest.Config) -> None:
    """Start the count, and the campaign if the options ask for one. Raises `UsageError` for wrong options."""
    count = Count(claims_of("trainer"), {})
    if (suite := _suite(config)) is not None:
        config.stash[_SUITE] = suite
        count = Count(suite.claims, suite.expected_failed)
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
        raise pytest.UsageError(f"{options}: of which trainer? add --subject or --script (--subject andon for our own)")
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
        reasons = {name: why_not(name) for name in metafunc.config.getoption("backend") or CPU_BACKENDS}
        skips = {name: [pytest.mark.skip(reason=reason)] if reason else [] for name, reason in reasons.items()}
        metafunc.parametrize("backend", [pytest.param(name, marks=marks) for name, marks in skips.items()])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what would be repeated: tests without a backend run with `inline` only."""
    if "inline" in (config.getoption("backend") or CPU_BACKENDS):
        return
    fixtures = [{*getattr(item, "fixturenames", ())} for item in items]
    repeated = [
        item
        for item, names in zip(items, fixtures, strict=True)
        if "runner" in names and not names & {"backend", "claim_at_place"}
    ]
    items[:] = [item for item in items if item not in repeated]
    config.hook.pytest_deselected(items=repeated)


@pytest.fixture(scope="session")
def pools() -> Iterator[RankPools]:
    """The processes of the ranks."""
    with RankPools() as held:
        yield held


@pytest.fixture(scope="session")
def subject(pools: RankPools) -> Remembering:
    """Our trainer; it does not run a case twice."""
    return Remembering(AndonTrainer(pools))


@pytest.fixture(scope="session")
def suite(pytestconfig: pytest.Config) -> Suite:
    """The campaign against the subject that the options name."""
    return pytestconfig.stash[_SUITE]


@pytest.fixture
def runner(request: pytest.FixtureRequest, subject: Remembering) -> Iterator[ClaimRunner]:
    """Runs cases and records verdicts for one test; the number of runs goes into the report."""
    suite = request.config.stash.get(_SUITE, None)
    counted: Remembering | Suite = subject if suite is None else suite
    before = counted.runs
    yield ClaimRunner(request.node, subject)
    request.node.user_properties.append((RUNS, str(counted.runs - before)))


def register(pluginmanager: pytest.PytestPluginManager) -> None:
    """Make this module a plugin, once, whichever conftest.py asks first."""
    this = sys.modules[__name__]
    if not pluginmanager.is_registered(this):
        pluginmanager.register(this)
