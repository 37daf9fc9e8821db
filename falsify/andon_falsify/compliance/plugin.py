"""What pytest needs for the compliance tests: the options, the fixtures, and the last line that counts the claims.

Brought in by the entry point `andon_falsify` (entry.py) where `--pyargs andon_falsify` is given, and in a checkout by
falsify/conftest.py. Without `--subject` or `--script` our own trainer's tests are collected; with one of them the
claims about that subject. Verdicts travel in the tests' reports, so that they arrive from the workers of pytest-xdist
too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from andon.console.messages import InputError
from andon_contracts.legible import legible
from andon_falsify.campaign.request import Options, understood
from andon_falsify.campaign.suite import Suite
from andon_falsify.claims.of_trainer import CLAIMS
from andon_falsify.compliance import counting
from andon_falsify.ranks.pool import RankPools
from andon_falsify.ranks.trainer import AndonTrainer
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.placing import CPU_BACKENDS, GPU_BACKENDS, why_not
from andon_falsify.subjects.trace import Remembering, Trace
from andon_falsify.verdict import Verdict

_SUITE = pytest.StashKey[Suite]()
"""The campaign against the subject that was named; not there where none was."""
_OF_A_SUBJECT = "test_subject.py"
_ONCE = ("subject", "script", "world", "accumulation", "seed", "budget", "name")
_AGAIN = ("claim", "expected_failed")
_PROFILES = {"quick": "andon-dev", "standard": "andon-ci", "deep": "andon-deep"}
"""How hard hypothesis searches, by budget, where neither its own option nor the project says."""


class Court:
    """Runs cases for one test and holds their verdicts against the claims."""

    def __init__(self, request: pytest.FixtureRequest, subject: Remembering) -> None:
        self._node = request.node
        self._subject = subject

    def needs(self, backend: str, world: int) -> None:
        """Skip the test, with the reason, where this machine has no place for `world` ranks of `backend`."""
        if reason := why_not(backend, world):
            pytest.skip(reason)

    def run(self, case: Case) -> Trace:
        """The trace of `case`. Skips the test where its ranks have no place, fails it where one ended with an error."""
        self.needs(case.backend, case.world)
        trace = self._subject.run(case)
        if trace.errors:
            said = "\n".join(f"rank {rank}: {text}" for rank, text in sorted(trace.errors.items()))
            pytest.fail(legible(said))
        return trace

    @property
    def subject(self) -> Remembering:
        """The trainer itself, for checks that run it several times."""
        return self._subject

    def enter(self, *verdicts: Verdict) -> None:
        """Enter `verdicts` into the count."""
        for verdict in verdicts:
            entry = json.dumps([verdict.claim, verdict.outcome.value, verdict.checked, counting.shown(verdict)])
            self._node.user_properties.append((counting.VERDICT, entry))

    def hold(self, *verdicts: Verdict) -> None:
        """Enter `verdicts` into the count; the test fails unless each holds or does not apply."""
        self.enter(*verdicts)
        broken = [counting.shown(verdict) for verdict in verdicts if verdict.outcome not in counting.ACCEPTED]
        if broken:
            pytest.fail("\n".join(broken), pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of `andon falsify`, as far as they make sense for tests."""
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
    group.addoption("--seed", help="what cases are drawn from: a number, or several as in 0-199")
    group.addoption("--budget", help="quick, standard or deep")
    group.addoption("--claim", action="append", help="only this claim about it (again for another)")
    group.addoption("--name", help="what to call the trainer")
    group.addoption(
        "--expected-failed", action="append", help='"CLAIM: REASON": it may fall, and fails nothing then (again)'
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
    """Register the mark and whoever counts; where a subject is named, make its tests."""
    config.addinivalue_line("markers", "claim(*names): the claims that a test checks")
    _search_as_hard_as(config)
    suite = _suite(config)
    if suite is not None:
        config.stash[_SUITE] = suite
    count = counting.Count(CLAIMS) if suite is None else counting.Count(suite.claims, suite.expected_failed)
    config.pluginmanager.register(count, "andon-falsify-count")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks of a campaign."""
    if (suite := config.stash.get(_SUITE, None)) is not None:
        suite.close()


def _suite(config: pytest.Config) -> Suite | None:
    """The campaign that the options ask for. Raises `UsageError` with all that is wrong with them."""
    given = {name: config.getoption(name) for name in (*_ONCE, *_AGAIN)}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    if "subject" not in given and "script" not in given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise pytest.UsageError(f"{options}: of which trainer? add --subject or --script (--subject andon for our own)")
    given = {name: tuple(value) if name in _AGAIN else value for name, value in given.items()}
    given["claims"] = given.pop("claim", ())
    try:
        return Suite(understood(Options(**given, backend=",".join(config.getoption("backend") or ()) or None)))
    except InputError as error:
        raise pytest.UsageError(*(legible(str(problem)) for problem in error.problems)) from None


def _search_as_hard_as(config: pytest.Config) -> None:
    """Load the profile of hypothesis that fits the budget, unless one was chosen elsewhere."""
    slow = [HealthCheck.too_slow]
    settings.register_profile("andon-dev", deadline=None, max_examples=25)
    settings.register_profile(
        "andon-ci", deadline=None, max_examples=50, derandomize=True, database=None, suppress_health_check=slow
    )
    settings.register_profile("andon-deep", deadline=None, max_examples=1000, suppress_health_check=slow)
    chosen = config.getoption("--hypothesis-profile", None) or os.environ.get("HYPOTHESIS_PROFILE")
    if not chosen and settings().max_examples == settings.get_profile("default").max_examples:
        settings.load_profile(_PROFILES.get(config.getoption("budget") or "quick", "andon-dev"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Our own trainer's tests, or those of the subject that was named: never both."""
    ours = collection_path.parent.name in ("compliance", "falsify") and collection_path.match("test_*.py")
    if not ours or (
        collection_path.parent.name == "falsify" and not (collection_path.parent / "andon_falsify").is_dir()
    ):
        return None
    return True if (collection_path.name == _OF_A_SUBJECT) != (_SUITE in config.stash) else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With xdist: all claims at one place go to one worker, since they are judged of the same runs."""
    if _SUITE not in config.stash:
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class ByPlace(LoadScopeScheduling):  # type: ignore[misc]
        """Tests whose names begin alike, up to the claim."""

        def _split_scope(self, nodeid: str) -> str:
            return nodeid.rpartition(": ")[0] or nodeid

    return ByPlace(config, log)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each claim and place of a subject; for each selected backend, skipped where it cannot run here."""
    if "claim_at_place" in metafunc.fixturenames:
        metafunc.parametrize("claim_at_place", list(metafunc.config.stash[_SUITE].tests()), ids=str)
    if {"court", "backend"} <= {*metafunc.fixturenames}:
        chosen = metafunc.config.getoption("--backend", None) or CPU_BACKENDS
        metafunc.parametrize("backend", [_param(name) for name in dict.fromkeys(chosen)])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect repeats: tests without a backend run with `inline` only."""
    chosen = config.getoption("--backend", None) or CPU_BACKENDS
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (kept if _shows_more(item, chosen) else left_out).append(item)
    if left_out:
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)


def _shows_more(item: pytest.Item, chosen: Sequence[str]) -> bool:
    names = getattr(item, "fixturenames", ())
    return "court" not in names or "claim_at_place" in names or "backend" in names or "inline" in chosen


def _param(backend: str) -> Any:
    reason = why_not(backend)
    return pytest.param(backend, marks=[pytest.mark.skip(reason=reason)] if reason else [])


def pytest_itemcollected(item: pytest.Item) -> None:
    """Write a test's claims into its report."""
    names = [name for mark in item.iter_markers("claim") for name in mark.args]
    known = {claim.name for claim in CLAIMS}
    if unknown_names := [name for name in names if name not in known]:
        raise pytest.UsageError(f"{item.nodeid}: there is no claim {', '.join(unknown_names)}")
    item.user_properties.append((counting.CLAIMS, ",".join(names)))


@pytest.fixture(scope="session")
def pools() -> Iterator[RankPools]:
    """Where the ranks of process groups live."""
    with RankPools() as held:
        yield held


@pytest.fixture(scope="session")
def subject(pools: RankPools) -> Remembering:
    """Our trainer; it does not run a case twice."""
    return Remembering(AndonTrainer(pools))


@pytest.fixture(scope="session")
def suite(pytestconfig: pytest.Config) -> Suite:
    """The campaign against the subject that was named."""
    return pytestconfig.stash[_SUITE]


@pytest.fixture
def court(request: pytest.FixtureRequest, subject: Remembering) -> Iterator[Court]:
    """Runs cases and holds verdicts for one test."""
    suite = request.config.stash.get(_SUITE, None)

    def runs() -> int:
        return subject.runs + (suite.runs if suite is not None else 0)

    before = runs()
    yield Court(request, subject)
    request.node.user_properties.append((counting.RUNS, str(runs() - before)))


def register(pluginmanager: pytest.PytestPluginManager) -> None:
    """Make this module a plugin, once, whichever conftest.py asks first."""
    this = sys.modules[__name__]
    if not pluginmanager.is_registered(this):
        pluginmanager.register(this)
