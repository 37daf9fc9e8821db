"""No line of the record was changed, lost or inserted later: each carries the digest of the one before."""

from __future__ import annotations

from dataclasses import replace

from andon_falsify.claims.evidence import Evidence
from andon_falsify.history import Event, History, Unread
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude


def _has_ledger(evidence: Evidence) -> str:
    return "" if evidence.ledger is not None else "the subject keeps no ledger"


CLAIM = Claim(
    "chain-intact",
    1,
    "Every ledger line is readable, has the next number, and holds the digest of the line before it.",
    order=70,
    subjects=("trainer", "script", "ledger"),
    needs=(_has_ledger,),
)
NO_LINE = "0" * 16
"""What the first line names as the digest of the line before it."""


def check(evidence: Evidence) -> Verdict:
    """The links of the subject's ledger; what a resume cut off of it is noted."""
    assert evidence.ledger is not None
    verdict = check_history(evidence.ledger)
    cut = [(event.line, event.fields.get("torn")) for event in evidence.ledger.of_kind("resume")]
    notes = [f"the resume at line {line} had cut off {size} bytes of a torn line" for line, size in cut if size]
    return replace(verdict, reasons=(*verdict.reasons, *notes))


def check_history(history: History) -> Verdict:
    """Check the links and the numbers of all lines.

    A killed process leaves a last line that is cut short, which is only noted: a resume must cut it off first, so any
    other unreadable line falsifies.
    """
    found: list[Counterexample] = []
    checked = 0
    digest, seq = NO_LINE, -1
    for line in history.lines():
        if isinstance(line, Unread):
            if not history.torn or line != history.unread[-1]:
                found.append(_broken(line, f"unreadable: {line.why}", "an event", repr(line.excerpt)))
        else:
            checked += 1
            if line.prev != digest:
                found.append(_broken(line, "it does not follow the line before it", digest, str(line.prev)))
            if line.seq != seq + 1:
                found.append(_broken(line, "lines are missing or repeated", f"seq {seq + 1}", f"seq {line.seq}"))
        digest, seq = line.digest, seq + 1 if isinstance(line, Unread) or line.seq is None else line.seq
    note = f"line {history.unread[-1].line} was cut short" if history.torn else ""
    return conclude(CLAIM, checked, found, note=note)


def _broken(line: Event | Unread, what: str, expected: str, seen: str) -> Counterexample:
    return Counterexample(what, f"line {line.line}", expected, seen, quantity="record")
