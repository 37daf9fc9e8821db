"""The laws of one update, at the points of a step: the start, the reduced gradient, the audit, what the update left.

A trainer of ours and a watch of anyone's loop read the same rows where they have a clause of the same name at the same
point. What they expect of it differs, and stands in `Reduced` and `Due`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from andon_contracts.agree import Observation, majority, real_of
from andon_contracts.laws.law import LOCKSTEP, Law, Rule, Seen, agreeing, difference, hexadecimal, odd_tensors
from andon_contracts.violation import Finding

# the start


def _explain_start(seen: Seen[object]) -> Finding:
    names = [name for name in seen.said[0].values if name in seen.differing]
    return difference(seen, names[0], f"the ranks start from different {', '.join(names)}")


START: tuple[Law[Seen[object]], ...] = (
    LOCKSTEP,
    agreeing("layout-equal/start", ("layout",), "the trainable tensors differ in name, shape, dtype or order"),
    Law("start-agrees/start", (), lambda seen: not seen.differing, _explain_start),
)
"""Before step 1 of ours: the same layout, the same everything that was observed."""


# before the update

NORM_TOLERANCE = 2.0**-19
"""How far apart, relatively, rounding can leave the norm after clipping and the one that is expected.

In units of 2^-24: `norms.flat_norm` is off by at most 8.5, before and after clipping. Torch's clip rounds the limit,
norm + 1e-6, its reciprocal, the factor and each product, by 1 each. Together that is 22; 32 are allowed.
"""
LOOP_NORM_TOLERANCE = 1e-3
"""The same of a watched loop, whose norms are torch's. Ranks whose norms are further apart have other gradients."""
FACTOR_STEP = 2.0**-149
"""The spacing of the smallest fp32 numbers. A clip factor is off by up to that, so the norm by that times itself."""
NORM_FLOOR = 1e-30
"""The absolute error that a norm may have: two norms near zero count as equal."""


@dataclass(frozen=True)
class Reduced:
    """What an update is held to before it is made.

    left: the digest of the weights that the last update left; `Rule.SAME` where none is known, and ranks are held to
    each other; `Rule.HELD` where so far only the device knows it. limit: to which the gradient was to be clipped; None:
    it was not. rate_tolerance: of a learning rate, relative; 0: to the bit. norm_tolerance: of a norm, relative.
    shared: the ranks have one plan and were held to one gradient, so that what most of them have is right for all;
    otherwise each of them is held to what it says itself.
    """

    left: int = Rule.SAME
    limit: float | None = None
    rate_tolerance: float = 0.0
    norm_tolerance: float = NORM_TOLERANCE
    shared: bool = True


def _off_plan(seen: Seen[Reduced]) -> list[tuple[Observation, int]]:
    """Who has another learning rate than planned, and the bits of the rate to which it is held."""
    plans, tolerance = seen.column("planned"), seen.want.rate_tolerance
    if seen.want.shared:
        plans = [majority(plans)] * len(plans)
    odd = []
    for each, plan in zip(seen.said, plans, strict=True):
        rate = each.values["rate"]
        close = rate == plan
        if tolerance:
            close = math.isclose(real_of(rate), real_of(plan), rel_tol=tolerance, abs_tol=1e-15)
        if not close:
            odd.append((each, plan))
    return odd


def _explain_rate(seen: Seen[Reduced]) -> Finding:
    odd = _off_plan(seen)
    ranks = tuple(o.rank for o, _ in odd)
    if seen.want.shared:
        plans, planned = seen.column("planned"), odd[0][1]
        shown = ", ".join(f"rank {o.rank}: {real_of(o.values['rate'])!r}" for o, _ in odd)
        what = f"the schedule's {real_of(planned)!r} ({shown})"
        certain = plans.count(planned) * 2 > len(plans)
    else:
        shown = ", ".join(f"rank {o.rank}: {real_of(o.values['rate'])!r}, not {real_of(plan)!r}" for o, plan in odd)
        what, certain = f"the schedule's ({shown})", len(ranks) < len(seen.said)
    return Finding(f"the learning rate is not {what}", seen.step, ranks if certain else (), "learning rate")


RATE: Law[Seen[Reduced]] = Law(
    "learning-rate-planned/reduced",
    ("rate", "planned"),
    lambda seen: not _off_plan(seen),
    _explain_rate,
    lambda _: {"rate": Rule.MOST},
)
"""Every rank's optimizer holds the learning rate that is planned for this update."""


def _unmoved(seen: Seen[Reduced]) -> bool:
    left = seen.want.left
    if left is Rule.SAME:
        return "weights" not in seen.differing
    return all(each.values["weights"] == left for each in seen.said)


def _explain_unmoved(seen: Seen[Reduced]) -> Finding:
    left = seen.want.left
    if left is Rule.SAME:
        return difference(seen, "weights", _OTHER_WEIGHTS_BEFORE if seen.want.shared else _OTHER_WEIGHTS)
    return Finding(
        seen=f"the weights are not those that the last update left (digest {hexadecimal(left)}); "
        "something outside the step changed them",
        step=seen.step,
        ranks=tuple(each.rank for each in seen.said if each.values["weights"] != left),
        tensor=(*odd_tensors(seen.details, "weights"), "weights")[0],
    )


_OTHER_WEIGHTS = "the trainable weights are not the same on every rank"
_OTHER_WEIGHTS_BEFORE = "the weights before the update are not the same"

UNMOVED: Law[Seen[Reduced]] = Law(
    "replicas-agree/reduced",
    ("weights",),
    _unmoved,
    _explain_unmoved,
    lambda want: {"weights": want.left},
    look=("weights",),
)
"""Before an update all ranks have the weights that the last one left."""

KEPT: Law[Seen[int]] = Law(
    "optimizers-agree/reduced",
    ("optimizer",),
    lambda seen: all(each.values["optimizer"] == seen.want for each in seen.said),
    lambda seen: Finding(
        f"the optimizer state is not what the last update left (digest {hexadecimal(seen.want)}); "
        "something outside the step changed it",
        seen.step,
        tuple(each.rank for each in seen.said if each.values["optimizer"] != seen.want),
        "optimizer",
    ),
)
"""Of a rank that is alone: with others, what one of them lost is seen once the update has used it."""

GRADIENTS = agreeing(
    "gradients-agree/reduced", ("gradient",), "the reduced gradients are not the same", device=True, look=("gradient",)
)


GIVEN = "given"
"""The point of an update whose gradient came from a caller, and of which no part was looked at before."""


def _explain_finite(seen: Seen[object]) -> Finding:
    ranks = tuple(o.rank for o in seen.said if o.values["nonfinite"] or not math.isfinite(real_of(o.values["norm"])))
    norm, checked = real_of(seen.said[0].values["norm"]), seen.said[0].point != GIVEN
    return Finding(
        seen=f"the reduced gradient or its norm ({norm}) is not finite{checked * ' although every part was'}",
        step=seen.step,
        ranks=ranks if len(ranks) < len(seen.said) else (),
        tensor="reduced gradient",
    )


FINITE: Law[Seen[object]] = Law(
    "finite/reduced",
    ("nonfinite", "norm"),
    lambda seen: all(not o.values["nonfinite"] and math.isfinite(real_of(o.values["norm"])) for o in seen.said),
    _explain_finite,
    lambda _: {"nonfinite": 0, "norm": Rule.FINITE},
)
"""The reduced gradient and its norm are finite on every rank."""


def clipped_norm(norm: float, limit: float | None) -> float:
    """What one clipping to `limit` (None: there is none) leaves of `norm`."""
    # The law of torch.nn.utils.clip_grad_norm_, whose 1e-6 counts where the limit is small.
    return norm if limit is None else norm * min(1.0, limit / (norm + 1e-6))


def _not_clipped(seen: Seen[Reduced]) -> list[Observation]:
    """Who has another norm left than one clipping leaves."""
    want, norms = seen.want, seen.column("norm")
    if want.shared:
        norms = [majority(norms)] * len(norms)
    odd = []
    for each, norm in zip(seen.said, norms, strict=True):
        before = real_of(norm)
        left = clipped_norm(before, want.limit)
        allowed = want.norm_tolerance * left + FACTOR_STEP * before + NORM_FLOOR
        if not abs(real_of(each.values["clipped"]) - left) <= allowed:
            odd.append(each)
    return odd


def _clipped_apart(seen: Seen[Reduced]) -> bool:
    """Whether ranks clipped by different norms. A reduced gradient has one: what they clipped was not reduced yet."""
    if "gradient" in seen.differing:
        # Ranks whose reduced gradient has other bits are no matter of clipping.
        return False
    norms = [real_of(each) for each in seen.column("norm")]
    # A norm that is not finite is no matter of clipping either: no comparison with one is true.
    return max(norms) - min(norms) > LOOP_NORM_TOLERANCE * max(norms)


def _explain_clip(seen: Seen[Reduced]) -> Finding:
    odd, limit = _not_clipped(seen), seen.want.limit
    ranks = tuple(each.rank for each in odd)
    if seen.want.shared:
        shown = ", ".join(
            f"rank {o.rank}: {real_of(o.values['clipped'])!r} from {real_of(o.values['norm'])!r}" for o in odd
        )
        what = f"the norm after clipping is not what one clipping to {limit} gives ({shown})"
        return Finding(what, seen.step, ranks, "clipped gradient")
    if not odd:
        norms = ", ".join(f"rank {o.rank}: {real_of(o.values['norm']):.6g}" for o in seen.said)
        what = f"the ranks clipped by different norms ({norms}): each its own gradient, before the reduction"
        return Finding(what, seen.step, (), "clipped gradient")
    norm, found = (real_of(odd[0].values[name]) for name in ("norm", "clipped"))
    what = (
        f"the gradient had norm {norm:.6g}; clipped once to {math.inf if limit is None else limit:g} it has "
        f"{clipped_norm(norm, limit):.6g}, the optimizer got {found:.6g}"
    )
    return Finding(what, seen.step, ranks if len(ranks) < len(seen.said) else (), "clipped gradient")


CLIP: Law[Seen[Reduced]] = Law(
    "clip-once/reduced",
    ("norm", "clipped", "gradient"),
    lambda seen: not _not_clipped(seen) and (seen.want.shared or not _clipped_apart(seen)),
    _explain_clip,
    lambda _: {"clipped": Rule.CLIPPED},
)
"""On every rank the norm after clipping is what one clipping of the norm before it gives, up to rounding."""

REDUCED: tuple[Law[Seen[Reduced]], ...] = (LOCKSTEP, RATE, UNMOVED, GRADIENTS, FINITE, CLIP)
"""Before the update of ours: the same finite gradient, clipped once, weights as the last update left them."""


# after the update


@dataclass(frozen=True)
class Due:
    """What an update is held to after it was made. updates: how many there are to be by now."""

    updates: int


def _explain_count(seen: Seen[Due]) -> Finding:
    due = seen.want.updates
    shown = ", ".join(f"rank {o.rank}: {o.values['updates']}" for o in seen.said)
    return Finding(
        seen=f"{due} updates were due, taken were {shown}",
        step=seen.step,
        ranks=tuple(o.rank for o in seen.said if o.values["updates"] != due),
        tensor="count of updates",
    )


ONE_UPDATE: Law[Seen[Due]] = Law(
    "one-update/updated",
    ("updates",),
    lambda seen: all(each.values["updates"] == seen.want.updates for each in seen.said),
    _explain_count,
    lambda want: {"updates": want.updates},
)
"""Every rank's optimizer has taken exactly the planned number of updates."""

OPTIMIZERS = agreeing(
    "optimizers-agree/updated",
    ("updates", "optimizer"),
    "the optimizer states are not the same",
    device=True,
    look=("optimizer",),
)
REPLICAS = agreeing("replicas-agree/updated", ("weights",), _OTHER_WEIGHTS, device=True, look=("weights",))

# An update too many moves moments and weights, wrong moments move weights: the cause is judged before its effects.
UPDATED: tuple[Law[Seen[Due]], ...] = (LOCKSTEP, ONE_UPDATE, OPTIMIZERS, REPLICAS)
"""After the update of ours: the same weights, the same moments, one update more."""


# now and then


BASE_POINT = "base"
"""The point at which our trainer reads all that is frozen, buffers too. A watch has another law for buffers."""


def frozen_tensor(seen: Seen[object], otherwise: str) -> str:
    """The frozen tensor that changed, as far as any rank knows it; else what the ranks differ in, or `otherwise`."""
    at = next((at for each in seen.said if (at := each.values.get("base at", 0))), 0)
    return seen.names[at - 1] if at else (*odd_tensors(seen.details, "base"), otherwise)[0]


def _explain_frozen(seen: Seen[object]) -> Finding:
    ranks = tuple(each.rank for each in seen.said if each.values["base"] != each.values["first base"])
    point = seen.said[0].point
    what, name = ("weight or buffer", "base") if point == BASE_POINT else ("weight", "frozen weights")
    return Finding(
        seen=f"a frozen {what} changed" + ", read once more at the close" * (point == "close"),
        step=seen.step,
        ranks=ranks,
        tensor=frozen_tensor(seen, name),
    )


FROZEN: Law[Seen[object]] = Law(
    "base-frozen/base",
    ("base", "first base"),
    lambda seen: all(each.values["base"] == each.values["first base"] for each in seen.said),
    _explain_frozen,
)
"""Every rank's digest of what is frozen is the one that it had at the start."""

BASE: tuple[Law[Seen[object]], ...] = (LOCKSTEP, FROZEN)
"""Now and then, and at every checkpoint of ours."""


def _audited_wrong(seen: Seen[object]) -> list[Observation]:
    return [each for each in seen.said if each.values["leaves"] or each.values["sums"]]


def _explain_audit(seen: Seen[object]) -> Finding:
    odd = _audited_wrong(seen)
    first = odd[0]
    pairs = [{each.rank, each.values["subject"]} for each in odd]
    # Who is in every pair that disagrees is the culprit; of a single pair nobody can tell which.
    shared = set.intersection(*pairs) or set.union(*pairs)
    of, by = first.values["subject"], first.rank
    if first.values["leaves"]:
        what = f"gradient of micro-batch {first.values['leaf']}"
        then, now = first.values["leaf then"], first.values["leaf now"]
    else:
        what = f"partial sum from micro-batch {first.values['root']} on"
        then, now = first.values["root then"], first.values["root now"]
    whose = f"rank {by} computed again" if of == by else f"rank {by} gets"
    return Finding(
        seen=f"the {what} has digest {hexadecimal(then)} on rank {of}, {whose} {hexadecimal(now)}"
        + ("; either of both may be wrong" if len(shared) > 1 else ""),
        step=first.step,
        ranks=tuple(sorted(shared)),
        tensor=what,
        details=tuple((f"rank {each.values['subject']}", f"audited by rank {each.rank}") for each in odd),
    )


AUDITED: tuple[Law[Seen[object]], ...] = (
    LOCKSTEP,
    Law("audit/audited", ("leaves", "sums"), lambda seen: not _audited_wrong(seen), _explain_audit),
)
"""Every audited micro-batch and partial sum is what another rank makes of it."""
