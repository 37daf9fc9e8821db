"""The laws of one update, at the points of a step, and of checkpoints, evaluations and peaks of memory.

The trainer and the watch share the laws that mean the same for both. The trainer's ranks have one plan and one
gradient, so the majority of the ranks is right. A watched loop may have no such plan: its checks have other laws.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from andon_contracts.agree import majority, real_of
from andon_contracts.digest import hex64
from andon_contracts.laws.law import LOCKSTEP, Law, Rule, Seen, agreeing, difference, unless_all
from andon_contracts.violation import Finding


def _start(seen: Seen[object]) -> Finding | None:
    names = [name for name in seen.observations[0].values if name in seen.differing]
    return difference(seen, names[0], f"the ranks start from different {', '.join(names)}") if names else None


START: tuple[Law[Seen[object]], ...] = (
    LOCKSTEP,
    agreeing("layout-equal/start", ("layout",), "the trainable tensors differ in name, shape, dtype or order"),
    Law("start-agrees/start", (), _start),
)


@dataclass(frozen=True)
class LeafReport:
    """One rank's report of one micro-batch. content: the digest of the rows as the model received them.

    terms: how many terms its loss sums. nonfinite: its gradient has a NaN or Inf. gradient: the word sum of the
    gradient as computed, 0 if no audit is due.
    """

    rank: int
    index: int
    rows: int
    loss_sum: float
    correct: int
    terms: int
    nonfinite: bool
    content: int
    gradient: int = 0


@dataclass(frozen=True)
class LeafPlan:
    """What one micro-batch must be. The gradient is divided by the `terms` of the loss sums."""

    index: int
    rank: int
    ids: tuple[int, ...]
    content: int
    terms: int


@dataclass(frozen=True)
class Leaves:
    """The reports of all ranks on the micro-batches of an update, ordered by rank and micro-batch, and their plan."""

    reports: Sequence[LeafReport]
    plan: Sequence[LeafPlan]
    step: int


def _partition(seen: Leaves) -> Finding | None:
    used = [(report.rank, report.index, report.rows) for report in seen.reports]
    wanted = [(leaf.rank, leaf.index, len(leaf.ids)) for leaf in seen.plan]
    if used == wanted:
        return None
    ranks = sorted({rank for rank, _, _ in wanted + used})
    odd = tuple(rank for rank in ranks if [u for u in used if u[0] == rank] != [w for w in wanted if w[0] == rank])
    return Finding(f"the planned micro-batches (rank, index, rows) are {wanted}, computed were {used}", seen.step, odd)


def _ranks_of(reports: Iterable[LeafReport]) -> tuple[int, ...]:
    return tuple(sorted({report.rank for report in reports}))


def _content(seen: Leaves) -> Finding | None:
    odd = [(r, leaf) for r, leaf in zip(seen.reports, seen.plan, strict=True) if r.content != leaf.content]
    if not odd:
        return None
    name, rows = f"micro-batch {odd[0][1].index}", list(odd[0][1].ids[:8])
    what = f"the model's inputs are not those of the planned rows (first in {name}, planned with rows {rows})"
    return Finding(what, seen.step, _ranks_of(report for report, _ in odd), name)


def _terms(seen: Leaves) -> Finding | None:
    odd = [(r, leaf) for r, leaf in zip(seen.reports, seen.plan, strict=True) if r.terms != leaf.terms]
    if not odd:
        return None
    first, leaf = odd[0]
    name = f"loss of micro-batch {leaf.index}"
    what = f"the {name} sums {first.terms} terms, but its rows have {leaf.terms}"
    return Finding(what, seen.step, _ranks_of(report for report, _ in odd), name)


def _leaves_finite(seen: Leaves) -> Finding | None:
    odd = [report for report in seen.reports if report.nonfinite or not math.isfinite(report.loss_sum)]
    if not odd:
        return None
    first = odd[0]
    name = f"{'gradient' if math.isfinite(first.loss_sum) else 'loss'} of micro-batch {first.index}"
    ids = next(leaf.ids for leaf in seen.plan if leaf.index == first.index)
    what = f"the {name} is not finite (loss {first.loss_sum}); its row ids are {list(ids)}"
    return Finding(what, seen.step, _ranks_of(odd), name)


_SUMS = ("loss_bits", "total_bits")
# fmt: off
LEAVES: tuple[Law[Leaves], ...] = (
    Law("samples-once/computed", ("index", "rows"), _partition,
        lambda leaf: {"index": leaf.index, "rows": len(leaf.ids)}, stops=True),
    Law("content-planned/computed", ("content",), _content, lambda leaf: {"content": leaf.content}),
    Law("content-planned/terms", ("terms",), _terms, lambda leaf: {"terms": leaf.terms}),
    Law("finite/computed", _SUMS, _leaves_finite, lambda _: dict.fromkeys(_SUMS, Rule.FINITE)),
)
# fmt: on
"""Before the reduction: the owner of each micro-batch computed it once, in order. Device rules are for one report."""

_OTHER_ROWS = "the ranks planned different rows, or the same rows have different contents"
PLANNED = (agreeing("content-planned/planned", ("plan",), _OTHER_ROWS, device=True),)

NORM_TOLERANCE = 2.0**-19
"""The largest relative difference that rounding can cause between the norm after clipping and the expected norm.

In units of 2^-24: `observe.flat_norm` is off by at most 8.5, before and after clipping. Torch's clip rounds the limit,
norm + 1e-6, its reciprocal, the factor and each product, by 1 each. Together that is 22; 32 are allowed.
"""
FACTOR_STEP = 2.0**-149
"""The spacing of the smallest fp32 numbers, by which a clip factor is off. The clipped norm is off by norm * this."""
NORM_FLOOR = 1e-30  # the absolute error that a norm may have: two norms near zero count as equal


@dataclass(frozen=True)
class Reduced:
    """What is required before an update.

    weights: the digest that the last update left; `Rule.SAME` if it is not known, so that ranks are only compared with
    each other; `Rule.PREVIOUS` if only the device knows it yet. limit: of the clipping; None: no clipping.
    norm_tolerance: the relative error that a norm may have.
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


def _ranks_with_other(seen: Seen[object], name: str, value: int) -> tuple[int, ...]:
    return tuple(each.rank for each in seen.observations if each.values[name] != value)


RATE = Law("learning-rate-planned/reduced", ("rate", "planned"), _rate, lambda _: {"rate": Rule.MAJORITY})


def _weights_unchanged(seen: Seen[Reduced]) -> Finding | None:
    digest = seen.want.weights
    if digest is Rule.SAME:
        same = "weights" not in seen.differing
        return None if same else difference(seen, "weights", "the weights before the update are not the same")
    odd = _ranks_with_other(seen, "weights", digest)
    what = f"the weights are not those that the last update left (digest {hex64(digest)})"
    tensor = (*seen.differing_tensors("weights"), "weights")[0]
    return Finding(f"{what}; something outside the step changed them", seen.step, odd, tensor) if odd else None


def _optimizer_unchanged(seen: Seen[int]) -> Finding | None:
    odd = _ranks_with_other(seen, "optimizer", seen.want)
    what = f"the optimizer state is not what the last update left (digest {hex64(seen.want)})"
    return Finding(f"{what}; something outside the step changed it", seen.step, odd, "optimizer") if odd else None


_BEFORE = "replicas-agree/reduced"
WEIGHTS_UNCHANGED = Law(_BEFORE, ("weights",), _weights_unchanged, lambda w: {"weights": w.weights}, ("weights",))
OPTIMIZER_UNCHANGED = Law("optimizers-agree/reduced", ("optimizer",), _optimizer_unchanged)
"""Used by a single rank only. Several ranks compare their states after the update, and find a lost one then."""
_OTHER_GRADIENTS = "the reduced gradients are not the same"
GRADIENTS_AGREE = agreeing("gradients-agree/reduced", ("gradient",), _OTHER_GRADIENTS, device=True, by_tensor=True)
"""The trainer reads the gradient before clipping. A watch has another law, as it reads the gradient after clipping."""
CALLER_GRADIENT = "given"  # the point of an update with a caller's gradient, whose parts were not checked before


def _finite(seen: Seen[object]) -> Finding | None:
    odd = [o.rank for o in seen.observations if o.values["nonfinite"] or not math.isfinite(real_of(o.values["norm"]))]
    if not odd:
        return None
    first = seen.observations[0]
    every_part = ", although the gradient of every micro-batch was" * (first.point != CALLER_GRADIENT)
    what = f"the reduced gradient or its norm ({real_of(first.values['norm'])}) is not finite{every_part}"
    return Finding(what, seen.step, seen.unless_all(odd), "reduced gradient")


FINITE = Law("finite/reduced", ("nonfinite", "norm"), _finite, lambda _: {"nonfinite": 0, "norm": Rule.FINITE})


def clipped_norm(norm: float, limit: float | None) -> float:
    """The norm after one clipping of `norm` to `limit` (None: no clipping)."""
    # As torch.nn.utils.clip_grad_norm_, whose 1e-6 matters if the limit is small.
    return norm if limit is None else norm * min(1.0, limit / (norm + 1e-6))


def is_clipped_once(clipped: float, norm: float, want: Reduced) -> bool:
    """Whether one clipping of a gradient of norm `norm` leaves the norm `clipped`, up to the tolerance."""
    expected = clipped_norm(norm, want.limit)
    return abs(clipped - expected) <= want.norm_tolerance * expected + FACTOR_STEP * norm + NORM_FLOOR


def _clip(seen: Seen[Reduced]) -> Finding | None:
    norm = real_of(majority(seen.column("norm")))
    odd = [each for each in seen.observations if not is_clipped_once(real_of(each.values["clipped"]), norm, seen.want)]
    if not odd:
        return None
    norms = [(each.rank, real_of(each.values["clipped"]), real_of(each.values["norm"])) for each in odd]
    shown = ", ".join(f"rank {rank}: {clipped!r}, before clipping {before!r}" for rank, clipped, before in norms)
    what = f"one clip to {seen.want.limit} does not give the norm after clipping ({shown})"
    return Finding(what, seen.step, tuple(each.rank for each in odd), "clipped gradient")


CLIP = Law("clip-once/reduced", ("norm", "clipped"), _clip, lambda _: {"clipped": Rule.CLIPPED})

REDUCED: tuple[Law[Seen[Reduced]], ...] = (LOCKSTEP, RATE, WEIGHTS_UNCHANGED, GRADIENTS_AGREE, FINITE, CLIP)


def _one_update(seen: Seen[int]) -> Finding | None:
    odd = _ranks_with_other(seen, "updates", seen.want)
    if not odd:
        return None
    shown = ", ".join(f"rank {o.rank}: {o.values['updates']}" for o in seen.observations)
    return Finding(f"{seen.want} updates were planned; made were: {shown}", seen.step, odd, "count of updates")


ONE_UPDATE = Law("one-update/updated", ("updates",), _one_update, lambda updates: {"updates": updates})
_STATES = "the optimizer states are not the same"
_OTHER_WEIGHTS = "the trainable weights are not the same on every rank"
OPTIMIZERS = agreeing("optimizers-agree/updated", ("updates", "optimizer"), _STATES, device=True, by_tensor=True)
REPLICAS = agreeing("replicas-agree/updated", ("weights",), _OTHER_WEIGHTS, device=True, by_tensor=True)

BASE_POINT = "base"  # the point at which the trainer reads frozen weights and buffers (the watch: only weights)


def frozen_tensor(seen: Seen[object], otherwise: str) -> str:
    """The name of the frozen tensor that changed, if a rank sent it or the details show it; else `otherwise`."""
    at = next((at for each in seen.observations if (at := each.values.get("base at", 0))), 0)
    return seen.names[at - 1] if at else (*seen.differing_tensors("base"), otherwise)[0]


def _frozen(seen: Seen[object]) -> Finding | None:
    odd = tuple(each.rank for each in seen.observations if each.values["base"] != each.values["first base"])
    if not odd:
        return None
    point = seen.observations[0].point
    what, name = ("weight or buffer", "base") if point == BASE_POINT else ("weight", "frozen weights")
    again = ", as reading it again at the close showed" * (point == "close")
    return Finding(f"a frozen {what} changed{again}", seen.step, odd, frozen_tensor(seen, name))


FROZEN = Law("base-frozen/base", ("base", "first base"), _frozen)


def _audited(seen: Seen[object]) -> Finding | None:
    odd = [each for each in seen.observations if each.values["leaves"] or each.values["sums"]]
    if not odd:
        return None
    first = odd[0]
    pairs = [{each.rank, each.values["subject"]} for each in odd]
    # The culprit is the rank in every pair that disagrees. A single pair does not tell which of the two it is.
    culprits = set.intersection(*pairs) or set.union(*pairs)
    subject, auditor = first.values["subject"], first.rank
    if first.values["leaves"]:
        what, part = f"gradient of micro-batch {first.values['leaf']}", "leaf"
    else:
        what, part = f"partial sum from micro-batch {first.values['root']} on", "root"
    then, now = (hex64(first.values[f"{part} {when}"]) for when in ("then", "now"))
    by = "recomputed there" if subject == auditor else f"recomputed on rank {auditor}"
    unsure = "; either of the two ranks may be wrong" * (len(culprits) > 1)
    shown = f"the {what} has digest {then} on rank {subject}, but {now} if {by}{unsure}"
    details = tuple((f"rank {each.values['subject']}", f"audited by rank {each.rank}") for each in odd)
    return Finding(shown, first.step, tuple(sorted(culprits)), what, details)


AUDITED: tuple[Law[Seen[object]], ...] = (LOCKSTEP, Law("audit/audited", ("leaves", "sums"), _audited))


RESTORED = (Law[Finding | None]("checkpoint-whole/restored", (), lambda found: found),)


def not_restored(
    saved: Mapping[str, int], current: Mapping[str, Sequence[int]], step: int, texts: Mapping[str, tuple[str, str]]
) -> Finding | None:
    """How the `current` digests of each rank, in memory or on the disk, differ from the `saved` ones, by name.

    texts: the saved and the current value in words, for those that are short.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    found |= {name: ("was saved but is missing now", ()) for name in saved if name not in current}
    found |= {name: ("exists now but was not saved", ()) for name in current if name not in saved}
    for name in (each for each in saved if each in current):
        odd = [rank for rank, digest in enumerate(current[name]) if digest != saved[name]]
        if odd:
            now = ", ".join(dict.fromkeys(hex64(current[name][rank]) for rank in odd))
            what = f"differs from the saved value (digest {hex64(saved[name])}, now {now})"
            if name in texts:
                what = f"is {texts[name][1]}, but was saved as {texts[name][0]}"
            found[name] = what, unless_all(odd, len(current[name]))
    kinds: dict[tuple[str, bool], list[str]] = {}  # the first of each kind is shown, and the others are counted
    for name, (what, _) in found.items():
        kinds.setdefault((name.partition(" ")[0], name in current), []).append(f"{name} {what}")
    shown = "; ".join(each[0] + f" (and {len(each) - 1} more)" * (len(each) > 1) for each in kinds.values())
    return next((Finding(shown, step, ranks, name) for name, (_, ranks) in found.items()), None)


@dataclass(frozen=True)
class Evaluation:
    """One evaluation: the ids of all ranks, how many rows there are (None: unknown), metrics reported and recomputed.

    reported: by metric and rank; None if a rank reports nothing. repeated: the same weights gave the same predictions
    for the same rows before. training: by rank, the batch norm that was in training mode in the last forward pass; "":
    none was. planned: the order of the rows of all ranks, end to end; None: any order.
    """

    step: int
    ids: tuple[tuple[int, ...], ...]
    rows: int | None
    reported: Mapping[str, Sequence[float | None]]
    counted: Mapping[str, float]
    repeated: bool = True
    training: tuple[str, ...] = ()
    planned: tuple[int, ...] | None = None


def _evaluated(seen: Evaluation) -> Finding | None:
    wrong = [
        (name, rank, value)
        for name, by_rank in seen.reported.items()
        for rank, value in enumerate(by_rank)
        if value is not None and not math.isclose(value, seen.counted[name], rel_tol=1e-6, abs_tol=1e-9)
    ]
    training = [(rank, name) for rank, name in enumerate(seen.training) if name]
    # If every rank evaluated the same rows by itself, those of one rank count.
    parts = seen.ids[:1] if len(set(seen.ids)) == 1 else seen.ids
    counts = Counter(row for part in parts for row in part)
    twice = [row for row, count in counts.items() if count > 1]
    if twice:
        what = f"rows {twice[:8]} were counted more than once"
    elif seen.rows is not None and len(counts) != seen.rows:
        what = f"the evaluation counted {len(counts)} of {seen.rows} rows"
    elif seen.planned is not None and tuple(row for part in seen.ids for row in part) != seen.planned:
        what = f"the evaluation counted {len(counts)} rows, but not the planned rows in the planned order"
    elif wrong:
        name, rank, value = wrong[0]
        what = f"rank {rank} reports {name} as {value!r}, but the rows give {seen.counted[name]!r}"
    elif training:
        module = training[0][1]
        what = f"batch norm {module} was in training mode: its output for a row depends on the other rows"
    elif not seen.repeated:
        what = "the same weights gave different predictions for the same rows earlier"
    else:
        return None
    ranks = [rank for _, rank, _ in wrong] or [rank for rank, _ in training]
    return Finding(what, seen.step, unless_all(ranks, len(seen.ids)), "evaluation")


EVALUATED: tuple[Law[Evaluation], ...] = (Law("evaluation-once/told", (), _evaluated),)


@dataclass(frozen=True)
class Output:
    """A forward pass of `rows` rows without an update. odd: the rows whose output `name` is not finite."""

    name: str
    rows: int
    odd: tuple[int, ...]
    step: int = 0


def _output(seen: Output) -> Finding | None:
    if not seen.odd:
        return None
    of_many = f" for {len(seen.odd)} of {seen.rows} rows, first for row {seen.odd[0]}" if seen.rows > 1 else ""
    return Finding(f"the model's {seen.name} is not finite{of_many}", seen.step, (), seen.name)


OUTPUT: tuple[Law[Output], ...] = (Law("finite/output", (), _output),)
"""NaN or Inf is neither scored nor handed out: as a prediction it would count as some class."""


def _counted(seen: tuple[int, int, bool]) -> Finding | None:
    made, planned, over = seen
    if made == planned if over else made < planned:
        return None
    step = made if over else made + 1
    what = f"the run ended after {step} updates" if over else f"update {step} is about to be made"
    return Finding(f"{what}, but {planned} were planned", step, (), "count of updates")


COUNTED: tuple[Law[tuple[int, int, bool]], ...] = (Law("updates-planned/counted", (), _counted),)
"""The updates so far, those planned, and whether the run is over, or about to make another."""


@dataclass(frozen=True)
class Peaks:
    """By rank, the most bytes that its GPU held at once, and how many were planned for any rank."""

    peaks: Sequence[int]
    planned: int
    step: int


def _peaks(seen: Peaks) -> Finding | None:
    over = tuple(rank for rank, peak in enumerate(seen.peaks) if peak > seen.planned * 1.1)
    what = f"the peak of GPU memory was {max(seen.peaks)} bytes, above the {seen.planned} planned + 10 %"
    return Finding(what, seen.step, over) if over else None


BUDGET: tuple[Law[Peaks], ...] = (Law("memory-budget/peaks", (), _peaks, suspicion=True),)
"""A suspicion, because a plan that is off makes no result wrong."""
