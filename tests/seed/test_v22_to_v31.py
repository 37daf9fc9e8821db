"""V22 to V31 of the seed: tests that could not fail, and a pipeline whose adapter learns nothing."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from andon.console.problems import InputError
from andon.model.adapter import trainable_parameters
from andon.model.memory import activation_bytes, measure_peak_bytes, plan_bytes
from andon.pipeline import ClassifyPipeline, SampleEncoder, build_model
from andon.step.optimizer import OptimizerSpec
from andon_contracts.violation import Violation
from tests.seed.reference import Reference
from tests.seed.subject import (
    CONFIG,
    ENCODER,
    SGD,
    SMALL,
    Subject,
    flat,
    mixed_samples,
    rows_seen,
    sample,
    sorted_samples,
    state,
    states,
    weights,
)


@pytest.mark.parametrize(("seed", "replicas", "kind"), [(0, 2, "sgd"), (1, 3, "adamw"), (2, 4, "sgd")])
def test_v22_training_is_equivalent_and_not_only_an_untrained_forward(
    subject: Subject, seed: int, replicas: int, kind: str
) -> None:
    """V22, F-DP-005: trained with skewed, uneven shards, dropout and several seeds: the bits of one replica.

    The seed compares two untrained forward passes that are identical by construction, and allows 25 %.
    """
    samples = sorted_samples(17)
    options: dict[str, Any] = {
        "seed": seed,
        "optimizer": OptimizerSpec(kind),
        "model_config": replace(SMALL, dropout=0.2),
    }
    with subject.replicas(replicas, **options) as several, subject.replicas(1, **options) as one:
        for count in (17, 17, 3, 16, 1, 17):
            results = [each.train_batch_parallel(samples[-count:]) for each in (several, one)]
            assert results[0] == results[1]
        assert set(states(several)) == set(states(one))


def test_v22_the_equivalence_can_fail(subject: Subject) -> None:
    """V22: another seed gives another result, so that equal bits say something."""
    with subject.replicas(2, seed=0) as one, subject.replicas(2, seed=1) as other:
        assert one.train_batch_parallel(sorted_samples(8)) != other.train_batch_parallel(sorted_samples(8))


def test_v23_memory_is_measured_and_not_a_formula(subject: Subject) -> None:
    """V23, F-HET-002: the peak of live bytes of building and training is within the plan's number + 10 %.

    The model is large enough for its weights to matter; a second copy of them would break the bound.
    """
    shape = replace(SMALL, hidden_size=128, intermediate_size=256, vocab_size=4096)
    samples = mixed_samples(8)
    model = build_model(shape, CONFIG, 0)
    rows = SampleEncoder(shape, CONFIG).of_samples(samples)
    largest = activation_bytes(model, rows, rows.load(range(2), torch.device("cpu")))
    plan = plan_bytes(model, trainable_parameters(model), "adamw", 4, largest)
    measured = measure_peak_bytes(lambda: subject.pipeline(shape, CONFIG, micro_batches=4).train_batch(samples))
    assert measured.peak <= 1.1 * plan.total
    assert plan.base > 0.5 * plan.total


def test_v23_a_model_of_four_billion_weights_does_not_fit_in_eight_gigabytes() -> None:
    """V23: Qwen3-4B has 4.02e9 weights, 16.1 GB in fp32 and not 1,052 MB; its adapter of rank 16 is 0.15 % of them."""
    from transformers import Qwen3Config, Qwen3Model

    from andon.pipeline import TransformerConfig

    shape = TransformerConfig.qwen3_4b()
    config = Qwen3Config(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        vocab_size=shape.vocab_size,
    )
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Qwen3Model(config).parameters())
    assert count == 4_022_468_096
    assert 4 * count == pytest.approx(16.1e9, rel=1e-2)
    assert shape.lora_parameters(16) / count == pytest.approx(0.0015, rel=0.03)


def test_v24_the_layout_is_compared_after_a_real_backward(subject: Subject) -> None:
    """V24, F-HET-001: names, shapes, order and values of the gradient agree with float64's, no tensor being zero.

    The seed compares the lengths of two all-zero gradients of one backend.
    """
    samples = mixed_samples(5)
    pipeline = subject.pipeline(SMALL, CONFIG)
    warm(pipeline)
    reference = Reference(SMALL, CONFIG, SGD)
    with torch.no_grad():
        for name, parameter in reference.parameters.items():
            parameter.copy_(weights(pipeline)[name])
    reference.step(samples)
    pipeline.accumulate_gradients(samples)
    collected = pipeline.collect_lora_gradients()
    layout = pipeline.gradient_layout()
    assert [name for name, _ in layout] == sorted(reference.parameters)
    assert collected.numel() == pipeline.num_trainable_parameters
    for (name, shape), part in zip(
        layout, torch.split(collected, [math.prod(shape) for _, shape in layout]), strict=True
    ):
        parameter = reference.parameters[name]
        clipped = parameter.grad
        assert clipped is not None
        assert shape == tuple(parameter.shape)
        found, wanted = part.double() / len(samples), clipped.reshape(-1)
        assert float(found.norm()) > 0.0, name
        # The reference clips, which scales all of it alike.
        assert float(torch.nn.functional.cosine_similarity(found, wanted, dim=0)) > 1 - 1e-9


def warm(pipeline: ClassifyPipeline) -> None:
    """Move B away from zero, where the gradient of A vanishes."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, view in sorted(pipeline.replica.parameters.weight_views().items()):
            if "lora_B" in name:
                view.copy_(0.1 * torch.randn(view.shape, generator=generator))


def test_v25_without_the_accelerator_the_loss_is_the_same(subject: Subject, caplog: pytest.LogCaptureFixture) -> None:
    """V25, F-DP-004: replicas whose GPUs do not exist train on the CPU if asked to, which is logged, with equal loss.

    The seed calls the CPU's forward pass itself: there is nothing that could fall back.
    """
    absent = [10_007, 10_009]
    with pytest.raises(InputError, match="10007"):
        subject.coordinator(SMALL, CONFIG, absent)
    with caplog.at_level(logging.WARNING):
        fallen = subject.coordinator(SMALL, CONFIG, absent, cpu_fallback=True, optimizer=SGD, micro_batches=4)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    with subject.replicas(2) as planned:
        assert fallen.train_batch_parallel(mixed_samples(7)) == planned.train_batch_parallel(mixed_samples(7))


def test_v25_hidden_states_are_finite_and_see_the_adapter(subject: Subject) -> None:
    """V25, F-DP-004: the forward pass that is checked is the one that is trained: it changes with the adapter."""
    pipeline = subject.pipeline(SMALL, CONFIG)
    before = pipeline.forward_hidden([1, 2, 3, 4, 5])
    warm(pipeline)
    after = pipeline.forward_hidden([1, 2, 3, 4, 5])
    assert before.shape == (5, SMALL.hidden_size)
    assert bool(torch.isfinite(after).all())
    assert not torch.equal(before, after)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_v26_a_replica_that_misses_an_update_is_found_within_that_step(subject: Subject, rank: int) -> None:
    """V26, FALSIFY-DP-001: without the common update on any one of three replicas, training stops and names it."""
    with subject.replicas(3, optimizer=OptimizerSpec()) as coordinator:
        coordinator.train_batch_parallel(mixed_samples(8))
        coordinator.pipelines[rank].replica.apply = nothing  # type: ignore[method-assign]
        with pytest.raises(Violation) as caught:
            coordinator.train_batch_parallel(mixed_samples(8))
        assert (caught.value.rank, caught.value.step) == (rank, 2)


def nothing() -> None:
    """Takes the place of an update."""


@pytest.mark.parametrize("tensor", ["lora_A", "lora_B", "classifier.modules_to_save.default.weight", "default.bias"])
@pytest.mark.parametrize("rank", [1, 2])
def test_v26_every_tensor_of_every_replica_is_compared(subject: Subject, tensor: str, rank: int) -> None:
    """V26: one element, by one ulp, of A, B, head weight or head bias of replica 1 or 2 of 3 stops the next step."""
    with subject.replicas(3, model_config=ENCODER) as coordinator:
        coordinator.train_batch_parallel(mixed_samples(4))
        views = coordinator.pipelines[rank].replica.parameters.weight_views()
        name = next(each for each in views if tensor in each)
        element = views[name].view(-1)[-1:]
        element.copy_(torch.nextafter(element, torch.full_like(element, math.inf)))
        with pytest.raises(Violation) as caught:
            coordinator.train_batch_parallel(mixed_samples(4))
        assert (caught.value.clause, caught.value.rank) == ("replicas-agree", rank)
        assert caught.value.tensor == name


@pytest.mark.parametrize(("replicas", "count"), [(2, 5), (3, 10), (4, 17), (4, 3)])
def test_v27_what_replicas_train_on_partitions_the_batch(subject: Subject, replicas: int, count: int) -> None:
    """V27, F-DP-002: the rows that reach the models, counted there, are the batch: each once, in order by rank."""
    samples = mixed_samples(count)
    with subject.replicas(replicas) as coordinator:
        seen = rows_seen(coordinator)
        coordinator.train_batch_parallel(samples)
    rows = [row for part in seen for row in part]
    wanted = [tuple(each.input_ids()) for each in samples]
    assert Counter(rows) == Counter(wanted)
    assert rows == wanted


def test_v28_both_halves_of_the_adapter_learn(subject: Subject) -> None:
    """V28, C-LORA-GRAD-002, F-FREEZE-003 to 005: A and B of every layer move, the base does not.

    In the seed a fresh tensor cuts the graph behind the pooling: only the head ever moves.
    """
    pipeline = subject.pipeline(replace(SMALL, num_hidden_layers=2), CONFIG, optimizer=SGD)
    start, base = weights(pipeline), pipeline.replica.base_digest()
    for _ in range(3):
        pipeline.train_batch(mixed_samples(6))
    end = weights(pipeline)
    unmoved = [name for name in start if torch.equal(start[name], end[name])]
    assert unmoved == []
    assert sum("lora_" in name for name in start) == 2 * 2 * 2
    assert pipeline.replica.base_digest() == base


def test_v29_the_loss_of_logits_that_are_not_finite_is_no_number(subject: Subject) -> None:
    """V29, F-CLASS-005: NaN logits raise, in evaluation and in training; the seed makes 23.02585 of them."""
    pipeline = subject.pipeline(SMALL, CONFIG)
    before = state(pipeline)
    head = next(view for name, view in pipeline.replica.parameters.weight_views().items() if "score" in name)
    with torch.no_grad():
        saved = head.clone()
        head[0, 0] = math.nan
    with pytest.raises(Violation, match="logits"):
        pipeline.forward_only([1, 2, 3], 0)
    with pytest.raises(Violation, match="loss of micro-batch 0"):
        pipeline.train_batch(mixed_samples(4))
    with torch.no_grad():
        head.copy_(saved)
    assert state(pipeline) == before


@pytest.mark.parametrize("label", [2, -1, True])
def test_v30_a_label_that_is_no_class_is_refused(subject: Subject, label: Any) -> None:
    """V30, F-CLASS-002: a label outside of 0..K-1 is refused with place and value, before anything is computed."""
    pipeline = subject.pipeline(SMALL, CONFIG)
    before = state(pipeline)
    with pytest.raises(InputError, match=rf"sample 1: label {label}"):
        pipeline.train_batch([sample("ok", 0), sample("b", label)])
    assert state(pipeline) == before


def test_v30_the_bound_holds_under_optimisation() -> None:
    """V30: `python -O`, which removes assertions, does not remove the bound; the seed has a debug assertion."""
    program = (
        "from andon.pipeline import ClassifyConfig, TransformerConfig\n"
        "from andon.pipeline import SafetySample, SampleEncoder\n"
        "assert False, 'assertions are on'\n"
        "SampleEncoder(TransformerConfig.tiny(), ClassifyConfig()).of_samples([SafetySample('a', 5)])\n"
    )
    ended = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, check=False)
    assert "InputError: sample 0: label 5" in ended.stderr


@pytest.mark.parametrize("length", [2, -1])
def test_v31_a_gradient_of_another_length_is_refused(subject: Subject, length: int) -> None:
    """V31: 2 values, or one too few, are a `ValueError` with both lengths; the seed applies what there is."""
    pipeline = subject.pipeline(SMALL, CONFIG)
    before, count = state(pipeline), pipeline.num_trainable_parameters
    with pytest.raises(ValueError, match=str(count)):
        pipeline.apply_lora_gradients(torch.ones(count)[:length])
    assert state(pipeline) == before


def test_v31_a_gradient_that_is_not_finite_is_refused(subject: Subject) -> None:
    """V31: NaN in the last place raises, and weights, moments and counts are as they were."""
    pipeline = subject.pipeline(SMALL, CONFIG)
    before = state(pipeline)
    gradient = torch.zeros(pipeline.num_trainable_parameters)
    gradient[-1] = math.nan
    with pytest.raises(Violation, match="finite broken"):
        pipeline.apply_lora_gradients(gradient)
    assert state(pipeline) == before


def test_v31_a_gradient_that_is_applied_is_clipped(subject: Subject) -> None:
    """V31: the limit holds here as well; the update of SGD has the norm lr * limit."""
    pipeline = subject.pipeline(SMALL, CONFIG, optimizer=SGD)
    start = weights(pipeline)
    norm = pipeline.apply_lora_gradients(torch.ones(pipeline.num_trainable_parameters))
    assert norm == pytest.approx(math.sqrt(pipeline.num_trainable_parameters), rel=1e-6)
    moved = float((flat(weights(pipeline)) - flat(start)).norm())
    assert moved == pytest.approx(CONFIG.learning_rate * 1.0, rel=1e-4)
