"""The update: one step of the optimizer from the weights before it, clipped once, at its rate; no other change."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from andon_falsify.checkers import schedule
from andon_falsify.checkers.ratio import explain_ratio
from andon_falsify.claims.evidence import Evidence
from andon_falsify.claims.loop_law import LoopLaw, decouples
from andon_falsify.claims.run_law import RunLaw
from andon_falsify.claims.statements import BASE, UPDATE
from andon_falsify.loops.parameters import trained
from andon_falsify.loops.sightings import LoopSightings, Made, first_of
from andon_falsify.reference.update import State, clip, global_norm, is_clipped
from andon_falsify.subjects.trace import Trace
from andon_falsify.verdict import Counterexample, Verdict, conclude, first_of_many, merge, not_applicable

Otherwise = tuple[str, str, str]
"""What is set otherwise, as what, and to what."""

_OF_ADAM: Mapping[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
"""What torch's Adam and AdamW have where nothing is said."""
_DECLARED = "the loop declares"
_EXEMPT = re.compile("norm|bias|embed", re.IGNORECASE)
"""In the names of tensors that loops usually exempt from decay, besides all of fewer than two dimensions."""


def update(evidence: Evidence) -> Verdict:
    """Rank 0's weights after every update against one optimizer step with his own reduced gradient.

    The distance may be the noise of the step itself and two roundings of the weights. Of a loop, what its groups are
    set to is held against the case as well; between updates weights may not change, and every tensor that trains is in
    the optimizer.
    """
    law = evidence.law
    loop = law if isinstance(law, LoopLaw) else None
    found, checked = list(_without_optimizer(loop)) if loop else [], 0
    states: dict[tuple[str, ...], State] = {}
    for step in [step for step, values in sorted(law.trace.first.values.items()) if values.weights]:
        where = f"step {step}"
        if loop is not None:
            found += [Counterexample(text, where, planned, held) for text, planned, held in _settings(loop, step)]
            found += [*_between(loop, step), *_clipped_by(loop, step, evidence.noise.norm)]
        before, after = law.before(step), law.after(step)
        wanted = _stepped(law, step, before, states)
        for name, tensor in after.items():
            checked += 1
            target = wanted.get(name, before[name])
            moved, off = float((target - before[name]).norm()), float((tensor - target).norm())
            if not off <= evidence.noise.update * moved + 2.0**-23 * float(target.norm()) + 1e-12:
                what = f"{name} is not where one step of {law.optimizer(step)} leads"
                ends = f"a step that ends {off:.3g} away"
                found.append(Counterexample(what, where, f"a step of length {moved:.3g}", ends))
    return conclude(UPDATE, checked, found)


def _stepped(
    law: RunLaw, step: int, before: Mapping[str, Tensor], states: dict[tuple[str, ...], State]
) -> dict[str, Tensor]:
    """The trained weights after one step, group by group; `states` is taken on."""
    gradients = clip(dict(law.given(step)), law.limit(step))[0]
    found: dict[str, Tensor] = {}
    for group in law.groups(step):
        weights = {name: before[name] for name in group.names}
        own = {name: gradients[name] for name in group.names if name in gradients}
        stepped, states[group.names] = group.rule.step(weights, own, states.get(group.names, State()), group.rate)
        found |= stepped
    return found


def _few(names: set[str]) -> str:
    return first_of_many(sorted(names), 3)


def _without_optimizer(law: LoopLaw) -> Iterator[Counterexample]:
    """What trains, and is in no group of the optimizer at any update."""
    held = {name for made in law.first.made.values() for group in made.groups for name in group.names}
    lost = law.made_trainable - held
    if lost and held:
        what = f"{len(lost)} tensors that train are in no group of the optimizer"
        yield Counterexample(what, "at every update", "every tensor that trains", f"without {_few(lost)}")


def _between(law: LoopLaw, step: int) -> Iterator[Counterexample]:
    """Rank 0's weights that are not those behind the update before, from which `step` starts."""
    moved, held = law.first.moved.get(step, {}), law.first.values.get(step - 1)
    if held is not None and held.weights:
        names = [name for name, tensor in moved.items() if not torch.equal(tensor, held.weights[name])]
        if names:
            where = f"between steps {step - 1} and {step}"
            what = f"{len(names)} tensors changed behind the optimizer's step"
            yield Counterexample(what, where, "the weights that the update left", ", ".join(names[:3]))


def _clipped_by(law: LoopLaw, step: int, noise: float) -> Iterator[Counterexample]:
    if law.first.made[step].early:
        yield from _clipped_early(law, step)
        return
    given, norm = law.first.made[step].norm, global_norm(law.first.values[step].gradients)
    if given is not None and norm and not abs(given - norm) <= noise * norm:
        what, ratio = "clipped by another norm than the gradient's", given / norm
        equals = explain_ratio(ratio, {"world": law.case.world, "accumulation": law.case.accumulation})
        yield Counterexample(what, f"step {step}", f"{norm:.6g}", f"{given:.6g}", ratio, equals)


def _clipped_early(law: LoopLaw, step: int) -> Iterator[Counterexample]:
    """Torch's clip had another gradient than the optimizer, and either was to be clipped."""
    limit, norm = law.case.clip_norm, global_norm(law.first.values[step].gradients)
    given = law.first.made[step].norm
    if limit is not None and is_clipped(max(norm, given or math.inf), limit):
        what = "clipped before the gradient was whole (reduced, or all of it accumulated)"
        held = f"{norm:.6g}, where the clip had one of norm {'unknown' if given is None else f'{given:.6g}'}"
        yield Counterexample(what, f"step {step}", f"a gradient of norm <= {limit:g}, clipped as it is", held)


def _settings(law: LoopLaw, step: int) -> Iterator[Otherwise]:
    """What the optimizer of update `step` has otherwise than the case, or the loop, says.

    A case says the kind, momentum and weight decay, and means torch's defaults by the rest; `Tunes` and `Decays` are
    how a loop says otherwise.
    """
    case, made, tuned = law.case, law.first.made[step], law.first.tuned.get(step, {})
    kind = {"adamw": "AdamW", "sgd": "SGD"}[case.optimizer]
    coupled = any(group.settings.get("weight_decay") and not decouples(made.optimizer, group) for group in made.groups)
    if made.optimizer != kind and not (made.optimizer == "Adam" and kind == "AdamW" and not coupled):
        yield "another optimizer than the case's", kind, made.optimizer
    yield from _declared_decays(made, law) if law.first.decays else _decays(made, law)
    said = dict.fromkeys(_OF_ADAM, "torch's default") | {"momentum": "the case's"} | dict.fromkeys(tuned, _DECLARED)
    for name, wanted in {"momentum": case.momentum, **_OF_ADAM, **tuned}.items():
        for group in made.groups:
            held = group.settings.get(name, wanted)
            if held != wanted:
                yield f"{name} otherwise than {said[name]}, for {_first(group.names)}", f"{wanted}", f"{held}"


def _decays(made: Made, law: LoopLaw) -> Iterator[Otherwise]:
    """Of a loop that does not declare what decays: all by the case's, or what usually does not decay not at all."""
    wanted = law.case.weight_decay
    held = [float(group.settings.get("weight_decay", 0.0)) for group in made.groups if group.names]
    yield from (("another weight decay", f"{wanted}", f"{each}") for each in held if each not in (0.0, wanted))
    if wanted and not any(held):
        yield "no group decays its weights", f"weight decay {wanted}", "0"
    elif wanted:
        exempt = [name for group in made.groups if not group.settings.get("weight_decay") for name in group.names]
        dimensions = {name: len(shape) for name, shape, _ in law.first.layouts[0]}
        odd = [name for name in exempt if dimensions.get(name, 0) > 1 and not _EXEMPT.search(name)]
        if odd:
            what = f"{len(odd)} matrices do not decay, which the loop does not declare (`decay`), {_first(odd)}"
            yield what, f"weight decay {wanted}", "0"


def _declared_decays(made: Made, law: LoopLaw) -> Iterator[Otherwise]:
    for group in made.groups:
        held = float(group.settings.get("weight_decay", 0.0))
        wrong = [name for name in group.names if law.first.decays[name] != held]
        if wrong:
            what = f"{len(wrong)} tensors decay otherwise than the loop declares, {_first(wrong)}"
            yield what, f"{law.first.decays[wrong[0]]}", f"{held}"


def _first(names: tuple[str, ...] | list[str]) -> str:
    return f"{names[0]} first" if names else "a group without tensors"


def base(evidence: Evidence) -> Verdict:
    """Every rank's frozen tensors at the end against the start; of a loop, that nothing else trains either."""
    found, checked = [], 0
    for rank, (start, end) in sorted(evidence.sightings.gathered("frozen").items()):
        checked += bool(end)
        if end and start != end:
            found.append(Counterexample("a frozen weight changed", f"rank {rank}", start, end))
    verdict, law = conclude(BASE, checked, found), evidence.law
    extra = law.made_trainable - set(trained(law.plain)) if isinstance(law, LoopLaw) and not law.why_no_model else set()
    if not extra:
        return verdict
    what = f"{len(extra)} frozen tensors of the model train"
    return merge([verdict, conclude(BASE, 1, [Counterexample(what, "from the start", "frozen", _few(extra))])])


def declared_rates(trace: Trace) -> Verdict:
    """A loop's learning rates: those that it declares, or the case's throughout in every group; alike on all ranks."""
    claim, first = schedule.CLAIM, first_of(trace)
    apart = [*_rates_apart(trace), *_rates_of_groups(trace)]
    if "schedules" in first.claims:
        declared = schedule.check(trace.seen, lambda step: _held(first, step, first.rates.get(step, math.nan)))
    elif len({made.rate for made in first.made.values()}) > 1:
        why = "the rate changes, and the loop declares no schedule (`rate`)"
        declared = not_applicable(claim, why)
    else:
        declared = schedule.check(trace.seen, lambda step: _held(first, step, trace.case.lr))
    return merge([declared, conclude(claim, len(first.made), apart)]) if apart else declared


def _held(first: LoopSightings, step: int, wanted: float) -> float:
    """`wanted`, or the rate that `step` had where that is `wanted` in fp32: optimizers may keep it as a tensor."""
    seen = first.made[step].rate if step in first.made else wanted
    rounded = float(torch.tensor(seen, dtype=torch.float32)) == seen
    return seen if rounded and math.isclose(seen, wanted, rel_tol=2.0**-22) else wanted


def _rates_of_groups(trace: Trace) -> Iterator[Counterexample]:
    """The first update with a group at another rate than the first, of a loop that declares no schedule of its own."""
    first = first_of(trace)
    for step, made in sorted(first.made.items()) if "schedules" not in first.claims else ():
        odd = [place for place, rate in enumerate(made.rates) if not math.isclose(rate, made.rate, rel_tol=2.0**-22)]
        if odd:
            what = f"group {odd[0]} of the optimizer has another learning rate than group 0"
            yield Counterexample(what, f"step {step}", f"{made.rate:.9g}", f"{made.rates[odd[0]]:.9g}")
            return


def _rates_apart(trace: Trace) -> Iterator[Counterexample]:
    for part in trace.parts[1:]:
        assert isinstance(part, LoopSightings)
        for step, made in sorted(first_of(trace).made.items()):
            theirs = part.made.get(step)
            if theirs is not None and theirs.rates != made.rates:
                where = f"step {step}, rank {part.ranks[0]}"
                mine, own = (", ".join(f"{rate:.9g}" for rate in each.rates) for each in (made, theirs))
                yield Counterexample("another learning rate than on rank 0", where, mine, own)
                break
