"""What the trainer needs of a task beyond the step: how its rows are scored, exactly, on any number of ranks."""

from __future__ import annotations

from andon.tasks.encoded import EncodedRows
from andon.tasks.sft import SftTask

ScoredTask = EncodedRows | SftTask
"""Encoded rows by their ids, from 0: trained on as a `Task` of the step, and scored row by row.

`outputs` gives `width` numbers for a row, the same whichever rank computes them; `output` is a message's word for them.
`score` is a function of the outputs of all rows, computed on every rank alike, so it is the same to the bit on any
number of ranks. `notes` are lines for the user about how rows became tensors. `counts_right`: whether a term of the
loss is predicted right or wrong, so that `LeafLoss.correct` says something.
"""
