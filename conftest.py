"""What the unit tests and the falsification suite have in common: where Andon is, and how hard hypothesis searches."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_SOURCES = [str(Path(__file__).parent / folder) for folder in ("contracts", "core", "falsify")]

# Tests run in a checkout in which Andon is not installed, too. Where it is, as under tox, the built files are tested.
if importlib.util.find_spec("andon_contracts") is None:
    sys.path[:0] = _SOURCES
    os.environ["PYTHONPATH"] = os.pathsep.join([*_SOURCES, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

# tox sets COLUMNS for pytest's own output; programs under test must see their default width.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("COLUMNS", None)

settings.register_profile("dev", deadline=None, max_examples=25)
settings.register_profile(
    "ci",
    deadline=None,
    max_examples=50,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "deep", deadline=None, max_examples=1000, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why tests were skipped: a line for each reason, where `-rs` has one for each place."""
    skipped = (report.longrepr for report in terminalreporter.stats.get("skipped", ()))
    reasons = Counter(place[2].removeprefix("Skipped: ") for place in skipped if isinstance(place, tuple))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")
