"""The suite's own count of live tensor bytes."""

from __future__ import annotations

import torch

from andon_falsify.subjects.meter import StorageMeter

KIB = 256
"""Elements of fp32 in 1,024 bytes."""


def test_a_storage_counts_once_while_it_lives() -> None:
    """Views share their storage; a result counts from its making to its end, a weight before anyone reads it."""
    meter = StorageMeter()
    with meter:
        first = torch.ones(KIB)
        view = first.view(2, -1)[0]
        second = first + 1
        assert meter.live == 2048
        del first
        assert meter.live == 2048, "the view keeps it alive"
        del view
        assert meter.live == 1024
        del second
    assert (meter.live, meter.peak) == (0, 2048)
    weight = torch.zeros(KIB)
    meter.adopt([weight, weight.view(-1), torch.empty(4, device="meta")])
    assert meter.live == 1024


def test_what_autograd_keeps_is_alive() -> None:
    """The input of a square is held for its backward pass, and let go after it."""
    meter = StorageMeter()
    with meter:
        weight = torch.ones(KIB, requires_grad=True)
        loss = (weight * 2).square().sum()
        kept = meter.live
        loss.backward()  # type: ignore[no-untyped-call]
    assert 2048 < kept < 3072, "the weight, its double, the loss, and what the multiplication by 2 needs"
    del loss
    assert meter.live == 2048, "the weight and its gradient"
