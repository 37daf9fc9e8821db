"""Faults planted in a hand-written data-parallel loop, each a small change of a right one.

`andon falsify --subject andon_falsify.faults.looped:make --case '{"fault": "F16 sum instead of mean", ...}'`.
"""

from __future__ import annotations

from andon_falsify.faults.looped.registry import make

__all__ = ["make"]
