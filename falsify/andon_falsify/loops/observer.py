"""A loop seen from outside, on one rank: its rows by content, its gradients and updates by torch's own hooks.

Nothing is asked of the loop but its model. An update is a step of an optimizer that holds parameters of that model.
The gradient is read before torch's clipping where that is called and the optimizer gets what it leaves, else as the
optimizer gets it. (An optimizer that
takes a closure computes its gradient after it was read; such loops cannot be judged here.) What an update leaves is
read twice: behind the step, and where it is next needed (a forward pass, a step, the end), since a loop may broadcast
its weights in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from andon_falsify.loops.clipping import clipping_seen, only_shrunk
from andon_falsify.loops.content import Recogniser, arguments_of
from andon_falsify.loops.forward_passes import Draws, Weighing
from andon_falsify.loops.parameters import (
    gradients,
    groups_of,
    optimizer_digest,
    running,
    trained,
    unwrapped,
    whole,
)
from andon_falsify.loops.protocol import Loop, Restores
from andon_falsify.loops.sightings import LoopSightings, Made, Stranger
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import CutOff, Values, digest


class Observer:
    """Looks at `loop` while it trains, and enters what it sees into `seen`; what the loop tells arrives here too."""

    def __init__(self, loop: Loop, case: Case, seen: LoopSightings) -> None:
        self._loop = loop
        self._case = case
        self._seen = seen
        self._rank = seen.ranks[0]
        self._recogniser = Recogniser(case.rows)
        self._step = seen.resumed_from
        self._between = True
        """Whether the forward passes of the next update are still to come."""
        self._told_rows: list[int] | None = None
        self._unclipped: dict[str, Tensor] | None = None
        self._norm: float | None = None
        self._open: list[int] = []
        self._stepped: torch.optim.Optimizer | None = None
        self._settled = False
        """Whether what the last update left was read where it is needed."""
        self._draws = Draws(seen, self._rank)
        self._weighing = Weighing(seen, self._rank)
        self._over = False
        """Whether the training is over: what follows is no update of it."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the loop is seen."""
        inner = unwrapped(self._loop.model)
        with ExitStack() as stack:
            for handle in (
                inner.register_forward_pre_hook(self._forward, with_kwargs=True),
                inner.register_forward_hook(self._after_forward),
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ):
                stack.callback(handle.remove)
            stack.enter_context(clipping_seen(self._clipping))
            yield

    # -- what the loop may tell

    def rows(self, ids: Sequence[int]) -> None:
        """See `Told.rows`."""
        self._told_rows = [int(row) for row in ids]

    def loss(self, value: float | Tensor) -> None:
        """See `Told.loss`."""
        # A rank without rows has no forward pass; what it tells after it told of the last update is of the next.
        later = not self._between or self._step in self._seen.told_losses
        self._seen.told_losses[max(1, self._step + later)] = float(value)

    # -- what is seen

    def finished(self) -> None:
        """The loop says that it is done."""
        seen, self._over = self._seen, True
        seen.updates = self._step
        self._weighing.settle()
        if not self._between:
            sight = seen.of(self._rank, self._step + 1)
            seen.leftover += [row for leaf in sight.leaves for row in leaf]
            return
        self._settle()
        if self._due:
            self._keep()

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = self._recogniser.rows(arguments_of(module, args, kwargs))
        told, self._told_rows = self._told_rows, None
        if ids is None and told is not None:
            ids = list(told)
        known = tuple(row for row in ids or () if isinstance(row, int))
        if self._over or not torch.is_grad_enabled():
            self._seen.evaluated += known
            return
        if self._between:
            self._begin()
        step = self._step + 1
        if ids is None:
            self._seen.rowless.append(step)
        self._seen.strangers += [Stranger(step, self._rank, text) for text in ids or () if isinstance(text, str)]
        leaves = self._seen.of(self._rank, step).leaves
        leaves.append(known)
        if 0.0 not in (self._case.class_weights or ()):
            self._weighing.called(step, len(leaves) - 1, ids or ())
        self._draws.before_forward(step, rows=len(known))

    def _after_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        self._draws.after_forward(module)
        if torch.is_grad_enabled() and not self._over:
            self._weighing.gave(output)

    def _begin(self) -> None:
        """The first forward pass of an update: the place to save the last one, or to poison this one."""
        self._settle()
        statistics = running(unwrapped(self._loop.model))
        if statistics:
            self._seen.running[self._rank, self._step + 1] = digest(statistics)
        if self._due:
            self._keep()
        if self._case.stop_after == self._step > 0:
            raise CutOff
        self._between = False
        poison = self._case.poison
        if poison is not None and poison.step == self._step + 1 and poison.leaf % self._case.world == self._rank:
            self._poison(float("inf") if poison.kind == "inf" else float("nan"))

    def _settle(self) -> None:
        """What the last update, or the start, really left: of shards nothing, since that would be collective."""
        if self._settled or self._seen.sharded:
            return
        self._settled = True
        seen, step, parameters = self._seen, self._step, trained(unwrapped(self._loop.model))
        weights = {name: whole(parameter) for name, parameter in parameters.items()}
        left = digest(weights)
        before = seen.of(self._rank, step).weights if self._stepped is not None else seen.start[self._rank]
        if self._stepped is not None:
            sight = seen.of(self._rank, step)
            sight.weights, sight.optimizer = left, optimizer_digest(self._stepped, parameters)
        else:
            seen.start[self._rank] = left
        if left != before and self._rank == 0 and self._case.values:
            seen.moved[step + 1] = weights

    @property
    def _due(self) -> bool:
        case, step = self._case, self._step
        every = case.checkpoint_every if case.folder is not None and isinstance(self._loop, Restores) else None
        return bool(every) and step > self._seen.resumed_from and step % (every or 1) == 0

    def _keep(self) -> None:
        folder = Path(str(self._case.folder)) / f"step-{self._step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self._loop, Restores):
            self._loop.save(folder)

    def _poison(self, value: float) -> None:
        parameter = next(iter(trained(unwrapped(self._loop.model)).values()))

        def spoil(gradient: Tensor) -> Tensor:
            handle.remove()
            self._seen.poisoned = True
            return gradient * value

        handle = parameter.register_hook(spoil)  # type: ignore[no-untyped-call]

    def _clipping(self, norm: float | None) -> None:
        now = gradients(trained(unwrapped(self._loop.model)))
        # Clipping twice is seen once; what was reduced, or added to, since the last time is clipped for the first time.
        if self._unclipped is None or not only_shrunk(now, self._unclipped):
            self._unclipped, self._norm = now, norm

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = trained(unwrapped(self._loop.model))
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = {id(p) for p in parameters.values()}
        if not held & mine or self._open or self._over:
            self._open.append(0)
            return
        self._open.append(id(optimizer))
        if self._between:
            self._settle()
        self._weighing.settle()
        step = self._step + 1
        given = gradients(parameters)
        early = self._unclipped is not None and not only_shrunk(given, self._unclipped)
        clipped = self._unclipped is not None and not early
        raw = self._unclipped if clipped and self._unclipped is not None else given
        self._seen.of(self._rank, step).gradient = digest(raw)
        self._seen.made[step] = Made(
            type(optimizer).__name__, groups_of(optimizer, parameters), self._norm, clipped, early
        )
        if self._rank == 0 and self._case.values:
            self._seen.values[step] = Values(raw, {})

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._open or self._open.pop() != id(optimizer):
            return
        parameters = trained(unwrapped(self._loop.model))
        self._step += 1
        weights = {name: whole(parameter) for name, parameter in parameters.items()}
        sight = self._seen.of(self._rank, self._step)
        sight.weights, sight.optimizer = digest(weights), optimizer_digest(optimizer, parameters)
        if self._step in self._seen.values:
            self._seen.values[self._step] = Values(self._seen.values[self._step].gradients, weights)
        self._stepped, self._settled = optimizer, False
        self._between, self._unclipped, self._norm = True, None, None
        if self._case.stop_after == self._step and not self._due:
            raise CutOff
