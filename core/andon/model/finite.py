"""Weights that are loaded must be finite.

One NaN in a weight makes every loss NaN, and the contract `finite` would then blame the rows of a micro-batch.
`torch.aminmax` allocates nothing and runs at memory speed: 26 GB/s on one core, where the digest that every start
computes runs at 0.7.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    in_files = [] if folder is None else list(_in_files(folder))
    raise InputError(in_files or _problems(Path(name), odd))


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


def _in_files(folder: Path) -> Iterator[Problem]:
    """The tensors of the weight files in `folder` that are not finite. Reads the files again: for the error alone."""
    from safetensors.torch import load_file

    for file in sorted(folder.glob("*.safetensors")):
        yield from _problems(file, {key: value for key, value in load_file(file).items() if not is_finite(value)})
    for file in [] if any(folder.glob("*.safetensors")) else sorted(folder.glob("*.bin")):
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        odd = {key: value for key, value in found.items() if isinstance(value, torch.Tensor) and not is_finite(value)}
        yield from _problems(file, odd)
