"""The audit: a reduced gradient is recomputed with `reference=` in this one process, and compared.

If forward passes draw random numbers, or a row's result depends on the rows beside it, the gradient is recomputed
batch by batch as the ranks had them, each from the random state that it began with. That needs a loss that is a sum
over rows; otherwise nothing is judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from andon_contracts.agree import bits_of, real_of
from andon_contracts.laws.law import Law, Observations, Seen
from andon_contracts.observe import plain
from andon_contracts.violation import Finding
from andon_contracts.watch.check import Check, Context, Cover, OptimizerProbe, declared
from andon_contracts.watch.checks.gradients import Gradients
from andon_contracts.watch.checks.reports import LoopReports
from andon_contracts.watch.checks.weights import Weights
from andon_contracts.watch.model_probe import ForwardTap, mixes_rows, random_state, restore_random
from andon_contracts.watch.settings import Reference

RATIO_TOLERANCE = 1e-3
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW = 2e-2
_ADDITIVE = 1e-3
_BY_NO_FACTOR = (
    "some rows are missing or weigh more than others, or each rank computes a constant or a normalization of the loss "
    "from its own rows"
)
"""The usual causes of a gradient that is no multiple of the law."""
_LONGEST_WINDOW = 64
"""Micro-batches of an update; with more, a quotient fits by chance."""


def name_ratio(ratio: float, world: int, micro_batches: int) -> str:
    """A factor in words, with everything that gives it: `= world size 2`, `= 1 / world size 2 or 1 of 2 micro-batches`.

    A window of `micro_batches` that is divided like a longer one gives their quotient, whatever the world size.
    """
    factors = {
        "world size": world,
        "accumulation": micro_batches,
        "accumulation x world size": world * micro_batches if min(world, micro_batches) > 1 else 1,
        "world size squared": world**2,
    }
    named = list[str]()
    for word, value in factors.items():
        if value > 1 and math.isclose(ratio, value, rel_tol=RATIO_TOLERANCE):
            named.append(f"{word} {value}")
        if value > 1 and math.isclose(ratio, 1 / value, rel_tol=RATIO_TOLERANCE):
            named.append(f"1 / {word} {value}")
    full = round(micro_batches / ratio) if 0 < ratio < 1 else 0
    if micro_batches < full <= _LONGEST_WINDOW and math.isclose(ratio, micro_batches / full, rel_tol=RATIO_TOLERANCE):
        named.append(f"{micro_batches} of {full} micro-batches")
    return f" = {' or '.join(named)}" if named else ""


def _gradient_law(seen: Seen[object]) -> Finding | None:
    errors = [real_of(o.values["error"]) for o in seen.said]
    tolerances = [real_of(o.values["tolerance"]) for o in seen.said]
    if all(error <= tolerance for error, tolerance in zip(errors, tolerances, strict=True)):
        return None
    place = max(range(len(errors)), key=lambda rank: errors[rank] if math.isfinite(errors[rank]) else math.inf)
    worst, error = seen.said[place].values, errors[place]
    ratio, rest = real_of(worst["ratio"]), real_of(worst["rest"])
    likely = ""
    if rest <= RATIO_TOLERANCE and abs(ratio - 1) >= RATIO_TOLERANCE:
        factor = name_ratio(ratio, len(seen.said), worst["micro-batches"])
        what = f"the reduced gradient is {ratio:.3f} x the law{factor}"
    else:
        by_none = ", and by no factor" * (rest > RATIO_TOLERANCE)
        what, likely = f"the reduced gradient is off the law by {error:.3g} of its norm{by_none}", _BY_NO_FACTOR
    what = f"{what}: the law is the gradient of one process over all rows"
    return Finding(what, seen.step, (), "gradient", likely=likely)


GRADIENT_LAW = (Law("gradient-law/audit", ("ratio", "error", "rest", "tolerance", "micro-batches"), _gradient_law),)


@dataclass(frozen=True)
class _ForwardPass:
    """Rows that one forward pass had together, and the random state with which it began; None: as it is."""

    ids: Sequence[int]
    random: Tensor | None = None


class Audit(Check):
    """The audits of one optimizer's updates. All ranks make one or none does."""

    def __init__(self, context: Context, probe: OptimizerProbe) -> None:
        super().__init__(context)
        self._probe = probe
        # An optimizer may hold frozen parameters only; a watched model always has one that is trained.
        self._device = next(iter(context.subject.trainable.values())).device
        self._due = context.settings.reference is not None and self.cover()["gradient-law"].live
        self._before_clip: list[Tensor] | None = None

    def cover(self) -> Mapping[str, Cover]:
        cover = declared(self.context.settings.reference, "reference=")
        if cover.live and self.context.subject.sharded:
            cover = Cover("not observable", "each rank has only shards of the gradient")
        return {"gradient-law": cover}

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """If a batch has several forward passes, the first one counts."""
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

    def new_window(self, probe: OptimizerProbe) -> None:
        self._before_clip = None

    def updated(self, probe: OptimizerProbe) -> None:
        settings = self.context.settings
        made = probe.updates - settings.start
        self._due = self.cover()["gradient-law"].live and made % settings.every == 0

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        reference, step = self.context.settings.reference, said[0].step
        ids = self.context.check(LoopReports).of_update.union
        # A gradient that nobody has reduced yet is not the gradient of all rows.
        if reference is None or not self._due or not ids or not probe.check(Weights).synchrony.known:
            return
        parts = self._parts(step, ids)
        if parts is None:
            return
        sums = len(parts) == 1 or self._is_additive(reference, parts)
        found = self._before_clip or _dense_gradients(probe)
        values = compare(found, self._law(reference, parts), max(len(self.context.rows.batches), 1))
        seen = self.context.exchange(step, "audit", values | {"sums": int(sums)})
        if all(o.values["sums"] for o in seen):
            scene = self.context.scene_of(probe, aligned, applied=False)
            self.context.verdicts.judge(GRADIENT_LAW, Seen[object](seen, None), scene)

    def _parts(self, step: int, ids: Sequence[int]) -> list[_ForwardPass] | None:
        """How the rows are to be recomputed: all at once, or as they were; None if what is needed was not seen."""
        batches = self.context.rows.batches
        known = [batch.random for batch in batches if batch.random is not None]
        values = {
            "batches": len(batches),
            "drew": int(any(batch.drew for batch in batches)),
            "mixes": int(mixes_rows(self.context.subject.inner)),
            "known": int(len(known) == len(batches)),
            "words": known[0].numel() if known else 0,
        }
        seen = self.context.exchange(step, "batches", values)
        if not any(o.values["drew"] or o.values["mixes"] for o in seen):
            return [_ForwardPass(ids)]
        if not all(o.values["known"] for o in seen):
            return None
        # Each batch of each rank with its random state.
        words = max(o.values["words"] for o in seen)
        table = torch.zeros(max(o.values["batches"] for o in seen), 1 + words, dtype=torch.int64, device="cpu")
        for row, batch in zip(table, batches, strict=False):
            row[0] = batch.rows
            if batch.random is not None:
                row[1:] = batch.random
        parts: list[_ForwardPass] = []
        first = 0
        for o in self.context.exchange(step, "random states", {}, table.flatten()):
            assert o.payload is not None
            for row in o.payload.cpu().view(table.shape):
                count = int(row[0])
                if count:
                    parts.append(_ForwardPass(ids[first : first + count], row[1:]))
                first += count
        return parts

    def _law(self, reference: Reference, parts: Sequence[_ForwardPass]) -> list[Tensor]:
        """The gradient of the mean loss over the rows of `parts`. Buffers, random state and `.grad` are kept."""
        parameters = list(self._probe.parameters.values())
        total = [torch.zeros_like(p) for p in parameters]
        rows = 0.0
        with self._aside(), torch.enable_grad():
            for part in parts:
                loss_sum, count = self._loss(reference, part)
                rows += count
                found = torch.autograd.grad(loss_sum, parameters, allow_unused=True)
                total = [t if g is None else t + g for t, g in zip(total, found, strict=True)]
        return [t / max(rows, 1) for t in total]

    def _is_additive(self, reference: Reference, parts: Sequence[_ForwardPass]) -> bool:
        """Whether the mean loss over all rows is that over the parts, in evaluation mode: nothing mixes rows then."""
        module = self.context.subject.inner
        modes = [(each, each.training) for each in module.modules()]
        with self._aside(), torch.no_grad():
            module.eval()
            try:
                whole, rows = reference(module, [row for part in parts for row in part.ids])
                each = [reference(module, part.ids) for part in parts]
            finally:
                for one, training in modes:
                    one.training = training
        mean = float(sum(loss for loss, _ in each)) / max(sum(count for _, count in each), 1)
        return math.isclose(mean, float(whole) / max(rows, 1), rel_tol=_ADDITIVE, abs_tol=_ADDITIVE**2)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Inside, the model may be run: buffers and random state are restored, and nobody watches."""
        context = self.context
        kept = [buffer.clone() for buffer in context.subject.buffers()]
        hooks = [probe.check(Gradients).raw_hooks for probe in context.probes]
        context.muted = True
        for each in hooks:
            each.muted = True
        try:
            # Of this device alone: by default of all GPUs, and each would be given a context of this process.
            with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
                yield
        finally:
            context.muted = False
            for each in hooks:
                each.muted = False
            with torch.no_grad():
                for buffer, value in zip(context.subject.buffers(), kept, strict=True):
                    buffer.copy_(value)

    def _loss(self, reference: Reference, part: _ForwardPass) -> tuple[Tensor, int]:
        """The reference's loss of the part, whose forward pass begins with the part's random state."""
        module, waiting = self.context.subject.inner, [] if part.random is None else [part.random]
        restore = ForwardTap(lambda: restore_random(waiting.pop(), self._device) if waiting else None)
        hook = module.register_forward_pre_hook(restore)
        try:
            return reference(module, part.ids)
        finally:
            hook.remove()


def _dense_gradients(probe: OptimizerProbe) -> list[Tensor]:
    """A copy of every gradient, zeros for a parameter that has none."""
    return [torch.zeros_like(p) if p.grad is None else plain(p.grad).clone() for p in probe.members]


def compare(found: Sequence[Tensor], wanted: Sequence[Tensor], micro_batches: int) -> dict[str, int]:
    """How `found` differs from the law `wanted`: relative error, the best factor, and what no factor explains."""
    f = torch.cat([plain(t).double().reshape(-1) for t in found])
    w = torch.cat([plain(t).double().reshape(-1) for t in wanted])
    scale = max(float(torch.linalg.vector_norm(w)), 1e-300)
    ratio = float(f @ w) / scale**2
    error = float(torch.linalg.vector_norm(f - w)) / scale
    size = max(float(torch.linalg.vector_norm(f)), 1e-300)
    rest = float(torch.linalg.vector_norm(f - ratio * w)) / size
    tolerance = max(_TOLERANCE.get(t.dtype, _LOW) for t in found)
    return {
        "ratio": bits_of(ratio),
        "error": bits_of(error),
        "rest": bits_of(rest),
        "tolerance": bits_of(tolerance),
        "micro-batches": micro_batches,
    }
