"""Collects the compliance tests of `andon_falsify.compliance.test_loss`, which ship in the package."""

from __future__ import annotations

from andon_falsify.compliance.test_loss import *  # noqa: F403
