"""Checkpoints and the summary quote lines of the ledger as they are, and the ledger quotes files as they are."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from andon_falsify.claims.chain_intact import NO_LINE
from andon_falsify.claims.evidence import Evidence
from andon_falsify.history import Event, Unread
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude, not_applicable

CLAIM = Claim(
    "heads-quoted",
    1,
    "The ledger still holds each line that a checkpoint or the summary quotes by number and digest. Each confusion "
    "matrix that the ledger quotes is unchanged, and has the rows and the accuracy of its evaluation.",
    order=190,
    subjects=("ledger",),
    needs=(lambda run: "" if run.folder is not None else "a ledger without a run folder has no files that quote it",),
)
_MOST_BYTES = 1 << 26
_DIGITS = 16


def check(evidence: Evidence) -> Verdict:
    """Compare the quotes in the folder's files with the ledger's lines, and the ledger's quotes with the files."""
    history, folder = evidence.history, evidence.folder
    assert folder is not None
    lines = enumerate(history.lines(), start=1)
    digests = {number: line.digest for number, line in lines if not (isinstance(line, Unread) and line.torn)}
    found, checked = [], 0
    for place, count, digest in _quotes(folder):
        checked += 1
        seen = digests.get(count, "no such line") if count else NO_LINE
        if seen != digest:
            found.append(_wrong(f"{place} quotes line {count} with another digest", f"line {count}", digest, seen))
    evaluations = [event for event in history.of_kind("eval") if event.fields.get("confusion") is not None]
    checked += len(evaluations)
    found += [wrong for event in evaluations for wrong in _wrong_matrix(folder, event)]
    return conclude(CLAIM, checked, found) if checked else not_applicable(CLAIM, "no checkpoint and no summary yet")


def _wrong(what: str, where: str, expected: str, seen: str) -> Counterexample:
    return Counterexample(what, where, expected, seen, quantity="record")


def _quotes(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Each (file, count of lines, digest of the last) in the manifests of checkpoints and in the summary."""
    for path in [*sorted(folder.glob("checkpoints/step-*/manifest.json")), folder / "summary.json"]:
        if path.exists():
            try:
                head = json.loads(_read(path))["ledger"]
                quote = int(head["count"]), str(head["digest"])
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                raise ValueError(f"{path} says nothing of the ledger: {error}") from error
            yield str(path.relative_to(folder)), *quote


def _wrong_matrix(folder: Path, event: Event) -> Iterator[Counterexample]:
    """How the file of the confusion matrix that an evaluation quotes differs from what the evaluation says."""
    quote, where = str(event.fields["confusion"]), f"line {event.line}, after step {event.step}"
    if not re.fullmatch(f"[0-9a-f]{{{_DIGITS}}}", quote):
        raise ValueError(f"line {event.line} quotes a confusion matrix by {quote[:_DIGITS]!r}, which is not a digest")
    path = folder / "confusion" / f"{quote}.json"
    name = str(path.relative_to(folder))
    if not path.exists():
        yield _wrong(f"{name}, the confusion matrix, is not there", where, quote, "no such file")
        return
    data = _read(path)
    if (seen := hashlib.sha256(data).hexdigest()[:_DIGITS]) != quote:
        yield _wrong(f"{name} is not the confusion matrix that was quoted", where, quote, seen)
        return
    cells = json.loads(data)["cells"]
    rows = sum(count for _, _, count in cells)
    if rows != event.fields.get("rows"):
        yield _wrong(f"{name} has other rows than the evaluation", where, str(event.fields.get("rows")), str(rows))
    right = sum(count for actual, predicted, count in cells if actual == predicted)
    scores, share = event.fields.get("scores"), right / rows if rows else 0.0
    told = scores.get("accuracy") if isinstance(scores, Mapping) else None
    if isinstance(told, Mapping) and told.get("hex") != share.hex():
        what, held = f"{name} gives another accuracy than the evaluation", f"{share:.9g} ({right} of {rows})"
        yield _wrong(what, where, str(told.get("value")), held)


def _read(path: Path) -> bytes:
    """The file's bytes. A pipe has no end, and a link leads out of the run folder, so both are refused."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} is a link, not a regular file, or longer than {_MOST_BYTES} bytes")
    return path.read_bytes()
