"""Collects the compliance tests of `andon_falsify.compliance.test_record`, which ship in the package."""

from __future__ import annotations

from andon_falsify.compliance.test_record import *  # noqa: F403
