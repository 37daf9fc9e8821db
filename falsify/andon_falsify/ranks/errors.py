"""Which rank's error is the cause of the others'. The texts are those of ranks: tracebacks, and what libraries say."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SHOWN = 300
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)
_NOT_THEIRS = ("-packages/", "/lib/python3", "<frozen", "andon_falsify/ranks/", "andon_falsify/loops/")
_SYMPTOMS = ("gloo", "connection closed", "connection reset", "timed out waiting", "socket", "broken pipe")
"""What the other ranks of a group report when one of them is gone."""


def root_cause(errors: Mapping[int, str]) -> str:
    """`rank 1 was killed by SIGKILL without an answer`: the gravest error, and the processes that any rank left behind.

    A rank that died or raised comes before one that lost its connection or waited. Raises `ValueError` without errors.
    """
    rank = min(errors, key=lambda each: (_order(errors[each]), each))
    first = _first_line(errors[rank])
    own = [frame for frame in _FRAME.finditer(errors[rank]) if not any(part in frame["file"] for part in _NOT_THEIRS)]
    at = f" at {own[-1]['file']}:{own[-1]['line']} in {own[-1]['name']}" if own else ""
    left = [
        _named(other, line)
        for other, text in sorted(errors.items())
        for line in text.splitlines()
        if "left processes behind" in line and line != first
    ]
    return "; ".join([_named(rank, first + at), *left])


def _order(text: str) -> int:
    first = _first_line(text)
    if "no answer in time" in first:
        return 2
    return 3 if any(word in first.lower() for word in _SYMPTOMS) else 1


def _first_line(text: str) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "an error without a text")
    line = line.removeprefix("LoopError: ")
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


def _named(rank: int, line: str) -> str:
    return f"rank {rank}{line.removeprefix('the rank')}" if line.startswith("the rank ") else f"rank {rank}: {line}"
