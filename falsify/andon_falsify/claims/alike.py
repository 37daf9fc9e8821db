"""Compares two runs of one loop: the same rows at every update, and the same weights within the rounding of fp32.

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
    """For each update: the largest distance so far of fp32 from float64 weights, relative to how far these moved.

    Both are trained on the rows of `trace`, at its learning rates. Empty if it cannot be measured: if the loop trains
    another model than the case's, or if some rows are unknown, or if no update has rows.
    """
    law, case = LoopLaw(trace), trace.case
    if law.why_not or law.unknown_updates or law.recomputes or not any(map(law.rows, law.updates)):
        return {}
    batches = [law.rows(step) for step in law.updates]
    rates = [law.first.made[step].rate for step in law.updates]
    exact = _exact(law, batches, rates)
    start = {name: tensor for name, tensor in law.before(1).items() if name in exact[0]}
    largest, found = 0.0, {}
    runs = [_rounded(case, batches, rates, size) for size in (case.batch_size, case.local_batch)]
    for place, step in enumerate(law.updates):
        moved = _distance(exact[place], start)
        largest = max([largest, *(_distance(run[place], exact[place]) / moved for run in runs if moved)])
        found[step] = largest
    return found


def _exact(law: LoopLaw, batches: Sequence[tuple[int, ...]], rates: Sequence[float]) -> list[dict[str, Tensor]]:
    case, longest = law.case, max(map(len, law.case.rows.tokens))
    pieces = [piece_of(case.rows, rows, longest) for rows in batches]
    rule = update_rule(case, matrices_only=False)
    return list(train(law.model, law.initial, law.trainable, pieces, rule, rates, case.clip_norm))


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


def alike(claim: Claim, first: Trace, other: Trace, noisy: Trace) -> Verdict:
    """Compare `other` with `first`: the rows of every update, then the weights after every update.

    noisy: the one of the two whose rounding is measured.
    """
    measured: dict[int, float] | None = None
    checked, nearest = 0, 0.0
    mine, theirs = (f"world {each.case.world} accumulation {each.case.accumulation}" for each in (first, other))
    reached = other.first.resumed_from
    pair = f"resumed ({theirs}) against uninterrupted ({mine})" if reached else f"{theirs} against {mine}"
    rows = list(_different_rows(first, other, pair))
    found = [*rows, *_different_optimizers(first, other, pair)]
    for step, distance in () if rows else _distances(first, other):
        checked += 1
        if not distance:
            continue
        measured = noise(noisy) if measured is None else measured
        allowed = max(FLOOR, MARGIN * measured[step]) if step in measured else UNMEASURED
        nearest = max(nearest, distance / allowed)
        if not distance <= allowed:
            what = "the weights differ by more than rounding explains"
            begun = [each.first.of(0, reached + 1).gradient for each in (first, other)]
            if reached and begun[0] == begun[1] != "":
                what += " (likely not restored: the state of the optimizer; the first gradient is the same)"
            basis = f"{MARGIN:g} x the rounding error of fp32" if step in measured else "rounding not measured"
            limit = f"at most {allowed:.2e} of how far training moved them ({basis})"
            found.append(Counterexample(what, f"step {step}, {pair}", limit, f"{distance:.2e}", quantity="weights"))
            break
    basis = f"rounding of fp32 {max(measured.values()):.1e} of the movement" if measured else "rounding not measured"
    note = f"largest difference {nearest:.2g} of what is allowed; {basis}, margin {MARGIN:g}"
    missing = "" if checked else "no update is in both runs with its weights"
    return conclude(claim, checked, found, missing, "" if found else note if nearest else "the same bits")


def _different_rows(first: Trace, other: Trace, pair: str) -> Iterator[Counterexample]:
    ours, theirs = first.seen.trajectory, other.seen.trajectory
    for number, event in ours.items():
        if number in theirs and set(theirs[number].ids) != set(event.ids):
            rows, seen = (" ".join(map(str, sorted(ids, key=str))) for ids in (event.ids, theirs[number].ids))
            yield Counterexample("the rows differ first", f"step {number}, {pair}", rows, seen, quantity="rows")
            break
    wanted, made = (max(each, default=0) for each in (ours, theirs))
    if len(ours) != len(theirs) and wanted != made and first.seen.runs[-1].finished:
        yield Counterexample("a different number of updates", pair, str(wanted), str(made))


def _different_optimizers(first: Trace, other: Trace, pair: str) -> Iterator[Counterexample]:
    names = [{name for name, _, _ in trace.first.layouts[0]} for trace in (first, other)]
    if odd := ", ".join(sorted(names[0] ^ names[1])[:3]):
        seen = f"{len(names[1])} (only one of the runs trains {odd})"
        yield Counterexample("the runs train different tensors", pair, f"{len(names[0])}", seen, quantity="weights")
    mine, theirs = (first_of(trace).made for trace in (first, other))
    for step in sorted(mine.keys() & theirs.keys()):
        if mine[step].rates != theirs[step].rates:
            wanted, seen = (", ".join(f"{rate:.9g}" for rate in made[step].rates) for made in (mine, theirs))
            where = f"step {step}, {pair}"
            yield Counterexample("a different learning rate", where, wanted, seen, quantity="learning rate")
            return


def _distances(first: Trace, other: Trace) -> Iterator[tuple[int, float]]:
    """For each update with weights in both runs: their distance, relative to how far the first run's weights moved."""
    start = first_of(first).state
    for step, values in sorted(first.first.values.items()):
        twin = other.first.values.get(step)
        if twin is None or not values.weights or not twin.weights:
            continue
        mine, theirs = ({n: t.double() for n, t in held.weights.items()} for held in (values, twin))
        if mine.keys() == theirs.keys():
            moved, apart = _distance(mine, {name: start[name].double() for name in mine}), _distance(theirs, mine)
            yield step, apart / moved if moved else float(apart > 0)


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return global_norm({name: one[name] - other[name] for name in other})
