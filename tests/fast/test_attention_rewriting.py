"""Which attention of a traced graph our own kernels take: that which is causal and nothing else.

The kernels are a GPU's; here graphs are rewritten as for one, and run as they were.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch.fx import Graph, GraphModule
from torch.nn.functional import scaled_dot_product_attention

from andon.config.schema import Adapter
from andon.fast.attention import causal_attention, supports
from andon.model import compiled as rewrites
from andon.model.build import backbone_of
from andon.model.compiled import replace_causal_attention, traced
from andon.model.masks import Masking, masked, possible_maskings
from tests.model.tiny import adapted, padded_batch

HEADS = torch.randn(2, 4, 6, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
FEWER = HEADS[:, :2].detach().requires_grad_()


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of any type and device count as those that the kernels take."""
    monkeypatch.setattr(rewrites, "supports", lambda *_: True)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    yield
    torch._dynamo.reset()


def noting(found: list[list[tuple[Any, ...]]]) -> Callable[..., Any]:
    """A backend that notes the arguments of each call of `causal_attention` in each graph, and changes nothing."""

    def backend(module: GraphModule, inputs: Any) -> Any:
        rewritten: Graph = copy.deepcopy(module.graph)
        replace_causal_attention(rewritten)
        rewritten.lint()
        found.append([node.args for node in rewritten.find_nodes(op="call_function", target=causal_attention)])
        return aot_eager(module, inputs)

    return backend


def taken(function: Callable[..., torch.Tensor]) -> list[tuple[Any, ...]]:
    """The arguments of the calls that stand in the place of attention in the graph of `function`."""
    found: list[list[tuple[Any, ...]]] = []
    torch.compile(function, backend=noting(found), dynamic=False)(HEADS, FEWER, FEWER)
    (calls,) = found
    return calls


@pytest.mark.parametrize(
    ("function", "scale"),
    [
        (lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 32**-0.5),
        (lambda q, k, v: scaled_dot_product_attention(q, k, v, None, 0.0, True, enable_gqa=True), 32**-0.5),
        (lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True), 0.3),
    ],
    ids=["by names", "by places", "with a scale"],
)
def test_causal_attention_is_taken_with_its_scale(function: Callable[..., torch.Tensor], scale: float) -> None:
    ((*parts, found),) = taken(function)
    assert len(parts) == 3
    assert found == pytest.approx(scale)


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1, enable_gqa=True),
        lambda q, k, v: scaled_dot_product_attention(q, k, v, torch.ones(6, 6).tril().bool(), enable_gqa=True),
        lambda q, k, v: scaled_dot_product_attention(q, k, v, q.new_zeros(2, 1, 6, 6), 0.0, False, enable_gqa=True),
    ],
    ids=["all see all", "weights dropped", "a mask", "a bias"],
)
def test_other_attention_is_left(function: Callable[..., torch.Tensor]) -> None:
    assert taken(function) == []


def test_what_the_kernels_do_not_take_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrites, "supports", supports)
    assert taken(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)) == []


@pytest.mark.parametrize(("masking", "count"), [(Masking.UNMASKED, 2), (Masking.CAUSAL_PAIRS, 0)])
def test_each_layer_of_a_decoder_without_a_mask_has_it(masking: Masking, count: int) -> None:
    model = adapted("decoder", adapter=Adapter(kind="none")).train()
    assert masking in possible_maskings(model)
    found: list[list[tuple[Any, ...]]] = []
    batch, backbone = padded_batch(), backbone_of(model)
    backbone.forward = traced(model, noting(found))
    with masked(model, masking, batch["attention_mask"]) as mask:
        model(input_ids=batch["input_ids"], attention_mask=mask)
    assert sum(map(len, found)) == count
