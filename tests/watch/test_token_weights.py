"""The weights of tokens in loops, right and wrong ones, and the audit of random passes."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.act import Scene, message
from andon_contracts.agree import Observation
from andon_contracts.laws.law import Seen
from andon_contracts.watch.checks.token_weights import SCALE, Summary, UpdateWeights
from tests.watch.clean_loops import loss_sum
from tests.watch.clean_models import Normed
from tests.watch.loop import CLASSES, FEATURES, data
from tests.watch.small import Dropping, answers, sgd

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
    about = ("  gradient scale:", "  token weights:")
    return found, [line for line in said.getvalue().splitlines() if line.startswith(about)]


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

    def twice(gradient: Tensor) -> object:
        return gradient.div_(world * world)

    return found | {
        "multiplied by the ranks": (Trained(lambda *given: _mean(*given) * world), 2, float(world)),
        "the ranks are added": (Trained(_mean, by_hand=lambda gradient: gradient), 2, float(world)),
        "averaged over the ranks twice": (Trained(_mean, by_hand=twice), 2, 1 / world),
    }


def right_are_silent() -> dict[str, object]:
    """What is odd of right loops: a finding, or a closing line that does not say that all was seen."""
    odd = dict[str, object]()
    for name, loop in right_loops().items():
        found, lines = loop.run()
        known = lines[0].startswith("  gradient scale: that of the mean loss in 6 of 6") if lines else dist.get_rank()
        judged = any("mean loss in" in line for line in lines)
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
    gradient.div_(dist.get_world_size())
    return gradient.mul_(0.01 / gradient.norm())


def closing() -> dict[str, list[str]]:
    loops = {
        "right": Trained(_mean),
        "halved": Trained(lambda *given: 0.5 * _mean(*given)),
        "unknown": Trained(lambda logits, labels, *_: logits.square().sum()),
        "clipped by hand": Trained(_mean, by_hand=_clip_by_hand, clip=None, sgd=True),
        "ranks": Trained(_mean, rows=lambda update, number, rank: 4 + 4 * rank),
        "classes": Trained(lambda x, y, *_: F.cross_entropy(x, y, torch.tensor([1.0, 2, 4])) / 2, rows=lambda *_: 12),
        "nothing on rank 1": Trained(
            lambda x, y, *_: F.cross_entropy(x, y - (100 + y) * dist.get_rank(), reduction="sum")
        ),
    }
    return {name: loop.run()[1] for name, loop in loops.items()}


def test_the_closing_lines_say_what_was_seen_of_the_scale() -> None:
    by_rank = answers(2, closing)
    assert not any(by_rank[1].values())
    lines = by_rank[0]
    assert lines["right"] == ["  gradient scale: that of the mean loss in 6 of 6 updates read"]
    assert lines["halved"] == ["  gradient scale: 0.500 times that of the mean loss in 6 of 6 updates read"]
    unknown = "  token weights: could not be computed in 6 of 6 updates read: the loss is no plain cross entropy"
    assert [line.startswith(unknown) for line in lines["unknown"]] == [True]
    changed = "  gradient scale: not comparable in 6 of 6 updates read: the loop changed the gradients"
    assert lines["clipped by hand"] == [f"{changed} after backward()"]
    # Of 2 x 4 and 2 x 8 rows the mean of means weighs 24 / 16 and 24 / 32 of the mean.
    assert all(part in lines["ranks"][1] for part in ("between ranks", "weighs 0.750 on rank 1", "and 1.500 on rank 0"))
    assert "differ between labels, as class weights do" in lines["classes"][1]
    assert "rank 1 had no trained token in update 1; so it was in 6 of 6" in lines["nothing on rank 1"][-1]


class Talking(nn.Module):
    """Predicts the next word, and computes its own loss. The stop token is 3."""

    config = SimpleNamespace(eos_token_id=3)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 7)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(ids))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


@pytest.mark.parametrize("masked", [True, False])
def test_a_stop_token_that_is_never_trained_is_named(masked: bool) -> None:
    """Of 80 tokens 14 are trained, more than is kept of the logits: the rows are those of the labels."""

    def backward(model: nn.Module, update: int) -> None:
        ids = torch.randint(4, 7, (2, 40))
        ids[:, -1] = 3
        labels = ids.where(torch.arange(40) >= 33, -100)
        model(ids, labels.where(ids != 3, -100) if masked else labels)["loss"].backward()

    found, lines = trained(Talking(), backward)
    assert found == []
    assert lines[0].startswith("  gradient scale: that of the mean loss in 4 of 4 updates")
    assert lines[1:] == ["  token weights: the stop token [3] is in the batches, and was never trained"] * masked


def scale(total: float, factor: float, line: int = 1, passes: int = 1) -> UpdateWeights:
    return UpdateWeights(total, None, line, passes, 1, 8, True, False, factor, 1.0, 1.0, 8)


@pytest.mark.parametrize(
    ("scales", "shown"),
    [
        (
            [scale(1, 0.5), scale(0.3, 0.15), scale(0.4, 0.2)],
            "not comparable in 2 of 3 updates read: the loop",
        ),
        ([scale(2, 0.5), scale(1, 0.5), scale(4, 0.5)], "1.000 to 4.000 times that of the mean loss in 3"),  # windows
        ([scale(1, 0.5), scale(2, 1.0)], "1.000 to 2.000 times that of the mean loss in 2 of 2"),  # wrong from here on
        ([scale(2, 1.0, 1), scale(4, 0.5, 2)], "2.000 to 4.000 times that of the mean loss in 2 of 2"),  # two losses
    ],
)
def test_gradients_that_were_changed_are_told_from_a_wrong_division(scales: list[UpdateWeights], shown: str) -> None:
    summary = Summary()
    for each in scales:
        summary.add(each, [Observation(0, 1, 1, "before", {"weight bits": 0, "weight reason": 0, "weight tokens": 8})])
    assert summary.closing_lines([])[0].startswith(f"  gradient scale: {shown}")


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


@pytest.mark.parametrize(
    ("factor", "named", "likely"),
    [
        (4.0, "accumulation 4 or world size 2 squared", "the loss is not"),
        (0.5, "1 / world size 2 or 4 of 8 micro-batches", "the loss is divided"),
    ],
)
def test_a_factor_is_named_with_causes_of_its_direction(factor: float, named: str, likely: str) -> None:
    now = scale(factor, 0.5, passes=4)
    found = SCALE[1].check(Seen([Observation(rank, 2, 9, "before", {}) for rank in (0, 1)], (now, now, 1, True)))
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


def test_a_fused_optimizer_that_divides_by_the_loss_scale_itself_is_right() -> None:
    """Its gradients are still scaled where the watch sees them: by 2, which two micro-batches would be too."""
    scaler, model = torch.amp.GradScaler("cpu", init_scale=2.0), _linear()

    def backward(model: nn.Module, update: int) -> None:
        for _ in range(2):
            scaler.scale(_loss(model(torch.randn(4, 6))) / 2).backward()

    fused = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    assert trained(model, backward, optimizer=fused, scaler=scaler, updates=6)[0] == []


# reports of users, each rebuilt with the weight that its tokens have, and where a token is one of many


class Words(nn.Module):
    """Predicts a word for each word."""

    def __init__(self, words: int = 97) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(words, 12), nn.Linear(12, 12), nn.Linear(12, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.body(self.embed(ids))))
        return logits


class Tokens(NamedTuple):
    """The trained tokens of a micro-batch and of an update, and the number of ranks."""

    own: int
    all: int
    world: int


EQUAL, RAGGED, FOUR, THREE_AND_ONE = ((6, 6), (6, 6)), ((6, 3), (5, 2)), ((6, 3, 4, 2), (5, 2, 1, 7)), ((3, 1), (3, 1))
REPORTS: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[[Tensor, Tokens], Tensor], float]] = {
    # the sums of all ranks by all tokens, with the factor that undoes the average over the ranks
    "right": (RAGGED, lambda loss, n: loss * n.world / n.all, 1.0),
    # modelscope/ms-swift#10117: divided by all tokens, and by the accumulation again
    "accumulation again": (FOUR, lambda loss, n: loss * n.world / n.all / 4, 0.25),
    # Snowflake-AI-Research/Arctic-Platform#119: the average over the ranks is not undone
    "average kept": (RAGGED, lambda loss, n: loss / n.all, 0.5),
    # the Trainer of transformers on classes: times the ranks, and not divided by the accumulation
    "times ranks": (EQUAL, lambda loss, n: loss / n.own * n.world, 4.0),
    # verl-project/verl#5625: means of 3 tokens and of 1, weighed by their rows: 1/6 and 1/2 of a rank, and not 1/4
    "means by rows": (THREE_AND_ONE, lambda loss, n: loss / n.own / 2, 1.0),
}
"""Trained tokens by rank and micro-batch; the loss of a micro-batch by the sum of its tokens' losses; how many times
the weight of a mean its tokens have."""


def reports(kind: str, names: Sequence[str]) -> dict[str, tuple[list[tuple[str, int, str]], list[str]]]:
    """What a watch says of each, with AdamW and a clip."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for name in names:
        torch.manual_seed(0)
        model: nn.Module = Words()
        if kind == "FSDP2":
            mesh = init_device_mesh("cpu", (world,))
            for each in (model.body, model.head, model):
                fully_shard(each, mesh=mesh)  # type: ignore[arg-type]
        else:
            model = DistributedDataParallel(model)
        scaler = torch.amp.GradScaler("cpu", enabled=kind == "scaled", init_scale=1024.0)

        def backward(model: nn.Module, update: int, name: str = name, scaler: Any = scaler) -> None:
            counts, weigh, _ = REPORTS[name]
            for count in counts[rank]:
                labels = torch.randint(97, (9,)).where(torch.arange(9) < count, -100)
                total = F.cross_entropy(model(torch.randint(97, (1, 9)))[0], labels, reduction="sum")
                scaler.scale(weigh(total, Tokens(count, sum(map(sum, counts)), world))).backward()

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found[name] = trained(model, backward, optimizer=optimizer, scaler=scaler, clip=0.05)
    return found


@pytest.mark.parametrize("kind", ["DDP", "FSDP2", "scaled"])
def test_reports_of_users_are_found_with_their_factor(kind: str) -> None:
    for rank, said in enumerate(answers(2, reports, kind, list(REPORTS))):
        for name, (found, lines) in said.items():
            factor = REPORTS[name][2]
            shown = "that of the mean loss" if factor == 1 else f"{factor:.3f} times that of the mean loss"
            assert [(clause, step) for clause, step, _ in found] == [("gradient-scale", 2)] * (factor != 1), (
                name,
                found,
            )
            assert all(shown in seen for _, _, seen in found)
            assert rank or lines[0] == f"  gradient scale: {shown} in 4 of 4 updates read"
            unequal = [line for line in lines[1:] if "they differ between micro-batches" in line]
            assert rank or bool(unequal) == (name == "means by rows"), (name, lines)
            assert all("weighs 0.667 on rank" in line and "and 2.000 on rank" in line for line in unequal)


# the audit draws what the ranks drew: dropout and batch statistics hide no wrong gradient, and fake none


def dropping() -> nn.Module:
    """No module says that numbers are drawn, as in attention."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), Dropping(), nn.Linear(16, CLASSES))


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


@pytest.mark.parametrize("model", [dropping, Normed])
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
