"""The audit recomputes a reduced gradient with `reference=` in one process, and compares.

If forward passes draw random numbers, or the result of a row depends on the other rows of its batch, the gradient is
recomputed batch by batch, from the random state of each batch. This needs a loss that is a sum over rows; otherwise
nothing is judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from andon_contracts.agree import bits_of, real_of
from andon_contracts.laws.law import Law, Observations, Seen
from andon_contracts.observe import plain
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, Check, Context, Cover, OptimizerProbe
from andon_contracts.watch.checks.reports import LoopReports
from andon_contracts.watch.checks.weights import Weights
from andon_contracts.watch.model_probe import ForwardHook, random_state, restore_random
from andon_contracts.watch.settings import Reference

RATIO_TOLERANCE = 1e-3
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW = 2e-2
_ADDITIVE = 1e-3
_LONGEST_WINDOW = 64  # the most micro-batches of an update; with more, a quotient fits by chance


def name_ratio(ratio: float, world: int, micro_batches: int, tolerance: float = RATIO_TOLERANCE) -> str:
    """All explanations of a factor: ` = world size 2`, ` = 1 / world size 2 or 1 of 2 micro-batches`; "" for none.

    A window of `micro_batches` that is divided like a longer one has their quotient as its factor.
    """
    both = world * micro_batches
    factors = {
        f"world size {world}": world,
        f"accumulation {micro_batches}": micro_batches,
        f"accumulation x world size {both}": both if min(world, micro_batches) > 1 else 1,
        f"world size {world} squared": world**2,
    }
    explained = dict[str, float]()
    for words, value in factors.items():
        explained |= {words: value, f"1 / {words}": 1 / value} if value > 1 else {}
    full = round(micro_batches / ratio) if 0 < ratio < 1 else 0
    if micro_batches < full <= _LONGEST_WINDOW:
        explained[f"{micro_batches} of {full} micro-batches"] = micro_batches / full
    named = [word for word, value in explained.items() if math.isclose(ratio, value, rel_tol=tolerance)]
    return f" = {' or '.join(named)}" if named else ""


def _gradient_law(seen: Seen[object]) -> Finding | None:
    errors, tolerances = (list(map(real_of, seen.column(name))) for name in ("error", "tolerance"))
    if all(error <= tolerance for error, tolerance in zip(errors, tolerances, strict=True)):
        return None
    place = max(range(len(errors)), key=lambda rank: errors[rank] if math.isfinite(errors[rank]) else math.inf)
    worst = seen.observations[place].values
    ratio, rest = real_of(worst["ratio"]), real_of(worst["rest"])
    likely = None
    if rest <= RATIO_TOLERANCE and abs(ratio - 1) >= RATIO_TOLERANCE:
        factor = name_ratio(ratio, len(seen.observations), worst["micro-batches"])
        what = f"the reduced gradient is {ratio:.3f} x the reference{factor}"
    else:
        by_none = ", which no factor explains" * (rest > RATIO_TOLERANCE)
        what = f"the gradient is off the reference by {errors[place]:.3g} of its norm{by_none}"
        likely = "some rows are missing or weigh more than others, or each rank computes a constant or a normalization"
        likely += " of the loss from its own rows"
    what = f"{what}: the reference is the gradient of one process over all rows"
    return Finding(what, seen.step, (), "gradient", likely=likely)


GRADIENT_LAW = (Law("gradient-law/audit", ("ratio", "error", "rest", "tolerance", "micro-batches"), _gradient_law),)


_ForwardPass = tuple[list[int], Tensor | None]
"""The rows of one forward pass, and the random state to restore before it; None: restore nothing."""


class Audit(Check):
    """The audits of one optimizer's updates. Either all ranks audit an update, or none of them."""

    def __init__(self, context: Context, probe: OptimizerProbe) -> None:
        super().__init__(context)
        self._probe = probe
        # From the model: it always has a trained parameter, but an optimizer may hold only frozen ones.
        self._device = next(iter(context.subject.trainable.values())).device
        self._live = self._due = self.cover()["gradient-law"].live
        self._before_clip: list[Tensor] | None = None

    def cover(self) -> Mapping[str, Cover]:
        dark = Cover("not observable", "each rank has only shards of the gradient")
        return {"gradient-law": dark if self.context.subject.sharded else LIVE}

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        batch = self.context.rows.latest
        if self._due and torch.is_grad_enabled() and batch is not None and batch.random is None:
            batch.random = random_state(self._device)

    def forwarded(self) -> None:
        batch = self.context.rows.latest
        if self._due and torch.is_grad_enabled() and batch is not None and batch.random is not None and not batch.drew:
            now = random_state(self._device)
            batch.drew = now is not None and not torch.equal(now, batch.random)

    def reduced(self, probe: OptimizerProbe) -> None:
        if self._due and self._before_clip is None:
            self._before_clip = _dense_gradients(probe)

    def discarded(self, probe: OptimizerProbe) -> None:
        self._before_clip = None

    new_window = discarded

    def updated(self, probe: OptimizerProbe) -> None:
        settings = self.context.settings
        self._due = self._live and (probe.updates - settings.start) % settings.every == 0

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        reference, step = self.context.settings.reference, said[0].step
        ids = list(self.context.check(LoopReports).of_update.union)  # a tuple would index dimensions, not rows
        # Before a reduction the gradient is not that of all rows.
        if reference is None or not self._due or not ids or not probe.check(Weights).synchrony.known:
            return
        parts = self._forward_passes(step, ids)
        if parts is None:
            return
        sums = len(parts) == 1 or self._is_additive(reference, parts)
        reduced = self._before_clip or _dense_gradients(probe)
        values = compare(reduced, self._reference_gradient(reference, parts), max(len(self.context.rows.batches), 1))
        seen = self.context.exchange(step, "audit", values | {"sums": int(sums)})
        if all(o.values["sums"] for o in seen):
            scene = self.context.scene_of(probe, aligned, applied=False)
            self.context.verdicts.judge(GRADIENT_LAW, Seen[object](seen, None), scene)

    def _forward_passes(self, step: int, ids: list[int]) -> list[_ForwardPass] | None:
        """The forward passes to recompute: one of all rows, or those of the loop; None if a random state is missing."""
        batches = self.context.rows.batches
        known = [batch.random for batch in batches if batch.random is not None]
        values = {
            "batches": len(batches),
            "drew": int(any(batch.drew for batch in batches)),
            "mixes": int(any(isinstance(m, _BatchNorm) and m.training for m in self.context.subject.inner.modules())),
            "known": int(len(known) == len(batches)),
            "words": known[0].numel() if known else 0,
        }
        seen = self.context.exchange(step, "batches", values)
        if not any(o.values["drew"] or o.values["mixes"] for o in seen):
            return [(ids, None)]
        if not all(o.values["known"] for o in seen):
            return None
        words = max(o.values["words"] for o in seen)
        table = torch.zeros(max(o.values["batches"] for o in seen), 1 + words, dtype=torch.int64, device="cpu")
        for row, batch, random in zip(table, batches, known, strict=False):  # "known" is 1 on all ranks
            row[0], row[1:] = batch.rows, random
        seen = self.context.exchange(step, "random states", {}, table.flatten())
        rows = [row for o in seen if o.payload is not None for row in o.payload.cpu().view(table.shape) if row[0]]
        ends = list(accumulate(int(row[0]) for row in rows))
        return [(ids[end - int(row[0]) : end], row[1:]) for row, end in zip(rows, ends, strict=True)]

    def _reference_gradient(self, reference: Reference, parts: Sequence[_ForwardPass]) -> list[Tensor]:
        parameters = list(self._probe.parameters.values())
        total, rows = [torch.zeros_like(p) for p in parameters], 0
        with self._isolated(), torch.enable_grad():
            for part in parts:
                loss_sum, count = self._reference_loss(reference, part)
                rows += count
                gradients = torch.autograd.grad(loss_sum, parameters, allow_unused=True)
                total = [t if g is None else t + g for t, g in zip(total, gradients, strict=True)]
        return [t / max(rows, 1) for t in total]

    def _is_additive(self, reference: Reference, parts: Sequence[_ForwardPass]) -> bool:
        model = self.context.subject.inner
        modes = [(module, module.training) for module in model.modules()]
        with self._isolated(), torch.no_grad():
            model.eval()
            try:
                whole, rows = reference(model, [row for ids, _ in parts for row in ids])
                losses, counts = zip(*(reference(model, ids) for ids, _ in parts), strict=True)
            finally:
                for module, training in modes:
                    module.training = training
        mean = float(sum(losses)) / max(sum(counts), 1)
        return math.isclose(mean, float(whole) / max(rows, 1), rel_tol=_ADDITIVE, abs_tol=_ADDITIVE**2)

    @contextmanager
    def _isolated(self) -> Iterator[None]:
        """In the block the model runs unchecked. Buffers and random state are restored after it."""
        context = self.context
        values = [buffer.clone() for buffer in context.subject.buffers()]
        context.muted = True
        try:
            # Not the default, all GPUs: this process would create a CUDA context on each.
            with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
                yield
        finally:
            context.muted = False
            with torch.no_grad():
                for buffer, value in zip(context.subject.buffers(), values, strict=True):
                    buffer.copy_(value)

    def _reference_loss(self, reference: Reference, part: _ForwardPass) -> tuple[Tensor, int]:
        """The loss sum and the number of rows, from a forward pass that begins with the part's random state."""
        (ids, random), module = part, self.context.subject.inner
        waiting = [] if random is None else [random]
        restore = ForwardHook(lambda: restore_random(waiting.pop(), self._device) if waiting else None)
        hook = module.register_forward_pre_hook(restore)
        try:
            return reference(module, ids)
        finally:
            hook.remove()


def _dense_gradients(probe: OptimizerProbe) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else plain(p.grad).clone() for p in probe.members]


def compare(reduced: Sequence[Tensor], reference: Sequence[Tensor], micro_batches: int) -> dict[str, int]:
    """The relative error of `reduced`, the best factor of `reference`, and the relative rest, as `bits_of` numbers."""
    found, wanted = (torch.cat([plain(t).double().reshape(-1) for t in each]) for each in (reduced, reference))
    size = max(float(torch.linalg.vector_norm(wanted)), 1e-300)
    ratio = float(found @ wanted) / size**2
    error = float(torch.linalg.vector_norm(found - wanted)) / size
    rest = float(torch.linalg.vector_norm(found - ratio * wanted))
    rest /= max(float(torch.linalg.vector_norm(found)), 1e-300)
    tolerance = max(_TOLERANCE.get(t.dtype, _LOW) for t in reduced)
    values = {"ratio": ratio, "error": error, "rest": rest, "tolerance": tolerance}
    return {name: bits_of(value) for name, value in values.items()} | {"micro-batches": micro_batches}
