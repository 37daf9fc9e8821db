"""What is put together below the configuration, and that nothing else puts a trainer together."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForSequenceClassification

from andon.backend.inprocess import InlineBackend
from andon.config.source import quiet_loading
from andon.console.problems import InputError
from andon.model.adapter import AdapterSpec, trainable_parameters
from andon.step.optimizer import OptimizerSpec
from andon.training.build import StepSpec, build_model, build_replicas
from tests.model.tiny import CPU, spec, task

ROWS = task([[1, 2, 3], [4, 5]], [0, 1])
UPDATE = StepSpec(OptimizerSpec(), seed=5, micro_batches=2, clip_norm=1.0)


@pytest.mark.parametrize("own_base", [False, True])
def test_replicas_on_one_device_share_what_is_frozen_or_have_their_own(own_base: bool) -> None:
    model = build_model(spec("decoder"), AdapterSpec(r=2, alpha=4.0), 3)
    first, second = build_replicas(model, UPDATE, InlineBackend([CPU, CPU]), ROWS, 0, own_base=own_base)
    assert (first.weights_digest(), first.base_digest()) == (second.weights_digest(), second.base_digest())
    trained, others = trainable_parameters(first.model), dict(second.model.named_parameters())
    shared = {
        name: parameter.data_ptr() == others[name].data_ptr() for name, parameter in first.model.named_parameters()
    }
    assert {shared[name] for name in trained} == {False}
    assert {same for name, same in shared.items() if name not in trained} == {not own_base}


def test_a_model_whose_own_code_fails_on_a_row_is_no_error_of_ours(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = AutoConfig.for_model("nystromformer", vocab_size=33, num_landmarks=12, segment_means_seq_len=48, **sizes)
    with quiet_loading():
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    model = build_model(dataclasses.replace(spec(), base=str(tmp_path)), AdapterSpec(r=2, alpha=4.0), 3)
    fails = (
        r"model\.base: NystromformerForSequenceClassification fails on a row of these settings \(RuntimeError: shape"
    )
    with pytest.raises(InputError, match=fails):
        build_replicas(model, UPDATE, InlineBackend([CPU]), ROWS, 0)
