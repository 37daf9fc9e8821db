"""The counterparts of the seed's own 25 tests, on its fixture (1g), each asking for what the test's name promises."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

from andon.model.adapter import trainable_parameters
from andon.pipeline import ClassifyConfig, build_model
from andon_contracts.violation import Violation
from tests.seed.subject import (
    FIXTURE,
    FIXTURE_CONFIG,
    Subject,
    mixed_samples,
    sample,
    state,
    states,
    weights,
)

BYTES = replace(FIXTURE, vocab_size=256)
"""The fixture with room for every byte; of the 13 bytes of `test_sample_0` the seed's has room for 4 (V22)."""


def test_t01_a_coordinator_of_one_replica(subject: Subject) -> None:
    """T1: one device makes one replica."""
    with subject.coordinator(FIXTURE, FIXTURE_CONFIG, ["cpu"]) as coordinator:
        assert coordinator.num_gpus == 1


def test_t02_no_devices_are_an_error(subject: Subject) -> None:
    """T2, R9: an empty list is refused with the seed's words."""
    with pytest.raises(ValueError, match="At least one GPU index required"):
        subject.coordinator(FIXTURE, FIXTURE_CONFIG, [])


def test_t03_the_accessors_give_the_primary(subject: Subject) -> None:
    """T3, R13 to R15: with three replicas, the primary is replica 0 itself, with the configuration given."""
    with subject.replicas(3) as coordinator:
        assert coordinator.num_gpus == 3
        assert coordinator.primary_pipeline is coordinator.pipelines[0]
    with subject.coordinator(FIXTURE, FIXTURE_CONFIG, ["cpu"]) as coordinator:
        assert coordinator.primary_pipeline.config.num_classes == 2
        assert coordinator.primary_pipeline.config.lora_rank == 4


def test_t04_one_replica_trains_as_a_pipeline_does(subject: Subject) -> None:
    """T4, R17: one replica is no path of its own: the bits of a pipeline, of one replica and of three are equal."""
    pipeline = subject.pipeline(replace(BYTES, dropout=0.1), FIXTURE_CONFIG)
    options = {"model_config": replace(BYTES, dropout=0.1), "micro_batches": 8, "optimizer": None}
    with (
        subject.replicas(1, FIXTURE_CONFIG, **options) as one,
        subject.replicas(3, FIXTURE_CONFIG, **options) as three,
    ):
        for count in (5, 1, 9):
            samples = mixed_samples(count)
            results = {each.train_batch_parallel(samples) for each in (one, three)}
            assert results == {pipeline.train_batch(samples)}
        assert {state(pipeline)} == set(states(one)) == set(states(three))


@pytest.mark.parametrize("count", [1, 2])
def test_t05_nothing_to_agree_on_is_no_special_case(subject: Subject, count: int) -> None:
    """T5, R25a: with one replica the same contracts are evaluated and pass."""
    with subject.replicas(count) as coordinator:
        coordinator.train_batch_parallel(mixed_samples(3))
        assert coordinator.last_step is not None
        assert set(coordinator.last_step.digests) == {"content", "gradient", "weights", "optimizer"}


def test_t06_a_replica_that_was_moved_is_not_trained_on(subject: Subject) -> None:
    """T6, F-DP-001: A of replica 1 + 1 is found at the next step, and not repaired: it is a bug to be seen."""
    with subject.replicas(2) as coordinator:
        coordinator.train_batch_parallel(mixed_samples(4))
        view = next(iter(coordinator.pipelines[1].replica.parameters.weight_views().values()))
        view += 1.0
        with pytest.raises(Violation, match="replicas-agree"):
            coordinator.train_batch_parallel(mixed_samples(4))


def test_t07_replicas_that_train_alone_diverge(subject: Subject) -> None:
    """T7, FALSIFY-DP-001: trained on their own shards (not edited by hand), two pipelines differ after one batch."""
    first, second = (subject.pipeline(BYTES, FIXTURE_CONFIG) for _ in range(2))
    assert state(first) == state(second)
    samples = mixed_samples(8)
    first.train_batch(samples[:4])
    second.train_batch(samples[4:])
    assert state(first) != state(second)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 10])
def test_t08_no_sample_is_lost_or_duplicated(subject: Subject, workers: int) -> None:
    """T8, F-DP-002: 100 samples, each in exactly one shard, in order."""
    shards = subject.shard_samples(list(range(100)), workers)
    assert len(shards) == workers
    assert [each for shard in shards for each in shard] == list(range(100))


@pytest.mark.parametrize(
    ("count", "workers", "sizes"),
    [(10, 3, [3, 3, 4]), (2, 3, [0, 0, 2]), (7, 4, [1, 1, 1, 4]), (11, 4, [2, 2, 2, 5])],
)
def test_t09_the_last_shard_takes_the_remainder(subject: Subject, count: int, workers: int, sizes: list[int]) -> None:
    """T9, R26: `shard_samples` keeps the seed's rule and examples."""
    assert [len(shard) for shard in subject.shard_samples(list(range(count)), workers)] == sizes


def test_t10_nan_propagates_through_the_mean(subject: Subject) -> None:
    """T10, F-DP-003: NaN stays where it was, and only there."""
    mean = subject.average_gradients([[1.0, 2.0, 3.0], [math.nan, 2.0, 3.0]])
    assert math.isnan(mean[0])
    assert mean[1:] == [2.0, 3.0]


def test_t11_inf_propagates_through_the_mean(subject: Subject) -> None:
    """T11, F-DP-003: Inf stays Inf."""
    assert subject.average_gradients([[1.0, 2.0], [math.inf, 2.0]]) == [math.inf, 2.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_t12_what_is_not_finite_is_seen(subject: Subject, bad: float, place: int) -> None:
    """T12, R28: NaN, Inf and -Inf at any place, in lists and tensors."""
    values = [1.0, 2.0, 3.0]
    assert not subject.has_non_finite(values)
    values[place] = bad
    assert subject.has_non_finite(values)
    assert subject.has_non_finite(torch.tensor(values))


def test_t13_the_mean_is_the_mean(subject: Subject) -> None:
    """T13, R27: of three workers."""
    assert subject.average_gradients([[2.0, 4.0, 6.0], [4.0, 6.0, 8.0], [6.0, 8.0, 10.0]]) == [4.0, 6.0, 8.0]


def test_t14_the_mean_of_one_worker_is_its_gradient(subject: Subject) -> None:
    """T14: identity, and a copy."""
    gradient = torch.tensor([1.0, 2.0, 3.0])
    mean = subject.average_gradients([gradient])
    assert torch.equal(mean, gradient)
    assert mean.data_ptr() != gradient.data_ptr()


def test_t15_the_mean_of_no_workers_is_empty(subject: Subject) -> None:
    """T15."""
    assert subject.average_gradients([]) == []


@pytest.mark.parametrize("architecture", ["decoder", "encoder"])
def test_t16_hidden_states_are_finite(subject: Subject, architecture: str) -> None:
    """T16, F-DP-004: 5 ids give 5 finite states; see also test_v25."""
    pipeline = subject.pipeline(replace(FIXTURE, architecture=architecture), FIXTURE_CONFIG)
    hidden = pipeline.forward_hidden([1, 2, 3, 4, 5])
    assert hidden.shape == (5, 32)
    assert bool(torch.isfinite(hidden).all())


@pytest.mark.parametrize("part", ["score", "lora_A", "lora_B"])
def test_t17_the_update_covers_the_head_and_the_adapter(subject: Subject, part: str) -> None:
    """T17: after two steps head, A and B of both replicas have moved, and alike."""
    with subject.replicas(2) as coordinator:
        start = weights(coordinator.pipelines[0])
        for _ in range(2):
            coordinator.train_batch_parallel(mixed_samples(4))
        first, second = map(weights, coordinator.pipelines)
        names = [name for name in start if part in name]
        assert names
        for name in names:
            assert torch.equal(first[name], second[name])
            assert not torch.equal(first[name], start[name])


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_t18_as_many_replicas_as_devices(subject: Subject, count: int) -> None:
    """T18, R10: each with a model of its own."""
    with subject.coordinator(FIXTURE, FIXTURE_CONFIG, ["cpu"] * count) as coordinator:
        assert coordinator.num_gpus == count
        assert len({id(pipeline.model) for pipeline in coordinator.pipelines}) == count
        assert len({each.replica.parameters.weights.data_ptr() for each in coordinator.pipelines}) == count


def test_t19_all_layers_and_the_bias_are_equal_after_training(subject: Subject) -> None:
    """T19, F-DP-001: every A, B, head weight and head bias of an encoder, bit for bit, on three replicas."""
    shape = replace(FIXTURE, architecture="encoder", vocab_size=256)
    with subject.replicas(3, FIXTURE_CONFIG, model_config=shape) as coordinator:
        for count in (6, 2):
            coordinator.train_batch_parallel(mixed_samples(count))
        tensors = [weights(pipeline) for pipeline in coordinator.pipelines]
        assert len(tensors[0]) == 4 * 2 + 2
        assert any(name.endswith("bias") for name in tensors[0])
        for other in tensors[1:]:
            assert all(torch.equal(tensors[0][name], other[name]) for name in tensors[0])


def test_t20_the_trained_loss_is_that_of_one_replica(subject: Subject) -> None:
    """T20, F-DP-005: the seed's samples, trained and evaluated: equal to the bit (see test_v02 and test_v22)."""
    samples = [sample(f"test_sample_{i}", i % 2) for i in range(20)]
    losses = []
    for count in (1, 2):
        with subject.replicas(count, FIXTURE_CONFIG, model_config=BYTES) as coordinator:
            for _ in range(3):
                coordinator.train_batch_parallel(samples)
            primary = coordinator.primary_pipeline
            losses.append([primary.forward_only(each.input_ids()[:16], each.label) for each in samples])
    assert losses[0] == losses[1]


def test_t21_gradients_have_one_layout(subject: Subject) -> None:
    """T21, F-HET-001: after a backward, lengths, names and shapes agree; see test_v24 for values."""
    pipelines = [subject.pipeline(BYTES, FIXTURE_CONFIG) for _ in range(2)]
    for pipeline in pipelines:
        pipeline.accumulate_gradients(mixed_samples(3))
        gradient = pipeline.collect_lora_gradients()
        assert gradient.numel() == pipeline.num_trainable_parameters
        assert float(gradient.abs().max()) > 0.0
    assert pipelines[0].gradient_layout() == pipelines[1].gradient_layout()


@pytest.mark.parametrize(("architecture", "count"), [("decoder", 1088), ("encoder", 1090)])
def test_t21_the_number_of_trainable_parameters(subject: Subject, architecture: str, count: int) -> None:
    """T21, S19: 4 adapters of 4 * (32 + 32), and the head: 2 * 32, with 2 of bias where the library's head has one."""
    shape = replace(FIXTURE, architecture=architecture)
    pipeline = subject.pipeline(shape, FIXTURE_CONFIG)
    assert pipeline.num_trainable_parameters == count
    assert count == shape.lora_parameters(4) + 2 * 32 + (2 if architecture == "encoder" else 0)


def test_t22_the_adapter_is_small_beside_the_model() -> None:
    """T22, F-HET-002: counted in the tensors themselves; see test_v23 for peaks."""
    model = build_model(FIXTURE, FIXTURE_CONFIG, 0)
    adapter = sum(parameter.numel() for parameter in trainable_parameters(model).values())
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    assert 0 < adapter < 0.1 * frozen


def test_t23_nan_and_inf_together_are_seen(subject: Subject) -> None:
    """T23, F-DP-003: the mean of NaN and Inf is NaN, and that is detected."""
    mean = subject.average_gradients([[math.nan, 1.0], [math.inf, 2.0]])
    assert math.isnan(mean[0])
    assert subject.has_non_finite(mean)
    assert subject.has_non_finite([-math.inf])


def test_t24_no_samples_make_empty_shards(subject: Subject) -> None:
    """T24, F-DP-002: one empty shard for each worker; see test_v13."""
    assert subject.shard_samples([], 3) == [[], [], []]


def test_t25_one_sample_goes_to_one_worker(subject: Subject) -> None:
    """T25, F-DP-002: to the last, by the seed's rule."""
    assert subject.shard_samples([42], 3) == [[], [], [42]]


def test_defaults_are_the_seeds() -> None:
    """Seed 2c: the twelve defaults."""
    assert ClassifyConfig() == ClassifyConfig(
        num_classes=5,
        lora_rank=16,
        lora_alpha=16.0,
        learning_rate=1e-4,
        epochs=3,
        max_seq_len=512,
        log_interval=100,
        batch_size=32,
        accumulation_steps=1,
        gradient_clip_norm=1.0,
        class_weights=None,
        quantize_nf4=False,
    )
    assert len(fields(ClassifyConfig)) == 12
