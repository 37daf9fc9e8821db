"""Whether a wrong gradient is the right mean of rows with other labels."""

from __future__ import annotations

import torch
from torch import Tensor

from andon_falsify.loops.law import LoopLaw, matrix

_FITS = 1e-3
_WHOLE = 0.02
_SHOWN = 4


def relabelled(law: LoopLaw, step: int, seen: Tensor) -> str:
    """`row 3 as label 2 instead of 1`, where that is what the gradient `seen` of `step` is; else "".

    With the gradient of every row for every label, `seen` is a sum of them; which, least squares tell. Only of a model
    that the reference knows, and where the rows' gradients are independent.
    """
    if law.why_no_model:
        return ""
    rows = law.of(step).rows
    *others, last = [matrix(law.labelled(step, label)) for label in range(law.case.rows.classes)]
    rest = seen * len(rows) - last.sum(0)
    columns = torch.cat([each - last for each in others]).T
    if not others or columns.shape[0] < columns.shape[1]:
        return ""
    times = torch.linalg.lstsq(columns, rest[:, None]).solution[:, 0]
    if float((columns @ times - rest).norm()) > _FITS * len(rows) * float(seen.norm()):
        return ""
    shares = times.view(len(others), len(rows)).T
    shares = torch.cat([shares, 1 - shares.sum(1, keepdim=True)], dim=1)
    if float((shares - shares.round()).abs().max()) > _WHOLE or float(shares.min()) < -_WHOLE:
        return ""
    held = law.case.rows.labels
    said = [
        f"row {row} as label {label} instead of {held[row]}"
        for row, label in zip(rows, shares.argmax(1).tolist(), strict=True)
        if label != held[row]
    ]
    more = f" and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    return f"it is the mean with {', '.join(said[:_SHOWN])}{more}" if said else ""
