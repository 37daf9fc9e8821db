"""Observes a training loop on one rank: its rows at the model, its gradients and updates through torch's own hooks.

The loop only has to show its model. An update is a step of an optimizer that holds parameters of this model. The
gradient is read before torch's clipping if the loop calls that and the optimizer receives the clipped gradient; else
as the optimizer receives it. An optimizer that takes a closure computes its gradient later, and cannot be judged.

The weights after an update are read twice: right after the step, and when they are next needed (a forward pass, a
step, the end), because a loop may broadcast its weights in between.

A loop may call its model with rows that only keep the ranks in step, and multiply their losses by 0. Such a row is not
trained on. The backward pass shows that: the gradient of the model's output for this row is 0.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from andon_falsify.loops.parameters import (
    buffers,
    clipping_seen,
    copied,
    gradients,
    groups_of,
    only_shrunk,
    optimizer_digest,
    trained,
    unwrapped,
)
from andon_falsify.loops.sightings import LoopSightings, Made, Stranger
from andon_falsify.subjects.case import PAD, Case, Rows
from andon_falsify.subjects.trace import CutOff, Values, bytes_of, digest

IGNORED_LABEL = -100
"""A row with this label has no loss in torch's cross entropy, so it is not trained on."""
_EXACT = (torch.float32, torch.float64)
"""Types in which the gradient of a row that counts does not underflow."""
RowId = int | str | None
"""A row of the case; or a text that says what the row is instead; or None for a row without a label."""


def recognised(rows: Rows, arguments: Mapping[str, Any]) -> list[RowId] | None:
    """The rows of a call of the model, recognised by their tokens. None if the call has no `input_ids`."""
    tokens, mask, labels = (arguments.get(name) for name in ("input_ids", "attention_mask", "labels"))
    if not isinstance(tokens, Tensor) or tokens.dim() != 2:
        return None
    known = {content: row for row, content in enumerate(rows.tokens)}
    mask = mask if isinstance(mask, Tensor) and mask.shape == tokens.shape else tokens != PAD
    targets = labels.tolist() if isinstance(labels, Tensor) and labels.shape == tokens.shape[:1] else None
    found: list[RowId] = []
    for place, (line, kept) in enumerate(zip(tokens, mask.bool(), strict=True)):
        label, content = targets[place] if targets is not None else None, tuple(line[kept].tolist())
        row = known.get(content)
        if label == IGNORED_LABEL:
            found.append(None)
        elif row is None:
            found.append(f"tokens {list(content)}" if content else "a row without tokens")
        elif label is not None and label != rows.labels[row]:
            found.append(f"row {row} with label {label} instead of {rows.labels[row]}")
        else:
            found.append(row)
    return found


def arguments_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `module`, by the parameter names of its `forward`."""
    try:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
    except TypeError:
        return dict(kwargs)
    found = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return found


@dataclass
class _Pass:
    """A forward pass of update `step`. leaf: the number of its micro-batch. generator: torch's state before it.

    counted: bool [rows], whether the output for this row had a gradient. None before the backward pass.
    """

    step: int
    leaf: int
    ids: Sequence[RowId]
    generator: str
    counted: Tensor | None = None


class ForwardPasses:
    """Enters into `seen` what the training's forward passes show."""

    def __init__(self, case: Case, seen: LoopSightings) -> None:
        self._seen = seen
        self._rank = seen.ranks[0]
        self._weighs = 0.0 not in (case.class_weights or ())  # rows of such a class have no gradient, and are visits
        self._passes: list[_Pass] = []
        self._current: _Pass | None = None

    def begin(self, step: int, ids: Sequence[RowId] | None) -> None:
        """A forward pass of update `step` begins, with these rows; None if they are unknown."""
        if ids is None:
            self._seen.rowless.append(step)
        self._seen.strangers += [Stranger(step, self._rank, text) for text in ids or () if isinstance(text, str)]
        leaves = self._seen.of(self._rank, step).leaves
        leaves.append(tuple(row for row in ids or () if isinstance(row, int)))
        self._current = _Pass(step, len(leaves) - 1, ids or (), _generator())
        self._passes.append(self._current)

    def end(self, output: Any, *, training: bool) -> None:
        """It has ended with `output`. training: the model's mode."""
        current, self._current = self._current, None
        if current is None:
            return
        if current.generator != _generator():
            self._seen.draws.setdefault((self._rank, current.step), current.generator)
        elif any(isinstance(row, int) for row in current.ids):
            self._seen.undrawn.setdefault((self._rank, current.step), training)
        scores = getattr(output, "logits", output)
        scores = scores[0] if isinstance(scores, tuple | list) and scores else scores
        if not self._weighs or not isinstance(scores, Tensor) or not scores.requires_grad:
            return
        if scores.dtype not in _EXACT or scores.dim() < 2 or len(scores) != len(current.ids):
            return
        # A row whose class is certain has no gradient either, and was trained on.
        certain = scores.detach().flatten(1).softmax(-1).amax(-1) == 1

        def weigh(gradient: Tensor) -> None:
            counted = gradient.flatten(1).ne(0).any(1) | certain
            current.counted = counted if current.counted is None else current.counted | counted

        scores.register_hook(weigh)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """The backward passes of all passes so far are over: remove the visits of rows that counted for nothing."""
        passes, self._passes = self._passes, []
        for each in passes:
            if each.counted is None or bool(each.counted.all()):
                continue
            pairs = list(zip(each.ids, each.counted.tolist(), strict=True))
            kept = tuple(row for row, counts in pairs if counts and isinstance(row, int))
            self._seen.of(self._rank, each.step).leaves[each.leaf] = kept
            for row, counts in pairs:
                if isinstance(row, str) and not counts:
                    self._seen.strangers.remove(Stranger(each.step, self._rank, row))
            self._seen.weightless += [row for row, counts in pairs if isinstance(row, int) and not counts]


def _generator() -> str:
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
    return hashlib.blake2b(b"".join(map(bytes_of, states)), digest_size=8).hexdigest()


class Observer:
    """Enters into `seen` what `loop` does while it trains, and what it reports: this is the loop's `Told`."""

    def __init__(self, loop: Any, case: Case, seen: LoopSightings) -> None:
        self._loop = loop
        self._case = case
        self._seen = seen
        self._rank = seen.ranks[0]
        self._passes = ForwardPasses(case, seen)
        self._step = seen.resumed_from
        # Between two updates; in one, from its first forward pass to the optimizer's step; or after the training.
        self._phase: Literal["between", "update", "over"] = "between"
        self._told_rows: list[int] | None = None
        self._unclipped: dict[str, Tensor] | None = None
        self._norm: float | None = None
        # For each optimizer step in progress (an optimizer may call another): whether it is an update.
        self._steps: list[bool] = []
        self._stepped: torch.optim.Optimizer | None = None
        self._settled = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the loop is observed."""
        inner = unwrapped(self._loop.model)
        with ExitStack() as stack:
            for handle in (
                inner.register_forward_pre_hook(self._before_forward, with_kwargs=True),
                inner.register_forward_hook(self._after_forward),
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ):
                stack.callback(handle.remove)
            stack.enter_context(clipping_seen(self._before_clipping))
            yield

    def rows(self, ids: Sequence[int]) -> None:
        self._told_rows = [int(row) for row in ids]

    def loss(self, value: float | Tensor) -> None:
        # A rank without rows has no forward pass. If it has reported the last update's loss, this is of the next one.
        later = self._phase == "update" or self._step in self._seen.told_losses
        self._seen.told_losses[max(1, self._step + later)] = float(value)

    def finished(self) -> None:
        """The loop's `train` has returned."""
        seen = self._seen
        seen.updates = self._step
        self._passes.settle()
        if self._phase == "update":
            seen.leftover += [row for leaf in seen.of(self._rank, self._step + 1).leaves for row in leaf]
        else:
            self._settle()
            self._save_if_due()
        self._phase = "over"

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        told, self._told_rows = self._told_rows, None
        if self._phase == "over" or not torch.is_grad_enabled():
            return
        if self._phase == "between":
            self._begin()
        ids = recognised(self._case.rows, arguments_of(module, args, kwargs))
        self._passes.begin(self._step + 1, told if ids is None else ids)

    def _after_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        self._passes.end(output, training=module.training)

    def _begin(self) -> None:
        case, step = self._case, self._step
        self._settle()
        statistics = buffers(unwrapped(self._loop.model), running=True)
        if statistics:
            self._seen.running[self._rank, step + 1] = digest(statistics)
        self._save_if_due()
        if case.stop_after == step > 0:
            raise CutOff
        self._phase = "update"
        poison = case.poison
        if poison is None or poison.step != step + 1 or poison.leaf % case.world != self._rank:
            return
        value = float("inf") if poison.kind == "inf" else float("nan")

        def spoil(gradient: Tensor) -> Tensor:
            handle.remove()
            self._seen.poisoned = True
            return gradient * value

        handle = next(iter(self._trained.values())).register_hook(spoil)  # type: ignore[no-untyped-call]

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        return trained(unwrapped(self._loop.model))

    def _settle(self) -> None:
        """Read the weights that the last update, or the start, really left. Not if sharded: that is collective."""
        if self._settled or self._seen.sharded:
            return
        self._settled = True
        seen, parameters = self._seen, self._trained
        weights = copied(parameters)
        left = digest(weights)
        if self._stepped is None:
            before, seen.start[self._rank] = seen.start[self._rank], left
        else:
            sight = seen.of(self._rank, self._step)
            before = sight.weights
            sight.weights, sight.optimizer = left, optimizer_digest(self._stepped, parameters)
        if left != before and self._rank == 0 and self._case.values:
            seen.moved[self._step + 1] = weights

    @property
    def _due(self) -> bool:
        every = self._case.checkpoint_every
        if self._case.folder is None or not every or "restores" not in self._seen.claims:
            return False
        return self._step > self._seen.resumed_from and self._step % every == 0

    def _save_if_due(self) -> None:
        if self._due:
            folder = Path(str(self._case.folder)) / f"step-{self._step:06d}"
            folder.mkdir(parents=True, exist_ok=True)
            self._loop.save(folder)

    def _before_clipping(self, norm: float | None) -> None:
        now = gradients(self._trained)
        # Only the first clipping counts, unless the gradient was reduced or added to since.
        if self._unclipped is None or not only_shrunk(now, self._unclipped):
            self._unclipped, self._norm = now, norm

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = self._trained
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        is_update = self._phase != "over" and not self._steps and not held.isdisjoint(map(id, parameters.values()))
        self._steps.append(is_update)
        if not is_update:
            return
        if self._phase == "between":
            self._settle()
        self._passes.settle()
        step, given = self._step + 1, gradients(parameters)
        clipped = self._unclipped is not None and only_shrunk(given, self._unclipped)
        early = self._unclipped is not None and not clipped
        raw = (self._unclipped or given) if clipped else given
        self._seen.of(self._rank, step).gradient = digest(raw)
        groups = groups_of(optimizer, parameters)
        self._seen.made[step] = Made(type(optimizer).__name__, groups, self._norm, clipped, early)
        if self._rank == 0 and self._case.values:
            self._seen.values[step] = Values(raw, {})

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._steps or not self._steps.pop():
            return
        self._step += 1
        parameters = self._trained
        weights, sight = copied(parameters), self._seen.of(self._rank, self._step)
        sight.weights, sight.optimizer = digest(weights), optimizer_digest(optimizer, parameters)
        if self._step in self._seen.values:
            self._seen.values[self._step] = Values(self._seen.values[self._step].gradients, weights)
        self._stepped, self._settled = optimizer, False
        self._phase, self._unclipped, self._norm = "between", None, None
        if self._case.stop_after == self._step and not self._due:
            raise CutOff
