"""The token cache: one process parses, checks, tokenises and digests the rows; every rank memory-maps the result.

It is written in one pass over the data files, on all cores, into a folder named by a digest of everything that the
tokens depend on: the files' stamps (path, inode, size, times), the tokenizer, the settings, the libraries and the code.
Ranks that load it open no data file.
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
from itertools import accumulate, chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

import andon.data
from andon.console.messages import say
from andon.data.chat import EncodedRow, Encoding, TrainOn, encode_each
from andon.data.conversations import Conversation, Form, Reading, add_form, add_row, halves, input_text
from andon.data.origins import Origins, RowSelection, require_unchanged, stamps
from andon.data.rows import Examples, Tagged, TextRows, fingerprint
from andon.data.tokens import EncodedTexts, Tokenizer
from andon.launch.context import bind_to_parent
from andon.run.columns import Columns, Numbers, key_of, load_or_build
from andon.run.summary import source_digest
from andon.tasks.sft import COLUMNS as TOKEN_COLUMNS
from andon.tasks.sft import KINDS, FlatRows, TokenRows, columns_of
from andon.training.rows import column

COLUMNS: Mapping[str, str] = {"lines": "q", "sources": "i", "texts": "Q", **TOKEN_COLUMNS}
"""The `array` type code of each column. `lines`, `sources` (index into the source names, or -1) and `texts` (the
fingerprint of the input text) have one value per row."""
TEXT_COLUMNS: Mapping[str, str] = {
    "tokens": "i",
    "types": "i",
    "firsts": "i",
    "ends": "q",
    "ends_of_words": "q",
    "cut": "q",
}
"""The `array` type code of each column of a cached `EncodedTexts`."""
_LIBRARIES = ("jinja2", "tokenizers", "transformers", "pyarrow")
_CODE = Path(andon.data.__file__).parent
_ROWS_AT_ONCE = 4096
_PROGRESS_S = 5.0
_BIG = 1 << 24
"""Log the start of tokenising for data files of more bytes than this."""
_BATCHES_ALONE = 8
"""Number of batches encoded in this process before worker processes are forked."""

Batch = TypeVar("Batch")
Done = TypeVar("Done")


@dataclass(frozen=True)
class TokenisedConversations(Examples):
    """Tokenised rows without texts. fingerprint_of: input text fingerprint by row id. chosen: ids of this subset."""

    tokens: TokenRows
    encoding: Encoding
    form: Form
    digest_of_all: str
    origins: Origins
    source: str
    sources: Sequence[str]
    """By row id: the value of the column `source`, else the file name if there are several files, else empty."""
    fingerprint_of: Sequence[int]
    chosen: Sequence[int]
    labels = ()

    @property
    def digest(self) -> str:
        return self.digest_of_all

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self.chosen)

    def __len__(self) -> int:
        return len(self.chosen)

    def subset(self, ids: Iterable[int]) -> Self:
        return replace(self, chosen=tuple(ids))

    def fingerprints(self) -> tuple[int, ...]:
        return tuple(self.fingerprint_of[id_] for id_ in self.ids)


def tokenised(
    folder: Path | None,
    paths: Sequence[Path],
    selection: RowSelection,
    tokenizer: Tokenizer,
    *,
    max_length: int,
    train_on: TrainOn,
    positions: int | None = None,
    pairs: bool = False,
) -> TokenisedConversations:
    """Load the tokenised rows of `paths` from the cache in `folder`, or tokenise them and write the cache.

    folder: None uses a temporary folder that is deleted on return; the mapped memory stays valid. max_length, train_on,
    positions: see `encode_each`. pairs: rows are preferences; the tokens of row n are those of rows 2n, chosen, and
    2n + 1, rejected. Blocks while another process writes the cache. Raises `InputError` with every fault of
    the rows, and if a data file changes while it is read.
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
        pairs=pairs,
    )

    def make(append: Callable[[Numbers], None]) -> Mapping[str, object]:
        size = sum(path.stat().st_size for path in paths)
        if size > _BIG:
            cores = len(os.sched_getaffinity(0))
            say(f"reading and tokenising {size / 1e6:.0f} MB of conversations on {cores} cores")
        reading, sha = Reading(selection, pairs=pairs), hashlib.sha256()
        origins, rows = reading.origins, reading.rows(paths)
        first = next(rows)  # files without rows raise `InputError`
        assert reading.form is not None
        form = reading.form
        add_form(sha, form)
        names: dict[str, int] = {}
        sources, texts = array("i"), array("Q")
        encoded, end = list[EncodedRow](), 0

        def digested_rows() -> Iterator[Conversation]:
            reported = time.monotonic()
            for number, row in enumerate(chain([first], rows), start=1):
                add_row(sha, row)
                sources.append(names.setdefault(row.source, len(names)) if row.source else -1)
                texts.append(fingerprint(input_text(form, row)))
                if time.monotonic() - reported > _PROGRESS_S:
                    reported = time.monotonic()
                    say(f"{number} rows read and tokenised")
                yield row

        def keep(row: EncodedRow | None) -> None:
            """Buffer rows and write them in blocks, so that memory stays bounded. None flushes the buffer."""
            nonlocal end
            encoded.extend([] if row is None else [row])
            if row is None or len(encoded) == _ROWS_AT_ONCE:
                append(columns_of(encoded, end))
                end += sum(len(each.ids) for each in encoded)
                encoded.clear()

        encoding = encode_each(
            tokenizer,
            form,
            halves(digested_rows()) if pairs else digested_rows(),
            max_length,
            train_on,
            keep,
            skip_bad=selection.skip_bad,
            positions=positions,
            map_batches=on_all_cores,
        )
        keep(None)
        append({"lines": origins.lines, "sources": sources, "texts": texts})
        require_unchanged(paths, before)
        return {
            "form": form,
            "digest": sha.hexdigest(),
            "names": list(names),
            "origins": origins.described(),
            "encoding": asdict(encoding),
        }

    def load(columns: Columns) -> TokenisedConversations:
        facts, stored = columns.said, columns.said["encoding"]
        tokenizer.read.append(columns.digest)
        origins = Origins.of(paths, facts["origins"], column(columns, "lines", "q"))
        names = ["" if place < 0 else str(facts["names"][place]) for place in column(columns, "sources", "i")]
        skipped = tuple((int(id_), str(where), str(what)) for id_, where, what in stored["skipped"])
        return TokenisedConversations(
            tokens=TokenRows({name: mapped(columns, name, kind) for name, kind in TOKEN_COLUMNS.items()}),
            encoding=Encoding(str(stored["mask_source"]), tuple(stored["stops"]), tuple(stored["notes"]), skipped),
            form=facts["form"],
            digest_of_all=str(facts["digest"]),
            origins=origins,
            source=origins.source,
            sources=origins.with_files(names),
            fingerprint_of=column(columns, "texts", "Q"),
            chosen=range(len(names)),
        )

    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory())) if folder is None else folder
        return load_or_build(place, key, COLUMNS, make, load)


def encoded_texts(folder: Path | None, data: TextRows[Any], tokenizer: Tokenizer, max_length: int) -> EncodedTexts:
    """Load the tokens of the texts of `data` from the cache in `folder`, or tokenise the texts and write the cache.

    folder: None disables the cache. Blocks while another process writes it. Raises as `Tokenizer.encode`.
    """
    texts, pairs = [row.text for row in data.rows], [row.pair for row in data.rows if row.pair is not None]

    def encode() -> EncodedTexts:
        return tokenizer.encode(texts, max_length, pairs or None, words=isinstance(data, Tagged))

    if folder is None:
        return encode()
    truncated = tokenizer.truncated

    def make(append: Callable[[Numbers], None]) -> Mapping[str, object]:
        fresh = encode()
        append({name: array("i", chain.from_iterable(getattr(fresh, name))) for name in ("tokens", "types", "firsts")})
        ends = {"ends": fresh.tokens, "ends_of_words": fresh.firsts}
        append({name: array("q", accumulate(map(len, rows))) for name, rows in ends.items()})
        append({"cut": array("q", fresh.cut)})
        return {}

    def load(columns: Columns) -> EncodedTexts:
        tokenizer.read.append(columns.digest)
        ends, word_ends, cut = (mapped(columns, name, "q").tolist() for name in ("ends", "ends_of_words", "cut"))
        tokens, types, firsts = (mapped(columns, name, "i") for name in ("tokens", "types", "firsts"))
        of_types = FlatRows(types, ends) if types.numel() else ()
        return EncodedTexts(FlatRows(tokens, ends), of_types, cut, FlatRows(firsts, word_ends))

    key = key_of(
        _LIBRARIES, code=source_digest(_CODE), rows=data.digest, tokenizer=tokenizer.digest, max_length=max_length
    )
    result = load_or_build(folder, key, TEXT_COLUMNS, make, load)
    tokenizer.truncated = truncated + len(result.cut)
    return result


def mapped(columns: Columns, name: str, kind: str) -> torch.Tensor:
    """A column as a memory-mapped tensor. kind: its `array` type code."""
    size, dtype = columns.counts[name], KINDS[kind]
    if not size:  # an empty file cannot be mapped
        return torch.empty(0, dtype=dtype)
    return torch.from_file(str(columns.folder / name), shared=False, size=size, dtype=dtype)


_encode: Any = None
"""In a worker process: the function that encodes a batch."""


def on_all_cores(encode: Callable[[Batch], Done], batches: Iterator[Batch]) -> Iterator[Done]:
    """`map(encode, batches)` that forks one worker process per core after the first `_BATCHES_ALONE` batches.

    Workers inherit `encode` and end with this process. Results keep the order of the batches; memory is bounded.
    """
    for _, batch in zip(range(_BATCHES_ALONE), batches, strict=False):
        yield encode(batch)
    first = next(batches, None)
    if first is None:
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else the library warns about forks
    cores = len(os.sched_getaffinity(0))
    pool = ProcessPoolExecutor(cores, get_context("fork"), _start_worker, (encode, os.getpid()))
    pending: deque[Future[Done]] = deque()
    try:
        for batch in chain([first], batches):
            pending.append(pool.submit(_encode_batch, batch))
            if len(pending) > 2 * cores:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(encode: object, parent: int) -> None:
    global _encode
    bind_to_parent(parent)
    _encode = encode


def _encode_batch(batch: object) -> Any:
    return _encode(batch)
