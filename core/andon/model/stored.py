"""Models as files of safetensors, written one tensor at a time: memory never holds a second copy of a model.

`safetensors.torch.save` builds the whole file in memory; `save_file` makes it readable by its owner alone and hides the
error of a disk. So the format, a JSON header and the tensors' bytes, is written here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from andon_contracts.act import NAMES

LARGEST_FILE = 5 * 10**9
"""Bytes of tensors in one file of a model, as transformers splits it."""


@dataclass(frozen=True)
class Stored:
    """A tensor to write. dtype: to store it in, None: its own. change: from `tensor` in fp32 to what is stored."""

    tensor: torch.Tensor
    dtype: torch.dtype | None = None
    change: Callable[[torch.Tensor], torch.Tensor] | None = None

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
        return write_tensors(folder / "model.safetensors", tensors)
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        write_tensors(folder / file, shard)
    places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    total = sum(each.size for each in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return None
