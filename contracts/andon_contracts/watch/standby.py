"""A watch that nobody asked for in the script: opened by the first update of each optimizer of torch (issue 3).

Torch's global step hooks say when an optimizer makes its first update, or the clip call just before it: every rank
comes to that together, so the watch is opened there. What was before, the raw gradients and buffers of the very first
window, is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from andon_contracts.causes import first_line
from andon_contracts.legible import legible_line, tell
from andon_contracts.watch.discovery import members, optimizer_of, trained_by
from andon_contracts.watch.gathering import Gathering
from andon_contracts.watch.intercept import listen, unlisten
from andon_contracts.watch.opening import CannotLook, is_watched, open_watch, opened_so_far
from andon_contracts.watch.settings import Settings
from andon_contracts.watch.watcher import Watch


class CannotWatch(SystemExit):
    """A wrong argument of the command, said on standard error; no `except Exception` of the script may hide that."""

    def __init__(self, why: str) -> None:
        super().__init__(2)
        self.why = why


class Standby:
    """Opens a watch for every optimizer of this process that makes an update, with `options` of `andon.watch`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.watches: list[Watch] = []
        self._opened_before = opened_so_far()
        self._settings = Settings(**options, by_command=True)
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._running: list[torch.optim.Optimizer] = []
        self._clipped: set[int] = set()
        self._gathering = Gathering()
        self._handles: list[Any] = []
        self._left_out: set[str] = set()

    def __enter__(self) -> Self:
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        listen(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for handle in self._handles:
            handle.remove()
        unlisten(self)
        self._gathering.close()
        for each in self.watches:
            if isinstance(error, SystemExit):  # the script's own way to end; the others have theirs
                each.close()
            else:
                each.__exit__(kind, error, trace)

    @property
    def saw_nothing(self) -> bool:
        """True if no watch was opened, by the script itself neither, and no optimizer was left out."""
        return opened_so_far() == self._opened_before and not self._left_out

    @property
    def violated(self) -> bool:
        """Whether any watch found what it was told to raise for."""
        return any(each.settings.action == "raise" and each.violations for each in self.watches)

    def _before(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        inner = self._is_inside(optimizer)
        self._running.append(optimizer)
        if not inner and optimizer not in self._seen:
            self._open(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        # An update that raised came to no end: it still lies above the one that ends now.
        while self._running and self._running.pop() is not optimizer:
            pass

    def _is_inside(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether another optimizer makes this update by it, as one does that deals its state out over ranks."""
        if optimizer in self._running:  # its last update raised, and so never ended
            del self._running[self._running.index(optimizer) :]
        mine = set(map(id, members(optimizer)))
        return any(mine <= set(map(id, members(outer))) for outer in self._running)

    def clipping(self, parameters: Sequence[torch.Tensor], norm: torch.Tensor | None) -> None:
        """The script is about to clip: an optimizer of these parameters makes its first update soon."""
        if not parameters or id(parameters[0]) in self._clipped:
            return
        self._clipped.add(id(parameters[0]))
        optimizer = optimizer_of(parameters)
        if optimizer is None or optimizer in self._seen:
            return
        opened = self._open(optimizer)
        if opened is not None:
            opened.hearing.clipping(parameters, norm)

    def _ignored(self, *args: object, **named: object) -> None:
        """Calls that do not matter before there is a watch."""

    updates_of = skipped = unscaling = reducing = resumed = lost = backward = backward_over = yielded = _ignored

    def _open(self, optimizer: torch.optim.Optimizer) -> Watch | None:
        """A watch of what `optimizer` trains; None, with one line, if it cannot be watched."""
        self._seen.add(optimizer)
        if is_watched(optimizer):
            return None
        held, kind = members(optimizer), type(optimizer).__qualname__
        if not any(isinstance(each, torch.nn.Parameter) for each in held):
            self._leave_out(f"{kind} trains only tensors that are no parameters of a module")
            return None
        why = ""
        try:
            model, optimizers = trained_by(optimizer)
        except ValueError as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001 - it asks objects of the script, which may raise anything
            why = f"what {kind} trains cannot be found: {first_line(error)}"
        refused = self._gathering.meet(f"{kind} of {len(held)} tensors", why)
        if refused is not None:
            self._leave_out(refused)
            return None
        if any(is_watched(each) for each in optimizers):
            optimizers = [optimizer]
        self._make_way(optimizers, model)
        self._seen.update(optimizers)
        try:
            opened = open_watch(model, optimizers, self._settings)
        except CannotLook as error:
            self._leave_out(str(error))
            return None
        except ValueError as error:
            raise _refusal(str(error)) from None
        self.watches.append(opened)
        return opened

    def _leave_out(self, why: str) -> None:
        """Print once why something is not watched; "" if it was printed already."""
        if why and why not in self._left_out and self._gathering.is_first(why):
            tell(f"andon watch: an optimizer is not watched, and the script goes on: {legible_line(_plain(why))}")
        self._left_out.add(why)

    def _make_way(self, optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module) -> None:
        """Close the watch of a model for which there is a new optimizer: it would miss what that one trains."""
        mine = {id(parameter) for parameter in model.parameters()}
        for each in self.watches:
            if not each.closed and any(id(parameter) in mine for parameter in each.parameters):
                tell("andon watch: another optimizer trains this model now, so it is watched anew")
                each.close()


def _refusal(why: str) -> CannotWatch:
    tell(f"andon watch: {_plain(why)}")
    return CannotWatch(why)


def _plain(why: str) -> str:
    return why.removeprefix("andon.watch: ")
