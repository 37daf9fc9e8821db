"""Files of rows that are wrong, or at the edge: what is refused is refused before any rank starts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from andon_falsify.nemesis.left_behind import Undisturbed
from andon_falsify.nemesis.planting import GUARDS, INLINE
from andon_falsify.nemesis.protocol import Launch, Nemesis, NotStruckError, Plant, Promise, Struck
from andon_falsify.nemesis.run import LIMIT_S, Run
from andon_falsify.nemesis.written_rows import row_lines

Damage = Callable[[list[bytes]], list[bytes]]
"""From the lines of a file to those of a damaged one."""
_LINE = 41
"""Which line is damaged, from 1."""


@dataclass(frozen=True, kw_only=True)
class BadRows(Nemesis):
    """Training rows that cannot be used. The file is mended before the run is healed."""

    damage: Damage
    before_start: bool = True
    guard: str = "a reader that hears of problems"
    finds: str = "exit 0 instead of 2|exit 1 instead of 2"

    def launch(self, *, guarded: bool) -> Launch:
        """As it is; without the guard all problems are passed over, and one process is enough to see it."""
        return Launch("2") if guarded else Launch("2", INLINE, (Plant(f"{GUARDS}:lenient_reader"),))

    def heal(self, *, guarded: bool) -> Launch:
        """The mended rows, in one process."""
        return Launch("2", INLINE)

    def inject(self, run: Run) -> Struck:
        """Give the run a damaged copy of its file."""
        before = run.rows.read_bytes()
        run.rows = run.scratch / "rows.jsonl"
        run.rows.write_bytes(b"".join(self.damage(before.splitlines(keepends=True))))
        return Struck(time.monotonic(), 0, f"rows of {len(before)} bytes, of {run.rows.stat().st_size} now")

    def undo(self, run: Run) -> None:
        """The rows as they were, in the same place."""
        run.rows.write_bytes(run.held.with_name("rows.jsonl").read_bytes())


@dataclass(frozen=True, kw_only=True)
class OtherRows(BadRows):
    """Rows that are taken as they are, and must give the bits that they give to one worker alone, undisturbed."""

    guard: str = "training.exact"
    finds: str = "accepted, but the undisturbed run has no such|other bits"

    def launch(self, *, guarded: bool) -> Launch:
        """On several workers; without the guard sums are taken in whatever order is fastest."""
        return Launch("3", () if guarded else ("training.exact=false",))

    def heal(self, *, guarded: bool) -> Launch:
        """The run is finished: nothing is left to do."""
        return self.launch(guarded=guarded)

    def inject(self, run: Run) -> Struck:
        """The rows, and a run of one worker on them, to compare with."""
        struck = super().inject(run)
        alone, folder = (
            Launch(
                "1",
                (
                    *INLINE,
                    "training.checkpoint_every=1",
                ),
            ),
            run.folder,
        )
        run.folder = run.scratch / "alone"
        run.spawn(run.command(alone), alone)
        ending = run.end(LIMIT_S, time.monotonic())
        if ending.codes != (0,):
            raise NotStruckError(f"one worker alone ended with {ending.codes}: {ending.said[-500:]}")
        run.whole, run.folder = Undisturbed(run.folder), folder
        return replace(struck, at=time.monotonic())

    def undo(self, run: Run) -> None:
        """The rows stay: nothing is wrong with them."""


def _line(new: Callable[[bytes], bytes]) -> Damage:
    """Line `_LINE` is replaced."""
    return lambda lines: [*lines[: _LINE - 1], new(lines[_LINE - 1]), *lines[_LINE:]]


def _field(**fields: object) -> Damage:
    """Fields of line `_LINE` get other values; `...`: the field is left out."""

    def change(line: bytes) -> bytes:
        row = json.loads(line) | fields
        kept = {key: value for key, value in row.items() if value is not Ellipsis}
        return json.dumps(kept).encode() + b"\n"

    return _line(change)


def _labels(label: str) -> Damage:
    return lambda lines: [json.dumps(json.loads(line) | {"label": label}).encode() + b"\n" for line in lines]


def _numbered(lines: list[bytes]) -> list[bytes]:
    """Every row has an id, two the same."""
    rows = [json.loads(line) | {"id": min(number, 90)} for number, line in enumerate(lines[:92])]
    return [json.dumps(row).encode() + b"\n" for row in rows]


def _refused(name: str, number: int, how: str, said: str, damage: Damage, line: int | None = _LINE) -> BadRows:
    where = "rows.jsonl" if line is None else f"rows.jsonl:{line}:"
    promise = Promise((2,), (where, said), 15.0, at_once=True)
    tier = "seconds" if number == 42 and "malformed" in name else "minutes"
    return BadRows(name=name, numbers=(number,), how=how, promise=promise, damage=damage, tier=tier)  # type: ignore[arg-type]


def _taken(name: str, numbers: tuple[int, ...], how: str, damage: Damage, *says: str, alike: str = "") -> OtherRows:
    guard = "" if alike else "training.exact"
    promise = Promise((0,), says)
    return OtherRows(name=name, numbers=numbers, how=how, promise=promise, damage=damage, guard=guard, no_guard=alike)


def _with(part: bytes) -> Callable[[bytes], bytes]:
    """A line with something more at the start of its text."""
    return lambda line: line.replace(b'"text": "', b'"text": "' + part)


def _windows(lines: list[bytes]) -> list[bytes]:
    return [b"\xef\xbb\xbf", *(line.replace(b"\n", b"\r\n") for line in lines)]


NEMESES: tuple[Nemesis, ...] = (
    _refused("malformed line", 42, "a line cut short", "malformed JSON", _line(lambda line: line[:9] + b"\n")),
    _refused("missing field", 42, "a row without a label", "has no column 'label'", _field(label=...)),
    _refused("wrong type", 42, "a text that is a number", "text must be a string", _field(text=5)),
    _refused("byte that is not UTF-8", 43, "0xff in a text", "not UTF-8: byte 0xff at byte", _line(_with(b"\xff"))),
    _refused("NUL byte", 43, "a NUL in a text", "a NUL byte at byte", _line(_with(b"\0"))),
    _refused("lone surrogate", 43, "\\ud800 in a text", "a lone surrogate", _line(_with(b"\\ud800"))),
    _refused("empty text", 44, "a text of no characters", "text is empty", _field(text="")),
    _refused("blank text", 44, "a text of spaces", "text is only white space", _field(text="   ")),
    _refused("repeated id", 45, "two rows with one id", "id 90 is there already", _numbered, 92),
    _refused("label null", 46, "a label that is null", "label is null", _field(label=None)),
    _refused("label a float", 46, "a label that is 1.5", "label 1.5 is a float", _field(label=1.5)),
    _refused("label of another type", 46, "a label that is 1", "label 1 is of another type", _field(label=1)),
    _refused("one class", 46, "all labels alike", "a classifier needs two classes", _labels("north"), None),
    replace(
        _refused("no rows", 48, "an empty file", "is empty", lambda lines: [], None),
        guard="",
        no_guard="without it there is still nothing to train on",
    ),
    _taken("byte order mark and CRLF", (43,), "both in the file", _windows),
    _taken("huge text", (44,), "a text of 1 MB", _field(text="word " * 200_000), "1 texts were cut"),
    _taken("repeated texts", (45,), "40 rows, each of them twice", lambda lines: [*lines[:40], *lines[:40]]),
    _taken(
        "trained on what it is scored on",
        (45,),
        "the held-out rows among the others",
        lambda lines: [*lines, *row_lines("held.jsonl", 12)],
        "evaluation rows have a text that is also trained on; their scores flatter",
    ),
    _taken(
        "fewer rows than workers",
        (48,),
        "3 rows, one of them to validate, on 3 workers",
        lambda lines: lines[:3],
        alike="two rows have one sum, in whatever order it is taken",
    ),
    _taken("one row in the last batch", (28, 49), "81 training rows in batches of 8", lambda lines: lines[:90]),
    _taken("last batch one short", (49,), "87 training rows in batches of 8", lambda lines: [*lines, lines[0]]),
)
