"""The gradient is the law: d(sum of losses) / d(weights) / rows of the global batch, checked in double precision."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.nn import functional as F

from andon.backend.base import InlineBackend
from andon.config.schema import Optimizer
from andon.step.micro_batch import key
from andon.step.plan import GlobalBatch
from tests.support.faults import SteepTask
from tests.support.toy import CPU, DROPOUT, SEED, Settings, ToyModel, ToyTask, build, rate


def _masks(step: int, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.random.fork_rng(devices=[]):
        for index, rows in enumerate(sizes):
            torch.manual_seed(key(SEED, step, index))
            found.append((F.dropout(torch.ones(rows, 20), DROPOUT), F.dropout(torch.ones(rows, 9), DROPOUT)))
    return torch.cat([first for first, _ in found]).double(), torch.cat([second for _, second in found]).double()


def _law(weights: dict[str, torch.Tensor], batch: GlobalBatch, sizes: Sequence[int]) -> dict[str, torch.Tensor]:
    task = ToyTask()
    own = {name: value.double().requires_grad_(name.startswith(("first", "second"))) for name, value in weights.items()}
    first, second = _masks(batch.step, sizes)
    x, y = task.x[list(batch.ids)].double(), task.y[list(batch.ids)]
    hidden = torch.tanh(x @ own["frozen.weight"].T + own["frozen.bias"]) * first
    hidden = torch.tanh(hidden @ own["first.weight"].T + own["first.bias"]) * second
    logits = hidden @ own["second.weight"].T + own["second.bias"]
    loss = (torch.logsumexp(logits, 1) - logits[torch.arange(len(y)), y]).sum() / len(y)
    trained = [name for name, value in own.items() if value.requires_grad]
    return dict(zip(trained, torch.autograd.grad(loss, [own[name] for name in trained]), strict=True))


# 10, 7, 3 and 1 rows over 8 and over 5 micro-batches: full, ragged, and mostly empty.
LEAVES = {
    8: [(2, 2, 1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1, 1, 0), (1, 1, 1, 0, 0, 0, 0, 0), (1, 0, 0, 0, 0, 0, 0, 0)],
    5: [(2, 2, 2, 2, 2), (2, 2, 1, 1, 1), (1, 1, 1, 0, 0), (1, 0, 0, 0, 0)],
}


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("micro_batches", [8, 5])
def test_gradient_is_that_of_the_whole_batch(micro_batches: int, world: int) -> None:
    settings = Settings(micro_batches)
    step, replicas = build(InlineBackend([CPU] * world), settings)
    for batch, sizes in zip(settings.batches(), LEAVES[micro_batches], strict=True):
        weights = {name: value.detach().clone() for name, value in replicas[0].model.state_dict().items()}
        law = _law(weights, batch, sizes)
        step(batch, rate(batch.step), batch.step)
        for replica in replicas:
            ours = replica.parameters.views(replica.parameters.gradient)
            assert ours.keys() == law.keys()
            for name, exact in law.items():
                assert (ours[name] - exact).norm() <= 2e-6 * exact.norm(), name


def test_norm_is_that_before_clipping_and_clipping_happens_once() -> None:
    """V6, V7: the reported norm is the reduced gradient's own; what the optimizer gets is scaled to the limit."""
    plain, clipped = Settings(8, sizes=(10,)), Settings(8, sizes=(10,), clip_norm=0.05)
    step, (replica,) = build(InlineBackend([CPU]), plain)
    result = step(plain.batches()[0], rate(1), 1)
    raw = replica.parameters.gradient.clone()
    step, (replica,) = build(InlineBackend([CPU]), clipped)
    assert step(clipped.batches()[0], rate(1), 1).grad_norm == result.grad_norm
    assert result.grad_norm == pytest.approx(raw.double().norm().item(), rel=1e-6)
    assert result.grad_norm > 0.05
    torch.testing.assert_close(replica.parameters.gradient, raw * (0.05 / result.grad_norm), rtol=1e-4, atol=1e-9)


def test_a_limit_near_zero_is_clipped_without_a_false_alarm() -> None:
    """torch divides by norm + 1e-6, which shows at limits of that size and does not break the clause."""
    settings = Settings(8, sizes=(10,), clip_norm=1e-7)
    step, _ = build(InlineBackend([CPU] * 2), settings)
    assert step(settings.batches()[0], rate(1), 1).grad_norm > 1e-3


@pytest.mark.parametrize(("scale", "limit"), [(1e-25, 0.5), (1e21, 0.5), (1e37, 0.5), (1e38, 1e-6)])
def test_a_gradient_whose_squares_leave_fp32_is_clipped_without_a_false_alarm(scale: float, limit: float) -> None:
    plain = Settings(8, sizes=(10,))
    step, _ = build(InlineBackend([CPU]), plain)
    norm = scale * step(plain.batches()[0], rate(1), 1).grad_norm
    settings = Settings(8, sizes=(10,), clip_norm=limit)
    step, (replica,) = build(InlineBackend([CPU]), settings, SteepTask(scale))
    assert step(settings.batches()[0], rate(1), 1).grad_norm == pytest.approx(norm, rel=1e-5)
    left = float(replica.parameters.gradient.double().norm())
    assert left == pytest.approx(min(norm, limit), rel=1e-5, abs=norm * 2.0**-149)


def test_no_rows_return_zeros_and_change_nothing() -> None:
    """C-DP-002 as it is here: an empty global batch is legal, has no loss and makes no update."""
    step, replicas = build(InlineBackend([CPU] * 3), Settings(8, clip_norm=0.1))
    before = [(r.weights_digest(), r.optimizer_digest(), r.updates) for r in replicas]
    result = step(GlobalBatch(1, 0, 0, ()), rate(1), 0)
    assert (result.rows, result.loss, result.grad_norm, result.correct) == (0, 0.0, 0.0, 0)
    assert [(r.weights_digest(), r.optimizer_digest(), r.updates) for r in replicas] == before


@pytest.mark.parametrize("spec", [Optimizer(weight_decay=0.5), Optimizer(name="sgd", momentum=0.9, weight_decay=0.5)])
def test_plain_torch_reaches_the_same_weights(spec: Optimizer) -> None:
    """With biases in a group of their own, which does not decay."""
    settings = Settings(8, sizes=(10, 7), optimizer=spec, clip_norm=None)
    step, (replica,) = build(InlineBackend([CPU]), settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ToyModel()
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [each for name, each in own.items() if name.endswith(end)], "weight_decay": decay}
        for end, decay in ((".weight", 0.5), (".bias", 0.0))
    ]
    adamw = spec.name == "adamw"
    optimizer = torch.optim.AdamW(groups, lr=0.0) if adamw else torch.optim.SGD(groups, lr=0.0, momentum=0.9)
    for batch in settings.batches():
        step(batch, rate(batch.step), batch.step)
        for name, gradient in replica.parameters.views(replica.parameters.gradient).items():
            own[name].grad = gradient.clone()
        for group in optimizer.param_groups:
            group["lr"] = rate(batch.step)
        optimizer.step()
    for name, weight in replica.parameters.weight_views().items():
        torch.testing.assert_close(weight, own[name].detach(), rtol=1e-5, atol=1e-7)
