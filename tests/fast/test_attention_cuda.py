"""Causal attention on a GPU: the law of attention, one order of its sums, and no memory read that nobody wrote."""

from __future__ import annotations

import math

import pytest
import torch

from andon.fast.attention import causal_attention, supports

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SHAPES = [
    (2, 8, 2, 256, 128),
    (1, 4, 4, 200, 64),
    (3, 6, 2, 77, 128),
    (2, 4, 1, 513, 32),
    (1, 2, 2, 1, 64),
    (3, 4, 2, 1, 32),
    (2, 3, 3, 17, 32),
]
"""Rows, heads, heads of keys, length, size."""
PACKS: list[list[list[int]]] = [
    [[200, 1, 55], [256]],
    [[7] * 28],
    [[77], [1] * 77, [30, 40]],
    [[64, 64, 64, 64, 200], [300]],
    [[1]],
    [[1]] * 3,
    [[3, 9], []],
]
"""Of each shape the rows that are packed in each of its rows; what they leave is padding."""


def spans_of(packs: list[list[int]] | None, length: int) -> torch.Tensor | None:
    """Of each place where its row begins and ends, and of padding a row at each place."""
    if packs is None:
        return None
    found = []
    for rows in packs:
        ends = [sum(rows[: place + 1]) for place in range(len(rows))]
        spans = [[end - size, end] for end, size in zip(ends, rows, strict=True) for _ in range(size)]
        found.append(spans + [[place, place + 1] for place in range(len(spans), length)])
    return torch.tensor(found, dtype=torch.int32, device="cuda")


def drawn(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    rows, heads, shared, length, size = shape
    generator = torch.Generator("cuda").manual_seed(length)

    def made(count: int) -> torch.Tensor:
        return torch.randn(rows, length, count, size, device="cuda", generator=generator).to(dtype).transpose(1, 2)

    return made(heads), made(shared), made(shared), made(heads)


def law(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, spans: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention by its definition, in float64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    unseen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    if spans is not None:
        places = torch.arange(q.shape[2], device=q.device)
        unseen = unseen | (places < spans[:, None, :, :1])
    return (q @ k.transpose(2, 3) * scale).masked_fill(unseen, -math.inf).softmax(-1) @ v


def results(parts: tuple[torch.Tensor, ...], scale: float, spans: torch.Tensor | None = None) -> list[torch.Tensor]:
    *inputs, gradient = parts
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = causal_attention(leaves[0], leaves[1], leaves[2], scale, spans)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def noise(parts: tuple[torch.Tensor, ...], scale: float) -> list[float]:
    """How far the result and the gradients of q, k and v may be from the law beside the rounding of their type.

    0 but where a place sees itself alone. There q and k have no gradient by law: it is scale * (a - b) * k, and scale *
    (a - b) * q, of a the product of gradient and v, and b that of gradient and result, which are the same values summed
    in two orders. Each sum of n products, themselves exact, is off by (n - 1) 2^-24 of the sum of their sizes at most.
    """
    q, k, v, gradient = (part.double() for part in parts)
    if q.shape[2] > 1:
        return [0.0] * 4
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    apart = abs(scale) * 2 * (q.shape[3] - 1) * 2.0**-24 * (gradient * v).abs().sum(-1)
    of_keys = (apart * q.norm(dim=-1)).unflatten(1, (-1, group)).sum(2)
    return [0.0, float((apart * k.norm(dim=-1)).norm()), float(of_keys.norm()), 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "packs"), [*((shape, None) for shape in SHAPES), *zip(SHAPES, PACKS, strict=True)])
def test_result_and_gradients_are_those_of_the_law(
    shape: tuple[int, int, int, int, int], packs: list[list[int]] | None, dtype: torch.dtype
) -> None:
    """To the rounding of the type that the products are made in, one in 2^9 for bfloat16, in 2^12 for float16, and to
    that of sums in fp32 where nothing else is left. Packed rows end within a tile, at its end, and have one token."""
    parts, spans = drawn(shape, dtype), spans_of(packs, shape[3])
    assert supports(*parts[:3])
    scale = 0.7 / math.sqrt(shape[-1])
    leaves = [each.double().detach().requires_grad_() for each in parts[:3]]
    out = law(leaves[0], leaves[1], leaves[2], scale, spans)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, parts[3].double())]
    limit = 2 * 2.0**-9 if dtype == torch.bfloat16 else 2 * 2.0**-12
    for found, right, more in zip(results(parts, scale, spans), expected, noise(parts, scale), strict=True):
        assert (found.double() - right).norm() <= limit * right.norm() + more


def test_a_row_has_the_same_bits_whatever_is_packed_behind_it() -> None:
    parts = drawn((1, 4, 2, 256, 64), torch.bfloat16)
    alone = results(parts, 0.1, spans_of([[100]], 256))
    for part in parts:
        part[:, :, 100:] *= -3
    beside = results(parts, 0.1, spans_of([[100, 60]], 256))
    assert all(torch.equal(one[:, :, :100], other[:, :, :100]) for one, other in zip(alone, beside, strict=True))


@pytest.mark.parametrize("shape", SHAPES[:4])
def test_same_bits_whatever_the_memory_held(shape: tuple[int, int, int, int, int]) -> None:
    parts = drawn(shape, torch.bfloat16)
    first = results(parts, 0.1)
    for fill in (math.nan, 1e30, 0.0):
        filled = [torch.full((1 + 1000 * turn,), fill, device="cuda") for turn in range(300)]
        kept = filled[::7]
        del filled
        again = results(parts, 0.1)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
        del kept


def test_places_far_apart_are_brought_together() -> None:
    """Their distance in values counts to 2^31 in a kernel; a tensor in which it is more is copied. Without memory."""
    from andon.fast.attention_cuda import _addressable

    near = torch.empty((2, 8, 4096, 64), device="meta").transpose(1, 2)
    far = torch.empty((4096, 8, 2**17, 64), device="meta").permute(1, 2, 0, 3)
    assert _addressable(near) is near
    assert far.stride(2) * far.shape[2] >= 2**31
    assert _addressable(far).is_contiguous()
