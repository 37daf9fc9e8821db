"""One table of rules: what heartbeats, watches and launchers conclude from the `Symptoms` of a peer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from andon_contracts.liveness.process import State

NOTICED = {"lost": 71, "silent": 72}
"""Exit codes of a rank that ends because another is gone, or gives no answer."""

Conclusion = Literal["failed", "followed", "left", "died", "stopped", "silent", "behind", "there"]
"""failed, followed: it said that it ends by an error of its own, or because of another rank. left: it ended in order.
behind: the others wait for it. there: nothing is wrong with it."""


@dataclass(frozen=True)
class Symptoms:
    """What was seen of one peer.

    state: of its process. said: whether it told of its own end. exit: with which code, told or seen; None: not known.
    stopped_s, silent_s: for how long its process has not run, and it has given no sign of life. behind: whether it has
    come less far than the rank that looks.
    """

    state: State = "elsewhere"
    announced: bool = False
    exit: int | None = None
    stopped_s: float = 0.0
    silent_s: float = 0.0
    behind: bool = False


@dataclass(frozen=True)
class Patience:
    """From how many seconds on a peer that is stopped, or gives no sign of life, is taken for that.

    unseen: whether only one may be silent whose process cannot be seen, as on another machine.
    """

    stopped_s: float = math.inf
    silent_s: float = math.inf
    unseen: bool = False


RULES: tuple[tuple[Conclusion, Callable[[Symptoms, Patience], bool]], ...] = (
    ("followed", lambda seen, _: seen.announced and seen.exit in NOTICED.values()),
    ("left", lambda seen, _: (seen.announced or seen.state == "gone") and seen.exit == 0),
    ("failed", lambda seen, _: seen.announced),
    ("died", lambda seen, _: seen.state == "gone"),
    ("stopped", lambda seen, patience: seen.state == "stopped" and seen.stopped_s >= patience.stopped_s),
    (
        "silent",
        lambda seen, patience: (
            seen.silent_s >= patience.silent_s and not (patience.unseen and seen.state in ("runs", "stopped"))
        ),
    ),
    ("behind", lambda seen, _: seen.behind),
    ("there", lambda seen, _: True),
)
"""The first that holds is what is concluded: what a rank said of its own end comes before what others saw of it."""
ENDED_BY_ITSELF: tuple[Conclusion, ...] = ("failed", "died")
"""Whose own end is known; in this order, of several ranks."""
UNHEARD: tuple[Conclusion, ...] = ("stopped", "silent")
"""Who may still live and gives no sign of it."""
PRESENT: frozenset[Conclusion] = frozenset({"behind", "there"})


def conclude(seen: Symptoms, patience: Patience) -> Conclusion:
    """What is to be thought of a peer of which this was seen."""
    return next(conclusion for conclusion, holds in RULES if holds(seen, patience))


def first_conclusion(
    concluded: Mapping[int, Conclusion], order: Iterable[Conclusion]
) -> tuple[Conclusion | None, list[int]]:
    """The first conclusion in this order that was come to of any rank, and of which ones; None: of nobody."""
    for conclusion in order:
        ranks = sorted(rank for rank, each in concluded.items() if each == conclusion)
        if ranks:
            return conclusion, ranks
    return None, []
