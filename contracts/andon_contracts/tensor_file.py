"""Writes tensors to files in the safetensors format with torch alone, so that contracts needs no other library.

The format is 8 bytes of length, a JSON header with the offsets of each tensor, and the bytes.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The format's name of each dtype that it supports."""


def open_private(path: Path) -> BinaryIO:
    """Create `path` anew for writing, readable by its owner alone (0600): it will hold rows or weights."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.fchmod(handle, 0o600)  # a umask may have taken the owner's own rights away
    return os.fdopen(handle, "wb")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write dense tensors to `path`, whole or not at all.

    Raises `OSError` if the disk refuses, and `ValueError` for a dtype that is not in `NAMES`.
    """
    odd = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in NAMES]
    if odd:
        raise ValueError(f"the format has no such kind of tensor: {', '.join(odd)}")
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in copies.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns tensors, for readers that map the file
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open_private(part) as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in copies.values():
                file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b"")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
