"""The laws that anyone's training loop can be held to, and the tables by which the watch judges a step.

The names of the values are those that the watch observes. An index travels as its number plus one; 0 means none.
"""

from __future__ import annotations

import math
from dataclasses import replace
from enum import IntEnum

from andon_contracts.agree import majority, minority, real_of
from andon_contracts.laws import update
from andon_contracts.laws.law import LOCKSTEP, Law, Seen, agreeing, difference, hexadecimal
from andon_contracts.laws.update import Reduced, clipped_norm, is_clipped_once
from andon_contracts.violation import NOT_SEEN_REDUCED, OTHER_SHAPES, Finding


class Change(IntEnum):
    """The code in the value `change`: what happened to a parameter. `text` is what a message says of it."""

    text: str

    def __new__(cls, code: int, text: str = "") -> Change:
        member = int.__new__(cls, code)
        member._value_ = code
        member.text = text
        return member

    REPLACED = 1, "replaced by another parameter"
    TOGGLED = 2, "frozen or unfrozen"
    ADDED = 3, "added, or another one was removed"
    MISSING = 4, "trainable but not in the optimizer"
    FOREIGN = 5, "in the optimizer but not a trainable parameter of the model"
    UNDECLARED = 6, "trainable, which was not declared"
    FROZEN = 7, "declared trainable but frozen"
    UNTIED = 8, "no longer tied to the tensor that it was declared to share"
    TOGGLED_BY_THE_LOOP = 9, "frozen or unfrozen"
    """Frozen, or unfrozen and in its optimizer: if all ranks do it alike, a loop may mean it (gradual unfreezing)."""


PARAMETER_BITS = 32
STREAMS = 4
"""How many random streams can be declared."""


def change_of(change: Change, index: int) -> int:
    """A change and the index of the parameter, as one integer."""
    return change << PARAMETER_BITS | index


_RATE_TOLERANCE = 1e-9
"""Of a learning rate, relative: the schedule of a loop may be computed twice."""
_NORM_TOLERANCE = 1e-3
"""Of a norm, relative: a loop has torch's norms. Ranks whose norms are further apart have other gradients."""


def torch_norm_error(elements: int) -> float:
    """By how much torch's fp32 norm of one CPU tensor of `elements` can be off, relatively.

    It adds the squares into 8 running sums. Each addition rounds by up to 2^-24, and the root halves the error of the
    sum: (elements / 8) * 2^-24 / 2. That is 0.37 for 100 million elements; 1e-2 was measured on normal numbers.
    """
    return elements * 2.0**-28


def each_by_itself(limit: float | None, longest: int = 0) -> Reduced:
    """What the watch holds an update of a loop to that clips to `limit`.

    longest: the elements of the largest tensor that is trained on a CPU. The loop clips by torch's norm of it.
    """
    return Reduced(limit=limit, norm_tolerance=max(_NORM_TOLERANCE, torch_norm_error(longest)))


def _indexed(seen: Seen[object], name: str, what: str) -> Finding | None:
    """The finding that a parameter is `what`; None if the value `name` is the index of a parameter on no rank."""
    first = next((value for value in seen.column(name) if value), None)
    if first is None:
        return None
    tensor = _named(seen, first - 1)
    return Finding(f"{tensor} {what}", seen.step, seen.ranks(name), tensor)


def _named(seen: Seen[object], index: int) -> str:
    return seen.names[index] if 0 <= index < len(seen.names) else f"parameter {index}"


def _none_has(law: str, name: str, what: str, *, suspicion: bool = False) -> Law[Seen[object]]:
    """The law that on no rank `name` is the index of a parameter; a message says that the parameter is `what`."""
    return Law(law, (name,), lambda seen: _indexed(seen, name, what), suspicion=suspicion)


def _toggled_alike(seen: Seen[object]) -> bool:
    toggled = seen.column("change")[0] >> PARAMETER_BITS == Change.TOGGLED_BY_THE_LOOP
    return "change" not in seen.differing and toggled


def _changed(seen: Seen[object]) -> Finding | None:
    first = next((value for value in seen.column("change") if value), None)
    if first is None:
        return None
    tensor = _named(seen, first & ((1 << PARAMETER_BITS) - 1))
    what = Change(first >> PARAMETER_BITS).text
    return Finding(f"{tensor} is {what}", seen.step, seen.ranks("change"), tensor)


def _parameters(seen: Seen[object]) -> Finding | None:
    other_layout = "layout" in seen.differing
    if not other_layout and _toggled_alike(seen):
        return None
    layout = "the tensors differ in name, shape, dtype, order or in which are trained"
    return _changed(seen) or (difference(seen, "layout", layout) if other_layout else None)


def _toggled(seen: Seen[object]) -> Finding | None:
    found = _changed(seen) if _toggled_alike(seen) else None
    if found is None:
        return None
    what = f"{found.seen}, on all ranks alike; this watch sees what was trained when it was opened, a new one the rest"
    return Finding(what, found.step, (), found.tensor)


_PARAMETERS: Law[Seen[object]] = Law("parameters-kept/before", ("change", "layout"), _parameters, look=("layout",))


def _modes(seen: Seen[object]) -> Finding | None:
    # Ranks that hold other modules, as pipeline stages do, have no modes to compare.
    if "modes" not in seen.differing or "modules" in seen.differing:
        return None
    odd = seen.odd("modes")
    if not odd:
        what = "some modules are in training mode on some ranks and in evaluation mode on others"
        return difference(seen, "modes", what)
    trained = seen.details["modes"][odd[0]]
    named = [" and ".join(str(rank) for rank, each in enumerate(trained) if each == mode) for mode in (1, 0)]
    what = f"{odd[0]} is in training mode on rank {named[0]}, in evaluation mode on rank {named[1]}"
    others = f", and so {'is' if len(odd) == 2 else 'are'} {len(odd) - 1} more modules" * (len(odd) > 1)
    return Finding(what + others, seen.step, minority(trained), odd[0])


def _hyperparameters(seen: Seen[object]) -> Finding | None:
    if "rate" in seen.differing:
        return difference(seen, "rate", "the learning rates are not the same", real=True)
    # The groups of ranks that train other parameters have only the learning rate in common.
    if "hyperparameters" not in seen.differing or "layout" in seen.differing:
        return None
    # Keys of groups, and no tensors: the message says them in words, and the finding names none.
    odd = seen.odd("hyperparameters")
    named = f": {', '.join(odd[:4])}" if odd else ""
    bare = Seen(seen.said, None)
    return difference(bare, "hyperparameters", f"the hyperparameters of the optimizers are not the same{named}")


def _rate(seen: Seen[Reduced]) -> Finding | None:
    odd = []
    for each in seen.said:
        rate, plan = real_of(each.values["rate"]), real_of(each.values["planned"])
        if not math.isclose(rate, plan, rel_tol=_RATE_TOLERANCE, abs_tol=1e-15):
            odd.append((each.rank, rate, plan))
    if not odd:
        return None
    shown = ", ".join(f"rank {rank}: {rate!r}, not {plan!r}" for rank, rate, plan in odd)
    ranks = seen.some(rank for rank, _, _ in odd)
    return Finding(f"the learning rate is not the schedule's ({shown})", seen.step, ranks, "learning rate")


RATE: Law[Seen[Reduced]] = Law("learning-rate-planned/before", ("rate", "planned"), _rate)
"""Each rank's learning rate is the one that this rank planned: nobody promised that the ranks have one plan."""


def _parted(seen: Seen[object], name: str) -> bool:
    # A rank that had no forward pass, which says 0, is held to nothing.
    return name in seen.differing and len({value for value in seen.column(name) if value}) > 1


def _buffers(seen: Seen[object]) -> Finding | None:
    # What a checkpoint has is the same everywhere. A cache, which it has not, may be longer on one rank than another.
    name = "buffers" if _parted(seen, "buffers") else "caches"
    if name == "caches" and (not _parted(seen, "caches") or _parted(seen, "cache shapes")):
        return None
    reshaped = seen.odd("shapes of buffers")
    odd = reshaped or seen.odd("buffers")
    what = OTHER_SHAPES if reshaped else "are not the same"
    found = difference(Seen(seen.said, None), name, f"the buffers with which the forward pass began {what}")
    # What a forward pass begins with is what the update before it left.
    return Finding(found.seen, max(found.step - 1, 0), found.ranks, (*odd, "buffers")[0])


def _all_wrote_alike(seen: Seen[object]) -> bool:
    """Whether several ranks all changed what is frozen, and to the same if they began with the same."""
    if len(seen.said) == 1 or any(o.values["base"] == o.values["first base"] for o in seen.said):
        return False
    return "base" not in seen.differing or "first base" in seen.differing


def _frozen(seen: Seen[object]) -> Finding | None:
    return None if _all_wrote_alike(seen) else update.FROZEN.check(seen)


def _frozen_alike(seen: Seen[object]) -> Finding | None:
    if not _all_wrote_alike(seen):
        return None
    tensor = update.frozen_tensor(seen, "frozen weights")
    return Finding("a frozen weight changed, on all ranks alike", seen.step, (), tensor)


def _first_alone(seen: Seen[object]) -> bool:
    """Whether rank 0 alone moved what follows the trained weights, as loops do that save and score it there."""
    moved = [o.rank for o in seen.said if o.values["followed"] != o.values["first followed"]]
    return len(seen.said) > 1 and moved == [0]


def _followers(seen: Seen[object]) -> Finding:
    return difference(Seen(seen.said, None), "followed", "a copy of the trained weights, which follows them, differs")


def _raw(seen: Seen[object]) -> Finding | None:
    repaired = ", and it was made finite before it was used" * seen.any("repaired")
    return _indexed(seen, "nonfinite", f"has a raw local gradient that is not finite{repaired}")


def _norm(seen: Seen[object]) -> Finding | None:
    odd = [o.rank for o in seen.said if not math.isfinite(real_of(o.values["norm"]))]
    if not odd:
        return None
    shown = ", ".join(f"rank {o.rank}: {real_of(o.values['norm'])!r}" for o in seen.said)
    what = f"the norm of the gradient is not finite ({shown}); clipping by it gives zero or NaN"
    return Finding(what, seen.step, seen.some(odd), "gradient")


def _collectives(seen: Seen[object]) -> Finding | None:
    if seen.any("strided"):
        return _indexed(seen, "strided", "was given to a collective although it is not dense in memory")
    what = "the ranks reduced different tensors, or in a different order"
    return difference(seen, "collectives", what) if "collectives" in seen.differing else None


def _clip(seen: Seen[Reduced]) -> Finding | None:
    limit = seen.want.limit
    norms, lefts = ([real_of(each) for each in seen.column(name)] for name in ("norm", "clipped"))
    odd = [
        each.rank
        for each, norm, left in zip(seen.said, norms, lefts, strict=True)
        if not is_clipped_once(left, norm, seen.want)
    ]
    if odd:
        norm, left = norms[odd[0]], lefts[odd[0]]
        what = (
            f"the gradient had norm {norm:.6g}; clipped once to {math.inf if limit is None else limit:g} it has "
            f"{clipped_norm(norm, limit):.6g}, the optimizer got {left:.6g}"
        )
        return Finding(what, seen.step, seen.some(odd), "clipped gradient")
    # Ranks whose reduced gradients differ are another law's matter, and so is a norm that is not finite, which compares
    # as false here.
    if "gradient" in seen.differing or not max(norms) - min(norms) > _NORM_TOLERANCE * max(norms):
        return None
    shown = ", ".join(f"rank {o.rank}: {norm:.6g}" for o, norm in zip(seen.said, norms, strict=True))
    what = f"the ranks clipped by different norms ({shown}): each its own gradient, before the reduction"
    return Finding(what, seen.step, (), "clipped gradient")


CLIP: Law[Seen[Reduced]] = Law("clip-once/before", ("norm", "clipped", "gradient"), _clip)
"""One clipping of each rank's own norm gives what it left, and equal reduced gradients were clipped by equal norms."""


def _loss(seen: Seen[object]) -> Finding | None:
    if not seen.any("reports"):
        return None
    mean = sum(real_of(value) for value in seen.column("loss sum")) / max(sum(seen.column("loss rows")), 1)
    told = {o.rank: real_of(o.values["reported"]) for o in seen.said if o.values["reports"]}
    odd = [rank for rank, value in told.items() if not math.isclose(value, mean, rel_tol=1e-4, abs_tol=1e-7)]
    if not odd:
        return None
    what = f"the loss reported is {told[odd[0]]!r}, the mean over the rows of all ranks is {mean!r}"
    return Finding(what, seen.step, seen.some(odd), "loss")


def _streams(seen: Seen[object]) -> Finding | None:
    for name in (f"stream {stream}" for stream in range(STREAMS)):
        if not seen.any(f"{name} must"):
            continue
        must, values = majority(seen.column(f"{name} must")), seen.column(name)
        if must == 1 and len(set(values)) > 1:
            return Finding("the ranks have different states of it, and must agree", seen.step, minority(values), name)
        if must == 2 and len(set(values)) < len(values):
            alike = [rank for rank, value in enumerate(values) if values.count(value) > 1]
            return Finding(f"ranks {alike} have the same state of it, and must differ", seen.step, (), name)
    return None


RATIO_TOLERANCE = 1e-3
_BY_NO_FACTOR = (
    "some rows are missing or weigh more than others, or each rank computes a constant or a normalization of the loss "
    "from its own rows"
)
"""The usual causes of a gradient that is no multiple of the law."""
_LONGEST_WINDOW = 64
"""Micro-batches of an update; with more, a quotient fits by chance."""


def name_ratio(ratio: float, world: int, micro_batches: int) -> str:
    """A factor in words, with everything that gives it: `= world size 2`, `= 1 / world size 2 or 1 of 2 micro-batches`.

    A window of `micro_batches` that is divided as one of more gives their quotient, whatever the world size.
    """
    factors = {
        "world size": world,
        "accumulation": micro_batches,
        "accumulation x world size": world * micro_batches if min(world, micro_batches) > 1 else 1,
        "world size squared": world**2,
    }
    named = list[str]()
    for word, value in factors.items():
        if value > 1 and math.isclose(ratio, value, rel_tol=RATIO_TOLERANCE):
            named.append(f"{word} {value}")
        if value > 1 and math.isclose(ratio, 1 / value, rel_tol=RATIO_TOLERANCE):
            named.append(f"1 / {word} {value}")
    full = round(micro_batches / ratio) if 0 < ratio < 1 else 0
    if micro_batches < full <= _LONGEST_WINDOW and math.isclose(ratio, micro_batches / full, rel_tol=RATIO_TOLERANCE):
        named.append(f"{micro_batches} of {full} micro-batches")
    return f" = {' or '.join(named)}" if named else ""


def _gradient_law(seen: Seen[object]) -> Finding | None:
    if all(real_of(o.values["error"]) <= real_of(o.values["tolerance"]) for o in seen.said):
        return None
    # An error that is not a number counts as the worst.
    worst = max(seen.said, key=lambda o: size if math.isfinite(size := real_of(o.values["error"])) else math.inf)
    ratio, error, rest = (real_of(worst.values[name]) for name in ("ratio", "error", "rest"))
    likely = ""
    if rest <= RATIO_TOLERANCE and abs(ratio - 1) >= RATIO_TOLERANCE:
        factor = name_ratio(ratio, len(seen.said), worst.values["micro-batches"])
        what = f"the reduced gradient is {ratio:.3f} x the law{factor}"
    else:
        by_none = ", and by no factor" * (rest > RATIO_TOLERANCE)
        what, likely = f"the reduced gradient is off the law by {error:.3g} of its norm{by_none}", _BY_NO_FACTOR
    what = f"{what}: the law is the gradient of one process over all rows"
    return Finding(what, seen.step, (), "gradient", likely=likely)


def _unapplied(seen: Seen[object]) -> Finding | None:
    first = next((each for each in seen.said if each.values["unmoved"]), None)
    if first is None:
        return None
    due, spacing = (real_of(first.values[f"unmoved {name}"]) for name in ("due", "spacing"))
    lost = due <= spacing / 2
    what = (
        f"kept every bit, although its gradient and learning rate call for an update of about {due:.2g}; the values "
        f"that its dtype holds are {spacing:.2g} apart there{', so that the update is rounded away' * lost}"
    )
    other = "the optimizer holds other parameters than the model"
    found = _indexed(seen, "unmoved", what)
    return found and replace(found, likely="the precision is too low for this learning rate" if lost else other)


START: tuple[Law[Seen[object]], ...] = (
    LOCKSTEP,
    _PARAMETERS,
    update.REPLICAS,
    _none_has(
        "precision-sufficient/start",
        "imprecise",
        "is trained in 16 bits: an update below half a unit in the last place is lost",
        suspicion=True,
    ),
)
BEFORE: tuple[Law[Seen[Reduced]], ...] = (
    LOCKSTEP,
    _PARAMETERS,
    Law("parameters-kept/alike", ("change",), _toggled, suspicion=True),
    Law("modes-agree/before", ("modes", "modules"), _modes, look=("modes",)),
    Law(
        "hyperparameters-agree/before",
        ("hyperparameters", "rate", "layout"),
        _hyperparameters,
        look=("hyperparameters",),
    ),
    RATE,
    _none_has("groups-planned/before", "ungrouped", "has not the hyperparameters that were declared for its name"),
    agreeing("scaler-agrees/before", ("scale",), "the loss scales are not the same", real=True),
    Law("buffers-agree/before", ("buffers", "caches"), _buffers, look=("buffers", "caches")),
    Law("finite/raw", ("nonfinite", "repaired"), _raw),
    Law("base-frozen/before", ("base", "first base"), _frozen),
    # What all ranks write alike a loop may mean, and hardware does not do: nobody is stopped for it.
    Law("base-frozen/alike", ("base", "first base"), _frozen_alike, suspicion=True),
    # A teacher, a momentum encoder or an average is the same on all ranks, or moved by rank 0 alone.
    Law(
        "base-frozen/followed",
        ("followed", "first followed"),
        lambda seen: _followers(seen) if "followed" in seen.differing and not _first_alone(seen) else None,
    ),
    Law(
        "base-frozen/followed-on-0",
        ("followed", "first followed"),
        lambda seen: _followers(seen) if _first_alone(seen) else None,
        suspicion=True,
    ),
    update.REPLICAS,
    _none_has(
        "gradient-fresh/before", "stale", "still had a gradient of the step before when this one began", suspicion=True
    ),
    _none_has(
        "gradient-present/before", "missing", "has had no gradient, or none but zero, since the start", suspicion=True
    ),
    Law("collectives-agree/before", ("strided", "collectives"), _collectives),
    update.GRADIENTS,
    Law("finite/norm", ("norm",), _norm),
    CLIP,
    Law("loss-reported/before", ("reports", "reported", "loss sum", "loss rows"), _loss),
    Law(
        "randomness-declared/before",
        tuple(f"stream {stream}{must}" for stream in range(STREAMS) for must in (" must", "")),
        _streams,
    ),
)
"""Before the update: causes before effects, so that a message names the first law that is broken."""
AFTER: tuple[Law[Seen[object]], ...] = (
    LOCKSTEP,
    update.OPTIMIZERS,
    update.REPLICAS,
    Law("update-applied/after", ("unmoved", "unmoved due", "unmoved spacing"), _unapplied, suspicion=True),
)


def _weights_part(seen: Seen[object]) -> Finding | None:
    if "weights" not in seen.differing:
        return None
    what = (
        f"the trainable weights part here, and {NOT_SEEN_REDUCED}. Where the loop brings them together later (local "
        "SGD) this is right, and they are held to agree there; where it never does, the close says so"
    )
    return Finding(what, seen.step, (), (*seen.odd("weights"), "weights")[0])


PARTED: tuple[Law[Seen[object]], ...] = (
    Law("replicas-agree/parted", ("weights",), _weights_part, look=("weights",), suspicion=True),
)
"""After an update of a loop whose reducer is not known: only later updates show whether parting is right."""


def _never_met(seen: Seen[object]) -> Finding | None:
    since = seen.said[0].values["parted"]
    what = f"the ranks' weights parted after update {since} and never agreed again until the close"
    return Finding(what, seen.step, (), "weights") if seen.any("parted") else None


NEVER_MET: tuple[Law[Seen[object]], ...] = (Law("replicas-agree/close", ("parted",), _never_met),)
"""At the close, by what each rank knows of all."""
GRADIENT_LAW: tuple[Law[Seen[object]], ...] = (
    Law("gradient-law/audit", ("ratio", "error", "rest", "tolerance", "micro-batches"), _gradient_law),
)
"""On every rank the reduced gradient before clipping is that of one process, up to rounding."""


def _tree_law(name: str, *, stops: bool = False) -> Law[Seen[object]]:
    def check(seen: Seen[object]) -> Finding | None:
        if name not in seen.differing:
            return None
        # Before the second look only the digest of all of them is known.
        looked = seen.details.get(name, {name: seen.column(name)})
        odd = [each for each in looked if len(set(looked[each])) > 1]
        what = "the trees have different leaves" if name == "places" else f"{len(odd)} of {len(looked)} leaves differ"
        details = tuple((each, " ".join(map(hexadecimal, looked[each]))) for each in odd)
        return Finding(what, seen.step, minority(looked[odd[0]]), odd[0], details)

    return Law(f"trees-agree/{name}", (name,), check, stops=stops)


PLACES, LEAVES = _tree_law("places", stops=True), _tree_law("leaves")
TREE: tuple[Law[Seen[object]], ...] = (PLACES, LEAVES)
"""Every rank's tree has the same leaves, in the same order, with the same bits; explained after a second look."""
