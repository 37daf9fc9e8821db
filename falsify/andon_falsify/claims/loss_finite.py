"""Every loss and gradient norm that is reported is a finite number."""

from __future__ import annotations

from dataclasses import replace

from andon_falsify.claims.evidence import Evidence
from andon_falsify.history import History, StepEvent
from andon_falsify.verdict import Claim, Clause, Counterexample, Quantity, Verdict, conclude


def _reports_losses(evidence: Evidence) -> str:
    if evidence.of_loop and not getattr(evidence.observed.first, "told_losses", ()):
        return "the loop reports no loss (told.loss)"
    silent = evidence.of_script and all(step.loss is None for step in evidence.history.steps)
    return "the script reports no loss (w.loss)" if silent else ""


CLAIM = Claim(
    "loss-finite",
    1,
    "Every reported loss and every reported gradient norm is finite.",
    order=80,
    subjects=("trainer", "loop", "script", "ledger"),
    needs=(_reports_losses,),
    clauses=(Clause("finite", "other", "a planted NaN, and the reported losses and norms"),),
)


def check(evidence: Evidence) -> Verdict:
    """All updates. A loop that reports its loss now and then is judged at the updates that have one."""
    history = evidence.history
    if evidence.of_loop:
        told = [event for event in history.events if not (isinstance(event, StepEvent) and event.loss is None)]
        history = replace(history, events=tuple(told))
    return check_history(history)


def check_history(history: History) -> Verdict:
    """Unknown if an update has no loss. The ledger of a watched loop without any loss is judged by its norms alone."""
    untold = history.start is not None and history.start.watched and all(each.loss is None for each in history.steps)
    names: tuple[tuple[Quantity, str], ...] = (("loss", "loss"), ("norm", "gradient norm"))
    checked, missing, found = 0, "", []
    for event in history.steps:
        if event.loss is None and not untold:
            missing = missing or f"step {event.number} records no loss"
        for (quantity, name), number in zip(names, (event.loss, event.grad_norm), strict=True):
            checked += number is not None
            if number is not None and not number.finite:
                shown = (f"the {name} is not finite", f"step {event.number}", "a real number", str(number))
                found.append(Counterexample(*shown, quantity=quantity))
    return conclude(CLAIM, checked, found, missing, "the loop reported no loss: gradient norms only" if untold else "")
