"""The pipeline and its free functions: gradients, steps, samples, configuration, memory, by the ids of the seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andon.console.messages import InputError
from andon.gradients import average_gradients, has_non_finite, shard_samples
from andon.pipeline import BatchResult, ClassifyConfig, ClassifyPipeline, SafetySample, TransformerConfig
from andon_contracts.policy import evaluations, reset_evaluations
from andon_contracts.violation import Violation
from tests.seed.subject import CONFIG, ENCODER, SGD, SMALL, Reference, distance, mixed_samples, sample, state, weights

FP32 = st.floats(width=32)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
NAN, INF = math.nan, math.inf


def matrices(elements: st.SearchStrategy[float]) -> st.SearchStrategy[list[list[float]]]:
    """One to five workers' gradients of one length from 0 to 6."""
    return st.integers(0, 6).flatmap(
        lambda length: st.lists(st.lists(elements, min_size=length, max_size=length), min_size=1, max_size=5)
    )


@pytest.mark.parametrize(
    ("grads", "mean"), [([], []), ([[INF, 2.0], [1.0, 2.0]], [INF, 2.0]), ([[3e38], [3e38]], [3e38])]
)
def test_the_mean_is_the_mean(grads: list[list[float]], mean: list[float]) -> None:
    """T10, T11, T13, T14, T15, T23, V11, R27: of none, of Inf, and of what a sum in fp32 would overflow."""
    reset_evaluations()
    found = average_gradients(grads)
    assert evaluations() == {"gradient-average": 1}
    assert found == pytest.approx(mean, rel=1e-7)
    assert has_non_finite(found) is not all(map(math.isfinite, mean))


@given(matrices(FINITE))
def test_the_mean_of_finite_gradients_is_exact_to_one_rounding(grads: list[list[float]]) -> None:
    """N9, V11: finite, and at most one fp32 rounding (2^-24 relative, or half the smallest fp32) from the true mean."""
    for place, value in enumerate(average_gradients(grads)):
        column = [gradient[place] for gradient in grads]
        true = math.fsum(column) / len(column)
        largest = max(abs(each) for each in column)
        assert math.isfinite(value)
        assert abs(value - true) <= 2.0**-24 * abs(true) * 1.0001 + 2.0**-48 * largest + 2.0**-150


@given(matrices(FP32))
def test_lists_and_tensors_have_one_mean_with_nan_and_inf_in_place(grads: list[list[float]]) -> None:
    """N8: the mean is NaN if a worker has NaN or if Inf meets -Inf, Inf if some worker has Inf, else finite."""
    mean = average_gradients(grads)
    for place, value in enumerate(mean):
        special = {gradient[place] for gradient in grads if not math.isfinite(gradient[place])}
        wanted = NAN if any(map(math.isnan, special)) or len(special) > 1 else special.pop() if special else value
        assert value == pytest.approx(wanted, abs=0, nan_ok=True)
    assert has_non_finite(mean) == any(has_non_finite(gradient) for gradient in grads)
    tensor = average_gradients([torch.tensor(gradient, dtype=torch.float32) for gradient in grads])
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor.nan_to_num(7.0), torch.tensor(mean, dtype=torch.float32).nan_to_num(7.0))
    assert has_non_finite(tensor) == has_non_finite(mean)


def test_the_mean_of_one_tensor_is_a_copy_in_its_shape() -> None:
    """T14: nothing that the worker writes later changes it."""
    gradient = torch.ones(2, 3)
    mean = average_gradients([gradient])
    assert torch.equal(mean, gradient)
    assert mean.data_ptr() != gradient.data_ptr()


@pytest.mark.parametrize(
    ("grads", "worker", "said"),
    [
        ([[1.0, 2.0], [3.0]], 1, "length 1.*length 2"),
        ([[1.0], [1.0], [2.0, 3.0]], 2, "length 2.*length 1"),
        ([torch.ones(2, 3), torch.ones(3, 2)], 1, ""),
        ([torch.ones(1), [1.0]], 1, ""),
    ],
    ids=["shorter", "longer", "another shape", "another type"],
)
def test_v12_ragged_gradients_are_refused(grads: list[list[float]], worker: int, said: str) -> None:
    """V12, F-HET-001: gradients of another layout are a `ValueError` that names the worker and both lengths."""
    with pytest.raises(ValueError, match=rf"worker {worker} .*{said}"):
        average_gradients(grads)


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (10, [3, 3, 4]),
        (2, [0, 0, 2]),
        (7, [1, 1, 1, 4]),
        (11, [2, 2, 2, 5]),
        (1, [0, 0, 1]),
        (0, [0, 0, 0]),
        (100, [14] * 6 + [16]),
        (100, [100]),
    ],
)
def test_the_last_shard_takes_the_remainder(count: int, sizes: list[int]) -> None:
    """T8, T9, T24, T25, V13, R26, F-DP-002: a shard for each worker; no sample is lost, doubled or out of order."""
    shards = shard_samples(list(range(count)), len(sizes))
    assert [len(shard) for shard in shards] == sizes
    assert [each for shard in shards for each in shard] == list(range(count))
    for workers in (0, -1):  # where the seed gives one shard
        with pytest.raises(ValueError, match=str(workers)):
            shard_samples([1, 2, 3], workers)


DROPPING = replace(SMALL, dropout=0.3)


@pytest.fixture
def pipeline() -> ClassifyPipeline:
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


# By name: a method of the replica, what is done in its place, and the clause that it breaks.
WRONG: dict[str, tuple[str, Callable[..., Any], str]] = {
    "rate doubled": ("set_rate", lambda right, rate: right(2 * rate), "learning-rate-planned"),
    "clipped twice": ("clip", lambda right, *given: (right(*given), right(*given))[1], "clip-once"),
    "not clipped": ("clip", lambda right, _, norm: right(None, norm), "clip-once"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_an_update_is_held_to_the_laws_of_the_step(pipeline: ClassifyPipeline, fault: str) -> None:
    """Another rate than the pipeline's, or a clipping too many or too few, raises before anything is changed."""
    method, wrong, clause = WRONG[fault]
    setattr(pipeline.replica, method, partial(wrong, getattr(pipeline.replica, method)))
    before = state(pipeline)
    with pytest.raises(Violation) as caught:
        pipeline.apply_lora_gradients(torch.ones(pipeline.num_trainable_parameters))
    assert caught.value.clause == clause
    assert state(pipeline) == before


def test_a_gradient_that_was_given_is_not_said_to_come_of_finite_parts(pipeline: ClassifyPipeline) -> None:
    """Nobody looked at its parts; of one that was accumulated each was looked at."""
    with pytest.raises(Violation, match=r"finite broken at step 1 .* its norm \(nan\) is not finite$"):
        pipeline.apply_lora_gradients(torch.full((pipeline.num_trainable_parameters,), math.nan))
    huge = ClassifyPipeline(SMALL, replace(CONFIG, class_weights=(5e36, 5e36)), micro_batches=100)
    huge.accumulate_gradients([sample("a", 0)] * 100)  # each part is finite in fp32, and their sum is not
    with pytest.raises(Violation, match=r"is not finite, although the gradient of every micro-batch was$"):
        huge.apply_accumulated_gradients(100)


def test_gradients_accumulate_over_calls_and_travel_between_pipelines(pipeline: ClassifyPipeline) -> None:
    """F-BATCH-001, S19, S36: two calls, or the sums of two workers by all samples, are the update of the batch."""
    samples, reference = mixed_samples(9), Reference(SMALL, CONFIG, SGD)
    start = reference.weights()
    reference.step(samples)
    pipeline.accumulate_gradients(samples[:2])
    pipeline.accumulate_gradients(samples[2:])
    pipeline.apply_accumulated_gradients(9)
    assert distance(weights(pipeline), reference.weights(), start) < 1e-5
    assert pipeline.replica.updates == 1
    assert float(pipeline.collect_lora_gradients().abs().max()) == 0.0
    workers = [ClassifyPipeline(SMALL, CONFIG, optimizer=SGD) for _ in range(2)]
    workers[0].accumulate_gradients(samples[:2])
    workers[1].accumulate_gradients(samples[2:])
    mean = (workers[0].collect_lora_gradients() + workers[1].collect_lora_gradients()) / 9
    for worker in workers:
        worker.apply_lora_gradients(mean)
    assert state(workers[0]) == state(workers[1])
    assert distance(weights(workers[0]), reference.weights(), start) < 1e-5


def test_each_accumulation_draws_its_own_masks() -> None:
    """With dropout, a second call of the same step draws other masks than the first; the next step again others."""
    pipeline = ClassifyPipeline(DROPPING, CONFIG)
    losses = [pipeline.accumulate_gradients(mixed_samples(8)).avg_loss for _ in range(2)]
    pipeline.zero_gradients()
    assert losses[0] != losses[1]
    assert pipeline.accumulate_gradients(mixed_samples(8)).avg_loss == losses[0]


@pytest.mark.parametrize("total", [0, 4, -1])
def test_a_sum_is_not_divided_by_too_few(pipeline: ClassifyPipeline, total: int) -> None:
    """S15: five samples are accumulated, so a total below five is a mistake of the caller; none is thrown away."""
    with pytest.raises(ValueError, match="0 samples are accumulated"):
        pipeline.apply_accumulated_gradients(1)
    pipeline.accumulate_gradients(mixed_samples(5))
    with pytest.raises(ValueError, match=f"5 samples are accumulated.* {total}"):
        pipeline.apply_accumulated_gradients(total)
    with pytest.raises(ValueError, match="5 samples waits"):
        pipeline.train_batch(mixed_samples(3))
    assert pipeline.apply_accumulated_gradients(5) > 0
    pipeline.accumulate_gradients(mixed_samples(3))
    pipeline.zero_gradients()
    assert pipeline.train_batch(mixed_samples(3)).total == 3


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


def test_a_sample_is_its_bytes_and_a_result_its_counts() -> None:
    """S1, S23: the ids are the UTF-8 bytes; half of a surrogate pair has none. A result has correct / max(total, 1)."""
    assert SafetySample("aé", 0).input_ids() == [97, 195, 169]
    with pytest.raises(InputError, match="not Unicode text"):
        SafetySample("\ud800", 0).input_ids()
    assert [BatchResult(0.0, *counts, 0.0).accuracy() for counts in ((0, 0), (3, 4))] == [0.0, 0.75]


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


def test_the_defaults_are_those_of_the_seed() -> None:
    """S7, 5.4: the twelve settings, and the trained elements: layers * rank * (2 hidden + q + v), and the head."""
    assert astuple(ClassifyConfig()) == (5, 16, 16.0, 1e-4, 3, 512, 100, 32, 1, 1.0, None, False)
    pipeline = ClassifyPipeline(TransformerConfig.tiny(), replace(CONFIG, lora_rank=16))
    assert pipeline.num_trainable_parameters == 2 * 16 * (2 * 64 + 64 + 64) + 64 * 2


def test_v24_the_layout_is_compared_after_a_real_backward() -> None:
    """V24, T21, F-HET-001: names, shapes, order and values of the gradient agree with float64's, none being zero."""
    samples = mixed_samples(5)
    pipeline = ClassifyPipeline(SMALL, CONFIG)
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
    parts = torch.split(collected.double(), [math.prod(shape) for _, shape in layout])
    for (name, shape), part in zip(layout, parts, strict=True):
        clipped = reference.parameters[name].grad  # the reference clips, so that the scale differs
        assert shape == tuple(clipped.shape)
        assert float(part.norm()) > 0.0, name
        assert float(torch.nn.functional.cosine_similarity(part, clipped.reshape(-1), dim=0)) > 1 - 1e-9


def warm(pipeline: ClassifyPipeline) -> None:
    """Move B away from zero, where the gradient of A vanishes."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, view in sorted(pipeline.replica.parameters.weight_views().items()):
            if "lora_B" in name:
                view.copy_(0.1 * torch.randn(view.shape, generator=generator))


@pytest.mark.parametrize("shape", [SMALL, ENCODER], ids=["decoder", "encoder"])
def test_v25_hidden_states_are_finite_and_see_the_adapter(shape: TransformerConfig) -> None:
    """V25, T16, F-DP-004: hidden states come from the trained forward pass: they change with the adapter."""
    pipeline = ClassifyPipeline(shape, CONFIG)
    before = pipeline.forward_hidden([1, 2, 3, 4, 5])
    warm(pipeline)
    after = pipeline.forward_hidden([1, 2, 3, 4, 5])
    assert before.shape == (5, shape.hidden_size)
    assert bool(torch.isfinite(after).all())
    assert not torch.equal(before, after)


def test_v29_the_loss_of_logits_that_are_not_finite_is_no_number() -> None:
    """V29, F-CLASS-005: NaN logits raise, in evaluation and in training; the seed makes 23.02585 of them."""
    pipeline = ClassifyPipeline(SMALL, CONFIG)
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


def test_v31_a_gradient_that_cannot_be_applied_is_refused() -> None:
    """V31: of 2 values or one too few, with both lengths; with NaN in the last place. The seed applies it."""
    pipeline = ClassifyPipeline(SMALL, CONFIG)
    before, count = state(pipeline), pipeline.num_trainable_parameters
    for length in (2, -1):
        with pytest.raises(ValueError, match=str(count)):
            pipeline.apply_lora_gradients(torch.ones(count)[:length])
    gradient = torch.zeros(count)
    gradient[-1] = math.nan
    with pytest.raises(Violation, match="finite broken"):
        pipeline.apply_lora_gradients(gradient)
    assert state(pipeline) == before
