"""The laws of one update, at the points of a step: the start, the reduced gradient, the audit, the state afterwards.

The trainer and the watch share the laws that mean the same for both. The trainer's ranks have one plan and one
gradient, so what most ranks say is right for all; the watch has its own laws (in `loop`) where it cannot assume that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from andon_contracts.agree import majority, real_of
from andon_contracts.laws.law import LOCKSTEP, Law, Rule, Seen, agreeing, difference, hexadecimal
from andon_contracts.violation import Finding

# the start


def _start(seen: Seen[object]) -> Finding | None:
    names = [name for name in seen.observations[0].values if name in seen.differing]
    return difference(seen, names[0], f"the ranks start from different {', '.join(names)}") if names else None


START: tuple[Law[Seen[object]], ...] = (
    LOCKSTEP,
    agreeing("layout-equal/start", ("layout",), "the trainable tensors differ in name, shape, dtype or order"),
    Law("start-agrees/start", (), _start),
)
"""Before step 1 of the trainer: the same layout, and the same in everything else that was observed."""

NORM_TOLERANCE = 2.0**-19
"""How far apart, relatively, rounding can leave the norm after clipping and the one that is expected.

In units of 2^-24: `norms.flat_norm` is off by at most 8.5, before and after clipping. Torch's clip rounds the limit,
norm + 1e-6, its reciprocal, the factor and each product, by 1 each. Together that is 22; 32 are allowed.
"""
FACTOR_STEP = 2.0**-149
"""The spacing of the smallest fp32 numbers. A clip factor is off by up to that, so the norm by that times itself."""
NORM_FLOOR = 1e-30
"""The absolute error that a norm may have: two norms near zero count as equal."""


@dataclass(frozen=True)
class Reduced:
    """What an update is held to before it is made.

    weights: the digest of the weights that the last update left; `Rule.SAME` if it is not known, so that ranks are only
    compared with each other; `Rule.PREVIOUS` if so far only the device knows it. limit: to which the gradient was to be
    clipped; None: it was not. norm_tolerance: of a norm, relative.
    """

    weights: int = Rule.SAME
    limit: float | None = None
    norm_tolerance: float = NORM_TOLERANCE


def _rate(seen: Seen[Reduced]) -> Finding | None:
    plans = seen.column("planned")
    planned = majority(plans)
    odd = [each for each in seen.observations if each.values["rate"] != planned]
    if not odd:
        return None
    shown = ", ".join(f"rank {o.rank}: {real_of(o.values['rate'])!r}" for o in odd)
    certain = plans.count(planned) * 2 > len(plans)
    what = f"the learning rate is not the schedule's {real_of(planned)!r} ({shown})"
    return Finding(what, seen.step, tuple(each.rank for each in odd) if certain else (), "learning rate")


RATE = Law("learning-rate-planned/reduced", ("rate", "planned"), _rate, lambda _: {"rate": Rule.MAJORITY})
"""Every rank's optimizer holds the learning rate that is planned for this update."""


def _weights_unchanged(seen: Seen[Reduced]) -> Finding | None:
    left = seen.want.weights
    if left is Rule.SAME:
        same = "weights" not in seen.differing
        return None if same else difference(seen, "weights", "the weights before the update are not the same")
    odd = tuple(each.rank for each in seen.observations if each.values["weights"] != left)
    what = f"the weights are not those that the last update left (digest {hexadecimal(left)})"
    tensor = (*seen.differing_tensors("weights"), "weights")[0]
    return Finding(f"{what}; something outside the step changed them", seen.step, odd, tensor) if odd else None


WEIGHTS_UNCHANGED = Law(
    "replicas-agree/reduced",
    ("weights",),
    _weights_unchanged,
    lambda want: {"weights": want.weights},
    look=("weights",),
)
"""Before an update all ranks have the weights that the last one left."""


def _optimizer_unchanged(seen: Seen[int]) -> Finding | None:
    odd = tuple(each.rank for each in seen.observations if each.values["optimizer"] != seen.want)
    what = f"the optimizer state is not what the last update left (digest {hexadecimal(seen.want)})"
    return Finding(f"{what}; something outside the step changed it", seen.step, odd, "optimizer") if odd else None


OPTIMIZER_UNCHANGED = Law("optimizers-agree/reduced", ("optimizer",), _optimizer_unchanged)
"""Only for a rank that is alone: with others, the loss of a state is seen after the update has used it."""

GRADIENTS = agreeing(
    "gradients-agree/reduced", ("gradient",), "the reduced gradients are not the same", device=True, look=("gradient",)
)


CALLER_GRADIENT = "given"
"""The point of an update whose gradient a caller passed in, so that no part of it was checked before."""


def _finite(seen: Seen[object]) -> Finding | None:
    odd = [o.rank for o in seen.observations if o.values["nonfinite"] or not math.isfinite(real_of(o.values["norm"]))]
    if not odd:
        return None
    norm, checked = real_of(seen.observations[0].values["norm"]), seen.observations[0].point != CALLER_GRADIENT
    what = f"the reduced gradient or its norm ({norm}) is not finite{checked * ' although every part was'}"
    return Finding(what, seen.step, seen.unless_all(odd), "reduced gradient")


FINITE = Law("finite/reduced", ("nonfinite", "norm"), _finite, lambda _: {"nonfinite": 0, "norm": Rule.FINITE})
"""The reduced gradient and its norm are finite on every rank."""


def clipped_norm(norm: float, limit: float | None) -> float:
    """The norm after one clipping of `norm` to `limit` (None: no clipping)."""
    # The law of torch.nn.utils.clip_grad_norm_, whose 1e-6 counts where the limit is small.
    return norm if limit is None else norm * min(1.0, limit / (norm + 1e-6))


def is_clipped_once(clipped: float, norm: float, want: Reduced) -> bool:
    """Whether one clipping of a gradient of norm `norm` leaves the norm `clipped`, up to the tolerance."""
    left = clipped_norm(norm, want.limit)
    return abs(clipped - left) <= want.norm_tolerance * left + FACTOR_STEP * norm + NORM_FLOOR


def _clip(seen: Seen[Reduced]) -> Finding | None:
    norm = real_of(majority(seen.column("norm")))
    odd = [each for each in seen.observations if not is_clipped_once(real_of(each.values["clipped"]), norm, seen.want)]
    if not odd:
        return None
    told = [(each.rank, *(real_of(each.values[name]) for name in ("clipped", "norm"))) for each in odd]
    shown = ", ".join(f"rank {rank}: {clipped!r} from {norm!r}" for rank, clipped, norm in told)
    what = f"the norm after clipping is not what one clipping to {seen.want.limit} gives ({shown})"
    return Finding(what, seen.step, tuple(each.rank for each in odd), "clipped gradient")


CLIP = Law("clip-once/reduced", ("norm", "clipped"), _clip, lambda _: {"clipped": Rule.CLIPPED})
"""On every rank the norm after clipping is what one clipping of the norm before it gives, up to rounding."""

REDUCED: tuple[Law[Seen[Reduced]], ...] = (LOCKSTEP, RATE, WEIGHTS_UNCHANGED, GRADIENTS, FINITE, CLIP)
"""Before the trainer's update: the same finite gradient, clipped once, and the weights that the last update left."""


@dataclass(frozen=True)
class Due:
    """What an update is held to after it was made. updates: how many there are to be by now."""

    updates: int


def _one_update(seen: Seen[Due]) -> Finding | None:
    due = seen.want.updates
    odd = tuple(each.rank for each in seen.observations if each.values["updates"] != due)
    if not odd:
        return None
    shown = ", ".join(f"rank {o.rank}: {o.values['updates']}" for o in seen.observations)
    return Finding(f"{due} updates were due, taken were {shown}", seen.step, odd, "count of updates")


ONE_UPDATE = Law("one-update/updated", ("updates",), _one_update, lambda want: {"updates": want.updates})
"""Every rank's optimizer has taken exactly the planned number of updates."""

_OTHER_STATES = "the optimizer states are not the same"
_OTHER_WEIGHTS = "the trainable weights are not the same on every rank"
OPTIMIZERS = agreeing(
    "optimizers-agree/updated", ("updates", "optimizer"), _OTHER_STATES, device=True, look=("optimizer",)
)
REPLICAS = agreeing("replicas-agree/updated", ("weights",), _OTHER_WEIGHTS, device=True, look=("weights",))

# An update too many moves moments and weights, wrong moments move weights: the cause is judged before its effects.
UPDATED: tuple[Law[Seen[Due]], ...] = (LOCKSTEP, ONE_UPDATE, OPTIMIZERS, REPLICAS)
"""After the trainer's update: the same weights, the same moments, one update more."""


BASE_POINT = "base"
"""The point at which the trainer reads all that is frozen, buffers too. The watch has another law for buffers."""


def frozen_tensor(seen: Seen[object], otherwise: str) -> str:
    """The frozen tensor that changed, as far as any rank knows it; else what the ranks differ in, or `otherwise`."""
    at = next((at for each in seen.observations if (at := each.values.get("base at", 0))), 0)
    return seen.names[at - 1] if at else (*seen.differing_tensors("base"), otherwise)[0]


def _frozen(seen: Seen[object]) -> Finding | None:
    odd = tuple(each.rank for each in seen.observations if each.values["base"] != each.values["first base"])
    if not odd:
        return None
    point = seen.observations[0].point
    what, name = ("weight or buffer", "base") if point == BASE_POINT else ("weight", "frozen weights")
    again = ", read once more at the close" * (point == "close")
    return Finding(f"a frozen {what} changed{again}", seen.step, odd, frozen_tensor(seen, name))


FROZEN = Law("base-frozen/base", ("base", "first base"), _frozen)
"""Every rank's digest of what is frozen is the one that it had at the start."""

BASE: tuple[Law[Seen[object]], ...] = (LOCKSTEP, FROZEN)
"""Now and then, and at every checkpoint of the trainer."""


def _audited(seen: Seen[object]) -> Finding | None:
    odd = [each for each in seen.observations if each.values["leaves"] or each.values["sums"]]
    if not odd:
        return None
    first = odd[0]
    pairs = [{each.rank, each.values["subject"]} for each in odd]
    # Who is in every pair that disagrees is the culprit; of a single pair nobody can tell which.
    shared = set.intersection(*pairs) or set.union(*pairs)
    of, by = first.values["subject"], first.rank
    if first.values["leaves"]:
        what, part = f"gradient of micro-batch {first.values['leaf']}", "leaf"
    else:
        what, part = f"partial sum from micro-batch {first.values['root']} on", "root"
    then, now = (hexadecimal(first.values[f"{part} {when}"]) for when in ("then", "now"))
    whose = f"rank {by} computed again" if of == by else f"rank {by} gets"
    unsure = "; either of both may be wrong" * (len(shared) > 1)
    told = f"the {what} has digest {then} on rank {of}, {whose} {now}{unsure}"
    details = tuple((f"rank {each.values['subject']}", f"audited by rank {each.rank}") for each in odd)
    return Finding(told, first.step, tuple(sorted(shared)), what, details)


AUDITED: tuple[Law[Seen[object]], ...] = (LOCKSTEP, Law("audit/audited", ("leaves", "sums"), _audited))
"""Another rank computes the same for every audited micro-batch and partial sum."""
