"""No line of the record was changed, lost or put in later: each carries the digest of the one before."""

from __future__ import annotations

from andon_falsify.history import Event, History, Unread
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude

CLAIM = Claim(
    "chain-intact",
    1,
    "Every line of the ledger is readable, counts one up, and names the digest of the line before it.",
)

NO_LINE = "0" * 16
"""What the first line names as the digest of the line before it."""


def check(history: History) -> Verdict:
    """Check the links and the numbers of all lines.

    A last line that was cut short is what a killed process leaves, and only noted. Any other unreadable line falsifies:
    who resumes must cut off an unfinished line first.
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
    return Counterexample(what, f"line {line.line}", expected, seen)
