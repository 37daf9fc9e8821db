"""All cases, by name."""

from __future__ import annotations

from bugs import resume, rows, scale, sharded
from bugs.bench import CASES

FAMILIES = (scale, rows, resume, sharded)
__all__ = ["CASES", "FAMILIES"]
