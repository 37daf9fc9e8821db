"""The law of a loop's updates: the float64 reference over the rows that all ranks really saw, from rank 0's weights.

Each DIFFERENT row of an update counts once, whoever visited it how often: that is the planned gradient, which a loop
that pads its shards with repeats and weighs them out has, and one that trains on the repeats has not. (That rows were
repeated at all is the business of samples-once; `explain` says whether a wrong gradient is due to it.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from math import hypot
from typing import Any, cast

import torch
from torch import Tensor, nn

from andon_falsify.claims.run_law import Expected, Stepping
from andon_falsify.claims.trainer_law import Reference, piece_of, short_name
from andon_falsify.loops.sightings import Group, Law, LoopSightings, first_of
from andon_falsify.loops.task import model
from andon_falsify.reference.loss import loss_sum
from andon_falsify.reference.update import AdamW, Sgd, clip, global_norm
from andon_falsify.reference.update import Law as UpdateLaw
from andon_falsify.subjects.trace import Trace, digest

_SHOWN = 3
_OFF = ("maximize", "amsgrad", "nesterov", "dampening")
"""Settings of an optimizer that the law does not know."""
SAME_FORWARD = "from the loop's own forward pass in float64: same forward, not independent"


class LoopLaw:
    """The law of one trace. `why_not` says why there is none, "" if there is; `note` how independent it is."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.case = trace.case
        self.first = first_of(trace)
        self._reference = Reference(trace)
        self._weights = None if self.case.class_weights is None else torch.tensor(self.case.class_weights).double()
        self._held: dict[int, Law] = {}

    @cached_property
    def why_not(self) -> str:
        """Why no gradient can be computed for this trace, or ""."""
        if "recomputes" in self.first.claims and not self.why_no_weights:
            return "" if self.first.own_law else "the loop's own forward pass gave no law"
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
        """The updates whose rows are all known and whose values were kept."""
        open_ = self.unknown_updates
        return tuple(
            step for step in sorted(self.first.values) if self.first.values[step].weights and step not in open_
        )

    @cached_property
    def unknown_updates(self) -> frozenset[int]:
        """Updates of which some rank's rows are not known."""
        strange = {stranger.step for part in self.parts for stranger in part.strangers}
        return frozenset(strange.union(*(part.rowless for part in self.parts)) & self.first.made.keys())

    def visits(self, step: int) -> list[list[tuple[int, ...]]]:
        """The rows of each micro-batch of each rank."""
        return [part.of(part.ranks[0], step).leaves for part in self.parts]

    def before(self, step: int) -> dict[str, Tensor]:
        """Rank 0's weights before `step` by canonical name, those that do not train included, in float64.

        Those that its first forward pass had; of the step behind the last, those that the run ended with.
        """
        moved = self.first.moved.get(step, {})
        return self._reference.before(step) | {short_name(name): tensor.double() for name, tensor in moved.items()}

    def after(self, step: int) -> dict[str, Tensor]:
        """Rank 0's trained weights right after `step` by canonical name, in float64."""
        return {short_name(name): tensor.double() for name, tensor in self.first.values[step].weights.items()}

    def seen(self, step: int) -> dict[str, Tensor]:
        """Rank 0's gradient of `step` before torch's clipping, in float64; one that was not set is 0."""
        held = self.given(step)
        return {name: held.get(name, torch.zeros_like(tensor)) for name, tensor in self.after(step).items()}

    def given(self, step: int) -> dict[str, Tensor]:
        """Rank 0's gradient of `step` before torch's clipping, in float64, without what was not set."""
        return {short_name(name): tensor.double() for name, tensor in self.first.values[step].gradients.items()}

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

    def laws(self) -> Iterator[Expected]:
        """See `RunLaw`. Updates in which no rank saw a row are left out.

        Where the case clips and torch's clip was not called, a gradient that is the law's but clipped is the law's.
        """
        for step, law in laws(self):
            gradients = mean(law)
            size, held = global_norm(gradients), global_norm(self.seen(step))
            limit = self.case.clip_norm
            if limit is not None and not self.first.made[step].clipped and held <= limit * (1 + 1e-5) < size:
                gradients = clip(gradients, limit)[0]
            summed = hypot(*(float(part.flatten(1).norm(dim=1).sum()) for part in law.gradients.values()))
            yield Expected(step, float(law.losses.mean()), gradients, size, summed / len(law.rows))

    def optimizer(self, step: int) -> str:
        """See `RunLaw`: its class."""
        return self.first.made[step].optimizer

    def groups(self, step: int) -> tuple[Stepping, ...]:
        """See `RunLaw`: the groups as they were set, at their rates."""
        made = self.first.made[step]
        return tuple(
            Stepping(
                tuple(short_name(name) for name in group.names),
                _law_of(made.optimizer, group),
                float(group.settings["lr"]),
            )
            for group in made.groups
        )

    def limit(self, step: int) -> float | None:
        """See `RunLaw`: none where the clip had another gradient than the optimizer."""
        return None if self.first.made[step].early else self.case.clip_norm

    def of(self, step: int) -> Law:
        """The law of `step`, row by row. Raises `ValueError` for an update without known rows."""
        if step not in self._held:
            self._held[step] = self._own(step) if "recomputes" in self.first.claims else self._independent(step)
        return self._held[step]

    def _own(self, step: int) -> Law:
        law = self.first.own_law[step]
        return Law(law.rows, law.losses, {short_name(name): tensor for name, tensor in law.gradients.items()})

    def labelled(self, step: int, label: int) -> Law:
        """As `of`, if every row had this label; only of a model that the reference knows."""
        return self._independent(step, label)

    def _independent(self, step: int, label: int | None = None) -> Law:
        rows = tuple(sorted({row for leaves in self.visits(step) for leaf in leaves for row in leaf}))
        if not rows:
            msg = f"no rank saw a row in update {step}"
            raise ValueError(msg)
        weights = self.before(step)
        leaves = {name: weights[name].detach().clone().requires_grad_() for name in self._reference.trainable}
        losses = self.row_losses({**weights, **leaves}, rows, label)
        found = torch.autograd.grad(
            losses,
            list(leaves.values()),
            grad_outputs=torch.eye(len(rows), dtype=torch.float64),
            is_grads_batched=True,
            allow_unused=True,
        )
        gradients = {
            name: torch.zeros(len(rows), *leaf.shape, dtype=torch.float64) if part is None else part
            for (name, leaf), part in zip(leaves.items(), found, strict=True)
        }
        return Law(rows, losses.detach(), gradients)

    def row_losses(self, weights: Mapping[str, Tensor], rows: tuple[int, ...], label: int | None = None) -> Tensor:
        """float64 [rows]: the loss of each row under `weights` (canonical names, all of them), by its label or one."""
        logits, labels = self.logits(weights, rows)
        labels = labels if label is None else torch.full_like(labels, label)
        return torch.stack(
            [loss_sum(logits[at : at + 1], labels[at : at + 1], self._weights) for at in range(len(rows))]
        )

    def logits(self, weights: Mapping[str, Tensor], rows: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """float64 [rows, classes], and the labels of the rows."""
        piece = piece_of(self.case.rows, rows, max(len(self.case.rows.tokens[row]) for row in rows))
        return self._reference.model.logits(weights, piece.tokens, piece.attention), piece.labels


def decouples(optimizer: str, group: Group) -> bool:
    """Whether the decay acts on the weights and not on the gradient: AdamW is Adam with that switched on."""
    return optimizer == "AdamW" or bool(group.settings.get("decoupled_weight_decay"))


def _law_of(optimizer: str, group: Group) -> UpdateLaw:
    held: Mapping[str, Any] = group.settings
    if optimizer == "SGD":
        return Sgd(held["momentum"], held["weight_decay"])
    fast, slow = held["betas"]
    return AdamW((fast, slow), held["eps"], held["weight_decay"] if decouples(optimizer, group) else 0.0)


def first_names(names: set[str]) -> str:
    """The first few of `names`, and how many more there are."""
    shown = ", ".join(sorted(names)[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def mean(law: Law) -> dict[str, Tensor]:
    """The gradient of the law: the mean over its rows."""
    return {name: tensor.mean(0) for name, tensor in law.gradients.items()}


def matrix(law: Law) -> Tensor:
    """float64 [rows, all trained elements]: the gradient of each row."""
    return torch.cat([tensor.reshape(len(law.rows), -1) for tensor in law.gradients.values()], dim=1)


def vector(law: Law, gradients: Mapping[str, Tensor]) -> Tensor:
    """`gradients` as one vector, in the order of `matrix`."""
    return torch.cat([gradients[name].reshape(-1) for name in law.gradients])


def laws(law: LoopLaw) -> Iterator[tuple[int, Law]]:
    """Each update with its law; updates in which no rank saw a row are left out."""
    for step in law.updates:
        if any(leaf for leaves in law.visits(step) for leaf in leaves):
            yield step, law.of(step)
