"""The ledger of `andon train` and of a watch: its kinds of lines, their bytes and hash chain, and its file.

A line is one JSON object with sorted keys and no spaces, ended by a line feed: `{"kind":K,"prev":H,"seq":n,"v":5,...}`.
`seq` counts from 0. `prev` is the first 16 hexadecimal digits of SHA-256 of the previous line without its line feed,
and zeros in the first line. The chain detects corruption, not tampering: an attacker can rewrite all later lines too.

A reader refuses an unknown version or field, so a new field needs a new version. A line omits fields whose value is
None: a watch and the falsifier's witness know less about a step than our own trainer. A file has one writer, which
appends whole lines; readers verify them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self, get_args

from andon_contracts.fields import Count, Hex16, Part, Real, json_object, no_constant, read_field
from andon_contracts.untrusted import open_regular
from andon_contracts.violation import Finding

SCHEMA_VERSION = 5
GENESIS = "0" * 16  # `prev` of the first line
MAX_LINE = 1 << 24  # the most bytes of a line that is written or read


@dataclass(frozen=True)
class Plan(Part):
    """`ids`: the rows of an epoch, if they are listed. `task`: None is classification."""

    rows: Count | None
    batch_size: Count | None
    micro_batches: Count | None
    seed: Count | None
    epochs: Count | None
    steps: Count | None
    ids: tuple[Count, ...] | None = None
    task: str | None = None


@dataclass(frozen=True)
class StepDigests(Part):
    """Digests of the planned content, of the reduced gradient before clipping, and of the state after the update."""

    content: Hex16 | None
    gradient: Hex16 | None
    weights: Hex16 | None
    optimizer: Hex16 | None


@dataclass(frozen=True)
class RankPart(Part):
    """One rank in a step: its micro-batches (`leaves`), its rows, and digests of its state, except of shards."""

    rank: Count
    leaves: tuple[Count, ...]
    ids: tuple[Count, ...]
    weights: Hex16 | None
    gradient: Hex16 | None = None
    optimizer: Hex16 | None = None
    content: Hex16 | None = None


@dataclass(frozen=True)
class Start(Part):
    """The first line of a run. `writer`: None is our trainer. `algorithms`: of digests, by the name of the digest.

    `tensors`: of a watch, the dtype and shape of each trained tensor, in order.
    """

    kind: ClassVar[str] = "start"
    run: str
    fingerprint: Mapping[str, str]
    identity: str
    plan: Plan
    digests: Mapping[str, Hex16]
    world: Count
    backend: str
    writer: str | None = None
    algorithms: Mapping[str, str] | None = None
    tensors: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Step(Part):
    """One update. `step` is its number from 1, `position` that of its first row in the epoch, `ids` its rows in order.

    `loss` is the mean over `terms` terms (None: one per row of `count`), `grad_norm` the norm before clipping,
    `correct` the number of terms predicted right. A watch adds `weights_norm`, the 2-norm of the trained parameters
    after the update; `gradient_at`, "optimizer" if digest and norm are of the optimizer's input because the reduced
    gradient was not reported; `optimizer_index` from 0 if it watches several (the weights are then of this one);
    `skipped`, if the loss scaler skipped the update; `draws`, the modules that draw random numbers (first updates
    only); and `state`, what a resumed run is compared with: digests of rows and random streams. The falsifier's witness
    adds `tensors`, the names of tensors that are stored elsewhere.
    """

    kind: ClassVar[str] = "step"
    step: Count
    epoch: Count | None
    position: Count | None
    ids: tuple[Count, ...]
    count: Count | None
    lr: Real
    loss: Real | None
    grad_norm: Real | None
    correct: Count | None
    world: Count
    backend: str
    digests: StepDigests
    ranks: tuple[RankPart, ...]
    weights_norm: Real | None = None
    gradient_at: str | None = None
    optimizer_index: Count | None = None
    skipped: bool | None = None
    tensors: Mapping[str, str] | None = None
    terms: Count | None = None
    draws: str | None = None
    state: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Evaluation(Part):
    """Scores after `step` updates on `rows` rows. `confusion`: the digest of the file with the confusion matrix."""

    kind: ClassVar[str] = "eval"
    step: Count
    epoch: Count | None
    rows: Count
    scores: Mapping[str, Real]
    confusion: Hex16 | None = None


@dataclass(frozen=True)
class Saved(Part):
    """A complete checkpoint: the name of its folder and the digest of its tensors."""

    kind: ClassVar[str] = "checkpoint"
    step: Count
    name: str
    digest: Hex16
    best: bool = False


@dataclass(frozen=True)
class Resume(Part):
    """The run continues after `step` updates from checkpoint `name` (None: the start); `torn` bytes were cut off."""

    kind: ClassVar[str] = "resume"
    step: Count
    identity: str
    fingerprint: Mapping[str, str]
    digests: Mapping[str, Hex16]
    world: Count
    backend: str
    name: str | None = None
    torn: Count = 0
    writer: str | None = None
    algorithms: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Broken(Part):
    """A violation: the clause and its finding. `applied`: it was found after the update was made. `likely`: its cause.

    `action` of a watch: "raised", "warned", "called" (a function of the user), "suspected" (a warning about something
    that a correct loop may do too). None: not of a watch; the violation ended the run.
    """

    kind: ClassVar[str] = "violation"
    clause: str
    step: Count
    ranks: tuple[Count, ...]
    tensor: str
    seen: str
    details: Mapping[str, str] = field(default_factory=dict)
    action: str | None = None
    applied: bool | None = None
    likely: str | None = None

    @classmethod
    def of(cls, clause: str, found: Finding, action: str | None = None, applied: bool | None = None) -> Self:
        what = clause, found.step, found.ranks, found.tensor, found.seen, dict(found.details)
        return cls(*what, action, applied, found.likely)


@dataclass(frozen=True)
class Retraction(Part):
    """The updates after the checkpoint of `step`, up to `last`, no longer count: any may have caused the violation.

    A resumed run starts at `step`; its updates are not compared with these.
    """

    kind: ClassVar[str] = "retraction"
    step: Count
    last: Count
    clause: str
    seen: str


@dataclass(frozen=True)
class End(Part):
    """The run ended after `step` updates, for `reason`: finished, early-stopping, preempted, violation, failed."""

    kind: ClassVar[str] = "end"
    step: Count
    reason: str
    digests: Mapping[str, Hex16]
    final_loss: Real | None = None
    violations: Count = 0


Record = Start | Step | Evaluation | Saved | Resume | Broken | Retraction | End
KINDS: Mapping[str, type[Record]] = {record.kind: record for record in get_args(Record)}


class LineTooLong(ValueError):
    """A record takes more than `MAX_LINE` bytes."""


def encode(record: Record, seq: int, prev: str) -> bytes:
    """The line of `record`, line feed included.

    Raises `ValueError` for a record that readers would refuse, and `LineTooLong`.
    """
    body = record.to_json()
    # A line that readers refuse would lose every line after it.
    if type(record).from_json(body) != record:
        raise ValueError(f"a {record.kind} record does not survive JSON: a field has a value of a wrong type")
    envelope = {"v": SCHEMA_VERSION, "kind": record.kind, "seq": read_field(Count, seq, "seq"), "prev": prev}
    read_field(Hex16, prev, "prev")
    line = json.dumps(body | envelope, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
    if len(line) > MAX_LINE:
        raise LineTooLong(f"a {record.kind} record takes {len(line)} bytes, more than {MAX_LINE}")
    return line


def decode_line(line: bytes, count: int, head: str) -> Record:
    """The record of `line`. Raises `ValueError` unless it follows `count` lines, the last with digest `head`."""
    if len(line) > MAX_LINE:
        raise ValueError(f"the line has {len(line)} bytes, more than {MAX_LINE}")
    try:
        data = _DECODER.decode(line.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a line of JSON: {error}") from None
    version, kind = json_object(data, "the line").pop("v", None), data.pop("kind", None)
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ValueError(f"version {version!r} of the ledger format is not supported, only {SCHEMA_VERSION}")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"unknown kind of record {kind!r}")
    seq, prev = read_field(Count, data.pop("seq", None), "seq"), read_field(Hex16, data.pop("prev", None), "prev")
    record = KINDS[kind].from_json(data)
    if seq != count:
        raise ValueError(f"the line has sequence number {seq}, expected {count}")
    if prev != head:
        raise ValueError(f"line {count} or {count + 1} was changed: `prev` is {prev}, expected {head}")
    return record


def chain(previous_line: bytes) -> str:
    """The digest of `previous_line`, which the next line has as `prev`. A line feed at its end is ignored."""
    return hashlib.sha256(previous_line.removesuffix(b"\n")).hexdigest()[:16]


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    data = dict(pairs)
    if len(data) < len(pairs):
        twice = next(key for at, (key, _) in enumerate(pairs) if key in dict(pairs[:at]))
        raise ValueError(f"duplicate key {twice!r} in a JSON object")
    return data


# Python's decoder accepts more than JSON: NaN, and duplicate keys, of which other decoders may use the first.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=no_constant)


class LedgerError(ValueError):
    """A file is not a ledger, is damaged, or was changed by another program. The message names the file."""


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Write all of `data`; a single `os.write` may write less."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def outside_change(handle: int, path: Path, size: int) -> str:
    """Describes how another program changed the file at `path`, to which only `handle` should append; "" if none did.

    size: the bytes that the file should have. A write to a file that lost its name or its start (log rotation by
    `copytruncate`) succeeds, but its lines are lost.
    """
    now = os.fstat(handle)
    try:
        linked = os.path.samestat(now, path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        linked = False
    if not linked:
        return "was removed, moved or replaced while the run wrote to it; its lines would be lost"
    if now.st_size == size:
        return ""
    done = f"was {'truncated' if now.st_size < size else 'written to'} by another program while the run wrote to it"
    return f"{done}: it has {now.st_size} bytes, the run wrote {size}; exclude it from log rotation"


class LedgerFile:
    """Appends records to the ledger at `path`, which is created if it does not exist.

    Existing lines are verified first. An unfinished last line, as a crash leaves it, is cut off; `torn` is its number
    of bytes. Raises `LedgerError`, and changes nothing, for any other damage, and `OSError` if the disk refuses. There
    is one writer: `append`, `sync` and `close` raise `LedgerError` if another program truncated, wrote to or replaced
    the file. A pipe or a device is written to and never read.
    """

    def __init__(self, path: Path, *, exclusive: bool = False) -> None:
        """exclusive: lock the file. Raises `BlockingIOError`, and changes nothing, if another process has the lock."""
        self.path = path
        self._absolute = path.absolute()  # the process may change its working folder
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            # Lock before cutting: another process may be writing the line that looks torn.
            if exclusive:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._is_regular = stat.S_ISREG(os.fstat(self._handle).st_mode)
            self._count, self._digest, self._size, self.torn = 0, GENESIS, 0, 0
            if self._is_regular:
                for _, line in read_lines(path):
                    self._count, self._digest, self._size = self._count + 1, chain(line), self._size + len(line)
                self.torn = os.fstat(self._handle).st_size - self._size
            if self.torn:
                # Keys are sorted, so a first line begins with one of these. Some disks leave zeros after a crash.
                piece, starts = os.pread(self._handle, 16, 0), (b'{"algorithms":', b'{"backend":')
                begins = not piece.strip(b"\0") or any(start[: len(piece)] == piece[: len(start)] for start in starts)
                if not self._count and not begins:
                    raise LedgerError(f"{path}:1: not the beginning of a ledger")
                os.ftruncate(self._handle, self._size)
                os.fsync(self._handle)
            fsync_folder(path.parent)  # the name of a new file must survive a power cut as its lines do
        except BaseException:
            os.close(self._handle)
            raise

    @property
    def head(self) -> tuple[int, str]:
        """The number of lines and the digest of the last line, which checkpoints and summaries quote."""
        return self._count, self._digest

    def append(self, record: Record) -> None:
        """Write `record` as the next line; if the disk refuses (`OSError`), nothing of the line remains."""
        line = encode(record, self._count, self._digest)
        self._require_unchanged()
        try:
            write_all(self._handle, line)
            self._count, self._digest, self._size = self._count + 1, chain(line), self._size + len(line)
        except BaseException:
            if self._is_regular:
                os.ftruncate(self._handle, self._size)
            raise

    def sync(self) -> None:
        """Make all lines so far survive a power cut; required before a checkpoint quotes the head."""
        if self._is_regular:
            self._require_unchanged()
            os.fsync(self._handle)

    def _require_unchanged(self) -> None:
        if self._is_regular and (change := outside_change(self._handle, self._absolute, self._size)):
            raise LedgerError(f"{self.path}: {change}")

    def close(self) -> None:
        if self._handle >= 0:
            try:
                self.sync()
            finally:
                os.close(self._handle)
                self._handle = -1


def read_lines(path: Path, *, follow: bool = False) -> Iterator[tuple[Record, bytes]]:
    """The records of the ledger at `path` and their lines, verified as they are read, without a torn last line.

    follow: follow `path` if it is a link. Raises `LedgerError` at the first wrong line, `OSError` as `open_regular`.
    """
    count, digest = 0, GENESIS
    with open_regular(path, follow=follow) as file:
        while raw := file.readline(MAX_LINE + 1):
            if not raw.endswith(b"\n") and len(raw) <= MAX_LINE:
                return  # torn by a crash; the next writer cuts it off
            try:
                record = decode_line(raw, count, digest)
            except ValueError as error:
                raise LedgerError(f"{path}:{count + 1}: {error}") from None
            yield record, raw
            count, digest = count + 1, chain(raw)
