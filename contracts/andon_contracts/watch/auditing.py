"""The audit of a watched loop: when it can be made, from which parts, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from andon_contracts.act import Scene
from andon_contracts.laws.law import Observations, Seen
from andon_contracts.laws.loop import GRADIENT_LAW
from andon_contracts.watch.audit import ForwardPass, additive, compare, law
from andon_contracts.watch.exchange import Exchange
from andon_contracts.watch.judging import Verdicts
from andon_contracts.watch.model_probe import ForwardTap, mixes_rows, random_state
from andon_contracts.watch.optimizer_probe import OptimizerProbe
from andon_contracts.watch.rows import Rows


class Auditor:
    """Recomputes reduced gradients with `reference=`, if there is one, in this one process. All ranks do it or none.

    Where forward passes draw random numbers, or rows depend on the rows beside them, the gradient is recomputed batch
    by batch as the ranks had them, each from the random state that it began with. That needs a loss that is a sum over
    rows; where it is none, nothing is judged.
    """

    def __init__(self, exchange: Exchange, verdicts: Verdicts, rows: Rows, probes: Sequence[OptimizerProbe]) -> None:
        self._reference = verdicts.settings.reference if "gradient-law" in verdicts.live else None
        self._probes = probes
        # An optimizer may hold frozen parameters only; a watched model always has one that is trained.
        self._device = next(iter(probes[0].subject.trainable.values())).device
        self._exchange = exchange
        self._verdicts = verdicts
        self._rows = rows

    def hooks(self, module: nn.Module) -> list[Callable[[], None]]:
        """Look at the forward passes of `module`, if there is a reference; what takes the hooks off."""
        if self._reference is None:
            return []
        before = module.register_forward_pre_hook(ForwardTap(self.begins))
        return [before.remove, module.register_forward_hook(ForwardTap(self.ends)).remove]

    def begins(self) -> None:
        """A forward pass begins. Where a batch has several, the first one counts."""
        batch = self._rows.latest
        if batch is not None and batch.random is None and self._due():
            batch.random = random_state(self._device)

    def ends(self) -> None:
        """It ends: were any numbers drawn?"""
        batch = self._rows.latest
        if batch is not None and batch.random is not None and not batch.drew and self._due():
            now = random_state(self._device)
            batch.drew = now is not None and not torch.equal(now, batch.random)

    def _due(self) -> bool:
        """Whether the forward pass at hand is one that may have to be recomputed."""
        return torch.is_grad_enabled() and any(probe.audit_due and not probe.taps.muted for probe in self._probes)

    def __call__(self, probe: OptimizerProbe, step: int, ids: Sequence[int], scene: Callable[[], Scene]) -> None:
        """Hold the gradient before clipping of update `step` to the law; ids: its rows in order of rank."""
        reference = self._reference
        if reference is None or not probe.audit_due or not ids:
            return
        parts = self._parts(probe, step, ids)
        if parts is None:
            return
        sums = len(parts) == 1 or additive(probe, reference, parts)
        found = probe.gradient_before_clip or probe.dense_gradients()
        values = compare(found, law(probe, reference, parts), max(len(self._rows.batches), 1))
        seen = self._exchange(step, "audit", values | {"sums": int(sums)})
        if all(o.values["sums"] for o in seen):
            self._verdicts.judge(GRADIENT_LAW, Seen(seen, None), scene())

    def _parts(self, probe: OptimizerProbe, step: int, ids: Sequence[int]) -> list[ForwardPass] | None:
        """How the rows are to be recomputed: all at once, or as they were; None where what is needed was not seen."""
        batches = self._rows.batches
        known = [batch.random for batch in batches if batch.random is not None]
        values = {
            "batches": len(batches),
            "drew": int(any(batch.drew for batch in batches)),
            "mixes": int(mixes_rows(probe.subject.inner)),
            "known": int(len(known) == len(batches)),
            "words": known[0].numel() if known else 0,
        }
        seen = self._exchange(step, "batches", values)
        if not any(o.values["drew"] or o.values["mixes"] for o in seen):
            return [ForwardPass(ids)]
        if not all(o.values["known"] for o in seen):
            return None
        return self._apart(step, ids, seen)

    def _apart(self, step: int, ids: Sequence[int], seen: Observations) -> list[ForwardPass]:
        """Each batch of each rank with its random state."""
        words = max(o.values["words"] for o in seen)
        table = torch.zeros(max(o.values["batches"] for o in seen), 1 + words, dtype=torch.int64, device="cpu")
        for row, batch in zip(table, self._rows.batches, strict=False):
            row[0] = batch.rows
            if batch.random is not None:
                row[1:] = batch.random
        parts: list[ForwardPass] = []
        first = 0
        for o in self._exchange(step, "random states", {}, table.flatten()):
            assert o.payload is not None
            for row in o.payload.cpu().view(table.shape):
                count = int(row[0])
                if count:
                    parts.append(ForwardPass(ids[first : first + count], row[1:]))
                first += count
        return parts
