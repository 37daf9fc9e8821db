"""What the losses of an update weigh, read off the graph of each loss before its backward pass, and one number each of
a raw and of a reduced gradient, of which their quotient is the factor of the reduction (`laws/scale`).

A graph is followed from the loss through what multiplies, adds and stacks scalars, down to the means and sums over
terms. Whatever else stands there makes the weight unknown, and nothing is judged. A number in a tensor is not read
there, since the host would wait for its device: it comes with what else is brought at the update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from andon_contracts.agree import bits_of
from andon_contracts.laws.law import Observations
from andon_contracts.laws.scale import UNKNOWN, Scale, Scaled, close, scale_of
from andon_contracts.watch.values import text_digest

_ELEMENTS = 1024
"""Of one parameter, so many elements stand for all gradients."""
_NODES = 64
"""A graph with more of them ahead of its means is not followed."""
_AS_IT_IS = frozenset(
    f"{name}Backward"
    for name in ("Alias", "Clone", "ReshapeAlias", "Squeeze", "ToCopy", "UnsafeView", "Unsqueeze", "View")
)
_REDUCES, _JOINS = ("MeanBackward0", "SumBackward0"), ("StackBackward0", "CatBackward0")
_OVER_TERMS = _AS_IT_IS | {"MeanBackward", "SumBackward"}
_TIMES = ("MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1")
_BY_ELEMENT = frozenset(
    f"{name}Backward0"
    for name in ("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "Huber", "MseLoss", "SmoothL1Loss")
)
_NONE, _MEAN, _SUM = 0, 1, 2
"""As torch writes the reduction of a loss."""


class _Unknown(Exception):
    """A graph that does not say what the loss weighs."""


@dataclass(frozen=True)
class _Product:
    """A number, times each of the scalars at these places to its power."""

    number: float
    scalars: tuple[tuple[int, int], ...] = ()

    def times(self, other: _Product) -> _Product:
        return _Product(self.number * other.number, self.scalars + other.scalars)

    def value(self, scalars: Sequence[float]) -> float:
        return self.number * math.prod(scalars[place] ** power for place, power in self.scalars)


_ONE, _NOT_KNOWN = _Product(1.0), _Product(0.0)


@dataclass(frozen=True)
class _Part:
    """One mean or sum over terms: by what it is multiplied, and how many terms it has, 0 where that is not known.

    squared: whether the terms are squares.
    """

    factor: _Product
    terms: _Product
    summed: bool
    chosen: bool
    squared: bool

    def weight(self, scalars: Sequence[float]) -> float:
        """What its terms weigh together."""
        return abs(self.factor.value(scalars)) * (self.terms.value(scalars) if self.summed else 1.0)


@dataclass(frozen=True)
class Weight:
    """What a loss weighs: `first`, its first part; `alike`, all parts that weigh as much, perhaps halves of one loss.

    chosen: whether a factor is no whole number, as who weighs a loss writes it. squared: whether the first part is of
    squares. terms: in the parts that are alike; 0 where that is not known.
    """

    first: float
    alike: float
    chosen: bool
    squared: bool
    terms: int


class LossParts:
    """The means and sums over terms that a loss is made of, in order, by its graph as it is now."""

    def __init__(self, loss: Tensor) -> None:
        """Raises `_Unknown` where the graph does not say."""
        self._left = _NODES
        self.scalars: list[Tensor] = []
        """The numbers of the graph that lie in tensors; they may be brought to the CPU before `weight`."""
        self._parts = self._below(_node(loss.grad_fn, loss.output_nr), _ONE, False)

    def weight(self) -> Weight | None:
        """What the loss weighs; None where its numbers do not tell."""
        try:
            scalars = [float(each) for each in self.scalars]
            weights = [part.weight(scalars) for part in self._parts]
            terms = [part.terms.value(scalars) for part in self._parts]
        except (ArithmeticError, RuntimeError, TypeError, ValueError):
            return None
        if not weights or not 0 < weights[0] < math.inf:
            return None
        alike = [place for place, each in enumerate(weights) if math.isclose(each, weights[0], rel_tol=1e-6)]
        known = all(0 < terms[place] < math.inf for place in alike)
        first = self._parts[0]
        return Weight(
            weights[0],
            sum(weights[place] for place in alike),
            # Counts of rows, ranks and micro-batches are whole numbers.
            first.chosen or not all(scalars[place].is_integer() for place, _ in first.factor.scalars),
            first.squared,
            round(sum(terms[place] for place in alike)) if known else 0,
        )

    def _below(self, node: Any, factor: _Product, chosen: bool) -> list[_Part]:
        """The parts below `node`, whose value counts `factor` times."""
        self._left -= 1
        if node is None or not self._left:
            raise _Unknown
        name, inputs = node.name(), _inputs(node)
        one = (name in _REDUCES and _elements(node) == 1) or (name in _JOINS and len(inputs) == 1)
        if one or name.rstrip("012") in _AS_IT_IS or name == "NegBackward0":  # the sign of a loss is nobody's weight
            return self._below(inputs[0], factor, chosen)
        if name in _TIMES:
            place, by, of_choice = self._factor(node, name, inputs)
            return self._below(inputs[place], factor.times(by), chosen or of_choice)
        if name in ("AddBackward0", "SubBackward0"):
            terms = zip(inputs, (_ONE, _Product(float(node._saved_alpha))), strict=False)
            there = [(each, by) for each, by in terms if each is not None]
            return [part for each, by in there for part in self._below(each, factor.times(by), chosen)]
        if name in _REDUCES:
            return self._over(node, name, inputs[0], factor, chosen)
        if node._saved_reduction == _MEAN:
            return [_Part(factor, self._terms(node, _MEAN), False, chosen, _is_square(node))]
        return [self._sum(node, _SUM, factor, chosen)]

    def _over(self, node: Any, name: str, below: Any, factor: _Product, chosen: bool) -> list[_Part]:
        """A mean or a sum over more than one element."""
        count = _elements(node)
        # What multiplies every element multiplies the mean.
        while below is not None:
            inner, inputs = below.name(), _inputs(below)
            if inner in _TIMES and not _by_tensor(below):
                place, by, of_choice = self._factor(below, inner, inputs)
                below, factor, chosen = inputs[place], factor.times(by), chosen or of_choice
            elif inner == "NegBackward0" or inner.rstrip("012") in _AS_IT_IS:
                below = inputs[0]
            else:
                break
        if below is not None and below.name() in _JOINS and len(below.next_functions) == count:
            by = factor.times(_Product(1 / count)) if name.startswith("Mean") else factor
            return [part for each in _inputs(below) for part in self._below(each, by, chosen)]
        if name.startswith("Mean"):
            return [_Part(factor, _Product(float(count)), False, chosen, _is_square(below))]
        # A sum over what a mask or a weight may have been multiplied with has nobody knows how many terms.
        return [self._sum(below, _NONE, factor, chosen)]

    def _factor(self, node: Any, name: str, inputs: list[Any]) -> tuple[int, _Product, bool]:
        """Which input of a product or quotient has a graph, by what it is multiplied, and whether that is of choice.

        Raises `_Unknown` for two losses multiplied, for something divided by one, and for what is no number.
        """
        graphs = [place for place, each in enumerate(inputs) if each is not None]
        if len(graphs) != 1 or (graphs[0] == 1 and name.startswith("Div")):
            raise _Unknown
        value = _saved(node, "other" if graphs[0] == 0 else "self")
        divides = name.startswith("Div")
        if isinstance(value, Tensor):
            return graphs[0], self._read(value, -1 if divides else 1), False
        number = float(value)
        return graphs[0], _Product(1 / number if divides else number), not number.is_integer()

    def _sum(self, node: Any, reduction: int, factor: _Product, chosen: bool) -> _Part:
        """A sum over the terms of a loss of torch, whose reduction is this one. Raises `_Unknown` for anything else."""
        terms = self._terms(node, reduction) if node is not None and node._saved_reduction == reduction else _NOT_KNOWN
        if not terms.number:
            raise _Unknown
        return _Part(factor, terms, True, chosen, _is_square(node))

    def _terms(self, node: Any, reduction: int) -> _Product:
        """How many terms a loss of torch has, or the weight of their classes."""
        name = node.name()
        if name.startswith("NllLoss"):
            # Terms that are ignored are none; where classes are weighed, what is a term depends on whom one asks.
            total = None if reduction == _NONE else _saved(node, "total_weight")
            if total is None or (reduction == _SUM and _has(node, "weight")):
                return _NOT_KNOWN
            return self._read(total, 1)
        if name not in _BY_ELEMENT or any(_has(node, each) for each in ("weight", "pos_weight")):
            return _NOT_KNOWN
        values = _saved(node, "self")
        # The terms of a row with several elements are its elements to one, and the row to another.
        if values is None or not values.dim() or (reduction != _MEAN and values.numel() != values.shape[0]):
            return _NOT_KNOWN
        return _Product(float(values.numel()))

    def _read(self, value: Tensor, power: int) -> _Product:
        """A number to be read later: a copy, since the loop may write it over until then. Raises `_Unknown` for more.

        A tensor of another kind may be a part of one, for which other ranks would be asked.
        """
        odd = type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided
        if odd or value.numel() != 1 or value.is_complex() or value.is_meta:
            raise _Unknown
        self.scalars.append(value.detach().clone())
        return _Product(1.0, ((len(self.scalars) - 1, power),))


def parts_of(loss: Tensor) -> LossParts | None:
    """What `loss`, a scalar with a graph, is made of; None where its graph does not say. Of the `weight` of that:

    A mean of n terms weighs 1, a sum of n terms n; half of either half of that. Waits for no device, and reads nothing
    for which the loop has hooks of its own: those of a checkpoint would compute its part of the model again.
    """
    if loss.grad_fn is None or loss.numel() != 1:
        return None
    try:
        return LossParts(loss)
    # What the loop wrote over since is no number to read, and what is no number is no weight.
    except (_Unknown, ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError):
        return None


def _is_square(node: Any) -> bool:
    """Whether what `node` made are squares, sums of them over some dimensions, or such times a number or a mask."""
    while node is not None:
        name, inputs = node.name(), _inputs(node)
        if name == "PowBackward0":
            return bool(node._saved_exponent == 2)
        if name == "MulBackward0" and None not in inputs:
            # `(p - t) * (p - t)` is two nodes of one kind over the same inputs.
            one, other = inputs
            return one is other or (one.name() == other.name() and one.next_functions == other.next_functions)
        if name in _TIMES or name == "NegBackward0" or name.rstrip("012") in _OVER_TERMS:
            node = next((each for each in inputs if each is not None), None)
        else:
            return bool(name == "MseLossBackward0")
    return False


def _inputs(node: Any) -> list[Any]:
    """The nodes that made what `node` was made of; None for what has no graph."""
    return [_node(each, place) for each, place in node.next_functions]


def _node(node: Any, place: int) -> Any:
    """The node that made output `place` of `node`; DDP's own where that cannot be told, which no weight is read of.

    DDP hands every output of a model on as it is where it looks for unused parameters, as the HF Trainer has it for
    most models, and in the first pass of a static graph. What is no tensor is an output there and no input.
    """
    while node is not None and node.name() == "_DDPSinkBackward":
        if len(node.next_functions) != len(node._input_metadata):
            return node
        node, place = node.next_functions[place]
    return node


def _by_tensor(node: Any) -> bool:
    """Whether elements are multiplied each by its own, as by a mask."""
    held = [getattr(node, f"_saved_{name}", None) for name in ("other", "self") if not _hooked(node, name)]
    return any(isinstance(each, Tensor) and each.numel() != 1 for each in held)


def _has(node: Any, name: str) -> bool:
    """Whether the graph holds such a tensor, as far as it may be asked."""
    return _hooked(node, name) or getattr(node, f"_saved_{name}", None) is not None


def _hooked(node: Any, name: str) -> bool:
    """Whether what the graph holds under this name has a hook of the loop on it."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    return raw is not None and raw.unpack_hook is not None


def _saved(node: Any, name: str) -> Any:
    """What the graph holds under this name; None where that is nothing, or has a hook of the loop on it."""
    return None if _hooked(node, name) else getattr(node, f"_saved_{name}")


def _elements(node: Any) -> int:
    return math.prod(map(int, node._saved_self_sym_sizes))


@dataclass(frozen=True)
class Pass:
    """A backward pass of the loop: what its loss is made of, and the line that asked for it."""

    parts: LossParts | None
    line: str


class Passes:
    """The backward passes of a loop, one after the other."""

    def __init__(self) -> None:
        self.now: Pass | None = None

    def begins(self, loss: Tensor | None, line: str) -> None:
        """A backward pass of `loss` begins; None: of more than one tensor, or with a gradient of its own."""
        self.now = Pass(None if loss is None else parts_of(loss), line)

    def ends(self) -> None:
        """It is over."""
        self.now = None


@dataclass
class Account:
    """What is said of the scale of all updates at the end."""

    updates: int = 0
    known: int = 0
    right: int = 0
    least: float = math.inf
    most: float = 0.0
    changed: bool = False
    """Whether the loop changed gradients after the backward pass by factors of no pattern, as a clipping by hand does:
    two updates of one line, neither of which has the scale of a mean, differ both in their scale and in the factor
    between raw and reduced gradient. A wrong division leaves one of the two as it was.
    """
    _wrong: dict[int, Scale] = field(default_factory=dict)
    """The last of such updates, by line."""

    def add(self, scale: Scale | None) -> None:
        """One more update, whose scale this is."""
        self.updates += 1
        if scale is not None:
            self.known, self.right = self.known + 1, self.right + scale.right
            shown = 1.0 if scale.right else scale.first
            self.least, self.most = min(self.least, shown), max(self.most, shown)
            if not scale.right:
                before = self._wrong.get(scale.line, scale)
                self.changed |= not (close(scale.first, before.first) or close(scale.factor, before.factor))
                self._wrong[scale.line] = scale

    def line(self) -> str:
        """It in words; "" where of no update anything was known."""
        if not self.known:
            return ""
        if self.changed:
            of = f"in {self.known - self.right} of {self.updates} updates"
            others = f"; that of a mean in {self.right}" * (self.right > 0)
            return f"  gradient scale: not comparable {of}: the gradients were changed after the backward pass{others}"
        of = f"in {self.known} of {self.updates} updates, by the losses and reductions that were seen"
        between = f"{self.least:.3f}" + f" to {self.most:.3f}" * (f"{self.least:.3f}" != f"{self.most:.3f}")
        shown = "that of a mean" if self.right == self.known else f"{between} of a mean's"
        return f"  gradient scale: {shown} {of}"


class GradientScale:
    """The weights of the losses in the present window of one optimizer, and the products that tell the factor."""

    def __init__(self, optimizer: torch.optim.Optimizer, members: Sequence[torch.nn.Parameter], passes: Passes) -> None:
        """members: parameters of `optimizer`, of which the last that fits is looked at."""
        self._optimizer, self._passes = optimizer, passes
        self._seen: list[Pass] = []
        self._known = True
        self.dots: list[Tensor] = []
        """Of the raw gradients so far, and of the reduced one."""
        self._raw: Tensor | None = None
        self._numbers: Tensor | None = None
        self._before: Scale | None = None
        self.account = Account()
        fits = [
            place
            for place, p in enumerate(members)
            if p.layout == torch.strided and p.is_floating_point() and p.numel() > 1
        ]
        # What lies nearest to the loss has a gradient also where an adapter begins at zero.
        self.place = fits[-1] if fits else -1
        """Of the parameter that is looked at among `members`; -1: none is."""
        self._of = members[self.place] if fits else None

    def see(self, gradient: Tensor) -> None:
        """A raw gradient of that parameter arrives."""
        now = self._passes.now
        if now is None or now.parts is None:
            self._known = False
        if not self._known:
            return
        assert now is not None
        if not any(each is now for each in self._seen[-1:]):
            self._seen.append(now)
        dots = self._dots(gradient)
        if dots is not None:
            self._raw = dots if self._raw is None else self._raw + dots

    def passed(self, arrived: bool) -> None:
        """A backward pass is over. arrived: any gradient of the optimizer did, so that the one looked at had to."""
        if arrived and not any(each is self._passes.now for each in self._seen[-1:]):
            self._known = False

    def _dots(self, gradient: Tensor) -> Tensor | None:
        """Two products with numbers of no pattern: what is added over ranks is so in these; None, and nothing is known
        of the window, where the gradient does not lie plainly.
        """
        if type(gradient) is not Tensor or gradient.layout != torch.strided or not gradient.is_contiguous():
            self._known = False
            return None
        part = gradient.detach().view(-1)[:_ELEMENTS]
        if self._numbers is None or self._numbers.device != part.device or self._numbers.shape[1] != part.numel():
            # No signs, which a gradient may cancel against: that of the logits of a softmax adds up to zero.
            generator = torch.Generator().manual_seed(_ELEMENTS)
            self._numbers = torch.randn(2, part.numel(), generator=generator, device="cpu").to(part.device)
        # Not `mv`, which a loop under autocast rounds and one that asks for determinism may be refused on a GPU.
        return (self._numbers * part.float()).sum(1)

    def reduced(self) -> None:
        """What there is now is the reduced gradient, before clipping; told again within a window, nothing."""
        if self.dots or not self._known or self._raw is None or self._of is None or self._of.grad is None:
            return
        # A hook of the loop's own may change the gradient on its way.
        if len(self._of._backward_hooks or ()) > 1 or self._of._post_accumulate_grad_hooks:
            self._known = False
            return
        dots = self._dots(self._of.grad)
        if dots is not None:
            # A fused optimizer divides by the scale of the loss in its step.
            scale = getattr(self._optimizer, "grad_scale", None)
            self.dots = [self._raw, dots if scale is None else dots / scale]

    def waiting(self) -> list[list[Tensor]]:
        """What may be brought to the CPU before `values`."""
        return [self.dots, *(each.parts.scalars for each in self._seen if each.parts is not None)]

    def values(self) -> dict[str, int]:
        """What a rank says of its window, in integers."""
        # A line of its own for each loss is a loss of its own each time, as of the parts of a GAN.
        lines = {each.line for each in self._seen}
        found = [None if each.parts is None else each.parts.weight() for each in self._seen]
        known = self._known and len(lines) < 2 and (bool(self.dots) or not found) and None not in found
        weights = [each for each in found if each is not None] if known else []
        counted = bool(weights) and all(weight.terms for weight in weights)
        raw, kept = (each.tolist() for each in self.dots) if known and self.dots else ([0.0, 0.0], [0.0, 0.0])
        return {
            "weight passes": len(weights) if known else UNKNOWN,
            "weight line": text_digest(sorted(lines)) if weights else 0,
            "weight first": bits_of(sum(weight.first for weight in weights)),
            "weight alike": bits_of(sum(weight.alike for weight in weights)),
            "weight terms": sum(weight.terms for weight in weights) if counted else 0,
            "weight chosen": int(any(weight.chosen for weight in weights)),
            "weight squares": int(bool(weights) and all(weight.squared for weight in weights)),
            **{
                f"dot {what} {place}": bits_of(each[place])
                for what, each in (("raw", raw), ("kept", kept))
                for place in (0, 1)
            },
        }

    def judged(self, said: Observations) -> Scaled:
        """The scale of the update at hand, by what all ranks said of it, beside the last one that was known."""
        now, before = scale_of(said), self._before
        self._before = now or before
        self.account.add(now)
        return Scaled(said, None if self.account.changed else now, before)

    def clear(self) -> None:
        """Another window begins, or this one does anew."""
        self._seen, self._raw, self.dots = [], None, []
        self._known = True


def scale_lines(scales: Iterable[GradientScale]) -> list[str]:
    """The closing lines about the scale of the gradient, without repetitions."""
    return list(dict.fromkeys(filter(None, (each.account.line() for each in scales))))
