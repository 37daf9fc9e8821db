"""An update that is made on buffers of its own, as ranks on GPUs make it beside ranks on CPUs."""

from __future__ import annotations

import pytest
import torch

from andon.backend.inprocess import InlineBackend
from andon.step.keyed import KeyedRandomness
from andon.step.optimizer import OptimizerSpec
from andon.step.replica import Replica, restore_state, state_tensors
from andon.step.step import TrainingStep
from andon_contracts.violation import Violation
from tests.support.toy import CPU, SEED, Settings, ToyModel, ToyTask, rate, record, trainable

SETTINGS = {
    "adamw": Settings(5, clip_norm=0.05),
    "sgd": Settings(4, optimizer=OptimizerSpec("sgd", momentum=0.9)),
    "plain": Settings(3, optimizer=OptimizerSpec("sgd"), clip_norm=1e9),
}


def replica(settings: Settings, *, apart: bool) -> Replica:
    torch.manual_seed(0)
    model = ToyModel()
    randomness = KeyedRandomness(SEED, CPU)
    return Replica(model, trainable(model), settings.optimizer, randomness, CPU, CPU if apart else None)


def made(settings: Settings, masters: list[bool]) -> tuple[TrainingStep, list[Replica]]:
    replicas = [replica(settings, apart=apart) for apart in masters]
    step = TrainingStep(InlineBackend([CPU] * len(masters)), replicas, ToyTask(), 5, settings.clip_norm)
    step.attest_start({})
    return step, replicas


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("masters", [[True], [True, False], [False, True, True]])
def test_an_update_apart_has_the_bits_of_one_in_place(name: str, masters: list[bool]) -> None:
    settings = SETTINGS[name]
    step, replicas = made(settings, masters)
    plain, others = made(settings, [False] * len(masters))
    for batch in settings.batches():
        one = record(step(batch, rate(batch.step), batch.step), replicas)
        assert one == record(plain(batch, rate(batch.step), batch.step), others)
    for mine, its in zip(replicas, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.model.parameters(), its.model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_state_goes_from_a_master_apart_to_one_in_place(name: str) -> None:
    settings = SETTINGS[name]
    batches = settings.batches()
    first, (saved,) = made(settings, [True])
    for batch in batches[:2]:
        first(batch, rate(batch.step), batch.step)
    kept = {key: value.clone() for key, value in state_tensors(saved).items()}
    ended = []
    for apart in (True, False):
        fresh = replica(settings, apart=apart)
        restore_state(fresh, kept, 2)
        step = TrainingStep(InlineBackend([CPU]), [fresh], ToyTask(), 5, settings.clip_norm)
        step.attest_start({})
        ended.append([record(step(batch, rate(batch.step), batch.step), [fresh]) for batch in batches[2:]])
    assert ended[0] == ended[1]


def test_a_flip_in_the_weights_of_a_model_is_found_though_its_master_is_right() -> None:
    settings = SETTINGS["adamw"]
    step, replicas = made(settings, [True, False])
    batches = settings.batches()
    step(batches[0], rate(1), 1)
    replicas[0].parameters.weights.data.view(torch.int32)[7] ^= 1 << 10
    with pytest.raises(Violation, match="rank 0"):
        step(batches[1], rate(2), 2)


def test_an_update_that_the_model_is_not_given_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SETTINGS["plain"]
    step, replicas = made(settings, [False, True])
    monkeypatch.setattr(type(replicas[1].master), "give", lambda self, parameters: None)
    with pytest.raises(Violation, match="weights"):
        step(settings.batches()[0], rate(1), 1)
