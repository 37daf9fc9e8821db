"""The jobs that GPUs are measured with: shapes of decoders, their models with random weights, and rows to train on."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import nn

from andon.model.adapter import AdapterSpec, attach
from andon.tasks.classification import ClassificationTask


@dataclass(frozen=True)
class Shape:
    """A decoder, and the rows that it trains on."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocabulary: int
    length: int
    batch: int = 32

    @property
    def products(self) -> float:
        """Floating-point operations of a step's matrix products: forward, and backward to the inputs of frozen ones."""
        width = self.heads * self.head_size
        layer = self.hidden * (2 * width + 2 * self.kv_heads * self.head_size + 3 * self.inner)
        return 4.0 * self.layers * layer * self.batch * self.length


SHAPES = {
    "reference": Shape(2560, 36, 32, 8, 128, 9728, 151_936, 256),
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151_936, 256),
    "small": Shape(256, 4, 4, 4, 64, 512, 1024, 64),
    "tiny": Shape(32, 1, 2, 2, 16, 32, 128, 16, 8),
}


def model_of(shape: Shape, device: torch.device, adapter: str = "lora") -> nn.Module:
    """The decoder of `shape` as we train it. adapter: 'lora' trains r=16 on q and v; 'none' every weight, in fp32."""
    spec = AdapterSpec(kind=adapter, r=16, alpha=32.0, dropout=0.05, targets=("q_proj", "v_proj"))
    return attach(base_of(shape, device), spec, 1).to(device)


def base_of(shape: Shape, device: torch.device) -> nn.Module:
    """The decoder of `shape` with 2 labels in bf16 on `device`, the same bits in every process."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        intermediate_size=shape.inner,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.length,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    config.num_labels = 2
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            base: nn.Module = Qwen3ForSequenceClassification(config)
    finally:
        torch.set_default_dtype(before)
    base.config.dtype = torch.bfloat16
    return base


def rows_of(shape: Shape) -> tuple[list[list[int]], list[int]]:
    """Eight global batches of random rows, all of the full length, and their labels."""
    draw = random.Random(2)
    rows = [[draw.randrange(1, shape.vocabulary) for _ in range(shape.length)] for _ in range(8 * shape.batch)]
    return rows, [draw.randrange(2) for _ in rows]


def task_of(shape: Shape) -> ClassificationTask:
    """The rows of `rows_of` as a task."""
    rows, labels = rows_of(shape)
    return ClassificationTask(rows, labels, num_labels=2, vocab_size=shape.vocabulary, pad_id=0)
