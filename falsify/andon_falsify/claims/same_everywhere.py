"""One result for every number of ranks and every backend: to the bit if that is promised, else within rounding.

Of a script there are only norms and losses. Two layouts of one global batch must make the same updates, but their fp32
sums are rounded differently, and the difference grows. Only equal runs are compared: a script that is not seeded, draws
by rank, or has other rows on other layouts differs for that reason alone, and nothing is proven.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from andon_falsify.claims import replicas_agree, samples_once
from andon_falsify.claims.evidence import Evidence
from andon_falsify.claims.explain import fitting_powers, show_ratio
from andon_falsify.claims.rounding import BLIND, EXACT, PERTURBED, Rounding, measured
from andon_falsify.claims.rounding import apart as first_gradients
from andon_falsify.claims.updates import INPUTS, QUANTITIES, bits, different_numbers, different_rows, unseeded
from andon_falsify.history import FP32_BITS, History, StepEvent
from andon_falsify.verdict import Claim, Counterexample, Outcome, Verdict, conclude, not_applicable, unknown

if TYPE_CHECKING:
    from andon_falsify.subjects.trace import Trace


def _is_not_the_measure(evidence: Evidence) -> str:
    if evidence.of_script:
        return "this is the layout that the others are compared with" if {*evidence.layout.values()} == {1} else ""
    case = evidence.trace.case if evidence.kind == "trainer" and evidence.trace is not None else None
    alone = case is not None and case.world == 1 and case.backend in ("inline", "nccl")
    return "one rank is what the others are compared with" if alone else ""


CLAIM = Claim(
    "same-everywhere",
    1,
    "On another number of workers or another backend, each update has the same rows, loss, gradient, weights and "
    "optimizer state, to the bit.",
    order=40,
    subjects=("trainer", "loop", "script", "ledger"),
    runs=("alone", "again", *PERTURBED),
    needs=(_is_not_the_measure,),
    statements={
        "loop": "On any number of ranks, rows and learning rates are equal. Weights differ by at most 30 times the "
        "measured fp32 rounding, or by no bit if the loop promises equal bits.",
        "script": "On any layout of one global batch, the number of updates, their rows and learning rates are equal. "
        "Losses and norms agree to 0.0001 at update 1, and to 0.0064 up to update 50 (bf16: to the measured noise).",
    },
)
COMPARED = 50
"""Updates whose norms and losses are compared; later ones may differ by what rounding made of earlier differences."""
_SCALED = {"grad_norm", "loss"}
"""Means over a batch, so a wrong mean shows as a product of the layout's numbers."""
_REPORT = "Report the rows of each micro-batch with w.batch(ids): rows that are known to be the same decide more"
_DEAL = (
    "Draw the rows of every global batch from one seed, whatever the number of ranks, and deal them to the ranks "
    "(DistributedSampler; Accelerate: DataLoaderConfiguration(use_seedable_sampler=True))"
)
_DRAWS = (
    "Report the loss with w.loss(loss_sum, count): if it is equal, the ranks' gradients are combined wrongly. Switch "
    "random augmentation of the data off"
)
_COMBINED = "rows and loss are equal: a rank's loss is scaled before its backward pass, or gradients are not averaged"
_SCHEDULED = "a different number of updates: a schedule as long as the run then gives other learning rates"
_GRADIENT = "the reduced gradient differs"
_MERGED = "an update has the rows of two: the last micro-batches of an epoch have no update of their own"
_NOISY = "Train in fp32 or with larger batches while you compare runs"
_NO_DRAWS = "Switch dropout off (p = 0) while you compare runs"


def check(evidence: Evidence) -> Verdict:
    """The run against `others["alone"]`, the same on one rank; a ledger against those that are `elsewhere`.

    If a script differs, `others["again"]` shows whether its run on one rank differs from itself too.
    """
    if evidence.of_script:
        alone = evidence.other("alone").history
        verdict = check_layouts(alone, evidence.history, evidence.layout)
        if verdict.outcome is Outcome.HOLDS:
            return verdict
        if open_ := unseeded(CLAIM, "two runs on one rank", alone, evidence.other("again").history):
            return open_
        draws = any(step.draws for step in alone.steps) and verdict.outcome is Outcome.UNKNOWN
        if alone.bits < FP32_BITS and not draws:  # else the noise of rounding would decide nothing
            noise = measured(alone, [evidence.other(name).history for name in PERTURBED])
            verdict = check_layouts(alone, evidence.history, evidence.layout, noise)
        earlier = (samples_once, samples_once.check_visits), (replicas_agree, replicas_agree.check_history)
        fallen = [each.CLAIM.name for each, law in earlier if law(evidence.history).outcome is Outcome.FALSIFIED]
        if verdict.outcome is Outcome.UNKNOWN and fallen:
            return replace(verdict, remedies=(f"Mend {fallen[0]} first: it is falsified here, and may be the cause",))
        return verdict
    if evidence.of_loop:
        return check_loop(evidence.observed, evidence.other("alone").observed)
    if evidence.trace is not None:
        return check_traces(evidence.other("alone").observed, evidence.trace)
    if not evidence.elsewhere:
        return not_applicable(CLAIM, "only one ledger was given; also give ledgers of the same job on other layouts")
    histories = [evidence.history, *(other.history for other in evidence.elsewhere)]
    if any(each.start is not None and each.start.watched for each in histories):
        why = "a watched loop need not be bit-equal across layouts; andon diff shows where two of its runs first differ"
        return not_applicable(CLAIM, why)
    return compare(histories)


def check_traces(base: Trace, other: Trace) -> Verdict:
    """All bits of every update, if the ranks are on devices of one kind."""
    if base.place and other.place not in ("", base.place):
        why = f"different kinds of devices round differently: {other.place} against {base.place}"
        return not_applicable(CLAIM, why)
    return compare([base.seen, other.seen])


def check_loop(trace: Trace, alone: Trace) -> Verdict:
    """A loop against its run on one rank: the same global batches in other micro-batches.

    To the bit if the loop promises it (`to_the_bit = True`), else within the measured noise if nothing is drawn.
    """
    from andon_falsify.claims.alike import alike
    from andon_falsify.loops.sightings import first_of

    ours, theirs = trace.case, alone.case
    if (ours.world, ours.accumulation) == (theirs.world, theirs.accumulation):
        return unknown(CLAIM, "one number of ranks and one accumulation: there is nothing to compare")
    if ours.global_batch != theirs.global_batch:
        sizes = f"{ours.global_batch} and {theirs.global_batch}"
        return unknown(CLAIM, f"the global batches have {sizes} rows: not comparable")
    if "to_the_bit" in first_of(trace).claims:
        return compare([trace.seen, alone.seen])
    if first_of(trace).draws or first_of(alone).draws:
        return not_applicable(CLAIM, "forward passes draw random numbers, which differ with the number of ranks")
    return alike(CLAIM, alone, trace, noisy=trace)


def compare(histories: Sequence[History]) -> Verdict:
    """Compare every history with the first, update by update, and name the first update that differs.

    Bits of another machine (another fingerprint) are not comparable.
    """
    if len(histories) < 2:
        return unknown(CLAIM, f"{len(histories)} histories, at least two are needed")
    first, *others = histories
    machine, *machines = (each.start.fingerprint if each.start is not None else None for each in histories)
    for other, fingerprint in zip(others, machines, strict=True):
        if fingerprint != machine:
            why = f"not comparable: {other.name} and {first.name} ran on different machines or with different versions"
            return not_applicable(CLAIM, why)
    found: list[Counterexample] = []
    places = [" then ".join(dict.fromkeys(map(_of, history.steps))) for history in histories]
    checked, missing = 0, f"every history ran on {places[0]}" if len({*places}) < 2 else ""
    for other in others:
        compared, difference = _first_difference(first, other)
        checked += compared
        found += [] if difference is None else [difference]
        if not compared:
            missing = missing or f"{other.name} and {first.name} record nothing that can be compared"
    return conclude(CLAIM, checked, found, missing)


def _first_difference(first: History, other: History) -> tuple[int, Counterexample | None]:
    """The comparisons made, and the first difference; later ones follow from it. Equal inputs alone prove nothing."""
    against, checked = f"{other.name} against {first.name}", 0
    mine, theirs = (history.start.initial_weights if history.start else None for history in (first, other))
    if mine is not None and theirs is not None and mine != theirs:
        where = f"before step 1, {against}"
        return 1, Counterexample("the initial weights differ", where, mine, theirs, quantity="weights")
    for number, event in first.trajectory.items():
        twin = other.trajectory.get(number)
        if twin is None:
            continue
        where = f"step {number}, {other.name} ({_of(twin)}) against {first.name} ({_of(event)})"
        if event.ids and twin.ids and event.ids != twin.ids:
            pairs = enumerate(zip_longest(event.ids, twin.ids))
            index, rows = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
            what = f"the rows differ first, at place {index} of the batch"
            return checked + 1, Counterexample(what, where, str(rows[0]), str(rows[1]), quantity="rows")
        held, made = bits(event), bits(twin)
        both = {name: (held[name], made[name]) for name in held if name in made and name != "rows"}
        checked += len(both.keys() - INPUTS)
        differing = [name for name, pair in both.items() if pair[0] != pair[1]]
        if differing:
            equal = [name for name in both if name not in differing]
            what = f"the {differing[0]} differs first" + (f" ({', '.join(equal)} agree)" if equal else "")
            return checked, Counterexample(what, where, *both[differing[0]], quantity=QUANTITIES[differing[0]])
    ended = all(history.runs and history.runs[-1].finished for history in (first, other))
    if not ended or first.trajectory.keys() == other.trajectory.keys():
        return checked, None
    expected, seen = (f"{len(history.trajectory)} updates" for history in (first, other))
    return checked, Counterexample("a different number of updates", against, expected, seen)


def _of(event: StepEvent) -> str:
    return f"world {event.world} {event.backend}"


def check_layouts(base: History, other: History, layout: Mapping[str, int], noise: Rounding = EXACT) -> Verdict:
    """A script's run `other` against `base`, on one rank. layout: the numbers of `other`'s layout by name.

    noise: what rounding does to `base`. Unknown if it hides a wrong factor of `BLIND`, and nothing larger is found.

    Falsified by what other random draws cannot explain, see `_proven`. Unknown, with the remedy, if the two trained on
    other rows, or if other draws may explain a difference.
    """
    ours, theirs = base.trajectory, other.trajectory
    if not ours:
        return unknown(CLAIM, f"{base.name} made no update")
    checked, gradients = 0, first_gradients(base, other)
    for place, number in enumerate(sorted(ours.keys() & theirs.keys())):
        step, twin, where = ours[number], theirs[number], f"step {number}, {other.name}"
        if _merged(ours, twin):
            rows = (f"the rows of step {number}", f"those of steps {number} and {number + 1}")
            return conclude(CLAIM, checked + 1, [Counterexample(_MERGED, where, *rows, quantity="rows")])
        if apart_rows := different_rows(step, twin, where):
            said = f"{where}: the rows differ (expected {apart_rows[0].expected}, seen {apart_rows[0].seen})"
            return unknown(CLAIM, said, checked, _DEAL)
        compared, apart = different_numbers(step, twin, where, number, noise)
        parallel = False
        if not place and gradients is not None:
            factor, rest = gradients
            checked, parallel = checked + 1, rest <= noise.allowed_residual
            if not (parallel and abs(factor - 1) <= noise.allowed_factor) and "grad_norm" not in apart:
                shown = ("1 x the gradient of one rank", f"{factor:.4f} x, the rest {rest:.2%} of its norm")
                ratio = factor if parallel else None
                apart["gradient"] = Counterexample(_GRADIENT, where, *shown, ratio, quantity="gradient")
        if place >= COMPARED:
            compared, apart = bool(step.lr and twin.lr), {name: apart[name] for name in apart if name == "lr"}
        checked += compared + step.same_rows(twin)
        if apart:
            if found := list(apart.values()) if parallel else _proven(apart, step, theirs, layout, noise):
                if "lr" in apart and len(ours) != len(theirs):
                    counts = (f"{len(ours)} updates", f"{len(theirs)} updates")
                    found.insert(0, Counterexample(_SCHEDULED, other.name, *counts))
                return conclude(CLAIM, checked, found)
            draws = next((each.draws for history in (base, other) for each in history.steps if each.draws), "")
            why, remedy = _unproven(apart, step, twin, layout, draws)
            return unknown(CLAIM, why, checked, remedy)
    if len(ours) != len(theirs):
        what, counts = "a different number of updates", (str(len(ours)), str(len(theirs)))
        if not all(step.ids for step in (*ours.values(), *theirs.values())):
            said = f"{other.name}: {what} (expected {counts[0]}, seen {counts[1]}), and the rows are not known"
            return unknown(CLAIM, said, checked, _REPORT)
        return conclude(CLAIM, checked, [Counterexample(what, other.name, *counts)])
    if noise.factor > BLIND:
        why = f"one rounding changes the first gradient by {noise.factor:.1%}, so that smaller mistakes cannot be seen"
        return unknown(CLAIM, why, checked, _NOISY)
    known = any(ours[number].same_rows(theirs[number]) for number in ours.keys() & theirs.keys())
    told = {"rows (w.batch)": known, "losses (w.loss)": ours[min(ours)].loss}
    untold = " and ".join(name for name, value in told.items() if not value)
    notes = [f"not reported, so not compared: {untold}"] if untold else []
    notes += [f"{other.name}: {said}" for said in [noise.note(gradients)] if said]
    if len(ours) > COMPARED:
        notes.append(f"losses and norms are compared in the first {COMPARED} of {len(ours)} updates")
    return conclude(CLAIM, checked, [], note="; ".join(notes))


def check_class(base: History, other: History, numbers: Mapping[str, int], again: Callable[[str], History]) -> Verdict:
    """Two command lines of which their author says that they train alike. again: runs `base` with a probe, or "".

    numbers: as the layout of `check_layouts`. Of unknown rows the author's word is taken, so that any difference
    between runs that draw nothing falsifies it.
    """
    verdict, noise = check_layouts(base, other, numbers), EXACT
    if verdict.outcome is Outcome.HOLDS:
        return verdict
    if open_ := unseeded(CLAIM, f"two runs of {base.name!r}", base, again("")):
        return open_
    draws = any(each.draws for each in (*base.steps, *other.steps))
    if base.bits < FP32_BITS and not draws:
        noise = measured(base, [again(f"{seed}:{base.bits}") for seed in range(1, 1 + len(PERTURBED))])
        verdict = check_layouts(base, other, numbers, noise)
    if verdict.outcome is not Outcome.UNKNOWN or draws or any(each.ids for each in (*base.steps, *other.steps)):
        return verdict
    for number in sorted(base.trajectory.keys() & other.trajectory.keys()):
        pair, where = (base.trajectory[number], other.trajectory[number]), f"step {number}, {other.name}"
        checked, apart = different_numbers(*pair, where, number, noise)
        if apart:
            drawn = all("rows" in each.state for each in pair)
            note = "its data loader drew other rows" if drawn else "the rows of this update are not known"
            return conclude(CLAIM, checked, list(apart.values()), note="" if pair[0].same_rows(pair[1]) else note)
    expected, seen = (f"{len(each.trajectory)} updates" for each in (base, other))
    differs = Counterexample("a different number of updates", other.name, expected, seen)
    return verdict if expected == seen else conclude(CLAIM, 1, [differs])


def _proven(
    apart: Mapping[str, Counterexample],
    step: StepEvent,
    theirs: Mapping[int, StepEvent],
    layout: Mapping[str, int],
    noise: Rounding,
) -> list[Counterexample]:
    """Which of the numbers that are `apart` in `step`, the first such update, are mistakes whatever was drawn.

    With the same gradient all are: other rows, weights or draws would have given another one. For a learning rate
    nothing is drawn. docs/falsify.md lists what else proves a mistake.
    """
    twin = theirs[step.number]
    same_gradient = apart.keys().isdisjoint(("grad_norm", "gradient"))
    if same_gradient and step.grad_norm is not None and twin.grad_norm is not None:
        return list(apart.values())
    if step.same_rows(twin):
        if uneven := _unequal_means(theirs, step.number):
            return [replace(found, what=f"{found.what} ({uneven})") for found in apart.values()]
        if "loss" not in apart and step.loss is not None and twin.loss is not None:
            return [replace(found, what=f"{found.what} ({_COMBINED})") for found in apart.values()]

    def proven(field: str, ratio: float | None) -> bool:
        if field not in _SCALED or ratio is None:
            return field == "lr"
        return bool(fitting_powers([(ratio, layout)], noise.allowed(field, step.number)))

    return [found for field, found in apart.items() if proven(field, found.ratio)]


def _unproven(
    apart: Mapping[str, Counterexample], step: StepEvent, twin: StepEvent, layout: Mapping[str, int], draws: str
) -> tuple[str, str]:
    first = next(iter(apart.values()))
    numbers = " and ".join(f"{name} {value}" for name, value in layout.items() if value > 1)
    ratio = "" if first.ratio is None else f", ratio {show_ratio(first.ratio)}"
    ratio += f", which no product of {numbers} gives" if ratio and numbers else ""
    said = f"{first.where}: {first.what} (expected {first.expected}, seen {first.seen}{ratio})"
    if draws:
        return f"{said}; the forward passes draw random numbers: {draws}", _NO_DRAWS
    if step.same_rows(twin):
        return f"{said}, although the rows are the same", _DRAWS
    drawn = "rows" in step.state and "rows" in twin.state
    return f"{said}; {'its data loader drew other rows' if drawn else 'the rows are not known'}", f"{_DEAL}. {_REPORT}"


def _merged(ours: Mapping[int, StepEvent], twin: StepEvent) -> bool:
    """Whether `twin` has the rows of two of `ours`: of a short one at the end of an epoch, and of the next."""
    step, later = ours[twin.number], ours.get(twin.number + 1)
    if later is None:
        return False
    if step.ids and later.ids and twin.ids:
        return len(step.ids) < len(later.ids) and Counter(step.ids + later.ids) == Counter(twin.ids)
    if any("rows" not in each.state for each in (step, later, twin)):
        return False
    ended, begun = (int(each.state.get("in pass", 0)) for each in (step, later))
    first, second, both = (int(each.state["rows"], 16) for each in (step, later, twin))
    return begun < ended and (first + second - both) % 2**64 == 0  # sums over the indices of rows


def _unequal_means(theirs: Mapping[int, StepEvent], number: int) -> str:
    rows, before = dict[int, int](), 0
    for each, step in theirs.items():
        reached = int(step.state.get("in pass", 0))
        rows[each], before = len(step.ids) or reached - before * (before < reached), reached
    uneven = {each: rows[each] % (step.world or 1) != 0 for each, step in theirs.items() if each <= number}
    if len(uneven) < 2 or not uneven.pop(number) or any(uneven.values()):
        return ""
    ranks = f"{rows[number]} rows on {theirs[number].world} ranks"
    return f"{ranks}, the first batch that does not divide evenly: is a mean of per-rank means used?"
