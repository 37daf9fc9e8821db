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
from itertools import accumulate, chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

import andon.data
from andon.console.messages import say
from andon.data.chat import EncodedRow, Encoding, TrainOn, encode_each
from andon.data.conversations import Conversation, Form, Reading, add_form, add_row, asked
from andon.data.origins import Origins, RowSelection, require_unchanged, stamps
from andon.data.rows import Examples, Tagged, TextRows, fingerprint
from andon.data.tokens import EncodedTexts, Tokenizer
from andon.launch.orphan import bind_to_parent
from andon.run.columns import Columns, Numbers, kept, key_of
from andon.run.provenance import source_digest
from andon.tasks.token_rows import COLUMNS as TOKEN_COLUMNS
from andon.tasks.token_rows import KINDS, FlatRows, TokenRows, columns_of
from andon.training.rows import column

COLUMNS: Mapping[str, str] = {"lines": "q", "sources": "i", "texts": "Q", **TOKEN_COLUMNS}
"""The `array` type of each column. Besides its tokens a row has its line, the index of its source among the names of
all sources (-1 for none), and the fingerprint of its input text."""
TEXT_COLUMNS: Mapping[str, str] = {
    "tokens": "i",
    "types": "i",
    "firsts": "i",
    "ends": "q",
    "ends_of_words": "q",
    "cut": "q",
}
"""The `array` type of each column of texts, with what `EncodedTexts` has."""
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
    """Rows without their texts. `fingerprint_of`: by row, of its input text. `chosen`: the ids of these rows."""

    tokens: TokenRows
    encoding: Encoding
    form: Form
    digest_of_all: str
    origins: Origins
    source: str
    sources: Sequence[str]
    """What the column `source` says of each row, else its file; empty strings if there is neither."""
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
        """One pass over the files."""
        size = sum(path.stat().st_size for path in paths)
        if size > _BIG:
            cores = len(os.sched_getaffinity(0))
            say(f"reading and tokenising {size / 1e6:.0f} MB of conversations on {cores} cores")
        reading, sha = Reading(selection), hashlib.sha256()
        origins, rows = reading.origins, reading.rows(paths)
        first = next(rows)  # a file without rows is an `InputError`
        assert reading.form is not None
        form = reading.form
        add_form(sha, form)
        names: dict[str, int] = {}
        sources, texts = array("i"), array("Q")
        encoded, end = list[EncodedRow](), 0

        def noted() -> Iterator[Conversation]:
            said = time.monotonic()
            for number, row in enumerate(chain([first], rows), start=1):
                add_row(sha, row)
                sources.append(names.setdefault(row.source, len(names)) if row.source else -1)
                texts.append(fingerprint(asked(form, row)))
                if time.monotonic() - said > _PROGRESS_S:
                    said = time.monotonic()
                    say(f"{number} rows read and tokenised")
                yield row

        def keep(row: EncodedRow | None) -> None:
            """Write the tokens of many rows at once, so that memory stays bounded. None: of those that are left."""
            nonlocal end
            encoded.extend([] if row is None else [row])
            if row is None or len(encoded) == _ROWS_AT_ONCE:
                append(columns_of(encoded, end))
                end += sum(len(each.ids) for each in encoded)
                encoded.clear()

        encoding = encode_each(
            tokenizer,
            form,
            noted(),
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
        said, how = columns.said, columns.said["encoding"]
        origins = Origins.of(paths, said["origins"], column(columns, "lines", "q"))
        names = ["" if place < 0 else str(said["names"][place]) for place in column(columns, "sources", "i")]
        skipped = tuple((int(id_), str(where), str(what)) for id_, where, what in how["skipped"])
        return TokenisedConversations(
            tokens=TokenRows({name: _mapped(columns, name, kind) for name, kind in TOKEN_COLUMNS.items()}),
            encoding=Encoding(str(how["mask_source"]), tuple(how["stops"]), tuple(how["notes"]), skipped),
            form=said["form"],
            digest_of_all=str(said["digest"]),
            origins=origins,
            source=origins.source,
            sources=origins.with_files(names),
            fingerprint_of=column(columns, "texts", "Q"),
            chosen=range(len(names)),
        )

    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory())) if folder is None else folder
        return kept(place, key, COLUMNS, make, load)


def encoded_texts(folder: Path | None, data: TextRows[Any], tokenizer: Tokenizer, max_length: int) -> EncodedTexts:
    """The tokens of the texts of `data`, from the token file in `folder`; if there is none, this process writes it.

    folder: None: nothing is written. Waits for another process that is writing the file. Raises as `Tokenizer.encode`.
    """
    texts, pairs = [row.text for row in data.rows], [row.pair for row in data.rows if row.pair is not None]

    def encode() -> EncodedTexts:
        return tokenizer.encode(texts, max_length, pairs or None, words=isinstance(data, Tagged))

    if folder is None:
        return encode()
    truncated = tokenizer.truncated

    def make(append: Callable[[Numbers], None]) -> Mapping[str, object]:
        found = encode()
        append({name: array("i", chain.from_iterable(getattr(found, name))) for name in ("tokens", "types", "firsts")})
        ends = {"ends": found.tokens, "ends_of_words": found.firsts}
        append({name: array("q", accumulate(map(len, rows))) for name, rows in ends.items()})
        append({"cut": array("q", found.cut)})
        return {}

    def load(columns: Columns) -> EncodedTexts:
        ends, word_ends, cut = (_mapped(columns, name, "q").tolist() for name in ("ends", "ends_of_words", "cut"))
        tokens, types, firsts = (_mapped(columns, name, "i") for name in ("tokens", "types", "firsts"))
        of_types = FlatRows(types, ends) if types.numel() else ()
        return EncodedTexts(FlatRows(tokens, ends), of_types, cut, FlatRows(firsts, word_ends))

    key = key_of(
        _LIBRARIES, code=source_digest(_CODE), rows=data.digest, tokenizer=tokenizer.digest, max_length=max_length
    )
    found = kept(folder, key, TEXT_COLUMNS, make, load)
    tokenizer.truncated = truncated + len(found.cut)
    return found


def _mapped(columns: Columns, name: str, kind: str) -> torch.Tensor:
    """A column, mapped into memory."""
    size, dtype = columns.counts[name], KINDS[kind]
    if not size:  # no file of no bytes can be mapped
        return torch.empty(0, dtype=dtype)
    return torch.from_file(str(columns.folder / name), shared=False, size=size, dtype=dtype)


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
