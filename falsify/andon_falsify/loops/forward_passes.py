"""Forward passes of a loop's model on one rank: their rows by content, the rows that count for nothing, random draws.

A loop may call its model with rows that only keep the ranks in step, and multiply their losses by 0. Such a row is not
trained on. The backward pass shows that: the gradient of the model's output for this row is 0.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from andon_falsify.loops.sightings import LoopSightings, Stranger
from andon_falsify.subjects.case import PAD, Case, Rows

IGNORED_LABEL = -100
"""A row with this label has no loss in torch's cross entropy, so it is not trained on."""
_EXACT = (torch.float32, torch.float64)
"""Types in which the gradient of a row that counts does not underflow."""

RowId = int | str | None
"""A row of the case; or a text that says what the row is instead; or None for a row without a label."""


def recognised(rows: Rows, arguments: Mapping[str, Any]) -> list[RowId] | None:
    """The rows of a call of the model, recognised by their tokens. None if the call has no `input_ids`."""
    tokens, mask, labels = (arguments.get(name) for name in ("input_ids", "attention_mask", "labels"))
    if not isinstance(tokens, Tensor) or tokens.dim() != 2:
        return None
    known = {content: row for row, content in enumerate(rows.tokens)}
    mask = mask if isinstance(mask, Tensor) and mask.shape == tokens.shape else tokens != PAD
    targets = labels.tolist() if isinstance(labels, Tensor) and labels.shape == tokens.shape[:1] else None
    found: list[RowId] = []
    for place, (line, kept) in enumerate(zip(tokens, mask.bool(), strict=True)):
        label, content = targets[place] if targets is not None else None, tuple(line[kept].tolist())
        row = known.get(content)
        if label == IGNORED_LABEL:
            found.append(None)
        elif row is None:
            found.append(f"tokens {list(content)}" if content else "a row without tokens")
        elif label is not None and label != rows.labels[row]:
            found.append(f"row {row} with label {label} instead of {rows.labels[row]}")
        else:
            found.append(row)
    return found


def arguments_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `module`, by the parameter names of its `forward`."""
    try:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
    except TypeError:
        return dict(kwargs)
    found = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return found


@dataclass
class _Pass:
    """A forward pass of update `step`. leaf: the number of its micro-batch. generator: torch's state before it."""

    step: int
    leaf: int
    ids: Sequence[RowId]
    generator: str
    counted: Tensor | None = None
    """bool [rows]: whether the output for this row had a gradient. None before the backward pass."""


class ForwardPasses:
    """Enters into `seen` what the training's forward passes show."""

    def __init__(self, case: Case, seen: LoopSightings) -> None:
        self._seen = seen
        self._rank = seen.ranks[0]
        self._weighs = 0.0 not in (case.class_weights or ())  # rows of such a class have no gradient, and are visits
        self._passes: list[_Pass] = []
        self._current: _Pass | None = None

    def begin(self, step: int, ids: Sequence[RowId] | None) -> None:
        """A forward pass of update `step` begins, with these rows; None if they are unknown."""
        if ids is None:
            self._seen.rowless.append(step)
        self._seen.strangers += [Stranger(step, self._rank, text) for text in ids or () if isinstance(text, str)]
        leaves = self._seen.of(self._rank, step).leaves
        leaves.append(tuple(row for row in ids or () if isinstance(row, int)))
        self._current = _Pass(step, len(leaves) - 1, ids or (), _generator())
        self._passes.append(self._current)

    def end(self, output: Any, *, training: bool) -> None:
        """It has ended with `output`. training: the model's mode."""
        current, self._current = self._current, None
        if current is None:
            return
        if current.generator != _generator():
            self._seen.draws.setdefault((self._rank, current.step), current.generator)
        elif any(isinstance(row, int) for row in current.ids):
            self._seen.undrawn.setdefault((self._rank, current.step), training)
        scores = getattr(output, "logits", output)
        scores = scores[0] if isinstance(scores, tuple | list) and scores else scores
        if not self._weighs or not isinstance(scores, Tensor) or not scores.requires_grad:
            return
        if scores.dtype not in _EXACT or scores.dim() < 2 or len(scores) != len(current.ids):
            return
        # A row whose class is certain has no gradient either, and was trained on.
        certain = scores.detach().flatten(1).softmax(-1).amax(-1) == 1

        def weigh(gradient: Tensor) -> None:
            counted = gradient.flatten(1).ne(0).any(1) | certain
            current.counted = counted if current.counted is None else current.counted | counted

        scores.register_hook(weigh)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """The backward passes of all passes so far are over: remove the visits of rows that counted for nothing."""
        passes, self._passes = self._passes, []
        for each in passes:
            if each.counted is None or bool(each.counted.all()):
                continue
            pairs = list(zip(each.ids, each.counted.tolist(), strict=True))
            kept = tuple(row for row, counts in pairs if counts and isinstance(row, int))
            self._seen.of(self._rank, each.step).leaves[each.leaf] = kept
            for row, counts in pairs:
                if isinstance(row, str) and not counts:
                    self._seen.strangers.remove(Stranger(each.step, self._rank, row))
            self._seen.weightless += [row for row, counts in pairs if isinstance(row, int) and not counts]


def _generator() -> str:
    return hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8).hexdigest()
