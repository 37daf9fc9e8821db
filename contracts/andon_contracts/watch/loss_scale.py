"""What the losses of an update weigh, read off the graph of each loss before its backward pass, and one number each of
a raw and of a reduced gradient, of which their quotient is the factor of the reduction (`laws/scale`).

A graph is followed from the loss through what multiplies, adds and stacks scalars, down to the means and sums over
terms. Whatever else stands there makes the weight unknown, and nothing is judged: so does a number that lies on a
device, since reading it would make the host wait.
"""

from __future__ import annotations

import math
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from andon_contracts.agree import bits_of
from andon_contracts.laws.law import Observations
from andon_contracts.laws.scale import UNKNOWN, Scale, Scaled, scale_of
from andon_contracts.watch.gradient_hooks import hooked_first

_ELEMENTS = 1024
"""Of one parameter, so many elements stand for all gradients."""
_NODES = 64
"""A graph with more of them ahead of its means is not followed."""
_SLOW_S, _SLOW_WALKS = 0.01, 2
"""A walk takes microseconds of processor time. One that takes so long made a checkpoint compute its part of the model
again; after two of them none is made any more.
"""
_AS_IT_IS = frozenset(
    f"{name}Backward"
    for name in ("Alias", "Clone", "ReshapeAlias", "Squeeze", "ToCopy", "UnsafeView", "Unsqueeze", "View")
)
_PLACES = (
    (re.compile(r"^--?\S*accum", re.IGNORECASE), "{accumulation}"),
    (re.compile(r"^--?\S*batch", re.IGNORECASE), "{local_batch}"),
)
"""Options of scripts by which the falsifier sets how many rows and micro-batches a rank has."""
_REDUCES, _JOINS = ("MeanBackward0", "SumBackward0"), ("StackBackward0", "CatBackward0")
_EVEN = 1.01
"""Terms whose weights differ by less are of parts of nearly one size."""
_MEAN, _SUM = 1, 2
"""As torch writes the reduction of a loss."""


class _Unknown(Exception):
    """A graph that does not say what the loss weighs."""


@dataclass(frozen=True)
class _Part:
    """One mean or sum over terms, or several that were stacked: what its terms weigh together, and how many there are.

    low, high: the least and the largest weight of one term. terms, low and high are 0 where they are not known.
    """

    weight: float
    terms: int
    low: float
    high: float
    chosen: bool


@dataclass(frozen=True)
class Weight:
    """What a loss weighs: its first part, and the sum of the weights of all."""

    first: _Part
    whole: float


def weight_of(loss: Tensor) -> Weight | None:
    """What the terms of `loss`, a scalar with a graph, weigh in it; None where its graph does not say.

    A mean of n terms weighs 1, a sum of n terms n; half of either half of that. Waits for no device.
    """
    if loss.grad_fn is None or loss.numel() != 1:
        return None
    try:
        parts = _Walk().parts(loss.grad_fn, 1.0, False)
    except (_Unknown, AttributeError, RuntimeError):  # what a loop wrote over since is no number to read
        return None
    return Weight(parts[0], sum(part.weight for part in parts)) if parts and parts[0].weight else None


class _Walk:
    """From a loss to its parts, in order."""

    def __init__(self) -> None:
        self._left = _NODES

    def parts(self, node: Any, factor: float, chosen: bool) -> list[_Part]:
        """The parts below `node`, whose value counts `factor` times. Raises `_Unknown`."""
        self._left -= 1
        if node is None or not self._left:
            raise _Unknown
        name, inputs = node.name(), [each for each, _ in node.next_functions]
        one = (name in _REDUCES and _elements(node) == 1) or (name in _JOINS and len(inputs) == 1)
        if one or name.rstrip("012") in _AS_IT_IS:
            return self.parts(inputs[0], factor, chosen)
        if name == "NegBackward0":
            return self.parts(inputs[0], -factor, chosen)
        if name.startswith(("MulBackward", "DivBackward")):
            return self._times(node, name, inputs, factor, chosen)
        if name in ("AddBackward0", "SubBackward0"):
            other = float(node._saved_alpha) * (1 if name.startswith("Add") else -1)
            terms = zip(inputs, (1.0, other), strict=False)
            return [part for each, by in terms if each is not None for part in self.parts(each, factor * by, chosen)]
        if name in _REDUCES:
            return [self._over(node, name, inputs[0], factor, chosen)]
        return [self._loss(node, factor, chosen)]

    def _times(self, node: Any, name: str, inputs: list[Any], factor: float, chosen: bool) -> list[_Part]:
        graphs = [place for place, each in enumerate(inputs) if each is not None]
        if len(graphs) != 1 or (graphs[0] == 1 and name.startswith("Div")):
            raise _Unknown  # two losses multiplied, or something divided by one
        number, of_choice = _number(node._saved_other if graphs[0] == 0 else node._saved_self)
        by = 1 / number if name.startswith("Div") and number else number
        return self.parts(inputs[graphs[0]], factor * by, chosen or (of_choice and number != 1))

    def _over(self, node: Any, name: str, below: Any, factor: float, chosen: bool) -> _Part:
        """A mean or a sum over more than one element."""
        count = _elements(node)
        if below is not None and below.name() in _JOINS:
            stacked = [each for each, _ in below.next_functions]
            each_by = factor / count if name.startswith("Mean") else factor
            if len(stacked) == count:
                found = [part for each in stacked for part in self.parts(each, each_by, chosen)]
                known = all(part.terms for part in found)
                return _Part(
                    sum(part.weight for part in found),
                    sum(part.terms for part in found) if known else 0,
                    min(part.low for part in found) if known else 0.0,
                    max(part.high for part in found) if known else 0.0,
                    any(part.chosen for part in found),
                )
        if name.startswith("Mean"):
            return _of_terms(abs(factor), count, chosen)
        # A sum over what a mask or a weight may have been multiplied with has nobody knows how many terms.
        if below is None or getattr(below, "_saved_reduction", None) != 0:
            raise _Unknown
        return _of_terms(abs(factor) * count, count, chosen)

    def _loss(self, node: Any, factor: float, chosen: bool) -> _Part:
        """A loss function of torch that reduces by itself."""
        reduction, targets = node._saved_reduction, 0.0
        if node.name().startswith("NllLoss"):
            total, weights = node._saved_total_weight, node._saved_weight
            # Terms that are ignored are none; where classes are weighed, what is a term depends on whom one asks.
            if total.device.type == "cpu" and (weights is None or reduction == _MEAN):
                targets = float(total)
        else:
            targets = node._saved_self.numel()
        if reduction == _MEAN:
            return _of_terms(abs(factor), targets, chosen)
        if reduction != _SUM or not targets:
            raise _Unknown
        return _of_terms(abs(factor) * targets, targets, chosen)


def _of_terms(weight: float, terms: float, chosen: bool) -> _Part:
    each = weight / terms if terms else 0.0
    return _Part(weight, round(terms), each, each, chosen)


def _elements(node: Any) -> int:
    sizes, count = node._saved_self_sym_sizes, 1
    for size in sizes:
        count *= int(size)
    return count


def _number(value: Any) -> tuple[float, bool]:
    """A factor, and whether it was written with a point, which counts of rows, ranks and micro-batches are not."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.device.type != "cpu":
            raise _Unknown
        # Torch makes a double of a float of Python, and scales of scalers are floats.
        return float(value), value.dtype is torch.float64 and not value.dim()
    return float(value), isinstance(value, float)


@dataclass(frozen=True)
class Pass:
    """A backward pass of the loop: what its loss weighs, and the line that asked for it."""

    weight: Weight | None
    line: str


class Passes:
    """The backward passes of a loop, one after the other."""

    def __init__(self) -> None:
        self.now: Pass | None = None
        self._slow = 0

    def begins(self, loss: Tensor | None, line: str) -> None:
        """A backward pass of `loss` begins; None: of more than one tensor, or with a gradient of its own."""
        began = time.thread_time()
        weight = None if loss is None or self._slow >= _SLOW_WALKS else weight_of(loss)
        self._slow += time.thread_time() - began > _SLOW_S
        self.now = Pass(weight, line)

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
    uneven: int = 0
    """In how many a term weighed more than another, by at least a hundredth; `spread` is the most by which one did."""
    spread: float = 1.0

    def add(self, scale: Scale | None) -> None:
        """One more update, whose scale this is."""
        self.updates += 1
        if scale is not None:
            self.known, self.right = self.known + 1, self.right + scale.right
            shown = 1.0 if scale.right else scale.first
            self.least, self.most = min(self.least, shown), max(self.most, shown)
            self.uneven += scale.spread > _EVEN
            self.spread = max(self.spread, scale.spread)

    def line(self) -> str:
        """It in words; "" where of no update anything was known."""
        if not self.known:
            return ""
        of = f"in {self.known} of {self.updates} updates, by the losses and reductions that were seen"
        between = f"{self.least:.3f}" + f" to {self.most:.3f}" * (f"{self.least:.3f}" != f"{self.most:.3f}")
        shown = "that of a mean" if self.right == self.known else f"{between} of a mean's"
        uneven = f"; in {self.uneven} of them a row counted up to {self.spread:.2f} times as much as another"
        return f"  gradient scale: {shown} {of}" + uneven * (self.uneven > 0)


class LossScale:
    """The weights of the losses in the present window of one optimizer, and the dot products that tell the factor."""

    def __init__(self, members: Sequence[torch.nn.Parameter], passes: Passes, muted: Callable[[], bool]) -> None:
        """members: its parameters, of which the last that fits is looked at. muted: whether a watch runs the model."""
        self._passes, self._muted = passes, muted
        self._seen: list[Pass] = []
        self._known = True
        self.dots: list[Tensor] = []
        """Of the raw gradients so far, and then of the reduced one; they may be brought to the CPU before `values`."""
        self._raw: Tensor | None = None
        fits = [p for p in members if p.layout == torch.strided and p.is_floating_point() and p.numel() > 1]
        # What lies nearest to the loss has a gradient also where an adapter begins at zero.
        self._of = fits[-1] if fits else None
        self._handle = None if self._of is None else hooked_first(self._of, self._see)
        self._numbers: Tensor | None = None
        self._before: Scale | None = None
        self.account = Account()

    def _see(self, gradient: Tensor) -> None:
        if self._muted():
            return
        now = self._passes.now
        if now is None or now.weight is None:
            self._known = False
        if not self._known:
            return
        assert now is not None
        if not any(each is now for each in self._seen[-1:]):
            self._seen.append(now)
        dot = self._dot(gradient)
        if dot is None:
            self._known = False
            return
        self._raw = dot if self._raw is None else self._raw + dot

    def _dot(self, gradient: Tensor) -> Tensor | None:
        """With numbers of no pattern: whatever is added over ranks, so is this. None: it does not lie plainly."""
        if type(gradient) is not Tensor or gradient.layout != torch.strided or not gradient.is_contiguous():
            return None
        part = gradient.detach().view(-1)[:_ELEMENTS]
        if self._numbers is None or self._numbers.device != part.device:
            # No signs, which a gradient may cancel against: that of the logits of a softmax adds up to zero.
            generator = torch.Generator().manual_seed(_ELEMENTS)
            self._numbers = torch.randn(part.numel(), generator=generator, device="cpu").to(part.device)
        return torch.dot(part.float(), self._numbers)

    def reduced(self) -> None:
        """What there is now is the reduced gradient, before clipping; told again within a window, nothing."""
        if self.dots or not self._known or self._raw is None or self._of is None or self._of.grad is None:
            return
        dot = self._dot(self._of.grad)
        if dot is not None:
            self.dots = [self._raw, dot]

    def values(self) -> dict[str, int]:
        """What a rank says of its window, in integers."""
        # A line of its own for each loss is a loss of its own each time, as of the parts of a GAN.
        known = self._known and len({each.line for each in self._seen}) < 2 and (bool(self.dots) or not self._seen)
        weights = [each.weight for each in self._seen if each.weight is not None] if known else []
        first = [weight.first for weight in weights]
        counted = bool(first) and all(part.terms for part in first)
        raw, kept = map(float, self.dots) if known and self.dots else (0.0, 0.0)
        return {
            "loss passes": len(weights) if known else UNKNOWN,
            "loss first": bits_of(sum(abs(part.weight) for part in first)),
            "loss whole": bits_of(sum(weight.whole for weight in weights)),
            "loss terms": sum(part.terms for part in first) if counted else 0,
            "loss low": bits_of(min(part.low for part in first) if counted else 0.0),
            "loss high": bits_of(max(part.high for part in first) if counted else 0.0),
            "loss chosen": int(any(part.chosen for part in first)),
            "dot raw": bits_of(raw),
            "dot kept": bits_of(kept),
        }

    def judged(self, said: Observations) -> Scaled:
        """The scale of the update at hand, by what all ranks said of it, beside the last one that was known."""
        now, before = scale_of(said), self._before
        self._before = now or before
        self.account.add(now)
        return Scaled(said, now, before)

    def clear(self) -> None:
        """Another window begins, or this one does anew."""
        self._seen, self._raw, self.dots = [], None, []
        self._known = True

    def close(self) -> None:
        """Take the hook off."""
        if self._handle is not None:
            self._handle.remove()


def scale_lines(scales: Sequence[LossScale], world: int, command: Sequence[str]) -> list[str]:
    """For the end: what was seen of the scale of gradients, and what would tell where it was not, or is no mean's.

    command: the script with its arguments, as it was started.
    """
    accounts = [each.account for each in scales if each.account.updates]
    lines = list(dict.fromkeys(filter(None, (each.line() for each in accounts))))
    if accounts and all(each.known and each.right == each.known and not each.uneven for each in accounts):
        return lines
    return [*lines, _would_tell(command, "why" if lines else "")] if world > 1 and scales else lines


def _would_tell(command: Sequence[str], why: str) -> str:
    """The one command that would tell whether the gradient has the right scale, with the arguments of this script.

    why: something was seen that it would explain.
    """
    shown = list[str]()
    for word in command:
        name, has_value, _ = word.partition("=")
        place = next((place for option, place in _PLACES if option.search(name)), "")
        held = next((place for option, place in _PLACES if shown and option.search(shown[-1])), "")
        if place and has_value:
            word = f"{name}={place}"
        elif held and not word.startswith("-"):
            word = held
        shown.append(word)
    script = " ".join(each if "{" in each else shlex.quote(each) for each in shown)
    lacks = [place for place in ("{local_batch}", "{accumulation}") if place not in script]
    known = f"; put {' and '.join(lacks)} where it takes them" if "{local_batch}" in lacks else ""
    run = f"torchrun --standalone --nproc-per-node {{world}} -m andon watch {script}"
    head = "where that is not meant, this tells why" if why else "not checked without reference=; this would"
    return f"  gradient scale: {head}: andon falsify --script {run!r}{known}"
