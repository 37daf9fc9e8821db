"""Checkers: one claim each, from what was recorded to a verdict. They import neither trainer nor contracts.

Each module has `CLAIM` and `check(...)`; a caller runs them through `verdict.judge`, so that a checker that throws
gives unknown. `CLAIMS` lists every claim, for the closing line's N.
"""

from __future__ import annotations

from andon_falsify.checkers import (
    chain_intact,
    gradient_law,
    halts,
    layout_equal,
    loss_finite,
    losses_close,
    memory_within,
    plan_followed,
    replicas_agree,
    resume_equal,
    same_everywhere,
    samples_once,
    schedule,
)
from andon_falsify.verdict import Claim

CLAIMS: tuple[Claim, ...] = (
    replicas_agree.CLAIM,
    samples_once.CLAIM,
    plan_followed.CLAIM,
    same_everywhere.CLAIM,
    halts.CLAIM,
    resume_equal.CLAIM,
    chain_intact.CLAIM,
    loss_finite.CLAIM,
    schedule.CLAIM,
    losses_close.CLAIM,
    memory_within.CLAIM,
    layout_equal.CLAIM,
    gradient_law.CLAIM,
)
