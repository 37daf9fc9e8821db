"""Weights that are loaded must be finite.

One NaN in a weight makes every loss NaN, and the contract `finite` would then blame the rows of a micro-batch.
`torch.aminmax` allocates nothing and runs at memory speed: 26 GB/s on one core, where the digest that every start
computes runs at 0.7.
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
    odd = {key: value for key, value in model.state_dict(keep_vars=True).items() if not _usable(value)}
    if not odd:
        return
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    in_files = [problem for file in files for problem in _in_file(file)]
    pickled = [] if folder is None or files else sorted(folder.glob("*.bin"))  # not read here: that would unpickle them
    raise InputError(in_files or _problems(pickled[0] if len(pickled) == 1 else Path(name), odd))


def _usable(value: torch.Tensor) -> bool:
    if isinstance(value, nn.Parameter) or is_finite(value):
        return is_finite(value)
    return not bool(value.isnan().any())


def _problems(file: Path, odd: Mapping[str, torch.Tensor]) -> list[Problem]:
    problems = [Problem(str(file), _sentence(name, tensor)) for name, tensor in [*odd.items()][:_SHOWN]]
    rest = len(odd) - len(problems)
    return [*problems, *([Problem(str(file), f"and {rest} more tensors that are not finite")] if rest else [])]


def _sentence(name: str, tensor: torch.Tensor) -> str:
    plain = tensor.detach().float()
    bad = ~plain.isfinite()
    first = tuple(torch.nonzero(bad)[0].tolist())
    value = plain[first].item()
    what = f"the tensor {name!r} is not finite: {int(bad.sum())} of its {tensor.numel()} values are NaN or infinite"
    return f"{what} (the first, {value}, is at {list(first)}); get an undamaged copy"


def _in_file(file: Path) -> list[Problem]:
    """The tensors of one file that are not finite. Reads it again: for the error alone."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(file)
    except (OSError, SafetensorError):  # another file of the folder, which is not the model's
        return []
    return _problems(file, {name: tensor for name, tensor in found.items() if not is_finite(tensor)})
