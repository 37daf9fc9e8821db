"""V11 to V21 of the seed: averaging, sharding, devices, construction, preconditions. None is possible here."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

import pytest
import torch

from andon.console.problems import InputError
from andon.coordinator import DataParallelCoordinator, resolve_devices
from andon.pipeline import TransformerConfig
from andon.step.optimizer import OptimizerSpec
from andon_contracts.violation import Violation
from tests.seed.subject import (
    CONFIG,
    FIXTURE,
    SGD,
    SMALL,
    Subject,
    mixed_samples,
    rows_seen,
    sample,
    sorted_samples,
    state,
    states,
)

ABSENT = 10_007
"""A GPU that no machine has."""


def test_v11_finite_gradients_have_a_finite_mean(subject: Subject) -> None:
    """V11, F-DP-003: [3e38] and [3e38] average to 3e38; a sum in fp32 would overflow first."""
    (mean,) = subject.average_gradients([[3e38], [3e38]])
    assert mean == pytest.approx(3e38, rel=1e-7)


@pytest.mark.parametrize(("grads", "worker"), [([[1.0, 2.0], [3.0]], 1), ([[1.0], [1.0], [2.0, 3.0]], 2)])
def test_v12_ragged_gradients_are_refused(subject: Subject, grads: list[list[float]], worker: int) -> None:
    """V12, F-HET-001: gradients of unequal length are a `ValueError` that names the worker and both lengths."""
    with pytest.raises(ValueError, match=rf"worker {worker} .*length {len(grads[worker])}.*length {len(grads[0])}"):
        subject.average_gradients(grads)


def test_v13_sharding_gives_one_shard_a_worker(subject: Subject) -> None:
    """V13, F-DP-002: no samples over 3 workers are 3 empty shards; 0 or fewer workers are an error."""
    assert subject.shard_samples([], 3) == [[], [], []]
    for workers in (0, -1):
        with pytest.raises(ValueError, match=str(workers)):
            subject.shard_samples([1, 2, 3], workers)


def test_v14_the_step_splits_evenly(subject: Subject) -> None:
    """V14: 11 samples over 4 replicas train as 3, 3, 3, 2; the seed's rule gives one replica 5 of them."""
    with subject.replicas(4, micro_batches=11) as coordinator:
        seen = rows_seen(coordinator)
        coordinator.train_batch_parallel(mixed_samples(11))
    sizes = [len(rows) for rows in seen]
    assert sum(sizes) == 11
    assert max(sizes) - min(sizes) <= 1


def test_v15_indices_mean_devices(subject: Subject) -> None:
    """V15, CRUX-D-11-004: a GPU named twice, a negative and an absent one are refused, all three in one message."""
    with pytest.raises(InputError) as caught:
        subject.coordinator(SMALL, CONFIG, [ABSENT, ABSENT, -1])
    found = [str(problem) for problem in caught.value.problems]
    assert any("twice" in each for each in found)
    assert any(str(ABSENT) in each and "no GPU" in each for each in found)
    assert any("-1" in each for each in found)


def test_v15_each_replica_is_bound_to_its_device() -> None:
    """V15: weights, gradients and moments of replica i live on the device that was named for it."""
    names: list[str | int] = list(range(torch.cuda.device_count())) or ["cpu", "cpu"]
    with DataParallelCoordinator(SMALL, CONFIG, names, micro_batches=2) as coordinator:
        coordinator.train_batch_parallel(mixed_samples(4))
        for pipeline, device in zip(coordinator.pipelines, resolve_devices(names), strict=True):
            assert pipeline.device == device
            held = [*pipeline.model.parameters(), *pipeline.replica.optimizer_state().values()]
            assert {tensor.device for tensor in held if tensor.numel() > 1} == {device}


def test_v15_the_cpu_takes_the_place_of_an_absent_gpu_only_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    """V15, F-DP-004: with cpu_fallback each absent GPU is named in the log; a repeated one is refused all the same."""
    with caplog.at_level(logging.WARNING):
        assert resolve_devices([ABSENT, "cpu"], cpu_fallback=True) == (torch.device("cpu"),) * 2
    assert f"cuda:{ABSENT}" in caplog.text
    with pytest.raises(InputError, match="twice"):
        resolve_devices([ABSENT, ABSENT], cpu_fallback=True)


def test_v16_what_cannot_be_built_is_one_kind_of_error(subject: Subject) -> None:
    """V16: K = 1, r = 0, lr <= 0 and batch size 0 are a `ValueError` with all of them; the seed panics at the first."""
    with pytest.raises(InputError) as caught:
        subject.coordinator(SMALL, subject.config(num_classes=1, lora_rank=0, learning_rate=0.0, batch_size=0), ["cpu"])
    assert {each.where for each in caught.value.problems} == {"num_classes", "lora_rank", "learning_rate", "batch_size"}


@pytest.mark.parametrize("preset", [TransformerConfig.qwen2_0_5b(), TransformerConfig.qwen3_4b()])
def test_v16_a_model_that_is_not_to_be_had_is_refused_before_it_is_built(preset: TransformerConfig) -> None:
    """V16: what the embedded decoder cannot be is refused, not ignored; nothing of 16 GB is allocated for that."""
    with pytest.raises(InputError, match="rope_theta"):
        DataParallelCoordinator(preset, CONFIG, ["cpu"])


@pytest.mark.parametrize("absent", ["transformers", "peft"])
def test_the_extra_to_install_is_named_where_a_library_is_absent(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base install has neither; the command is one that a checkout knows, since no package index has Andon."""
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(InputError, match=rf"{absent} is not installed; run: pip install '\.\[train\]' in a checkout"):
        DataParallelCoordinator(SMALL, CONFIG, ["cpu"])


class Meeting:
    """Lets a replica's forward pass go on only when all replicas are in theirs."""

    def __init__(self, replicas: int, patience_s: float) -> None:
        self._barrier = threading.Barrier(replicas, timeout=patience_s)
        self.met = 0

    def attend(self, *_: Any) -> None:
        """Wait for the others."""
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            return
        self.met += 1


def test_v17_replicas_compute_at_the_same_time(subject: Subject) -> None:
    """V17, N3: in `threads` both replicas are inside their forward pass at one moment, with the bits of `inline`."""
    samples = mixed_samples(8)
    meeting = Meeting(2, subject.patience_s)
    with subject.replicas(2) as inline, subject.replicas(2, backend="threads") as threads:
        inline.train_batch_parallel(samples)
        for pipeline in threads.pipelines:
            pipeline.model.register_forward_pre_hook(meeting.attend)
        threads.train_batch_parallel(samples)
        assert meeting.met == 4, "2 replicas meet at each of their 2 micro-batches"
        assert states(threads) == states(inline)


def test_v18_what_is_frozen_is_watched_where_it_lives(subject: Subject) -> None:
    """V18, FALSIFY-LORA-001: a base weight of one replica that moves stops the next step, naming that replica."""
    with subject.replicas(3) as coordinator:
        coordinator.train_batch_parallel(mixed_samples(8))
        base: Any = coordinator.pipelines[1].model.get_base_model()  # type: ignore[operator]
        with torch.no_grad():
            base.get_input_embeddings().weight[0, 0] += 1.0
        before = states(coordinator)
        with pytest.raises(Violation) as caught:
            coordinator.train_batch_parallel(mixed_samples(8))
        assert (caught.value.clause, caught.value.rank, caught.value.step) == ("base-frozen", 1, 2)
        assert states(coordinator) == before


@pytest.mark.parametrize("how", ["in place", "trained alone", "replaced"])
def test_v19_a_primary_that_was_changed_is_found_out(subject: Subject, how: str) -> None:
    """V19, C-DP-001 pre: whoever changes the primary's weights between steps is found out before anything moves."""
    with subject.replicas(3) as coordinator:
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
        with pytest.raises(Violation) as caught:
            coordinator.train_batch_parallel(sorted_samples(8))
        assert (caught.value.clause, caught.value.rank, caught.value.step) == ("replicas-agree", 0, 2)
        assert states(coordinator) == before


def test_v19_replicas_are_copies_of_one_model(subject: Subject) -> None:
    """V19: what happens to the global generator, before or between, decides nothing about how replicas start."""
    torch.manual_seed(1)
    with subject.replicas(2) as one:
        torch.manual_seed(2)
        with subject.replicas(2) as other:
            assert set(states(one)) == set(states(other))
            assert len(set(states(one))) == 1
        with subject.replicas(2, seed=1) as another:
            assert set(states(one)).isdisjoint(states(another))


@pytest.mark.parametrize("bad", [sample("a", 7), sample("a", -1), sample("", 0)])
def test_v20_a_bad_sample_changes_nothing(subject: Subject, bad: Any) -> None:
    """V20, F-CLASS-002: a bad label or text in the last shard is told by place and value, with all state as it was."""
    samples = mixed_samples(3)
    with subject.replicas(2, optimizer=OptimizerSpec()) as coordinator:
        before = states(coordinator)
        with pytest.raises(InputError) as caught:
            coordinator.train_batch_parallel([*samples, bad])
        assert states(coordinator) == before
        assert coordinator.updates == 0
        assert [each.where for each in caught.value.problems] == ["sample 3"]
        assert ("no tokens" if not bad.input else f"label {bad.label}") in str(caught.value)


def test_v20_all_bad_samples_are_told_at_once(subject: Subject) -> None:
    """V20: two bad samples are two problems of one error; a byte outside of the vocabulary is one."""
    with subject.replicas(2, model_config=FIXTURE, optimizer=SGD) as coordinator:
        with pytest.raises(InputError) as caught:
            coordinator.train_batch_parallel([sample("!", 2), sample("!!", 0), sample("xy", 0)])
        assert [each.where for each in caught.value.problems] == ["sample 0", "sample 2"]
        assert "121" in str(caught.value), "the byte of y is outside of 100 ids"


def test_v21_replicas_of_another_structure_cannot_train_together(subject: Subject) -> None:
    """V21, C-DP-SYNC-001: a replica with fewer adapters is refused at the start; the seed copies what both have."""
    deep = TransformerConfig(**{**SMALL.__dict__, "num_hidden_layers": 2})
    pipelines = [subject.pipeline(shape, CONFIG) for shape in (deep, SMALL)]
    before = [state(each) for each in pipelines]
    with pytest.raises(Violation, match="layout-equal"):
        subject.attest_alike(pipelines)
    assert [state(each) for each in pipelines] == before
