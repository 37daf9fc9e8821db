"""The weights after every update: one step of the optimizer, clipped once, at its rate, and no other change."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from andon_falsify.claims.evidence import Evidence, tensors
from andon_falsify.claims.explain import explain_ratio
from andon_falsify.verdict import Claim, Clause, Counterexample, Verdict, conclude, first_of_many

if TYPE_CHECKING:
    from andon_falsify.claims.laws import LoopLaw
    from andon_falsify.loops.sightings import Made

CLAIM = Claim(
    "update-law",
    1,
    "The weights after an update are those of one optimizer step with the reduced gradient, clipped once, at the "
    "scheduled rate. A loop's optimizer has the settings of the case, or those that the loop declares.",
    order=140,
    subjects=("trainer", "loop"),
    needs=(tensors("weights", of_updates=True), lambda evidence: evidence.law.why_no_update),
    clauses=(
        Clause("clip-once"),
        Clause("one-update"),
        Clause("hyperparameters-agree"),
        Clause("groups-planned"),
        Clause("clip-placed"),
        Clause("parameters-kept"),
        Clause("update-applied"),
        Clause("precision-sufficient"),
    ),
)
_DEFAULTS: Mapping[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
"""Of torch's Adam and AdamW."""
_EXEMPT = re.compile("norm|bias|embed", re.IGNORECASE)
"""In the names of tensors that loops usually exempt from decay, besides all of fewer than two dimensions."""


def check(evidence: Evidence) -> Verdict:
    """Rank 0's weights after every update against one optimizer step with its own reduced gradient.

    They may differ by the noise of the step and two roundings of the weights. Of a loop, the optimizer's settings are
    compared with the case as well, no weight may change between updates, and the optimizer has all that trains.
    """
    law, loop = evidence.law, evidence.loop_law if evidence.of_loop else None
    found, checked = [] if loop is None else list(_without_optimizer(loop)), 0
    for step, before, wanted in law.stepped():
        if loop is not None:
            found += [*_settings(loop, step), *_between_updates(loop, step), *_clip(loop, step, evidence.noise.norm)]
        optimizer = law.case.optimizer if loop is None else loop.first.made[step].optimizer
        for name, tensor in law.after(step).items():
            checked += 1
            target = wanted[name]
            moved, off = float((target - before[name]).norm()), float((tensor - target).norm())
            if not off <= evidence.noise.update * moved + 2.0**-23 * float(target.norm()) + 1e-12:
                what = f"{name} is not the result of one step of {optimizer}"
                shown = (f"a step of length {moved:.3g}", f"a step that ends {off:.3g} away")
                found.append(Counterexample(what, f"step {step}", *shown, quantity="weights"))
    return conclude(CLAIM, checked, found)


def _without_optimizer(law: LoopLaw) -> Iterator[Counterexample]:
    held = {name for made in law.first.made.values() for group in made.groups for name in group.names}
    lost = law.made_trainable - held
    if lost and held:
        what = f"{len(lost)} tensors that train are in no group of the optimizer"
        shown = ("every tensor that trains", f"without {first_of_many(sorted(lost), 3)}")
        yield Counterexample(what, "at every update", *shown, quantity="optimizer")


def _between_updates(law: LoopLaw, step: int) -> Iterator[Counterexample]:
    moved, held = law.first.moved.get(step, {}), law.first.values.get(step - 1)
    left = held.weights if held is not None else {}
    if names := [name for name, tensor in moved.items() if left and not tensor.equal(left[name])]:
        where = f"between steps {step - 1} and {step}"
        what, seen = f"{len(names)} tensors changed outside the optimizer's step", ", ".join(names[:3])
        yield Counterexample(what, where, "the weights that the update left", seen, quantity="weights")


def _clip(law: LoopLaw, step: int, noise: float) -> Iterator[Counterexample]:
    """No clip where the case demands one, or one by another norm or of a gradient that was not whole yet."""
    from andon_falsify.reference.update import global_norm, is_clipped

    made, where, limit = law.first.made[step], f"step {step}", law.case.clip_norm
    norm, given = global_norm(law.first.values[step].gradients), made.norm
    if made.early:
        # It matters only if either of the two gradients was to be clipped.
        if limit is not None and is_clipped(max(norm, given or math.inf), limit):
            what = "clipped before the gradient was whole (reduced, or all of it accumulated)"
            held = f"{norm:.6g}, but the clip saw one of norm {'unknown' if given is None else f'{given:.6g}'}"
            wanted = f"a gradient of norm <= {limit:g}, clipped as it is"
            yield Counterexample(what, where, wanted, held, quantity="gradient")
    elif given is None and limit is not None and is_clipped(norm, limit):
        what = "the gradient is not clipped: the loop has to clip it to the case's clip_norm"
        yield Counterexample(what, where, f"a norm of at most {limit:g}", f"{norm:.6g}", quantity="norm")
    elif given is not None and norm and not abs(given - norm) <= noise * norm:
        what, ratio = "clipped by a norm that is not the gradient's", given / norm
        equals = explain_ratio(ratio, {"world": law.case.world, "accumulation": law.case.accumulation})
        yield Counterexample(what, where, f"{norm:.6g}", f"{given:.6g}", ratio, equals, quantity="norm")


def _settings(law: LoopLaw, step: int) -> Iterator[Counterexample]:
    """The settings of the optimizer of `step` that differ from the case, or from what the loop declares.

    A case gives the kind, momentum and weight decay; the rest are torch's defaults. A loop declares others by `Tunes`
    and `Decays`.
    """
    case, made, declared = law.case, law.first.made[step], law.first.tuned.get(step, {})

    def differs(what: str, expected: object, seen: object) -> Counterexample:
        return Counterexample(what, f"step {step}", str(expected), str(seen), quantity="optimizer")

    from andon_falsify.claims.laws import decouples

    kind = {"adamw": "AdamW", "sgd": "SGD"}[case.optimizer]
    coupled = any(group.settings.get("weight_decay") and not decouples(made.optimizer, group) for group in made.groups)
    if made.optimizer != kind and not (made.optimizer == "Adam" and kind == "AdamW" and not coupled):
        yield differs("not the optimizer of the case", kind, made.optimizer)
    decays = law.first.decays
    for group in made.groups if decays else ():
        held = float(group.settings.get("weight_decay", 0.0))
        if wrong := [name for name in group.names if decays[name] != held]:
            what = f"{len(wrong)} tensors do not decay as the loop declares, {_first(wrong)}"
            yield differs(what, decays[wrong[0]], held)
    yield from () if decays else (differs(*each) for each in _usual_decays(made, law))
    origin = dict.fromkeys(_DEFAULTS, "torch's default") | {"momentum": "the case's"}
    origin |= dict.fromkeys(declared, "the loop declares")
    for name, wanted in {"momentum": case.momentum, **_DEFAULTS, **declared}.items():
        for group in made.groups:
            held = group.settings.get(name, wanted)
            if held != wanted:
                yield differs(f"{name} is not {origin[name]}, for {_first(group.names)}", wanted, held)


def _usual_decays(made: Made, law: LoopLaw) -> Iterator[tuple[str, str, str]]:
    """Of a loop that does not declare what decays: all by the case's weight decay, or usual exceptions by none."""
    wanted = law.case.weight_decay
    held = [float(group.settings.get("weight_decay", 0.0)) for group in made.groups if group.names]
    yield from (("a different weight decay", f"{wanted}", f"{each}") for each in held if each not in (0.0, wanted))
    if wanted and not any(held):
        yield "no group decays its weights", f"weight decay {wanted}", "0"
    elif wanted:
        exempt = [name for group in made.groups if not group.settings.get("weight_decay") for name in group.names]
        dimensions = {name: len(shape) for name, shape, _ in law.first.layouts[0]}
        odd = [name for name in exempt if dimensions.get(name, 0) > 1 and not _EXEMPT.search(name)]
        if odd:
            what = f"{len(odd)} matrices do not decay, which the loop does not declare (`decay`), {_first(odd)}"
            yield what, f"weight decay {wanted}", "0"


def _first(names: Sequence[str]) -> str:
    return f"{names[0]} first" if names else "a group without tensors"
