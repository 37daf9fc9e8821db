"""Collects the compliance tests of `andon_falsify.compliance.test_run`, which ship in the package."""

from __future__ import annotations

from andon_falsify.compliance.test_run import *  # noqa: F403
