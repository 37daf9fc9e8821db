"""What pytest loads at every start if Andon is installed: it loads the plugin only if an argument names the suite.

Otherwise no option is added, so that none clashes with another plugin's, and nothing else is imported.
"""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    config = pluginmanager.get_plugin("pytestconfig")
    if config is not None and any("andon_falsify" in str(argument) for argument in config.invocation_params.args):
        from andon_falsify.compliance.plugin import register

        register(pluginmanager)
