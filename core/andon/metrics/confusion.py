"""Sparse confusion matrices and their files: `confusion/DIGEST.json` in a run folder. The ledger records DIGEST.

K classes have K * K cells, too many for a ledger line or a summary if K is in the thousands. At most one cell per
evaluated row is nonzero, and the file lists only the nonzero cells, ascending, without spaces, with a final line feed:
`{"cells":[[actual,predicted,rows],...],"classes":K}`. DIGEST is the first 16 hexadecimal digits of its SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from andon.console.problems import InputError
from andon.run.atomic import storage, write_whole
from andon_contracts.fields import Hex16, read_field
from andon_contracts.untrusted import MOST_JSON, read_regular

if TYPE_CHECKING:
    import torch

MOST_BYTES = MOST_JSON
"""Size limit in bytes for reading a file."""
_MOST_CLASSES = 1 << 20


@dataclass(frozen=True)
class Confusion:
    """How many rows of each class were predicted as each class.

    classes: the number of classes. cells: the nonzero cells (actual, predicted, rows), ascending.
    """

    classes: int
    cells: tuple[tuple[int, int, int], ...]

    def table(self) -> list[list[int]]:
        """The dense matrix, [actual][predicted]. It has classes * classes entries, so use it for few classes only."""
        table = [[0] * self.classes for _ in range(self.classes)]
        for actual, predicted, rows in self.cells:
            table[actual][predicted] = rows
        return table


def confusion_of(predicted: torch.Tensor, actual: torch.Tensor, num_labels: int) -> Confusion:
    """Count a confusion matrix. predicted, actual: int64 [rows] class ids.

    Memory and time are linear in the rows, independent of the number of classes.
    """
    counted = Counter(zip(actual.tolist(), predicted.tolist(), strict=True))
    return Confusion(num_labels, tuple((*cell, rows) for cell, rows in sorted(counted.items())))


def digest_of(confusion: Confusion) -> str:
    """The DIGEST in the name of the matrix's file: 16 hexadecimal digits."""
    return _digest(_encoded(confusion))


def write_confusion(folder: Path, confusion: Confusion) -> None:
    """Write the file of `confusion` into `folder` atomically. Raises `InputError` if the disk fails."""
    data = _encoded(confusion)
    with storage(folder):
        folder.mkdir(exist_ok=True)
    write_whole(folder / f"{_digest(data)}.json", data)


def read_confusion(folder: Path, digest: object) -> Confusion:
    """Load the matrix whose `digest` is in a ledger or a summary.

    Raises `InputError` naming the file if it is missing, larger than `MOST_BYTES`, malformed or has another digest.
    """
    try:
        path = folder / f"{read_field(Hex16, digest, 'confusion')}.json"
    except ValueError as error:
        raise InputError.at(folder.parent, f"quotes no confusion matrix: {error}") from error
    try:
        data = read_regular(path, MOST_BYTES)
        if _digest(data) != digest:
            raise ValueError(f"its bytes have the digest {_digest(data)}, the ledger quotes {digest}")
        return _decoded(data)
    except OSError as error:
        raise InputError.at(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        what = f"is not the confusion matrix that was written: {error}; put the file back as it was"
        raise InputError.at(path, what) from error


def most_bytes(classes: int, rows: int) -> int:
    """Upper bound of the file size in bytes for `classes` classes and `rows` evaluated rows."""
    cell = 2 * len(str(classes)) + len(str(rows)) + len("[,,],")
    return min(classes * classes, rows) * cell + 100


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _encoded(confusion: Confusion) -> bytes:
    body = {"cells": confusion.cells, "classes": confusion.classes}
    return (json.dumps(body, separators=(",", ":")) + "\n").encode("ascii")


def _decoded(data: bytes) -> Confusion:
    body = json.loads(data)
    if not isinstance(body, dict) or body.keys() != {"cells", "classes"} or not isinstance(body["cells"], list):
        raise ValueError("it must hold cells and classes, and nothing else")
    classes, before, cells = body["classes"], (-1, -1), []
    if type(classes) is not int or not 1 <= classes <= _MOST_CLASSES:
        raise ValueError(f"classes must be a number from 1 to {_MOST_CLASSES}")
    for place, cell in enumerate(body["cells"]):
        if not isinstance(cell, list) or len(cell) != 3 or not all(type(number) is int for number in cell):
            raise ValueError(f"cells[{place}] must be three integers: actual class, predicted class, rows")
        actual, predicted, rows = cell
        if not (0 <= actual < classes and 0 <= predicted < classes and 1 <= rows < 1 << 63):
            raise ValueError(f"cells[{place}] is of no class below {classes}, or of no row")
        if (actual, predicted) <= before:
            raise ValueError(f"cells[{place}] does not follow the cell before it")
        before = actual, predicted
        cells.append((actual, predicted, rows))
    return Confusion(classes, tuple(cells))
