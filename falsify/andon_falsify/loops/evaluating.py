"""What a loop reports of its evaluation, against every row once."""

from __future__ import annotations

import math

import torch

from andon_falsify.checkers.ratio import explain_ratio
from andon_falsify.loops.averages import factors
from andon_falsify.loops.law import LoopLaw
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude, not_applicable

EVALUATION = Claim(
    "evaluation-law",
    1,
    "The loss and the accuracy of an evaluation are those of every row once, whatever the number of ranks, the padding "
    "and the order (seed V8; accelerate even_batches, HF eval_loss).",
)
TOLERANCE = 1e-5


def evaluation(law: LoopLaw) -> Verdict:
    """Rank 0's report after the training against the reference's, from rank 0's weights then, without dropout.

    The accuracy is a count: it must be exact, but for rows whose two best classes are as near as rounding.
    """
    seen = law.first.evaluation
    if "evaluates" not in law.first.claims:
        return not_applicable(EVALUATION, "the loop does not evaluate (`evaluate`)")
    if law.why_no_model:
        return not_applicable(EVALUATION, law.why_no_model)
    rows = tuple(range(len(law.case.rows)))
    weights = law.before(1 + max(step for step, values in law.first.values.items() if values.weights))
    loss = float(law.row_losses(weights, rows).mean())
    found, checked = [], 0
    if "loss" in seen:
        checked += 1
        if not math.isclose(seen["loss"], loss, rel_tol=TOLERANCE):
            what, ratio = "the evaluation loss is not that of every row once", seen["loss"] / loss
            equals = explain_ratio(ratio, factors(law.case))
            where, shown = "after the last update", f"{seen['loss']:.7g}"
            found.append(Counterexample(what, where, f"{loss:.7g}", shown, ratio, equals))
    if "accuracy" in seen:
        checked += 1
        fewest, most = _right(law, weights, rows)
        if not fewest - 1e-4 <= seen["accuracy"] * len(rows) <= most + 1e-4:
            what = "the accuracy is not that of every row once"
            exact = f"{most / len(rows):.6g} ({most} of {len(rows)})"
            found.append(Counterexample(what, "after the last update", exact, f"{seen['accuracy']:.6g}"))
    return conclude(EVALUATION, checked, found, "" if checked else "`evaluate` reports neither loss nor accuracy")


def _right(law: LoopLaw, weights: dict[str, torch.Tensor], rows: tuple[int, ...]) -> tuple[int, int]:
    """The fewest and the most rows that rounding may let be right."""
    logits, labels = law.logits(weights, rows)
    own = logits.gather(1, labels[:, None])[:, 0]
    others = logits.scatter(1, labels[:, None], -math.inf).amax(1)
    near = 1e-5 * logits.abs().amax(1)
    return int((own - others > near).sum()), int((own - others > -near).sum())
