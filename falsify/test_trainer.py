"""Collects the compliance tests of `andon_falsify.compliance.test_trainer`, which ship in the package."""

from __future__ import annotations

from andon_falsify.compliance.test_trainer import *  # noqa: F403
