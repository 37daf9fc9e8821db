"""What a loss weighs by its graph, the scale of an update by that and the reduction, and the audit of random passes."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import andon
from andon_contracts.act import Scene, message
from andon_contracts.agree import Observation
from andon_contracts.laws.law import Seen
from andon_contracts.watch.checks.scale import SCALE, LossWeight, Scale, ScaleSummary, loss_parts
from tests.watch.clean_loops import loss_sum
from tests.watch.clean_models import Normed
from tests.watch.loop import CLASSES, FEATURES, data
from tests.watch.small import Dropping, answers, sgd

# a loss by its graph, held to autograd: the weight of a term is the derivative of the loss by it


def terms(count: int) -> Tensor:
    return torch.linspace(0.5, 2.0, count).requires_grad_()


def weight_of(loss: Tensor) -> LossWeight | None:
    """What it weighs; None where its graph, or a number in that, does not say."""
    parts = loss_parts(loss)
    return None if parts is None else parts.weight()


Step = Callable[[Tensor], Tensor]
STEPS: dict[str, Step] = {
    "divided by a count": lambda loss: loss / 3,
    "times a count": lambda loss: loss * 4,
    "times a number": lambda loss: 0.25 * loss,
    "divided by a tensor": lambda loss: loss / torch.tensor(7),
    "times the scale of a scaler": lambda loss: torch.tensor(1024.0) * loss,
    "cast": lambda loss: loss.double(),
    "in a list": lambda loss: loss.view(1).squeeze(0),
    "the mean of one": lambda loss: loss.mean(),
    "the sum of one": lambda loss: loss.unsqueeze(0).sum(),
    "a constant more": lambda loss: loss + 1,
    "cloned": lambda loss: loss.clone(),
}


@given(
    st.lists(st.lists(st.sampled_from(sorted(STEPS)), max_size=4), min_size=1, max_size=3),
    st.sampled_from(["sum", "mean", "stack sum", "stack mean"]),
    st.integers(2, 7),
)
def test_the_weight_of_a_loss_is_what_autograd_says(chains: list[list[str]], joined: str, count: int) -> None:
    """However means are divided, multiplied, stacked and added, a part weighs what its derivatives add up to."""
    parts = []
    leaves = [terms(count + index) for index in range(len(chains))]
    for leaf, chain in zip(leaves, chains, strict=True):
        loss = leaf.abs().mean()
        for step in chain:
            loss = STEPS[step](loss)
        parts.append(loss)
    if joined.startswith("stack"):
        together = torch.stack([part.double() for part in parts])
        loss = together.mean() if joined.endswith("mean") else together.sum()
    else:
        loss = sum(parts[1:], start=parts[0]) / (len(parts) if joined == "mean" else 1)
    found = weight_of(loss)
    assert found is not None
    expected = [abs(float(each.sum())) for each in torch.autograd.grad(loss, leaves)]
    assert found.first_part == pytest.approx(expected[0], rel=1e-5)
    alike = [each for each in expected if each == pytest.approx(expected[0], rel=1e-4)]
    assert found.equal_parts == pytest.approx(sum(alike), rel=1e-3)


LOGITS, NUMBERS = torch.linspace(-1, 1, 18).view(6, 3).requires_grad_(), torch.zeros(6, 3)
LABELS, WEIGHTS = torch.tensor([0, 1, 2, -100, 1, 0]), torch.tensor([0.5, 1.0, 4.0])
WEIGHED: dict[str, tuple[Callable[[], Tensor], tuple[float, int]]] = {
    "mean": (lambda: F.cross_entropy(LOGITS, LABELS), (1, 5)),
    "sum": (lambda: F.cross_entropy(LOGITS, LABELS, reduction="sum"), (5, 5)),
    "sum by count": (lambda: F.cross_entropy(LOGITS, LABELS, reduction="sum") / 5, (1, 5)),
    # 0.5 + 1 + 4 + 1 + 0.5, which is what the mean is divided by
    "weighed mean": (lambda: F.cross_entropy(LOGITS, LABELS, WEIGHTS), (1, 7)),
    "squares": (lambda: F.mse_loss(LOGITS, NUMBERS), (1, 18)),
    "logits": (lambda: 2 * F.binary_cross_entropy_with_logits(LOGITS, NUMBERS), (2, 18)),
    "none, then mean": (lambda: F.mse_loss(LOGITS, NUMBERS, reduction="none").mean(), (1, 18)),
    "none, halved, then mean": (lambda: (F.mse_loss(LOGITS, NUMBERS, reduction="none") / 2).mean(), (0.5, 18)),
    "under a mask, then mean": (lambda: (F.mse_loss(LOGITS, NUMBERS, reduction="none") * NUMBERS).mean(), (1, 18)),
    "halves in a stack": (lambda: (torch.stack([LOGITS.mean(), LOGITS.abs().mean()]) / 2).sum(), (0.5, 36)),
    "none, then sum": (lambda: F.mse_loss(LOGITS[:, 0], NUMBERS[:, 0], reduction="none").sum(), (6, 6)),
}


@pytest.mark.parametrize("name", WEIGHED)
def test_what_torchs_losses_weigh(name: str) -> None:
    """A mean weighs 1 and knows its terms, less those that are ignored; a sum weighs as many as it has."""
    loss, expected = WEIGHED[name]
    found = weight_of(loss())
    assert found is not None
    assert (round(found.first_part, 6), found.terms) == expected


UNKNOWN: dict[str, Step] = {
    "a sum of what was multiplied": lambda x: x.square().sum(),  # nobody knows how many terms it has
    "a sum under a mask": lambda x: (x.abs() * torch.tensor([1.0, 0, 0, 1, 1, 1])).sum() / 4,
    "a product of means": lambda x: x.mean() * x.abs().mean(),
    "a quotient of means": lambda x: x.mean() / x.abs().mean(),
    "no multiple of a mean": lambda x: x.abs().mean().exp(),
    "a factor without a value": lambda x: x.to("meta").abs().mean() * torch.ones((), device="meta"),
    "a sum over weighed classes": lambda x: F.cross_entropy(
        x.view(2, 3), torch.tensor([0, 1]), torch.tensor([1.0, 2, 3]), reduction="sum"
    ),
    "a sum of which ignored terms may be part": lambda x: F.cross_entropy(
        x.view(2, 3), torch.tensor([0, -100]), reduction="none"
    ).sum(),
    "a sum under a mask of the loss": lambda x: (
        F.binary_cross_entropy_with_logits(x, torch.zeros(6), torch.tensor([1.0, 0, 0, 1, 1, 1]), reduction="sum") / 4
    ),
    "a sum over rows of several elements": lambda x: F.mse_loss(x.view(3, 2), torch.zeros(3, 2), reduction="sum") / 3,
    "a sum whose terms are no elements": lambda x: F.multi_margin_loss(
        x.view(2, 3), torch.tensor([0, 1]), reduction="sum"
    ),
    "a quotient that is rounded": lambda x: torch.div(x.mean(), 2, rounding_mode="trunc"),
    "no finite weight": lambda x: x.mean() * math.inf,
    "no scalar": lambda x: x.abs(),
    "no graph": lambda x: x.detach().mean(),
    "nothing": lambda x: 0 * x.mean(),
}


@pytest.mark.parametrize("loss", UNKNOWN)
def test_what_a_graph_does_not_say_is_not_known(loss: str) -> None:
    assert weight_of(UNKNOWN[loss](torch.randn(6, requires_grad=True))) is None


READ: dict[str, tuple[Step, str, bool]] = {
    "a power": (lambda x: (x**2).mean() / 2, "squared", True),
    "a product with itself": (lambda x: (x * x).mean(), "squared", True),
    "of a difference": (lambda x: ((x - torch.ones(6)).square() / 2).mean(), "squared", True),
    "rows of squares": (lambda x: x.view(3, 2).square().sum(1).mean() / 2, "squared", True),
    "under a mask": (lambda x: (x.square() * torch.tensor([1.0, 0, 0, 1, 1, 1])).mean(), "squared", True),
    "a loss of torch": (lambda x: F.mse_loss(x, torch.zeros(6)) / 2, "squared", True),
    "the same, by rows": (lambda x: F.mse_loss(x, torch.zeros(6), reduction="none").mean(), "squared", True),
    "the same, summed": (lambda x: F.mse_loss(x, torch.zeros(6), reduction="sum") / 12, "squared", True),
    "a cube": (lambda x: (x**3).mean() / 2, "squared", False),
    "a product of two": (lambda x: (x * x.tanh()).mean(), "squared", False),
    "magnitudes": (lambda x: x.abs().mean() / 2, "squared", False),
    "classes": (lambda x: F.cross_entropy(x.view(2, 3), torch.tensor([0, 1])) / 2, "squared", False),
    "0.5 *": (lambda x: 0.5 * x.mean(), "deliberate", True),
    "/ 2": (lambda x: x.mean() / 2, "deliberate", False),
    "* 2.0": (lambda x: x.mean() * 2.0, "deliberate", False),
    "times a scale": (lambda x: x.mean() * torch.tensor(4.0), "deliberate", False),
}


@pytest.mark.parametrize("loss", READ)
def test_squares_and_weights_of_choice_are_known_as_such(loss: str) -> None:
    """Who weighs a loss writes 0.5; who divides by micro-batches or ranks has a whole number, as scalers have."""
    make, name, expected = READ[loss]
    found = weight_of(make(torch.randn(6, requires_grad=True)))
    assert getattr(found, name) is expected


def test_a_loss_in_a_checkpoint_is_not_computed_again() -> None:
    """Reading its graph would: what has a hook on it is left alone, and bits and memory stay as they were."""
    x, calls = torch.randn(6, requires_grad=True), list[int]()

    def inside(x: Tensor) -> Tensor:
        calls.append(1)
        return F.cross_entropy(x.view(2, 3), torch.tensor([0, 1]), reduction="sum") / 2

    for _ in range(3):
        loss = checkpoint(inside, x, use_reentrant=False)
        assert weight_of(loss) is None
        loss.backward()
    assert len(calls) == 2 * 3


def test_a_number_that_is_written_over_later_is_read_as_it_was() -> None:
    count = torch.tensor(4.0)
    logits = torch.randn(4, 3, requires_grad=True)
    parts = loss_parts(F.cross_entropy(logits, torch.zeros(4).long(), reduction="sum") / count)
    count.fill_(2.5)
    found = parts and parts.weight()
    assert (found and (found.first_part, found.deliberate)) == (pytest.approx(1.0), False)


def test_hooks_that_give_a_tensor_back_once_are_not_asked_twice() -> None:
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> int:
        kept[len(kept)] = tensor
        return len(kept) - 1

    x = torch.randn(6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, kept.pop):
        loss = F.cross_entropy(x.view(2, 3), torch.tensor([0, 1])) / 2
    found = weight_of(loss)
    # A mean weighs 1 whatever its terms, of which nothing is known then; a number of Python's has no hook.
    assert found is not None
    assert (found.first_part, found.terms) == (0.5, 0)
    loss.backward()
    assert x.grad is not None


# loops


Backward = Callable[[nn.Module, int], object]
"""The backward passes of an update, of which it is given the number."""


def trained(
    model: nn.Module,
    backward: Backward,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    clip: float | None = None,
    updates: int = 4,
) -> tuple[list[tuple[str, int, str]], list[str]]:
    """What a watch finds, and its closing lines of the scale."""
    found, said = list[tuple[str, int, str]](), io.StringIO()
    optimizer = optimizer or sgd(model, 0.01)
    with contextlib.redirect_stderr(said):
        watch = andon.watch(
            model, optimizer, action=lambda each: found.append((each.clause, each.step, each.finding.seen))
        )
        torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
        for update in range(1, updates + 1):
            backward(model, update)
            if clip is not None:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        watch.close()
    return found, [line for line in said.getvalue().splitlines() if line.startswith("  gradient scale:")]


@dataclass
class Trained:
    """A loop of `passes` backward passes an update. loss: of logits, labels, the pass and the update."""

    loss: Callable[[Tensor, Tensor, int, int], Tensor]
    passes: Callable[[int], int] = lambda update: 2
    rows: Callable[[int, int, int], int] = lambda update, number, rank: 4
    by_hand: Callable[[Tensor], object] | None = None
    clip: float | None = 0.05
    sgd: bool = False

    def run(self) -> tuple[list[tuple[str, int, str]], list[str]]:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        model = plain if self.by_hand or not dist.is_initialized() else DistributedDataParallel(plain)
        kind = torch.optim.SGD if self.sgd else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=0.01)
        return trained(model, self._backward, optimizer=optimizer, clip=self.clip, updates=6)

    def _backward(self, model: nn.Module, update: int) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        for number in range(self.passes(update)):
            x = torch.randn(self.rows(update, number, rank), 6)
            self.loss(model(x), torch.randint(3, (len(x),)), number, update).backward()
        for parameter in model.parameters() if self.by_hand else ():
            dist.all_reduce(parameter.grad)
            self.by_hand(parameter.grad)


def _mean(logits: Tensor, labels: Tensor, number: int, update: int) -> Tensor:
    return F.cross_entropy(logits, labels) / 2


def _plain(logits: Tensor, labels: Tensor, number: int, update: int) -> Tensor:
    return F.cross_entropy(logits, labels)


def _ragged(update: int, number: int, rank: int) -> int:
    return 2 + rank if update == 5 else 4


def _last_short(update: int) -> int:
    return 1 if update == 4 else 2


NOT_SEEN = "ranks averaged by their rows"


def _by_rows(gradient: Tensor) -> object:
    """Each rank's part counts as it did before the sum: no multiple of that, as where rows are counted."""
    return gradient.mul_(torch.linspace(0.5, 1.5, gradient.numel()).view_as(gradient) / dist.get_world_size())


def _sums(logits: Tensor, labels: Tensor, *_: int) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum") / (4 * 2)


def _once(loss: Callable[[Tensor, Tensor, int], Tensor]) -> Trained:
    """One pass an update, with a loss of logits, labels and the update."""
    return Trained(lambda logits, labels, _, update: loss(logits, labels, update), passes=lambda update: 1)


def right_loops() -> Mapping[str, Trained]:
    world = dist.get_world_size()
    return {
        "means, divided by their number": Trained(_mean),
        "SGD without a clip": Trained(_mean, clip=None, sgd=True),
        "halves of rows, then a mean": Trained(
            lambda logits, labels, *_: (F.cross_entropy(logits, labels, reduction="none") / 2).mean()
        ),
        "reduced and averaged by hand": Trained(_mean, by_hand=lambda gradient: gradient.div_(world)),
        "averaged by hand over ranks and passes": Trained(_plain, by_hand=lambda gradient: gradient.div_(2 * world)),
        "sums, divided by all rows": Trained(_sums),
        "short windows, divided by what they have": Trained(
            lambda logits, labels, number, update: F.cross_entropy(logits, labels) / (1 if update == 4 else 2),
            passes=_last_short,
        ),
        "ragged rows": Trained(_mean, rows=_ragged),
        NOT_SEEN: Trained(_mean, by_hand=_by_rows, rows=_ragged),
    }


def losses_of_choice() -> Mapping[str, Trained]:
    ce = F.cross_entropy
    return {
        "a loss that is weighed": _once(lambda x, y, _: 0.5 * ce(x, y)),
        "a second loss beside it": _once(lambda x, y, _: ce(x, y) + x.square().mean()),
        "half of either of two losses": _once(lambda x, y, _: (ce(x, y) + x.abs().mean()) / 2),
        "a weight that fades in": _once(lambda x, y, update: ce(x, y) * (update / 6)),
        "halves of two losses, and a third": _once(
            lambda x, y, _: (ce(x, y) + ce(x.flip(1), y)) / 2 + 0.1 * x.square().mean()
        ),
        "losses in a stack": _once(lambda x, y, _: torch.stack([ce(x, y), x.abs().mean()]).sum()),
        "half the mean square": _once(lambda x, *_: ((x - 1) ** 2).mean() / 2),
        "a loss of no known weight": Trained(lambda logits, labels, *_: logits.square().sum()),
    }


def wrong_loops() -> Mapping[str, tuple[Trained, int, float]]:
    """Each with the update at which it is found at the latest, and its scale."""
    world = dist.get_world_size()
    few = Trained(_sums, rows=lambda update, number, rank: 1 if update == 5 else 4)
    found: dict[str, tuple[Trained, int, float]] = {
        "not divided by the accumulation": (Trained(_plain), 2, 2.0),
        "the same with SGD, unclipped": (Trained(_plain, clip=None, sgd=True), 2, 2.0),
        "divided by the accumulation twice": (Trained(lambda *given: _mean(*given) / 2), 2, 0.5),
        "a short window, divided as a full one": (Trained(_mean, passes=_last_short), 4, 0.5),
        "a batch of few rows, divided as a full one": (few, 5, 0.25),
    }
    if world == 1:
        return found

    def squares(logits: Tensor, *_: object) -> Tensor:
        return F.mse_loss(logits, torch.zeros_like(logits)) / 2

    def twice(gradient: Tensor) -> object:
        return gradient.div_(world * world)

    return found | {
        "multiplied by the ranks": (Trained(lambda *given: _mean(*given) * world), 2, float(world)),
        "the ranks are added": (Trained(_mean, by_hand=lambda gradient: gradient), 2, float(world)),
        "averaged over the ranks twice": (Trained(_mean, by_hand=twice), 2, 1 / world),
        "squares, averaged over the ranks twice": (Trained(squares, by_hand=twice), 2, 1 / world),
        "as an HF Trainer does": (Trained(lambda *given: _plain(*given) * world), 2, 2.0 * world),
    }


def right_are_silent() -> dict[str, object]:
    """What is odd of right loops: a finding, or a closing line that does not say that all was seen."""
    odd = dict[str, object]()
    for name, loop in right_loops().items():
        found, lines = loop.run()
        known = lines[0].startswith("  gradient scale: that of the mean loss in 6 of 6") if lines else dist.get_rank()
        judged = any("updates, from the observed losses" in line for line in lines)
        odd[name] = found or (judged if name == NOT_SEEN else not known)
    return {name: each for name, each in odd.items() if each}


def choices_are_silent() -> dict[str, object]:
    found = {name: loop.run()[0] for name, loop in losses_of_choice().items()}
    return {name: each for name, each in found.items() if each}


def wrong_are_found() -> dict[str, object]:
    """The wrong loops whose first finding is not their scale at their update."""
    odd = dict[str, object]()
    for name, (loop, step, scale) in wrong_loops().items():
        found = loop.run()[0]
        clause, at, seen = found[0] if found else ("", 0, "")
        if (clause, at) != ("gradient-scale", step) or f"{scale:.3f} times that of the mean loss" not in seen:
            odd[name] = found
    return odd


PARTS = (right_are_silent, choices_are_silent, wrong_are_found)


# Deep: 2 and 4 ranks; other tests here have 2.
@pytest.mark.parametrize(
    "world", [1, pytest.param(2, marks=pytest.mark.deep), 3, pytest.param(4, marks=pytest.mark.deep)]
)
@pytest.mark.parametrize("part", PARTS)
def test_a_scale_that_comes_from_the_layout_is_found_and_no_other(part: Callable[[], object], world: int) -> None:
    """By the second update, or at a short window; dropout on, ragged rows, AdamW with a clip and SGD without."""
    assert answers(world, part) == [{}] * world


def _clip_by_hand(gradient: Tensor) -> object:
    """The mean over the ranks, of which each parameter is clipped by its own norm."""
    gradient.div_(dist.get_world_size())
    return gradient.mul_(0.01 / gradient.norm())


def closing() -> dict[str, list[str]]:
    loops = {
        "right": Trained(_mean),
        "halved": Trained(lambda *given: 0.5 * _mean(*given)),
        "unknown": Trained(lambda logits, labels, *_: logits.square().sum()),
        "clipped by hand": Trained(_mean, by_hand=_clip_by_hand, clip=None, sgd=True),
    }
    return {name: loop.run()[1] for name, loop in loops.items()}


def test_the_closing_lines_say_what_was_seen_of_the_scale() -> None:
    by_rank = answers(2, closing)
    assert not any(by_rank[1].values())
    lines = by_rank[0]
    seen = "from the observed losses and reductions"
    assert lines["right"] == [f"  gradient scale: that of the mean loss in 6 of 6 updates, {seen}"]
    assert lines["halved"] == [f"  gradient scale: 0.500 times that of the mean loss in 6 of 6 updates, {seen}"]
    assert lines["unknown"] == []
    changed = "  gradient scale: not comparable in 6 of 6 updates: the loop changed the gradients after backward()"
    assert lines["clipped by hand"] == [changed]


def scale(first: float, factor: float, line: int = 1) -> Scale:
    return Scale(first, first, line, 1, 0, deliberate=False, squared=False, reduction_factor=factor)


@pytest.mark.parametrize(
    ("scales", "shown"),
    [
        ([scale(1, 0.5), scale(0.3, 0.15), scale(0.4, 0.2)], "not comparable in 2 of 3 updates: the loop changed"),
        ([scale(-3, -1.5), scale(2600, 1300)], "not comparable in 2 of 2 updates: the loop changed the gradients"),
        ([scale(2, 0.5), scale(1, 0.5), scale(4, 0.5)], "1.000 to 4.000 times that of the mean loss in 3"),  # windows
        ([scale(2, 0.5), scale(2, 0.1)], "2.000 times that of the mean loss in 2 of 2"),  # by some of the rows
        ([scale(1, 0.5), scale(2, 1.0)], "1.000 to 2.000 times that of the mean loss in 2 of 2"),  # wrong from here on
        ([scale(2, 1.0, 1), scale(4, 0.5, 2)], "2.000 to 4.000 times that of the mean loss in 2 of 2"),  # two losses
    ],
)
def test_gradients_that_were_changed_are_told_from_a_wrong_division(scales: list[Scale], shown: str) -> None:
    summary = ScaleSummary()
    for each in scales:
        summary.add(each)
    assert summary.closing_line().startswith(f"  gradient scale: {shown}")


def _loss(logits: Tensor, label: int = 0) -> Tensor:
    return F.cross_entropy(logits, torch.full((4,), label))


def _linear() -> nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(6, 3)) if dist.is_initialized() else nn.Linear(6, 3)


def losses_of_their_own() -> list[tuple[str, int, str]]:
    """A loop with a line for each of its losses, as a GAN has, and one that asks for gradients in between."""

    def backward(model: nn.Module, update: int) -> None:
        x = torch.randn(4, 6)
        if update <= 4:
            _loss(model(x)).backward()
            _loss(model(-x), 1).backward()
        else:
            loss = _loss(model(x))
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            loss.backward()

    return trained(_linear(), backward, updates=8)[0]


def test_losses_that_are_added_on_purpose_are_not_taken_for_micro_batches() -> None:
    """Two lines are two losses, and a gradient that is only asked for belongs to no backward pass."""
    assert answers(2, losses_of_their_own) == [[], []]


def scaled() -> list[tuple[str, int, str]]:
    """A loop with a loss scaler, right and then not divided by its two micro-batches."""
    found = []
    for divisor in (2, 1):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

        def backward(model: nn.Module, update: int, divisor: int = divisor, scaler: Any = scaler) -> None:
            for _ in range(2):
                scaler.scale(_loss(model(torch.randn(4, 6))) / divisor).backward()

        found += trained(_linear(), backward, scaler=scaler, clip=0.1)[0]
    return found


def test_a_loss_scale_is_no_scale_of_the_gradient() -> None:
    for ((clause, step, seen),) in answers(2, scaled):
        assert (clause, step) == ("gradient-scale", 2)
        assert "2.000 times that of the mean loss" in seen


@pytest.mark.parametrize(
    ("factor", "named", "likely"),
    [
        (4.0, "accumulation 4 or world size squared 4", "the loss is not"),
        (0.5, "1 / world size 2 or 4 of 8 micro-batches", "the loss is divided"),
    ],
)
def test_a_factor_is_named_with_causes_of_its_direction(factor: float, named: str, likely: str) -> None:
    scale = Scale(factor, factor, 1, 4, 0, deliberate=False, squared=False, reduction_factor=0.5)
    found = SCALE[1].check(Seen([Observation(rank, 2, 9, "before", {}) for rank in (0, 1)], (scale, scale)))
    assert found is not None
    said = message("gradient-scale", found, Scene(2))
    assert all(part in said for part in (f"mean loss (= {named}): on each", f"\n  likely   {likely} ")), said


def test_a_window_without_a_number_says_nothing() -> None:
    found, _ = trained(nn.Linear(6, 3), lambda model, _: _loss(model(torch.full((4, 6), math.nan))).backward())
    assert {clause for clause, _, _ in found} == {"finite"}


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(6, 4), nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.heads[task](self.body(x))


def heads_in_turn() -> list[str]:
    """Four micro-batches, divided by four, of which each head has two; and a head that a hook of its own slows down."""
    found: list[str] = []
    for slowed in (False, True):
        torch.manual_seed(0)
        inner = TwoHeads()
        if slowed:
            for parameter in inner.heads.parameters():
                parameter.register_hook(lambda gradient: gradient * 0.5)

        def backward(model: nn.Module, update: int, slowed: bool = slowed) -> None:
            for number in range(4):
                task = 1 if slowed else number % 2
                (_loss(model(torch.randn(4, 6), task)) / 4).backward()

        model = DistributedDataParallel(inner, find_unused_parameters=True)
        found += [clause for clause, _, _ in trained(model, backward)[0]]
    return [clause for clause in found if clause == "gradient-scale"]


def test_what_the_parameter_that_is_looked_at_does_not_show_is_not_judged() -> None:
    assert answers(2, heads_in_turn) == [[], []]


def _fused(backward: Backward, scaler: torch.amp.GradScaler | None = None) -> list[tuple[str, int, str]]:
    model = _linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return trained(model, backward, optimizer=optimizer, scaler=scaler, updates=6)[0]


def test_a_fused_optimizer_that_divides_by_the_loss_scale_itself_is_right() -> None:
    """Its gradients are still scaled where the watch sees them: by 2, which two micro-batches would be too."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def backward(model: nn.Module, update: int) -> None:
        for _ in range(2):
            scaler.scale(_loss(model(torch.randn(4, 6))) / 2).backward()

    assert _fused(backward, scaler) == []


def test_another_loss_of_another_line_is_no_short_window() -> None:
    """Policy and value in turn: two micro-batches of one, and half of the other."""

    def backward(model: nn.Module, update: int) -> None:
        if update % 2 == 0:
            (_loss(model(torch.randn(4, 6))) / 2).backward()
        else:
            for _ in range(2):
                (_loss(model(torch.randn(4, 6))) / 2).backward()

    assert _fused(backward) == []


# a loss among the outputs of the model, which DDP passes through a graph node

OUTPUTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "alone": (lambda loss, logits: loss, lambda given: given),
    "before the logits": (lambda loss, logits: {"loss": loss, "logits": logits}, lambda given: given["loss"]),
    "after the logits": (lambda loss, logits: (logits, loss), lambda given: given[1]),
    "after what has no graph": (lambda loss, logits: (logits.argmax(-1), logits, loss), lambda given: given[2]),
    "after what is no tensor": (lambda loss, logits: (None, loss, 3 * loss), lambda given: given[1]),
}
"""What a model returns, and how the loop takes the loss from it. The last has an output more than tensors."""
NO_TENSOR = "after what is no tensor"


class Classifier(nn.Module):
    """Returns its loss among its outputs, as models of transformers do."""

    def __init__(self, returns: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.returns = returns

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.layers(x)
        return self.returns(F.cross_entropy(logits, labels), logits)


def of_outputs(options: dict[str, bool]) -> dict[str, list[float | None]]:
    """The weight of each output's loss in the first pass under DDP with these options, and in the next."""
    found: dict[str, list[float | None]] = {}
    for name, (returns, take) in OUTPUTS.items():
        model = DistributedDataParallel(Classifier(returns), **options)
        found[name] = []
        for factor in (0.5, 3.0):
            loss = factor * take(model(torch.randn(4, 6), torch.randint(3, (4,))))
            weight = weight_of(loss)
            found[name].append(weight and weight.first_part)
            loss.backward()
    return found


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_a_loss_that_ddp_hands_on_is_weighed_as_it_was(options: dict[str, bool]) -> None:
    """Whichever output it is. If an output is not a tensor, DDP's node does not say which input it was, and the weight
    is unknown: of a static graph in its first pass alone."""
    unsaid = [None if options else 0.5, None if "find_unused_parameters" in options else 3.0]
    expected = {name: unsaid if name == NO_TENSOR else [0.5, 3.0] for name in OUTPUTS}
    assert answers(2, of_outputs, options) == [expected] * 2


def prediction_beside_what_is_no_tensor() -> list[float | None]:
    model = DistributedDataParallel(Classifier(lambda loss, logits: (None, logits)), find_unused_parameters=True)
    labels = torch.zeros(4, dtype=torch.long)
    losses: list[Step] = [
        lambda logits: F.mse_loss(logits, torch.zeros(4, 3)) / 2,
        lambda logits: -logits.mean(),
        lambda logits: 3 * F.cross_entropy(logits, labels),
    ]
    found = [weight_of(loss(model(torch.randn(4, 6), labels)[1])) for loss in losses]
    return [weight and weight.first_part for weight in found]


def test_a_loss_beside_what_is_no_tensor_is_weighed_up_to_ddps_node() -> None:
    assert answers(2, prediction_beside_what_is_no_tensor)[0] == [0.5, 1.0, 3.0]


# the audit draws what the ranks drew: dropout and batch statistics hide no wrong gradient, and fake none


def dropping() -> nn.Module:
    """No module says that numbers are drawn, as in attention."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), Dropping(), nn.Linear(16, CLASSES))


def normalised() -> nn.Module:
    """Batch statistics and nothing random."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES))


Reference = Callable[[nn.Module, Sequence[int]], tuple[Tensor, int]]


def balanced(model: nn.Module, ids: Sequence[int]) -> tuple[Tensor, int]:
    """Divided by a number that depends on all rows: no sum over rows."""
    loss, count = loss_sum(model, ids)
    return loss * (1 + len(set(data()[1][ids].tolist()))), count


def _audited(model: Callable[[], nn.Module], reference: Reference, factor: float) -> tuple[list[str], int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    torch.manual_seed(100 + rank)
    said: list[str] = []
    w = andon.watch(wrapped, optimizer, reference=reference, every=2, action=lambda found: said.append(str(found)))
    x, y = data()
    for step in range(1, 4):
        optimizer.zero_grad()
        ids = torch.arange(9 + step % 2) + 7 * step
        for number, part in enumerate(ids[rank::world].tensor_split(2)):
            wrapped.require_backward_grad_sync = number == 1
            w.batch(part)
            loss = nn.functional.cross_entropy(wrapped(x[part]), y[part], reduction="sum")
            (factor * world * loss / len(ids)).backward()
        optimizer.step()
    w.close()
    return said, w.evaluations.get("gradient-law", 0)


@pytest.mark.parametrize("model", [dropping, normalised, Normed])
def test_a_right_gradient_of_random_passes_is_the_law(model: Callable[[], nn.Module]) -> None:
    """Updates 1 and 3 are audited, with the ranks' own masks and batch statistics, and nothing is found."""
    assert answers(2, _audited, model, loss_sum, 1.0) == [([], 2)] * 2


def test_a_wrong_gradient_of_random_passes_is_named_by_its_factor() -> None:
    for said, _ in answers(2, _audited, dropping, loss_sum, 2.0):
        assert "gradient-law broken at step 1" in said[0]
        assert "2.000 x the reference = world size 2" in said[0]


def test_a_loss_that_is_no_sum_over_rows_is_not_judged_by_parts() -> None:
    """With dropout on the law can only be taken part by part; where that is another law, nothing is said."""
    assert answers(2, _audited, dropping, balanced, 1.0) == [([], 0)] * 2
