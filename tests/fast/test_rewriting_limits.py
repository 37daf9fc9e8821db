"""A graph in which a rewriting would compute something else, or fail, keeps what it has there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager, aot_eager_decomp_partition
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from andon.fast.rewrites import only_at, rewrite

Graphs = list[list[str]]


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one test traced is not found by another, and the compiler's bar of progress leaves no thread."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    yield
    torch._dynamo.reset()


def rewriting(graphs: Graphs, compiler: Callable[..., Any] = aot_eager) -> Callable[..., Any]:
    """A backend that rewrites, notes the names of what each graph then calls, and makes no kernels."""

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        rewrite(module)
        module.graph.lint()
        called = [node for node in module.graph.nodes if node.op.startswith("call")]
        graphs.append([getattr(node.target, "__name__", str(node.target)) for node in called])
        return compiler(module, inputs)

    return backend


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
    """Each has keys of its own, from an operation that no compiler may take for a constant."""
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
    """A sum that looks like an adapter's, and is none or has other gradients, stays what it is."""
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


@pytest.mark.parametrize(
    ("function", "spared"),
    [(normed_over_tokens, 0), (meant_over_tokens, 2), (scaled_without_gradient, 0), (used_and_written, 0)],
)
def test_tokens_are_left_out_only_where_each_is_by_itself(function: Any, spared: int) -> None:
    def ends(x: Tensor, chosen: Tensor) -> Tensor:
        result: Tensor = only_at(function(x), chosen)
        return result

    assert compared(ends, X, CHOSEN).count("picked") == spared


def test_what_is_used_elsewhere_has_every_token() -> None:
    def ends(x: Tensor, chosen: Tensor) -> Tensor:
        y = x.sin() * 2
        result: Tensor = only_at(y * 3, chosen)
        return result + y

    assert compared(ends, X, CHOSEN).count("picked") == 1


def test_layers_that_compute_again_are_rewritten_but_for_their_dropout() -> None:
    """Their draws are repeated by means of their own, which a graph of keys outside of them would not be."""
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


def test_what_is_written_in_place_stays_written() -> None:
    def ends(x: Tensor, chosen: Tensor) -> Tensor:
        y = x.sin()
        result: Tensor = only_at(functional.relu(y, inplace=True) * 2, chosen)
        return result + y

    compared(ends, X, CHOSEN)


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
