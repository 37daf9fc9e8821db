"""A replica: flat buffers, refused models, restored state, and separate master weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from andon.backend.base import InlineBackend
from andon.config.schema import Optimizer
from andon.step.flat import FlatParameters
from andon.step.replica import Replica, restore_state, state_tensors
from andon.step.step import TrainingStep
from andon_contracts.violation import Violation
from tests.support.toy import CPU, SEED, Settings, ToyModel, ToyTask, build, rate, record, replica, run, trainable


class ScaleNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))


def test_norms_biases_and_vectors_come_last_and_do_not_decay() -> None:
    """Also a norm's weight and a bias of two dimensions; a model without any of them is one range, in its own order."""
    model = nn.ModuleDict({"norm": ScaleNorm(), "linear": nn.Linear(3, 2), "second": nn.Linear(3, 1, bias=False)})
    model.register_parameter("expert_bias", nn.Parameter(torch.ones(2, 3)))
    held = of_model(model)
    decayed = ["linear.weight", "second.weight"]
    assert [slot.name for slot in held.parameters.slots] == [*decayed, "expert_bias", "norm.weight", "linear.bias"]
    before = {name: view.clone() for name, view in held.parameters.weight_views().items()}
    held.set_rate(1.0)  # with a gradient of zero AdamW decays by lr * 0.01 and does nothing else
    held.apply()
    for name, view in held.parameters.weight_views().items():
        torch.testing.assert_close(view, before[name] * (0.99 if name in decayed else 1.0), rtol=1e-6, atol=0)
    plain = of_model(nn.ModuleDict({"b": nn.Linear(3, 2, bias=False), "a": nn.Linear(3, 2, bias=False)}))
    assert [slot.name for slot in plain.parameters.slots] == ["b.weight", "a.weight"]
    assert len(plain.optimizer.param_groups) == 1


@pytest.mark.parametrize("spec", [Optimizer(name="adamw", weight_decay=0.1), Optimizer(name="sgd", momentum=0.9)])
def test_gaps_stay_zero(spec: Optimizer) -> None:
    """After updates with decay, momentum and clipping, what lies between the tensors is 0.0, or digests would drift."""
    step, (replica,) = build(InlineBackend([CPU]), Settings(8, optimizer=spec, clip_norm=0.1))
    for batch in Settings(8).batches():
        step(batch, rate(batch.step), batch.step)
    flat = replica.parameters
    gap = torch.ones(flat.size, dtype=torch.bool)
    for slot in flat.slots:
        gap[slot.start : slot.end] = False
    assert gap.any()
    states = [s for s in replica.optimizer_state().values() if s.numel() == flat.size]
    for tensor in [flat.weights, flat.gradient, *states]:
        assert not tensor[gap].view(torch.int32).any()
        assert tensor[~gap].any()


# The model with its optimizer.


def of_model(model: nn.Module, but: str = "") -> Replica:
    some = {name: parameter for name, parameter in trainable(model).items() if name != but}
    return Replica(model, some, Optimizer(), 1, CPU)


HALF = {"half": nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))}
STATISTICS = nn.InstanceNorm1d(4, track_running_stats=True)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        # F44: small updates to bf16 weights are rounded away.
        (lambda: FlatParameters(HALF, CPU), r"half is torch\.bfloat16"),
        (lambda: FlatParameters({}, CPU), "no trainable parameters"),
        # F11: statistics of the micro-batches that a rank happened to see differ by rank and by world size.
        (lambda: of_model(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), "1 keeps running statistics"),
        (lambda: of_model(nn.Sequential(STATISTICS, nn.Linear(4, 4))), "0 keeps running statistics"),
        # Its gradient would pile up for ever and never be applied.
        (lambda: of_model(ToyModel(), but="second.bias"), r"second\.bias requires a gradient"),
        (
            lambda: TrainingStep(InlineBackend([CPU] * 2), [replica()], ToyTask(), 8, None),
            "1 replicas for 2 local ranks",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(work: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        work()


@pytest.mark.parametrize("spec", [Optimizer(), Optimizer(name="sgd", momentum=0.9)])
def test_a_restored_replica_goes_on_with_the_same_bits(spec: Optimizer) -> None:
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
        return Replica(model, parameters, Optimizer(), 1, CPU).layout_digest()

    plain = digest(("a", 3), ("b", 5))
    assert plain == digest(("a", 3), ("b", 5))
    assert len({plain, digest(("c", 3), ("b", 5)), digest(("a", 4), ("b", 5)), digest(("b", 5), ("a", 3))}) == 4


def test_base_digest_covers_buffers_and_every_frozen_weight() -> None:
    """F68: a changed frozen weight or buffer shows, a changed trainable one does not."""
    model = ToyModel()
    model.register_buffer("table", torch.ones(3))
    one = Replica(model, trainable(model), Optimizer(), 1, CPU)
    seen = [one.base_digest()]
    one.parameters.weights.data += 1.0
    assert one.base_digest() == seen[0]
    for tensor in (model.frozen.weight.data, model.table):
        assert isinstance(tensor, torch.Tensor)
        tensor[0] += 1.0
        seen.append(one.base_digest())
    assert len(set(seen)) == 3


# Separate master weights, as GPU ranks have them in a group with CPU ranks.

PLACED = {
    "adamw": Settings(5, clip_norm=0.05),
    "sgd": Settings(4, optimizer=Optimizer(name="sgd", momentum=0.9)),
    "plain": Settings(3, optimizer=Optimizer(name="sgd"), clip_norm=1e9),
}


def placed(settings: Settings, *, separate: bool) -> Replica:
    torch.manual_seed(0)
    model = ToyModel()
    return Replica(model, trainable(model), settings.optimizer, SEED, CPU, CPU if separate else None)


def made(settings: Settings, masters: list[bool]) -> tuple[TrainingStep, list[Replica]]:
    replicas = [placed(settings, separate=separate) for separate in masters]
    step = TrainingStep(InlineBackend([CPU] * len(masters)), replicas, ToyTask(), 5, settings.clip_norm)
    step.attest_start({})
    return step, replicas


@pytest.mark.parametrize("name", PLACED)
@pytest.mark.parametrize("masters", [[True], [True, False], [False, True, True]])
def test_an_update_apart_has_the_bits_of_one_in_place(name: str, masters: list[bool]) -> None:
    settings = PLACED[name]
    step, replicas = made(settings, masters)
    plain, others = made(settings, [False] * len(masters))
    for batch in settings.batches():
        one = record(step(batch, rate(batch.step), batch.step), replicas)
        assert one == record(plain(batch, rate(batch.step), batch.step), others)
    for mine, its in zip(replicas, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.model.parameters(), its.model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_state_goes_from_a_master_apart_to_one_in_place(name: str) -> None:
    settings = PLACED[name]
    batches = settings.batches()
    first, (saved,) = made(settings, [True])
    for batch in batches[:2]:
        first(batch, rate(batch.step), batch.step)
    kept = {key: value.clone() for key, value in state_tensors(saved).items()}
    ended = []
    for separate in (True, False):
        fresh = placed(settings, separate=separate)
        restore_state(fresh, kept, 2)
        step = TrainingStep(InlineBackend([CPU]), [fresh], ToyTask(), 5, settings.clip_norm)
        step.attest_start({})
        ended.append([record(step(batch, rate(batch.step), batch.step), [fresh]) for batch in batches[2:]])
    assert ended[0] == ended[1]


def test_a_flip_in_the_weights_of_a_model_is_found_though_its_master_is_right() -> None:
    settings = PLACED["adamw"]
    step, replicas = made(settings, [True, False])
    batches = settings.batches()
    step(batches[0], rate(1), 1)
    replicas[0].parameters.weights.data.view(torch.int32)[7] ^= 1 << 10
    with pytest.raises(Violation, match="rank 0"):
        step(batches[1], rate(2), 2)


def test_an_update_that_the_model_is_not_given_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = PLACED["plain"]
    step, replicas = made(settings, [False, True])
    monkeypatch.setattr(type(replicas[1].master), "push_weights", lambda self, parameters: None)
    with pytest.raises(Violation, match="weights"):
        step(settings.batches()[0], rate(1), 1)
