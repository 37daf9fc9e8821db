"""A traced decoder computes the same after it was rewritten, and each rewriting finds what it is for."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager, aot_eager_decomp_partition
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForSequenceClassification, Qwen3Config, Qwen3ForSequenceClassification

from andon.config.schema import Adapter
from andon.model.adapter import attach
from andon.model.build import backbone_of
from andon.model.compiled import (
    exchanged_halves,
    hashed_dropout,
    last_real,
    only_at,
    picked,
    reading_last_tokens,
    rewrite,
    traced,
)
from andon.model.masks import masked, possible_maskings

PAD = 0
LAYERS = 2
IDS = torch.tensor([[5, 6, 7, 8, 9, 3, 2, 4], [5, 9, 2, PAD, PAD, PAD, PAD, PAD], [7, 1, 1, 1, 1, 1, 1, PAD]])


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one test traced is not found by another, and the compiler's bar of progress leaves no thread."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    yield
    torch._dynamo.reset()


def decoder(kind: str = "qwen3", *, dropout: float = 0.0, targets: tuple[str, ...] = ("q_proj", "v_proj")) -> nn.Module:
    """Two layers, fewer heads of keys than of queries, an adapter whose second factor is not zero."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "vocab_size": 16,
        "pad_token_id": PAD,
        "use_cache": False,
        "num_labels": 3,
    }
    torch.manual_seed(3)
    base: nn.Module
    if kind == "qwen3":
        base = Qwen3ForSequenceClassification(Qwen3Config(**sizes))
    else:
        base = LlamaForSequenceClassification(LlamaConfig(**sizes))
    model = attach(base, Adapter(r=4, alpha=6.0, dropout=dropout, targets=targets), 1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return model.train()


Graphs = list[list[str]]


def rewriting(graphs: Graphs, compiler: Callable[..., Any] = aot_eager) -> Callable[..., Any]:
    """A backend that rewrites, notes the names of what each graph then calls, and makes no kernels."""

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        rewrite(module)
        module.graph.lint()
        called = [node for node in module.graph.nodes if node.op.startswith("call")]
        graphs.append([getattr(node.target, "__name__", str(node.target)) for node in called])
        return compiler(module, inputs)

    return backend


def rewritten(model: nn.Module) -> tuple[Callable[..., Any], Graphs]:
    """The model's backbone traced and rewritten; the calls of each of its graphs."""
    graphs: Graphs = []
    return traced(model, rewriting(graphs)), graphs


def passed(model: nn.Module, forward: Callable[..., Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    backbone = backbone_of(model)
    before = backbone.forward
    backbone.forward = forward
    model.zero_grad()
    try:
        with masked(model, possible_maskings(model)[0], (IDS != PAD).long()) as mask:
            logits = model(input_ids=IDS, attention_mask=mask).logits
        logits.square().sum().backward()
    finally:
        backbone.forward = before
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("kind", "targets"), [("qwen3", ("q_proj", "v_proj")), ("llama", ("q_proj", "o_proj", "down_proj"))]
)
def test_a_rewritten_decoder_computes_what_it_did(kind: str, targets: tuple[str, ...]) -> None:
    model = decoder(kind, targets=targets)
    logits, gradients = passed(model, backbone_of(model).forward)
    forward, _ = rewritten(model)
    again, others = passed(model, forward)

    torch.testing.assert_close(again, logits, rtol=1e-5, atol=1e-6)
    assert others.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (others[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_each_rewriting_finds_its_part() -> None:
    model = decoder(dropout=0.1)
    forward, graphs = rewritten(model)
    passed(model, forward)
    (found,) = graphs
    counts = {name: found.count(name) for name in ("adapted_product", "exchanged_halves", "hashed_dropout", "picked")}
    assert counts == {
        "adapted_product": 2 * LAYERS,
        "exchanged_halves": 2 * LAYERS,
        "hashed_dropout": 2 * LAYERS,
        "picked": 2,  # the last attention's output, and what is added to it
    }
    assert found.count("kept.default") == 2  # one cosine and one sine for all layers
    assert "dropout" not in found


@given(st.lists(st.integers(0, 2**31 - 2), min_size=2, max_size=2), st.floats(0.01, 0.99), st.integers(1, 40))
def test_what_is_dropped_is_a_law_of_keys_and_place(keys: list[int], rate: float, count: int) -> None:
    """The documented hash in Python's integers: masks are part of a run's result and must not change by accident."""
    values = hashed_dropout(torch.full((count,), 3.0), torch.tensor(keys, dtype=torch.int32), rate).tolist()
    for place, value in enumerate(values):
        bits = (place ^ keys[0]) * 0x9E3779B1 % 2**32
        bits = ((bits ^ bits >> 15) + keys[1]) * 0x85EBCA6B % 2**32
        bits = (bits ^ bits >> 13) * 0xC2B2AE35 % 2**32
        bits ^= bits >> 16
        assert value == pytest.approx(0.0 if bits % 2**31 < round(rate * 2**31) else 3.0 / (1 - rate))


def test_dropout_is_keyed_by_the_stream_and_differs_by_its_place() -> None:
    model = decoder(dropout=0.5)
    forward, _ = rewritten(model)

    def seeded(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return passed(model, forward)[0]

    assert torch.equal(seeded(1), seeded(1))
    assert not torch.equal(seeded(1), seeded(2))
    keys = torch.ops.andon.drawn_keys(50, torch.device("cpu"))
    assert len(set(map(tuple, keys.tolist()))) == 50


@given(st.integers(1, 5), st.integers(1, 7))
def test_halves_are_exchanged_to_the_bit(rows: int, half: int) -> None:
    x = torch.randn(rows, 2 * half, requires_grad=True)
    a, b = x[..., :half], x[..., half:]
    stands_for = torch.cat((-b, a), dim=-1)
    weights = torch.randn(rows, 2 * half)
    assert torch.equal(exchanged_halves(x), stands_for)
    (gradient,) = torch.autograd.grad((exchanged_halves(x) * weights).sum(), x)
    (expected,) = torch.autograd.grad((stands_for * weights).sum(), x)
    assert torch.equal(gradient, expected)


@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=5))
def test_the_last_real_token_is_the_one_that_the_head_reads(rows: list[list[int]]) -> None:
    chosen = last_real(torch.tensor(rows), PAD)
    for row, mask in zip(rows, chosen.tolist(), strict=True):
        real = [place for place, token in enumerate(row) if token != PAD]
        assert [place for place, yes in enumerate(mask) if yes] == [real[-1] if real else 0]


COUNT = 200_000


def keys_of(seed: int, count: int) -> torch.Tensor:
    """int32 [count, 2]."""
    return torch.randint(2**31 - 1, (count, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


def test_masks_of_different_keys_and_places_are_unrelated() -> None:
    """Within six standard deviations, 1/sqrt(200,000), for some three thousand pairs; near keys are among them."""
    near = torch.tensor([[77, 5], [77, 4], [76, 6], [78, 7], [77 ^ 2**20, 8], [5, 77]], dtype=torch.int32)
    keys = torch.cat([near, keys_of(2, 40)])
    masks = torch.stack([hashed_dropout(torch.ones(COUNT), each, 0.1) for each in keys])
    centred = masks - masks.mean(dim=1, keepdim=True)
    unit = centred / centred.norm(dim=1, keepdim=True)
    limit = 6 / math.sqrt(COUNT)
    assert (unit @ unit.t() - torch.eye(len(keys))).abs().max() < limit
    for lag in (1, 2, 3, 7, 64, 128, 2560, 4096, 65_536):
        assert (unit[:, lag:] @ unit[:, :-lag].t()).abs().max() < limit, lag


def test_masks_of_keys_that_differ_in_the_first_alone_are_unrelated() -> None:
    """They are each other's with places exchanged, so that at one place they agree as often as by chance."""
    keys = torch.tensor([[first, 5] for first in (0, 1, 2, 64, 4096, 12_345_678)], dtype=torch.int32)
    masks = torch.stack([hashed_dropout(torch.ones(COUNT), each, 0.5) - 1 for each in keys])
    # A pair of places that are exchanged counts twice, which makes the deviation of independent draws 2^0.5 of it.
    assert (masks @ masks.t() / COUNT - torch.eye(len(keys))).abs().max() < 6 * math.sqrt(2 / COUNT)


def test_what_is_not_finite_is_not_hidden_by_dropping_it() -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf]).repeat(100)
    for keys in keys_of(3, 5):
        assert not hashed_dropout(values, keys, 0.5).isfinite().any()


# A graph in which a rewriting would compute something else, or fail, keeps what it has there.


def compared(function: Callable[..., Tensor], *inputs: Tensor) -> list[str]:
    """What the rewritten graph of `function` calls, after its value and its gradients were found to be the same."""
    graphs: Graphs = []
    results = []
    for run in (function, torch.compile(function, backend=rewriting(graphs), dynamic=False)):
        leaves = [each.clone().detach().requires_grad_(each.requires_grad) for each in inputs]
        value = run(*leaves)
        torch.autograd.backward(value.square().sum())
        results.append([value.detach(), *leaves, *(leaf.grad for leaf in leaves)])
    for found, expected in zip(results[1], results[0], strict=True):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    (calls,) = graphs
    return calls


ROWS, LENGTH, SIZE = 3, 5, 8
X = torch.randn(ROWS, LENGTH, SIZE, generator=torch.Generator().manual_seed(1)).requires_grad_()
CHOSEN = torch.eye(LENGTH, dtype=torch.bool)[[2, 4, 0]]


def half_given_by_name(x: Tensor) -> Tensor:
    return torch.cat(tensors=(-x[..., SIZE // 2 :], x[..., : SIZE // 2]), dim=-1)


def half_written_between(x: Tensor) -> Tensor:
    """One half is taken before, the other after the tensor is changed."""
    y = x * 1
    upper = -y[..., SIZE // 2 :]
    y.mul_(2)
    return torch.cat((upper, y[..., : SIZE // 2]), dim=-1)


def half_without_gradient(x: Tensor) -> Tensor:
    """Only one half learns."""
    with torch.no_grad():
        upper = -x[..., SIZE // 2 :]
    return torch.cat((upper, x[..., : SIZE // 2]), dim=-1)


@pytest.mark.parametrize(
    ("rotation", "replaced"), [(half_given_by_name, 1), (half_written_between, 0), (half_without_gradient, 0)]
)
def test_halves_are_exchanged_only_where_they_are_of_one_tensor(rotation: Any, replaced: int) -> None:
    assert compared(rotation, X).count("exchanged_halves") == replaced


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: functional.dropout(input=x, training=True, p=0.3) * 0, 1),
        # As adapters on a model's first layer do, whose input the model dropped itself.
        (lambda x: functional.dropout(functional.dropout(x, 0.3), 0.2) * 0, 2),
        (lambda x: functional.dropout(x, 0.5, training=False) + functional.dropout(x, 0.5, False), 0),
        (lambda x: functional.dropout(x, 1.0) + functional.dropout(x, 0.0), 0),
    ],
    ids=["by name", "of what was dropped", "in evaluation", "of everything and of nothing"],
)
def test_dropout_that_draws_is_found(function: Callable[[Tensor], Tensor], count: int) -> None:
    assert compared(function, X).count("hashed_dropout") == count


def test_each_dropout_keeps_its_own_rate() -> None:
    graphs: Graphs = []

    def both(x: Tensor) -> Tensor:
        return torch.stack((functional.dropout(x, 0.1), functional.dropout(x, 0.6)))

    kept = (torch.compile(both, backend=rewriting(graphs), dynamic=False)(torch.ones(10_000)) != 0).sum(1)
    assert abs(int(kept[0]) - 9000) < 180  # six standard deviations
    assert abs(int(kept[1]) - 4000) < 294


def test_dropout_in_place_stays() -> None:
    def twice(x: Tensor) -> Tensor:
        y = x.detach() * 1
        return functional.dropout(y, 0.5, inplace=True) - y + x * 0

    assert "hashed_dropout" not in compared(twice, X)


def test_dropouts_of_one_pass_drop_apart() -> None:
    graphs: Graphs = []

    def both(x: Tensor) -> Tensor:
        return torch.stack((functional.dropout(x, 0.5), functional.dropout(x, 0.5)))

    one, other = torch.compile(both, backend=rewriting(graphs), dynamic=False)(torch.ones(10_000)) != 0
    assert graphs[0].count("hashed_dropout") == 2
    assert abs(int((one == other).sum()) - 5000) < 300  # six standard deviations
    assert torch.Tag.nondeterministic_seeded in torch.ops.andon.drawn_keys.default.tags


linear = functional.linear


def by_name(x: Tensor, weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
    narrow = linear(input=x, weight=first)
    return linear(input=x, weight=weight) + linear(input=narrow, weight=second) * 0.5


def written_between(x: Tensor, weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
    y = x * 1
    base = linear(y, weight)
    y.add_(1)
    return base + linear(linear(y, first), second) * 0.5


def scaled_is_written(x: Tensor, weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
    scaled = linear(linear(x, first), second) * 0.5
    scaled.add_(1)
    return linear(x, weight) + scaled


def base_learns_nothing(x: Tensor, weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
    with torch.no_grad():
        base = linear(x, weight)
    return base + linear(linear(x, first), second) * 0.5


def adapter_learns_nothing(x: Tensor, weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
    with torch.no_grad():
        added = linear(linear(x, first), second)
    return linear(x, weight) + added * 0.5


def in_half_precision(x: Tensor, weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Products of another type than that of the weight; made of small integers, whose products are exact."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return by_name(*(each.sign() for each in (x, weight, first, second)))


OTHER_SUMS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "of one row": lambda x, weight, first, second: linear(x, weight) + linear(linear(x[:1], first), second) * 0.5,
    # The adapted weight gets a gradient, too: it is made from `second`.
    "of a trained weight": lambda x, _, first, second: (
        linear(x, second @ first) + linear(linear(x, first), second) * 0.5
    ),
    "of one token": lambda x, weight, first, second: by_name(x[0, 0], weight, first, second),
    "of no rows": lambda x, weight, first, second: by_name(x[:0], weight, first, second).sum() + x.sum(),
    "to one value": lambda x, weight, first, second: by_name(x, weight[0], first, second[0]),
    # Its gradient has conjugates.
    "complex": lambda x, weight, first, second: by_name(x * (1 + 2j), weight * (1 - 3j), first + 0j, second * 1j).abs(),
    "in half precision": in_half_precision,
    "written between": written_between,
    "scaled is written": scaled_is_written,
    "base learns nothing": base_learns_nothing,
    "adapter learns nothing": adapter_learns_nothing,
}


@pytest.mark.parametrize("name", ["by name", *OTHER_SUMS])
def test_adapters_are_added_in_place_only_where_it_is_the_same(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(*shape, generator=generator) for shape in ((SIZE, SIZE), (2, SIZE), (SIZE, 2))]
    function = OTHER_SUMS.get(name, by_name)
    calls = compared(function, X, weights[0], weights[1].requires_grad_(), weights[2].requires_grad_())
    assert calls.count("adapted_product") == (1 if name == "by name" else 0)


def normed_over_tokens(x: Tensor) -> Tensor:
    return functional.layer_norm(x.sin(), (LENGTH, SIZE))


def meant_over_tokens(x: Tensor) -> Tensor:
    return x * x.mean(1, keepdim=True)


def scaled_without_gradient(x: Tensor) -> Tensor:
    y = x.sin()
    with torch.no_grad():
        scale = y.pow(2).mean(-1, keepdim=True)
    return y * scale


def used_and_written(x: Tensor) -> Tensor:
    y = x.sin()
    before = y * 2
    y.add_(1)
    return before + y * 3


def used_elsewhere(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin() * 2
    return y * 3, y


def written_in_place(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin()
    return functional.relu(y, inplace=True) * 2, y


@pytest.mark.parametrize(
    ("function", "spared"),
    [
        *((normed_over_tokens, 0), (meant_over_tokens, 2), (scaled_without_gradient, 0)),
        *((used_and_written, 0), (used_elsewhere, 1), (written_in_place, 0)),
    ],
)
def test_tokens_are_left_out_only_where_each_is_by_itself(function: Any, spared: int) -> None:
    def ends(x: Tensor, chosen: Tensor) -> Tensor:
        found = function(x)
        if isinstance(found, tuple):
            return only_at(found[0], chosen) + found[1]
        return only_at(found, chosen)

    assert compared(ends, X, CHOSEN).count("picked") == spared


def test_layers_that_compute_again_are_rewritten_but_for_their_dropout() -> None:
    graphs: Graphs = []

    def note(module: torch.fx.GraphModule, inputs: Any) -> Any:
        rewrite(module)
        graphs.extend(
            [getattr(node.target, "__name__", "") for node in each.graph.nodes]
            for each in module.modules()
            if isinstance(each, torch.fx.GraphModule) and each is not module
        )
        codes = [each.code for each in module.children() if isinstance(each, torch.fx.GraphModule)]
        assert all("exchanged_halves" in code for code in codes)
        return aot_eager(module, inputs)

    def layer(x: Tensor) -> Tensor:
        return functional.dropout(torch.cat((-x[..., SIZE // 2 :], x[..., : SIZE // 2]), dim=-1), 0.5)

    def again(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(layer, x, use_reentrant=False)
        return result

    torch.compile(again, backend=note, dynamic=False)(X)
    (inner,) = graphs
    assert inner.count("exchanged_halves") == inner.count("dropout") == 1
    assert "hashed_dropout" not in inner


def test_the_backward_pass_drops_what_the_forward_pass_did() -> None:
    """With what is kept for it chosen as inductor chooses: keys drawn again there would drop others."""
    graphs: Graphs = []

    def squared(x: Tensor) -> Tensor:
        return (functional.dropout(x, 0.5) * x.detach().cos()).sin()

    run = torch.compile(squared, backend=rewriting(graphs, aot_eager_decomp_partition), dynamic=False)
    x = torch.randn(50, 40).requires_grad_()
    value = run(x)
    torch.autograd.backward(value.sum())
    assert x.grad is not None
    assert graphs[0].count("hashed_dropout") == 1
    assert torch.equal(x.grad == 0, value == 0)
    assert 800 < int((value == 0).sum()) < 1200  # of 2000; nine standard deviations


# Which tokens a head reads, and that one of which that is not known is given all of them.


def test_a_picked_token_keeps_its_type() -> None:
    """Autocast on a GPU sums in fp32 unless it is told not to; what follows would then round otherwise."""
    x = torch.randn(3, 5, 8, dtype=torch.bfloat16)
    chosen = torch.eye(5, dtype=torch.bool)[[2, 4, 0]]
    given: list[object] = []

    class Sums(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.sum:
                given.append((kwargs or {}).get("dtype"))
            return func(*args, **(kwargs or {}))

    with Sums():
        one = picked(x, chosen)
    assert given == [torch.bfloat16]
    assert torch.equal(one[:, 0], x[chosen])


class Mean(Qwen3ForSequenceClassification):
    """Somebody's own head, which reads every token."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs).last_hidden_state.mean(1)


def classifier(kind: type[Qwen3ForSequenceClassification] = Qwen3ForSequenceClassification) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
    heads: dict[str, Any] = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "num_labels": 3}
    torch.manual_seed(3)
    return kind(Qwen3Config(**sizes, **heads, pad_token_id=0, use_cache=False))


class Mixing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


def test_a_head_that_mixes_tokens_is_given_all_of_them() -> None:
    mixing, replaced, scored = classifier(), classifier(), classifier()
    mixing.score = Mixing(8, 3)
    replaced.forward = types.MethodType(lambda self, ids: self.model(ids).last_hidden_state.mean(1), replaced)
    scored.score.forward = types.MethodType(Mixing.forward, Mixing(8, 3))
    for head in (mixing, replaced, scored, classifier(Mean)):
        forward = head.model.forward
        assert reading_last_tokens(forward, head) is forward
    assert reading_last_tokens(forward, nn.Linear(1, 1)) is forward
    plain = classifier()
    assert reading_last_tokens(plain.model.forward, plain) is not plain.model.forward


def test_hidden_states_of_other_tokens_than_those_given_are_kept() -> None:
    """A backbone that adds tokens of its own, or is given embeddings, has no token that is known to be the last."""
    head = classifier().eval()
    real = head.model.forward

    def longer(*args: Any, **kwargs: Any) -> Any:
        output = real(*args, **kwargs)
        output.last_hidden_state = functional.pad(output.last_hidden_state, (0, 0, 1, 0), value=2.0)
        return output

    ids = torch.tensor([[5, 6, 0]])
    reading = reading_last_tokens(longer, head)
    assert torch.equal(reading(ids).last_hidden_state, longer(ids).last_hidden_state)
    embeddings = head.model.embed_tokens(ids).detach()
    reading = reading_last_tokens(real, head)
    kept = reading(inputs_embeds=embeddings).last_hidden_state
    assert torch.equal(kept, real(inputs_embeds=embeddings).last_hidden_state)


def test_the_padding_is_that_which_the_head_looks_for() -> None:
    head = classifier().eval()
    text = Qwen3Config(pad_token_id=6)
    head.config.get_text_config = lambda *_, **__: text
    ids = torch.tensor([[5, 6, 0], [5, 7, 6]])
    hidden = reading_last_tokens(head.model.forward, head)(ids).last_hidden_state
    assert hidden.ne(0).any(-1).tolist() == [[False, False, True], [False, True, False]]
