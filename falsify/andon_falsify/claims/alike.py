"""Two runs of one loop compared: the same rows at every update, and the same weights within the rounding of fp32.

The rounding is measured: the case's model is trained in one process in fp32, in whole batches and in micro-batches, and
by the reference in float64. The distance between these, relative to how far the weights moved, is what rounding alone
does to this case. Two runs may differ `MARGIN` times as much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from andon_falsify.claims.laws import LoopLaw, piece_of, short_name, update_rule
from andon_falsify.loops.sightings import first_of
from andon_falsify.loops.task import collate, dataset, model, optimizer
from andon_falsify.reference.training import train
from andon_falsify.reference.update import global_norm
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import Trace
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude

MARGIN = 30.0
FLOOR = 1e-6
"""Of the movement: always allowed, since one sample of the noise may be smaller than the noise."""
UNMEASURED = 1e-3
"""Of the movement: allowed if the model is the loop's own, so that the noise cannot be measured."""


def noise(trace: Trace) -> dict[int, float]:
    """For each update: the largest distance so far of fp32 weights from float64 ones, over the movement of these.

    Both are trained on the rows of `trace`, at its learning rates. Empty if it cannot be measured: if the loop trains
    another model than the case's, or if some rows are unknown, or if no update has rows.
    """
    law = LoopLaw(trace)
    if law.why_not or law.unknown_updates or law.recomputes:
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
        found[step] = largest
    return found


def _exact(law: LoopLaw, batches: Sequence[tuple[int, ...]], rates: Sequence[float]) -> list[dict[str, Tensor]]:
    case = law.case
    longest = max(map(len, case.rows.tokens))
    pieces = [piece_of(case.rows, rows, longest) for rows in batches]
    rule = update_rule(case, matrices_only=False)
    return list(train(law.model, law.initial, law.trainable, pieces, rule, rates, case.clip_norm))


def _rounded(
    case: Case, batches: Sequence[tuple[int, ...]], rates: Sequence[float], size: int
) -> list[dict[str, Tensor]]:
    """The fp32 weights after each update, trained in micro-batches of `size` rows."""
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
    apart = [(other, list(_different_rows(first, other)), list(_distances(first, other))) for other in others]
    measured = noise(first) if any(distance for _, _, distances in apart for _, distance in distances) else {}
    found: list[Counterexample] = []
    checked, nearest = 0, 0.0
    for other, rows, distances in apart:
        found += [*rows, *_different_optimizers(first, other)]
        for step, distance in [] if rows else distances:
            allowed = max(FLOOR, MARGIN * measured[step]) if step in measured else UNMEASURED
            checked += 1
            nearest = max(nearest, distance / allowed)
            if not distance <= allowed:
                what = "the weights part by more than rounding explains"
                limit = f"at most {allowed:.2e} of their movement ({MARGIN:g} x the noise of fp32)"
                where = f"step {step}, {_pair(first, other)}"
                found.append(Counterexample(what, where, limit, f"{distance:.2e}", quantity="weights"))
                break
    basis = f"noise of fp32 {max(measured.values()):.1e} of the movement" if measured else "noise not measured"
    note = f"largest difference {nearest:.2g} of what is allowed; {basis}, margin {MARGIN:g}"
    note = note if nearest else "the same bits"
    missing = "" if checked else "no update is in both runs with its weights"
    return conclude(claim, checked, found, missing, "" if found else note)


def _different_rows(first: Trace, other: Trace) -> Iterator[Counterexample]:
    """The first update with other rows, and another number of updates."""
    for number, event in first.seen.trajectory.items():
        twin = other.seen.trajectory.get(number)
        if twin is not None and set(twin.ids) != set(event.ids):
            mine, theirs = (" ".join(map(str, sorted(ids, key=str))) for ids in (event.ids, twin.ids))
            where = f"step {number}, {_pair(first, other)}"
            yield Counterexample("the rows differ first", where, mine, theirs, quantity="rows")
            break
    if len(first.seen.trajectory) != len(other.seen.trajectory) and first.seen.runs[-1].finished:
        wanted, made = (str(max(trace.seen.trajectory, default=0)) for trace in (first, other))
        if wanted != made:
            yield Counterexample("another number of updates", _pair(first, other), wanted, made)


def _different_optimizers(first: Trace, other: Trace) -> Iterator[Counterexample]:
    """Other tensors that train, and the first update at another rate: either makes weights differ."""
    names = [{name for name, _, _ in trace.first.layouts[0]} for trace in (first, other)]
    if odd := ", ".join(sorted(names[0] ^ names[1])[:3]):
        seen = f"{len(names[1])} (without or with {odd})"
        yield Counterexample("other tensors train", _pair(first, other), f"{len(names[0])}", seen, quantity="weights")
    mine, theirs = (first_of(trace).made for trace in (first, other))
    for step in sorted(mine.keys() & theirs.keys()):
        if mine[step].rates != theirs[step].rates:
            wanted, seen = (", ".join(f"{rate:.9g}" for rate in made[step].rates) for made in (mine, theirs))
            where = f"step {step}, {_pair(first, other)}"
            yield Counterexample("another learning rate", where, wanted, seen, quantity="learning rate")
            return


def _distances(first: Trace, other: Trace) -> Iterator[tuple[int, float]]:
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


def _pair(first: Trace, other: Trace) -> str:
    mine, theirs = (f"world {each.case.world} accumulation {each.case.accumulation}" for each in (first, other))
    return f"{theirs} against {mine}"
