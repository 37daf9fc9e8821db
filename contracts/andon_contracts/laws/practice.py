"""The laws of what a loop does without being asked: which rows its data loaders gave it, and in which mode it trains.

Nothing of it was declared, so a law stands here only where what was seen leaves no right loop that looks the same; what
some right loops do too is a suspicion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from andon_contracts.laws.law import Law, Observations, Seen, hexadecimal, ranks_where
from andon_contracts.violation import Finding

SURE = 2
"""In so many updates in a row all ranks were given the same before that is a fault."""
LIKELY = 3
"""The same, where the rows cannot be seen: before it is suspicious."""


@dataclass(frozen=True)
class Practice:
    """What all ranks saw of the loop's practice at an update; lasting values are equal on all ranks.

    alike: for how many updates in a row all ranks drew the same rows and gave them to the model. unseen: the same where
    rows are not known on all ranks, of what the model was given or of raw gradients. repeated: rows that came again in
    one pass over their data, and the ranks that had them. sampler: who dealt them out.
    """

    said: Observations
    alike: int = 0
    unseen: int = 0
    repeated: Sequence[int] = ()
    ranks: tuple[int, ...] = ()
    rows: Sequence[int] = field(default=())
    """Some rows of this update, on this rank, to be named."""

    @property
    def step(self) -> int:
        """The number of the update."""
        return self.said[0].step


def _explain_alike(seen: Practice) -> Finding:
    rows = f" (rows {list(seen.rows)[:8]})" if seen.rows else ""
    return Finding(
        f"in {seen.alike} updates in a row all ranks trained on the same rows{rows}: nothing deals them out",
        seen.step,
        (),
        "global batch",
    )


def _explain_unseen(seen: Practice) -> Finding:
    what = f"in {seen.unseen} updates in a row all ranks gave the model the same, or had the same raw gradients"
    return Finding(f"{what}, to the bit: do they train on the same rows?", seen.step, (), "global batch")


def _explain_repeated(seen: Practice) -> Finding:
    what = f"rows {list(seen.repeated)[:8]} came again in one pass over the data, before its end"
    return Finding(what, seen.step, seen.ranks, "global batch")


ROWS: tuple[Law[Practice], ...] = (
    Law("samples-once/drawn", ("drawn", "drawn keys", "given"), lambda seen: seen.alike < SURE, _explain_alike),
    Law("samples-once/given", ("given", "raw"), lambda seen: seen.unseen < LIKELY, _explain_unseen, suspicion=True),
)
"""At every update: the ranks do not all train on the same rows."""
PASS: tuple[Law[Practice], ...] = (
    Law("samples-once/pass", ("held",), lambda seen: not seen.repeated, _explain_repeated),
)
"""Where the ranks' rows were gathered: in a pass none came again, but for those that fill up its end."""


def _explain_order(seen: Seen[object]) -> Finding:
    ranks = tuple(each.rank for each in seen.said if each.values["order again"])
    number = max(seen.column("order again"))
    return Finding(
        f"pass {number} over the data has the order of the pass before, though its sampler shuffles",
        seen.step,
        ranks if len(ranks) < len(seen.said) else (),
        "order of rows",
    )


def _explain_mode(seen: Seen[object]) -> Finding:
    ranks = tuple(each.rank for each in seen.said if each.values["evaluating"])
    since = " since an evaluation" if 1 in seen.column("evaluating") else ", and has never been in training mode"
    return Finding(
        f"the model is trained in evaluation mode{since}: its dropout and its batch statistics are off",
        seen.step,
        ranks if len(ranks) < len(seen.said) else (),
        "mode of the model",
    )


_PLACES = ((2, "while a loss scaler had them multiplied"), (4, "before they were reduced"))
_CLIPPED, _UNFINISHED = 1, 8


def _clipped_early(seen: Seen[object]) -> str:
    """When the gradients were clipped too early; "": they were not."""
    return next((when for bit, when in _PLACES if any(each & bit for each in seen.column("clipping"))), "")


def _explain_clip(seen: Seen[object]) -> Finding:
    what = f"the gradients were clipped {_clipped_early(seen)}: not by the norm of what is applied"
    return Finding(what, seen.step, (), "gradient")


def _explain_micro(seen: Seen[object]) -> Finding:
    what = "the gradients were clipped for each micro-batch, and not once for the update"
    return Finding(what, seen.step, (), "gradient")


def _explain_clipped_alike(seen: Seen[object]) -> Finding:
    ranks = tuple(each.rank for each in seen.said if each.values["clipping"] & _CLIPPED)
    return Finding("only some ranks clipped their gradients", seen.step, ranks, "gradient")


CLIPPED_ALIKE: Law[Seen[object]] = Law(
    "clip-placed/ranks",
    ("clipping",),
    lambda seen: len({each & _CLIPPED for each in seen.column("clipping")}) == 1,
    _explain_clipped_alike,
)
"""All ranks clip, or none."""


def _explain_alone(seen: Seen[object]) -> Finding:
    what = "WORLD_SIZE says that there are several processes, and this one made no process group: it trains by itself"
    return Finding(what, seen.step, ranks_where(seen, "alone"), "process group")


COPIES = 3
"""How many copies of the model are compared."""


def _states(seen: Seen[object]) -> list[list[int]]:
    """By rank, the copies that it keeps."""
    return [[state for i in range(COPIES) if (state := each.values[f"copy {i}"])] for each in seen.said]


def _odd_copies(seen: Seen[object]) -> tuple[int, ...]:
    """The ranks without a copy that was kept up on another one, which has as many of them."""
    if "weights" in seen.differing:
        return ()
    kept = _states(seen)
    changed = [
        (len(states), state)
        for each, states in zip(seen.said, kept, strict=True)
        for place, state in enumerate(states)
        if each.values["copies changed"] >> place & 1
    ]
    odd = [any(len(states) == count and state not in states for count, state in changed) for states in kept]
    return tuple(rank for rank, is_odd in enumerate(odd) if is_odd)


def _explain_copy(seen: Seen[object]) -> Finding:
    shown = ", ".join(f"rank {rank}: {' '.join(map(hexadecimal, each))}" for rank, each in enumerate(_states(seen)))
    what = f"a copy of the model beside it was kept up, and is not the same on the ranks that keep one ({shown})"
    ranks = _odd_copies(seen)
    return Finding(what, max(seen.step - 1, 0), ranks if 2 * len(ranks) < len(seen.said) else (), "copy of the model")


COPIED: Law[Seen[object]] = Law(
    "copies-agree/before",
    (*(f"copy {place}" for place in range(COPIES)), "copies changed"),
    lambda seen: not _odd_copies(seen),
    _explain_copy,
)
"""What is kept beside the model and updated is the same on all ranks that keep it; one rank alone may."""
JOINED: Law[Seen[object]] = Law("ranks-joined/close", ("alone",), lambda seen: not seen.any("alone"), _explain_alone)
"""At the close: processes that were started together trained together."""
COURSE: tuple[Law[Seen[object]], ...] = (
    Law("order-renewed/pass", ("order again",), lambda seen: not seen.any("order again"), _explain_order),
    Law("training-mode/forward", ("evaluating",), lambda seen: 1 not in seen.column("evaluating"), _explain_mode),
    Law(
        "training-mode/never",
        ("evaluating",),
        lambda seen: 2 not in seen.column("evaluating"),
        _explain_mode,
        suspicion=True,
    ),
    Law("clip-placed/before", ("clipping",), lambda seen: not _clipped_early(seen), _explain_clip),
    Law(
        "clip-placed/micro-batch",
        ("clipping",),
        lambda seen: not any(each & _UNFINISHED for each in seen.column("clipping")),
        _explain_micro,
        suspicion=True,
    ),
    Law("ranks-joined/before", ("alone",), lambda seen: not seen.any("alone"), _explain_alone, suspicion=True),
)
"""At every update: passes have orders of their own, what is trained is in training mode, and clipping has its place."""
