"""Reads a ledger, from a run folder or by its own path.

A ledger may have millions of lines. It is read and verified once without keeping steps in memory: `Recorded` holds the
other records, the first and last step of each stretch, and the file offset of each step's line.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import struct
from array import array
from bisect import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from andon.config.source import is_folder
from andon.console.messages import InputError, command_line
from andon.run.folder import RunFolder
from andon.run.ledger import REPEATED, Difference, LedgerError, differing, lacks
from andon_contracts.legible import counted
from andon_contracts.record import GENESIS, MAX_LINE, Record, Resume, Retraction, Start, Step, chain, read_lines
from andon_contracts.untrusted import open_regular

CURVES = ("loss", "accuracy", "lr", "grad_norm")
_FACTS = struct.Struct("<16sII4d")


@dataclass(frozen=True)
class Stretch:
    """Consecutive step records of the file: the first and the last."""

    first: Step
    last: Step


@dataclass
class Steps(Mapping[int, Step]):
    """The steps in effect, in rising order: the last record of each step, unless it was retracted.

    Lookup decodes a step from its line. `numbers` and `offsets` (of the line's first byte) cover every step record in
    file order; `places` maps each step in effect to its index in them. `facts` has a `_FACTS` for each record: digest
    of the compared fields, bit mask of the missing ones, index into `layouts` (where the step ran), and the `CURVES`.
    """

    ledger: Path
    follow: bool
    numbers: array[int] = field(default_factory=lambda: array("Q"))
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    places: dict[int, int] = field(default_factory=dict)
    facts: bytearray = field(default_factory=bytearray)
    layouts: dict[str, int] = field(default_factory=dict)
    _heap: list[int] = field(default_factory=list)  # negated steps of `places`, so that the highest comes first

    def __getitem__(self, step: int) -> Step:
        with open_regular(self.ledger, follow=self.follow) as file:
            file.seek(self.offsets[self.places[step]])
            body = json.loads(file.readline(MAX_LINE + 1))
        return Step.from_json({name: value for name, value in body.items() if name not in {"v", "kind", "seq", "prev"}})

    def __iter__(self) -> Iterator[int]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, step: object) -> bool:
        return step in self.places

    def add(self, record: Step, at: int, *, facts: bool) -> None:
        """Index the step whose line begins at byte `at`. facts: store what comparisons and curves need, too."""
        if record.step not in self.places:
            heapq.heappush(self._heap, -record.step)
        self.places[record.step] = len(self.offsets)
        self.numbers.append(record.step)
        self.offsets.append(at)
        if facts:
            workers = counted(record.world, f"{record.backend} worker")
            layout = self.layouts.setdefault(workers, len(self.layouts))
            digests, loss, norm, terms = record.digests, record.loss, record.grad_norm, record.terms or record.count
            lacking = sum(1 << at for at, name in enumerate(REPEATED) if lacks(record, name))
            compared = (record.epoch, record.position, record.ids, record.count, record.terms, record.correct, digests)
            text = f"{compared} {record.lr.hex} {loss and loss.hex} {norm and norm.hex}"
            self.facts += _FACTS.pack(
                hashlib.blake2b(text.encode(), digest_size=16).digest(),
                lacking,
                layout,
                loss.value if loss is not None else 0.0,
                record.correct / terms if record.correct is not None and terms else -1.0,
                record.lr.value,
                norm.value if norm is not None else 0.0,
            )

    def take_back(self, last: int) -> None:
        """Remove the steps after `last`."""
        while self._heap and -self._heap[0] > last:
            del self.places[-heapq.heappop(self._heap)]

    def _fact(self, step: int) -> tuple[bytes, int, int, float, float, float, float]:
        return _FACTS.unpack_from(self.facts, self.places[step] * _FACTS.size)

    def lacking(self, step: int) -> int:
        """Bit mask of the `REPEATED` fields that the step's record lacks."""
        return self._fact(step)[1]

    @property
    def ran_on(self) -> str:
        """Workers and backends of the steps, in order of first use."""
        names = list(self.layouts)
        return " then ".join(dict.fromkeys(names[self._fact(step)[2]] for step in self.places))

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of one of `CURVES`, for the steps that have it."""
        absent = 1 << REPEATED.index(name) if name in REPEATED else 0
        points = []
        for step in self.places:
            _, lacking, _, *numbers = self._fact(step)
            number = numbers[CURVES.index(name)]
            if not lacking & absent and (name != "accuracy" or number >= 0):
                points.append((step, number))
        return points

    def first_difference(self, other: Steps) -> tuple[int | None, tuple[Difference, ...]]:
        """The first common step whose records differ, with the differing fields, causes first; else (None, ())."""
        for step in self.places:
            if step in other.places and self._fact(step)[0] != other._fact(step)[0]:
                fields = differing(self[step], other[step])
                if fields:
                    return step, fields
        return None, ()


@dataclass(frozen=True)
class Recorded:
    """The ledger of a run. `folder`: None if only a ledger is available.

    `records`: in order, with consecutive steps as one `Stretch`. `origins`: for each start and resume, the number of
    step records before it and its fingerprint. `head`: the number of lines and the digest of the last. `size`: bytes of
    all complete lines.
    """

    path: Path
    ledger: Path
    folder: RunFolder | None
    records: tuple[Record | Stretch, ...]
    trajectory: Steps
    origins: tuple[tuple[int, Mapping[str, str]], ...]
    head: tuple[int, str]
    size: int

    @property
    def start(self) -> Start | None:
        first = self.records[0] if self.records else None
        return first if isinstance(first, Start) else None

    def fingerprint(self, step: int) -> Mapping[str, str] | None:
        """Fingerprint of the process group that computed `step` of `trajectory` (0: of the first group).

        The bits of a step may depend on it. None for an unknown step.
        """
        if step == 0:
            return self.origins[0][1] if self.origins else None
        if step not in self.trajectory:
            return None
        index = bisect(self.origins, self.trajectory.places[step], key=lambda origin: origin[0])
        return self.origins[index - 1][1] if index else {}

    @property
    def torn(self) -> int:
        """Bytes of the incomplete last line that a crash may leave."""
        torn = 0
        with open_regular(self.ledger, follow=self.folder is None) as file:
            file.seek(self.size)
            while raw := file.readline(MAX_LINE + 1):
                torn = 0 if raw.endswith(b"\n") else torn + len(raw)
        return torn


def open_recorded(path: Path, *, facts: bool = False) -> Recorded:
    """Read and verify the ledger of the run folder `path`, or the ledger `path`.

    facts: also store what comparisons and curves need of each step. Raises `InputError` if the ledger is missing,
    cannot be read, or fails verification.
    """
    folder = RunFolder(path) if is_folder(path) else None
    ledger = folder.ledger if folder is not None else path
    try:
        return _read(path, ledger, folder, facts=facts)
    except FileNotFoundError:
        what = "no such run" if folder is None else f"holds no run: it has no {ledger.name}"
        raise InputError.at(path, what) from None
    except OSError as error:
        raise InputError.at(ledger, f"cannot be read: {error.strerror}") from error
    except LedgerError as error:
        raise InputError.at("", f"{error}; to list all defects: {command_line('andon', 'verify', path)}") from error


def _read(path: Path, ledger: Path, folder: RunFolder | None, *, facts: bool) -> Recorded:
    steps = Steps(ledger, folder is None)
    records: list[Record | Stretch] = []
    origins: list[tuple[int, Mapping[str, str]]] = []
    first = last = None  # of the current stretch
    count, size, raw = 0, 0, b""
    for record, raw in read_lines(ledger, follow=folder is None):
        if isinstance(record, Step):
            steps.add(record, size, facts=facts)
            first, last = first or record, record
        else:
            if first is not None and last is not None:
                records.append(Stretch(first, last))
                first = last = None
            records.append(record)
            if isinstance(record, Start | Resume):
                origins.append((len(steps.numbers), record.fingerprint))
            elif isinstance(record, Retraction):
                steps.take_back(record.step)
        count, size = count + 1, size + len(raw)
    if first is not None and last is not None:
        records.append(Stretch(first, last))
    steps.places = dict(sorted(steps.places.items()))
    head = count, chain(raw) if count else GENESIS
    return Recorded(path, ledger, folder, tuple(records), steps, tuple(origins), head, size)
