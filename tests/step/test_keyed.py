"""Random numbers that depend on (seed, step, micro-batch) alone, and masks drawn on the CPU for other devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from andon.step.host_drawn import HostDrawnDropout
from andon.step.keyed import KeyedRandomness, UnkeyedRandomnessError, key, needs_full_interception, replaying
from andon.step.task import LeafLoss
from andon.training.build import draws_as_cpus
from tests.support.toy import CPU

THREADS = 8
Draw = Callable[[], torch.Tensor]


def dropout() -> torch.Tensor:
    """Masks as `nn.Dropout` draws them, twice, so that a stream and not a single draw is compared."""
    layer = nn.Dropout(0.5)
    return torch.cat([layer(torch.ones(200)), layer(torch.ones(200))])


def attention() -> torch.Tensor:
    """Attention with dropout: uniform weights, so that what is dropped shows."""
    q = torch.zeros(1, 2, 12, 4)
    v = torch.arange(96.0).view(1, 2, 12, 4)
    return F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)


def uniform() -> torch.Tensor:
    return torch.zeros(50).uniform_(-1.0, 1.0)


def noise() -> torch.Tensor:
    return torch.cat([torch.randn(20), torch.rand_like(torch.zeros(20)), torch.randint(3, 90, (20,)).float()])


def noisy(v: torch.Tensor, share: float) -> torch.Tensor:
    return v * (torch.rand_like(v) + share)


def unlisted() -> torch.Tensor:
    drawn: torch.Tensor = torch.ops.aten.bernoulli(torch.full((100,), 0.5))
    return drawn


KNOWN = [dropout, attention, uniform, noise]


def _keyed(draw: Draw, *, step: int = 4, index: int = 2, intercept_all: bool = False) -> torch.Tensor:
    with KeyedRandomness(9, CPU, intercept_all=intercept_all).micro_batch(step, index):
        return draw()


DROPOUTS: dict[str, Draw] = {
    "a share in a tensor": lambda: F.dropout(torch.ones(1000), torch.tensor(0.1)),  # type: ignore[arg-type]
    "torch's own function": lambda: torch.dropout(torch.ones(1000), 0.3, train=True),
    "in place": lambda: F.dropout(torch.ones(1000), 0.3, inplace=True),
    "bf16, strided": lambda: F.dropout(torch.ones(40, 25, dtype=torch.bfloat16).t(), 0.3),
    "other numbers for each of several": lambda: torch.vmap(
        lambda x: x * F.dropout(torch.ones(5), 0.3), randomness="different"
    )(torch.ones(4, 5)),
}


@pytest.mark.parametrize("draw", [*KNOWN, *DROPOUTS.values()], ids=[*(each.__name__ for each in KNOWN), *DROPOUTS])
def test_bits_are_those_of_the_global_generator_with_the_same_key(draw: Draw) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(9, 4, 2))
        expected = draw()
    assert torch.equal(_keyed(draw), expected)
    assert torch.equal(_keyed(draw, intercept_all=True), expected)


@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_what_torch_refuses_of_dropout_it_refuses_under_a_key(p: float) -> None:
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
        _keyed(lambda: F.dropout(torch.ones(3), p))
    with pytest.raises(RuntimeError, match="dropout probability has to be between 0 and 1"):
        _keyed(lambda: torch.dropout(torch.ones(3), p, True))
    with pytest.raises(TypeError, match="must be bool"):
        _keyed(lambda: F.dropout(torch.ones(3), 0.5, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("draw", KNOWN)
def test_the_key_alone_decides(draw: Draw) -> None:
    drawn = {tuple(_keyed(draw, step=step, index=index).flatten().tolist()) for step in (4, 5) for index in (2, 3)}
    assert len(drawn) == 4
    randomness = KeyedRandomness(9, CPU)
    for index in (2, 7, 2):
        with randomness.micro_batch(4, index):
            again = draw()
    assert torch.equal(again, _keyed(draw))


@pytest.mark.parametrize("draw", KNOWN)
@pytest.mark.parametrize("intercept_all", [False, True])
def test_threads_at_once_draw_as_one_thread_does(draw: Draw, intercept_all: bool) -> None:
    inside = threading.Barrier(THREADS, timeout=20)
    visits = 10

    def work(thread: int) -> list[torch.Tensor]:
        randomness = KeyedRandomness(9, CPU, intercept_all=intercept_all)
        found = []
        for visit in range(visits):
            with randomness.micro_batch(visit, thread):
                inside.wait()
                found.append(draw())
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        drawn = list(pool.map(work, range(THREADS)))
    for thread in range(THREADS):
        for visit in range(visits):
            assert torch.equal(drawn[thread][visit], _keyed(draw, step=visit, index=thread))


@pytest.mark.parametrize("intercept_all", [False, True])
def test_the_global_generator_is_left_alone(intercept_all: bool) -> None:
    before = torch.get_rng_state()
    for draw in KNOWN:
        _keyed(draw, intercept_all=intercept_all)
    needs_full_interception(dropout, CPU)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("draw", KNOWN)
def test_known_functions_need_no_full_interception(draw: Draw) -> None:
    assert needs_full_interception(draw, CPU) is False


def test_an_operation_past_the_functions_needs_it_and_then_is_keyed() -> None:
    assert needs_full_interception(unlisted, CPU) is True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(9, 4, 2))
        expected = unlisted()
    assert torch.equal(_keyed(unlisted, intercept_all=True), expected)


def test_attention_without_dropout_draws_nothing() -> None:
    """torch tags fused attention as random whatever its dropout is; a model without dropout is not refused for that."""
    q = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert needs_full_interception(lambda: F.scaled_dot_product_attention(q, q, q).sum(), CPU) is False
    assert _keyed(lambda: F.scaled_dot_product_attention(q, q, q), intercept_all=True).shape == q.shape


def test_an_operation_that_takes_no_generator_is_refused() -> None:
    probabilities = torch.rand(10, generator=torch.Generator().manual_seed(0))
    fused = torch.ops.aten.native_dropout

    def draw() -> torch.Tensor:
        drawn: torch.Tensor = fused(probabilities, 0.5, True)[0]
        return drawn

    with pytest.raises(UnkeyedRandomnessError, match="native_dropout"):
        needs_full_interception(draw, CPU)
    with pytest.raises(UnkeyedRandomnessError, match="native_dropout"):
        _keyed(draw, intercept_all=True)


REPLAYING: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": replaying}


@pytest.mark.parametrize("how", [{"use_reentrant": False}, {"use_reentrant": True}, REPLAYING])
def test_checkpointing_that_draws_other_masks_again_is_refused(how: dict[str, Any]) -> None:
    """The trial before step 1 refuses masks that are drawn anew, and neither refuses nor counts those drawn again."""
    x = torch.ones(20, requires_grad=True)

    def forward() -> LeafLoss:
        y = checkpoint(lambda v: F.dropout(v, 0.5) * 3.0, x, **how)
        return LeafLoss(y.sum(), torch.zeros((), dtype=torch.int64))

    if how is REPLAYING:
        assert needs_full_interception(forward, CPU) is False
    else:
        with pytest.raises(UnkeyedRandomnessError, match="backward"):
            needs_full_interception(forward, CPU)


@pytest.mark.parametrize("intercept_all", [False, True])
@pytest.mark.parametrize("draw", [F.dropout, noisy])
def test_what_is_computed_again_draws_what_it_drew(draw: Callable[..., torch.Tensor], intercept_all: bool) -> None:
    """Two regions with a draw between them; the backward pass leaves the random stream where it was."""

    def gradient(*, again: bool) -> torch.Tensor:
        x = torch.linspace(0.1, 1.0, 64, requires_grad=True)

        def region(v: torch.Tensor) -> torch.Tensor:
            return torch.tanh(draw(v, 0.5)) * draw(v, 0.5)

        with KeyedRandomness(9, CPU, intercept_all=intercept_all).micro_batch(4, 2):
            for _ in range(2):
                y = checkpoint(region, x, **REPLAYING) if again else region(x)
                dropped = F.dropout(y, 0.3)
                dropped.sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(again=True), gradient(again=False))


def test_keys_are_apart() -> None:
    keys = {key(seed, step, index) for seed in range(6) for step in range(6) for index in range(6)}
    assert len(keys) == 216
    assert all(0 <= value < 1 << 63 for value in keys)


# Masks drawn on the CPU for other devices.

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
    # Other kinds of dropout pass if they drop nothing.
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
