"""One step of the loop's own kind of optimizer, with the settings that it had, from the gradient before clipping."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from andon_falsify.checkers.ratio import explain_ratio
from andon_falsify.compliance.claims import UPDATE
from andon_falsify.compliance.law import short_name
from andon_falsify.loops.law import LoopLaw
from andon_falsify.loops.settings import decouples, settings
from andon_falsify.loops.sightings import Group, Made
from andon_falsify.loops.trainable import without_optimizer
from andon_falsify.reference.update import AdamW, Law, Sgd, State, clip, global_norm
from andon_falsify.verdict import Counterexample, Verdict, conclude, not_applicable

_OFF = ("maximize", "amsgrad", "nesterov", "dampening")
"""Settings that the law does not know."""


def updates(law: LoopLaw) -> Verdict:
    """Rank 0's weights after every update against one optimizer step with his own gradient, clipped once.

    What its groups are set to is held against the case, see `settings`. The distance may be a thousandth of the step
    and two roundings of the weights. Between updates weights may not change, and every tensor that trains is in the
    optimizer.
    """
    why = _cannot(law)
    if why:
        return not_applicable(UPDATE, why)
    found, checked, states = list(without_optimizer(law)), 0, dict[tuple[str, ...], State]()
    for step in sorted(law.first.values):
        if not law.first.values[step].weights:
            continue
        made = law.first.made[step]
        where = f"step {step}"
        found += [Counterexample(text, where, planned, held) for text, planned, held in settings(law, step)]
        found += [*_between(law, step), *_clipped_by(law, step)]
        before, after = law.before(step), law.after(step)
        given = {short_name(n): g.double() for n, g in law.first.values[step].gradients.items()}
        wanted = _stepped(made, before, clip(given, None if made.early else law.case.clip_norm)[0], states)
        for name, tensor in after.items():
            checked += 1
            target = wanted.get(name, before[name])
            moved, off = float((target - before[name]).norm()), float((tensor - target).norm())
            if not off <= 1e-3 * moved + 2.0**-23 * float(target.norm()) + 1e-12:
                what = f"{name} is not where one step of {made.optimizer} leads"
                ends = f"a step that ends {off:.3g} away"
                found.append(Counterexample(what, where, f"a step of length {moved:.3g}", ends))
    return conclude(UPDATE, checked, found)


def _cannot(law: LoopLaw) -> str:
    """Why the update of these optimizers is not known, or ""."""
    if not law.case.values or law.first.resumed_from:
        return "values were not recorded from the first update on"
    for made in law.first.made.values():
        if made.optimizer not in ("SGD", "AdamW", "Adam"):
            return f"the law knows SGD and AdamW, not {made.optimizer}"
        for group in made.groups:
            on = [name for name in _OFF if group.settings.get(name)]
            if on:
                return f"the law does not know {made.optimizer} with {', '.join(on)}"
    return ""


def _between(law: LoopLaw, step: int) -> Iterator[Counterexample]:
    """Rank 0's weights that are not those behind the update before, from which `step` starts."""
    moved, held = law.first.moved.get(step, {}), law.first.values.get(step - 1)
    if held is not None and held.weights:
        names = [name for name, tensor in moved.items() if not torch.equal(tensor, held.weights[name])]
        if names:
            where = f"between steps {step - 1} and {step}"
            what = f"{len(names)} tensors changed behind the optimizer's step"
            yield Counterexample(what, where, "the weights that the update left", ", ".join(names[:3]))


def _clipped_by(law: LoopLaw, step: int) -> Iterator[Counterexample]:
    """A norm that torch's clip was given, and that is not the gradient's."""
    if law.first.made[step].early:
        yield from _clipped_early(law, step)
        return
    given, norm = law.first.made[step].norm, global_norm(law.first.values[step].gradients)
    if given is not None and norm and not abs(given - norm) <= 1e-4 * norm:
        what, ratio = "clipped by another norm than the gradient's", given / norm
        equals = explain_ratio(ratio, {"world": law.case.world, "accumulation": law.case.accumulation})
        yield Counterexample(what, f"step {step}", f"{norm:.6g}", f"{given:.6g}", ratio, equals)


def _clipped_early(law: LoopLaw, step: int) -> Iterator[Counterexample]:
    """Torch's clip had another gradient than the optimizer, and either was to be clipped."""
    limit, norm = law.case.clip_norm, global_norm(law.first.values[step].gradients)
    given = law.first.made[step].norm
    if limit is not None and max(norm, given or math.inf) > limit * (1 + 1e-5):
        what = "clipped before the gradient was whole (reduced, or all of it accumulated)"
        held = f"{norm:.6g}, where the clip had one of norm {'unknown' if given is None else f'{given:.6g}'}"
        yield Counterexample(what, f"step {step}", f"a gradient of norm <= {limit:g}, clipped as it is", held)


def _stepped(
    made: Made, before: Mapping[str, Tensor], gradients: Mapping[str, Tensor], states: dict[tuple[str, ...], State]
) -> dict[str, Tensor]:
    """The trained weights after one step, group by group; `states` is taken on."""
    found: dict[str, Tensor] = {}
    for group in made.groups:
        names = tuple(short_name(name) for name in group.names)
        weights = {name: before[name] for name in names}
        own = {name: gradients[name] for name in names if name in gradients}
        stepped, states[names] = _law_of(made.optimizer, group).step(
            weights, own, states.get(names, State()), float(group.settings["lr"])
        )
        found |= stepped
    return found


def _law_of(optimizer: str, group: Group) -> Law:
    held: Mapping[str, Any] = group.settings
    if optimizer == "SGD":
        return Sgd(held["momentum"], held["weight_decay"])
    fast, slow = held["betas"]
    return AdamW((fast, slow), held["eps"], held["weight_decay"] if decouples(optimizer, group) else 0.0)
