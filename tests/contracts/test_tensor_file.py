"""Tensors on the disk without pickle: whole, readable by others, and no trust in what a file says of itself."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from andon_contracts.tensor_file import NAMES, read_tensors, write_tensors


def _of_every_kind() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {f"of {dtype}": torch.randn(3, 5, generator=generator).to(dtype) for dtype in NAMES}
    return made | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "turned": torch.arange(6.0).view(2, 3).t()}


def _bits(tensor: torch.Tensor) -> list[int]:
    found: list[int] = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
    return found


def test_every_kind_comes_back_to_the_bit(tmp_path: Path) -> None:
    tensors = _of_every_kind()
    write_tensors(tmp_path / "t.safetensors", tensors, {"step": "3"})
    ours = read_tensors(tmp_path / "t.safetensors")
    theirs = load_file(tmp_path / "t.safetensors")
    for read in (ours, theirs):
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
            assert _bits(read[name]) == _bits(tensor), name
    assert [path.name for path in tmp_path.iterdir()] == ["t.safetensors"]


def test_what_the_library_wrote_is_read(tmp_path: Path) -> None:
    save_file({"b": torch.arange(5), "a": torch.ones(2, 2, dtype=torch.bfloat16)}, tmp_path / "t.safetensors")
    assert read_tensors(tmp_path / "t.safetensors")["b"].tolist() == [0, 1, 2, 3, 4]


def test_a_kind_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"z \(torch.complex128\)"):
        write_tensors(tmp_path / "t", {"z": torch.ones(1, dtype=torch.complex128)})
    assert list(tmp_path.iterdir()) == []


def _file(header: object, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


DAMAGED = {
    "nothing": b"",
    "shorter than its length field": b"\x01",
    "a header longer than the file": struct.pack("<Q", 1 << 60) + b"{}",
    "no JSON": struct.pack("<Q", 2) + b"{]",
    "no object": _file([1]),
    "bytes outside the file": _file({"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}, b"1234"),
    "an end before its beginning": _file({"a": {"dtype": "U8", "shape": [0], "data_offsets": [4, 2]}}, b"1234"),
    "a shape larger than its bytes": _file({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}, b"1234"),
    "a negative size": _file({"a": {"dtype": "U8", "shape": [-1, -4], "data_offsets": [0, 4]}}, b"1234"),
    "an unknown kind": _file({"a": {"dtype": "X9", "shape": [4], "data_offsets": [0, 4]}}, b"1234"),
    "no offsets": _file({"a": {"dtype": "U8", "shape": [4]}}, b"1234"),
    "a pickle": b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00.",
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(DAMAGED[damage])
    with pytest.raises(ValueError, match="damaged"):
        read_tensors(path)
