"""The law of a run: what its updates must be, computed in one process and float64, for our trainer and for any loop.

Every update starts again from the weights that the subject had before it, so an error is charged to the update that
made it. `TrainerLaw` and `LoopLaw` say which rows an update has and how its optimizer steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import hypot
from typing import Any, cast

import torch
from torch import Tensor, nn

from andon_falsify.loops.parameters import trained
from andon_falsify.loops.sightings import Group, LoopSightings, first_of
from andon_falsify.loops.task import model
from andon_falsify.reference.models import Decoder, Encoder, Masks, canonical, canonical_name, no_dropout
from andon_falsify.reference.published import PublishedPlan, PublishedSchedule
from andon_falsify.reference.training import Piece, RowGradients, pair_gradients, row_gradients, token_gradients
from andon_falsify.reference.update import AdamW, Sgd, State, UpdateRule, clip, global_norm, is_clipped
from andon_falsify.subjects.case import BETA, PAD, Case, Rows
from andon_falsify.subjects.trace import LeafMasks, Tensors, Trace, digest

SAME_FORWARD = "from the loop's own forward pass in float64: same forward, not independent"
_UNKNOWN_SETTINGS = ("maximize", "amsgrad", "nesterov", "dampening")


@dataclass(frozen=True)
class Expected:
    """The law of one update, from the weights that the subject had before it.

    norm: of the gradient, before clipping. summed: the norm that the gradient would have if no row's part cancelled
    another's. Rounding in fp32 is relative to that.
    """

    step: int
    loss: float
    gradients: Mapping[str, Tensor]
    norm: float
    summed: float


@dataclass(frozen=True)
class ParameterGroup:
    """Tensors that one rule moves at one rate."""

    names: tuple[str, ...]
    rule: UpdateRule
    rate: float


class RunLaw(ABC):
    """What every update of one run should have been, computed in float64. Tensors have canonical names.

    why_not: why the expected gradients cannot be computed, or "". why_no_update: why the weights expected after an
    update cannot be computed, or "". factors: sizes of the layout by name; a wrong ratio is often a product of them.
    """

    why_not: str
    why_no_update: str
    factors: Mapping[str, int]

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.case = trace.case
        weights = trace.case.class_weights
        self.class_weights = None if weights is None else torch.tensor(weights).double()

    @abstractmethod
    def rows(self, step: int) -> tuple[int, ...]:
        """The rows of `step`, each once."""

    @abstractmethod
    def of(self, step: int) -> RowGradients:
        """The law of `step`, row by row."""

    @abstractmethod
    def groups(self, step: int) -> tuple[ParameterGroup, ...]:
        """The optimizer of `step`."""

    def limit(self, step: int) -> float | None:
        """The norm to which the observed gradient of `step` is clipped before the optimizer reads it, if any."""
        del step
        return self.case.clip_norm

    @cached_property
    def recorded(self) -> tuple[int, ...]:
        return tuple(step for step, values in sorted(self.trace.first.values.items()) if values.weights)

    @cached_property
    def updates(self) -> tuple[int, ...]:
        return self.recorded

    @cached_property
    def expected(self) -> tuple[Expected, ...]:
        """The law of each of `updates` that had rows: means over its rows, each of which counts once."""
        return tuple(self._mean(step) for step in self.updates if self.rows(step))

    def _mean(self, step: int) -> Expected:
        rows = self.of(step)
        gradients = {name: tensor.mean(0) for name, tensor in rows.gradients.items()}
        summed = hypot(*(float(part.flatten(1).norm(dim=1).sum()) for part in rows.gradients.values()))
        return Expected(step, float(rows.losses.mean()), gradients, global_norm(gradients), summed / len(rows.rows))

    @cached_property
    def model(self) -> Decoder | Encoder:
        alpha = 2.0 * self.case.rank if self.case.rank else None
        kind = Decoder if self.case.architecture == "decoder" else Encoder
        return kind.from_config(self.trace.first.config, alpha)

    @cached_property
    def initial(self) -> dict[str, Tensor]:
        return canonical(self.trace.first.state)

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        return tuple(short_name(name) for name, _, _ in self.trace.first.layouts[0])

    def before(self, step: int) -> dict[str, Tensor]:
        """Rank 0's weights before `step`, frozen ones included."""
        return self.initial if step == 1 else self.initial | self.after(step - 1)

    def after(self, step: int) -> dict[str, Tensor]:
        """Rank 0's trained weights right after `step`."""
        return _exact(self.trace.first.values[step].weights)

    def seen(self, step: int) -> dict[str, Tensor]:
        """Rank 0's gradient of `step` before clipping, of all that trains. A gradient that was None is 0."""
        held = _exact(self.trace.first.values[step].gradients)
        return {name: held.get(name, torch.zeros_like(tensor)) for name, tensor in self.after(step).items()}

    def stepped(self) -> Iterator[tuple[int, dict[str, Tensor], dict[str, Tensor]]]:
        """For each recorded update: its step, the weights before it, and those after one step of its optimizer.

        The step is made with the observed gradient, so that only the optimizer is judged.
        """
        states: dict[tuple[str, ...], State] = {}
        for step in self.recorded:
            before = self.before(step)
            gradients = clip(_exact(self.trace.first.values[step].gradients), self.limit(step))
            wanted = dict(before)
            for group in self.groups(step):
                weights = {name: before[name] for name in group.names}
                own = {name: gradients[name] for name in group.names if name in gradients}
                state = states.get(group.names, State())
                moved, states[group.names] = group.rule.step(weights, own, state, group.rate)
                wanted |= moved
            yield step, before, wanted


class TrainerLaw(RunLaw):
    """The law of our trainer: rows by its published plan, rates by its published schedule.

    Only dropout masks and the length to which micro-batches were padded come from the subject. Raises `LookupError` for
    a micro-batch whose dropout was not observed.
    """

    why_no_update = ""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self._masks: dict[tuple[int, tuple[int, ...]], LeafMasks] = trace.gathered("masks")
        self._plan = planned_batches(self.case)
        hidden = sorted({leaf.hidden for leaf in self._masks.values() if leaf.hidden})
        self.why_not = f"the dropout inside {', '.join(hidden)} cannot be seen from outside" if hidden else ""
        if self.case.task != "classification" and self.case.dropout:
            self.why_not = "the law of instruction tuning has no dropout"
        case = self.case
        self.factors = {"world": case.world, "micro-batches": case.micro_batches, "batch": case.batch_size}

    def rows(self, step: int) -> tuple[int, ...]:
        return self._plan[step]

    def of(self, step: int) -> RowGradients:
        case, before = self.case, self.before(step)
        if case.task != "classification":
            assert isinstance(self.model, Decoder)
            rows = tuple(row for item in self.rows(step) for row in case.items[item])
            weighted = [(tokens, case.token_weights(row)) for row, tokens in enumerate(case.rows.tokens)]
            if case.task.endswith("dpo"):
                pairs = [(weighted[2 * row], weighted[2 * row + 1]) for row in rows]
                law = pair_gradients(self.model, before, self.trainable, pairs, self.initial, BETA)
                return RowGradients(rows, *law)
            of_tokens = [weighted[row] for row in rows]
            return RowGradients(rows, *token_gradients(self.model, before, self.trainable, of_tokens))
        leaves = shares(self.rows(step), case.micro_batches)
        observed = [self._masks.get((step, ids)) for ids in leaves]
        lengths = [leaf.length if leaf else 0 for leaf in observed]
        pieces = [piece_of(case.rows, *each) for each in zip(leaves, lengths, strict=True)]

        def masks(index: int) -> Masks:
            leaf = observed[index]
            if leaf is None:
                if case.dropout:
                    where = f"micro-batch {index} of step {step}"
                    raise LookupError(f"{where} was never computed, so its masks are unknown")
                return no_dropout
            held = leaf.masks
            return lambda name, shape: held[name].view(shape).double() if name in held else None

        law = row_gradients(self.model, before, self.trainable, pieces, self.class_weights, masks)
        return RowGradients(self.rows(step), *law)

    def groups(self, step: int) -> tuple[ParameterGroup, ...]:
        return (ParameterGroup(self.trainable, update_rule(self.case), rate_law(self.case)(step)),)


class LoopLaw(RunLaw):
    """The law of a loop: the rows that all its ranks were observed to train on, from rank 0's weights.

    Each DIFFERENT row of an update counts once, however often it was visited. A loop that pads its shards with repeated
    rows of weight 0 has that gradient; a loop that trains on the repeats has another. Repeats themselves are for
    samples-once. note: how independent the law is, for the reasons of a verdict.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.first = first_of(trace)
        self.parts = cast(tuple[LoopSightings, ...], trace.parts)
        self.recomputes = "recomputes" in self.first.claims
        self.note = SAME_FORWARD if self.recomputes else ""
        case = self.case
        self.factors = {"world": case.world, "accumulation": case.accumulation, "rows": case.local_batch}
        self.made_trainable = {name for name, _, _ in self.first.layouts[0]}
        self._held: dict[int, RowGradients] = {}

    @cached_property
    def why_not(self) -> str:  # type: ignore[override]
        if self.recomputes and not self.why_no_weights:
            return "" if self.first.recomputed else "the loop's own forward pass gave no law"
        if self.case.dropout:
            return "the case has dropout, and this loop's dropout masks cannot be observed"
        return self.why_no_model

    @cached_property
    def why_no_model(self) -> str:
        """Why the reference does not know the model of this loop, "" if it does."""
        if self.why_no_weights:
            return self.why_no_weights
        if self.recomputes:
            return "the model is the loop's own, and the reference does not know it"
        if digest(self.first.state) != digest(self.plain.state_dict()):
            return "the model or its initial weights are not the case's (andon_falsify.model); there is no `loss_sum`"
        return ""

    @cached_property
    def why_no_weights(self) -> str:
        """Why the weights of this run are unknown, "" if they are known."""
        if not self.case.values:
            return "values were not recorded"
        if self.first.resumed_from:
            return "the run resumed another run, whose weights are not available"
        return ""

    @cached_property
    def why_no_update(self) -> str:  # type: ignore[override]
        if self.why_no_weights:
            return "values were not recorded from the first update on"
        for made in self.first.made.values():
            if made.optimizer not in ("SGD", "AdamW", "Adam"):
                return f"the reference computes SGD and AdamW, not {made.optimizer}"
            for group in made.groups:
                on = [name for name in _UNKNOWN_SETTINGS if group.settings.get(name)]
                if on:
                    return f"the reference does not compute {made.optimizer} with {', '.join(on)}"
        return ""

    @cached_property
    def plain(self) -> nn.Module:
        """The case's model before training."""
        return model(self.case)

    @cached_property
    def to_train(self) -> set[str]:
        """The tensors of the case's model that train; those that do train, if the loop has another model."""
        return self.made_trainable if self.why_no_model else set(trained(self.plain))

    @cached_property
    def updates(self) -> tuple[int, ...]:
        return tuple(step for step in self.recorded if step not in self.unknown_updates)

    @cached_property
    def unknown_updates(self) -> frozenset[int]:
        strange = {stranger.step for part in self.parts for stranger in part.strangers}
        return frozenset(strange.union(*(part.rowless for part in self.parts)) & self.first.made.keys())

    def visits(self, step: int) -> list[list[tuple[int, ...]]]:
        """The rows of each micro-batch of each rank."""
        return [part.of(part.ranks[0], step).leaves for part in self.parts]

    def visited(self, step: int) -> int:
        """How many rows the ranks had in `step`, repeats included."""
        return sum(len(leaf) for leaves in self.visits(step) for leaf in leaves)

    def rows(self, step: int) -> tuple[int, ...]:
        return tuple(sorted({row for leaves in self.visits(step) for leaf in leaves for row in leaf}))

    def before(self, step: int) -> dict[str, Tensor]:
        """The weights of the step's first forward pass; for the step after the last, the final weights."""
        return super().before(step) | _exact(self.first.moved.get(step, {}))

    def _mean(self, step: int) -> Expected:
        """A gradient that was clipped without torch's clip is compared with the clipped law."""
        law, limit = super()._mean(step), self.case.clip_norm
        held = is_clipped(global_norm(self.seen(step)), limit)
        if self.first.made[step].clipped or held or not is_clipped(law.norm, limit):
            return law
        return replace(law, gradients=clip(law.gradients, limit))

    def groups(self, step: int) -> tuple[ParameterGroup, ...]:
        made, found = self.first.made[step], []
        for group in made.groups:
            held: Mapping[str, Any] = group.settings
            if made.optimizer == "SGD":
                rule: UpdateRule = Sgd(held["momentum"], held["weight_decay"])
            else:
                rule = AdamW(held["betas"], held["eps"], held["weight_decay"] * decouples(made.optimizer, group))
            found.append(ParameterGroup(tuple(map(short_name, group.names)), rule, float(held["lr"])))
        return tuple(found)

    def limit(self, step: int) -> float | None:
        """None if the clip had another gradient than the optimizer."""
        return None if self.first.made[step].early else self.case.clip_norm

    def of(self, step: int) -> RowGradients:
        if step not in self._held:
            own = self.first.recomputed[step] if self.recomputes else None
            self._held[step] = self.labelled(step) if own is None else replace(own, gradients=_exact(own.gradients))
        return self._held[step]

    def labelled(self, step: int, label: int | None = None) -> RowGradients:
        """As `of`, if every row had the label `label`. Only for a model that the reference knows."""
        piece = piece_of(self.case.rows, self.rows(step))
        if label is not None:
            piece = replace(piece, labels=torch.full_like(piece.labels, label))
        law = row_gradients(self.model, self.before(step), self.trainable, [piece], self.class_weights)
        return RowGradients(self.rows(step), *law)


def planned_batches(case: Case) -> dict[int, tuple[int, ...]]:
    plan = PublishedPlan(range(len(case.items)), case.seed, case.batch_size, case.updates())
    return {update: tuple(rows) for update, rows in plan.items()}


def rate_law(case: Case) -> PublishedSchedule:
    return PublishedSchedule(case.lr, case.updates(), 0.1, 1e-6)


def update_rule(case: Case, *, matrices_only: bool = True) -> UpdateRule:
    """matrices_only: norms and biases do not decay, as in our trainer."""
    if case.optimizer == "adamw":
        return AdamW(weight_decay=case.weight_decay, matrices_only=matrices_only)
    return Sgd(case.momentum, case.weight_decay, matrices_only)


def shares(ids: tuple[int, ...], count: int) -> tuple[tuple[int, ...], ...]:
    """`ids` in `count` contiguous parts whose sizes differ by at most 1, the larger ones first."""
    size, larger = divmod(len(ids), count)
    starts = [place * size + min(place, larger) for place in range(count + 1)]
    return tuple(ids[start:end] for start, end in pairwise(starts))


def short_name(name: str) -> str:
    short = canonical_name(name)
    assert short is not None, name
    return short


def piece_of(rows: Rows, ids: tuple[int, ...], length: int = 0) -> Piece:
    """The rows `ids`, padded on the right to `length`, by default that of the longest."""
    length = length or max((len(rows.tokens[row]) for row in ids), default=1)
    tokens = torch.full((len(ids), length), PAD, dtype=torch.int64)
    for place, row in enumerate(ids):
        tokens[place, : len(rows.tokens[row])] = torch.tensor(rows.tokens[row])
    sizes = torch.tensor([len(rows.tokens[row]) for row in ids], dtype=torch.int64)
    attention = (torch.arange(length) < sizes[:, None]).long()
    return Piece(tokens, attention, torch.tensor([rows.labels[row] for row in ids], dtype=torch.int64))


def decouples(optimizer: str, group: Group) -> bool:
    """Whether weight decay acts on the weights, not on the gradient: AdamW is Adam with that switched on."""
    return optimizer == "AdamW" or bool(group.settings.get("decoupled_weight_decay"))


def _exact(tensors: Tensors) -> dict[str, Tensor]:
    return {short_name(name): tensor.double() for name, tensor in tensors.items()}
