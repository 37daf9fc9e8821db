"""The pipeline: gradient half and step half apart, samples, results, configuration."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from andon.console.problems import InputError
from andon.pipeline import BatchResult, ClassifyConfig, ClassifyPipeline, SafetySample, TransformerConfig
from andon.step.optimizer import OptimizerSpec
from andon_contracts.violation import Violation
from tests.seed.reference import Reference
from tests.seed.subject import (
    CONFIG,
    SGD,
    SMALL,
    Subject,
    distance,
    flat,
    mixed_samples,
    rows_seen,
    sample,
    state,
    states,
    weights,
)
from tests.support.faults import FAULTS

DROPPING = replace(SMALL, dropout=0.3)


@pytest.fixture
def pipeline() -> ClassifyPipeline:
    """A small pipeline with 4 micro-batches."""
    return ClassifyPipeline(SMALL, CONFIG, micro_batches=4, optimizer=SGD)


def test_the_two_halves_are_a_batch(pipeline: ClassifyPipeline) -> None:
    """S14, S15: accumulate and apply leave the bits of train_batch, and the gradient half alone changes nothing."""
    other = ClassifyPipeline(SMALL, CONFIG, micro_batches=4, optimizer=SGD)
    samples = mixed_samples(7)
    before = state(pipeline)
    result = pipeline.accumulate_gradients(samples)
    assert state(pipeline) == before
    assert result.grad_norm == 0.0
    norm = pipeline.apply_accumulated_gradients(7)
    assert other.train_batch(samples) == replace(result, grad_norm=norm)
    assert state(other) == state(pipeline) != before


@pytest.mark.parametrize("fault", ["rate doubled", "clipped twice", "not clipped"])
def test_an_update_is_held_to_the_laws_of_the_step(pipeline: ClassifyPipeline, fault: str) -> None:
    """Another rate than the pipeline's, or a clipping too many or too few, raises before anything is changed."""
    FAULTS[fault].plant(pipeline.replica)
    before = state(pipeline)
    with pytest.raises(Violation) as caught:
        pipeline.apply_lora_gradients(torch.ones(pipeline.num_trainable_parameters))
    assert caught.value.clause == FAULTS[fault].clause
    assert state(pipeline) == before


def test_a_gradient_that_was_given_is_not_said_to_come_of_finite_parts(pipeline: ClassifyPipeline) -> None:
    """Nobody looked at its parts; of one that was accumulated each was looked at."""
    with pytest.raises(Violation, match=r"finite broken at step 1 .* its norm \(nan\) is not finite$"):
        pipeline.apply_lora_gradients(torch.full((pipeline.num_trainable_parameters,), math.nan))
    pipeline.accumulate_gradients(mixed_samples(7))
    assert pipeline._sum is not None
    pipeline._sum[0] = math.inf
    with pytest.raises(Violation, match=r"is not finite although every part was$"):
        pipeline.apply_accumulated_gradients(7)


def test_gradients_accumulate_over_calls(pipeline: ClassifyPipeline) -> None:
    """F-BATCH-001: two calls and one update are the update of the batch, as float64 takes it; one optimizer step."""
    samples = mixed_samples(9)
    reference = Reference(SMALL, CONFIG, SGD)
    start = reference.weights()
    reference.step(samples)
    pipeline.accumulate_gradients(samples[:2])
    pipeline.accumulate_gradients(samples[2:])
    pipeline.apply_accumulated_gradients(9)
    assert distance(weights(pipeline), reference.weights(), start) < 1e-5
    assert pipeline.replica.updates == 1
    assert float(pipeline.collect_lora_gradients().abs().max()) == 0.0


def test_each_accumulation_draws_its_own_masks() -> None:
    """With dropout, a second call of the same step draws other masks than the first; the next step again others."""
    pipeline = ClassifyPipeline(DROPPING, CONFIG)
    losses = [pipeline.accumulate_gradients(mixed_samples(8)).avg_loss for _ in range(2)]
    pipeline.zero_gradients()
    assert losses[0] != losses[1]
    assert pipeline.accumulate_gradients(mixed_samples(8)).avg_loss == losses[0]


def test_gradients_travel_between_pipelines() -> None:
    """S19, S36: two workers' sums, added and divided by all samples, applied by both: the update of the batch."""
    workers = [ClassifyPipeline(SMALL, CONFIG, optimizer=SGD) for _ in range(2)]
    samples = mixed_samples(9)
    reference = Reference(SMALL, CONFIG, SGD)
    start = reference.weights()
    reference.step(samples)
    workers[0].accumulate_gradients(samples[:2])
    workers[1].accumulate_gradients(samples[2:])
    mean = (workers[0].collect_lora_gradients() + workers[1].collect_lora_gradients()) / 9
    for worker in workers:
        worker.apply_lora_gradients(mean)
    assert state(workers[0]) == state(workers[1])
    assert distance(weights(workers[0]), reference.weights(), start) < 1e-5


def test_collected_gradients_are_in_the_order_of_the_layout(pipeline: ClassifyPipeline) -> None:
    """F-HET-001: the element of tensor k lies where the layout says, and is applied there; no padding is between."""
    layout = pipeline.gradient_layout()
    start = weights(pipeline)
    given = torch.cat([torch.full((math.prod(shape),), 1e-3 * (k + 1)) for k, (_, shape) in enumerate(layout)])
    pipeline.apply_lora_gradients(given)
    moved = weights(pipeline)
    for k, (name, shape) in enumerate(layout):
        assert moved[name].shape == shape
        step = (start[name] - moved[name]) / CONFIG.learning_rate
        assert torch.allclose(step, torch.full_like(step, 1e-3 * (k + 1)), rtol=1e-2)


@pytest.mark.parametrize("total", [0, 4, -1])
def test_a_sum_is_not_divided_by_too_few(pipeline: ClassifyPipeline, total: int) -> None:
    """S15: five samples are accumulated, so a total below five is a mistake of the caller; nothing is lost by it."""
    with pytest.raises(ValueError, match="0 samples are accumulated"):
        pipeline.apply_accumulated_gradients(1)
    pipeline.accumulate_gradients(mixed_samples(5))
    with pytest.raises(ValueError, match=f"5 samples are accumulated.* {total}"):
        pipeline.apply_accumulated_gradients(total)
    assert pipeline.apply_accumulated_gradients(5) > 0


def test_a_waiting_gradient_is_not_thrown_away(pipeline: ClassifyPipeline) -> None:
    """train_batch refuses to start while samples wait to be applied."""
    pipeline.accumulate_gradients(mixed_samples(3))
    with pytest.raises(ValueError, match="3 samples waits"):
        pipeline.train_batch(mixed_samples(3))
    pipeline.zero_gradients()
    assert pipeline.train_batch(mixed_samples(3)).total == 3


def test_accumulation_steps_are_read(subject: Subject) -> None:
    """V32: k accumulation steps compute each micro-batch in k parts, for one update with the same gradient."""
    samples = mixed_samples(8)
    parted = replace(CONFIG, accumulation_steps=2)
    with subject.replicas(1) as whole, subject.replicas(1, parted) as parts:
        start = weights(whole.primary_pipeline)
        whole.train_batch_parallel(samples)
        parts.train_batch_parallel(samples)
        assert whole.last_step is not None
        assert parts.last_step is not None
        assert [leaf.rows for leaf in whole.last_step.leaves] == [2] * 4
        assert [leaf.rows for leaf in parts.last_step.leaves] == [1] * 8
        assert distance(weights(parts.primary_pipeline), weights(whole.primary_pipeline), start) < 1e-5
        assert parts.updates == parts.primary_pipeline.replica.updates == 1


def test_class_weights_scale_the_sum_and_not_the_divisor(pipeline: ClassifyPipeline) -> None:
    """S5: sum of w[label] * cross entropy over N, where torch's weighted mean divides by the sum of the weights."""
    config = replace(CONFIG, class_weights=(0.5, 3.0))
    weighted = ClassifyPipeline(SMALL, config, micro_batches=4, optimizer=SGD)
    reference = Reference(SMALL, config, SGD)
    samples = [sample("a", 0), sample("bb", 1), sample("c", 0)]
    losses = [pipeline.forward_only(each.input_ids(), each.label)[0] for each in samples]
    loss, norm = reference.step(samples)
    result = weighted.train_batch(samples)
    assert result.avg_loss == pytest.approx((0.5 * losses[0] + 3.0 * losses[1] + 0.5 * losses[2]) / 3, rel=1e-6)
    assert result.avg_loss == pytest.approx(loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)


def test_forward_only_changes_nothing_and_drops_nothing() -> None:
    """S17: twice the same loss in a model with dropout, and an argmax that is a class."""
    pipeline = ClassifyPipeline(DROPPING, CONFIG)
    before = state(pipeline)
    first = pipeline.forward_only([1, 2, 3], 1)
    assert pipeline.forward_only([1, 2, 3], 1) == first
    assert first[1] in (0, 1)
    assert first[0] == pytest.approx(math.log(2), abs=0.5)
    assert state(pipeline) == before
    assert pipeline.model.training


def test_a_decoder_does_not_look_ahead(pipeline: ClassifyPipeline) -> None:
    """S9: the first token's state does not change with the third; in an encoder it does."""
    one, other = (pipeline.forward_hidden([1, 2, last]) for last in (3, 4))
    assert torch.equal(one[:2], other[:2])
    encoder = ClassifyPipeline(replace(SMALL, architecture="encoder"), CONFIG)
    one, other = (encoder.forward_hidden([1, 2, last]) for last in (3, 4))
    assert not torch.equal(one[:2], other[:2])


def test_layers_and_seeds_start_from_weights_of_their_own() -> None:
    """S9, S10: the seed gives every layer the same weights and every A the same sine; here no two are equal."""
    pipeline = ClassifyPipeline(replace(SMALL, num_hidden_layers=2), CONFIG)
    adapters = [view for name, view in weights(pipeline).items() if "lora_A" in name]
    assert len({tuple(view.flatten().tolist()) for view in adapters}) == 4
    assert all(float(v.abs().max()) == 0.0 for n, v in weights(pipeline).items() if "lora_B" in n)


def test_long_texts_are_cut_and_padding_is_no_byte() -> None:
    """S3: texts are cut to what the model takes; a text of zero bytes is a text, and not padding."""
    pipeline = ClassifyPipeline(SMALL, CONFIG)
    long, cut = "abcdefghij" * 10, ("abcdefghij" * 10)[: SMALL.max_position_embeddings]
    assert pipeline.forward_only(list(long.encode()), 0) == pipeline.forward_only(list(cut.encode()), 0)
    short = ClassifyPipeline(SMALL, replace(CONFIG, max_seq_len=4))
    assert short.forward_only(list(long.encode()), 0) == short.forward_only(list(b"abcd"), 0)
    assert pipeline.forward_only([65], 0) != pipeline.forward_only([65, 0], 0)
    assert pipeline.train_batch([sample("\0", 0)]).total == 1


def test_a_sample_is_its_bytes() -> None:
    """S1: the ids are the UTF-8 bytes; half of a surrogate pair has none."""
    assert SafetySample("aé", 0).input_ids() == [97, 195, 169]
    with pytest.raises(InputError, match="no Unicode"):
        SafetySample("\ud800", 0).input_ids()


@pytest.mark.parametrize(("correct", "total", "accuracy"), [(0, 0, 0.0), (3, 4, 0.75)])
def test_accuracy_of_a_result(correct: int, total: int, accuracy: float) -> None:
    """S23: correct / max(total, 1)."""
    assert BatchResult(0.0, correct, total, 0.0).accuracy() == accuracy


def test_the_rate_may_be_set_for_all_replicas(subject: Subject) -> None:
    """S20: a new rate counts from the next step on every replica; a bad one is refused."""
    samples = mixed_samples(4)
    with subject.replicas(2) as coordinator, subject.replicas(2, replace(CONFIG, learning_rate=2e-2)) as planned:
        coordinator.learning_rate = 2e-2
        for each in (coordinator, planned):
            each.train_batch_parallel(samples)
        assert states(coordinator) == states(planned)
        for bad in (0.0, -1.0, math.nan, math.inf):
            with pytest.raises(InputError, match="learning_rate"):
                coordinator.learning_rate = bad
        assert coordinator.learning_rate == 2e-2


def test_decay_applies_to_every_trainable_weight() -> None:
    """S12: with a zero gradient AdamW moves each weight by -lr * 0.01 of itself, bias included."""
    pipeline = ClassifyPipeline(replace(SMALL, architecture="encoder"), CONFIG)
    start = flat(weights(pipeline))
    pipeline.apply_lora_gradients([0.0] * pipeline.num_trainable_parameters)
    assert torch.allclose(flat(weights(pipeline)), start * (1 - 1e-2 * 0.01), rtol=1e-6)


def test_adamw_is_torch_own() -> None:
    """S24, D8: three updates as torch.optim.AdamW takes them in float64, to fp32 rounding."""
    spec = OptimizerSpec()
    pipeline = ClassifyPipeline(SMALL, CONFIG, optimizer=spec)
    reference = Reference(SMALL, CONFIG, spec)
    generator = torch.Generator().manual_seed(0)
    start = weights(pipeline)
    for _ in range(3):
        gradient = torch.rand(pipeline.num_trainable_parameters, generator=generator) * 1e-2 + 1e-3
        parts = torch.split(gradient, [math.prod(shape) for _, shape in pipeline.gradient_layout()])
        for (name, shape), part in zip(pipeline.gradient_layout(), parts, strict=True):
            reference.parameters[name].grad = part.double().view(shape)
        reference.optimizer.step()
        pipeline.apply_lora_gradients(gradient)
    assert distance(weights(pipeline), reference.weights(), start) < 1e-5


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": math.inf}, "learning_rate"),
        ({"batch_size": 0}, "batch_size"),
        ({"num_classes": True}, "num_classes"),
        ({"epochs": 1.5}, "epochs"),
        ({"lora_alpha": -1.0}, "lora_alpha"),
        ({"gradient_clip_norm": 0.0}, "gradient_clip_norm"),
        ({"class_weights": (1.0, 1.0)}, "class_weights"),
        ({"class_weights": (1.0, 1.0, 1.0, 1.0, -1.0)}, "class_weights[4]"),
        ({"accumulation_steps": 0}, "accumulation_steps"),
        ({"quantize_nf4": True}, "quantize_nf4"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(wrong: dict[str, object], where: str) -> None:
    """V16, V34: each is one problem at its name, and the message holds the value."""
    with pytest.raises(InputError) as caught:
        ClassifyConfig(**wrong)  # type: ignore[arg-type]
    (problem,) = caught.value.problems
    assert problem.where == where
    if where != "class_weights":
        value = next(iter(wrong.values()))
        assert repr(value[-1] if isinstance(value, tuple) else value) in problem.what


@pytest.mark.parametrize(
    ("shape", "where"),
    [
        (replace(SMALL, use_bias=True), "use_bias"),
        (replace(SMALL, head_dim_override=32), "head_dim_override"),
        (replace(SMALL, architecture="encoder", num_kv_heads=1), "num_kv_heads"),
        (replace(SMALL, architecture="both"), "model.architecture"),
        (replace(SMALL, hidden_size=15), "model.hidden_size"),
        (replace(SMALL, vocab_size=0), "vocab_size"),
    ],
)
def test_a_shape_that_is_not_to_be_had_is_refused(shape: TransformerConfig, where: str) -> None:
    """S7: no field is ignored in silence."""
    with pytest.raises(InputError) as caught:
        ClassifyPipeline(shape, CONFIG)
    assert where in {problem.where for problem in caught.value.problems}


def test_the_presets_have_their_sizes() -> None:
    """S7, 5.4: dimensions of the presets, and the trainable counts known for them."""
    qwen2, qwen3, tiny = TransformerConfig.qwen2_0_5b(), TransformerConfig.qwen3_4b(), TransformerConfig.tiny()
    assert (qwen3.head_dim, qwen3.q_dim, qwen3.kv_dim) == (128, 4096, 1024)
    assert (qwen2.head_dim, qwen2.q_dim, qwen2.kv_dim) == (64, 896, 128)
    assert qwen3.lora_parameters(16) == 5_898_240
    assert qwen2.lora_parameters(16) + 896 * 2 + 2 == 1_083_138
    pipeline = ClassifyPipeline(tiny, replace(CONFIG, lora_rank=16))
    assert pipeline.num_trainable_parameters == tiny.lora_parameters(16) + 64 * 2


def test_options_that_make_no_sense_are_refused_together(subject: Subject) -> None:
    """An unknown backend and counts below one are told at once; a group of processes is the command's affair."""
    with pytest.raises(InputError) as caught:
        subject.coordinator(SMALL, CONFIG, ["cpu"], "gloo", 0, base_every=0)
    assert [each.where for each in caught.value.problems] == ["backend", "micro_batches", "base_every"]
    with pytest.raises(InputError, match="micro_batches"):
        subject.pipeline(SMALL, CONFIG, micro_batches=0)


def test_rows_are_recorded_where_they_are_used(subject: Subject) -> None:
    """A control of the test's own recorder: forward_only is recorded too, so it sees what reaches the model."""
    with subject.replicas(1) as coordinator:
        seen = rows_seen(coordinator)
        coordinator.primary_pipeline.forward_only([1, 2], 0)
        assert seen == [[(1, 2)]]
