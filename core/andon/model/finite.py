"""Loaded weights must be finite: one NaN makes every loss NaN, and `finite` would blame the rows of a micro-batch.

`torch.aminmax` allocates nothing and reads 26 GB/s on one core; the digest that every start computes reads 0.7.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from andon.console.problems import InputError, Problem

_SHOWN = 5


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether `tensor` (any dtype but complex) holds no NaN and no infinity."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    plain = tensor.detach().float() if tensor.dtype.itemsize == 1 else tensor.detach()  # no kernel reads float8
    return bool(torch.stack(torch.aminmax(plain)).isfinite().all())


def require_finite(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Raise `InputError` that names `file` and each of the `tensors` read from it that is not finite."""
    odd = {name: tensor for name, tensor in sorted(tensors.items()) if not is_finite(tensor)}
    if odd:
        raise InputError(_problems(file, odd))


def require_finite_model(model: nn.Module, folder: Path | None, name: str) -> None:
    """Raise `InputError` unless all parameters of the loaded `model` are finite and its saved buffers hold no NaN.

    A buffer may hold infinities: attention masks do. folder: where the model was loaded from; None: not on this disk.
    The error names the file in `folder` and the tensor as it is called there, or `name` and the parameter.
    """
    odd = {
        key: value
        for key, value in model.state_dict(keep_vars=True).items()
        if not is_finite(value) and (isinstance(value, nn.Parameter) or bool(value.isnan().any()))
    }
    if not odd:
        return
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    found: list[Problem] = []
    for file in files:
        try:
            tensors = load_file(file)
        except (OSError, SafetensorError):  # another file of the folder, which is not the model's
            continue
        found += _problems(file, {key: value for key, value in tensors.items() if not is_finite(value)})
    pickled = [] if folder is None or files else sorted(folder.glob("*.bin"))  # not read: that would unpickle them
    raise InputError(found or _problems(pickled[0] if len(pickled) == 1 else Path(name), odd))


def _problems(file: Path, odd: Mapping[str, torch.Tensor]) -> list[Problem]:
    problems = []
    for name, tensor in [*odd.items()][:_SHOWN]:
        plain = tensor.detach().float()
        bad = ~plain.isfinite()
        first = tuple(torch.nonzero(bad)[0].tolist())
        what = f"the tensor {name!r} is not finite: {int(bad.sum())} of its {tensor.numel()} values are NaN or infinite"
        where = f"(the first, {plain[first].item()}, is at {list(first)}); get an undamaged copy"
        problems.append(Problem(str(file), f"{what} {where}"))
    if len(odd) > _SHOWN:
        problems.append(Problem(str(file), f"and {len(odd) - _SHOWN} more tensors that are not finite"))
    return problems
