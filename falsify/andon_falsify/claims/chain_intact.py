"""No line of the record was changed, lost or inserted later: each carries the digest of the one before."""

from __future__ import annotations

from dataclasses import replace

from andon_falsify.claims.evidence import Evidence
from andon_falsify.history import History, Unread
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude

CLAIM = Claim(
    "chain-intact",
    1,
    "Every ledger line is readable, has the next number, and holds the digest of the line before it.",
    order=70,
    subjects=("trainer", "script", "ledger"),
    needs=(lambda evidence: "" if evidence.ledger is not None else "the subject keeps no ledger",),
)
NO_LINE = "0" * 16
"""What the first line names as the digest of the line before it."""


def check(evidence: Evidence) -> Verdict:
    """Check the links of the subject's ledger, and note what a resume cut off."""
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
    checked, digest, seq = 0, NO_LINE, -1

    def broken(what: str, expected: str, seen: str) -> None:
        found.append(Counterexample(what, f"line {line.line}", expected, seen, quantity="record"))

    for line in history.lines():
        seq += 1
        if isinstance(line, Unread):
            if not history.torn or line != history.unread[-1]:
                broken(f"unreadable: {line.why}", "an event", repr(line.excerpt))
        else:
            checked += 1
            if line.prev != digest:
                broken("it or the line before it was changed", digest, str(line.prev))
            if line.seq != seq:
                broken("lines are missing or repeated", f"seq {seq}", f"seq {line.seq}")
            seq = seq if line.seq is None else line.seq
        digest = line.digest
    return conclude(CLAIM, checked, found, note=f"line {history.unread[-1].line} was cut short" if history.torn else "")
