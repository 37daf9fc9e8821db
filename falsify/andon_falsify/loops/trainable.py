"""Which parameters train: those of the case's model, no more and no fewer, and all of them in the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from andon_falsify.compliance.claims import BASE, base_frozen
from andon_falsify.loops.law import LoopLaw
from andon_falsify.loops.parameters import trained
from andon_falsify.verdict import Counterexample, Verdict, conclude, merge

_SHOWN = 3


def planned(law: LoopLaw) -> set[str]:
    """The names of what is to train. Only for a law that knows the model (`LoopLaw.why_no_model`)."""
    return set(trained(law.plain))


def made_trainable(law: LoopLaw) -> set[str]:
    """The names of what trains on rank 0."""
    return {name for name, _, _ in law.first.layouts[0]}


def base(law: LoopLaw) -> Verdict:
    """What does not train is not changed, and nothing trains that the case's model keeps frozen."""
    verdict = base_frozen(law.trace)
    extra = set() if law.why_no_model else made_trainable(law) - planned(law)
    if not extra:
        return verdict
    what = f"{len(extra)} frozen tensors of the model train"
    return merge([verdict, conclude(BASE, 1, [Counterexample(what, "from the start", "frozen", _named(extra))])])


def left_out(law: LoopLaw) -> Iterator[Counterexample]:
    """What is to train and has no gradient, since it was frozen."""
    lost = set() if law.why_no_model else planned(law) - made_trainable(law)
    if lost:
        what = f"{len(lost)} tensors that are to train have no gradient"
        yield Counterexample(what, "from the start", "requires_grad", f"frozen: {_named(lost)}")


def without_optimizer(law: LoopLaw) -> Iterator[Counterexample]:
    """What trains, and is in no group of the optimizer at any update."""
    held = {name for made in law.first.made.values() for group in made.groups for name in group.names}
    lost = made_trainable(law) - held
    if lost and held:
        what = f"{len(lost)} tensors that train are in no group of the optimizer"
        yield Counterexample(what, "at every update", "every tensor that trains", f"without {_named(lost)}")


def _named(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
