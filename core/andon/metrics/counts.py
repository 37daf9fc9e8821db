"""Integer counts of an evaluation. Adding them is exact, so any split over workers gives the same."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def confusion_matrix(predicted: torch.Tensor, actual: torch.Tensor, num_labels: int) -> torch.Tensor:
    """int64 [classes, classes] on the CPU: entry [i, j] counts rows of class i that were predicted as j.

    predicted, actual: int64 [rows] class ids; no rows give zeros. Raises `ValueError` for different shapes or for an
    id that is not one of the classes.
    """
    if predicted.shape != actual.shape or predicted.dim() != 1:
        msg = f"predictions {tuple(predicted.shape)} and labels {tuple(actual.shape)} must be two vectors of one length"
        raise ValueError(msg)
    for what, values in (("predicted", predicted), ("actual", actual)):
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < num_labels:
            msg = f"{what} classes {int(values.min())} to {int(values.max())} are not all in [0, {num_labels})"
            raise ValueError(msg)
    cells = actual.cpu().long() * num_labels + predicted.cpu().long()
    return torch.bincount(cells, minlength=num_labels * num_labels).reshape(num_labels, num_labels)


def merge(matrices: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of confusion matrices [classes, classes] of disjoint rows. Raises `ValueError` for none or unlike."""
    total: torch.Tensor | None = None
    for matrix in matrices:
        if total is not None and matrix.shape != total.shape:
            msg = f"confusion matrices of {tuple(total.shape)} and {tuple(matrix.shape)} have different classes"
            raise ValueError(msg)
        total = matrix.clone() if total is None else total + matrix
    if total is None:
        raise ValueError("no confusion matrix to merge")
    return total
