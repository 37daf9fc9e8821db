"""Passes of a small decoder on a GPU, eager and compiled: `python -m tests.support.compiled_pass MODE`.

In a process of its own, since torch's compiler leaves threads and workers. Prints one JSON object: how far compiled
passes are off eager ones, and whether the same step has the same bits again.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import nn

from andon.backend.devices import demand_determinism
from andon.model.compiled import compile_backbone
from andon.model.masks import logits_of
from andon.step.micro_batch import keyed_randomness

DEVICE = torch.device("cuda", 0)
ROWS, LENGTH = 6, 64


def decoder(dropout: float) -> nn.Module:
    """Three layers of a bf16 Qwen3 shape with an adapter whose second factor is not zero."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    from andon.config.schema import Adapter
    from andon.model.adapter import attach

    config = Qwen3Config(
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        vocab_size=100,
        pad_token_id=0,
        use_cache=False,
        num_labels=3,
    )
    torch.manual_seed(3)
    base: nn.Module = Qwen3ForSequenceClassification(config).to(torch.bfloat16)
    base.config.dtype = torch.bfloat16  # type: ignore[union-attr]
    model = attach(base, Adapter(r=8, alpha=16.0, dropout=dropout, targets=("q_proj", "v_proj")), 1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model.to(DEVICE).train()


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 100, (ROWS, LENGTH), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    for row in range(ROWS):
        mask[row, LENGTH - 10 * row :] = 0
    return {"input_ids": (ids * mask).to(DEVICE), "attention_mask": mask.to(DEVICE)}


def passed(model: nn.Module, step: int = 1) -> list[torch.Tensor]:
    model.zero_grad()
    with keyed_randomness(7, step, 0, DEVICE):
        logits = logits_of(model, batch())
        logits.float().square().sum().backward()
    return [logits.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def off_eager(mode: str) -> list[float]:
    model = decoder(0.0)
    eager = passed(model)
    compile_backbone(model, mode, {(ROWS, LENGTH)})
    pairs = zip(passed(model), eager, strict=True)
    return [float((found.float() - wanted.float()).norm() / wanted.float().norm()) for found, wanted in pairs]


def new_rows_off_eager(mode: str) -> list[float]:
    """The same of the rows of two new tokens, read and written in two packs by a model with a head of its own."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from andon.config.schema import Adapter
    from andon.model.adapter import attach
    from andon.model.causal import collate_packs, loss_sum

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 100}
    torch.manual_seed(3)
    base: nn.Module = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=False, use_cache=False))
    base.config.dtype = torch.bfloat16  # type: ignore[union-attr]
    spec = Adapter(r=8, alpha=16.0, dropout=0.0, targets=("q_proj", "v_proj"))
    model = attach(base.to(torch.bfloat16), spec, 1, (100, 101)).to(DEVICE).train()
    rows = [(torch.arange(start, start + 32) % 102, torch.ones(32)) for start in (0, 75, 90)]
    packs = collate_packs([rows[:2], rows[2:]], 0, LENGTH, LENGTH)
    given = {name: value.to(DEVICE) for name, value in packs.items()}

    def learned() -> list[torch.Tensor]:
        model.zero_grad()
        with keyed_randomness(7, 1, 0, DEVICE):
            loss_sum(model, given).loss_sum.backward()  # type: ignore[no-untyped-call]
        named = sorted((name, p.grad) for name, p in model.named_parameters() if "trainable_tokens" in name)
        return [grad.clone() for _, grad in named if grad is not None]

    eager = learned()
    compile_backbone(model, mode, {(2, LENGTH)})
    return [float((one - other).norm() / other.norm()) for one, other in zip(learned(), eager, strict=True)]


def again(mode: str) -> tuple[list[bool], list[bool]]:
    """With dropout: whether step 1 has its bits after step 2 and at other places in memory, and step 2 has them too."""
    model = decoder(0.1)
    compile_backbone(model, mode, {(ROWS, LENGTH)})
    first = passed(model, 1)
    same, other = [], []
    for turn in range(4):
        shift = [torch.full((1 + 4099 * turn,), float("nan"), device=DEVICE) for _ in range(50)]
        other.append(torch.equal(passed(model, 2)[0], first[0]))
        same.append(all(torch.equal(one, two) for one, two in zip(first, passed(model, 1), strict=True)))
        del shift
    return same, other


if __name__ == "__main__":
    demand_determinism([DEVICE])
    same, other = again(sys.argv[1])
    off, rows = off_eager(sys.argv[1]), new_rows_off_eager(sys.argv[1])
    print(json.dumps({"off": off, "rows": rows, "same": same, "other": other}))
