"""How a message quotes an offending value and suggests the name that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 60


def shown(value: object) -> str:
    """A value as a message quotes it: its `repr`, cut when long (a row of ten megabytes is not repeated)."""
    text = repr(value[: 2 * _LONGEST] if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the one of `known` that is nearest to `name`, or nothing when none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
