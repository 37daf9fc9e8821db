"""Tensors on disk in the safetensors format, written and read with torch alone.

The format is 8 bytes of length, a JSON header with the place of each tensor, and the bytes. Reading runs no code from
the file and trusts no length in it.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from andon_contracts.untrusted import read_regular

NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The dtypes that the format has, with its names for them."""
_DTYPES = {name: dtype for dtype, name in NAMES.items()}
_MOST_HEADER = 1 << 26
_MOST_BYTES = 1 << 42
_MOST_DIMENSIONS = 64


def open_private(path: Path) -> BinaryIO:
    """Create `path` anew for writing, readable by its owner alone (0600): it will hold rows or weights."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.fchmod(handle, 0o600)  # a umask may have taken the owner's own rights away
    return os.fdopen(handle, "wb")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write dense tensors to `path`, whole or not at all.

    Raises `OSError` if the disk refuses, and `ValueError` for a dtype that is not in `NAMES`.
    """
    odd = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in NAMES]
    if odd:
        raise ValueError(f"the format has no such kind of tensor: {', '.join(odd)}")
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in held.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns tensors, for readers that map the file
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open_private(part) as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in held.values():
                file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b"")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_tensors(path: Path, most: int = _MOST_BYTES) -> dict[str, Tensor]:
    """The tensors of the file `path`, on the CPU. Raises `ValueError` for another kind of file, and `OSError` as
    `read_regular` does, also for more than `most` bytes."""
    data = read_regular(path, most)
    size = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else _MOST_HEADER
    if size > min(len(data) - 8, _MOST_HEADER):
        raise ValueError(f"{path}: the header does not fit into the file")
    try:
        header = json.loads(data[8 : 8 + size])
        if not isinstance(header, dict):
            raise TypeError("the header is no object")
        body = memoryview(data)[8 + size :]
        return {name: _tensor(body, place) for name, place in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:  # RecursionError is a RuntimeError
        raise ValueError(f"{path}: {error!r}") from error


def _tensor(body: memoryview, place: Mapping[str, Any]) -> Tensor:
    dtype, shape = _DTYPES[place["dtype"]], [int(size) for size in place["shape"]]
    begin, end = (int(offset) for offset in place["data_offsets"])
    if len(shape) > _MOST_DIMENSIONS or min(shape, default=0) < 0 or not 0 <= begin <= end <= len(body):
        raise ValueError("a tensor lies outside the file")
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError("a tensor's shape does not fit its bytes")
    if begin == end:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(body[begin:end]), dtype=dtype).reshape(shape)
