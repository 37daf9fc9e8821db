"""A frozen product with what an adapter adds to it, as one operation: the sum is made where the product already is.

Made apart, the adapter's product is written, read and added, and backward a scaled copy of the gradient is made.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from andon.model.nodes import replace_node, value_of

_LINEAR: Any = torch._C._nn.linear


def add_in_place(graph: Graph) -> None:
    """Replace each `linear(x, weight) + scale * linear(narrow, low)` by `adapted_product`, where nothing else uses the
    first product and its weight is frozen."""
    for total in graph.find_nodes(op="call_function", target=operator.add):
        found = _adapted(total)
        if found is not None:
            replace_node(total, adapted_product, *found)


def _adapted(total: Node) -> tuple[Any, ...] | None:
    """The arguments of `adapted_product` that give `total`; None: it is another sum."""
    base, scaled = total.args
    if not isinstance(base, Node) or not isinstance(scaled, Node) or scaled.target is not operator.mul:
        return None
    product, scale = scaled.args
    if not isinstance(product, Node) or not isinstance(scale, float) or len(base.users) > 1:
        return None
    first, second = _operands(base), _operands(product)
    if first is None or second is None or value_of(first[1]).requires_grad:
        return None
    alike = value_of(base).shape == value_of(product).shape
    same_type = {value_of(node).dtype for node in (base, product, total)} == {value_of(first[1]).dtype}
    return (*first, *second, scale) if alike and same_type else None


def _operands(node: Node) -> tuple[Node, Node] | None:
    """What `node` multiplies by which weight, if it is a product without a bias."""
    if node.target is not _LINEAR or node.args[2:] not in ((), (None,)):
        return None
    x, weight = node.args[:2]
    return (x, weight) if isinstance(x, Node) and isinstance(weight, Node) else None


def adapted_product(
    x: torch.Tensor, weight: torch.Tensor, narrow: torch.Tensor, low: torch.Tensor, scale: float
) -> torch.Tensor:
    """x weight' + scale * narrow low', in the type of the weight. x: [..., in]. weight: [out, in], frozen. narrow:
    [..., r]. low: [out, r]. Returns [..., out]."""
    dtype = weight.dtype
    product: torch.Tensor = torch.ops.andon.adapted_product(x.to(dtype), weight, narrow.to(dtype), low.to(dtype), scale)
    return product


@torch.library.custom_op(
    "andon::adapted_product",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor narrow, Tensor low, float scale) -> Tensor",
)
def _product(
    x: torch.Tensor, weight: torch.Tensor, narrow: torch.Tensor, low: torch.Tensor, scale: float
) -> torch.Tensor:
    product = nn.functional.linear(x.flatten(0, -2), weight)
    product.addmm_(narrow.flatten(0, -2), low.t(), alpha=scale)
    return product.view(*x.shape[:-1], -1)


@_product.register_fake
def _shape(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], len(weight)))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, weight, narrow, low, ctx.scale = inputs
    ctx.save_for_backward(weight, narrow, low)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    weight, narrow, low = ctx.saved_tensors
    of_x = grad @ weight if ctx.needs_input_grad[0] else None
    of_low = (grad.flatten(0, -2).t() @ narrow.flatten(0, -2)) * ctx.scale
    return of_x, None, (grad @ low) * ctx.scale, of_low, None


_product.register_autograd(_gradient, setup_context=_remember)
