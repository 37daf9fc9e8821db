"""Which passes are compiled depends on their shape alone, and on nothing that came before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andon.model.compiled import CompiledPasses, compile_backbone, length_step, padded_lengths, shapes_of
from andon.model.task import collate
from andon.step.plan import GlobalBatch
from tests.model.tiny import adapted


@given(st.integers(1, 600), st.integers(1, 9), st.integers(1, 600))
def test_every_padded_length_is_one_that_was_announced(longest: int, count: int, length: int) -> None:
    """Rows of any length up to the longest are padded to one of at most `count` lengths."""
    step = length_step(longest, count)
    lengths = padded_lengths(longest, step)
    assert len(lengths) <= count
    assert lengths[-1] == longest
    row = torch.ones(min(length, longest), dtype=torch.int64)
    assert collate([row], 0, step, longest)["input_ids"].shape[1] in lengths


@given(st.integers(1, 40), st.integers(1, 40))
def test_every_micro_batch_of_a_full_batch_is_compiled(batch_size: int, micro_batches: int) -> None:
    """Whoever computes it: its number of rows is one of at most two."""
    shapes = shapes_of(batch_size, micro_batches, [64])
    parts = GlobalBatch(1, 0, 0, tuple(range(batch_size))).micro_batches(micro_batches)
    assert {(len(part), 64) for part in parts if part} == shapes
    assert len(shapes) <= 2


def test_passes_of_other_shapes_and_without_gradients_run_as_they_are() -> None:
    """Only a training pass of a known shape is compiled; an evaluation of the same shape is not."""
    calls: list[str] = []

    def way(name: str) -> Any:
        return lambda *given, **named: calls.append(name)

    passes = CompiledPasses(way("eager"), way("compiled"), frozenset({(4, 8)}), graphs=False)
    passes(torch.zeros(4, 8))
    passes(input_ids=torch.zeros(4, 8))
    passes(input_ids=torch.zeros(3, 8))
    passes(inputs_embeds=torch.zeros(4, 8, 2))
    with torch.no_grad():
        passes(torch.zeros(4, 8))
    assert calls == ["compiled", "compiled", "eager", "eager", "eager"]
    assert (passes.seen, passes.eager) == ({(4, 8)}, 1)


def test_the_backbone_of_an_adapted_model_is_what_is_compiled() -> None:
    """Its forward is replaced, and a pass of another shape gives what it gave."""
    model = adapted()
    ids = torch.ones((2, 8), dtype=torch.int64)
    before = model(input_ids=ids).logits
    passes = compile_backbone(model, "kernels", {(3, 8)})
    assert torch.equal(model(input_ids=ids).logits, before)
    assert passes.eager == 1
    with pytest.raises(ValueError, match="'off' is not one of kernels, graphs"):
        compile_backbone(model, "off", {(3, 8)})
