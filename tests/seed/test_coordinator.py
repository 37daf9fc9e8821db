"""The coordinator: what the seed has (R), promises of it (N), tests (T) and breaks (V)."""

from __future__ import annotations

import logging
import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from andon.config.schema import Optimizer
from andon.console.messages import InputError
from andon.coordinator import DataParallelCoordinator, resolve_devices
from andon.pipeline import ClassifyConfig, ClassifyPipeline, SafetySample
from andon_contracts.violation import Violation
from tests.seed.subject import (
    CONFIG,
    FIXTURE,
    FIXTURE_CONFIG,
    SGD,
    SMALL,
    Reference,
    distance,
    mixed_samples,
    replicas,
    sample,
    sorted_samples,
    state,
    states,
    weights,
)

ABSENT = 10_007  # a GPU that no machine has
BYTES = replace(FIXTURE, vocab_size=256)  # the seed's fixture with room for every byte
FP32 = 1e-5  # of an update of fp32 weights, relative L2: rounding of the weights themselves, over a few updates
SAMPLES = st.lists(
    st.builds(SafetySample, st.text(st.characters(max_codepoint=0x17F), min_size=1, max_size=12), st.integers(0, 1)),
    max_size=9,
)


def broken(coordinator: DataParallelCoordinator, samples: list[SafetySample]) -> tuple[object, ...]:
    """Clause, rank, step and tensor of the violation that a batch ends in."""
    with pytest.raises(Violation) as caught:
        coordinator.train_batch_parallel(samples)
    return caught.value.clause, caught.value.rank, caught.value.step, caught.value.tensor


def test_t02_no_devices_are_an_error() -> None:
    """T2, R9: an empty list is refused with the seed's words."""
    with pytest.raises(ValueError, match="At least one GPU index required"):
        DataParallelCoordinator(FIXTURE, FIXTURE_CONFIG, [])


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_t18_as_many_replicas_as_devices(count: int) -> None:
    """T1, T18, R8, R10: one replica for each device, and no two share a model or weights."""
    coordinator = DataParallelCoordinator(FIXTURE, FIXTURE_CONFIG, ["cpu"] * count)
    assert coordinator.num_gpus == count
    assert len({id(pipeline.model) for pipeline in coordinator.pipelines}) == count
    assert len({each.replica.parameters.weights.data_ptr() for each in coordinator.pipelines}) == count


def test_v15_each_replica_is_bound_to_its_device() -> None:
    """V15: weights, gradients and moments of replica i live on the device that was named for it."""
    names: list[str | int] = list(range(torch.cuda.device_count())) or ["cpu", "cpu"]
    coordinator = DataParallelCoordinator(SMALL, CONFIG, names, micro_batches=2)
    coordinator.train_batch_parallel(mixed_samples(4))
    for pipeline, device in zip(coordinator.pipelines, resolve_devices(names), strict=True):
        assert pipeline.device == device
        held = [*pipeline.model.parameters(), *pipeline.replica.optimizer_state().values()]
        assert {tensor.device for tensor in held if tensor.numel() > 1} == {device}


def test_v25_without_the_accelerator_the_loss_is_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """V25, F-DP-004: replicas whose GPUs do not exist train on the CPU if asked, which is logged, with equal loss."""
    absent = [ABSENT, ABSENT + 2]
    with pytest.raises(InputError, match="10007"):
        DataParallelCoordinator(SMALL, CONFIG, absent)
    with caplog.at_level(logging.WARNING):
        fallen = DataParallelCoordinator(SMALL, CONFIG, absent, cpu_fallback=True, optimizer=SGD, micro_batches=4)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert fallen.train_batch_parallel(mixed_samples(7)) == replicas(2).train_batch_parallel(mixed_samples(7))


def test_v16_what_cannot_be_built_is_one_kind_of_error() -> None:
    """V16: K = 1, r = 0, lr <= 0 and batch size 0 are one `ValueError`, and a model is refused unbuilt."""
    wrong = {"num_classes": 1, "lora_rank": 0, "learning_rate": 0.0, "batch_size": 0}
    with pytest.raises(InputError) as caught:
        DataParallelCoordinator(SMALL, ClassifyConfig(**wrong), ["cpu"])  # type: ignore[arg-type]
    assert {each.where for each in caught.value.problems} == wrong.keys()
    with pytest.raises(InputError, match="rope_theta"):
        DataParallelCoordinator(replace(SMALL, rope_theta=1e6), CONFIG, ["cpu"])


@pytest.mark.parametrize("absent", ["transformers", "peft"])
def test_the_extra_to_install_is_named_where_a_library_is_absent(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base install lacks both libraries. The command works in a checkout, since no package index has Andon."""
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(InputError, match=rf"{absent} is not installed; run: pip install '\.\[train\]' in a checkout"):
        DataParallelCoordinator(SMALL, CONFIG, ["cpu"])


def test_options_that_make_no_sense_are_refused_together() -> None:
    """One error names each count below one."""
    with pytest.raises(InputError) as caught:
        DataParallelCoordinator(SMALL, CONFIG, ["cpu"], 0, base_every=0)
    assert [each.where for each in caught.value.problems] == ["micro_batches", "base_every"]
    with pytest.raises(InputError, match="micro_batches"):
        ClassifyPipeline(SMALL, CONFIG, micro_batches=0)


@settings(max_examples=8)
@given(
    batches=st.lists(SAMPLES, min_size=1, max_size=3),
    world=st.integers(2, 4),
    micro_batches=st.integers(1, 6),
    weights=st.sampled_from([None, (0.25, 1.75)]),
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["adamw", "sgd"]),
)
def test_the_bits_do_not_depend_on_the_replicas(
    batches: list[list[SafetySample]],
    world: int,
    micro_batches: int,
    weights: tuple[float, float] | None,
    seed: int,
    kind: str,
) -> None:
    """V5, V22, T20, N1, N2, N6, D1 to D10: any batches (empty, ragged), G, M, seed, weights, optimizer."""
    config = replace(CONFIG, class_weights=weights)
    options = {"seed": seed, "micro_batches": micro_batches, "optimizer": Optimizer(name=kind)}
    options["model_config"] = replace(SMALL, dropout=0.2)
    one, several = (replicas(count, config, **options) for count in (1, world))
    for samples in batches:
        assert one.train_batch_parallel(samples) == several.train_batch_parallel(samples)
    assert set(states(several)) == {state(one.primary_pipeline)}
    assert one.updates == sum(bool(samples) for samples in batches)


def test_t04_one_replica_trains_as_a_pipeline_does() -> None:
    """T4, T5, R17, R25a: a pipeline, one replica and three replicas give the same bits, with the same contracts."""
    pipeline = ClassifyPipeline(replace(BYTES, dropout=0.1), FIXTURE_CONFIG)
    options = {"model_config": replace(BYTES, dropout=0.1), "micro_batches": 8, "optimizer": None}
    one, three = (replicas(count, FIXTURE_CONFIG, **options) for count in (1, 3))
    for count in (5, 1, 9):
        samples = mixed_samples(count)
        results = {each.train_batch_parallel(samples) for each in (one, three)}
        assert results == {pipeline.train_batch(samples)}
    assert {state(pipeline)} == set(states(one)) == set(states(three))
    assert set(one.last_step.digests) == {"content", "gradient", "weights", "optimizer"}


def first_alone(count: int) -> list[SafetySample]:
    return [sample("a", 0), *(sample("X" * (1 + i % 3), 1) for i in range(count - 1))]


@pytest.mark.parametrize(
    ("world", "samples", "updates"), [(2, sorted_samples(16), 4), (4, first_alone(3), 1), (4, first_alone(17), 1)]
)
def test_v01_v08_every_sample_moves_the_weights_alike(world: int, samples: list[SafetySample], updates: int) -> None:
    """V1, V3, V8, C-DP-002: whatever the shards, some of them empty, loss, norm and update are the batch's."""
    reference = Reference(SMALL, CONFIG, SGD)
    start = reference.weights()
    coordinator = replicas(world)
    for _ in range(updates):
        loss, norm = reference.step(samples)
        result = coordinator.train_batch_parallel(samples)
        for pipeline in coordinator.pipelines:
            assert distance(weights(pipeline), reference.weights(), start) < FP32
        assert result.avg_loss == pytest.approx(loss, rel=1e-6)
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        assert result.total == len(samples)


def test_v18_what_is_frozen_is_watched_where_it_lives() -> None:
    """V18, FALSIFY-LORA-001: a base weight of one replica that moves stops the next step, naming that replica."""
    coordinator = replicas(3)
    coordinator.train_batch_parallel(mixed_samples(8))
    base: Any = coordinator.pipelines[1].model.get_base_model()  # type: ignore[operator]
    with torch.no_grad():
        base.get_input_embeddings().weight[0, 0] += 1.0
    before = states(coordinator)
    assert broken(coordinator, mixed_samples(8))[:3] == ("base-frozen", 1, 2)
    assert states(coordinator) == before


@pytest.mark.parametrize("how", ["in place", "trained alone", "replaced"])
def test_v19_a_primary_that_was_changed_is_found_out(how: str) -> None:
    """V19, C-DP-001 pre: a change of the primary's weights between steps is found before any replica moves."""
    coordinator = replicas(3)
    coordinator.train_batch_parallel(sorted_samples(8))
    primary = coordinator.primary_pipeline
    parameter = next(p for n, p in sorted(primary.model.named_parameters()) if p.requires_grad)
    if how == "in place":
        parameter.data += 1.0
    elif how == "trained alone":
        primary.train_batch(sorted_samples(8))
    else:
        parameter.data = parameter.data + 1.0
    before = states(coordinator)
    assert broken(coordinator, sorted_samples(8))[:3] == ("replicas-agree", 0, 2)
    assert states(coordinator) == before


def test_v19_replicas_are_copies_of_one_model() -> None:
    """V19: what happens to the global generator, before or between, decides nothing about how replicas start."""
    torch.manual_seed(1)
    one = replicas(2)
    torch.manual_seed(2)
    other = replicas(2)
    assert set(states(one)) == set(states(other))
    assert len(set(states(one))) == 1
    assert set(states(one)).isdisjoint(states(replicas(2, seed=1)))


@pytest.mark.parametrize("bad", [sample("a", 2), sample("a", -1), sample("a", True), sample("", 0)])
def test_v20_a_bad_sample_changes_nothing(bad: Any) -> None:
    """V20, V30, F-CLASS-002: the error names place and value of every bad label or text, and changes no replica."""
    samples = mixed_samples(3)
    coordinator = replicas(2, optimizer=Optimizer())
    before = states(coordinator)
    with pytest.raises(InputError) as caught:
        coordinator.train_batch_parallel([*samples, bad])
    assert states(coordinator) == before
    assert coordinator.updates == 0
    assert [each.where for each in caught.value.problems] == ["sample 3"]
    assert ("no tokens" if not bad.input else f"label {bad.label}") in str(caught.value)
    coordinator = replicas(2, model_config=FIXTURE)
    with pytest.raises(InputError) as caught:
        coordinator.train_batch_parallel([bad, sample("!!", 0), sample("xy", 0)])
    assert [each.where for each in caught.value.problems] == ["sample 0", "sample 2"]
    assert "121" in str(caught.value), "the byte of y is outside of 100 ids"


def test_the_rate_may_be_set_for_all_replicas() -> None:
    """S20: a new rate counts from the next step on every replica; a bad one is refused."""
    samples = mixed_samples(4)
    coordinator, planned = replicas(2), replicas(2, replace(CONFIG, learning_rate=2e-2))
    coordinator.learning_rate = 2e-2
    for each in (coordinator, planned):
        each.train_batch_parallel(samples)
    assert states(coordinator) == states(planned)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="learning_rate"):
            coordinator.learning_rate = bad
    assert coordinator.learning_rate == 2e-2


def test_accumulation_steps_are_read() -> None:
    """V32: k accumulation steps compute each micro-batch in k parts, for one update with the same gradient."""
    samples = mixed_samples(8)
    parted = replace(CONFIG, accumulation_steps=2)
    whole, parts = replicas(1), replicas(1, parted)
    start = weights(whole.primary_pipeline)
    whole.train_batch_parallel(samples)
    parts.train_batch_parallel(samples)
    assert [leaf.rows for leaf in whole.last_step.leaves] == [2] * 4
    assert [leaf.rows for leaf in parts.last_step.leaves] == [1] * 8
    assert distance(weights(parts.primary_pipeline), weights(whole.primary_pipeline), start) < 1e-5
    assert parts.updates == parts.primary_pipeline.replica.updates == 1
