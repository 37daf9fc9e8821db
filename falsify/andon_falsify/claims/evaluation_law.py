"""What a loop reports of its evaluation, against every row once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from andon_falsify.checkers.ratio import explain_ratio
from andon_falsify.claims.evidence import Evidence
from andon_falsify.claims.loop_law import LoopLaw
from andon_falsify.claims.statements import EVALUATION
from andon_falsify.loops.sightings import LoopSightings
from andon_falsify.reference.training import row_losses
from andon_falsify.verdict import Counterexample, Verdict, conclude, first_of_many, not_applicable

_SHOWN = 3


def evaluation(evidence: Evidence) -> Verdict:
    """What the ranks report after the training against the reference's, from rank 0's weights then, without dropout.

    The accuracy is a count: it must be exact, but for rows whose two best classes are as near as rounding. A rank that
    reports nothing is not judged, but for what its evaluation changed; of a model that the reference does not know only
    that can be judged.
    """
    law = evidence.law
    assert isinstance(law, LoopLaw)
    changed = list(_changed(law))
    if law.why_no_model:
        return conclude(EVALUATION, 1, changed) if changed else not_applicable(EVALUATION, law.why_no_model)
    wanted = _of_every_row(law)
    found, checked = changed, 0
    for part in law.parts:
        reported = part.evaluation
        checked += len(reported.keys() & {"loss", "accuracy"})
        if part is law.first or reported != law.first.evaluation:
            found += _off(law, reported, wanted, f"after the last update{_on(part)}", evidence.noise.loss)
    return conclude(EVALUATION, checked, found, "" if checked else "`evaluate` reports neither loss nor accuracy")


@dataclass(frozen=True)
class _EveryRow:
    """The loss of every row once, and the fewest and the most rows that rounding may let be right."""

    loss: float
    fewest: int
    most: int


def _of_every_row(law: LoopLaw) -> _EveryRow:
    weights = law.before(1 + max(step for step, values in law.first.values.items() if values.weights))
    logits, labels = law.logits(weights, tuple(range(len(law.case.rows))))
    own = logits.gather(1, labels[:, None])[:, 0]
    others = logits.scatter(1, labels[:, None], -math.inf).amax(1)
    near = 1e-5 * logits.abs().amax(1)
    loss = float(row_losses(logits, labels, law.class_weights).mean())
    return _EveryRow(loss, int((own - others > near).sum()), int((own - others > -near).sum()))


def _off(
    law: LoopLaw, reported: Mapping[str, float], wanted: _EveryRow, where: str, noise: float
) -> Iterator[Counterexample]:
    rows = len(law.case.rows)
    if "loss" in reported and not math.isclose(reported["loss"], wanted.loss, rel_tol=noise):
        what, ratio = "the evaluation loss is not that of every row once", reported["loss"] / wanted.loss
        equals = explain_ratio(ratio, law.factors)
        yield Counterexample(what, where, f"{wanted.loss:.7g}", f"{reported['loss']:.7g}", ratio, equals)
    if "accuracy" in reported and not wanted.fewest - 1e-4 <= reported["accuracy"] * rows <= wanted.most + 1e-4:
        what = "the accuracy is not that of every row once"
        exact = f"{wanted.most / rows:.6g} ({wanted.most} of {rows})"
        yield Counterexample(what, where, exact, f"{reported['accuracy']:.6g}")


def _changed(law: LoopLaw) -> Iterator[Counterexample]:
    """The first rank whose evaluation changed its model; what a rank takes over from rank 0 is no change of its own."""
    held = law.first.around_evaluation[0]
    for part in law.parts:
        before, after = part.around_evaluation
        names = [name for name in before if after.get(name) not in (None, before[name], held.get(name))]
        if names:
            what = f"the evaluation changed {len(names)} tensors of the model"
            where = f"after the last update{_on(part)}"
            yield Counterexample(what, where, "the model as the training left it", first_of_many(names, _SHOWN))
            return


def _on(part: LoopSightings) -> str:
    return f", rank {part.ranks[0]}" if part.ranks[0] else ""
