"""The rows that a loop trains on, as they were recognised at its model: in content, in number, and none left over."""

from __future__ import annotations

from dataclasses import replace

from andon_falsify.checkers import samples_once
from andon_falsify.claims.evidence import Evidence
from andon_falsify.claims.loop_law import LoopLaw
from andon_falsify.verdict import Counterexample, Verdict, conclude, first_of_many, merge, not_applicable

_SHOWN = 3


def recognised(evidence: Evidence) -> Verdict:
    """Rows as they were recognised at the model, on all ranks, each in the update whose gradient it is part of."""
    law = evidence.law
    assert isinstance(law, LoopLaw)
    steps = law.first.made.keys()
    if steps and all(set(part.rowless) >= steps for part in law.parts):
        why = "the model is not called with `input_ids`, and the loop tells no rows (told.rows)"
        return not_applicable(samples_once.CLAIM, why)
    missing = f"the rows of update {min(law.unknown_updates)} are not all known" if law.unknown_updates else ""
    at_all = conclude(samples_once.CLAIM, len(steps), [*_content(law), *_left(law)], missing)
    found = merge([at_all, samples_once.check(law.trace.seen), conclude(samples_once.CLAIM, len(steps), _sizes(law))])
    return replace(found, reasons=tuple(filter(None, (*found.reasons, _weightless(law)))))


def _weightless(law: LoopLaw) -> str:
    """Rows that were called and do not count, which may be what is missing, or ""."""
    rows = sorted({row for part in law.parts for row in part.weightless})
    if not rows:
        return ""
    shown = first_of_many(rows, _SHOWN)
    return f"forward passes of rows {shown} counted for nothing, by their gradient, and are no visits"


def _content(law: LoopLaw) -> list[Counterexample]:
    strangers = [stranger for part in law.parts for stranger in part.strangers]
    if not strangers:
        return []
    first = min(strangers, key=lambda stranger: (stranger.step, stranger.rank))
    shown = "; ".join(stranger.text for stranger in strangers[:_SHOWN])
    what = f"{len(strangers)} rows of no data set"
    return [Counterexample(what, f"step {first.step}, rank {first.rank}", "rows of the case, as they are", shown)]


def _sizes(law: LoopLaw) -> list[Counterexample]:
    found, size = [], law.case.global_batch
    for step in sorted(law.first.made):
        visits = law.visited(step)
        if visits > size:
            found.append(Counterexample("more rows than the global batch has", f"step {step}", str(size), str(visits)))
    planned, made = law.case.updates(size), len(law.first.made) + law.first.resumed_from
    stopped = law.first.violation is not None or law.case.stop_after is not None
    if made > planned or (made < planned and not stopped):
        found.append(Counterexample("another number of updates than planned", "", str(planned), str(made)))
    return found


def _left(law: LoopLaw) -> list[Counterexample]:
    rows = sorted(row for part in law.parts for row in part.leftover)
    if not rows or law.first.violation is not None:
        return []
    shown = f"rows {', '.join(map(str, rows))}"
    return [Counterexample("forward passes after the last update", "the end of the run", "none", shown)]
