"""One model with its optimizer: what it refuses, how much it holds, how it is put back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from andon.backend.inprocess import InlineBackend
from andon.step.keyed import KeyedRandomness
from andon.step.optimizer import OptimizerSpec
from andon.step.replica import Replica
from andon.step.step import TrainingStep
from tests.support.toy import CPU, Settings, ToyModel, ToyTask, build, rate, replica, run, trainable


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)])
def test_running_statistics_are_refused(norm: nn.Module) -> None:
    """F11: statistics of the micro-batches that a rank happened to see differ by rank and by world size."""
    model = nn.Sequential(nn.Linear(4, 4), norm)
    with pytest.raises(ValueError, match="1 keeps running statistics"):
        Replica(model, trainable(model), OptimizerSpec(), KeyedRandomness(1, CPU), CPU)


def test_a_weight_that_is_neither_trained_nor_frozen_is_refused() -> None:
    """Its gradient would pile up for ever and never be applied."""
    model = ToyModel()
    some = {name: p for name, p in trainable(model).items() if name != "second.bias"}
    with pytest.raises(ValueError, match=r"second\.bias requires a gradient"):
        Replica(model, some, OptimizerSpec(), KeyedRandomness(1, CPU), CPU)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="'adam'; there are adamw and sgd"):
        replica(optimizer=OptimizerSpec("adam"))


def test_replicas_of_another_number_than_the_backend_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="1 replicas for 2 local ranks"):
        TrainingStep(InlineBackend([CPU] * 2), [replica()], ToyTask(), 8, None)


@pytest.mark.parametrize("spec", [OptimizerSpec(), OptimizerSpec("sgd", momentum=0.9)])
def test_a_restored_replica_goes_on_with_the_same_bits(spec: OptimizerSpec) -> None:
    settings = Settings(8, optimizer=spec, clip_norm=0.2)
    whole = run(InlineBackend([CPU]), settings)
    batches = settings.batches()
    step, (first,) = build(InlineBackend([CPU]), settings)
    for batch in batches[:2]:
        step(batch, rate(batch.step), batch.step)
    step, (second,) = build(InlineBackend([CPU]), settings)
    second.restore(first.parameters.weights.detach(), first.optimizer_state(), first.updates)
    step.attest_start({})
    for batch in batches[2:]:
        result = step(batch, rate(batch.step), batch.step)
    assert dict(result.digests) == whole[-1]["digests"]
    assert second.updates == 4


def test_layout_digest_sees_name_shape_and_order() -> None:
    def digest(*named: tuple[str, int]) -> int:
        model = nn.ParameterDict({name: nn.Parameter(torch.zeros(size)) for name, size in named})
        parameters = {name: model[name] for name, _ in named}
        return Replica(model, parameters, OptimizerSpec(), KeyedRandomness(1, CPU), CPU).layout_digest()

    plain = digest(("a", 3), ("b", 5))
    assert plain == digest(("a", 3), ("b", 5))
    assert len({plain, digest(("c", 3), ("b", 5)), digest(("a", 4), ("b", 5)), digest(("b", 5), ("a", 3))}) == 4


def test_base_digest_covers_buffers_and_every_frozen_weight() -> None:
    """F68: a changed frozen weight or buffer shows, a changed trainable one does not."""
    model = ToyModel()
    model.register_buffer("table", torch.ones(3))
    one = Replica(model, trainable(model), OptimizerSpec(), KeyedRandomness(1, CPU), CPU)
    seen = [one.base_digest()]
    one.parameters.weights.data += 1.0
    assert one.base_digest() == seen[0]
    for tensor in (model.frozen.weight.data, model.table):
        assert isinstance(tensor, torch.Tensor)
        tensor[0] += 1.0
        seen.append(one.base_digest())
    assert len(set(seen)) == 3
