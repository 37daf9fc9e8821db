"""Tiny models of transformers and peft, built in float64, for the reference to be compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from andon_falsify.reference.params import canonical, canonical_name
from andon_falsify.reference.training import Piece

ALPHA = 6
RANK = 3
CLASSES = 3


@dataclass(frozen=True)
class Subject:
    """A model to compare with, and what the reference needs to know of it."""

    model: nn.Module
    config: Mapping[str, object]

    @property
    def params(self) -> dict[str, Tensor]:
        """Its state under canonical names."""
        return canonical(self.model.state_dict())

    @property
    def trainable(self) -> list[str]:
        """Canonical names of what its adapter trains."""
        names = (canonical_name(name) for name, weight in self.model.named_parameters() if weight.requires_grad)
        return [name for name in names if name is not None]

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of its last backward pass under canonical names."""
        found = {}
        for name, weight in self.model.named_parameters():
            short = canonical_name(name)
            if weight.grad is not None and short is not None:
                found[short] = weight.grad.double()
        return found


def decoder(
    seed: int = 0, *, kv_heads: int = 2, targets: tuple[str, ...] = ("q_proj", "v_proj", "down_proj")
) -> Subject:
    """Qwen3 with grouped queries and LoRA, every trainable weight away from 0."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        intermediate_size=24,
        head_dim=6,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    config.num_labels = CLASSES
    torch.manual_seed(seed)
    return _adapted(Qwen3ForSequenceClassification(config), config.to_dict(), targets, seed)


def encoder(seed: int = 0, *, targets: tuple[str, ...] = ("query", "value", "dense")) -> Subject:
    """BERT with LoRA, every trainable weight away from 0."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=64,
        pad_token_id=0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = CLASSES
    torch.manual_seed(seed)
    return _adapted(BertForSequenceClassification(config), config.to_dict(), targets, seed)


def pieces(
    seed: int, shapes: tuple[tuple[int, int], ...], *, left: bool = False, classes: int = CLASSES
) -> list[Piece]:
    """Micro-batches of (rows, length) with ragged rows of tokens 1 to 39, padded with 0."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for rows, length in shapes:
        tokens = torch.randint(1, 40, (rows, length), generator=generator)
        sizes = torch.randint(1, length + 1, (rows, 1), generator=generator)
        places = torch.arange(length)
        attention = (places >= length - sizes) if left else (places < sizes)
        labels = torch.randint(0, classes, (rows,), generator=generator)
        found.append(Piece(tokens * attention, attention.long(), labels))
    return found


def _adapted(model: nn.Module, config: Mapping[str, object], targets: tuple[str, ...], seed: int) -> Subject:
    from peft import LoraConfig, TaskType, get_peft_model

    settings = LoraConfig(task_type=TaskType.SEQ_CLS, r=RANK, lora_alpha=ALPHA, target_modules=list(targets))
    adapted = get_peft_model(model, settings).double()
    generator = torch.Generator().manual_seed(seed + 1)
    for weight in adapted.parameters():
        # Norms start at 1 and B at 0: a reference that ignored either would look right.
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        weight.data += 0.1 * noise
    return Subject(adapted, config)
