"""Which rank's error is the cause of the others'."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SHOWN = 300
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)
_NOT_THEIRS = ("-packages/", "/lib/python3", "<frozen", "andon_falsify/ranks/", "andon_falsify/loops/")
_SYMPTOMS = ("gloo", "connection closed", "connection reset", "timed out waiting", "socket", "broken pipe")
"""What the other ranks of a group say when one of them is gone."""


def blame(errors: Mapping[int, str]) -> str:
    """`rank 1 was killed by SIGKILL without an answer`: the gravest error by rank, and what was left behind by any.

    A rank that died or raised is the cause where another only noticed that it was gone, or waited for it. Raises
    `ValueError` where there are no errors.
    """
    if not errors:
        msg = "no rank had an error"
        raise ValueError(msg)
    rank = min(errors, key=lambda each: (_gravity(errors[each]), each))
    said = _named(rank, _first_line(errors[rank]) + _place(errors[rank]))
    others = [
        _named(other, line)
        for other, text in sorted(errors.items())
        for line in text.splitlines()
        if "left processes behind" in line and _first_line(errors[rank]) != line
    ]
    return "; ".join([said, *others])


def _gravity(text: str) -> int:
    first = _first_line(text)
    if "no answer in time" in first:
        return 2
    return 3 if any(word in first.lower() for word in _SYMPTOMS) else 1


def _first_line(text: str) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "an error without a text")
    line = line.removeprefix("LoopError: ")
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


def _place(text: str) -> str:
    """` at FILE:LINE in NAME`: the innermost frame of the subject's own code in a traceback, if there is one."""
    own = [frame for frame in _FRAME.finditer(text) if not any(part in frame["file"] for part in _NOT_THEIRS)]
    return f" at {own[-1]['file']}:{own[-1]['line']} in {own[-1]['name']}" if own else ""


def _named(rank: int, said: str) -> str:
    return f"rank {rank}{said.removeprefix('the rank')}" if said.startswith("the rank ") else f"rank {rank}: {said}"
