"""Data files that are wrong or unusual. A file is rejected before any rank starts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

from .language import INLINE, Fault, Guard, Nemesis, Promise
from .left_behind import Undisturbed
from .planting import NotStruckError, Plant, Struck
from .run import Launch, Run, row_lines

Damage = Callable[[list[bytes]], list[bytes]]
"""Returns the lines of the damaged file."""
_LINE = 41
"""The number of the damaged line, from 1."""


def replaced(damage: Damage) -> Fault:
    """Give the run a damaged copy of its file before it is started. To heal is to repair the copy."""

    def strike(run: Run) -> Struck:
        before = run.rows.read_bytes()
        run.rows = run.scratch / "rows.jsonl"
        run.rows.write_bytes(b"".join(damage(before.splitlines(keepends=True))))
        return Struck(time.monotonic(), 0, f"rows of {len(before)} bytes, of {run.rows.stat().st_size} now")

    def heal(run: Run) -> None:
        run.rows.write_bytes(run.eval_rows.with_name("rows.jsonl").read_bytes())

    return Fault(strike, heal, before_start=True)


def accepted(change: Damage) -> Fault:
    """Unusual rows, which are right: the run must have the bits of one worker alone with the same rows."""
    change_rows = replaced(change)

    def strike(run: Run) -> Struck:
        struck, folder = change_rows.strike(run), run.folder
        run.folder = run.scratch / "alone"
        run.start(Launch("1", (*INLINE, "training.checkpoint_every=1")))
        ending = run.end()
        if ending.codes != (0,):
            raise NotStruckError(f"one worker alone ended with {ending.codes}: {ending.output[-500:]}")
        run.reference, run.folder = Undisturbed(run.folder), folder
        return replace(struck, at=time.monotonic())

    return Fault(strike, before_start=True)


def _line(new: Callable[[bytes], bytes]) -> Damage:
    """Change line `_LINE`."""
    return lambda lines: [*lines[: _LINE - 1], new(lines[_LINE - 1]), *lines[_LINE:]]


def _rewritten(line: bytes, **fields: object) -> bytes:
    """A row with other values of some fields; `...` drops a field."""
    row = json.loads(line) | fields
    return json.dumps({key: value for key, value in row.items() if value is not Ellipsis}).encode() + b"\n"


def _field(**fields: object) -> Damage:
    return _line(lambda line: _rewritten(line, **fields))


def _text_begins(part: bytes) -> Damage:
    return _line(lambda line: line.replace(b'"text": "', b'"text": "' + part))


_HEARD = Guard(
    "a reader that hears of problems",
    "exit 0 instead of 2|exit 1 instead of 2",
    INLINE,  # one process is enough
    (Plant.of("silent", target="andon.console.messages:ProblemList.add"),),
)
_EXACT = Guard(
    "sums in the order of micro-batches",
    "accepted, but the undisturbed run has no such|other bits",
    plants=(Plant.of("sums_by_rank"),),
)


def _refused(name: str, how: str, says: str, damage: Damage, line: int | None = _LINE) -> Nemesis:
    where = "rows.jsonl" if line is None else f"rows.jsonl:{line}:"
    promise = Promise((2,), (where, says), 15.0, at_once=True)
    return Nemesis(name, how, promise, replaced(damage), _HEARD, resumed=Launch("2", INLINE))


def _taken(name: str, how: str, change: Damage, *says: str) -> Nemesis:
    return Nemesis(name, how, Promise((0,), says), accepted(change), _EXACT, launched=Launch("3"))


NEMESES = (
    _refused("malformed line", "a line cut short", "malformed JSON", _line(lambda line: line[:9] + b"\n")),
    _refused("missing field", "a row without a label", "has no column 'label'", _field(label=...)),
    _refused("wrong type", "a text that is a number", "text must be a string", _field(text=5)),
    _refused("byte that is not UTF-8", "0xff in a text", "not UTF-8: byte 0xff at byte", _text_begins(b"\xff")),
    _refused("NUL byte", "a NUL in a text", "a NUL byte at byte", _text_begins(b"\0")),
    _refused("lone surrogate", "\\ud800 in a text", "a lone surrogate", _text_begins(b"\\ud800")),
    _refused("empty text", "a text of no characters", "text is empty", _field(text="")),
    _refused("blank text", "a text of spaces", "text is only white space", _field(text="   ")),
    _refused("label null", "a label that is null", "label is null", _field(label=None)),
    _refused("label a float", "a label that is 1.5", "label 1.5 is a float", _field(label=1.5)),
    _refused("label of another type", "a label that is 1", "label 1 is of another type", _field(label=1)),
    _refused(
        *("one class", "one label in all rows", "a classifier needs two classes"),
        lambda lines: [_rewritten(line, label="north") for line in lines],
        None,
    ),
    replace(
        _refused("no rows", "an empty file", "is empty", lambda lines: [], None),
        guard="without it there is still nothing to train on",
    ),
    _taken(
        *("byte order mark and CRLF", "both in the file"),
        lambda lines: [b"\xef\xbb\xbf", *(line.replace(b"\n", b"\r\n") for line in lines)],
    ),
    _taken("huge text", "a text of 1 MB", _field(text="word " * 200_000), "1 text cut"),
    _taken("repeated texts", "40 rows, each of them twice", lambda lines: [*lines[:40], *lines[:40]]),
    _taken(
        *("trained on what it is scored on", "the evaluation rows among the others"),
        lambda lines: [*lines, *row_lines("held.jsonl", 12)],
        "scored rows are also trained on, so the scores may be too high",
    ),
    replace(
        _taken("fewer rows than workers", "3 rows, one of them to validate, on 3 workers", lambda rows: rows[:3]),
        guard="two rows have one sum, in whatever order it is taken",
    ),
    _taken("one row in the last batch", "81 training rows in batches of 8", lambda lines: lines[:90]),
    _taken("last batch one short", "87 training rows in batches of 8", lambda lines: [*lines, lines[0]]),
)
