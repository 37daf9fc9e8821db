"""For `pytest falsify` from a checkout: the plugin of the compliance tests, which the files beside this one import."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon_falsify.compliance.plugin import register

_PACKAGE = Path(__file__).parent / "andon_falsify"


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Bring the plugin in before the command line is read."""
    register(pluginmanager)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The package is collected where it is named (`--pyargs andon_falsify`), and through its thin files otherwise."""
    named = config.getoption("pyargs") or any(Path(str(arg)).resolve() == _PACKAGE for arg in config.args)
    return True if collection_path == _PACKAGE and not named else None
