"""What a model's forward pass drops, seen as it is drawn: on a CPU, and by the fused operations of a GPU.

The law is computed with these masks, so those of a GPU are read from what its own generator gave, and never drawn again
on a CPU, whose generator gives others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from andon_falsify.reference.params import canonical_name

_ATTENTIONS = ("self_attn", "attention.self")
_CHANCE = "dropout_p"


class MaskRecorder:
    """Names each dropout mask of one model's forward pass by the module that drew it.

    hidden: the operation of the last recording that dropped something and does not tell what; "" for none.
    """

    def __init__(self, model: nn.Module) -> None:
        self.hidden = ""
        self._open: list[str] = []
        for name, module in model.named_modules():
            place = _place_of(name, module)
            if place:
                module.register_forward_pre_hook(self._entering(place))
                module.register_forward_hook(self._leaving)

    def _entering(self, place: str) -> Callable[..., None]:
        def entering(*_: object) -> None:
            self._open.append(place)

        return entering

    def _leaving(self, *_: object) -> None:
        self._open.pop()

    @contextmanager
    def recording(self) -> Iterator[dict[str, Tensor]]:
        """Inside, the factors (0, or 1 over the chance to keep) that are drawn enter what is yielded, on the CPU."""
        found: dict[str, Tensor] = {}
        self._open.clear()
        draws = _Draws(self._open, found)
        with draws:
            yield found
        self.hidden = draws.hidden


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, names: Sequence[str], found: dict[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self._found = found
        self.hidden = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _SEEN:
            factors = _SEEN[func](result, args)
            if factors is not None:
                self._enter(factors)
        elif _dropped_inside(func, args, kwargs or {}):
            self.hidden = str(func)
        return result

    def _enter(self, factors: Tensor) -> None:
        name = self._names[-1] if self._names else ""
        if not name or name in self._found:
            msg = f"a mask was drawn at {name or 'an unknown place'}, where none was expected"
            raise RuntimeError(msg)
        self._found[name] = factors.cpu()


def _of_bernoulli(result: Tensor, args: Sequence[Any]) -> Tensor | None:
    """0 or 1 with the chance to keep, which is its argument."""
    factors: Tensor = result / args[1]
    return factors


def _of_fused_dropout(result: tuple[Tensor, Tensor], args: Sequence[Any]) -> Tensor | None:
    """`nn.Dropout` on a GPU: the output and what was kept. Its arguments: the input, the chance to drop, whether."""
    output, kept = result
    return kept.to(output.dtype) / (1 - args[1]) if args[1] else None


def _of_fused_attention(result: Sequence[Tensor], args: Sequence[Any]) -> Tensor | None:
    """Attention of a GPU in fp32: the place in the device's stream of numbers, from which torch fills the same mask.

    A number above the chance to drop is kept (torch's own tests of this kernel). Only a GPU has it.
    """
    dropped = _dropped_inside(torch.ops.aten._scaled_dot_product_efficient_attention.default, args, {})
    if not dropped:
        return None
    query, key, seed, offset = args[0], args[1], result[2], result[3]
    numbers = torch.empty((*query.shape[:3], key.shape[2]), device=query.device)
    torch.ops.aten._fill_mem_eff_dropout_mask_(numbers, dropped, int(seed), int(offset))
    kept: Tensor = numbers > dropped
    return kept.float() / (1 - dropped)


_SEEN: Mapping[Any, Callable[[Any, Sequence[Any]], Tensor | None]] = {
    torch.ops.aten.bernoulli_.float: _of_bernoulli,
    torch.ops.aten.native_dropout.default: _of_fused_dropout,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: _of_fused_attention,
}


def _dropped_inside(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The chance with which this call of an operation drops by itself, as kernels of attention do; 0 for others."""
    place = _place_of_chance(func)
    if place is None:
        return 0.0
    given = args[place] if place < len(args) else kwargs.get(_CHANCE, func._schema.arguments[place].default_value)
    return float(given)


@cache
def _place_of_chance(func: Any) -> int | None:
    """Which argument of `func` is a chance to drop; None where there is none, and for what computes no tensor."""
    schema = func._schema
    if not any(isinstance(each.type, torch.TensorType) for each in schema.returns):
        return None
    return next((place for place, argument in enumerate(schema.arguments) if argument.name == _CHANCE), None)


def _place_of(name: str, module: nn.Module) -> str:
    short = (canonical_name(name) or "").removesuffix(".default")
    if isinstance(module, nn.Dropout):
        return short
    return f"{short}.attention_dropout" if short.endswith(_ATTENTIONS) else ""
