"""Frozen linear layers in 4 bits, as in QLoRA: nf4 of bitsandbytes with double quantization.

A model is built and gets its adapter with the weights as loaded, on the CPU. `quantize` packs frozen layers when the
model is placed on its device, inside the wrappers of the adapter. So names, the adapter and the digest of the loaded
base do not depend on the quantization, and a merge starts from the loaded base. DoRA's lengths of rows start as those
of the loaded weights too; peft's own start as those of the packed ones. On one kind of device, equal weights are packed
to equal bits.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from andon.console.messages import InputError, install_hint, silence_bitsandbytes
from andon.model.build import head_names, without_adapter
from andon_contracts.legible import legible_line

NONE = "none"
BLOCK, NESTED_BLOCK = 64, 256
"""Weights that share a scale, and scales that share a scale of their own."""
_KEY = "model.quantize"


def quantized_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers of `model`, with its adapter attached, that `quantize` packs, by name.

    They are the plain linear layers with frozen weights of their own, except those of the head, and those that the
    model keeps in fp32, as transformers does. Raises `InputError` if the model has no such layer.
    """
    base: Any = without_adapter(model)
    head = {id(each) for name in head_names(base) for each in base.get_submodule(name).modules()}
    in_fp32 = {*(getattr(base, "_keep_in_fp32_modules", None) or ())}
    uses = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not module.weight.requires_grad and uses[id(module.weight)] == 1
        if id(module) not in head and not in_fp32.intersection(name.split(".")) and ".original_module" not in name
    }
    if not layers:
        what = f"nf4 packs frozen linear layers, and {type(base).__name__} has none outside of its head; set it to none"
        raise InputError.at(_KEY, what)
    return layers


def quantize(model: nn.Module, device: torch.device) -> None:
    """Replace the `quantized_layers` of `model` by layers of bitsandbytes on `device`, in place, one after another.

    They compute in the dtype of the loaded weights. Other layers stay where they are. Raises `InputError` if
    bitsandbytes is not installed or cannot compute on `device`.
    """
    layers, library = quantized_layers(model), _library_for(device)
    how: dict[str, Any] = {"compress_statistics": True, "quant_type": "nf4"}
    while layers:  # each loaded weight is freed before the next is packed
        name, layer = layers.popitem()
        sizes, weight = (layer.in_features, layer.out_features), layer.weight.data
        packed = library.nn.Linear4bit(*sizes, bias=False, compute_dtype=weight.dtype, device="meta", **how)
        packed.weight = library.nn.Params4bit(weight, requires_grad=False, **how).to(device)
        packed.bias = layer.bias
        # Otherwise it repacks its weights in an evaluation on some CPUs, for a kernel without a backward pass.
        packed.support_avx512bf16_for_cpu = False
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, packed.train(layer.training))


def _library_for(device: torch.device) -> Any:
    silence_bitsandbytes()
    try:
        import bitsandbytes
    except ImportError:
        raise InputError.at(_KEY, f"nf4 needs bitsandbytes; {install_hint('qlora')}") from None
    ones = torch.ones(BLOCK, BLOCK, device=device)
    try:
        bitsandbytes.functional.dequantize_4bit(*bitsandbytes.functional.quantize_4bit(ones, quant_type="nf4"))
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
            raise
        reason = legible_line(next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__))
        what = f"nf4: bitsandbytes {bitsandbytes.__version__} cannot quantize on {device} ({reason})"
        raise InputError.at(_KEY, f"{what}; set it to none, or install a version for this device") from error
    return bitsandbytes


def packed_sizes(weight: Tensor) -> tuple[int, ...]:
    """Bytes of the tensors to which `quantize` packs `weight`: values, scales, scales of scales, offset and codes."""
    scales = math.ceil(weight.numel() / BLOCK)
    return math.ceil(weight.numel() / 2), scales, 4 * math.ceil(scales / NESTED_BLOCK), 4, 4 * 16


def unpacked_bytes(weight: Tensor) -> int:
    """Bytes that a pass over the packed `weight` needs for a while: its values and scales, unpacked."""
    return weight.nbytes + 2 * 4 * math.ceil(weight.numel() / BLOCK)
