"""The smallest models and rows that have everything a real one has."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from andon.config.schema import Adapter, Model
from andon.model.adapter import attach, trainable_parameters
from andon.model.build import ModelInterface, build_base, seeded
from andon.tasks.text import ClassificationTask

CPU = torch.device("cpu")
PAD = 32


@dataclasses.dataclass(frozen=True)
class Shape:
    """The arguments of `build_base`."""

    model: Model
    interface: ModelInterface
    seed: int = 7


def changed(shape: Shape, **values: Any) -> Shape:
    """`shape` with other values, each named as its field of `Model`, `ModelInterface` or `Shape`."""
    own, required = ({key: values.pop(key) for key in list(values) if key in names} for names in _FIELDS)
    model, interface = shape.model.model_copy(update=own), dataclasses.replace(shape.interface, **required)
    return dataclasses.replace(shape, model=model, interface=interface, **values)


_FIELDS = (Model.model_fields, ModelInterface.__dataclass_fields__)


def base_of(shape: Shape) -> Any:
    return build_base(shape.model, shape.interface, shape.seed)


def hollow_base(shape: Shape) -> Any:
    return build_base(shape.model, shape.interface, shape.seed, weights=False)


TINY = Shape(
    Model(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        dropout=0.0,
        max_length=16,
    ),
    ModelInterface("classification", ("safe", "needs-quoting", "unsafe"), vocab_size=33, pad_id=PAD),
)
LABELS = TINY.interface.labels
LORA = Adapter(r=2, alpha=4.0, dropout=0.0)


def spec(architecture: str = "decoder", dtype: str = "float32") -> Shape:
    return changed(TINY, architecture=architecture, dtype=dtype)


def padded_batch() -> dict[str, torch.Tensor]:
    """Three rows of 12, 7 and 1 tokens, padded behind: input_ids and attention_mask, int64 [3, 12]."""
    ids = torch.arange(1, 37).view(3, 12) % 20 + 1
    mask = torch.zeros_like(ids)
    for row, length in enumerate((12, 7, 1)):
        mask[row, :length] = 1
    return {"input_ids": ids.where(mask == 1, torch.tensor(PAD)), "attention_mask": mask}


def adapted(architecture: str = "decoder", dtype: str = "float32", adapter: Adapter = LORA) -> nn.Module:
    """The tiny model with an adapter whose B is zero, as training starts."""
    return attach(base_of(spec(architecture, dtype)), adapter, seed=3)


def perturbed(model: nn.Module, seed: int = 11, by: float = 0.3) -> nn.Module:
    """`model` with every trainable weight moved: with B at zero A has no gradient and dropout no effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=by)
    return model


def task(
    tokens: list[list[int]], labels: list[int], class_weights: list[float] | None = None, padding_multiple: int = 8
) -> ClassificationTask:
    return ClassificationTask(
        tokens,
        labels,
        num_labels=3,
        vocab_size=33,
        pad_id=PAD,
        class_weights=class_weights,
        padding_multiple=padding_multiple,
    )


CAUSAL = changed(TINY, head="causal", labels=())


def causal_base(kind: str = "qwen3", *, dropout: float = 0.0, words: int = 33, dtype: str = "float32") -> Any:
    """A tiny decoder of a family without an adapter ('qwen3': the embedded one; the head of 'llama' is not tied)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if kind == "qwen3":
        return base_of(changed(CAUSAL, dropout=dropout, dtype=dtype))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    dropped = {"attention_dropout": dropout}
    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
        dropped = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
    config = AutoConfig.for_model(kind, vocab_size=words, tie_word_embeddings=kind == "gpt2", **sizes, **dropped)
    with seeded(7):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).train()


def causal(kind: str = "qwen3", adapter: Adapter = LORA, *, dropout: float = 0.0, eager: bool = False) -> nn.Module:
    """The same with an adapter; eager: its attention in plain steps."""
    model = causal_base(kind, dropout=dropout)
    if eager:
        model.set_attn_implementation("eager")
    return attach(model, adapter, seed=3)
