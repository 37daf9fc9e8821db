"""What compiled passes need, read off graphs: a few layers stand for all, and a graph's peak is that of its kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from andon.model import memory_compiled
from andon.model.adapter import AdapterSpec, attach
from andon.model.build import build_shape
from andon.model.memory import rounded
from andon.model.memory_compiled import _layers_of, _Passes, compiled_activations, peak_of, shortened
from andon.model.memory_trace import hollow
from tests.model.tiny import CAUSAL, spec


def shape(layers: int) -> nn.Module:
    """A decoder of so many layers, with an adapter and dropout."""
    sizes = dataclasses.replace(spec(), hidden_size=64, intermediate_size=128, num_hidden_layers=layers, dropout=0.1)
    return attach(build_shape(sizes), AdapterSpec(r=4, dropout=0.1), 0)


@pytest.mark.parametrize("layers", [1, 3, 4, 36])
def test_a_few_layers_stand_for_all(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each layer needs 7 bytes and the rest 100, so does a model of many, of which few are looked at."""
    looked: list[int] = []

    def traced(model: nn.Module, *_: int) -> _Passes:
        looked.append(len(_layers_of(model)))
        return _Passes(100 + 7 * looked[-1], 0, torch.empty(0))

    monkeypatch.setattr(memory_compiled, "_traced", traced)
    assert compiled_activations(shape(layers), 4, 16) == 100 + 7 * layers
    assert max(looked) <= 3


def test_a_model_has_all_its_layers_again() -> None:
    model = shape(4)
    layers = list(_layers_of(model))
    try:
        with shortened(model, 2):
            assert len(_layers_of(model)) == 2
            raise KeyError
    except KeyError:
        pass
    assert list(_layers_of(model)) == layers


def made(graph: Graph, name: str, rows: int) -> Node:
    """A placeholder of `rows` rows of a thousand fp32 values."""
    node = graph.placeholder(name)
    node.meta["val"] = torch.empty(rows, 1000, device="meta")
    return node


def product(graph: Graph, x: Node, weight: Node) -> Node:
    """What a kernel of its own makes of `x`."""
    node = graph.call_function(torch.ops.aten.mm.default, (x, weight))
    node.meta["val"] = torch.empty(x.meta["val"].shape[0], 1000, device="meta")
    return node


def test_the_peak_is_what_lives_at_once() -> None:
    """Three products in a row: two of their values live at a time, the caller's input as long as it is used; weights
    do not count, nor what is fused between them, and a view has no memory."""
    graph = Graph()
    x, weight = made(graph, "tangents_1", 300), made(graph, "primals_1", 1000)
    first = product(graph, x, weight)
    shown = graph.call_function(torch.ops.aten.view.default, (first, [300, 1000]))
    shown.meta["val"] = torch.empty(300, 1000, device="meta")
    second = product(graph, shown, weight)
    fused = graph.call_function(torch.ops.aten.mul.Tensor, (second, 2.0))
    fused.meta["val"] = torch.empty(300, 1000, device="meta")
    graph.output((product(graph, fused, weight),))
    one = rounded(300 * 1000 * 4)
    assert peak_of(GraphModule(nn.Module(), graph)) == 2 * one
    kept = Graph()
    x, weight = made(kept, "tangents_1", 300), made(kept, "primals_1", 1000)
    first = product(kept, x, weight)
    second = product(kept, first, weight)
    kept.output((first, product(kept, second, weight), x))
    assert peak_of(GraphModule(nn.Module(), kept)) == 4 * one


def test_what_is_only_returned_keeps_nothing_alive() -> None:
    """Three times two products, a sum of them that goes on, and another that is returned, at the end of the graph.

    A compiler makes both sums at once, so the products die there: at the most there are two sums that were returned
    before, what the last products are made of, both of these, and both of their sums.
    """
    graph = Graph()
    x, weight = made(graph, "tangents_1", 300), made(graph, "primals_1", 1000)
    pairs = []
    for _ in range(3):
        pairs.append((product(graph, x, weight), product(graph, x, weight)))
        x = both(graph, pairs[-1])
    graph.output((x, *[both(graph, pair) for pair in pairs]))
    assert peak_of(GraphModule(nn.Module(), graph)) == 7 * rounded(300 * 1000 * 4)


def both(graph: Graph, pair: tuple[Node, Node]) -> Node:
    """Their sum, which is fused with what is around it."""
    node = graph.call_function(torch.ops.aten.add.Tensor, pair)
    node.meta["val"] = torch.empty(300, 1000, device="meta")
    return node


# By default: attention of a traced pass (test_memory_trace) keeps no matrix of pairs on a GPU, with dropout too.
@pytest.mark.deep
def test_attention_with_dropout_keeps_no_weights_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs' kernels draw them again. A CPU's would keep two values for each pair of tokens and head."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # else its thread outlives the tracing
    found = []
    for dropout in (0.1, 0.0):
        sizes = dataclasses.replace(spec("encoder"), hidden_size=64, num_hidden_layers=1, dropout=0.1, max_length=256)
        model = attach(build_shape(sizes), AdapterSpec(r=4, dropout=0.1), 0)
        for module in model.modules():
            if hasattr(module, "query"):
                module.dropout.p = dropout
        found.append(_compiled(model))
    assert found[0] <= 1.05 * found[1]


def test_a_large_vocabulary_needs_its_logits_while_all_else_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of a small width: most of the plan is what logits need, 4 rows of 256 tokens by 100,000 words."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    sizes = dataclasses.replace(CAUSAL, hidden_size=64, num_hidden_layers=1, vocab_size=100_000, max_length=256)
    all_logits = 4 * 256 * 100_000 * 4
    assert _compiled(attach(build_shape(sizes), AdapterSpec(r=4, targets=("q_proj",)), 0)) > all_logits


def _compiled(model: nn.Module) -> int:
    with hollow(model):
        return compiled_activations(model, 4, 256)
