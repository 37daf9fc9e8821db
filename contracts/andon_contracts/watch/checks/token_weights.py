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
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial, reduce
from operator import or_
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

import andon_contracts.watch.row_weights as reads
from andon_contracts.act import user_line
from andon_contracts.agree import bits_of, real_of
from andon_contracts.laws.law import Law, Observations, Seen
from andon_contracts.legible import counted
from andon_contracts.observe import DENSE_TYPES
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.checks.audit import name_ratio
from andon_contracts.watch.model_probe import ForwardHook, ModuleGroup
from andon_contracts.watch.row_weights import PassWeights, Row
from andon_contracts.watch.values import text_digest

_SAMPLED, _ELEMENTS_READ = (4, 16), 1 << 16
"""The rows of one tensor of logits that are read, of many classes fewer. Four times as many are kept until then."""
_ROUNDING = 5e-3  # the relative rounding error of a factor computed from gradients, which may have 16 bits
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
"""Nodes below the output of a model that pass the loss on to its logits."""
_NOT_DIVIDED = "the loss is not divided by the number of micro-batches"
_ENLARGED = "the loss is a sum, or it is multiplied by the world size"
_HEADS = 4  # the most outputs of a model that are read
_CHAIN = 8  # the most nodes between a loss and the number with which the loop weighs it


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_ROUNDING)


# what the hooks read on the device


class LossPass:
    """One backward pass of the loop: its loss, and what was read of the logits below it. due: whether it is read."""

    def __init__(self, loss: Tensor | None, due: bool) -> None:
        self.due, self.line = due, user_line() if due else ""
        self.loss = [] if not due or loss is None or type(loss) not in DENSE_TYPES else [loss.detach().clone()]
        self.deliberate = due and loss is not None and _is_weighed(loss.grad_fn)
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
        # An output without a loss has a gradient of zeros, if the loop adds it times 0.
        found = [each for each in found if each.count] or found[:1]
        return [each for each in found if each.reason != reads.OTHER_LOSS] or found


def _is_weighed(node: Any) -> bool:
    """Whether the loss was multiplied or divided by a fraction at last, as a user weighs it.

    Reads no saved tensor that has hooks of the loop: those of a checkpoint would compute its part of the model again.
    """
    for _ in range(_CHAIN):
        inputs = [] if node is None else [each for each, _ in node.next_functions if each is not None]
        if len(inputs) != 1:
            return False
        for name in ("self", "other") if node.name() in ("MulBackward0", "DivBackward0") else ():
            raw = getattr(node, f"_raw_saved_{name}", None)
            value = getattr(node, f"_saved_{name}", None) if raw is not None and raw.unpack_hook is None else None
            if value is not None and value.device.type == "cpu" and not value.dim() and not float(value).is_integer():
                return True
        node = inputs[0]
    return False


@dataclass
class _Kept:
    """Rows of the logits of one forward pass. stop: the ids of the stop token; stop_seen: whether the batch has one."""

    rows: Tensor
    positions: Tensor
    shape: torch.Size
    stop: Sequence[int]
    stop_seen: Tensor | None

    @torch.no_grad()
    def read(self, gradient: Tensor) -> list[Tensor]:
        """[rows, 6] the fields of `Row` and whether it is trained; [3] the trained rows and the stop token's flags."""
        mask = reads.trained(gradient)
        here = mask[self.positions]
        first = here.sort(descending=True, stable=True).indices[: _sampled(gradient.shape[-1])]
        values = reads.row_weights(self.rows[first], reads.rows_at(gradient, self.positions[first]))
        head = [mask.sum()]
        if self.stop_seen is not None:
            head += [self.stop_seen, torch.stack([(gradient[..., each] < 0).any() for each in self.stop]).any()]
        return [torch.cat([values, here[first, None].to(values.dtype)], 1), torch.stack([h.double() for h in head])]


def _sampled(classes: int) -> int:
    return max(_SAMPLED[0], min(_ELEMENTS_READ // classes, _SAMPLED[1]))


def _logits_of(output: Any) -> list[Tensor]:
    outputs = list(output.values()) if isinstance(output, Mapping) else output
    outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return [each for each in ([named] if _may_be_logits(named) else outputs) if _may_be_logits(each)][:_HEADS]


def _may_be_logits(value: Any) -> TypeGuard[Tensor]:
    if type(value) not in DENSE_TYPES or not (value.requires_grad and value.is_floating_point() and value.dim() > 1):
        return False
    return bool(value.shape[-1] > 1 and value.numel() and not torch._C._functorch.is_functorch_wrapped_tensor(value))


_positions = lru_cache(maxsize=64)(reads.spread)


class LogitRows(Check):
    """Keeps rows of the logits of each forward pass, and reads their weights when the gradient arrives.

    It keeps no logits, because the loop may drop them before the backward pass, and they may be the largest tensor of
    a model. In the backward pass nothing is copied but a few rows of the gradient.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.calls = 0  # the forward passes that returned a tensor that may be logits
        stop = getattr(getattr(context.subject.inner, "config", None), "eos_token_id", None)
        self.stop = [each for each in (stop if isinstance(stop, list) else [stop]) if isinstance(each, int)]

    def hooks(self) -> list[Callable[[], None]]:
        subject, hook = self.context.subject, ForwardHook(self._returned, arguments=True)
        called = list(subject.inner.children()) if isinstance(subject.inner, ModuleGroup) else [subject.hooked_module]
        return [each.register_forward_hook(hook, with_kwargs=True).remove for each in called]

    def _returned(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        # A checkpoint calls the model once more within the backward pass.
        muted = self.context.muted or not self.context.full
        if muted or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        with self.context.timed(), torch.no_grad():
            found = _logits_of(output)
            self.calls += bool(found)
            for logits in found:
                node, place = logits.grad_fn, logits.output_nr
                while node is not None and node.name() in _SAME:
                    node, place = node.next_functions[0]
                if node is not None:
                    kept = self._keep(logits.detach(), [*args, *kwargs.values()])
                    node.register_prehook(partial(self._arrived, kept, place))

    def _keep(self, logits: Tensor, given: Sequence[Any]) -> _Kept:
        shape, device = logits.shape, logits.device
        tokens = [each for each in given if type(each) is Tensor and each.dtype == torch.int64]
        tokens = [each for each in tokens if each.shape == shape[:-1] and each.device == device]
        rows, count, number = logits.numel() // shape[-1], 4 * _sampled(shape[-1]), self.calls % 4
        # A label is that of its row, or of the row before in a model that predicts the next token.
        valid = [part.flatten() for each in tokens for part in (each >= 0, each.roll(-1, -1) >= 0) if rows > count]
        where = reads.spread(rows, count, number, device, valid) if valid else _positions(rows, count, number, device)
        stop = self.stop if tokens and max(self.stop, default=shape[-1]) < shape[-1] else []
        seen = [each.eq(token).any() for each in tokens for token in stop]
        return _Kept(reads.rows_at(logits, where), where, shape, stop, torch.stack(seen).any() if seen else None)

    def _arrived(self, kept: _Kept, place: int, gradients: Sequence[Any]) -> None:
        now, gradient = self.context.backward, gradients[place]
        if self.context.muted or now is None or not now.due or type(gradient) not in DENSE_TYPES:
            return
        with self.context.timed():
            if gradient.dtype in (torch.bfloat16, torch.float16):
                now.tolerance = _LOW_TOLERANCE
            if gradient.shape == kept.shape:
                now.read.append(kept.read(gradient.detach()))


# the weights of an update, by the values of all ranks


_DELIBERATE, _ROUGH, _HALF, _STOP_SEEN, _STOP_TRAINED = 1, 2, 4, 8, 16


@dataclass(frozen=True)
class UpdateWeights:
    """The weights of the trained tokens of one update, as the optimizer receives them.

    total: the sum of all weights; 1 for a mean. unequal: the largest weight over the smallest, and in words what they
    differ between, with both times the number of tokens (1 in a mean); None: equal. line: the digest of the source line
    that called for the backward passes. passes: their number on each rank, or 0 if the ranks have different numbers.
    heads: the tensors of logits in each pass. exact: the total is not estimated from unequal rows, and no pass lacks a
    trained token. deliberate: the loop weighed the loss by a fraction. factor: the gradient that the optimizer receives
    over the sum of the raw gradients. loss: the sum of the losses that the loop passed to `backward`; of_tokens: the
    same by the tokens, of which `sampled` were read. step: the number of the update.
    """

    total: float
    unequal: tuple[float, str] | None
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
    step: int = 0

    def description(self, world: int, factor: str = "") -> str:
        weight = self.total / self.factor / world
        passes = f"{self.passes} backward passes of loss weight {weight / max(self.passes, 1):.3f} each"
        loss = passes if self.passes > 1 else f"the loss has weight {weight:.3f}"
        if world > 1:
            shown = f"{self.factor:.3f}" if self.factor >= _ROUNDING else f"{self.factor:.3g}"
            loss = f"on each of {world} ranks, {loss}; reduction factor {shown}"
        equals = f" ({factor.strip()})" if factor else ""
        return f"the gradient is {self.total:.3f} times that of the mean loss{equals}: {loss}"

    @property
    def is_mean(self) -> bool:
        """Whether the weights are those of a mean over all tokens, or of one mean for each head."""
        return _close(self.total, 1) or _close(self.total, self.heads)

    def is_like(self, other: UpdateWeights | None) -> bool:
        return other is not None and self.line == other.line and _close(self.total, other.total)


def _reduction_factor(seen: Seen[object], place: int, *, shards: bool) -> float | None:
    raw, reduced = (list(map(real_of, seen.column(f"dot {what} {place}"))) for what in ("raw", "kept"))
    # After a reduction the product of whole gradients is equal on all ranks. Without one each rank has its own factor.
    if (len(set(reduced)) > 1 and not shards) or not all(map(math.isfinite, (*reduced, *raw))):
        return None
    total, final = math.fsum(raw), math.fsum(reduced) if shards else reduced[0]
    cancelled = abs(total) <= _CANCELLED * math.fsum(map(abs, raw))
    return None if cancelled or not final else final / total


def update_weights(said: Observations, *, shards: bool) -> UpdateWeights | int:
    """The weights of an update by the observations of all ranks, or the number of the reason why they are unknown."""
    seen = Seen[object](said, None)
    tokens, first = seen.column("weight tokens"), said[0].values
    if reason := max(seen.column("weight reason")):
        return reason
    if "weight line" in seen.differing or "weight heads" in seen.differing:
        return reads.SEVERAL
    factor, second = (_reduction_factor(seen, place, shards=shards) for place in (0, 1))
    # Two products, because a reduction that is not a multiple of the sum has a quotient too.
    if factor is None or second is None or not _close(factor, second) or not sum(tokens):
        return reads.REDUCTION
    names = ("total", "low", "high", "loss", "of tokens")
    total, low, high, loss, of_tokens = (list(map(real_of, seen.column(f"weight {name}"))) for name in names)
    ranks = [rank for rank, count in enumerate(tokens) if count]
    smallest, largest = min(ranks, key=low.__getitem__), max(ranks, key=high.__getitem__)
    bits = reduce(or_, seen.column("weight bits"))
    tolerance = _LOW_TOLERANCE if bits & _HALF else _TOLERANCE
    apart = f"ranks, {reads.LENGTHS}" if high[largest] > low[smallest] * (1 + 2 * tolerance) else ""
    between, sizes = reads.BETWEEN[max(seen.column("weight between"))] or apart, []
    for rank, weights, name in ((smallest, low, "low"), (largest, high, "high")):
        place = f"micro-batch {seen.column(f'weight {name} pass')[rank] + 1}"
        sizes.append(f"{factor * weights[rank] * sum(tokens):.3f} on rank {rank} ({place})")
    shown = f"{between}; most in update {seen.step}: a token weighs {' and '.join(sizes)} of an equal share"
    return UpdateWeights(
        total=factor * sum(total),
        unequal=(high[largest] / low[smallest], shown) if between else None,
        line=first["weight line"],
        passes=0 if "weight passes" in seen.differing else first["weight passes"],
        heads=first["weight heads"],
        tokens=sum(tokens),
        exact=all(tokens) and not bits & _ROUGH,
        deliberate=bool(bits & _DELIBERATE),
        factor=factor,
        loss=sum(loss),
        of_tokens=sum(of_tokens),
        sampled=sum(seen.column("weight rows")),
        step=seen.step,
    )


Judged = tuple[UpdateWeights, UpdateWeights | None, int, bool]
"""The weights of an update, and of the last known one before; how many updates in a row before that were means over as
many tokens; and whether the losses of this update, and of those before with the same total, are of tokens alone."""


def _short_window(seen: Seen[Judged]) -> Finding | None:
    now, before, steady, _ = seen.want
    if before is None or now.is_mean or not before.is_mean or now.line != before.line or now.deliberate:
        return None
    counts = [("micro-batches", now.passes, before.passes)]
    if steady >= _STEADY:  # a constant divisor is the number of tokens now and then
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
    if before is None or now.is_mean or not now.is_like(before):
        return None
    # Users often halve a loss, and seldom double it.
    if not (now.exact and plain) or (now.deliberate and now.total < 1):
        return None
    world, passes = len(seen.observations), max(now.passes, 1)
    layout, named = {world, passes, world * passes, world**2} - {1}, name_ratio(now.total, world, passes, _ROUNDING)
    if now.heads > 1:  # their losses may have been added or averaged
        layout, named = {now.heads}, f" = 1 / {now.heads} outputs in one backward pass"
    if not any(_close(now.total, each) or _close(now.total, 1 / each) for each in layout):
        return None
    twice = "the loss is divided twice, by the number of micro-batches or the world size, or it is scaled on purpose"
    what, likely = f"{now.description(world, named)}; since step {before.step}", None
    if _close(now.factor * world, 1):  # the ranks' gradients were averaged
        likely = _NOT_DIVIDED if now.passes > 1 else _ENLARGED
    return Finding(what, seen.step, (), "gradient", likely=twice if now.total < 1 else likely)


SCALE: tuple[Law[Seen[Judged]], ...] = (
    Law("gradient-scale/short", (), _short_window, suspicion=True),
    Law("gradient-scale/before", (), _factor_of_layout, suspicion=True),
)
"""Judged at every update with known weights: the tokens of all passes and ranks have the total weight of a mean."""


@dataclass
class Summary:
    """The weights of all updates, for the closing lines."""

    updates: int = 0
    known: int = 0
    means: int = 0
    smallest: float = math.inf
    largest: float = 0.0
    gradients_changed: bool = False
    """Whether the loop changed gradients by irregular factors, as a clipping by hand does: two updates without a
    mean's total differ in it and in the reduction factor. After a wrong division one of the two would be equal.
    """
    bits: int = 0
    _wrong: dict[int, UpdateWeights] = field(default_factory=dict)  # the last that was not a mean, by line
    _unknown: Counter[int] = field(default_factory=Counter)
    _unequal: list[tuple[float, str]] = field(default_factory=list)
    _empty: list[str] = field(default_factory=list)

    def add(self, found: UpdateWeights | int, said: Observations) -> None:
        self.updates += 1
        seen = [each.values for each in said]
        self.bits = reduce(or_, (each["weight bits"] for each in seen), self.bits)
        empty = [f"rank {r}" for r, each in enumerate(seen) if not (each["weight tokens"] or each["weight reason"])]
        if empty:
            self._empty.append(f"{', '.join(empty)} had no trained token in update {said[0].step}")
        if isinstance(found, int):
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
        if found.unequal is not None:
            self._unequal.append(found.unequal)

    def closing_lines(self, stop: Sequence[int]) -> list[str]:
        lines, of = [], f"of {counted(self.updates, 'update')} read"
        if self.gradients_changed:
            others = f"; that of the mean loss in {self.means}" * (self.means > 0)
            why = f"the loop changed the gradients after backward(){others}"
            lines.append(f"  gradient scale: not comparable in {self.known - self.means} {of}: {why}")
        elif self.known:
            between = " to ".join(dict.fromkeys((f"{self.smallest:.3f}", f"{self.largest:.3f}")))
            shown = "that of the mean loss" if self.means == self.known else f"{between} times that of the mean loss"
            lines.append(f"  gradient scale: {shown} in {self.known} {of}")
        if self._unknown:
            reason, count = self._unknown.most_common(1)[0]
            lines.append(f"  token weights: could not be computed in {count} {of}: {reads.REASONS[reason]}")
        if self._unequal and not self.gradients_changed:
            what = f"not those of one mean in {len(self._unequal)} {of}: they differ"
            lines.append(f"  token weights: {what} between {max(self._unequal)[1]}")
        if self._empty:
            lines.append(f"  token weights: {self._empty[0]}; so it was in {len(self._empty)} {of}")
        if self.known and self.bits & (_STOP_SEEN | _STOP_TRAINED) == _STOP_SEEN:
            lines.append(f"  token weights: the stop token {stop} is in the batches, and was never trained")
        return lines


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
            starts = [min(each * -(-rows // shards), rows) for each in range(shards + 1)]
            sizes = [min((b - a) * width, _ELEMENTS // shards) for a, b in itertools.pairwise(starts)]
            parts = [torch.arange(size) + start * width for start, size in zip(starts, sizes, strict=False)]
            self._whole, self.copies = torch.cat(parts), mesh.size() // shards
        # Not random signs: the gradient of the logits of a softmax adds up to zero and may cancel against them.
        generator = torch.Generator().manual_seed(_ELEMENTS)
        self._random = torch.randn(2, sum(sizes), generator=generator, device="cpu").to(parameter.device)
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
        flat, random = gradient.detach().view(-1), self._random if whole else self._random[:, self._own]
        part = flat[: random.shape[1]] if self._whole is None or not whole else flat[self._whole]
        # Not `mv`: autocast would round it, and a loop that requires determinism may not call it on a GPU.
        return (random * part.float()).sum(1)


class TokenWeights(Check):
    """The weights of the tokens in the window of one optimizer, and the products that give the reduction factor."""

    def __init__(self, context: Context, probe: OptimizerProbe, rows: LogitRows) -> None:
        super().__init__(context)
        self._rows = rows
        self._window: list[LossPass] = []
        self._known = True
        self._raw: Tensor | None = None  # the products of the raw gradients
        self._dots_sent: list[Tensor] = []  # `_raw` and the products of the reduced gradient, once these are computed
        self._previous: UpdateWeights | None = None
        self._steady = 0
        self._run = (0.0, 0.0, 0)  # of updates in a row with one total: losses, losses of tokens, rows that were read
        self._summary = Summary()
        self._sharded = context.subject.sharded
        dense = ((i, p) for i, p in enumerate(probe.members) if p.layout == torch.strided and p.is_floating_point())
        # The last parameter is nearest to the loss. It also has a gradient if an adapter begins at zero.
        place = max((place for place, parameter in dense if parameter.numel() > 1), default=-1)
        self._parameter = probe.members[place] if place >= 0 else None
        self._elements: _Elements | None = None
        with suppress(ValueError):
            self._elements = None if self._parameter is None else _Elements(self._parameter)
        self.parameter_index = -1 if self._sharded else place
        """The index among the members of the parameter whose gradient hook is called; -1 for none."""
        self._whole: dict[int, tuple[Tensor, Any]] = {}
        """By id: the whole parameter of a forward pass of a sharded model, and its hook."""

    def cover(self) -> Mapping[str, Cover]:
        dark = Cover("not observable", "the parameters are not sharded along their first dimension alone")
        return {"gradient-scale": dark if self._sharded and self._elements is None else LIVE}

    def hooks(self) -> list[Callable[[], None]]:
        slot = next((slot for slot in self.context.subject.slots if slot.parameter is self._parameter), None)
        if not self._sharded or slot is None:
            return []
        hook = ForwardHook(partial(self._unsharded, slot.owner, slot.attribute))
        return [slot.owner.register_forward_pre_hook(hook).remove, self._unhook]

    def _unhook(self) -> None:
        for _, handle in self._whole.values():
            handle.remove()

    def _unsharded(self, owner: nn.Module, attribute: str) -> None:
        """In a forward pass of a sharded model the attribute is the whole parameter, whose gradient is the raw one."""
        whole = getattr(owner, attribute)
        if not hasattr(whole, "placements") and whole.requires_grad and id(whole) not in self._whole:
            self._whole[id(whole)] = whole, whole.register_hook(self.gradient_hook)

    def gradient_hook(self, gradient: Tensor) -> None:
        now = self.context.backward
        if now is None or self._elements is None:
            self._known = False
        elif self._known and not self.context.muted:
            if not self._window or self._window[-1] is not now:
                self._window.append(now)
            dots = self._elements.dots(gradient, whole=True) if now.due else None
            self._known = dots is not None or not now.due
            self._raw = dots if self._raw is None or dots is None else self._raw + dots

    def backward_reached_optimizer(self) -> None:
        """A pass produced gradients of the optimizer. If the observed one is missing, the scale is unknown."""
        if not self._sharded and (not self._window or self._window[-1] is not self.context.backward):
            self._known = False

    def reduced(self, probe: OptimizerProbe) -> None:
        parameter, elements = self._parameter, self._elements
        if self._dots_sent or not self._known or self._raw is None or parameter is None or elements is None:
            return
        gradient: Any = parameter.grad
        # A plain parameter beside shards, such as an adapter, has a plain gradient.
        if gradient is None or self._sharded != hasattr(gradient, "to_local"):
            return
        dots = elements.dots(gradient.to_local() if self._sharded else gradient, whole=False)
        scale = getattr(probe.optimizer, "grad_scale", None)
        # A hook of the loop may change the gradient after it was read.
        hooked = len(parameter._backward_hooks or ()) > 1 or bool(parameter._post_accumulate_grad_hooks)
        self._known = dots is not None and not hooked
        if self._known and dots is not None:  # a fused optimizer divides by the loss scale in its step
            self._dots_sent = [self._raw, dots / (elements.copies if scale is None else scale)]

    def look(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        self.reduced(probe)
        window = self._window
        return [self._dots_sent, *(each.loss for each in window), *(part for each in window for part in each.read)]

    def before(self, probe: OptimizerProbe) -> Values:
        passes = [(number, each.weights()) for number, each in enumerate(self._window)]
        weights = [each for _, found in passes for each in found]
        heads = {sum(each.count > 0 for each in found) or 1 for _, found in passes}
        losses = [float(part) for each in self._window for part in each.loss]
        ends = [(row.weight, number) for number, found in passes for each in found for row in each.rows] or [(0.0, 0)]
        stops = [head for each in self._window for _, head in each.read if len(head) > 1]
        bits = {
            _DELIBERATE: any(each.deliberate for each in self._window),
            _ROUGH: any(not each.count or (len(each.rows) < each.count and not each.is_equal) for each in weights),
            _HALF: any(each.tolerance == _LOW_TOLERANCE for each in weights),
            _STOP_SEEN: any(float(head[1]) for head in stops),
            _STOP_TRAINED: any(float(head[2]) for head in stops),
        }
        (low, low_at), (high, high_at) = min(ends), max(ends)
        dots = [each.tolist() for each in self._dots_sent] or [[0.0] * 2] * 2
        return {
            "weight passes": len(self._window),
            "weight line": text_digest(sorted({each.line for each in self._window})),
            "weight reason": self._reason(weights, heads),
            "weight between": reads.between(weights),
            "weight heads": max(heads, default=1),
            "weight bits": sum(bit for bit, holds in bits.items() if holds),
            "weight tokens": sum(each.count for each in weights),
            "weight total": bits_of(sum(each.total for each in weights)),
            "weight low": bits_of(low),
            "weight low pass": low_at,
            "weight high": bits_of(high),
            "weight high pass": high_at,
            "weight rows": sum(len(each.rows) for each in weights),
            "weight loss": bits_of(sum(losses)),
            "weight of tokens": bits_of(sum(each.loss for each in weights)),
            **{f"dot raw {place}": bits_of(dot) for place, dot in enumerate(dots[0])},
            **{f"dot kept {place}": bits_of(dot) for place, dot in enumerate(dots[1])},
        }

    def _reason(self, weights: Sequence[PassWeights], heads: set[int]) -> int:
        if not self._window or not all(each.read for each in self._window):
            return reads.NOT_REACHED if self._rows.calls else reads.NO_LOGITS
        # Passes on different lines belong to different losses, as in a GAN, and their weights do not add up.
        if len({each.line for each in self._window}) > 1 or len(heads) > 1:
            return reads.SEVERAL
        known = self._known and bool(self._dots_sent)
        return max((each.reason for each in weights), default=0) or (0 if known else reads.REDUCTION)

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        if not (probe.made or any(o.values["weight passes"] for o in said)):
            return  # `andon watch` opened the watch after the backward pass
        now, before = update_weights(said, shards=self._sharded), self._previous
        self._summary.add(now, said)
        if isinstance(now, int):
            return
        loss, of_tokens, sampled = self._run if now.is_like(before) else (0.0, 0.0, 0)
        self._run = loss, of_tokens, sampled = loss + now.loss, of_tokens + now.of_tokens, sampled + now.sampled
        error = _OTHER_TERMS + (0.0 if now.sampled == now.tokens else 1 / math.sqrt(sampled))
        plain = loss != 0 and abs(of_tokens / loss - 1) < error
        if not self._summary.gradients_changed:
            judged: Seen[Judged] = Seen(said, (now, before, self._steady, plain))
            self.context.verdicts.judge(SCALE, judged, self.context.scene())
        same_tokens = before is not None and before.is_mean and now.tokens == before.tokens
        self._steady = 0 if not now.is_mean else self._steady + 1 if same_tokens else 1
        self._previous = now

    def new_window(self, probe: OptimizerProbe) -> None:
        self._window, self._raw, self._dots_sent, self._known = [], None, [], True

    discarded = new_window

    def closing_lines(self) -> list[str]:
        return [] if self.context.settings.reference is not None else self._summary.closing_lines(self._rows.stop)
