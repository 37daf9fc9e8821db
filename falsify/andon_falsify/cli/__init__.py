"""The commands of this package, which join `andon` as entry points."""

from __future__ import annotations
