"""Tokens of a run's conversations, held in memory or kept in a folder, where processes map them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import andon.data
from andon.data.chat import EncodedRow, Encoding
from andon.run.columns import Columns, Numbers, kept, key_of
from andon.run.provenance import source_digest
from andon.tasks.token_rows import COLUMNS, KINDS, OF_TOKENS, TokenRows, columns_of
from andon_contracts.fields import Count, read_field

_LIBRARIES = ("jinja2", "tokenizers", "transformers")
_CODE = Path(andon.data.__file__).parent
_ROWS_AT_ONCE = 4096

Encode = Callable[[Callable[[EncodedRow], None]], Encoding]
"""Gives each encoded row, in order, to its argument, and returns what is to be known of all."""


@dataclass(frozen=True)
class Found:
    """Rows, and what is to be known of how they were encoded."""

    rows: TokenRows
    encoding: Encoding


def key_of_tokens(**depends_on: object) -> str:
    """The digest of what tokens depend on: what is given, the libraries that tokenise, and the code here that says how
    conversations are written."""
    return key_of(_LIBRARIES, code=source_digest(_CODE), **depends_on)


def in_memory(encode: Encode) -> Found:
    """The rows that `encode` gives, kept nowhere else."""
    rows: list[EncodedRow] = []
    encoding = encode(rows.append)
    return Found(TokenRows.of(rows), encoding)


def kept_tokens(folder: Path, key: str, encode: Encode) -> Found:
    """The rows that lie under `key` in `folder`, mapped into memory; where there are none, `encode` makes them first.

    Waits and raises as `run.columns.kept` does.
    """

    def make(append: Callable[[Numbers], None]) -> Mapping[str, object]:
        waiting: list[EncodedRow] = []
        end = 0

        def flush() -> None:
            nonlocal end
            append(columns_of(waiting, end))
            end += sum(len(row.ids) for row in waiting)
            waiting.clear()

        def keep(row: EncodedRow) -> None:
            waiting.append(row)
            if len(waiting) == _ROWS_AT_ONCE:
                flush()

        encoding = encode(keep)
        flush()
        return asdict(encoding)

    return kept(folder, key, COLUMNS, make, _mapped)


def _mapped(columns: Columns) -> Found:
    said = columns.said
    stops = tuple(read_field(Count, stop, "stops") for stop in said["stops"])
    skipped = tuple((read_field(Count, id_, "skipped"), str(where), str(what)) for id_, where, what in said["skipped"])
    encoding = Encoding(str(said["mask_source"]), stops, tuple(map(str, said["notes"])), skipped)
    tensors = {
        name: torch.from_file(str(columns.folder / name), shared=False, size=count, dtype=KINDS[COLUMNS[name]])
        for name, count in columns.counts.items()
        if count
    }
    ends = tensors["ends"]
    wanted = {name: int(ends[-1]) if name in OF_TOKENS else ends.numel() for name in COLUMNS}
    if columns.counts != wanted:
        raise ValueError(f"its columns have {columns.counts} numbers, and not {wanted}")
    return Found(TokenRows(tensors), encoding)
