"""Which parameters have had a gradient since the start, and whether those that had none were used at all.

A layer that a forward pass leaves out gets no gradient, and that is right; one that a forward pass calls and that
still gets none is detached from the loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from andon_contracts.observe import plain
from andon_contracts.watch.gradient_hooks import GradientHooks, Raw
from andon_contracts.watch.model_probe import ForwardTap, ModelProbe

_CALLED = 2
"""In so many windows a parameter was used and got no gradient."""
_PATIENCE = 16
"""After so many windows without a use, or with a gradient that was always zero, it counts as none."""


class GradientCoverage:
    """The parameters of one optimizer that still wait for a gradient other than zero, by their index in `members`."""

    def __init__(
        self, members: Sequence[nn.Parameter], names: Sequence[str], subject: ModelProbe, leaves: GradientHooks
    ) -> None:
        self._members = members
        self._names = names
        self._place = {name: index for index, name in enumerate(names)}
        self._adapter = {index for index, name in enumerate(names) if "lora_" in name}
        self._unused_expected = subject.unused_expected
        # What has no elements cannot have a gradient other than none.
        self._absent = {index for index, member in enumerate(members) if member.numel()}
        self._zero = set(self._absent)
        self._windows = 0
        self._called: set[int] = set()
        self._uses: Counter[int] = Counter()
        self._leaves = leaves
        self._taps: dict[int, list[RemovableHandle]] = {}
        if not subject.compiled:
            self._tap(subject)

    def _tap(self, subject: ModelProbe) -> None:
        index = {id(parameter): i for i, parameter in enumerate(self._members)}
        for slot in subject.slots:
            found = index.get(id(slot.parameter))
            if found is not None:
                handle = slot.owner.register_forward_pre_hook(ForwardTap(partial(self._used, found)))
                self._taps.setdefault(found, []).append(handle)

    def _used(self, index: int) -> None:
        """The parameter's module is called; a backward pass may follow."""
        if torch.is_grad_enabled() and not self._leaves.muted:
            self._called.add(index)

    def window(self, raw: Raw) -> None:
        """A window is over, of which the hooks on the leaves say `raw`."""
        self._windows += 1
        if not self._zero:
            return
        touched, nonzero = raw.touched, raw.nonzero
        gradients = {index: self._members[index].grad for index in self._zero}
        there = {index: g for index, g in gradients.items() if g is not None}
        self._absent -= {*touched, *there}
        self._zero -= {*nonzero, *(i for i, g in there.items() if i not in nonzero and _any(g))}
        self._uses.update(self._called & self._absent)
        self._called.clear()
        for index in [i for i in self._taps if i not in self._absent]:
            self._untap(index)

    def missing(self) -> int:
        """The first parameter that should have had a gradient by now, plus one; 0 where there is no such one."""
        if not self._zero:
            return 0
        late = self._windows >= _PATIENCE
        # No layer drop leaves all adapter tensors at once without a gradient, so one window says that.
        found = set(self._adapter) if self._adapter and self._adapter <= self._absent else set()
        if not self._unused_expected:
            found |= {i for i in self._absent if late or self._uses[i] >= _CALLED}
            found |= {i for i in self._zero if late and not self._waits_for_other_half(i)}
        return min(found, default=-1) + 1

    def _waits_for_other_half(self, index: int) -> bool:
        """LoRA's A has a zero gradient as long as its B is zero."""
        other = self._place.get(self._names[index].replace("lora_A", "lora_B"), index)
        return other != index and not _any(self._members[other])

    def _untap(self, index: int) -> None:
        for handle in self._taps.pop(index):
            handle.remove()

    def close(self) -> None:
        """Take the hooks off."""
        for index in list(self._taps):
            self._untap(index)


def _any(tensor: Tensor) -> bool:
    return bool(plain(tensor).any())
