"""Trainers of causal language models as their documentation teaches them, held to the float64 law of token sums."""

from __future__ import annotations
