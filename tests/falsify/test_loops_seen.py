"""What is seen of a loop from outside: what clipping left, and which rows of a forward pass counted for something."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from andon_falsify.loops.clipping import only_shrunk
from andon_falsify.loops.forward_passes import Weighing
from andon_falsify.loops.sightings import LoopSightings, Stranger


def test_what_clipping_leaves_has_shrunk_and_nothing_else() -> None:
    """Groups by factors of their own, elements by a limit; what grew, was turned round or is new was not clipped."""
    held = {"a": torch.tensor([3.0, -4.0, 0.0]), "b": torch.tensor([2.0])}
    assert only_shrunk({"a": held["a"] * 0.1, "b": held["b"] * 0.9}, held)
    assert only_shrunk({"a": held["a"].clamp(-3.5, 3.5), "b": held["b"]}, held)
    for other in ([3.0, -4.1, 0.0], [3.0, 4.0, 0.0], [3.0, -4.0, 1e-9]):
        assert not only_shrunk({**held, "a": torch.tensor(other)}, held)
    assert not only_shrunk(held, {"a": held["a"]})
    overflown = {"a": torch.tensor([torch.inf, 1.0, 1.0]), "b": held["b"]}
    assert only_shrunk({"a": torch.tensor([torch.nan, 0.0, 0.0]), "b": held["b"] * 0}, overflown)


def test_a_row_without_a_gradient_counts_where_its_class_is_certain() -> None:
    """Of a row with a loss, one times 0, a certain one and one of no data set times 0, the first and third count."""
    seen = LoopSightings((1,))
    seen.of(1, 1).leaves = [(7, 8, 9)]
    seen.strangers = [Stranger(1, 1, "tokens [5]")]
    weighing = Weighing(seen, 1)
    weighing.called(1, 0, [7, 8, 9, None, "tokens [5]"])
    scores = torch.tensor([[1.0, 2.0], [1.0, 2.0], [200.0, 0.0], [1.0, 2.0], [1.0, 2.0]], requires_grad=True) * 1
    weighing.gave(scores)
    losses = cross_entropy(scores, torch.zeros(5, dtype=torch.int64), reduction="none")
    (losses @ torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0])).backward()  # type: ignore[no-untyped-call]
    assert float(losses[2].detach()) == 0
    weighing.settle()
    assert seen.of(1, 1).leaves == [(7, 9)]
    assert (seen.weightless, seen.strangers) == ([8], [])


def test_a_second_backward_pass_may_give_a_row_its_weight() -> None:
    """What counts in one of two backward passes counts."""
    seen = LoopSightings((0,))
    seen.of(0, 1).leaves = [(3, 4)]
    weighing = Weighing(seen, 0)
    weighing.called(1, 0, [3, 4])
    scores = torch.ones(2, 2, requires_grad=True) * 1
    weighing.gave((scores, "other things"))
    for times in ([1.0, 0.0], [0.0, 1.0]):
        (scores.sum(1) @ torch.tensor(times)).backward(retain_graph=True)  # type: ignore[no-untyped-call]
    weighing.settle()
    assert seen.of(0, 1).leaves == [(3, 4)]


def test_a_forward_pass_that_nothing_is_known_of_is_a_visit() -> None:
    """No backward pass, half precision, another number of rows, a number for each row, no tensor: the rows stay."""
    seen = LoopSightings((0,))
    weighing = Weighing(seen, 0)
    outputs = (torch.ones(1, 2), torch.ones(1, 2, dtype=torch.float16), torch.ones(2, 2), torch.ones(1))
    for place, output in enumerate(outputs):
        seen.of(0, 1).leaves.append((place,))
        weighing.called(1, place, [place])
        given = output.requires_grad_() * 1
        weighing.gave(given)
        if place:
            (given * 0).sum().backward()  # type: ignore[no-untyped-call]
    seen.of(0, 1).leaves.append((4,))
    weighing.called(1, 4, [4])
    weighing.gave("no tensor")
    weighing.settle()
    assert seen.of(0, 1).leaves == [(place,) for place in range(5)]
