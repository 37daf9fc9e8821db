"""For `pytest falsify` from a checkout: the plugin of the compliance tests, which the files beside this one import."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import andon_falsify
from andon_falsify.compliance.plugin import register
from andon_falsify.subjects.placing import CPU_BACKENDS

_PACKAGE = Path(__file__).parent / "andon_falsify"


def pytest_configure() -> None:
    """Under tox the installed wheel is judged. Raises `UsageError` if the source tree would be."""
    if "TOX_ENV_NAME" in os.environ and _PACKAGE in Path(str(andon_falsify.__file__)).parents:
        msg = f"tox judges the installed andon_falsify, and {_PACKAGE} was imported"
        raise pytest.UsageError(msg)


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Bring the plugin in before the command line is read."""
    register(pluginmanager)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The package is collected where it is named (`--pyargs andon_falsify`), and through its thin files otherwise."""
    named = config.getoption("pyargs") or any(Path(str(arg)).resolve() == _PACKAGE for arg in config.args)
    return True if collection_path == _PACKAGE and not named else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what would be repeated: tests without a backend run with `inline` only."""
    if "inline" in (config.getoption("backend") or CPU_BACKENDS):
        return
    named = [(item, {*getattr(item, "fixturenames", ())}) for item in items]
    repeated = [item for item, names in named if "runner" in names and not names & {"backend", "claim_at_place"}]
    items[:] = [item for item in items if item not in repeated]
    config.hook.pytest_deselected(items=repeated)
