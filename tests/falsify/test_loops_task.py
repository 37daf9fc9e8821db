"""What a loop is given, and what is seen of it from outside: rows, clipping, forward passes, live bytes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from andon_falsify import collate, dataset, loop_case, model, optimizer
from andon_falsify.claims.diagnosis import short_window
from andon_falsify.loops.clipping import only_shrunk
from andon_falsify.loops.content import Recogniser
from andon_falsify.loops.forward_passes import Weighing
from andon_falsify.loops.sightings import LoopSightings, Stranger
from andon_falsify.loops.subject import LoopSubject
from andon_falsify.loops.task import distinct, shaped
from andon_falsify.subjects.case import Rows, make_rows
from andon_falsify.subjects.meter import StorageMeter


def test_rows_become_distinct_and_keep_their_labels() -> None:
    rows = Rows(((40,), (40,), (41, 42), (40,)), (0, 1, 1, 2), 3)
    found = distinct(rows, longest=2)
    assert len(set(found.tokens)) == 4
    assert (found.tokens[0], found.tokens[2], found.labels) == ((40,), (41, 42), rows.labels)
    assert distinct(make_rows(31), 16) == make_rows(31)
    with pytest.raises(ValueError, match="cannot all be told apart"):
        distinct(Rows(((40,),) * 100, (0,) * 100, 1), longest=1)


def test_rows_are_recognised_by_content_whatever_the_padding() -> None:
    case = loop_case()
    batch = collate([dataset(case)[row] for row in (30, 2, 7)])
    knows = Recogniser(case.rows)
    assert knows.rows(batch) == [30, 2, 7]
    wider = {name: torch.nn.functional.pad(batch[name], (4, 0), value=127 * (name == "input_ids")) for name in batch}
    assert knows.rows({**wider, "labels": batch["labels"]}) == [30, 2, 7]
    assert knows.rows({"input_ids": batch["input_ids"]}) == [30, 2, 7]
    labels = torch.tensor([(case.rows.labels[30] + 1) % 3, -100, case.rows.labels[7]])
    assert knows.rows({**batch, "labels": labels}) == ["row 30 with label 0 instead of 2", None, 7]
    assert knows.rows({**batch, "input_ids": batch["input_ids"] + 1})[0].startswith("tokens [")  # type: ignore
    assert knows.rows({"x": batch["input_ids"]}) is None


def test_a_short_window_is_named_by_what_it_has_of_a_full_one() -> None:
    """Micro-batches, rows, ranks with rows, of 2 x 3 micro-batches of 2 rows; of a full window nothing."""
    case = loop_case(micro_batches=6)
    full: list[tuple[int, ...]] = [(1, 2), (3, 4), (5, 6)]
    cause = ": a short window is divided as a full one"
    windows: list[tuple[float, list[list[tuple[int, ...]]], str]] = [
        (2 / 3, [full[:2], [(7, 8), (9,)]], f"0.667 = 2 of 3 micro-batches{cause}"),
        (7 / 12, [full[:2], [(7, 8), (9,)]], f"0.583 = 7 of 12 rows{cause}"),
        (1 / 2, [full, []], f"0.500 = 3 of 6 micro-batches or 6 of 12 rows or 1 of 2 ranks with rows{cause}"),
        (5 / 6, [full, [(7, 8), (9,), ()]], f"0.833 = 5 of 6 micro-batches{cause}"),
        (1 / 2, [full, [(7, 8), (9, 10), (11, 12)]], ""),
        (1 / 3, [full[:2], [(7, 8), (9,)]], ""),
        (1.0, [full[:2], [(7, 8), (9,)]], ""),
    ]
    for ratio, visits, said in windows:
        assert short_window(ratio, visits, case) == said


def test_a_case_has_one_global_batch_on_every_place() -> None:
    for world, accumulation in ((1, 1), (1, 3), (2, 3), (3, 2), (4, 1)):
        case = shaped(loop_case(), world, accumulation)
        assert (case.world, case.accumulation) == (world, accumulation)
        assert case.local_batch * world * accumulation == 12
    with pytest.raises(ValueError, match="12 rows are not 5 ranks x 1"):
        shaped(loop_case(), 5, 1)


def test_every_call_gives_the_same_model_and_the_optimizer_of_the_case() -> None:
    case = loop_case(optimizer="sgd", momentum=0.5, lr=0.25)
    one, other = model(case), model(case)
    assert one is not other
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    stepping = optimizer(case, one.parameters())
    assert stepping.param_groups[0]["params"] == [p for p in one.parameters() if p.requires_grad]
    assert (stepping.defaults["lr"], stepping.defaults["momentum"]) == (0.25, 0.5)


def test_a_subject_that_a_rank_could_not_find_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be imported by a rank"):
        LoopSubject(lambda case: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"write package\.module:make"):
        LoopSubject("mytrainer")
    from andon_falsify.peers.plain import make

    assert LoopSubject(make).make == "andon_falsify.peers.plain:make"


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


KIB = 256
"""Elements of fp32 in 1,024 bytes."""


def test_a_storage_counts_once_while_it_lives() -> None:
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
    meter = StorageMeter()
    with meter:
        weight = torch.ones(KIB, requires_grad=True)
        loss = (weight * 2).square().sum()
        kept = meter.live
        loss.backward()  # type: ignore[no-untyped-call]
    assert 2048 < kept < 3072, "the weight, its double, the loss, and what the multiplication by 2 needs"
    del loss
    assert meter.live == 2048, "the weight and its gradient"
