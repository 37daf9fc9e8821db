"""A frozen product with what an adapter adds to it, as one operation: the sum is made where the product already is.

Made apart, the adapter's product is written, read and added, and backward a scaled copy of the gradient is made.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import library, nn
from torch.fx import Graph, Node

from andon.model.nodes import calls_of, given_to, known, replace_node, unwritten, value_of

_LINEAR: Any = nn.functional.linear


def add_in_place(graph: Graph) -> None:
    """Replace each `linear(x, weight) + scale * linear(narrow, low)` by `adapted_product`, where nothing else uses the
    first product, its weight is frozen, and both are computed when they are added, for the same gradients."""
    for total in calls_of(graph, operator.add):
        found = _adapted(total)
        if found is not None:
            replace_node(total, adapted_product, *found)


def _adapted(total: Node) -> tuple[Any, ...] | None:
    """The arguments of `adapted_product` that give `total`; None: it is another sum."""
    base: Any
    scaled: Any
    base, scaled = total.args
    if not known(base, scaled) or scaled.target is not operator.mul:
        return None
    product, scale = scaled.args
    if not known(product) or not isinstance(scale, float) or len(base.users) > 1:
        return None
    first, second = _operands(base), _operands(product)
    if first is None or second is None or value_of(first[1]).requires_grad:
        return None
    same = _alike(total, base, scaled, product, first[1]) and unwritten(base, scaled, product, first[0], second[0])
    return (*first, *second, scale) if same else None


def _alike(total: Any, base: Any, scaled: Any, product: Any, weight: Node) -> bool:
    """Whether the products are of one shape and of the type of `weight`."""
    shapes = {value_of(node).shape for node in (base, product)}
    types = {value_of(node).dtype for node in (base, scaled, product, total, weight)}
    return len(shapes) == len(types) == 1 and types.pop().is_floating_point


def _operands(node: Any) -> tuple[Node, Node] | None:
    """What `node` multiplies by which weight, if it is a product without a bias, and has a gradient if those have."""
    if node.target is not _LINEAR:
        return None
    given = given_to(node, "input", "weight", "bias")
    x, weight = given["input"], given["weight"]
    if given.get("bias") is not None or not known(x, weight):
        return None
    learns = value_of(x).requires_grad or value_of(weight).requires_grad
    plain = value_of(x).dim() > 1 and value_of(weight).dim() == 2 and value_of(node).numel() > 0
    return (x, weight) if plain and learns == value_of(node).requires_grad else None


def adapted_product(
    x: torch.Tensor, weight: torch.Tensor, narrow: torch.Tensor, low: torch.Tensor, scale: float
) -> torch.Tensor:
    """x weight' + scale * narrow low', in the type of the weight. x: [..., in]. weight: [out, in], frozen. narrow:
    [..., r]. low: [out, r]. Returns [..., out]."""
    dtype = weight.dtype
    product: torch.Tensor = torch.ops.andon.adapted_product(x.to(dtype), weight, narrow.to(dtype), low.to(dtype), scale)
    return product


@library.custom_op(
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
