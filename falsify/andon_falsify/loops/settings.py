"""What an optimizer is set to, against the case, or against what the loop declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from andon_falsify.loops.law import LoopLaw
from andon_falsify.loops.sightings import Group, Made

Otherwise = tuple[str, str, str]
"""What is set otherwise, as what, and to what."""

_OF_ADAM: Mapping[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
"""What torch's Adam and AdamW have where nothing is said."""
_DECLARED = "the loop declares"
_USUALLY_NOT = ("norm", "bias", "embed")
"""In the names of tensors that loops usually exempt from decay, besides all of fewer than two dimensions."""


def settings(law: LoopLaw, step: int) -> Iterator[Otherwise]:
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


def decouples(optimizer: str, group: Group) -> bool:
    """Whether the decay acts on the weights and not on the gradient: AdamW is Adam with that switched on."""
    return optimizer == "AdamW" or bool(group.settings.get("decoupled_weight_decay"))


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
        odd = [name for name in exempt if dimensions.get(name, 0) > 1 and not _usually_not(name)]
        if odd:
            what = f"{len(odd)} matrices do not decay, which the loop does not declare (`decay`), {_first(odd)}"
            yield what, f"weight decay {wanted}", "0"


def _usually_not(name: str) -> bool:
    return any(part in name.lower() for part in _USUALLY_NOT)


def _declared_decays(made: Made, law: LoopLaw) -> Iterator[Otherwise]:
    for group in made.groups:
        held = float(group.settings.get("weight_decay", 0.0))
        wrong = [name for name in group.names if law.first.decays[name] != held]
        if wrong:
            what = f"{len(wrong)} tensors decay otherwise than the loop declares, {_first(wrong)}"
            yield what, f"{law.first.decays[wrong[0]]}", f"{held}"


def _first(names: tuple[str, ...] | list[str]) -> str:
    return f"{names[0]} first" if names else "a group without tensors"
