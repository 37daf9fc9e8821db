"""Compares the evaluation that a loop reports with an evaluation that counts every row once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from andon_falsify.claims.evidence import Evidence, RunUnavailable, tensors
from andon_falsify.claims.explain import explain_ratio
from andon_falsify.verdict import Claim, Clause, Counterexample, Outcome, Verdict, conclude, first_of_many, merge

if TYPE_CHECKING:
    from andon_falsify.claims.laws import LoopLaw
    from andon_falsify.loops.sightings import LoopSightings

_SILENT = "the loop does not evaluate (`evaluate`)"
CLAIM = Claim(
    "evaluation-law",
    2,
    "The loss and the accuracy that a rank reports for an evaluation count every row once, for any world size, "
    "padding and order. The evaluation does not change the model.",
    order=170,
    subjects=("loop",),
    runs=("random",),
    needs=(tensors("evaluation"), lambda run: "" if run.of_loop and run.declares("evaluates") else _SILENT),
    clauses=(Clause("evaluation-once", "same"),),
)


def check(evidence: Evidence) -> Verdict:
    """The evaluation of the run, and of `others["random"]`: an evaluation switches dropout off."""
    plain = _evaluation(evidence)
    if plain.outcome is Outcome.NOT_APPLICABLE:
        return plain
    try:
        random = evidence.find("random")
    except RunUnavailable as error:
        return merge([plain, conclude(CLAIM, 0, [], str(error))])
    if random is None:
        return plain
    verdict = _evaluation(random)
    found = [replace(each, where=f"{each.where}, with dropout in the model") for each in verdict.counterexamples]
    return merge([plain, replace(verdict, counterexamples=tuple(found))])


def _evaluation(evidence: Evidence) -> Verdict:
    """What the ranks report after training, against the reference with rank 0's weights and without dropout.

    The accuracy is a count and must be exact, but for rows whose two best classes differ by rounding only. A rank that
    reports nothing, and a model that the reference does not know, are judged only by what the evaluation changed.
    """
    law = evidence.loop_law
    found = list(_changed(law))
    if law.why_no_model:
        return conclude(CLAIM, 1, found) if found else Verdict(CLAIM.name, Outcome.NOT_APPLICABLE, (law.why_no_model,))
    from andon_falsify.claims.laws import piece_of
    from andon_falsify.reference.training import row_losses

    rows, checked = len(law.case.rows), 0
    piece = piece_of(law.case.rows, tuple(range(rows)))
    logits = law.model.logits(law.before(1 + max(law.recorded)), piece.tokens, piece.attention)
    loss = float(row_losses(logits, piece.labels, law.class_weights).mean())
    own = logits.gather(1, piece.labels[:, None])[:, 0]
    lead, near = own - logits.scatter(1, piece.labels[:, None], -math.inf).amax(1), 1e-5 * logits.abs().amax(1)
    fewest, most = int((lead > near).sum()), int((lead > -near).sum())
    for part in law.parts:
        reported: Mapping[str, float] = part.evaluation
        checked += len(reported.keys() & {"loss", "accuracy"})
        if part is not law.first and reported == law.first.evaluation:
            continue
        if "loss" in reported and not math.isclose(reported["loss"], loss, rel_tol=evidence.noise.loss):
            what, ratio = "the evaluation loss is not that of every row once", reported["loss"] / loss
            shown = (_after(part), f"{loss:.7g}", f"{reported['loss']:.7g}", ratio, explain_ratio(ratio, law.factors))
            found.append(Counterexample(what, *shown, quantity="loss"))
        if "accuracy" in reported and not fewest - 1e-4 <= reported["accuracy"] * rows <= most + 1e-4:
            exact, seen = f"{most / rows:.6g} ({most} of {rows})", f"{reported['accuracy']:.6g}"
            found.append(Counterexample("the accuracy is not that of every row once", _after(part), exact, seen))
    return conclude(CLAIM, checked, found, "" if checked else "`evaluate` reports neither loss nor accuracy")


def _changed(law: LoopLaw) -> Iterator[Counterexample]:
    held = law.first.around_evaluation[0]
    for part in law.parts:
        before, after = part.around_evaluation
        names = [name for name in before if after.get(name) not in (None, before[name], held.get(name))]
        if names:
            what, seen = f"the evaluation changed {len(names)} tensors of the model", first_of_many(names, 3)
            yield Counterexample(what, _after(part), "the model as the training left it", seen, quantity="weights")
            return


def _after(part: LoopSightings) -> str:
    return "after the last update" + (f", rank {part.ranks[0]}" if part.ranks[0] else "")
