"""Functions that draw random numbers; and dropout on a GPU with the masks that a CPU would draw, for groups that have
ranks on both.

A device's generator is its own, so the same key gives other masks on a GPU than on a CPU; who computes a micro-batch
would then decide what it drops. Here the numbers come from a CPU's generator, drawn as torch's own CPU kernels draw
them, and go to the GPU as masks. That takes time, which is why a group of GPUs alone does without.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_functional = torch.nn.functional
STOCHASTIC: frozenset[Callable[..., Any]] = frozenset(
    {
        _functional.dropout,
        _functional.dropout1d,
        _functional.dropout2d,
        _functional.dropout3d,
        _functional.alpha_dropout,
        _functional.feature_alpha_dropout,
        _functional.scaled_dot_product_attention,
        _functional.multi_head_attention_forward,
        _functional.rrelu,
        torch.dropout,
        torch.alpha_dropout,
        torch.feature_dropout,
        torch.bernoulli,
        torch.rand,
        torch.randn,
        torch.rand_like,
        torch.randn_like,
        torch.randint,
        torch.randperm,
        torch.normal,
        torch.Tensor.bernoulli_,
        torch.Tensor.bernoulli,
        torch.Tensor.normal_,
        torch.Tensor.uniform_,
    }
)
"""Functions that may draw random numbers, as a model calls them."""
DROPOUT = (_functional.dropout, torch.dropout)
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class UnkeyedRandomnessError(ValueError):
    """The model draws random numbers in a way that cannot be keyed by micro-batch."""


class Dropout:
    """A call of one of `DROPOUT`, of either's arguments."""

    def __init__(
        self,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        *,
        train: bool = True,
    ) -> None:
        self._input, self._p, self._inplace = input, p, inplace
        self._training = training if train is True else train

    @property
    def plain(self) -> bool:
        """Whether it is called as models do. Of other arguments, and under `vmap`, only torch knows what it makes."""
        return (
            type(self._p) in (float, int)
            and type(self._training) is bool
            and type(self._input) in (Tensor, torch.nn.Parameter)
            and self._input.layout == torch.strided
            and not self._input.is_nested
            and torch._C._functorch.peek_interpreter_stack() is None
        )

    @property
    def draws(self) -> bool:
        """Whether anything is drawn for it."""
        return self._training and 0 < self._p < 1 and self._input.numel() > 0

    def __call__(self, generator: torch.Generator) -> Tensor:
        """What a CPU gives with `generator`, of a CPU, for its own: to the bit, and by the same operations.

        The numbers are drawn in the order of the input's memory, so that a GPU drops what a CPU would.
        """
        if not self.draws:
            return _functional.dropout(self._input, self._p, self._training, self._inplace)
        drawn = torch.empty_like(self._input, device="cpu", requires_grad=False)
        kept = drawn.bernoulli_(1 - self._p, generator=generator).div_(1 - self._p)
        kept = kept.to(self._input.device, non_blocking=True)
        return self._input.mul_(kept) if self._inplace else self._input * kept


class HostDrawnDropout(TorchFunctionMode):
    """Inside, `dropout` and attention with dropout drop what a CPU with this generator would.

    Raises `UnkeyedRandomnessError` for other functions that draw: who computes would decide what they give.
    """

    def __init__(self, generator: torch.Generator) -> None:
        """generator: of the CPU; it moves on with each draw."""
        super().__init__()
        self._generator = generator

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUT:
            return Dropout(*args, **kwargs)(self._generator)
        if func is _functional.scaled_dot_product_attention:
            given = {**dict(zip(_ATTENTION, args, strict=False)), **kwargs}
            return self._attention(given) if given.get("dropout_p", 0.0) > 0 else func(*args, **kwargs)
        if func in STOCHASTIC and not _drops_nothing(func, args, kwargs):
            msg = f"the model draws random numbers by {func.__name__}, which on GPUs beside CPUs cannot be keyed"
            raise UnkeyedRandomnessError(msg)
        return func(*args, **kwargs)

    def _attention(self, given: Mapping[str, Any]) -> Tensor:
        query, key, value = given["query"], given["key"], given["value"]
        if given.get("enable_gqa", False):
            key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
        scale = given.get("scale")
        weights = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        shares: Tensor = torch.ops.aten._safe_softmax(weights + _bias(given, weights), -1)
        seen: Tensor = Dropout(shares, given["dropout_p"])(self._generator) @ value
        return seen


def _drops_nothing(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        given = inspect.signature(func).bind(*args, **kwargs)
    except (TypeError, ValueError):  # no function of Python's
        return False
    given.apply_defaults()
    chance = given.arguments.get("p", given.arguments.get("dropout_p"))
    return chance == 0 or given.arguments.get("training") is False


def _bias(given: Mapping[str, Any], weights: Tensor) -> Tensor:
    """What is added to `weights` before the softmax: minus infinity where a query may not look."""
    mask: Tensor | None = given.get("attn_mask")
    if mask is None:
        mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device)
        if given.get("is_causal", False):
            mask = mask.tril()
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=weights.dtype).masked_fill(~mask, float("-inf"))
