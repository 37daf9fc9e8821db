"""For `pytest --pyargs andon_falsify`: the fixtures and the count of the compliance tests."""

from __future__ import annotations

import pytest

from andon_falsify.compliance.plugin import register


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Bring the plugin in."""
    register(pluginmanager)
