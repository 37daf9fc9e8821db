"""What defines a run, and what only places it."""

from __future__ import annotations

import json

import pytest

from andon.config.identity import LATER, PLACING, config_digest, differences, identity
from andon.config.load import load_config
from andon.config.schema import Config

PLACED = {
    "run.workers=4",
    "run.backend=threads",
    "run.devices=[cpu, cpu, cpu]",
    "run.dir=elsewhere",
    "run.log_every=1",
    "run.progress=never",
    "run.timeout_s=5",
    "run.grace_s=5",
    "run.resume=auto",
    "training.keep_checkpoints=1",
    "training.checkpoint_every=5",
    "contracts.enabled=false",
    "contracts.base_every=7",
}
DEFINING = {
    "seed=43": "seed",
    "model.hidden_size=128": "model.hidden_size",
    "model.base=folder": "model.embedded",
    "model.dropout=0.0": "model.dropout",
    "model.dtype=bfloat16": "model.dtype",
    "adapter.kind=none": "adapter.kind",
    "adapter.targets=[q_proj]": "adapter.targets",
    "data.train=a.csv": "data.embedded",
    "data.validation_fraction=0.2": "data.validation_fraction",
    "data.class_weights=inverse": "data.class_weights",
    "optimizer.lr=1e-3": "optimizer.lr",
    "optimizer.betas=[0.9, 0.99]": "optimizer.betas",
    "optimizer.clip_norm=": "optimizer.clip_norm",
    "schedule.min_lr=0": "schedule.min_lr",
    "training.epochs=3": "training.epochs",
    "training.batch_size=64": "training.batch_size",
    "training.micro_batches=4": "training.micro_batches",
    "training.early_stopping_patience=2": "training.early_stopping_patience",
    "run.backend=nccl": "run.device_kind",
    "run.backend=mixed": "run.device_kind",
    "run.devices=[0, 1]": "run.device_kind",
    "run.devices=[0, cpu]": "run.device_kind",
}


@pytest.mark.parametrize("override", sorted(PLACED))
def test_where_a_run_lives_may_change(override: str) -> None:
    assert identity(load_config(None, [override])) == identity(Config())
    assert config_digest(load_config(None, [override])) == config_digest(Config())


@pytest.mark.parametrize("override", sorted(DEFINING))
def test_what_a_run_computes_may_not(override: str) -> None:
    was, now = identity(Config()), identity(load_config(None, [override]))
    key = DEFINING[override]
    assert differences(was, now) == [(key, was[key], now[key])]
    assert config_digest(load_config(None, [override])) != config_digest(Config())


@pytest.mark.parametrize(
    "override",
    [
        "training.exact=false",
        "training.compile=graphs",
        "training.compile_lengths=2",
        "training.group_by_length=true",
        "training.pad_to_multiple_of=1",
        "run.portable=true",
        "model.new_tokens=['<tool>', '</tool>']",
    ],
)
def test_what_later_versions_compute_otherwise_may_not_change(override: str) -> None:
    was, now = identity(Config()), identity(load_config(None, [override]))
    key, _, value = override.partition("=")
    assert key not in was
    assert str(now[key]).lower() == value
    section, _, name = key.partition(".")
    default = Config().model_dump(mode="json")[section][name]
    assert (key, default, now[key]) in differences(was, now)


def test_the_task_defines_a_run_and_a_classifier_is_what_there_always_was() -> None:
    named, other = (identity(load_config(None, [f"task={task}"])) for task in ("classification", "regression"))
    assert named == identity(Config())
    assert differences(named, other) == [("task", None, "regression")]


def test_workers_define_what_is_not_exact() -> None:
    """Without the fixed tree the number of workers is part of the result, so a resume must not change it."""
    two, three = (identity(load_config(None, ["training.exact=false"], {"run.workers": workers})) for workers in (2, 3))
    assert differences(two, three) == [("run.workers", 2, 3)]


def test_files_and_folders_may_move() -> None:
    here, there = (
        load_config(None, [f"data.train={each}.csv", f"data.eval={each}.tsv", f"model.base={each}"]) for each in "ab"
    )
    assert identity(here) == identity(there)


def test_every_key_of_the_schema_either_defines_or_places() -> None:
    parts = Config().model_dump()
    keys = {name for name, part in parts.items() if not isinstance(part, dict)} | {
        f"{name}.{key}" for name, part in parts.items() if isinstance(part, dict) for key in part
    }
    assert keys.issuperset(PLACING)
    assert keys.issuperset(LATER)
    facts = {"data.embedded", "model.embedded", "run.device_kind"}
    assert set(identity(Config())) == (keys - PLACING - set(LATER)) | facts


def test_an_identity_survives_json() -> None:
    config = load_config(None, ["adapter.targets=[q_proj, v_proj]", "optimizer.lr=0.1"])
    assert differences(json.loads(json.dumps(identity(config))), identity(config)) == []


def test_a_key_on_one_side_only_is_a_difference() -> None:
    assert differences({"a": 1, "c": 2}, {"b": 3, "c": 2}) == [("a", 1, None), ("b", None, 3)]


def test_a_key_left_out_for_its_default_is_shown_with_it() -> None:
    before = identity(Config())
    after = before | {"training.compile": "graphs"}
    assert "training.compile" not in before
    assert differences(before, after) == [("training.compile", "off", "graphs")]
    assert differences(before | {"training.exact": True}, before) == []
