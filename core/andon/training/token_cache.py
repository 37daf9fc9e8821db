"""The token file of a run's conversations: one process parses, checks, tokenises and digests the rows, all map it.

It is written in one pass over the data files, on all cores, into a folder named by a digest of all that the tokens
depend on: the files' stamps (path, size, times), the tokenizer, the settings, the libraries and the code. Ranks that
load it open no data file.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

import torch

import andon.data
from andon.console.messages import say
from andon.console.problems import Problem
from andon.data.chat import EncodedRow, Encoding, TrainOn, encode_each
from andon.data.conversations import Conversation, Form, Reading, add_form, add_row, asked
from andon.data.origins import Origins, RowSelection, require_unchanged, stamps
from andon.data.rows import Examples, fingerprint
from andon.data.tokens import Tokenizer
from andon.launch.orphan import bind_to_parent
from andon.run.columns import Columns, Numbers, kept, key_of
from andon.run.provenance import source_digest
from andon.tasks.token_rows import COLUMNS as TOKEN_COLUMNS
from andon.tasks.token_rows import KINDS, OF_TOKENS, TokenRows, columns_of
from andon_contracts.fields import Count, read_field

COLUMNS: Mapping[str, str] = {"lines": "q", "sources": "i", "texts": "Q", **TOKEN_COLUMNS}
"""The `array` type of each column. Besides its tokens a row has its line, the index of its source among the names of
all sources (-1 for none), and the fingerprint of its input text."""
_LIBRARIES = ("jinja2", "tokenizers", "transformers", "pyarrow")
_CODE = Path(andon.data.__file__).parent
_ROWS_AT_ONCE = 4096
_PROGRESS_S = 5.0
_BIG = 1 << 24
"""From this many bytes of data on, a line announces the pass."""
_BATCHES_ALONE = 8
"""Batches that are encoded in this process before others are forked."""

Batch = TypeVar("Batch")
Done = TypeVar("Done")


@dataclass(frozen=True)
class TokenisedConversations(Examples):
    """Rows without their texts. `fingerprint_of`: by row, of its input text. `chosen`: the ids of a part; None: all."""

    tokens: TokenRows
    encoding: Encoding
    form: Form
    digest_of_all: str
    origins: Origins
    source: str
    sources: Sequence[str]
    """What the column `source` says of each row, else its file; empty strings if there is neither."""
    fingerprint_of: Sequence[int]
    chosen: tuple[int, ...] | None = None
    labels = ()

    def about(self) -> str:
        return "task sft"

    @property
    def digest(self) -> str:
        return self.digest_of_all

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(range(len(self.fingerprint_of))) if self.chosen is None else self.chosen

    def __len__(self) -> int:
        return len(self.fingerprint_of) if self.chosen is None else len(self.chosen)

    def subset(self, ids: Iterable[int]) -> Self:
        chosen, here = tuple(ids), {*self.ids}
        missing = next((id_ for id_ in chosen if id_ not in here), None)
        if missing is not None:
            raise KeyError(missing)
        return replace(self, chosen=chosen)

    def source_of(self, id_: int) -> str:
        return self.sources[id_]

    def fingerprints(self) -> tuple[int, ...]:
        return tuple(self.fingerprint_of[id_] for id_ in self.ids)

    def told(self, id_: int) -> None:
        """None: the texts are not kept."""


def tokenised(
    folder: Path | None,
    paths: Sequence[Path],
    selection: RowSelection,
    tokenizer: Tokenizer,
    *,
    max_length: int,
    train_on: TrainOn,
    positions: int | None = None,
) -> TokenisedConversations:
    """The rows of `paths`, from the token file in `folder`; if there is no such file, this process writes it.

    folder: None: a temporary folder, which ends with this call; the mapped file stays. max_length, train_on, positions:
    as for `encode_each`. Waits for another process that is writing the file. Raises `InputError` with all that is wrong
    with the rows, and if a data file changes meanwhile.
    """
    before = stamps(paths)
    key = key_of(
        _LIBRARIES,
        code=source_digest(_CODE),
        files=before,
        selection=[selection.skip_bad, selection.limit],
        tokenizer=tokenizer.digest,
        max_length=max_length,
        train_on=train_on,
    )

    def make(append: Callable[[Numbers], None]) -> Mapping[str, object]:
        size = sum(path.stat().st_size for path in paths)
        if size > _BIG:
            cores = len(os.sched_getaffinity(0))
            say(f"reading and tokenising {size / 1e6:.0f} MB of conversations on {cores} cores")
        one_pass = _Pass(paths, selection, append)
        encoding = encode_each(
            tokenizer,
            one_pass,
            max_length,
            train_on,
            one_pass.keep,
            skip_bad=selection.skip_bad,
            positions=positions,
            map_batches=on_all_cores,
        )
        said = one_pass.finish()
        require_unchanged(paths, before)
        return said | {"encoding": asdict(encoding)}

    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory())) if folder is None else folder
        return kept(place, key, COLUMNS, make, lambda columns: _mapped(tuple(paths), selection, columns))


class _Pass:
    """One pass over the files, for `encode_each`. All columns go to `append`, so that memory stays bounded."""

    def __init__(self, paths: Sequence[Path], selection: RowSelection, append: Callable[[Numbers], None]) -> None:
        self._reading, self._sha, self._append = Reading(selection), hashlib.sha256(), append
        self._names: dict[str, int] = {}
        self._sources, self._texts = array("i"), array("Q")
        self._encoded: list[EncodedRow] = []
        self._end = 0
        rows = self._reading.rows(paths)
        first = next(rows, None)
        assert first is not None, "a file without rows is an `InputError`"
        self.rows = self._noted(chain([first], rows))

    @property
    def form(self) -> Form:
        assert self._reading.form is not None
        return self._reading.form

    def _noted(self, rows: Iterable[Conversation]) -> Iterator[Conversation]:
        add_form(self._sha, self.form)
        said = time.monotonic()
        for number, row in enumerate(rows, start=1):
            add_row(self._sha, row)
            self._sources.append(self._names.setdefault(row.source, len(self._names)) if row.source else -1)
            self._texts.append(fingerprint(asked(self.form, row)))
            if number % _ROWS_AT_ONCE == 0:
                self._flush_rows()
            if time.monotonic() - said > _PROGRESS_S:
                said = time.monotonic()
                say(f"{number} rows read and tokenised")
            yield row

    def keep(self, row: EncodedRow) -> None:
        self._encoded.append(row)
        if len(self._encoded) == _ROWS_AT_ONCE:
            self._flush_tokens()

    def _flush_rows(self) -> None:
        lines = self._reading.origins.pop_lines()
        self._append({"lines": lines, "sources": self._sources, "texts": self._texts})
        self._sources, self._texts = array("i"), array("Q")

    def _flush_tokens(self) -> None:
        self._append(columns_of(self._encoded, self._end))
        self._end += sum(len(row.ids) for row in self._encoded)
        self._encoded = []

    def finish(self) -> dict[str, object]:
        """Flush the columns, and return the rest of what is known about the rows, for JSON."""
        self._flush_rows()
        self._flush_tokens()
        origins = self._reading.origins
        return {
            "form": self.form,
            "digest": self._sha.hexdigest(),
            "sizes": list(origins.sizes),
            "units": list(origins.units),
            "names": list(self._names),
            "skipped": [[problem.where, problem.what] for problem in self._reading.problems.skipped],
        }


def _mapped(paths: tuple[Path, ...], selection: RowSelection, columns: Columns) -> TokenisedConversations:
    said, numbers = columns.said, {}
    for name, kind in COLUMNS.items():
        if name not in TOKEN_COLUMNS:
            numbers[name] = array(kind)
            numbers[name].frombytes((columns.folder / name).read_bytes())
    if said["form"] not in get_args(Form) or not len(said["sizes"]) == len(said["units"]) == len(paths):
        raise ValueError("its index is not of these files")
    tensors = {
        name: torch.from_file(str(columns.folder / name), shared=False, size=columns.counts[name], dtype=KINDS[kind])
        for name, kind in TOKEN_COLUMNS.items()
        if columns.counts[name]
    }
    rows = sum(said["sizes"])
    wanted = {name: int(tensors["ends"][-1]) if name in OF_TOKENS else rows for name in COLUMNS}
    if not rows or columns.counts != wanted:
        raise ValueError(f"its columns have {columns.counts} numbers, and not {wanted}")
    how = said["encoding"]
    stops = tuple(read_field(Count, stop, "stops") for stop in how["stops"])
    skipped = tuple((read_field(Count, id_, "skipped"), str(where), str(what)) for id_, where, what in how["skipped"])
    encoding = Encoding(str(how["mask_source"]), stops, tuple(map(str, how["notes"])), skipped)
    origins = Origins.of(paths, said["units"], said["sizes"], numbers["lines"], selection.limit)
    origins.skipped = [Problem(where, what) for where, what in said["skipped"]]
    names = ["" if place < 0 else str(said["names"][place]) for place in numbers["sources"]]
    return TokenisedConversations(
        tokens=TokenRows(tensors),
        encoding=encoding,
        form=said["form"],
        digest_of_all=str(said["digest"]),
        origins=origins,
        source=origins.source,
        sources=origins.with_files(names),
        fingerprint_of=numbers["texts"],
    )


_encode: Any = None
"""In a forked process: the function that encodes a batch."""


def on_all_cores(encode: Callable[[Batch], Done], batches: Iterator[Batch]) -> Iterator[Done]:
    """`map(encode, batches)`; after the first batches, in processes forked from this one, one a core.

    They inherit `encode` and end with this process. Results come in the order of the batches; few are in memory.
    """
    for _, batch in zip(range(_BATCHES_ALONE), batches, strict=False):
        yield encode(batch)
    first = next(batches, None)
    if first is None:
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else the library warns about the forks
    cores = len(os.sched_getaffinity(0))
    pool = ProcessPoolExecutor(cores, get_context("fork"), _begin, (encode, os.getpid()))
    waiting: deque[Future[Done]] = deque()
    try:
        for batch in chain([first], batches):
            waiting.append(pool.submit(_call, batch))
            if len(waiting) > 2 * cores:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(encode: object, parent: int) -> None:
    global _encode
    bind_to_parent(parent)
    _encode = encode


def _call(batch: object) -> Any:
    return _encode(batch)
