"""What pytest loads at every start where Andon is installed: it brings the suite in where the suite is asked for.

Elsewhere no option is added, so that none can clash with another plugin's, and nothing else is imported.
"""

from __future__ import annotations

import pytest

_NAME = "andon_falsify"


@pytest.hookimpl(tryfirst=True)
def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Bring the plugin in where an argument names the package, as `--pyargs andon_falsify` does."""
    config = pluginmanager.get_plugin("pytestconfig")
    if config is not None and any(_NAME in str(argument) for argument in config.invocation_params.args):
        from andon_falsify.compliance.plugin import register

        register(pluginmanager)
