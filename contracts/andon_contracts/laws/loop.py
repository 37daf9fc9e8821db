"""The laws that anyone's training loop can be held to, and the tables by which a watch judges a step.

The names of the values are those that a watch observes; an index travels as its number plus one, and 0 says that there
is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from andon_contracts.agree import majority, minority, real_of
from andon_contracts.laws import update
from andon_contracts.laws.law import (
    LOCKSTEP,
    Law,
    Names,
    Rule,
    Seen,
    agreeing,
    difference,
    hexadecimal,
    odd_tensors,
    ranks_where,
)
from andon_contracts.laws.update import LOOP_NORM_TOLERANCE, Reduced
from andon_contracts.violation import NOT_SEEN_REDUCED, OTHER_SHAPES, Finding

CHANGES = (
    "kept",
    "replaced by another parameter",
    "frozen or unfrozen",
    "added, or another one was removed",
    "trainable but not in the optimizer",
    "in the optimizer but not a trainable parameter of the model",
    "trainable, which was not declared",
    "declared trainable but frozen",
    "no longer tied to the tensor that it was declared to share",
    "frozen or unfrozen",
)
"""What can have happened to a parameter, by code."""
TOGGLED_BY_THE_LOOP = 9
"""Frozen, or unfrozen and in its optimizer: where all ranks have it alike, a loop may mean it (gradual unfreezing)."""

PARAMETER_BITS = 32
STREAMS = 4
"""How many random streams can be declared."""
_RATE_TOLERANCE = 1e-9


def change_of(code: int, index: int) -> int:
    """A code of `CHANGES` and the index of the parameter, as one integer."""
    return code << PARAMETER_BITS | index


def torch_norm_error(elements: int) -> float:
    """By how much torch's fp32 norm of one CPU tensor of `elements` can be off, relatively.

    It adds the squares into 8 running sums. Each addition rounds by up to 2^-24, and the root halves the error of the
    sum: (elements / 8) * 2^-24 / 2. That is 0.37 for 100 million elements; 1e-2 was measured on normal numbers.
    """
    return elements * 2.0**-28


def each_by_itself(limit: float | None, longest: int = 0) -> Reduced:
    """To what a watch holds an update of a loop that clips to `limit`: each rank to what it says itself.

    longest: the elements of the largest tensor that is trained on a CPU. The loop clips by torch's norm of it.

    Nobody promised that the ranks have one plan, and after other laws are broken a watch goes on: what most ranks have
    is no truth then.
    """
    tolerance = max(LOOP_NORM_TOLERANCE, torch_norm_error(longest))
    return Reduced(Rule.SAME, limit, rate_tolerance=_RATE_TOLERANCE, norm_tolerance=tolerance, shared=False)


def _named(names: Names, index: int) -> str:
    return names[index] if 0 <= index < len(names) else f"parameter {index}"


def _indexed(seen: Seen[object], name: str, what: str) -> Finding:
    first = next(value for value in seen.column(name) if value)
    tensor = _named(seen.names, first - 1)
    return Finding(seen=f"{tensor} {what}", step=seen.step, ranks=ranks_where(seen, name), tensor=tensor)


def _none_has(law: str, name: str, what: str, *, suspicion: bool = False) -> Law[Seen[object]]:
    """The law that on no rank `name` is the index of a parameter, which is else said to be `what`."""

    def holds(seen: Seen[object]) -> bool:
        return not seen.any(name)

    def explain(seen: Seen[object]) -> Finding:
        return _indexed(seen, name, what)

    return Law(law, (name,), holds, explain, suspicion=suspicion)


# what the update starts from


def _explain_kept(seen: Seen[object]) -> Finding:
    first = next((value for value in seen.column("change") if value), None)
    if first is None:
        return difference(seen, "layout", "the tensors differ in name, shape, dtype, order or in which are trained")
    code, index = first >> PARAMETER_BITS, first & ((1 << PARAMETER_BITS) - 1)
    tensor = _named(seen.names, index)
    return Finding(f"{tensor} is {CHANGES[code]}", seen.step, ranks_where(seen, "change"), tensor)


def _toggled_alike(seen: Seen[object]) -> bool:
    return "change" not in seen.differing and seen.column("change")[0] >> PARAMETER_BITS == TOGGLED_BY_THE_LOOP


def _explain_toggled(seen: Seen[object]) -> Finding:
    found = _explain_kept(seen)
    what = f"{found.seen}, on all ranks alike; this watch sees what was trained when it was opened, a new one the rest"
    return Finding(what, found.step, (), found.tensor)


_PARAMETERS: Law[Seen[object]] = Law(
    "parameters-kept/before",
    ("change", "layout"),
    lambda seen: (not seen.any("change") or _toggled_alike(seen)) and "layout" not in seen.differing,
    _explain_kept,
    look=("layout",),
)
_TOGGLED_ALIKE: Law[Seen[object]] = Law(
    "parameters-kept/alike",
    ("change",),
    lambda seen: not _toggled_alike(seen),
    _explain_toggled,
    suspicion=True,
)


def _explain_modes(seen: Seen[object]) -> Finding:
    odd = odd_tensors(seen.details, "modes")
    if not odd:
        return difference(
            seen, "modes", "some modules are in training mode on some ranks and in evaluation mode on others"
        )
    trained = seen.details["modes"][odd[0]]
    named = [" and ".join(str(rank) for rank, each in enumerate(trained) if each == mode) for mode in (1, 0)]
    what = f"{odd[0]} is in training mode on rank {named[0]}, in evaluation mode on rank {named[1]}"
    others = f", and so {'is' if len(odd) == 2 else 'are'} {len(odd) - 1} more modules" * (len(odd) > 1)
    return Finding(what + others, seen.step, minority(trained), odd[0])


_MODES: Law[Seen[object]] = Law(
    "modes-agree/before",
    ("modes", "modules"),
    lambda seen: "modes" not in seen.differing or "modules" in seen.differing,
    _explain_modes,
    look=("modes",),
)
"""Ranks that hold other modules, as pipeline stages do, have no modes to compare."""


def _explain_hyperparameters(seen: Seen[object]) -> Finding:
    if "rate" in seen.differing:
        return difference(seen, "rate", "the learning rates are not the same", real=True)
    # Keys of groups, and no tensors: they are said in words, and the finding names none.
    odd = odd_tensors(seen.details, "hyperparameters")
    named = f": {', '.join(odd[:4])}" if odd else ""
    bare = Seen(seen.said, None)
    return difference(bare, "hyperparameters", f"the hyperparameters of the optimizers are not the same{named}")


_HYPERPARAMETERS: Law[Seen[object]] = Law(
    "hyperparameters-agree/before",
    ("hyperparameters", "rate", "layout"),
    lambda seen: (
        "rate" not in seen.differing and ("hyperparameters" not in seen.differing or "layout" in seen.differing)
    ),
    _explain_hyperparameters,
    look=("hyperparameters",),
)
"""The groups of ranks that train other parameters have only the learning rate in common."""


def _parted(seen: Seen[object], name: str) -> bool:
    # A rank that had no forward pass, which says 0, is held to nothing.
    return name in seen.differing and len({value for value in seen.column(name) if value}) > 1


def _explain_buffers(seen: Seen[object]) -> Finding:
    reshaped = odd_tensors(seen.details, "shapes of buffers")
    odd = reshaped or odd_tensors(seen.details, "buffers")
    what = OTHER_SHAPES if reshaped else "are not the same"
    name = "buffers" if _parted(seen, "buffers") else "caches"
    found = difference(Seen(seen.said, None), name, f"the buffers with which the forward pass began {what}")
    # What a forward pass begins with is what the update before it left.
    return Finding(found.seen, max(found.step - 1, 0), found.ranks, (*odd, "buffers")[0])


_BUFFERS: Law[Seen[object]] = Law(
    "buffers-agree/before",
    ("buffers", "caches"),
    lambda seen: not _parted(seen, "buffers") and not (_parted(seen, "caches") and not _parted(seen, "cache shapes")),
    _explain_buffers,
    look=("buffers", "caches"),
)
"""What a checkpoint has is the same everywhere. A cache, which it has not, may be longer on one rank than another."""


# what is not trained


def _alike(seen: Seen[object]) -> bool:
    """Whether several ranks all changed what is frozen, and to the same where they began with the same."""
    if len(seen.said) == 1 or any(o.values["base"] == o.values["first base"] for o in seen.said):
        return False
    return "base" not in seen.differing or "first base" in seen.differing


def _explain_alike(seen: Seen[object]) -> Finding:
    what = "a frozen weight changed, on all ranks alike"
    return Finding(what, seen.step, (), update.frozen_tensor(seen, "frozen weights"))


_FROZEN: Law[Seen[object]] = Law(
    "base-frozen/before",
    ("base", "first base"),
    lambda seen: update.FROZEN.holds(seen) or _alike(seen),
    update.FROZEN.explain,
)
_FROZEN_ALIKE: Law[Seen[object]] = Law(
    "base-frozen/alike",
    ("base", "first base"),
    lambda seen: update.FROZEN.holds(seen) or not _alike(seen),
    _explain_alike,
    suspicion=True,
)
"""What all ranks write alike a loop may mean, and hardware does not do: nobody is stopped for it."""


def _first_alone(seen: Seen[object]) -> bool:
    """Whether rank 0 alone moved what follows the trained weights, as loops do that save and score it there."""
    moved = [o.rank for o in seen.said if o.values["followed"] != o.values["first followed"]]
    return len(seen.said) > 1 and moved == [0]


def _explain_followers(seen: Seen[object]) -> Finding:
    return difference(Seen(seen.said, None), "followed", "a copy of the trained weights, which follows them, differs")


_FOLLOWERS: Law[Seen[object]] = Law(
    "base-frozen/followed",
    ("followed", "first followed"),
    lambda seen: "followed" not in seen.differing or _first_alone(seen),
    _explain_followers,
)
_FOLLOWERS_OF_RANK_0: Law[Seen[object]] = Law(
    "base-frozen/followed-on-0",
    ("followed", "first followed"),
    lambda seen: not _first_alone(seen),
    _explain_followers,
    suspicion=True,
)
"""A teacher, a momentum encoder or an average is the same on all ranks, or moved by rank 0 alone."""


# the gradient


def _explain_raw(seen: Seen[object]) -> Finding:
    found = _indexed(seen, "nonfinite", "has a raw local gradient that is not finite")
    repaired = ", and it was made finite before it was used" * seen.any("repaired")
    return Finding(found.seen + repaired, found.step, found.ranks, found.tensor)


def _explain_norm(seen: Seen[object]) -> Finding:
    shown = ", ".join(f"rank {o.rank}: {real_of(o.values['norm'])!r}" for o in seen.said)
    ranks = tuple(o.rank for o in seen.said if not math.isfinite(real_of(o.values["norm"])))
    return Finding(
        seen=f"the norm of the gradient is not finite ({shown}); clipping by it gives zero or NaN",
        step=seen.step,
        ranks=ranks if len(ranks) < len(seen.said) else (),
        tensor="gradient",
    )


def _explain_collectives(seen: Seen[object]) -> Finding:
    if seen.any("strided"):
        return _indexed(seen, "strided", "was given to a collective although it is not dense in memory")
    return difference(seen, "collectives", "the ranks reduced different tensors, or in a different order")


# what a loop tells of a step


def _mean_loss(seen: Seen[object]) -> float:
    rows = sum(seen.column("loss rows"))
    return sum(real_of(value) for value in seen.column("loss sum")) / max(rows, 1)


def _wrong_reports(seen: Seen[object]) -> list[int]:
    if not seen.any("reports"):
        return []
    mean = _mean_loss(seen)
    return [
        o.rank
        for o in seen.said
        if o.values["reports"] and not math.isclose(real_of(o.values["reported"]), mean, rel_tol=1e-4, abs_tol=1e-7)
    ]


def _explain_loss(seen: Seen[object]) -> Finding:
    odd = _wrong_reports(seen)
    value = real_of(seen.said[odd[0]].values["reported"])
    return Finding(
        f"the loss reported is {value!r}, the mean over the rows of all ranks is {_mean_loss(seen)!r}",
        seen.step,
        tuple(odd) if len(odd) < len(seen.said) else (),
        "loss",
    )


def _odd_stream(seen: Seen[object]) -> int | None:
    for stream in range(STREAMS):
        if not seen.any(f"stream {stream} must"):
            continue
        must, values = majority(seen.column(f"stream {stream} must")), seen.column(f"stream {stream}")
        if (must == 1 and len(set(values)) > 1) or (must == 2 and len(set(values)) < len(values)):
            return stream
    return None


def _explain_streams(seen: Seen[object]) -> Finding:
    stream = _odd_stream(seen) or 0
    name = f"stream {stream}"
    values = seen.column(name)
    if majority(seen.column(f"{name} must")) == 1:
        return Finding("the ranks have different states of it, and must agree", seen.step, minority(values), name)
    alike = [rank for rank, value in enumerate(values) if values.count(value) > 1]
    return Finding(f"ranks {alike} have the same state of it, and must differ", seen.step, (), name)


# the gradient of one process


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


def _size(error: float) -> float:
    """Of an error that is no number, as of the worst there is."""
    return error if math.isfinite(error) else math.inf


def _explain_law(seen: Seen[object]) -> Finding:
    worst = max(seen.said, key=lambda o: _size(real_of(o.values["error"])))
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


# what the update left


def _explain_unapplied(seen: Seen[object]) -> Finding:
    first = next(each for each in seen.said if each.values["unmoved"])
    due, spacing = (real_of(first.values[f"unmoved {name}"]) for name in ("due", "spacing"))
    lost = due <= spacing / 2
    what = (
        f"kept every bit, although its gradient and learning rate call for an update of about {due:.2g}; the values "
        f"that its dtype holds are {spacing:.2g} apart there{', so that the update is rounded away' * lost}"
    )
    applied = "the optimizer holds other parameters than the model"
    likely = "the precision is too low for this learning rate" if lost else applied
    return replace(_indexed(seen, "unmoved", what), likely=likely)


# the tables


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
    _TOGGLED_ALIKE,
    _MODES,
    _HYPERPARAMETERS,
    update.RATE,
    _none_has("groups-planned/before", "ungrouped", "has not the hyperparameters that were declared for its name"),
    agreeing("scaler-agrees/before", ("scale",), "the loss scales are not the same", real=True),
    _BUFFERS,
    Law("finite/raw", ("nonfinite", "repaired"), lambda seen: not seen.any("nonfinite"), _explain_raw),
    _FROZEN,
    _FROZEN_ALIKE,
    _FOLLOWERS,
    _FOLLOWERS_OF_RANK_0,
    update.UNMOVED,
    _none_has(
        "gradient-fresh/before",
        "stale",
        "still had a gradient of the step before when this one began",
        suspicion=True,
    ),
    _none_has(
        "gradient-present/before",
        "missing",
        "has had no gradient, or none but zero, since the start",
        suspicion=True,
    ),
    Law(
        "collectives-agree/before",
        ("strided", "collectives"),
        lambda seen: not seen.any("strided") and "collectives" not in seen.differing,
        _explain_collectives,
    ),
    update.GRADIENTS,
    Law(
        "finite/norm",
        ("norm",),
        lambda seen: all(math.isfinite(real_of(each)) for each in seen.column("norm")),
        _explain_norm,
    ),
    update.CLIP,
    Law(
        "loss-reported/before",
        ("reports", "reported", "loss sum", "loss rows"),
        lambda seen: not _wrong_reports(seen),
        _explain_loss,
    ),
    Law(
        "randomness-declared/before",
        tuple(f"stream {stream}{must}" for stream in range(STREAMS) for must in (" must", "")),
        lambda seen: _odd_stream(seen) is None,
        _explain_streams,
    ),
)
"""Before the update: causes before effects, the first that is found is what a message should name."""
AFTER: tuple[Law[Seen[object]], ...] = (
    LOCKSTEP,
    update.OPTIMIZERS,
    update.REPLICAS,
    Law(
        "update-applied/after",
        ("unmoved", "unmoved due", "unmoved spacing"),
        lambda seen: not seen.any("unmoved"),
        _explain_unapplied,
        suspicion=True,
    ),
)


def _explain_parted(seen: Seen[object]) -> Finding:
    what = (
        f"the trainable weights part here, and {NOT_SEEN_REDUCED}. Where the loop brings them together later (local "
        "SGD) this is right, and they are held to agree there; where it never does, the close says so"
    )
    return Finding(what, seen.step, (), (*odd_tensors(seen.details, "weights"), "weights")[0])


PARTED: tuple[Law[Seen[object]], ...] = (
    Law(
        "replicas-agree/parted",
        ("weights",),
        lambda seen: "weights" not in seen.differing,
        _explain_parted,
        look=("weights",),
        suspicion=True,
    ),
)
"""After an update of a loop whose reducer is not known: whether parting is right, only what follows can tell."""


def _explain_never(seen: Seen[object]) -> Finding:
    since = seen.said[0].values["parted"]
    what = f"the ranks' weights parted after update {since} and never agreed again until the close"
    return Finding(what, seen.step, (), "weights")


NEVER_MET: tuple[Law[Seen[object]], ...] = (
    Law("replicas-agree/close", ("parted",), lambda seen: not seen.any("parted"), _explain_never),
)
"""At the close, by what each rank knows of all."""
GRADIENT_LAW: tuple[Law[Seen[object]], ...] = (
    Law(
        "gradient-law/audit",
        ("ratio", "error", "rest", "tolerance", "micro-batches"),
        lambda seen: all(real_of(o.values["error"]) <= real_of(o.values["tolerance"]) for o in seen.said),
        _explain_law,
    ),
)
"""On every rank the reduced gradient before clipping is that of one process, up to rounding."""


# a tree that a script compares


def _explain_places(seen: Seen[object]) -> Finding:
    place = odd_tensors(seen.details, "places")[0]
    column = seen.details["places"][place]
    return Finding("the trees have different leaves", seen.step, minority(column), place, (_digests(place, column),))


def _explain_leaves(seen: Seen[object]) -> Finding:
    looked, odd = seen.details["leaves"], odd_tensors(seen.details, "leaves")
    what = f"{len(odd)} of {len(looked)} leaves differ"
    details = tuple(_digests(name, looked[name]) for name in odd)
    return Finding(what, seen.step, minority(looked[odd[0]]), odd[0], details)


def _digests(name: str, by_rank: Sequence[int]) -> tuple[str, str]:
    return name, " ".join(map(hexadecimal, by_rank))


PLACES: Law[Seen[object]] = Law(
    "trees-agree/places", ("places",), lambda seen: "places" not in seen.differing, _explain_places, stops=True
)
LEAVES: Law[Seen[object]] = Law(
    "trees-agree/leaves", ("leaves",), lambda seen: "leaves" not in seen.differing, _explain_leaves
)
TREE: tuple[Law[Seen[object]], ...] = (PLACES, LEAVES)
"""Every rank's tree has the same leaves, in the same order, with the same bits; explained after a second look."""
