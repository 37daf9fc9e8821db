"""The laws of what a loop does that nobody declared: the rows that its data loaders dealt out, and its modes.

A law is a violation only if no right loop looks the same; what some right loops do too is a suspicion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from andon_contracts.laws.law import Law, Observations, Seen, hexadecimal
from andon_contracts.violation import Finding

SURE = 2
"""After so many updates in a row in which all ranks were given the same rows, that is a violation."""
LIKELY = 3
"""The same if the rows are not known: after so many it is a suspicion."""


class Mode(IntEnum):
    """The value `evaluating`: in which mode the model is trained."""

    TRAINING = 0
    EVALUATING = 1
    """In evaluation mode since an evaluation."""
    NEVER_TRAINING = 2
    """In evaluation mode from the start."""


class ClipSeen(IntFlag):
    """The value `clipping`: whether the gradients of an update were clipped, and what a clip call was too early for."""

    CLIPPED = 1
    SCALED = 2
    UNREDUCED = 4
    UNFINISHED = 8


@dataclass(frozen=True)
class Practice:
    """What all ranks saw of the loop's practice at an update; counts over several updates are equal on all ranks.

    alike: for how many updates in a row all ranks drew the same rows and gave them to the model. unseen: the same if
    rows are not known on all ranks, by what the model was given or by raw gradients. repeated: rows that came again in
    one pass over their data, and the ranks that had them. rows: some rows of this update, on this rank, to be named.
    """

    said: Observations
    alike: int = 0
    unseen: int = 0
    repeated: Sequence[int] = ()
    ranks: tuple[int, ...] = ()
    rows: Sequence[int] = ()

    @property
    def step(self) -> int:
        """The number of the update."""
        return self.said[0].step


def _alike(seen: Practice) -> Finding | None:
    if seen.alike < SURE:
        return None
    rows = f" (rows {list(seen.rows)[:8]})" if seen.rows else ""
    what = f"in {seen.alike} updates in a row all ranks trained on the same rows{rows}: nothing deals them out"
    return Finding(what, seen.step, (), "global batch")


def _unseen(seen: Practice) -> Finding | None:
    if seen.unseen < LIKELY:
        return None
    what = f"in {seen.unseen} updates in a row all ranks gave the model the same, or had the same raw gradients"
    return Finding(f"{what}, to the bit: do they train on the same rows?", seen.step, (), "global batch")


def _repeated(seen: Practice) -> Finding | None:
    what = f"rows {list(seen.repeated)[:8]} came again in one pass over the data, before its end"
    return Finding(what, seen.step, seen.ranks, "global batch") if seen.repeated else None


ROWS: tuple[Law[Practice], ...] = (
    Law("samples-once/drawn", ("drawn", "drawn keys", "given"), _alike),
    Law("samples-once/given", ("given", "raw"), _unseen, suspicion=True),
)
"""At every update: the ranks do not all train on the same rows."""
PASS: tuple[Law[Practice], ...] = (Law("samples-once/pass", ("held",), _repeated),)
"""After the ranks' rows were gathered: in a pass none came again, except those that fill up its end."""


def _order(seen: Seen[object]) -> Finding | None:
    number = max(seen.column("order again"))
    ranks = seen.some(each.rank for each in seen.said if each.values["order again"])
    what = f"pass {number} over the data has the order of the pass before, though its sampler shuffles"
    return Finding(what, seen.step, ranks, "order of rows") if number else None


def _mode(seen: Seen[object], mode: Mode) -> Finding | None:
    if mode not in seen.column("evaluating"):
        return None
    ranks = seen.some(each.rank for each in seen.said if each.values["evaluating"])
    once = Mode.EVALUATING in seen.column("evaluating")
    since = " since an evaluation" if once else ", and has never been in training mode"
    what = f"the model is trained in evaluation mode{since}: its dropout and its batch statistics are off"
    return Finding(what, seen.step, ranks, "mode of the model")


def _any_clip(seen: Seen[object], kind: ClipSeen) -> bool:
    return any(each & kind for each in seen.column("clipping"))


def _clip_placed(seen: Seen[object]) -> Finding | None:
    scaled, unreduced = _any_clip(seen, ClipSeen.SCALED), _any_clip(seen, ClipSeen.UNREDUCED)
    when = "while a loss scaler had them multiplied" if scaled else "before they were reduced"
    what = f"the gradients were clipped {when}: not by the norm of what is applied"
    return Finding(what, seen.step, (), "gradient") if scaled or unreduced else None


def _clip_unfinished(seen: Seen[object]) -> Finding | None:
    what = "the gradients were clipped for each micro-batch, and not once for the update"
    return Finding(what, seen.step, (), "gradient") if _any_clip(seen, ClipSeen.UNFINISHED) else None


def _clipped_alike(seen: Seen[object]) -> Finding | None:
    ranks = tuple(each.rank for each in seen.said if each.values["clipping"] & ClipSeen.CLIPPED)
    if len(ranks) in (0, len(seen.said)):
        return None
    return Finding("only some ranks clipped their gradients", seen.step, ranks, "gradient")


CLIPPED_ALIKE: Law[Seen[object]] = Law("clip-placed/ranks", ("clipping",), _clipped_alike)
"""All ranks clip, or none."""


def _alone(seen: Seen[object]) -> Finding | None:
    what = "WORLD_SIZE says that there are several processes, and this one made no process group: it trains by itself"
    return Finding(what, seen.step, seen.ranks("alone"), "process group") if seen.any("alone") else None


COPIES = 3
"""How many copies of the model are compared."""


def _copied(seen: Seen[object]) -> Finding | None:
    if "weights" in seen.differing:
        return None
    kept = [[state for i in range(COPIES) if (state := each.values[f"copy {i}"])] for each in seen.said]
    changed = [
        (len(states), state)
        for each, states in zip(seen.said, kept, strict=True)
        for place, state in enumerate(states)
        if each.values["copies changed"] >> place & 1
    ]
    # A rank is odd if it has as many copies as another one, and lacks a copy that was updated there.
    ranks = tuple(
        rank
        for rank, states in enumerate(kept)
        if any(len(states) == count and state not in states for count, state in changed)
    )
    if not ranks:
        return None
    shown = ", ".join(f"rank {rank}: {' '.join(map(hexadecimal, each))}" for rank, each in enumerate(kept))
    what = f"a copy of the model beside it was kept up, and is not the same on the ranks that keep one ({shown})"
    return Finding(what, max(seen.step - 1, 0), ranks if 2 * len(ranks) < len(seen.said) else (), "copy of the model")


COPIED: Law[Seen[object]] = Law(
    "copies-agree/before", (*(f"copy {place}" for place in range(COPIES)), "copies changed"), _copied
)
"""A copy of the model that is updated is the same on all ranks that keep it; one rank alone may keep one."""
JOINED: Law[Seen[object]] = Law("ranks-joined/close", ("alone",), _alone)
"""At the close: processes that were started together trained together."""
COURSE: tuple[Law[Seen[object]], ...] = (
    Law("order-renewed/pass", ("order again",), _order),
    Law("training-mode/forward", ("evaluating",), lambda seen: _mode(seen, Mode.EVALUATING)),
    Law("training-mode/never", ("evaluating",), lambda seen: _mode(seen, Mode.NEVER_TRAINING), suspicion=True),
    Law("clip-placed/before", ("clipping",), _clip_placed),
    Law("clip-placed/micro-batch", ("clipping",), _clip_unfinished, suspicion=True),
    Law("ranks-joined/before", ("alone",), _alone, suspicion=True),
)
"""At every update: passes have orders of their own, the model is in training mode, and clipping has its place."""
