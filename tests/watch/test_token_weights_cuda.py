"""The weights of tokens with everything on a GPU, where nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import andon
from tests.support.ranks import run_ranks
from tests.watch.test_token_weights import PARTS

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(400)]


def on_gpu(part: Callable[[], dict[str, object]]) -> dict[str, object]:
    """The loops of a part, with the one GPU that all ranks share as the device of whatever names none."""
    with torch.device("cuda", 0):
        return part()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("part", PARTS)
def test_a_scale_is_found_on_a_gpu_as_on_a_cpu(part: Callable[[], dict[str, object]], world: int) -> None:
    """The same loops, at the same updates, and no other."""
    assert [outcome.get() for outcome in run_ranks(world, on_gpu, part, deadline_s=300.0)] == [{}] * world


def test_rows_are_read_without_a_wait() -> None:
    """The hooks of a forward and a backward pass leave everything on the device, with more rows than are kept."""
    model, labels = nn.Linear(6, 97).cuda(), torch.randint(97, (4, 40), device="cuda")
    x = torch.randn(4, 40, 6, device="cuda")
    with andon.watch(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        torch.cuda.set_sync_debug_mode("error")
        try:
            F.cross_entropy(model(x).flatten(0, 1), labels.flatten()).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("divisor", [1, 2])
def test_a_loss_scale_on_a_gpu_is_no_scale_of_the_gradient(fused: bool, divisor: int) -> None:
    """A scaler multiplies by a number on the device, and a fused optimizer divides by it in its own launch."""
    torch.manual_seed(0)
    model, found = nn.Linear(6, 3).cuda(), list[tuple[str, int]]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0)
    with andon.watch(model, optimizer, action=lambda each: found.append((each.clause, each.step))):
        for _ in range(6):
            for _ in range(2):
                with torch.autocast("cuda", torch.float16):
                    logits = model(torch.randn(4, 6, device="cuda"))
                    loss = F.cross_entropy(logits, torch.randint(3, (4,), device="cuda")) / divisor
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert found[:1] == ([("gradient-scale", 2)] if divisor == 1 else [])
