"""The weight of every trained token in an update: in the loss, times the reduction of the gradients.

A forward hook finds the logits among the outputs of a model and keeps some of their rows. In the backward pass a hook
on their autograd node receives the gradient, and `row_weights` reads the weight of these rows, however the loss is
written. The loop's reduction is read off one parameter: its gradient before the update over the sum of the raw
gradients of all ranks, so a loss scale, an average and a division by hand are in it. Both stay on the device until the
watch reads the other values of the update.

The sum of the weights of all tokens of all passes and ranks, times the reduction factor, is 1 for a mean, and 4 if two
micro-batches on two ranks were added without a division. A loop may weigh its loss on purpose. Therefore only factors
that come from the layout are reported, as a suspicion, if the weighted losses of the tokens add up to the loss that is
seen: the halves of two losses have weight 1/2 rightly. Unequal weights are a line at the close: means of ragged
batches, means of rows and class weights are choices too.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from andon_contracts.agree import bits_of, real_of
from andon_contracts.laws.law import Law, Observations, Seen
from andon_contracts.observe import DENSE_TYPES, has_other_hooks
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, BackwardPass, Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.checks.audit import name_ratio
from andon_contracts.watch.model_probe import ForwardHook, ModuleGroup
from andon_contracts.watch.row_weights import (
    SAMPLED,
    PassWeights,
    Reason,
    Row,
    Unequal,
    row_weights,
    rows_at,
    spread,
    trained,
    unequal,
)
from andon_contracts.watch.values import text_digest

_KEPT = 4 * SAMPLED
"""The rows of logits that are kept from a forward pass, of which some may not be trained."""
_ROTATIONS = 4
_ROUNDING = 5e-3
"""The relative rounding error of a factor computed from gradients, which may have 16 bits."""
_TOLERANCE, _LOW_TOLERANCE = 2e-3, 1.5e-2
"""The relative error of a row's weight, and with gradients of 16 bits."""
_CANCELLED = 1e-3
"""A sum smaller than this share of its summands' magnitudes has lost too many digits to give a factor."""
_OTHER_TERMS = 0.05
"""A loss that differs from that of its tokens by this share, beyond what sampling explains, has other terms."""
_STEADY = 3
"""A window with fewer tokens is compared with this number of windows before, if all of them had the same number."""
_ELEMENTS = 1024  # of one parameter, which represent all gradients
_SAME = frozenset(f"{name}Backward0" for name in ("Alias", "Clone", "LogSoftmax", "ToCopy"))
"""Nodes below the output of a model whose input has the gradient of logits, if the output has a loss."""
_NUMBERS = frozenset(f"{name}Backward{kind}" for name in ("Mul", "Div") for kind in (0, 1))
_CHAIN = 8  # the most nodes between a loss and the number with which the loop weighs it


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_ROUNDING)


# what the hooks read on the device


@dataclass
class _Kept:
    """Rows of the logits of one forward pass. stop: the ids of the stop token; stop_seen: whether the batch has one."""

    rows: Tensor
    positions: Tensor
    shape: torch.Size
    output: int
    stop: Sequence[int]
    stop_seen: Tensor | None

    @torch.no_grad()
    def read(self, gradient: Tensor) -> list[Tensor]:
        """[rows, 6] the fields of `Row` and whether it is trained; [3] the trained rows and the stop token's flags."""
        gradient = gradient.detach()
        mask = trained(gradient)
        here = mask[self.positions]
        first = here.sort(descending=True, stable=True).indices[:SAMPLED]
        values = row_weights(self.rows[first], rows_at(gradient, self.positions[first]))
        head = [mask.sum().to(torch.float64)]
        if self.stop_seen is not None:
            stops = torch.stack([(gradient[..., each] < 0).any() for each in self.stop]).any()
            head += [self.stop_seen.to(torch.float64), stops.to(torch.float64)]
        return [torch.cat([values, here[first, None].to(values.dtype)], 1), torch.stack(head)]


class LossPass:
    """One backward pass of the loop: its loss, and what was read of the logits below it."""

    def __init__(self, loss: Tensor | None) -> None:
        is_plain = loss is not None and type(loss) in DENSE_TYPES and loss.numel() == 1
        self.loss = [loss.detach().clone().reshape(())] if is_plain and loss is not None else []
        self.deliberate = loss is not None and _is_weighed(loss.grad_fn)
        self.read: list[list[Tensor]] = []
        """For each tensor of logits that the pass reached: what `_Kept.read` returned."""
        self.tolerance = _TOLERANCE

    def weights(self) -> list[PassWeights]:
        """Of each tensor of logits with a plain cross entropy; of all if none has one."""
        found = []
        for rows, head in self.read:
            listed = [Row(*row[:-1]) for row in rows.tolist() if row[-1]]
            sure = [row for row in listed if not row.error > self.tolerance]
            found.append(PassWeights(sure, round(float(head[0])), self.tolerance))
        return [each for each in found if each.reason is not Reason.OTHER_LOSS] or found


def _is_weighed(node: Any) -> bool:
    """Whether the last numbers by which a loss was multiplied or divided contain a fraction, as users write weights."""
    for _ in range(_CHAIN):
        inputs = [] if node is None else [each for each, _ in node.next_functions if each is not None]
        if len(inputs) != 1:
            return False
        if node.name() in _NUMBERS:
            values = [getattr(node, f"_saved_{name}", None) for name in ("self", "other")]
            numbers = [each for each in values if isinstance(each, int | float)]
            numbers += [float(e) for e in values if isinstance(e, Tensor) and e.device.type == "cpu" and not e.dim()]
            if any(not float(each).is_integer() for each in numbers):
                return True
        node = inputs[0]
    return False


def _logits_of(output: Any) -> Tensor | None:
    """The first tensor among the outputs of a model that may be logits, `logits` before the others; None for none."""
    outputs = list(output.values()) if isinstance(output, Mapping) else output
    outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return next(filter(_may_be_logits, (named, *outputs)), None)


def _may_be_logits(value: Any) -> bool:
    if type(value) not in DENSE_TYPES or not (value.requires_grad and value.is_floating_point() and value.dim() > 1):
        return False
    return bool(value.shape[-1] > 1 and value.numel() and not torch._C._functorch.is_functorch_wrapped_tensor(value))


@lru_cache(maxsize=64)
def _positions(rows: int, number: int, device: torch.device) -> Tensor:
    return spread(rows, _KEPT, number, device)


class LogitRows(Check):
    """Keeps rows of the logits of each forward pass, and reads their weights when the gradient arrives."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._calls = 0
        self.has_logits = False
        """Whether a forward pass has returned a tensor that may be logits."""
        config = getattr(context.subject.inner, "config", None)
        stop = getattr(config, "eos_token_id", None)
        listed = [stop] if isinstance(stop, int) else list(stop) if isinstance(stop, list | tuple) else []
        self.stop = [each for each in listed if isinstance(each, int) and each >= 0]

    def hooks(self) -> list[Callable[[], None]]:
        subject, hook = self.context.subject, ForwardHook(self._returned, arguments=True)
        called = list(subject.inner.children()) if isinstance(subject.inner, ModuleGroup) else [subject.hooked_module]
        return [each.register_forward_hook(hook, with_kwargs=True).remove for each in called]

    def _returned(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        if self.context.muted or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        logits = _logits_of(output)
        if logits is None:
            return
        self.has_logits, self._calls = True, self._calls + 1
        node, place = logits.grad_fn, logits.output_nr
        while node is not None and node.name() in _SAME and node.next_functions[0][0] is not None:
            node, place = node.next_functions[0]
        if node is None:
            return
        with torch.no_grad():
            kept = self._keep(logits.detach(), place, [*args, *kwargs.values()])
        node.register_prehook(partial(self._arrived, kept))

    def _keep(self, logits: Tensor, place: int, given: Sequence[Any]) -> _Kept:
        rows, classes = logits.numel() // logits.shape[-1], logits.shape[-1]
        of_rows = [
            each
            for each in given
            if type(each) is Tensor and each.dtype == torch.int64 and each.shape == logits.shape[:-1]
        ]
        first: list[Tensor] = []
        if rows > _KEPT:
            # A label is that of its row, or of the row before in a model that predicts the next token.
            valid = [each.ge(0) for each in of_rows if each.device == logits.device]
            first = [part.flatten() for each in valid for part in (each, each.roll(-1, -1))]
        number = self._calls % _ROTATIONS
        positions = (
            spread(rows, _KEPT, number, logits.device, first) if first else _positions(rows, number, logits.device)
        )
        stop = self.stop if self.stop and max(self.stop) < classes and of_rows else []
        seen = None
        if stop:
            seen = torch.stack([each.eq(token).any().to(logits.device) for each in of_rows for token in stop]).any()
        return _Kept(rows_at(logits, positions), positions, logits.shape, place, stop, seen)

    def _arrived(self, kept: _Kept, gradients: tuple[Tensor | None, ...]) -> None:
        now, gradient = self.context.backward, gradients[kept.output]
        if self.context.muted or now is None or gradient is None or gradient.shape != kept.shape:
            return
        if type(gradient) in DENSE_TYPES and gradient.layout == torch.strided:
            if gradient.dtype in (torch.bfloat16, torch.float16):
                now.loss.tolerance = _LOW_TOLERANCE
            now.loss.read.append(kept.read(gradient))


# the weights of an update, by the values of all ranks


@dataclass(frozen=True)
class UpdateWeights:
    """The weights of the trained tokens of one update, as the optimizer receives them.

    total: the sum of all weights; 1 for a mean. low, high: the smallest and the largest weight, times the number of
    tokens: 1 in a mean over all of them. low_at, high_at: their rank and backward pass. between: what the weights
    differ between, or "". line: the digest of the source line that called for the backward passes. passes: their
    number on each rank, or 0 if the ranks have different numbers. heads: the tensors of logits in each pass. exact:
    the total is not estimated from unequal rows. deliberate: the loop weighed the loss by a fraction. factor: the
    gradient that the optimizer receives over the sum of the raw gradients. loss: the sum of the losses that the loop
    passed to `backward`; of_tokens: the sum of the tokens' weighted losses, of which `sampled` were read.
    """

    total: float
    low: float
    high: float
    low_at: tuple[int, int]
    high_at: tuple[int, int]
    between: str
    line: int
    passes: int
    heads: int
    tokens: int
    exact: bool
    deliberate: bool
    factor: float
    loss: float
    of_tokens: float
    sampled: int

    def description(self, world: int, factor: str = "") -> str:
        weight = self.total / self.factor / world
        passes = f"{self.passes} backward passes of loss weight {weight / max(self.passes, 1):.3f} each"
        loss = passes if self.passes > 1 else f"the loss has weight {weight:.3f}"
        if world > 1:
            loss = f"on each of {world} ranks, {loss}; reduction factor {self.factor:.3f}"
        equals = f" ({factor.strip()})" if factor else ""
        return f"the gradient is {self.total:.3f} times that of the mean loss{equals}: {loss}"

    @property
    def is_mean(self) -> bool:
        """Of each of several heads there may be a mean, and their losses are added."""
        return _close(self.total, 1) or _close(self.total, self.heads)


def _reduction_factor(seen: Seen[object], place: int, *, shards: bool) -> float | None:
    raw, reduced = (list(map(real_of, seen.column(f"dot {what} {place}"))) for what in ("raw", "kept"))
    # After a reduction the product of whole gradients is equal on all ranks. Without one each rank has its own factor.
    if (len(set(reduced)) > 1 and not shards) or not all(map(math.isfinite, (*reduced, *raw))):
        return None
    total, final = math.fsum(raw), math.fsum(reduced) if shards else reduced[0]
    cancelled = abs(total) <= _CANCELLED * math.fsum(map(abs, raw))
    return None if cancelled or not final else final / total


_CHOSEN, _ROUGH, _HALF, _STOP_SEEN, _STOP_TRAINED = 1, 2, 4, 8, 16
_KIND, _REASON, _HEADS = 8, 16, 32
"""The flags in `weight flags`, and the places of three small numbers in it."""


def _number(flags: int, place: int) -> int:
    return flags >> place & 0xFF


_BETWEEN = {Unequal.ROWS: "rows", Unequal.LABELS: "labels, as class weights are", Unequal.PASSES: "micro-batches"}


def update_weights(said: Observations, *, shards: bool) -> UpdateWeights | Reason:
    """The weights of an update by the observations of all ranks, or why these do not determine them."""
    seen = Seen[object](said, None)
    flags, passes, tokens = (seen.column(f"weight {name}") for name in ("flags", "passes", "tokens"))
    reason = max(_number(each, _REASON) for each in flags)
    if reason:
        return Reason(reason)
    heads = {_number(each, _HEADS) for each in flags}
    if "weight line" in seen.differing or len(heads) > 1:
        return Reason.SEVERAL
    factor, second = (_reduction_factor(seen, place, shards=shards) for place in (0, 1))
    # Two products, because a reduction that is not a multiple of the sum has a quotient too.
    if factor is None or second is None or not _close(factor, second) or not sum(tokens):
        return Reason.REDUCTION
    total, low, high, loss, of_tokens = (
        list(map(real_of, seen.column(f"weight {name}"))) for name in ("total", "low", "high", "loss", "of tokens")
    )
    ranks = [rank for rank, count in enumerate(tokens) if count]
    smallest, largest = min(ranks, key=low.__getitem__), max(ranks, key=high.__getitem__)
    where, scale = seen.column("weight where"), factor * sum(tokens)
    kind = Unequal(max(_number(each, _KIND) for each in flags))
    tolerance = _LOW_TOLERANCE if any(each & _HALF for each in flags) else _TOLERANCE
    ranks_differ = high[largest] > low[smallest] * (1 + 2 * tolerance)
    return UpdateWeights(
        factor * math.fsum(total),
        scale * low[smallest],
        scale * high[largest],
        (smallest, where[smallest] & 0xFFFF),
        (largest, where[largest] >> 16),
        _BETWEEN.get(kind, "ranks" if ranks_differ else ""),
        said[0].values["weight line"],
        0 if "weight passes" in seen.differing else passes[0],
        heads.pop(),
        sum(tokens),
        not any(each & _ROUGH for each in flags),
        any(each & _CHOSEN for each in flags),
        factor,
        math.fsum(loss),
        math.fsum(of_tokens),
        sum(min(count, SAMPLED * number) for count, number in zip(tokens, passes, strict=True)),
    )


class Judged(NamedTuple):
    """The weights of an update, of the last known one before, and how long they have been like these.

    steady: the number of known updates before in a row that were means over as many tokens as the last one. plain:
    whether the losses of this update, and of those before with the same total, are those of their tokens alone.
    """

    now: UpdateWeights
    before: UpdateWeights | None
    steady: int
    plain: bool


def _short_window(seen: Seen[Judged]) -> Finding | None:
    now, before, steady, _ = seen.want
    if before is None or now.is_mean or not before.is_mean or now.line != before.line or now.deliberate:
        return None
    counts = [("micro-batches", now.passes, before.passes)]
    if steady >= _STEADY:  # a constant normaliser is that of the mean now and then
        counts.append(("terms", now.tokens, before.tokens))
    for what, here, full in counts:
        if 0 < here < full and now.exact and _close(now.total / before.total, here / full):
            shown = f"{now.description(len(seen.observations))}. In the window before: {before.total:.3f} times"
            window = f"a window of {here} {what} is divided like one of {full}"
            likely = "the loss of a last, shorter window is divided by the numbers of a full one"
            return Finding(f"{window}: {shown}", seen.step, (), "gradient", likely=likely)
    return None


def _factor_of_layout(seen: Seen[Judged]) -> Finding | None:
    """A finding if this update and the last one with known weights are off by the same count of ranks or passes."""
    now, before, _, plain = seen.want
    if before is None or now.is_mean or now.line != before.line or not _close(now.total, before.total):
        return None
    # Users often halve a loss, and seldom double it.
    if not (now.exact and plain) or (now.deliberate and now.total < 1):
        return None
    world, passes = len(seen.observations), max(now.passes, 1)
    layout = {world, passes, world * passes, world**2} - {1}
    if now.heads > 1:  # their losses may have been added or averaged
        layout = {now.heads}
    if not any(_close(now.total, each) or _close(now.total, 1 / each) for each in layout):
        return None
    twice = "the loss is divided twice, by the number of micro-batches or the world size, or it is scaled on purpose"
    what = now.description(world, name_ratio(now.total, world, passes, _ROUNDING))
    return Finding(what, seen.step, (), "gradient", likely=twice if now.total < 1 else None)


_READS = tuple(
    f"weight {name}"
    for name in ("passes", "line", "flags", "tokens", "total", "low", "high", "where", "loss", "of tokens")
) + tuple(f"dot {what} {place}" for what in ("raw", "kept") for place in (0, 1))
SCALE: tuple[Law[Seen[Judged]], ...] = (
    Law("gradient-scale/short", _READS, _short_window, suspicion=True),
    Law("gradient-scale/before", _READS, _factor_of_layout, suspicion=True),
)
"""Judged at every update with known weights: the tokens of all passes and ranks have the total weight of a mean."""

_WHY = {
    Reason.NO_LOGITS: "the model returned no logits",
    Reason.NOT_REACHED: "no gradient arrived at the logits that the model returned: a fused or compiled loss",
    Reason.NOT_SAMPLED: "none of the rows that were read is trained, or the model is certain of all",
    Reason.OTHER_LOSS: "the loss is no plain cross entropy of the logits: smoothing, soft targets, squares",
    Reason.SIGNS: "tokens have weights of both signs, as in policy gradients",
    Reason.SEVERAL: "the backward passes are of several losses, or they differ between ranks",
    Reason.REDUCTION: "the reduction of the gradients is unknown",
}


@dataclass
class Summary:
    """The weights of all updates, for the closing lines."""

    updates: int = 0
    known: int = 0
    means: int = 0
    smallest: float = math.inf
    largest: float = 0.0
    gradients_changed: bool = False
    """Whether the loop changed gradients after the backward pass by irregular factors, as a clipping by hand does: two
    updates of one line without the total of a mean differ in the total and in the reduction factor. After a wrong
    division one of the two would be equal.
    """
    stop_seen: bool = False
    stop_trained: bool = False
    _wrong: dict[int, UpdateWeights] = field(default_factory=dict)  # the last that was not a mean, by line
    _unknown: Counter[Reason] = field(default_factory=Counter)
    _unequal: int = 0
    _widest: tuple[float, str] = (0.0, "")
    _empty: list[str] = field(default_factory=list)

    def add(self, found: UpdateWeights | Reason, said: Observations) -> None:
        self.updates += 1
        flags = [each.values["weight flags"] for each in said]
        self.stop_seen |= any(each & _STOP_SEEN for each in flags)
        self.stop_trained |= any(each & _STOP_TRAINED for each in flags)
        empty = [rank for rank, each in enumerate(said) if each.values["weight passes"] and not _trains(each.values)]
        if empty:
            ranks = "no rank" if len(empty) == len(said) else f"not rank {', '.join(map(str, empty))}"
            self._empty.append(f"{ranks} had a trained token in update {said[0].step}")
        if isinstance(found, Reason):
            self._unknown[found] += 1
            return
        self.known, self.means = self.known + 1, self.means + found.is_mean
        shown = 1.0 if found.is_mean else found.total
        self.smallest, self.largest = min(self.smallest, shown), max(self.largest, shown)
        if not found.is_mean:
            before = self._wrong.get(found.line, found)
            same = (found.total, before.total), (found.factor, before.factor)
            self.gradients_changed |= not any(_close(*pair) for pair in same)
            self._wrong[found.line] = found
        if found.between:
            self._unequal += 1
            places = [f"on rank {rank}, pass {number + 1}" for rank, number in (found.low_at, found.high_at)]
            sizes = f"{found.low:.3f} ({places[0]}) to {found.high:.3f} ({places[1]})"
            text = f"differ between {found.between}, at most in update {said[0].step}: {sizes} times that of the mean"
            self._widest = max(self._widest, (found.high / found.low, text))

    def closing_lines(self, stop: Sequence[int]) -> list[str]:
        lines = [self._scale_line()]
        if self._unknown:
            reason, count = self._unknown.most_common(1)[0]
            of = f"in {count} of {self.updates} updates"
            lines.append(f"  token weights: unknown {of}: {_WHY[reason]}" * (reason in _WHY))
        if self._unequal and not self.gradients_changed:
            lines.append(f"  token weights: in {self._unequal} of {self.updates} updates they {self._widest[1]}")
        if self._empty:
            lines.append(f"  token weights: {self._empty[0]}, the first of {len(self._empty)} such updates")
        if self.stop_seen and not self.stop_trained and self.known:
            ids = ", ".join(map(str, stop))
            lines.append(f"  token weights: the stop token ({ids}) is in the batches, and was never trained")
        return lines

    def _scale_line(self) -> str:
        if not self.known:
            return ""
        if self.gradients_changed:
            of = f"in {self.known - self.means} of {self.updates} updates"
            others = f"; that of the mean loss in {self.means}" * (self.means > 0)
            return f"  gradient scale: not comparable {of}: the loop changed the gradients after backward(){others}"
        between = " to ".join(dict.fromkeys((f"{self.smallest:.3f}", f"{self.largest:.3f}")))
        shown = "that of the mean loss" if self.means == self.known else f"{between} times that of the mean loss"
        return f"  gradient scale: {shown} in {self.known} of {self.updates} updates, from the observed tokens"


def _trains(values: Mapping[str, int]) -> bool:
    return bool(values["weight tokens"] or _number(values["weight flags"], _REASON))


# the reduction, and what a rank sends


class _Elements:
    """Elements of one parameter that represent all gradients, and two random vectors over them.

    Of a sharded parameter they are the first elements of each shard: an optimizer has only its own rank's.
    """

    def __init__(self, parameter: Tensor) -> None:
        """Raises `ValueError` if the parameter is sharded in another way than along its first dimension."""
        mesh: Any = getattr(parameter, "device_mesh", None)
        self.copies, self._whole, sizes, own = 1, None, [min(parameter.numel(), _ELEMENTS)], 0
        if mesh is not None:
            *outer, last = placements = list(getattr(parameter, "placements", ()))
            if not (last.is_shard(0) and all(each.is_replicate() for each in outer)):
                raise ValueError(f"a parameter with placements {placements}")
            shards, own = mesh.size(len(outer)), mesh.get_local_rank(len(outer))
            rows, width = parameter.shape[0], parameter.numel() // parameter.shape[0]
            chunk = -(-rows // shards)
            starts = [min(each * chunk, rows) for each in range(shards + 1)]
            sizes = [min((b - a) * width, _ELEMENTS // shards) for a, b in itertools.pairwise(starts)]
            parts = [torch.arange(size) + start * width for start, size in zip(starts, sizes, strict=False)]
            self._whole, self.copies = torch.cat(parts), mesh.size() // shards
        # Not random signs: the gradient of the logits of a softmax adds up to zero and may cancel against them.
        generator = torch.Generator().manual_seed(_ELEMENTS)
        self._random = torch.randn(2, sum(sizes), generator=generator, device="cpu")
        self._own = slice(sum(sizes[:own]), sum(sizes[: own + 1]))

    def dots(self, gradient: Tensor, *, whole: bool) -> Tensor | None:
        """fp32 [2]: the products with the random vectors; None if `gradient` is not contiguous.

        whole: of all elements, as of a raw gradient; else of this rank's.
        """
        if type(gradient) is not Tensor or gradient.layout != torch.strided or not gradient.is_contiguous():
            return None
        if self._random.device != gradient.device:
            self._random = self._random.to(gradient.device)
            self._whole = None if self._whole is None else self._whole.to(gradient.device)
        flat = gradient.detach().view(-1)
        if whole and self._whole is not None:
            part, random = flat[self._whole], self._random
        else:
            random = self._random[:, self._own]
            part = flat[: random.shape[1]]
        # Not `mv`: autocast would round it, and a loop that requires determinism may not call it on a GPU.
        return (random * part.float()).sum(1)


class TokenWeights(Check):
    """The weights of the tokens in the window of one optimizer, and the products that give the reduction factor."""

    def __init__(self, context: Context, probe: OptimizerProbe, rows: LogitRows) -> None:
        super().__init__(context)
        self._rows = rows
        self._window: list[BackwardPass] = []
        self._known = True
        self._raw: Tensor | None = None
        """The products of the raw gradients."""
        self._dots_sent: list[Tensor] = []
        """`_raw` and the products of the reduced gradient, once these are computed."""
        self._previous: UpdateWeights | None = None
        self._steady = 0
        self._run = (0.0, 0.0, 0)
        """The losses, the losses of the tokens and the sampled rows of the updates in a row with the same total."""
        self._summary = Summary()
        self._sharded = context.subject.sharded
        dense = ((i, p) for i, p in enumerate(probe.members) if p.layout == torch.strided and p.is_floating_point())
        # The last parameter is nearest to the loss. It also has a gradient if an adapter begins at zero.
        place = max((place for place, parameter in dense if parameter.numel() > 1), default=-1)
        self._parameter = probe.members[place] if place >= 0 else None
        self._elements: _Elements | None = None
        try:
            self._elements = None if self._parameter is None else _Elements(self._parameter)
        except ValueError:
            self._known = False
        self.parameter_index = -1 if self._sharded else place
        """The index among the members of the parameter whose gradient hook is called; -1 for none."""
        self._seen: list[tuple[Tensor, Any]] = []

    def cover(self) -> Mapping[str, Cover]:
        dark = Cover("not observable", "the parameters are not sharded along their first dimension alone")
        return {"gradient-scale": LIVE if self._elements is not None or self._parameter is None else dark}

    def hooks(self) -> list[Callable[[], None]]:
        slots = [slot for slot in self.context.subject.slots if slot.parameter is self._parameter]
        if not self._sharded or self._elements is None or not slots:
            return []
        # In a forward pass of a sharded model the attribute is the whole parameter, whose gradient is the raw one.
        hook = ForwardHook(partial(self._unsharded, slots[0].owner, slots[0].attribute))
        return [slots[0].owner.register_forward_pre_hook(hook).remove, self._unhook]

    def _unsharded(self, owner: nn.Module, attribute: str) -> None:
        whole = getattr(owner, attribute)
        if hasattr(whole, "placements") or not whole.requires_grad or any(whole is each for each, _ in self._seen):
            return
        self._seen.append((whole, whole.register_hook(self.gradient_hook)))

    def _unhook(self) -> None:
        for _, handle in self._seen:
            handle.remove()

    def gradient_hook(self, gradient: Tensor) -> None:
        now = self.context.backward
        if now is None or self._elements is None:
            self._known = False
        elif self._known and not self.context.muted:
            if not self._window or self._window[-1] is not now:
                self._window.append(now)
            dots = self._elements.dots(gradient, whole=True)
            if dots is None:
                self._known = False
            else:
                self._raw = dots if self._raw is None else self._raw + dots

    def backward_reached_optimizer(self) -> None:
        """A pass produced gradients of the optimizer. If the observed one is missing, the scale is unknown."""
        if not self._sharded and (not self._window or self._window[-1] is not self.context.backward):
            self._known = False

    def reduced(self, probe: OptimizerProbe) -> None:
        parameter = self._parameter
        if self._dots_sent or not self._known or self._raw is None or parameter is None or parameter.grad is None:
            return
        # A hook of the loop may change the gradient after it was read.
        if self._elements is None or has_other_hooks(parameter, own=1):
            self._known = False
            return
        gradient = parameter.grad
        dots = self._elements.dots(gradient.to_local() if self._sharded else gradient, whole=False)
        scale = getattr(probe.optimizer, "grad_scale", None)
        if dots is None:
            self._known = False
        else:  # a fused optimizer divides by the loss scale in its step
            self._dots_sent = [self._raw, dots / self._elements.copies if scale is None else dots / scale]

    def look(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        self.reduced(probe)
        passes = [each.loss for each in self._window]
        return [self._dots_sent, *(each.loss for each in passes), *(part for each in passes for part in each.read)]

    def before(self, probe: OptimizerProbe) -> Values:
        passes: list[tuple[int, PassWeights]] = []
        heads, lines = set[int](), {each.line for each in self._window}
        for number, each in enumerate(self._window):
            found = each.loss.weights()
            heads.add(len([one for one in found if one.count]) or 1)
            passes += [(number, one) for one in found]
        losses = [float(part) for each in self._window for part in each.loss.loss]
        taken = [(number, each) for number, each in passes if each.rows]
        low = min(taken, key=lambda pair: min(row.weight for row in pair[1].rows), default=None)
        high = max(taken, key=lambda pair: max(row.weight for row in pair[1].rows), default=None)
        ends = (
            0.0 if low is None else min(row.weight for row in low[1].rows),
            0.0 if high is None else max(row.weight for row in high[1].rows),
        )
        weights = [each for _, each in passes]
        heads_of_stop = [head for each in self._window for _, head in each.loss.read if len(head) > 1]
        flags = (
            _CHOSEN * any(each.loss.deliberate for each in self._window)
            | _ROUGH * any(not each.is_equal and each.count > len(each.rows) for each in weights)
            | _HALF * any(each.tolerance == _LOW_TOLERANCE for each in weights)
            | _STOP_SEEN * any(float(head[1]) for head in heads_of_stop)
            | _STOP_TRAINED * any(float(head[2]) for head in heads_of_stop)
            | unequal(weights) << _KIND
            | self._reason(weights, lines, heads, losses) << _REASON
            | max(heads, default=1) << _HEADS
        )
        dots = [each.tolist() for each in self._dots_sent] or [[0.0] * 2] * 2
        return {
            "weight passes": len(self._window),
            "weight line": text_digest(sorted(lines)) if lines else 0,
            "weight flags": flags,
            "weight tokens": sum(each.count for each in weights),
            "weight total": bits_of(math.fsum(each.total for each in weights)),
            "weight low": bits_of(ends[0]),
            "weight high": bits_of(ends[1]),
            "weight where": (0 if low is None else low[0]) | (0 if high is None else high[0]) << 16,
            "weight loss": bits_of(math.fsum(losses) if len(losses) == len(self._window) else math.nan),
            "weight of tokens": bits_of(math.fsum(each.loss for each in weights)),
            **{f"dot raw {place}": bits_of(dot) for place, dot in enumerate(dots[0])},
            **{f"dot kept {place}": bits_of(dot) for place, dot in enumerate(dots[1])},
        }

    def _reason(
        self, weights: Sequence[PassWeights], lines: set[str], heads: set[int], losses: Sequence[float]
    ) -> Reason:
        if not all(each.loss.read for each in self._window) or not self._window:
            return Reason.NOT_REACHED if self._rows.has_logits else Reason.NO_LOGITS
        # Passes on different lines belong to different losses, as in a GAN, and their weights do not add up.
        if len(lines) > 1 or len(heads) > 1:
            return Reason.SEVERAL
        reason = max((each.reason for each in weights), default=Reason.NONE)
        return reason or (Reason.NONE if self._known and self._dots_sent else Reason.REDUCTION)

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        found = update_weights(said, shards=self._sharded)
        self._summary.add(found, said)
        if isinstance(found, Reason):
            return
        before = self._previous
        same = before is not None and found.line == before.line and _close(found.total, before.total)
        loss, of_tokens, sampled = self._run if same else (0.0, 0.0, 0)
        self._run = loss, of_tokens, sampled = loss + found.loss, of_tokens + found.of_tokens, sampled + found.sampled
        error = _OTHER_TERMS + (0.0 if found.sampled == found.tokens else 1 / math.sqrt(sampled))
        plain = loss != 0 and abs(of_tokens / loss - 1) < error
        if not self._summary.gradients_changed:
            judged = Judged(found, before, self._steady, plain)
            self.context.verdicts.judge(SCALE, Seen(said, judged), self.context.scene())
        same_tokens = before is not None and before.is_mean and found.tokens == before.tokens
        self._steady = 0 if not found.is_mean else self._steady + 1 if same_tokens else 1
        self._previous = found

    def new_window(self, probe: OptimizerProbe) -> None:
        self._window, self._raw, self._dots_sent, self._known = [], None, [], True

    discarded = new_window

    def closing_lines(self) -> list[str]:
        if self.context.settings.reference is not None:
            return []
        return self._summary.closing_lines(self._rows.stop)
