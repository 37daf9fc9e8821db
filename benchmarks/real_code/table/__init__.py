"""All rows, by project."""

from __future__ import annotations

from benchmarks.real_code.row import Row
from benchmarks.real_code.table import facebook, huggingface, karpathy, lightning, others, pytorch_examples

ROWS: tuple[Row, ...] = (
    *pytorch_examples.ROWS,
    *karpathy.ROWS,
    *huggingface.ROWS,
    *lightning.ROWS,
    *facebook.ROWS,
    *others.ROWS,
)
