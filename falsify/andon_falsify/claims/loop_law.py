"""The law of a loop's updates: the float64 reference over the rows that all ranks really saw, from rank 0's weights.

Each DIFFERENT row of an update counts once, whoever visited it how often: that is the planned gradient, which a loop
that pads its shards with repeats and weighs them out has, and one that trains on the repeats has not. (That rows were
repeated at all is the business of samples-once; `explain` says whether a wrong gradient is due to it.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from andon_falsify.claims.run_law import Expected, RunLaw, Stepping, mean_of, piece_of, short_name
from andon_falsify.loops.sightings import Group, LoopSightings, first_of
from andon_falsify.loops.task import model
from andon_falsify.reference.training import RowGradients, row_gradients
from andon_falsify.reference.update import AdamW, Sgd, UpdateRule, clip, global_norm, is_clipped
from andon_falsify.subjects.trace import Trace, digest

_OFF = ("maximize", "amsgrad", "nesterov", "dampening")
"""Settings of an optimizer that the law does not know."""
SAME_FORWARD = "from the loop's own forward pass in float64: same forward, not independent"


class LoopLaw(RunLaw):
    """The law of one trace. `why_not` says why there is none, "" if there is; `note` how independent it is."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.first = first_of(trace)
        self._held: dict[int, RowGradients] = {}

    @cached_property
    def why_not(self) -> str:
        """Why no gradient can be computed for this trace, or ""."""
        if "recomputes" in self.first.claims and not self.why_no_weights:
            return "" if self.first.recomputed else "the loop's own forward pass gave no law"
        if self.case.dropout:
            return "the case has dropout, and the masks of a foreign loop are not known"
        return self.why_no_model

    @cached_property
    def why_no_model(self) -> str:
        """Why the reference knows nothing of the model of this trace, or ""."""
        if self.why_no_weights:
            return self.why_no_weights
        if "recomputes" in self.first.claims:
            return "the model is the loop's own, and the reference does not know it"
        if digest(self.first.state) != digest(self.plain.state_dict()):
            return "the loop trains another model than the case's (andon_falsify.model), and has no `loss_sum`"
        return ""

    @cached_property
    def plain(self) -> nn.Module:
        """The case's model before training."""
        return model(self.case)

    @cached_property
    def made_trainable(self) -> set[str]:
        """The names of what trains on rank 0."""
        return {name for name, _, _ in self.first.layouts[0]}

    @property
    def why_no_weights(self) -> str:
        """Why the weights of this trace are not known, or ""."""
        if not self.case.values:
            return "values were not recorded"
        if self.first.resumed_from:
            return "the run took up another one, whose weights are not at hand"
        return ""

    @property
    def note(self) -> str:
        """What has to be said of how independent the law is."""
        return SAME_FORWARD if "recomputes" in self.first.claims else ""

    @property
    def parts(self) -> tuple[LoopSightings, ...]:
        """What each rank saw."""
        return cast(tuple[LoopSightings, ...], self.trace.parts)

    @cached_property
    def updates(self) -> tuple[int, ...]:
        """See `RunLaw`: those whose rows are all known."""
        return tuple(step for step in super().updates if step not in self.unknown_updates)

    @cached_property
    def unknown_updates(self) -> frozenset[int]:
        """Updates of which some rank's rows are not known."""
        strange = {stranger.step for part in self.parts for stranger in part.strangers}
        return frozenset(strange.union(*(part.rowless for part in self.parts)) & self.first.made.keys())

    def visits(self, step: int) -> list[list[tuple[int, ...]]]:
        """The rows of each micro-batch of each rank."""
        return [part.of(part.ranks[0], step).leaves for part in self.parts]

    def visited(self, step: int) -> int:
        """How many rows the ranks had in `step`, each as often as it was there."""
        return sum(len(leaf) for leaves in self.visits(step) for leaf in leaves)

    def before(self, step: int) -> dict[str, Tensor]:
        """See `RunLaw`: those that its first forward pass had; of the step behind the last, that the run ended with."""
        moved = self.first.moved.get(step, {})
        return super().before(step) | {short_name(name): tensor.double() for name, tensor in moved.items()}

    @cached_property
    def why_no_update(self) -> str:
        """Why the update of these optimizers is not known, or ""."""
        if not self.case.values or self.first.resumed_from:
            return "values were not recorded from the first update on"
        for made in self.first.made.values():
            if made.optimizer not in ("SGD", "AdamW", "Adam"):
                return f"the law knows SGD and AdamW, not {made.optimizer}"
            for group in made.groups:
                on = [name for name in _OFF if group.settings.get(name)]
                if on:
                    return f"the law does not know {made.optimizer} with {', '.join(on)}"
        return ""

    @property
    def factors(self) -> dict[str, int]:
        """See `RunLaw`."""
        return {"world": self.case.world, "accumulation": self.case.accumulation, "rows": self.case.local_batch}

    @cached_property
    def expected(self) -> tuple[Expected, ...]:
        """See `RunLaw`.

        Where the case clips and torch's clip was not called, a gradient that is the law's but clipped is the law's.
        """
        return tuple(self._as_clipped(mean_of(step, self.of(step))) for step in self.updates if self.rows(step))

    def _as_clipped(self, law: Expected) -> Expected:
        limit = self.case.clip_norm
        held = is_clipped(global_norm(self.seen(law.step)), limit)
        if self.first.made[law.step].clipped or held or not is_clipped(law.norm, limit):
            return law
        return replace(law, gradients=clip(law.gradients, limit)[0])

    def optimizer(self, step: int) -> str:
        """See `RunLaw`: its class."""
        return self.first.made[step].optimizer

    def groups(self, step: int) -> tuple[Stepping, ...]:
        """See `RunLaw`: the groups as they were set, at their rates."""
        made = self.first.made[step]
        return tuple(
            Stepping(
                tuple(short_name(name) for name in group.names),
                _rule_of(made.optimizer, group),
                float(group.settings["lr"]),
            )
            for group in made.groups
        )

    def limit(self, step: int) -> float | None:
        """See `RunLaw`: none where the clip had another gradient than the optimizer."""
        return None if self.first.made[step].early else self.case.clip_norm

    def rows(self, step: int) -> tuple[int, ...]:
        """The different rows that ranks had in `step`, in order; none where no rank saw one."""
        return tuple(sorted({row for leaves in self.visits(step) for leaf in leaves for row in leaf}))

    def of(self, step: int) -> RowGradients:
        """The law of `step`, row by row. Raises `ValueError` for an update without known rows."""
        if step not in self._held:
            own = self.first.recomputed[step] if "recomputes" in self.first.claims else None
            self._held[step] = (
                self.labelled(step)
                if own is None
                else replace(own, gradients={short_name(name): tensor for name, tensor in own.gradients.items()})
            )
        return self._held[step]

    def labelled(self, step: int, label: int | None = None) -> RowGradients:
        """As `of`, if every row had this label; only of a model that the reference knows."""
        rows = self.rows(step)
        piece = piece_of(self.case.rows, rows)
        if label is not None:
            piece = replace(piece, labels=torch.full_like(piece.labels, label))
        found = row_gradients(self.model, self.before(step), self.trainable, [piece], self.class_weights)
        return RowGradients(rows, *found)

    def logits(self, weights: Mapping[str, Tensor], rows: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """float64 [rows, classes] under `weights` (canonical names, all of them), and the labels of the rows."""
        piece = piece_of(self.case.rows, rows)
        return self.model.logits(weights, piece.tokens, piece.attention), piece.labels


def decouples(optimizer: str, group: Group) -> bool:
    """Whether the decay acts on the weights and not on the gradient: AdamW is Adam with that switched on."""
    return optimizer == "AdamW" or bool(group.settings.get("decoupled_weight_decay"))


def _rule_of(optimizer: str, group: Group) -> UpdateRule:
    held: Mapping[str, Any] = group.settings
    if optimizer == "SGD":
        return Sgd(held["momentum"], held["weight_decay"])
    fast, slow = held["betas"]
    return AdamW((fast, slow), held["eps"], held["weight_decay"] if decouples(optimizer, group) else 0.0)
