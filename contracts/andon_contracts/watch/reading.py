"""Cheap reading of many tensors at once: their bits as a few flat chunks, and one digest of those.

A loop has hundreds of small tensors, and looking at each costs more than reading them. So tensors of one kind are
copied together into chunks, and a chunk is digested as one. Names, shapes and order are bound by a digest of the
layout, which is compared as well.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from andon_contracts.digest import join, word_sum

CHUNK_BYTES = 1 << 24
_SMALL_BYTES = 1 << 18
_WORD = 8
_WRAP = 1 << 64


def plain(tensor: Tensor) -> Tensor:
    """The dense tensor of this rank behind `tensor`: the local part of a distributed, the values of a sparse one."""
    local = getattr(tensor, "to_local", None)
    found: Tensor = local() if local is not None else tensor
    found = found.detach()
    return found if found.layout == torch.strided else found.coalesce().values()


def chunks(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The elements of `tensors` in order as 1-dim tensors; small neighbours of one kind are copied together.

    A large tensor that is contiguous is passed on as it is: the chunks are to be read, not kept.
    """
    small: list[Tensor] = []
    kind: Hashable = None
    size = 0
    for tensor in map(plain, tensors):
        bytes_ = tensor.numel() * tensor.element_size()
        mine = (tensor.dtype, tensor.device)
        if small and (mine != kind or size + bytes_ > CHUNK_BYTES or bytes_ > _SMALL_BYTES):
            yield torch.cat(small) if len(small) > 1 else small[0]
            small, size = [], 0
        if bytes_ > _SMALL_BYTES:
            yield tensor.reshape(-1)
            continue
        small.append(tensor.reshape(-1))
        kind, size = mine, size + bytes_
    if small:
        yield torch.cat(small) if len(small) > 1 else small[0]


def digest_of_chunks(parts: Sequence[Tensor]) -> int:
    """One digest in [0, 2^64) of the bits of `parts` in order."""
    total, start = 0, 0
    for part in parts:
        total += word_sum(part, start)
        start += -(-part.numel() * part.element_size() // _WORD)
    return total % _WRAP


def flat_digest(tensors: Iterable[Tensor]) -> int:
    """One digest in [0, 2^64) of the bits of `tensors` in order; their layout is to be compared apart."""
    return digest_of_chunks(list(chunks(tensors)))


def norm_of_chunks(parts: Sequence[Tensor]) -> float:
    """The 2-norm of all elements; in fp32 as torch's clipping computes it, so that it overflows where that does."""
    if not parts:
        return 0.0
    norms = [torch.linalg.vector_norm(part.float() if part.element_size() < 4 else part) for part in parts]
    return float(torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms])))


def text_digest(*parts: object) -> int:
    """A digest in [0, 2^62) of plain values that have a stable `repr`."""
    data = repr(parts).encode("utf-8", "backslashreplace")
    return zlib.crc32(data) << 30 ^ zlib.adler32(data)


def layout_digest(tensors: Mapping[str, Tensor]) -> int:
    """The digest of names, shapes and dtypes in order."""
    return text_digest([(name, tuple(t.shape), str(t.dtype)) for name, t in tensors.items()])


def state_tensors(state: object, into: list[Tensor], rest: list[object]) -> None:
    """Sort what an optimizer keeps for one parameter into tensors and other values, in an order that has no chance."""
    if isinstance(state, Tensor):
        into.append(state)
    elif isinstance(state, Mapping):
        for name in sorted(state, key=repr):
            rest.append(name)
            state_tensors(state[name], into, rest)
    elif isinstance(state, list | tuple):
        rest.append(len(state))
        for item in state:
            state_tensors(item, into, rest)
    elif not callable(state):
        rest.append(state)


def state_digest(state: Mapping[str, object]) -> int:
    """The digest of what an optimizer keeps for one parameter, or of any small nest of tensors and values."""
    tensors: list[Tensor] = []
    rest: list[object] = []
    state_tensors(state, tensors, rest)
    found = {str(index): flat_digest([tensor]) for index, tensor in enumerate(tensors)}
    return join(found | {"values": text_digest(rest, [(tuple(t.shape), str(t.dtype)) for t in tensors])})
