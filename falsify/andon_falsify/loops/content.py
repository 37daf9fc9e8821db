"""Rows recognised by what is in them, as the model gets them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from andon_falsify.subjects.case import PAD, Rows

IGNORED_LABEL = -100
"""A row with this label has no loss in torch's cross entropy, so it is not trained on."""


def arguments_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `module` by the names of its `forward`; what does not bind is left out."""
    try:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
    except TypeError:
        return dict(kwargs)
    found = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return found


class Recogniser:
    """Knows the rows of a case by their tokens. Raises `ValueError` for rows that cannot be told apart."""

    def __init__(self, rows: Rows) -> None:
        self._labels = rows.labels
        self._known = {tokens: row for row, tokens in enumerate(rows.tokens)}
        if len(self._known) != len(rows):
            msg = f"{len(rows)} rows have only {len(self._known)} different contents: they cannot be told apart"
            raise ValueError(msg)

    def rows(self, given: Mapping[str, Any]) -> list[int | str | None] | None:
        """For each row of a call its id, or in words what it is instead; None where the call has no `input_ids`.

        None also in the place of a row whose label is `IGNORED_LABEL`.
        """
        tokens, mask, labels = (given.get(name) for name in ("input_ids", "attention_mask", "labels"))
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            return None
        mask = mask if isinstance(mask, Tensor) and mask.shape == tokens.shape else tokens != PAD
        targets = labels.tolist() if isinstance(labels, Tensor) and labels.shape == tokens.shape[:1] else None
        found: list[int | str | None] = []
        for place, (line, kept) in enumerate(zip(tokens, mask.bool(), strict=True)):
            label = targets[place] if targets is not None else None
            ignored = label == IGNORED_LABEL
            found.append(None if ignored else self._named(tuple(line[kept].tolist()), label))
        return found

    def _named(self, tokens: tuple[int, ...], label: int | None) -> int | str:
        row = self._known.get(tokens)
        if row is None:
            return f"tokens {list(tokens)}" if tokens else "a row without tokens"
        if label is not None and label != self._labels[row]:
            return f"row {row} with label {label} instead of {self._labels[row]}"
        return row
