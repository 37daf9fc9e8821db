"""Masks of a CPU for tensors that may be elsewhere: a group with both kinds of device drops the same everywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from andon.step.host_drawn import HostDrawnDropout, UnkeyedRandomnessError
from andon.step.keyed import KeyedRandomness, key
from andon.training.build import draws_as_cpus
from tests.support.toy import CPU

SHAPES = {"ragged": (3, 7, 5), "wide": (2, 4, 300)}
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")),
]


def as_a_cpu_does(work: Callable[[], torch.Tensor]) -> torch.Tensor:
    with KeyedRandomness(9, CPU).micro_batch(4, 2):
        return work()


def host_drawn(work: Callable[[], torch.Tensor]) -> torch.Tensor:
    with HostDrawnDropout(torch.Generator().manual_seed(key(9, 4, 2))):
        return work()


def values(shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_dropout_has_the_bits_of_a_cpu(shape: tuple[int, ...], inplace: bool, device: str) -> None:
    """Twice, so that a stream and not one draw is compared; strided as a transposed tensor is, too."""

    x, y = values(shape), values(shape, 2).transpose(0, 1)

    def work(on: str) -> torch.Tensor:
        first = F.dropout(x.clone().to(on), 0.3, inplace=inplace)
        second = F.dropout(y.clone().to(on), 0.1, inplace=inplace)
        return torch.cat([first.flatten(), second.flatten()]).cpu()

    assert torch.equal(host_drawn(lambda: work(device)), as_a_cpu_does(lambda: work("cpu")))


def multi_head(chance: float, *, training: bool) -> Callable[[], torch.Tensor]:
    attention = torch.nn.MultiheadAttention(8, 2, dropout=chance, batch_first=True).train(training)
    return lambda: attention(X, X, X)[0]


def in_place() -> torch.Tensor:
    x = HALF.clone()
    F.dropout(x, 0.3, inplace=True)
    return x


X = values((2, 5, 8))
HALF = values((3, 40)).bfloat16()
ALIKE: dict[str, Callable[[], torch.Tensor]] = {
    "torch.dropout": lambda: torch.dropout(X, p=0.5, train=True) + torch.dropout(X, 0.5, False),
    "bf16": lambda: F.dropout(HALF, 0.3),
    "bf16 in place": in_place,
    # Other kinds of dropout pass where they drop nothing.
    "dropout1d in evaluation": lambda: F.dropout1d(X, 0.5, False),
    "dropout1d at 0": lambda: F.dropout1d(X, 0.0, True),
    "multi-head attention in evaluation": multi_head(0.5, training=False),
    "multi-head attention without dropout": multi_head(0.0, training=True),
}


@pytest.mark.parametrize("work", ALIKE.values(), ids=ALIKE)
def test_other_calls_have_the_bits_of_a_cpu(work: Callable[[], torch.Tensor]) -> None:
    assert torch.equal(host_drawn(work), as_a_cpu_does(work))


def test_a_scale_and_a_mask_of_numbers_count() -> None:
    q, mask = values((1, 2, 5, 4)), torch.linspace(-2, 2, 25).view(5, 5)

    def work() -> torch.Tensor:
        named = F.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.4, scale=2.0)
        return torch.cat([named, F.scaled_dot_product_attention(q, q, q, mask, 0.4)])

    found, expected = host_drawn(work), as_a_cpu_does(work)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("masked", ["causal", "mask", "none"])
def test_attention_drops_what_a_cpu_does(masked: str, grouped: bool, device: str) -> None:
    q, k, v = values((2, 4, 9, 8)), values((2, 2 if grouped else 4, 9, 8), 2), values((2, 2 if grouped else 4, 9, 8), 3)
    mask = (torch.arange(9) < torch.tensor([[9], [0]])).view(2, 1, 1, 9) if masked == "mask" else None

    def work(on: str) -> torch.Tensor:
        given = [each.clone().to(on).requires_grad_() for each in (q, k, v)]
        seen = mask if mask is None else mask.to(on)
        out = F.scaled_dot_product_attention(
            *given, attn_mask=seen, dropout_p=0.4, is_causal=masked == "causal", enable_gqa=grouped
        )
        out.square().sum().backward()  # type: ignore[no-untyped-call]
        return torch.cat([each.flatten().cpu() for each in (out.detach(), *(x.grad for x in given))])  # type: ignore[union-attr]

    found, expected = host_drawn(lambda: work(device)), as_a_cpu_does(lambda: work("cpu"))
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    with HostDrawnDropout(torch.Generator().manual_seed(key(9, 4, 3))):
        assert (work(device) - expected).norm() > 0.01 * expected.norm()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand_like(torch.ones(3)),
        lambda: F.dropout1d(torch.ones(1, 3, 4), 0.5),
        lambda: F.alpha_dropout(torch.ones(3), 0.5, training=True),
        lambda: torch.ones(3).bernoulli_(0.5),
        lambda: torch.nn.MultiheadAttention(8, 2, dropout=0.5)(*[torch.ones(3, 1, 8)] * 3)[0],
    ],
    ids=["rand_like", "dropout1d", "alpha_dropout", "bernoulli_", "multi_head_attention"],
)
def test_what_else_draws_is_refused(draw: Callable[[], torch.Tensor]) -> None:
    """Its numbers would belong to the device, and who computes would decide the result."""
    with pytest.raises(UnkeyedRandomnessError, match="cannot be keyed"):
        host_drawn(draw)


def test_what_drops_nothing_draws_nothing() -> None:
    generator = torch.Generator().manual_seed(3)
    before, x = generator.get_state(), values((1, 2, 4, 4))
    with HostDrawnDropout(generator):
        assert torch.equal(F.dropout(x, 0.5, training=False), x)
        assert torch.equal(F.dropout(x, 0.0), x)
        assert not F.dropout(x, 1.0).any()
        F.scaled_dot_product_attention(x, x, x)
    assert torch.equal(generator.get_state(), before)


class StandIn:
    """In the place of a GPU's generators: none is there."""

    def __getitem__(self, _: int) -> torch.Generator:
        return torch.Generator()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "default_generators", StandIn())


def keyed_for_a_gpu(work: Callable[[], torch.Tensor], *, host_drawn: bool) -> torch.Tensor:
    with KeyedRandomness(9, torch.device("cuda", 0), host_drawn=host_drawn).micro_batch(4, 2):
        return work()


def test_a_micro_batch_of_a_gpu_beside_cpus_draws_from_its_own_stream(as_on_a_gpu: None) -> None:
    x = values((3, 7, 5))
    randomness = KeyedRandomness(9, torch.device("cuda", 0), host_drawn=True)
    expected = as_a_cpu_does(lambda: F.dropout(x, 0.3))
    for step in (3, 4, 4):
        with randomness.micro_batch(step, 2):
            found = F.dropout(x, 0.3)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("before", [0, 5])
def test_what_a_gpus_model_draws_on_the_cpu_is_keyed_too(as_on_a_gpu: None, before: int) -> None:
    """Which layers OPT leaves out must not depend on what the process drew before; and that stream is left alone."""
    torch.manual_seed(1)
    torch.rand(before)
    state = torch.get_rng_state()
    drawn = keyed_for_a_gpu(lambda: torch.rand([]), host_drawn=False)
    assert torch.equal(drawn, torch.rand([], generator=torch.Generator().manual_seed(key(9, 4, 2))))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("backend", "more", "drawn"),
    [
        ("mixed", {}, True),
        ("nccl", {}, False),
        ("mixed", {"checkpointing": True}, False),
        ("mixed", {"compiled": True}, False),
    ],
)
def test_only_gpus_beside_cpus_draw_as_those_do(backend: str, more: dict[str, bool], drawn: bool) -> None:
    assert (
        draws_as_cpus(backend, torch.device("cuda", 0), **({"checkpointing": False, "compiled": False} | more)) is drawn
    )
    assert not draws_as_cpus(backend, CPU, checkpointing=False, compiled=False)
