"""Checks of the claims that are not yet modules of `claims`."""

# ruff: noqa: F401

from __future__ import annotations

from andon_falsify.checkers import (
    chain_intact,
    halts,
    layout_equal,
    memory_within,
    replicas_agree,
    resume_equal,
    same_everywhere,
)
