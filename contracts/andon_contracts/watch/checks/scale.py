"""The scale of an update's gradient, as far as it can be known without computing the gradient again.

The weight of a loss is read off its autograd graph before the backward pass: `cross_entropy(...) / 2` is a mean with
weight 1/2. The graph is followed from the loss through nodes that multiply, add and stack scalars, down to the means
and sums over terms. With any other node the weight is unknown, and nothing is judged. The reduction factor of the loop
is read off one parameter: its gradient before the update over the sum of the raw gradients of all ranks.

The sum of the weights over all passes and ranks, times the reduction factor, is the weight of all terms of the global
batch. It is 1 for a mean, and 4 if two micro-batches on two ranks were added without a division. A loop may weigh its
loss on purpose. Therefore only factors that come from the layout are reported, as a suspicion.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from andon_contracts.agree import bits_of, real_of
from andon_contracts.laws.law import Law, Observations, Seen
from andon_contracts.observe import has_other_hooks
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, BackwardPass, Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.checks.audit import name_ratio
from andon_contracts.watch.values import text_digest

_UNKNOWN_WEIGHT = -1  # sent as the number of backward passes
_ROUNDING = 5e-3
"""The relative rounding error of a factor computed from gradients, which may have 16 bits."""
_CANCELLED = 1e-3
"""A sum smaller than this share of its summands' magnitudes has lost too many digits to give a factor."""


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_ROUNDING)


@dataclass(frozen=True)
class Scale:
    """The total weight of all terms of one update.

    first_part: from the first part of each loss; 1 for a mean. equal_parts: from all parts with the first one's weight.
    line: the digest of the source line that called for the backward passes. passes: their number on each rank, or 0 if
    the ranks have different numbers. terms: in the means and sums of all ranks, or 0 if unknown. deliberate: a factor
    is not a whole number, so the user wrote it. squared: the losses are of squares. reduction_factor: the gradient that
    the optimizer receives over the sum of the raw gradients.
    """

    first_part: float
    equal_parts: float
    line: int
    passes: int
    terms: int
    deliberate: bool
    squared: bool
    reduction_factor: float

    def description(self, world: int, factor: str = "") -> str:
        weight = self.first_part / self.reduction_factor / world
        passes = f"{self.passes} backward passes of loss weight {weight / max(self.passes, 1):.3f} each"
        loss = passes if self.passes > 1 else f"the loss has weight {weight:.3f}"
        if world > 1:
            loss = f"on each of {world} ranks, {loss}; reduction factor {self.reduction_factor:.3f}"
        equals = f" ({factor.strip()})" if factor else ""
        return f"the gradient is {self.first_part:.3f} times that of the mean loss{equals}: {loss}"

    @property
    def is_mean(self) -> bool:
        return _close(self.first_part, 1) or _close(self.equal_parts, 1)


def _reduction_factor(seen: Seen[object], place: int) -> float | None:
    raw, reduced = (list(map(real_of, seen.column(f"dot {what} {place}"))) for what in ("raw", "kept"))
    # After a reduction the product is equal on all ranks. Without one each rank has its own factor.
    if len(set(reduced)) > 1 or not all(map(math.isfinite, (*reduced, *raw))):
        return None
    total = math.fsum(raw)
    cancelled = abs(total) <= _CANCELLED * math.fsum(map(abs, raw))
    return None if cancelled or not reduced[0] else reduced[0] / total


def scale_of(said: Observations) -> Scale | None:
    """The scale of an update by the observations of all ranks, or None if they do not determine it."""
    seen = Seen[object](said, None)
    passes, terms = seen.column("weight passes"), seen.column("weight terms")
    if min(passes) < 1 or "weight line" in seen.differing:
        return None
    factor, second = _reduction_factor(seen, 0), _reduction_factor(seen, 1)
    # Two products, because a reduction that is not a multiple of the sum has a quotient too.
    if factor is None or second is None or not _close(factor, second):
        return None
    return Scale(
        factor * math.fsum(map(real_of, seen.column("weight first"))),
        factor * math.fsum(map(real_of, seen.column("weight alike"))),
        said[0].values["weight line"],
        0 if "weight passes" in seen.differing else passes[0],
        sum(terms) if all(terms) else 0,
        seen.any("weight chosen"),
        all(seen.column("weight squares")),
        factor,
    )


Scales = tuple[Scale, Scale | None]
"""The scale of this update, and the last known one before."""


def _short_window(seen: Seen[Scales]) -> Finding | None:
    now, before = seen.want
    if before is None or now.is_mean or not before.is_mean or now.line != before.line or now.deliberate:
        return None
    for what, here, full in (("micro-batches", now.passes, before.passes), ("terms", now.terms, before.terms)):
        if 0 < here < full and _close(now.first_part / before.first_part, here / full):
            shown = f"{now.description(len(seen.observations))}. In the window before: {before.first_part:.3f} times"
            window = f"a window of {here} {what} is divided like one of {full}"
            likely = "the loss of a last, shorter window is divided by the numbers of a full one"
            return Finding(f"{window}: {shown}", seen.step, (), "gradient", likely=likely)
    return None


def _factor_of_layout(seen: Seen[Scales]) -> Finding | None:
    """A finding if this update and the last one with a known scale are off by the same count of ranks or passes."""
    now, before = seen.want
    if before is None or now.is_mean or now.line != before.line or not _close(now.first_part, before.first_part):
        return None
    # Users often halve a loss, and seldom double it.
    if now.deliberate and now.first_part < 1:
        return None
    world, passes = len(seen.observations), max(now.passes, 1)
    # Half a square is a conventional loss, if the loss itself contains the half.
    loss_weight = now.first_part / now.reduction_factor / world
    if now.squared and _close(now.first_part, 0.5) and loss_weight < 0.5 * (1 + _ROUNDING):
        return None
    layout = {world, passes, world * passes, world**2} - {1}
    if not any(_close(now.first_part, each) or _close(now.first_part, 1 / each) for each in layout):
        return None
    twice = "the loss is divided twice, by the number of micro-batches or the world size, or it is scaled on purpose"
    what = now.description(world, name_ratio(now.first_part, world, passes, _ROUNDING))
    return Finding(what, seen.step, (), "gradient", likely=twice if now.first_part < 1 else None)


_READS = (
    *("weight first", "weight alike", "weight line", "weight passes", "weight terms", "weight chosen"),
    "weight squares",
    *(f"dot {what} {place}" for what in ("raw", "kept") for place in (0, 1)),
)
SCALE: tuple[Law[Seen[Scales]], ...] = (
    Law("gradient-scale/short", _READS, _short_window, suspicion=True),
    Law("gradient-scale/before", _READS, _factor_of_layout, suspicion=True),
)
"""Judged at every update with a known scale: the terms of the global batch have the total weight of a mean."""


_ELEMENTS = 1024  # of one parameter, which represent all gradients
_NODES = 64  # the longest graph that is followed between a loss and its means
_IDENTITY = frozenset(
    f"{name}Backward"
    for name in ("Alias", "Clone", "Neg", "ReshapeAlias", "Squeeze", "ToCopy", "UnsafeView", "Unsqueeze", "View")
)
"""Nodes that keep the magnitude of a value; a sign is not a weight."""
_REDUCES, _JOINS = ("MeanBackward0", "SumBackward0"), ("StackBackward0", "CatBackward0")
_TIMES = ("MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1")
_BY_ELEMENT = frozenset(
    f"{name}Backward0"
    for name in ("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "Huber", "MseLoss", "SmoothL1Loss")
)
_NONE, _MEAN, _SUM = 0, 1, 2
"""Torch's codes for the reduction of a loss."""


class _Unknown(Exception):  # the graph does not determine the weight of the loss
    pass


@dataclass(frozen=True)
class _Product:
    """A number times powers of scalars, by their index. deliberate: a factor is not a whole number."""

    number: float
    scalars: tuple[tuple[int, int], ...] = ()
    deliberate: bool = False

    def times(self, other: _Product) -> _Product:
        return _Product(self.number * other.number, self.scalars + other.scalars, self.deliberate or other.deliberate)

    def value(self, scalars: Sequence[float]) -> float:
        return self.number * math.prod(scalars[place] ** power for place, power in self.scalars)


_ONE, _UNKNOWN_TERMS = _Product(1.0), _Product(0.0)


class _Part(NamedTuple):
    """A mean or a sum over terms. terms: their number, or 0 if unknown. squared: the terms are squares."""

    factor: _Product
    terms: _Product
    summed: bool
    squared: bool


class LossWeight(NamedTuple):
    """The weight of a loss: of its first part, and of all parts with the same weight, perhaps halves of one loss.

    deliberate: a factor is not a whole number, as if the user weighed the loss on purpose. squared: the terms of the
    first part are squares. terms: in the equal parts, or 0 if unknown.
    """

    first_part: float
    equal_parts: float
    deliberate: bool
    squared: bool
    terms: int


class LossParts:
    """The means and sums over terms in a loss, in order, by its present graph."""

    def __init__(self, loss: Tensor) -> None:
        """Raises `_Unknown` if the graph does not determine them."""
        self._nodes_left = _NODES
        self.scalars: list[Tensor] = []
        """Copies of the scalar tensors in the graph. They may be copied to the CPU before `weight` reads them."""
        self._parts = self._below(_node(loss.grad_fn, loss.output_nr), _ONE)

    def weight(self) -> LossWeight | None:
        """The weight of the loss, or None if its scalars do not determine it."""
        try:
            scalars = [float(each) for each in self.scalars]
            terms = [part.terms.value(scalars) for part in self._parts]
            weights = [abs(part.factor.value(scalars)) for part in self._parts]
        except (ArithmeticError, RuntimeError, TypeError, ValueError):
            return None
        weights = [w * n if part.summed else w for part, w, n in zip(self._parts, weights, terms, strict=True)]
        if not weights or not 0 < weights[0] < math.inf:
            return None
        equal = [place for place, each in enumerate(weights) if math.isclose(each, weights[0], rel_tol=1e-6)]
        counted, first = [terms[place] for place in equal], self._parts[0]
        return LossWeight(
            weights[0],
            sum(weights[place] for place in equal),
            # Counts of rows, ranks and micro-batches are whole numbers.
            first.factor.deliberate or not all(scalars[place].is_integer() for place, _ in first.factor.scalars),
            first.squared,
            round(sum(counted)) if all(0 < count < math.inf for count in counted) else 0,
        )

    def _below(self, node: Any, factor: _Product, *, mean: bool = False, count: int | None = None) -> list[_Part]:
        """The parts below `node`, of weight `factor`. count: the elements of `node` to reduce; None: it is a scalar."""
        while True:
            if count is None:
                self._nodes_left -= 1
                if node is None or not self._nodes_left:
                    raise _Unknown
            name, inputs = ("", []) if node is None else (node.name(), _inputs(node))
            reduced = math.prod(map(int, node._saved_self_sym_sizes)) if name in _REDUCES and count is None else 0
            single = reduced == 1 or (name in _JOINS and len(inputs) == 1 and count is None)
            if single or name.rstrip("012") in _IDENTITY:
                node = inputs[0]
            elif name in _TIMES and (count is None or not _multiplies_by_tensor(node)):
                node, by = self._factor(node, name, inputs)  # a factor of every element is a factor of the mean
                factor = factor.times(by)
            elif name in _REDUCES and count is None:
                node, mean, count = inputs[0], name.startswith("Mean"), reduced
            else:
                break
        if name in ("AddBackward0", "SubBackward0") and count is None:
            numbers = zip(inputs, (_ONE, _Product(float(node._saved_alpha))), strict=False)
            summands = [(each, by) for each, by in numbers if each is not None]
            return [part for each, by in summands for part in self._below(each, factor.times(by))]
        if count and name in _JOINS and len(inputs) == count:
            factor = factor.times(_Product(1 / count)) if mean else factor
            return [part for each in inputs for part in self._below(each, factor)]
        if mean and count is not None:
            return [_Part(factor, _Product(float(count)), False, _is_square(node))]
        # A loss function of torch. The number of terms of a sum is unknown if a mask or a weight multiplied them.
        reduction: Any = None if node is None else node._saved_reduction
        summed = count is not None or reduction != _MEAN
        if summed and reduction != (_SUM if count is None else _NONE):
            raise _Unknown
        terms = self._terms(node, reduction)
        if summed and not terms.number:
            raise _Unknown
        return [_Part(factor, terms, summed, _is_square(node))]

    def _factor(self, node: Any, name: str, inputs: list[Any]) -> tuple[Any, _Product]:
        """The input of a product or quotient that has a graph, and its factor.

        Raises `_Unknown` for a product of two losses, for a quotient by a loss, and for a factor that is not a number.
        """
        with_graph = [place for place, each in enumerate(inputs) if each is not None]
        divides = name.startswith("Div")
        if with_graph != [0] and (with_graph != [1] or divides):
            raise _Unknown
        value = _saved(node, "self" if with_graph[0] else "other")
        if isinstance(value, Tensor):
            return inputs[with_graph[0]], self._read_later(value, -1 if divides else 1)
        number = float(value)
        return inputs[with_graph[0]], _Product(1 / number if divides else number, deliberate=not number.is_integer())

    def _terms(self, node: Any, reduction: int) -> _Product:
        """The number of terms of a loss function of torch, or the sum of the weights of their classes."""
        name = node.name()
        if name.startswith("NllLoss"):
            # Ignored terms do not count. With class weights, "the number of terms" has two meanings.
            total = None if reduction == _NONE else _saved(node, "total_weight")
            if total is None or (reduction == _SUM and _has(node, "weight")):
                return _UNKNOWN_TERMS
            return self._read_later(total, 1)
        if name not in _BY_ELEMENT or _has(node, "weight") or _has(node, "pos_weight"):
            return _UNKNOWN_TERMS
        values = _saved(node, "self")
        # If a row has several elements, the terms of a sum may be the elements or the rows.
        if values is None or not values.dim() or (reduction != _MEAN and values.numel() != values.shape[0]):
            return _UNKNOWN_TERMS
        return _Product(float(values.numel()))

    def _read_later(self, value: Tensor, power: int) -> _Product:
        """Keep a copy of a scalar, because the loop may overwrite the tensor. Raises `_Unknown` for other tensors.

        A tensor of a subclass may be a shard, and reading a shard would need the other ranks.
        """
        subclass = type(value) not in (Tensor, torch.nn.Parameter)
        if subclass or value.layout != torch.strided or value.numel() != 1 or value.is_complex() or value.is_meta:
            raise _Unknown
        self.scalars.append(value.detach().clone())
        return _Product(1.0, ((len(self.scalars) - 1, power),))


def loss_parts(loss: Tensor | None) -> LossParts | None:
    """The parts of `loss`, or None if it is not a scalar whose graph determines them.

    A mean of n terms has weight 1, a sum of n terms weight n. Waits for no device. Reads no saved tensor that has hooks
    of the loop: those of an activation checkpoint would compute its part of the model again.
    """
    if loss is None or loss.grad_fn is None or loss.numel() != 1:
        return None
    try:
        return LossParts(loss)
    # A saved tensor may be overwritten, and a factor may not be a number.
    except (_Unknown, ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError):
        return None


def _is_square(node: Any) -> bool:
    """Whether `node` made squares, sums of squares over some dimensions, or such times a number or a mask."""
    while node is not None:
        name, inputs = node.name(), _inputs(node)
        if name == "PowBackward0":
            return bool(node._saved_exponent == 2)
        if name == "MulBackward0" and None not in inputs:
            # `(p - t) * (p - t)` is two nodes of one kind over the same inputs.
            one, other = inputs
            return one is other or (one.name() == other.name() and one.next_functions == other.next_functions)
        if name not in _TIMES and name.rstrip("012") not in _IDENTITY | {"MeanBackward", "SumBackward"}:
            return bool(name == "MseLossBackward0")
        node = next((each for each in inputs if each is not None), None)
    return False


def _inputs(node: Any) -> list[Any]:
    return [_node(each, place) for each, place in node.next_functions]


def _node(node: Any, place: int) -> Any:
    """Skip DDP's sink nodes: the node that computed output `place`, or the sink itself if that cannot be determined.

    DDP inserts a node for each output if it looks for unused parameters, as under the HF Trainer, and in the first pass
    of a static graph. That node has no input for an output that is not a tensor.
    """
    while node is not None and node.name() == "_DDPSinkBackward":
        if len(node.next_functions) != len(node._input_metadata):
            return node
        node, place = node.next_functions[place]
    return node


def _multiplies_by_tensor(node: Any) -> bool:  # as a mask does
    saved = [_saved(node, "other"), _saved(node, "self")]
    return any(isinstance(each, Tensor) and each.numel() != 1 for each in saved)


def _hooked(node: Any, name: str) -> bool:
    """Whether the loop has a hook on the saved tensor `name`, which must not be read then."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    return raw is not None and raw.unpack_hook is not None


def _has(node: Any, name: str) -> bool:
    return _hooked(node, name) or getattr(node, f"_saved_{name}", None) is not None


def _saved(node: Any, name: str) -> Any:
    return None if _hooked(node, name) else getattr(node, f"_saved_{name}", None)


@dataclass
class ScaleSummary:
    """The scales of all updates, for the closing line."""

    updates: int = 0
    known: int = 0
    means: int = 0
    smallest: float = math.inf
    largest: float = 0.0
    gradients_changed: bool = False
    """Whether the loop changed gradients after the backward pass by irregular factors, as a clipping by hand does: two
    updates of one line without the scale of a mean differ in the scale and in the reduction factor. After a wrong
    division one of the two would be equal.
    """
    _wrong: dict[int, Scale] = field(default_factory=dict)  # the last scale that was not a mean's, by line

    def add(self, scale: Scale | None) -> None:
        self.updates += 1
        if scale is None:
            return
        self.known, self.means = self.known + 1, self.means + scale.is_mean
        shown = 1.0 if scale.is_mean else scale.first_part
        self.smallest, self.largest = min(self.smallest, shown), max(self.largest, shown)
        if not scale.is_mean:
            before = self._wrong.get(scale.line, scale)
            same = (scale.first_part, before.first_part), (scale.reduction_factor, before.reduction_factor)
            self.gradients_changed |= not any(_close(*pair) for pair in same)
            self._wrong[scale.line] = scale

    def closing_line(self) -> str:
        if not self.known:
            return ""
        if self.gradients_changed:
            of = f"in {self.known - self.means} of {self.updates} updates"
            others = f"; that of the mean loss in {self.means}" * (self.means > 0)
            return f"  gradient scale: not comparable {of}: the loop changed the gradients after backward(){others}"
        between = " to ".join(dict.fromkeys((f"{self.smallest:.3f}", f"{self.largest:.3f}")))
        shown = "that of the mean loss" if self.means == self.known else f"{between} times that of the mean loss"
        of = f"in {self.known} of {self.updates} updates, from the observed losses and reductions"
        return f"  gradient scale: {shown} {of}"


class GradientScale(Check):
    """The weights of the losses in the window of one optimizer, and the products that give the reduction factor."""

    def __init__(self, context: Context, probe: OptimizerProbe) -> None:
        super().__init__(context)
        members = () if context.subject.sharded else probe.members
        self._window: list[BackwardPass] = []
        self._known = True
        self._raw: Tensor | None = None
        """The products of the raw gradients."""
        self._dots_sent: list[Tensor] = []
        """`_raw` and the products of the reduced gradient, once these are computed."""
        self._random: Tensor | None = None
        self._previous: Scale | None = None
        self._summary = ScaleSummary()
        dense = ((i, p) for i, p in enumerate(members) if p.layout == torch.strided and p.is_floating_point())
        # The last parameter is nearest to the loss. It also has a gradient if an adapter begins at zero.
        self.parameter_index = max((place for place, parameter in dense if parameter.numel() > 1), default=-1)
        """The index among `members` of the parameter whose gradient is read; -1 for none."""
        self._parameter = members[self.parameter_index] if self.parameter_index >= 0 else None

    def cover(self) -> Mapping[str, Cover]:
        dark = Cover("not observable", "sharded parameters have no raw gradient")
        return {"gradient-scale": dark if self.context.subject.sharded else LIVE}

    def gradient_hook(self, gradient: Tensor) -> None:
        now = self.context.backward
        if now is None or now.parts is None:
            self._known = False
        elif self._known:
            if not self._window or self._window[-1] is not now:
                self._window.append(now)
            dots = self._dots(gradient)
            if dots is not None:
                self._raw = dots if self._raw is None else self._raw + dots

    def backward_reached_optimizer(self) -> None:
        """A pass produced gradients of the optimizer. If the observed one is missing, the scale is unknown."""
        if not self._window or self._window[-1] is not self.context.backward:
            self._known = False

    def _dots(self, gradient: Tensor) -> Tensor | None:
        """fp32 [2]: the products of the first `_ELEMENTS` elements with two random vectors. They add up over ranks.
        None if the gradient is not contiguous: the scale of the window is unknown then.
        """
        if type(gradient) is not Tensor or gradient.layout != torch.strided or not gradient.is_contiguous():
            self._known = False
            return None
        part = gradient.detach().view(-1)[:_ELEMENTS]
        if self._random is None or self._random.device != part.device or self._random.shape[1] != part.numel():
            # Not random signs: the gradient of the logits of a softmax adds up to zero and may cancel against them.
            generator = torch.Generator().manual_seed(_ELEMENTS)
            self._random = torch.randn(2, part.numel(), generator=generator, device="cpu").to(part.device)
        # Not `mv`: autocast would round it, and a loop that requires determinism may not call it on a GPU.
        return (self._random * part.float()).sum(1)

    def reduced(self, probe: OptimizerProbe) -> None:
        parameter = self._parameter
        if self._dots_sent or not self._known or self._raw is None or parameter is None or parameter.grad is None:
            return
        # A hook of the loop may change the gradient after it was read.
        if has_other_hooks(parameter, own=1):
            self._known = False
            return
        dots, scale = self._dots(parameter.grad), getattr(probe.optimizer, "grad_scale", None)
        if dots is not None:  # a fused optimizer divides by the loss scale in its step
            self._dots_sent = [self._raw, dots if scale is None else dots / scale]

    def look(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        self.reduced(probe)
        return [self._dots_sent, *(each.parts.scalars for each in self._window if each.parts is not None)]

    def before(self, probe: OptimizerProbe) -> Values:
        # Passes on different lines belong to different losses, as in a GAN, and their weights do not add up.
        lines = {each.line for each in self._window}
        found = [None if each.parts is None else each.parts.weight() for each in self._window]
        known = self._known and len(lines) < 2 and (bool(self._dots_sent) or not found) and None not in found
        weights = [each for each in found if each is not None] if known else []
        raw, reduced = (each.tolist() for each in self._dots_sent) if known and self._dots_sent else ([0.0] * 2,) * 2
        return {
            "weight passes": len(weights) if known else _UNKNOWN_WEIGHT,
            "weight line": text_digest(sorted(lines)) if weights else 0,
            "weight first": bits_of(sum(weight.first_part for weight in weights)),
            "weight alike": bits_of(sum(weight.equal_parts for weight in weights)),
            "weight terms": sum(weight.terms for weight in weights) if all(weight.terms for weight in weights) else 0,
            "weight chosen": int(any(weight.deliberate for weight in weights)),
            "weight squares": int(bool(weights) and all(weight.squared for weight in weights)),
            **{f"dot raw {place}": bits_of(dot) for place, dot in enumerate(raw)},
            **{f"dot kept {place}": bits_of(dot) for place, dot in enumerate(reduced)},
        }

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        now, before = scale_of(said), self._previous
        self._previous = now or before
        self._summary.add(now)
        if now is not None and not self._summary.gradients_changed:
            self.context.verdicts.judge(SCALE, Seen(said, (now, before)), self.context.scene())

    def new_window(self, probe: OptimizerProbe) -> None:
        self._window, self._raw, self._dots_sent, self._known = [], None, [], True

    discarded = new_window

    def closing_lines(self) -> list[str]:
        return [] if self.context.settings.reference is not None else [self._summary.closing_line()]
