"""Two runs compared: the same rows at every update, and the same weights but for the noise of fp32.

Of a loop the noise is measured, not guessed: the case's model is trained in one process in fp32, in whole batches and
in micro-batches, and by the reference in float64; how far these part, relative to how far the weights moved, is what
rounding alone does to this case. Runs may part `MARGIN` times as far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from andon_falsify.checkers import same_everywhere
from andon_falsify.claims.laws import LoopLaw, piece_of, short_name, update_rule
from andon_falsify.loops.sightings import first_of
from andon_falsify.loops.task import collate, dataset, model, optimizer
from andon_falsify.reference.training import train
from andon_falsify.reference.update import global_norm
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import Trace
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude, merge, not_applicable, unknown

MARGIN = 30.0
FLOOR = 1e-6
"""Of the movement: less than this is not asked for, however little noise one sample of it shows."""
UNMEASURED = 1e-3
"""Of the movement, where the model is the loop's own and the noise cannot be measured."""


def noise(trace: Trace) -> dict[int, float]:
    """For each update: the largest distance so far of fp32 weights from float64 ones, over the movement of these.

    Both are trained on the rows that `trace` shows, at its learning rates, in this process; an update without rows
    makes none. Empty for a loop over a model of its own, where some rows are not known, and where there are none.
    """
    law = LoopLaw(trace)
    if law.why_not or law.unknown_updates or "recomputes" in law.first.claims:
        return {}
    batches = [law.rows(step) for step in law.updates]
    if not any(batches):
        return {}
    rates = [law.first.made[step].rate for step in law.updates]
    exact = _exact(law, batches, rates)
    start = {name: tensor for name, tensor in law.before(1).items() if name in exact[0]}
    largest, found = 0.0, {}
    runs = [_rounded(trace.case, batches, rates, size) for size in (trace.case.batch_size, trace.case.local_batch)]
    for place, step in enumerate(law.updates):
        moved = _distance(exact[place], start)
        largest = max([largest, *(_distance(run[place], exact[place]) / moved for run in runs if moved)])
        if largest:
            found[step] = largest
    return found


def _exact(law: LoopLaw, batches: Sequence[tuple[int, ...]], rates: Sequence[float]) -> list[Mapping[str, Tensor]]:
    case = law.case
    longest = max(map(len, case.rows.tokens))
    trajectory = train(
        law.model,
        law.initial,
        law.trainable,
        ([piece_of(case.rows, rows, longest)] for rows in batches),
        update_rule(case, matrices_only=False),
        lambda step: rates[step - 1],
        clip_norm=case.clip_norm,
    )
    return [update.weights for update in trajectory]


def _rounded(
    case: Case, batches: Sequence[tuple[int, ...]], rates: Sequence[float], size: int
) -> list[dict[str, Tensor]]:
    trained, rows, found = model(case), dataset(case), []
    stepping = optimizer(case, trained.parameters())
    for ids, rate in zip(batches, rates, strict=True):
        for start in range(0, len(ids), size):
            batch = collate([rows[row] for row in ids[start : start + size]])
            labels = batch.pop("labels")
            loss = cross_entropy(trained(**batch).logits, labels, reduction="sum") / len(ids)
            loss.backward()  # type: ignore[no-untyped-call]
        for group in stepping.param_groups:
            group["lr"] = rate
        if case.clip_norm is not None and ids:
            clip_grad_norm_(trained.parameters(), case.clip_norm)
        stepping.step()
        stepping.zero_grad()
        found.append({short_name(n): p.detach().double() for n, p in trained.named_parameters() if p.requires_grad})
    return found


def alike(claim: Claim, first: Trace, others: Sequence[Trace]) -> Verdict:
    """Each of `others` against `first`: rows of every update, then the weights after it."""
    apart = [(other, list(_rows(first, other)), list(_apart(first, other))) for other in others]
    held = noise(first) if any(distance for _, _, distances in apart for _, distance in distances) else {}
    found: list[Counterexample] = []
    checked, nearest = 0, 0.0
    for other, differing, distances in apart:
        found += [*differing, *_otherwise(first, other)]
        for step, distance in [] if differing else distances:
            allowed = max(FLOOR, MARGIN * held[step]) if step in held else UNMEASURED
            checked += 1
            nearest = max(nearest, distance / allowed)
            if not distance <= allowed:
                what = "the weights part by more than rounding explains"
                where = f"step {step}, {_place(other)} against {_place(first)}"
                limit = f"at most {allowed:.2e} of their movement ({MARGIN:g} x the noise of fp32)"
                found.append(Counterexample(what, where, limit, f"{distance:.2e}"))
                break
    basis = f"noise of fp32 {max(held.values()):.1e} of the movement" if held else "noise not measured"
    note = f"largest difference {nearest:.2g} of what is allowed; {basis}, margin {MARGIN:g}"
    note = note if nearest else "the same bits"
    missing = "" if checked else "no update is in both runs with its weights"
    return conclude(claim, checked, found, missing, "" if found else note)


def _rows(first: Trace, other: Trace) -> Iterator[Counterexample]:
    for number, event in first.seen.trajectory.items():
        twin = other.seen.trajectory.get(number)
        if twin is not None and set(twin.ids) != set(event.ids):
            where = f"step {number}, {_place(other)} against {_place(first)}"
            mine, theirs = (" ".join(map(str, sorted(ids, key=str))) for ids in (event.ids, twin.ids))
            yield Counterexample("the rows differ first", where, mine, theirs)
            break
    if len(first.seen.trajectory) != len(other.seen.trajectory) and first.seen.runs[-1].finished:
        wanted, made = (str(max(trace.seen.trajectory, default=0)) for trace in (first, other))
        if wanted != made:
            yield Counterexample("another number of updates", f"{_place(other)} against {_place(first)}", wanted, made)


def _otherwise(first: Trace, other: Trace) -> Iterator[Counterexample]:
    """Other tensors that train, and the first update at another rate: what makes weights part."""
    names = [{name for name, _, _ in trace.first.layouts[0]} for trace in (first, other)]
    if names[0] != names[1]:
        odd = ", ".join(sorted(names[0] ^ names[1])[:3])
        where = f"{_place(other)} against {_place(first)}"
        yield Counterexample(
            "other tensors train", where, f"{len(names[0])}", f"{len(names[1])} (without or with {odd})"
        )
    mine, theirs = (first_of(trace).made for trace in (first, other))
    for step in sorted(mine.keys() & theirs.keys()):
        if mine[step].rates != theirs[step].rates:
            where = f"step {step}, {_place(other)} against {_place(first)}"
            wanted, seen = (", ".join(f"{rate:.9g}" for rate in made[step].rates) for made in (mine, theirs))
            yield Counterexample("another learning rate", where, wanted, seen)
            return


def _apart(first: Trace, other: Trace) -> Iterator[tuple[int, float]]:
    """For each update that both kept: the distance of the weights, over the movement of the first run's."""
    start = first_of(first).state
    for step, values in sorted(first.first.values.items()):
        twin = other.first.values.get(step)
        if twin is None or not values.weights or not twin.weights:
            continue
        mine, theirs = ({n: t.double() for n, t in held.weights.items()} for held in (values, twin))
        moved = _distance(mine, {name: start[name].double() for name in mine})
        if mine.keys() == theirs.keys():
            yield step, _distance(theirs, mine) / moved if moved else float(_distance(theirs, mine) > 0)


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return global_norm({name: one[name] - other[name] for name in other})


def _place(trace: Trace) -> str:
    return f"world {trace.case.world} accumulation {trace.case.accumulation}"


def across(traces: Sequence[Trace]) -> Verdict:
    """The same global batches on other numbers of ranks and micro-batches: the first trace against each other one.

    To the bit where the loop says so (`to_the_bit = True`), else within the measured noise where nothing is drawn.
    """
    claim = same_everywhere.CLAIM
    if len(traces) < 2 or len({(trace.case.world, trace.case.accumulation) for trace in traces}) < 2:
        return unknown(claim, "one number of ranks and one accumulation: there is nothing to compare")
    sizes = {trace.case.global_batch for trace in traces}
    if len(sizes) > 1:
        return unknown(claim, f"the global batches have {' and '.join(map(str, sorted(sizes)))} rows: not comparable")
    if any(first_of(trace).draws for trace in traces) and "to_the_bit" not in first_of(traces[0]).claims:
        return not_applicable(claim, "forward passes draw random numbers: other ones on another number of ranks")
    if "to_the_bit" in first_of(traces[0]).claims:
        return same_everywhere.check([trace.seen for trace in traces])
    return alike(claim, traces[0], traces[1:])


def taken_up_alike(claim: Claim, whole: Trace, taken_up: Trace) -> Verdict:
    """A run of a loop that was taken up against the whole one: its updates, and its weights within the noise."""
    return merge([alike(claim, whole, [taken_up]), _gap(claim, whole, taken_up)])


def _gap(claim: Claim, whole: Trace, taken_up: Trace) -> Verdict:
    """The resumed run begins with the update after the one that was saved, and ends with the last."""
    wanted = [step for step in whole.seen.trajectory if step > taken_up.first.resumed_from]
    made = list(taken_up.seen.trajectory)
    apart = [Counterexample("other updates than those that were left", "", f"{wanted}", f"{made}")]
    return conclude(claim, len(wanted), [] if made == wanted else apart)
