"""The dropout masks of a model's forward pass, observed as they are drawn: on a CPU, and by fused operations on a GPU.

The law is computed with these masks. A GPU's masks are read from its own generator, never drawn again on a CPU, whose
generator gives others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from andon_falsify.reference.models import canonical_name

_ATTENTIONS = ("self_attn", "attention.self")
_CHANCE = "dropout_p"
_EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default


class MaskRecorder:
    """Names each dropout mask of one model's forward pass by the module that drew it.

    hidden: an operation in the last recording whose dropout mask cannot be observed; "" if there was none.
    """

    def __init__(self, model: nn.Module) -> None:
        self.hidden = ""
        self._running: list[str] = []
        for name, module in model.named_modules():
            short = (canonical_name(name) or "").removesuffix(".default")
            if not isinstance(module, nn.Dropout):
                short = f"{short}.attention_dropout" if short.endswith(_ATTENTIONS) else ""
            if short:
                module.register_forward_pre_hook(partial(_start, self._running, short))
                module.register_forward_hook(partial(_end, self._running))

    @contextmanager
    def recording(self) -> Iterator[dict[str, Tensor]]:
        """Context manager: the factors that are drawn inside (0, or 1 / chance to keep), by name, on the CPU."""
        self._running.clear()
        with _Draws(self._running) as draws:
            yield draws.masks
        self.hidden = draws.hidden


def _start(running: list[str], name: str, *_: object) -> None:
    running.append(name)


def _end(running: list[str], *_: object) -> None:
    running.pop()


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, running: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.masks: dict[str, Tensor] = {}
        self.hidden = ""
        self._running = running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FACTORS:
            factors = _FACTORS[func](result, args)
            if factors is not None:
                name = self._running[-1] if self._running else ""
                if not name:
                    raise RuntimeError("a dropout mask was drawn outside any module")
                if name in self.masks:
                    raise RuntimeError(f"{name} drew a second dropout mask")
                self.masks[name] = factors.cpu()
        elif _chance_inside(func, args, kwargs or {}):
            self.hidden = str(func)
        return result


def _of_fused_dropout(result: tuple[Tensor, Tensor], args: Sequence[Any]) -> Tensor | None:
    output, kept = result
    return kept.to(output.dtype) / (1 - args[1]) if args[1] else None


def _of_fused_attention(result: Sequence[Tensor], args: Sequence[Any]) -> Tensor | None:
    """Fused fp32 attention on a GPU: the mask is rebuilt from the random seed and offset that the operation returns.

    An element is kept if its number is above the chance to drop, as in torch's own tests of this kernel.
    """
    chance = _chance_inside(_EFFICIENT, args, {})
    if not chance:
        return None
    query, key, seed, offset = args[0], args[1], result[2], result[3]
    numbers = torch.empty((*query.shape[:3], key.shape[2]), device=query.device)
    torch.ops.aten._fill_mem_eff_dropout_mask_(numbers, chance, int(seed), int(offset))
    return (numbers > chance).float() / (1 - chance)


_FACTORS: Mapping[Any, Callable[[Any, Sequence[Any]], Tensor | None]] = {
    torch.ops.aten.bernoulli_.float: lambda result, args: result / args[1],  # 0 or 1, by the chance to keep
    torch.ops.aten.native_dropout.default: _of_fused_dropout,
    _EFFICIENT: _of_fused_attention,
}


def _chance_inside(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The chance with which a call drops activations by itself, as attention kernels do; 0 for other operations."""
    index = _index_of_chance(func)
    if index is None:
        return 0.0
    default = func._schema.arguments[index].default_value
    return float(args[index] if index < len(args) else kwargs.get(_CHANCE, default))


@cache
def _index_of_chance(func: Any) -> int | None:
    """Which argument of `func` is a chance to drop, if any; None also for an operation that returns no tensor."""
    if not any(isinstance(each.type, torch.TensorType) for each in func._schema.returns):
        return None
    return next((index for index, each in enumerate(func._schema.arguments) if each.name == _CHANCE), None)
