"""A compiled backbone on a GPU: what the eager one computes, and the same bits however often and wherever it runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from andon.model.compiled import compile_backbone
from andon.model.forward import logits_of
from andon.step.keyed import KeyedRandomness

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICE = torch.device("cuda", 0)
ROWS, LENGTH = 6, 64


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one test compiled is not found by another, and no worker of the compiler's outlives it."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    yield
    torch._dynamo.reset()


def decoder(dropout: float) -> nn.Module:
    """Three layers of a bf16 Qwen3 shape with an adapter whose second factor is not zero."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    from andon.model.adapter import AdapterSpec, attach

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
    model = attach(base, AdapterSpec(r=8, alpha=16.0, dropout=dropout, targets=("q_proj", "v_proj")), 1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model.to(DEVICE).train()


def batch() -> dict[str, torch.Tensor]:
    """Rows of 64 down to 14 tokens."""
    ids = torch.randint(1, 100, (ROWS, LENGTH), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    for row in range(ROWS):
        mask[row, LENGTH - 10 * row :] = 0
    return {"input_ids": (ids * mask).to(DEVICE), "attention_mask": mask.to(DEVICE)}


def passed(model: nn.Module, step: int = 1) -> list[torch.Tensor]:
    """Logits and gradients of one pass, drawn from the stream of `step`."""
    model.zero_grad()
    with KeyedRandomness(7, DEVICE).micro_batch(step, 0):
        logits = logits_of(model, batch())
        logits.float().square().sum().backward()
    return [logits.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("mode", ["kernels", "graphs"])
def test_a_compiled_pass_computes_what_an_eager_one_does(mode: str) -> None:
    """Without dropout: logits and every gradient, to what bf16 products leave of them."""
    model = decoder(0.0)
    eager = passed(model)
    compile_backbone(model, mode, {(ROWS, LENGTH)})
    for found, expected in zip(passed(model), eager, strict=True):
        assert (found.float() - expected.float()).norm() <= 0.03 * expected.float().norm()


@pytest.mark.parametrize("mode", ["kernels", "graphs"])
def test_the_same_bits_again_and_with_shifted_allocations(mode: str) -> None:
    """With dropout: a step's bits belong to its stream, not to what was computed before or where memory lies."""
    model = decoder(0.1)
    compile_backbone(model, mode, {(ROWS, LENGTH)})
    first = passed(model, 1)
    for turn in range(4):
        shift = [torch.full((1 + 4099 * turn,), float("nan"), device=DEVICE) for _ in range(50)]
        other, again = passed(model, 2), passed(model, 1)
        del shift
        assert not torch.equal(other[0], first[0])
        assert all(torch.equal(one, same) for one, same in zip(first, again, strict=True))
