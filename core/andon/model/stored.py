"""Weights in files: written one tensor at a time, so that memory never holds a second copy of a model, and finite.

`safetensors.torch.save` builds the whole file in memory; `save_file` makes it readable by its owner alone and hides the
error of a disk. So the format, a JSON header and the tensors' bytes, is written here.

One NaN in a loaded weight makes every loss NaN, and `finite` would blame the rows of a micro-batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from andon.console.problems import InputError, Problem
from andon_contracts.act import NAMES

_SHOWN = 5
LARGEST_FILE = 5 * 10**9
"""Bytes of tensors in one file of a model, as transformers splits it."""


@dataclass(frozen=True)
class Stored:
    """A tensor to write. dtype: to store it in, None: its own. change: from `tensor` in fp32 to what is stored."""

    tensor: Tensor
    dtype: torch.dtype | None = None
    change: Callable[[Tensor], Tensor] | None = None

    @property
    def kind(self) -> torch.dtype:
        return self.dtype or self.tensor.dtype

    @property
    def size(self) -> int:
        return self.tensor.numel() * self.kind.itemsize

    def data(self) -> memoryview:
        """The bytes to write. Raises `ValueError` if a changed tensor is not finite."""
        value = self.tensor.detach()
        if self.change is not None:
            with torch.no_grad():
                value = self.change(value.float())
            if not value.isfinite().all():
                raise ValueError("a merged weight is not finite")
        value = value.to("cpu", self.kind).contiguous()
        return value.reshape(-1).view(torch.uint8).numpy().data


def write_tensors(file: Path, tensors: Mapping[str, Stored]) -> None:
    """Write `tensors` as one file of safetensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    first = 0
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].kind.itemsize, item[0]))  # aligns every tensor
    for name, each in ordered:
        offsets = [first, first := first + each.size]
        header[name] = {"dtype": NAMES[each.kind], "shape": list(each.tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, each in ordered:
            out.write(each.data())


def write_sharded(folder: Path, tensors: Mapping[str, Stored]) -> None:
    """Write `tensors` as `model.safetensors`, or as several files with an index if they exceed `LARGEST_FILE`."""
    shards: list[dict[str, Stored]] = [{}]
    room = LARGEST_FILE
    for name, each in tensors.items():
        if each.size > room and shards[-1]:
            shards.append({})
            room = LARGEST_FILE
        shards[-1][name] = each
        room -= each.size
    if len(shards) == 1:
        write_tensors(folder / "model.safetensors", tensors)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / file, shard)
        places |= dict.fromkeys(shard, file)
    total = sum(each.size for each in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def is_finite(tensor: Tensor) -> bool:
    """Whether `tensor` (any dtype but complex) holds no NaN and no infinity."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    plain = tensor.detach().float() if tensor.dtype.itemsize == 1 else tensor.detach()  # no kernel reads float8
    return bool(torch.stack(torch.aminmax(plain)).isfinite().all())


def require_finite(tensors: Mapping[str, Tensor], file: Path) -> None:
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
        with suppress(OSError, SafetensorError):  # another file of the folder, which is not the model's
            found += _problems(file, {key: value for key, value in load_file(file).items() if not is_finite(value)})
    pickled = [] if folder is None or files else sorted(folder.glob("*.bin"))  # not read: that would unpickle them
    raise InputError(found or _problems(pickled[0] if len(pickled) == 1 else Path(name), odd))


def _problems(file: Path, odd: Mapping[str, Tensor]) -> list[Problem]:
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
