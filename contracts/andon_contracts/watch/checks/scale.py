"""The scale of an update's gradient, as far as it can be known without computing the gradient again.

How much a loss weighs is read off its graph before the backward pass: `cross_entropy(...) / 2` is a mean that counts
half. The graph is followed from the loss through what multiplies, adds and stacks scalars, down to the means and sums
over terms; anything else makes the weight unknown, and nothing is judged. The factor by which the loop reduces is read
off one parameter: its gradient before the update over the sum of what the backward passes of all ranks gave it.

The product over all passes and ranks is what all terms of the global batch weigh together. It is 1 for a mean, whoever
divides, and 4 if two micro-batches on two ranks were added and nobody divided. A loss may be weighed on purpose, so
only factors that come from the layout are judged, and they are a suspicion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from andon_contracts.agree import Observation, bits_of, real_of
from andon_contracts.laws.law import Law, Observations
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.values import text_digest

UNKNOWN = -1
"""In the place of the number of backward passes: what they weigh is not known."""
_CLOSE = 5e-3
"""Within this a product is a factor: it was read off gradients that were rounded, perhaps to 16 bits."""
_CANCELLED = 1e-3
"""Below this share of what they are made of, sums have lost too many digits to tell a factor by."""


def close(one: float, other: float) -> bool:
    """Whether two factors are the same, up to the rounding of the gradients that they were read off."""
    return math.isclose(one, other, rel_tol=_CLOSE)


@dataclass(frozen=True)
class Scale:
    """What all terms of one update weigh together: `first`, by the first part of each loss, and `alike`, by all parts
    that weigh as much as that.

    line: of the loop, as a digest, that asked for the backward passes. passes: those of each rank, 0 where ranks have
    different numbers. terms: in the means and sums of all ranks, 0 where that is not known. chosen: whether a factor is
    no whole number, as who weighs a loss writes it. squared: whether the losses are of squares. factor: of the sum over
    the ranks, what the loop made its gradient.
    """

    first: float
    alike: float
    line: int
    passes: int
    terms: int
    chosen: bool
    squared: bool
    factor: float

    def shown(self, world: int) -> str:
        """The factors of the total weight, on `world` ranks."""
        weight = self.first / self.factor / world
        passes = f"{self.passes} backward passes have loss weight {weight / max(self.passes, 1):.3f}"
        loss = passes if self.passes > 1 else f"the loss has weight {weight:.3f}"
        if world > 1:
            loss = f"on each of {world} ranks {loss}; the reduced gradient is {self.factor:.3f} of the sum"
        return f"{loss}: {self.first:.3f} times the gradient of a mean"

    @property
    def right(self) -> bool:
        """Whether it is that of one mean."""
        return close(self.first, 1) or close(self.alike, 1)


def _factor(said: Sequence[Observation], place: int) -> float | None:
    """The reduced gradient over the sum of the raw ones, by the product at this place; None where it does not tell."""
    raw, kept = ([real_of(each.values[f"dot {what} {place}"]) for each in said] for what in ("raw", "kept"))
    # Ranks that reduced differ in nothing; where they did not, each has its own factor.
    if len(set(kept)) > 1 or not all(map(math.isfinite, (*kept, *raw))):
        return None
    total = math.fsum(raw)
    lost = abs(total) <= _CANCELLED * math.fsum(map(abs, raw))
    return None if lost or not kept[0] else kept[0] / total


def scale_of(said: Sequence[Observation]) -> Scale | None:
    """The scale of an update by what all ranks said of it; None where that does not tell."""
    passes = [each.values["weight passes"] for each in said]
    lines = {each.values["weight line"] for each in said}
    if min(passes) < 1 or len(lines) != 1:
        return None
    factors = [_factor(said, place) for place in (0, 1)]
    factor = factors[0]
    # By two products, since a reduction that is no multiple of the sum has a quotient too.
    if factor is None or factors[1] is None or not close(factor, factors[1]):
        return None
    first, alike = ([real_of(each.values[name]) for each in said] for name in ("weight first", "weight alike"))
    terms = [each.values["weight terms"] for each in said]
    return Scale(
        factor * math.fsum(first),
        factor * math.fsum(alike),
        lines.pop(),
        passes[0] if len(set(passes)) == 1 else 0,
        sum(terms) if all(terms) else 0,
        any(each.values["weight chosen"] for each in said),
        all(each.values["weight squares"] for each in said),
        factor,
    )


@dataclass(frozen=True)
class Scaled:
    """The scale of this update, and of the one before of which it was known; None where it was not."""

    observations: Observations
    now: Scale | None
    before: Scale | None

    @property
    def step(self) -> int:
        """The number of the update."""
        return self.observations[0].step


def _short(seen: Scaled) -> Finding | None:
    """A window with less than a full one in it that is divided like the full one before."""
    now, before = seen.now, seen.before
    if now is None or before is None or now.right or not before.right or now.line != before.line or now.chosen:
        return None
    for what, here, full in (("micro-batches", now.passes, before.passes), ("terms", now.terms, before.terms)):
        if 0 < here < full and close(now.first / before.first, here / full):
            shown = f"{now.shown(len(seen.observations))}, and {before.first:.3f} times in the window before"
            window = f"a window of {here} of {full} {what} is divided like a full one"
            return Finding(f"{shown}: {window}", seen.step, (), "gradient")
    return None


def _factor_of_layout(seen: Scaled) -> Finding | None:
    """A factor of the layout too much or too few, in this update and in the last one whose scale is known."""
    now, before = seen.now, seen.before
    if now is None or before is None or now.right or now.line != before.line or not close(now.first, before.first):
        return None
    # Halves of losses are common, and twice a loss is not.
    if now.chosen and now.first < 1:
        return None
    world, passes = len(seen.observations), max(now.passes, 1)
    # Half a square is a loss by custom, if the half stands in the loss.
    if now.squared and close(now.first, 0.5) and now.first / now.factor / world < 0.5 * (1 + _CLOSE):
        return None
    layout = {world, passes, world * passes, world**2} - {1}
    if not any(close(now.first, each) or close(now.first, 1 / each) for each in layout):
        return None
    twice = "the loss is divided twice, by the number of micro-batches or the world size, or it is scaled on purpose"
    return Finding(now.shown(world), seen.step, (), "gradient", likely=twice if now.first < 1 else "")


_READS = (
    *("weight first", "weight alike", "weight line", "weight passes", "weight terms", "weight chosen"),
    "weight squares",
    *(f"dot {what} {place}" for what in ("raw", "kept") for place in (0, 1)),
)
SCALE: tuple[Law[Scaled], ...] = (
    Law("gradient-scale/short", _READS, _short, suspicion=True),
    Law("gradient-scale/before", _READS, _factor_of_layout, suspicion=True),
)
"""At every update whose scale is known: the terms of the global batch weigh together what those of a mean do."""


_ELEMENTS = 1024
"""Of one parameter, so many elements stand for all gradients."""
_NODES = 64
"""A graph with more of them ahead of its means is not followed."""
_AS_IT_IS = frozenset(
    f"{name}Backward"
    for name in ("Alias", "Clone", "Neg", "ReshapeAlias", "Squeeze", "ToCopy", "UnsafeView", "Unsqueeze", "View")
)
"""Nodes that leave a value as it is. A sign does not count: it is nobody's weight."""
_REDUCES, _JOINS = ("MeanBackward0", "SumBackward0"), ("StackBackward0", "CatBackward0")
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
    """A number, times each of the scalars at these places to its power. chosen: a factor was not a whole number."""

    number: float
    scalars: tuple[tuple[int, int], ...] = ()
    chosen: bool = False

    def times(self, other: _Product) -> _Product:
        return _Product(self.number * other.number, self.scalars + other.scalars, self.chosen or other.chosen)

    def value(self, scalars: Sequence[float]) -> float:
        return self.number * math.prod(scalars[place] ** power for place, power in self.scalars)


_ONE, _NOT_KNOWN = _Product(1.0), _Product(0.0)


class _Part(NamedTuple):
    """One mean or sum over terms. terms: how many, or 0 if unknown. squared: whether they are squares."""

    factor: _Product
    terms: _Product
    summed: bool
    squared: bool


class Weight(NamedTuple):
    """What a loss weighs: `first`, its first part; `alike`, all parts that weigh as much, perhaps halves of one loss.

    chosen: a factor is not a whole number, as if the loss was weighed on purpose. squared: the terms of the first part
    are squares. terms: in the parts that are alike, or 0 if unknown.
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
        self._parts = self._below(_node(loss.grad_fn, loss.output_nr), _ONE)

    def weight(self) -> Weight | None:
        """What the loss weighs; None where its numbers do not tell."""
        try:
            scalars = [float(each) for each in self.scalars]
            terms = [part.terms.value(scalars) for part in self._parts]
            factors = [abs(part.factor.value(scalars)) for part in self._parts]
        except (ArithmeticError, RuntimeError, TypeError, ValueError):
            return None
        counts = [count if part.summed else 1.0 for part, count in zip(self._parts, terms, strict=True)]
        weights = [factor * count for factor, count in zip(factors, counts, strict=True)]
        if not weights or not 0 < weights[0] < math.inf:
            return None
        alike = [place for place, each in enumerate(weights) if math.isclose(each, weights[0], rel_tol=1e-6)]
        counted, first = [terms[place] for place in alike], self._parts[0]
        return Weight(
            weights[0],
            sum(weights[place] for place in alike),
            # Counts of rows, ranks and micro-batches are whole numbers.
            first.factor.chosen or not all(scalars[place].is_integer() for place, _ in first.factor.scalars),
            first.squared,
            round(sum(counted)) if all(0 < count < math.inf for count in counted) else 0,
        )

    def _below(self, node: Any, factor: _Product, *, mean: bool = False, count: int | None = None) -> list[_Part]:
        """The parts below `node`, which counts `factor` times. count: elements to reduce; None of a scalar."""
        while True:
            if count is None:
                self._left -= 1
                if node is None or not self._left:
                    raise _Unknown
            name, inputs = ("", []) if node is None else (node.name(), _inputs(node))
            reduced = math.prod(map(int, node._saved_self_sym_sizes)) if name in _REDUCES and count is None else 0
            one = reduced == 1 or (name in _JOINS and len(inputs) == 1 and count is None)
            if one or name.rstrip("012") in _AS_IT_IS:
                node = inputs[0]
            elif name in _TIMES and (count is None or not _by_tensor(node)):
                node, by = self._factor(node, name, inputs)  # what multiplies every element multiplies the mean
                factor = factor.times(by)
            elif name in _REDUCES and count is None:
                node, mean, count = inputs[0], name.startswith("Mean"), reduced
            else:
                break
        if name in ("AddBackward0", "SubBackward0") and count is None:
            numbers = zip(inputs, (_ONE, _Product(float(node._saved_alpha))), strict=False)
            there = [(each, by) for each, by in numbers if each is not None]
            return [part for each, by in there for part in self._below(each, factor.times(by))]
        if count and name in _JOINS and len(inputs) == count:
            factor = factor.times(_Product(1 / count)) if mean else factor
            return [part for each in inputs for part in self._below(each, factor)]
        if mean and count is not None:
            return [_Part(factor, _Product(float(count)), False, _is_square(node))]
        # A loss of torch. How many terms a sum has is unknown where a mask or a weight may have multiplied them.
        reduction: Any = None if node is None else node._saved_reduction
        summed = count is not None or reduction != _MEAN
        if summed and reduction != (_SUM if count is None else _NONE):
            raise _Unknown
        terms = self._terms(node, reduction)
        if summed and not terms.number:
            raise _Unknown
        return [_Part(factor, terms, summed, _is_square(node))]

    def _factor(self, node: Any, name: str, inputs: list[Any]) -> tuple[Any, _Product]:
        """Which input of a product or quotient has a graph, and by what that is multiplied.

        Raises `_Unknown` for two losses multiplied, for something divided by one, and for what is no number.
        """
        graphs = [place for place, each in enumerate(inputs) if each is not None]
        divides = name.startswith("Div")
        if len(graphs) != 1 or (graphs[0] == 1 and divides):
            raise _Unknown
        value = _saved(node, "other" if graphs[0] == 0 else "self")
        if isinstance(value, Tensor):
            return inputs[graphs[0]], self._read(value, -1 if divides else 1)
        number = float(value)
        return inputs[graphs[0]], _Product(1 / number if divides else number, chosen=not number.is_integer())

    def _terms(self, node: Any, reduction: int) -> _Product:
        """How many terms a loss of torch has, or the weight of their classes."""
        name = node.name()
        if name.startswith("NllLoss"):
            # Terms that are ignored are none; where classes are weighed, what is a term depends on whom one asks.
            total = None if reduction == _NONE else _saved(node, "total_weight")
            if total is None or (reduction == _SUM and _has(node, "weight")):
                return _NOT_KNOWN
            return self._read(total, 1)
        if name not in _BY_ELEMENT or _has(node, "weight") or _has(node, "pos_weight"):
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
    """What `loss`, a scalar with a graph, is made of; None where its graph does not say.

    A mean of n terms weighs 1, a sum of n terms n. Waits for no device, and reads nothing for which the loop has hooks
    of its own: those of a checkpoint would compute its part of the model again.
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
        if name not in _TIMES and name.rstrip("012") not in _AS_IT_IS | {"MeanBackward", "SumBackward"}:
            return bool(name == "MseLossBackward0")
        node = next((each for each in inputs if each is not None), None)
    return False


def _inputs(node: Any) -> list[Any]:
    return [_node(each, place) for each, place in node.next_functions]


def _node(node: Any, place: int) -> Any:
    """The node that made output `place` of `node`; DDP's own node, of which no weight is read, where that is unknown.

    DDP hands each output on by a node of its own if it looks for unused parameters, as under the HF Trainer, and in the
    first pass of a static graph. An output that is not a tensor has no input there.
    """
    while node is not None and node.name() == "_DDPSinkBackward":
        if len(node.next_functions) != len(node._input_metadata):
            return node
        node, place = node.next_functions[place]
    return node


def _by_tensor(node: Any) -> bool:  # whether elements are multiplied each by its own number, as by a mask
    held = [getattr(node, f"_saved_{name}", None) for name in ("other", "self") if not _hooked(node, name)]
    return any(isinstance(each, Tensor) and each.numel() != 1 for each in held)


def _hooked(node: Any, name: str) -> bool:
    """Whether what the graph holds under this name has a hook of the loop on it: then it must not be read."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    return raw is not None and raw.unpack_hook is not None


def _has(node: Any, name: str) -> bool:
    return _hooked(node, name) or getattr(node, f"_saved_{name}", None) is not None


def _saved(node: Any, name: str) -> Any:
    return None if _hooked(node, name) else getattr(node, f"_saved_{name}")


class Pass(NamedTuple):
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
    """The scales of all updates, for the closing line."""

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
    _wrong: dict[int, Scale] = field(default_factory=dict)  # the last of such updates, by line

    def add(self, scale: Scale | None) -> None:
        """One more update, whose scale this is."""
        self.updates += 1
        if scale is None:
            return
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
        between = " to ".join(dict.fromkeys((f"{self.least:.3f}", f"{self.most:.3f}")))
        shown = "that of a mean" if self.right == self.known else f"{between} of a mean's"
        of = f"in {self.known} of {self.updates} updates, by the losses and reductions that were seen"
        return f"  gradient scale: {shown} {of}"


class GradientScale(Check):
    """The weights of the losses in the present window of one optimizer, and the products that tell the factor."""

    def __init__(self, context: Context, probe: OptimizerProbe, passes: Passes) -> None:
        super().__init__(context)
        members = () if context.subject.sharded else probe.members
        self._optimizer, self._passes = probe.optimizer, passes
        self.arrived: Callable[[], bool] = lambda: False
        """Whether any gradient of the optimizer arrived in this backward pass."""
        self._seen: list[Pass] = []
        self._known = True
        self.dots: list[Tensor] = []
        """Of the raw gradients so far, and of the reduced one."""
        self._raw: Tensor | None = None
        self._numbers: Tensor | None = None
        self._before: Scale | None = None
        self.account = Account()
        dense = ((i, p) for i, p in enumerate(members) if p.layout == torch.strided and p.is_floating_point())
        # What lies nearest to the loss has a gradient also where an adapter begins at zero.
        self.place = max((place for place, parameter in dense if parameter.numel() > 1), default=-1)
        """Of the parameter that is looked at among `members`; -1: none is."""
        self._of = members[self.place] if self.place >= 0 else None

    def cover(self) -> Mapping[str, Cover]:
        dark = Cover("not observable", "the shards show no raw gradient")
        return {"gradient-scale": dark if self.context.subject.sharded else LIVE}

    def see(self, gradient: Tensor) -> None:
        """A raw gradient of that parameter arrives."""
        now = self._passes.now
        if now is None or now.parts is None:
            self._known = False
        elif self._known:
            if not self._seen or self._seen[-1] is not now:
                self._seen.append(now)
            dots = self._dots(gradient)
            if dots is not None:
                self._raw = dots if self._raw is None else self._raw + dots

    def backward_over(self) -> None:
        # If any gradient of the optimizer arrived, the one that is looked at had to.
        if self.arrived() and (not self._seen or self._seen[-1] is not self._passes.now):
            self._known = False

    def _dots(self, gradient: Tensor) -> Tensor | None:
        """Two products with random numbers: sums over ranks are sums of these. None if the gradient is not contiguous;
        then nothing is known of the window.
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

    def reduced(self, probe: OptimizerProbe) -> None:
        if self.dots or not self._known or self._raw is None or self._of is None or self._of.grad is None:
            return
        # A hook of the loop's own may change the gradient on its way.
        if len(self._of._backward_hooks or ()) > 1 or self._of._post_accumulate_grad_hooks:
            self._known = False
            return
        dots, scale = self._dots(self._of.grad), getattr(self._optimizer, "grad_scale", None)
        if dots is not None:  # a fused optimizer divides by the scale of the loss in its step
            self.dots = [self._raw, dots if scale is None else dots / scale]

    def look(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        self.reduced(probe)
        return [self.dots, *(each.parts.scalars for each in self._seen if each.parts is not None)]

    def before(self, probe: OptimizerProbe) -> Values:
        # A line of its own for each loss is a loss of its own each time, as of the parts of a GAN.
        lines = {each.line for each in self._seen}
        found = [None if each.parts is None else each.parts.weight() for each in self._seen]
        known = self._known and len(lines) < 2 and (bool(self.dots) or not found) and None not in found
        weights = [each for each in found if each is not None] if known else []
        raw, kept = (each.tolist() for each in self.dots) if known and self.dots else ([0.0, 0.0], [0.0, 0.0])
        return {
            "weight passes": len(weights) if known else UNKNOWN,
            "weight line": text_digest(sorted(lines)) if weights else 0,
            "weight first": bits_of(sum(weight.first for weight in weights)),
            "weight alike": bits_of(sum(weight.alike for weight in weights)),
            "weight terms": sum(weight.terms for weight in weights) if all(weight.terms for weight in weights) else 0,
            "weight chosen": int(any(weight.chosen for weight in weights)),
            "weight squares": int(bool(weights) and all(weight.squared for weight in weights)),
            **{f"dot raw {place}": bits_of(raw[place]) for place in (0, 1)},
            **{f"dot kept {place}": bits_of(kept[place]) for place in (0, 1)},
        }

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        now, before = scale_of(said), self._before
        self._before = now or before
        self.account.add(now)
        if now is not None and not self.account.changed:
            self.context.verdicts.judge(SCALE, Scaled(said, now, before), self.context.scene())

    def new_window(self, probe: OptimizerProbe) -> None:
        self._seen, self._raw, self.dots = [], None, []
        self._known = True

    discarded = new_window

    def closing_lines(self) -> list[str]:
        return [] if self.context.settings.reference is not None else [self.account.line()]
