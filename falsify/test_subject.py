"""Collects the compliance tests of `andon_falsify.compliance.test_subject`, which ship in the package."""

from __future__ import annotations

from andon_falsify.compliance.test_subject import *  # noqa: F403
