"""The reasons of many verdicts in few words: those that differ in their numbers only are one."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")
_KEPT = 3
NOTHING_SAID = "no case that was run says anything of it"
"""Why a selected claim is unknown that no trial has judged."""


def condensed(why: str, kept: int = _KEPT) -> str:
    """`why`, which merging has joined by semicolons: of what differs only in numbers that with the largest first one.

    At most `kept` reasons, and how many more there are.
    """
    alike: dict[str, list[str]] = {}
    for reason in filter(None, why.split("; ")):
        alike.setdefault(_NUMBER.sub("#", reason), []).append(reason)
    reasons = [max(each, key=_first_number) for each in alike.values()]
    more = f"; and {len(reasons) - kept} more" if len(reasons) > kept else ""
    return "; ".join(reasons[:kept]) + more


def _first_number(reason: str) -> float:
    found = _NUMBER.search(reason)
    return float(found.group()) if found else 0.0
