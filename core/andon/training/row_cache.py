"""Rows of texts as columns in a folder: the process that read the data files writes them, ranks open no data file."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import andon.data
from andon.config.schema import Data
from andon.console.problems import InputError, Problem
from andon.data.origins import Origins, RowSelection, Stamp, stamps
from andon.data.rows import DataSet, Examples, LabelSets, Row, Tagged, Targets, TextRows
from andon.run.columns import Columns, Numbers, kept, key_of
from andon.run.provenance import source_digest

_KINDS = {"texts": "B", "ends": "q", "labels": "d", "label_ends": "q", "lines": "q"}
"""The bytes of all texts and where each ends; the numbers of all labels and where each row's end; the rows' lines."""
_CODE = Path(andon.data.__file__).parent
_READ = ("text_column", "text_pair_column", "label_column", "label_separator")
_KIND_OF: Mapping[str, type[TextRows[Any]]] = {each.kind: each for each in (DataSet, LabelSets, Targets, Tagged)}


def require_unchanged(paths: Sequence[Path], *before: Sequence[Stamp]) -> None:
    """Raise `InputError` if a file has another stamp now than at any time `before`."""
    if any(stamps(paths) != each for each in before):
        raise InputError([Problem(", ".join(map(str, paths)), "has changed while it was read; start again")])


def kept_rows(
    folder: Path,
    data: Data,
    task: str,
    paths: Sequence[Path],
    labels: Sequence[str] | None,
    selection: RowSelection,
    read: Callable[[], Examples],
) -> Examples:
    """The rows of `paths` as they lie in `folder`; if they do not, `read` reads them, and they are written.

    data, task, labels, selection: what `read` depends on besides the files. Waits for another process that writes them.
    Raises what `read` does, and `InputError` if a file changes meanwhile.
    """
    before = stamps(paths)
    columns = data.model_dump(include={*_READ})
    chosen = [selection.skip_bad, selection.limit, labels]
    key = key_of(("pyarrow",), code=source_digest(_CODE), files=before, task=task, columns=columns, selection=chosen)

    def make(append: Callable[[Numbers], None]) -> Mapping[str, object]:
        found = read()
        assert isinstance(found, TextRows)
        assert found.origins is not None
        require_unchanged(paths, before, found.origins.stamps)
        texts = [text.encode() for row in found.rows for text in row.texts]
        numbers = [row.label if isinstance(row.label, tuple) else (row.label,) for row in found.rows]
        append(
            {
                "texts": array("B", b"".join(texts)),
                "ends": array("q", accumulate(map(len, texts))),
                "labels": array("d", chain.from_iterable(numbers)),
                "label_ends": array("q", accumulate(map(len, numbers))),
                "lines": found.origins.lines,
            }
        )
        return {
            "kind": found.kind,
            "labels": list(found.labels),
            "texts": len(found.rows[0].texts),
            "units": list(found.origins.units),
            "sizes": list(found.origins.sizes),
            "notes": found.origins.notes,
            "skipped": [[problem.where, problem.what] for problem in found.origins.skipped],
        }

    return kept(folder, key, _KINDS, make, lambda columns: _rows_of(paths, columns))


def _rows_of(paths: Sequence[Path], columns: Columns) -> TextRows[Any]:
    said, held = columns.said, {name: array(kind) for name, kind in _KINDS.items()}
    for name, column in held.items():
        column.frombytes((columns.folder / name).read_bytes())
    made, number = _KIND_OF[said["kind"]], float if said["kind"] == Targets.kind else int
    texts = [each.decode() for each in _slices(held["texts"].tobytes(), held["ends"])]
    labels = [tuple(map(number, each)) for each in _slices(held["labels"], held["label_ends"])]
    one = made in (DataSet, Targets)
    rows = tuple(
        Row(place, text, label[0] if one else label, pair)
        for place, (text, label, pair) in enumerate(
            zip(
                texts[:: said["texts"]],
                labels,
                texts[1::2] if said["texts"] == 2 else [None] * len(labels),
                strict=True,
            )
        )
    )
    origins = Origins.of(paths, said["units"], said["sizes"], held["lines"])
    origins.notes = list(said["notes"])
    origins.skipped = [Problem(where, what) for where, what in said["skipped"]]
    return made(rows, tuple(said["labels"]), origins.source, origins)


def _slices(values: Any, ends: Sequence[int]) -> Iterator[Any]:
    start = 0
    for end in ends:
        yield values[start:end]
        start = end
