"""Configuration from a file, overrides and flags: precedence, error messages, the template, the identity of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from andon.config.load import (
    FLAGS,
    FOREIGN_NAMES,
    PLACING,
    config_digest,
    differences,
    identity,
    load_config,
    template,
    to_yaml,
)
from andon.config.schema import Config
from andon.console.messages import InputError


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "config.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def faults(path: Path | None, overrides: Sequence[str] = (), flags: Mapping[str, object] | None = None) -> list[str]:
    with pytest.raises(InputError) as caught:
        load_config(path, overrides, flags)
    said = str(caught.value)
    assert "pydantic" not in said
    return said.replace(f"{path.parent}{os.sep}" if path else "\0", "").split("\n")


@pytest.mark.parametrize("text", ["", "# nothing\n", "run:\noptimizer:\n", "\ufeffseed: 42\n", "seed: 42\r\n"])
def test_what_is_not_said_keeps_its_default(tmp_path: Path, text: str) -> None:
    assert load_config(written(tmp_path, text)) == load_config(None) == Config()


def test_flags_win_over_overrides_and_these_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "run: {workers: 3, backend: inline}\noptimizer: {lr: 1e-3}\nseed: 7\n")
    config = load_config(
        path,
        ["run.workers=4", "seed=8", "seed=9", "adapter.targets=[q_proj, v_proj]"],
        {"run.workers": 5, "run.backend": None},
    )
    assert (config.run.workers, config.run.backend, config.seed, config.optimizer.lr) == (5, "inline", 9, 0.001)
    assert config.adapter.targets == ("q_proj", "v_proj")


def test_all_problems_are_said_at_once_each_at_its_place(tmp_path: Path) -> None:
    path = written(tmp_path, 'seed: -1\noptimizer:\n  lr: "1e-3"\n  bets: [1, 2]\n\ntraining: {epochs: 2.0}\nlr: 3\n')
    said = faults(path, ["data.class_weight=inverse", "foo", "run.log_every=0"], {"run.workers": 0})
    assert set(said) == {
        "config.yaml:1 seed: must be at least 0 (-1)",
        "config.yaml:3 optimizer.lr: must be a number, is the string '1e-3'",
        "config.yaml:4 optimizer.bets: unknown key; did you mean 'optimizer.betas'?",
        "config.yaml:6 training.epochs: must be an integer, is 2.0",
        "config.yaml:7 lr: unknown key; did you mean 'optimizer.lr'?",
        "--set data.class_weight: unknown key; did you mean 'data.class_weights'?",
        "--set 'foo': must be KEY=VALUE, as in optimizer.lr=1e-3",
        "--set run.log_every: must be at least 1 (0)",
        "--workers: must be at least 1 (0)",
    }


BAD = {
    "optimizer.lr=0": "must be more than 0 (0)",
    "optimizer.lr=.nan": "input should be a finite number (nan)",
    "optimizer.lr=true": "must be a number, is True",
    "optimizer.lr=": "must be a number, is None",
    "optimizer.betas=[0.9]": "(",
    "optimizer.betas=[0.9, 1.0]": "must be less than 1 (1.0)",
    "optimizer.name=adam": "must be 'adamw' or 'sgd' ('adam'); did you mean 'adamw'?",
    "optimizer.clip_norm=0": "must be more than 0 (0)",
    "optimizer={}x": "malformed YAML",
    "training.batch_size=0": "must be at least 1 (0)",
    "training.batch_size='8'": "must be an integer, is the string '8'",
    "training.micro_batches=33": "must not be more than training.batch_size, 32 (33)",
    "training.epochs=yes": "must be an integer, is the string 'yes'",
    "training.keep_checkpoints=0": "must be at least 1 (0)",
    "adapter.dropout=1": "must be less than 1 (1)",
    "adapter.r=0": "must be at least 1 (0)",
    "adapter.targets=q_proj": "must be all-linear, or a list of module names ('q_proj')",
    "adapter.targets=[]": "names no module",
    "adapter.targets=[q, q]": "names a module twice",
    "model.hidden_size=66": "must be a multiple of num_attention_heads, 4 (66)",
    "model.hidden_size=60": "must give each of 4 heads an even size (60)",
    "model.num_key_value_heads=3": "must divide num_attention_heads, 4 (3)",
    "model.new_tokens=[' <a>']": "' <a>' begins or ends with white space",
    "model.new_tokens=[<a>, <b>, <a>]": "names '<a>' twice (['<a>', '<b>', '<a>'])",
    "model.new_tokens=<a>": "must be a list, is the string '<a>'",
    "data.validation_fraction=1": "must be less than 1 (1)",
    "data.eval=x.csv": "needs data.train",
    "data.limit=5": "needs data.train; the embedded data",
    "model.revision=v1": "needs model.base",
    "schedule.min_lr=1": "must not be more than optimizer.lr",
    "schedule={warmup_fraction: 0.2, warmup_steps: 5}": "and warmup_fraction (0.2) both set the warm-up",
    "contracts.enabled=1": "must be true or false, is 1",
    "run.backend=glo": "did you mean 'gloo'?",
    "run.backend=threads": "must be 'auto', 'inline', 'gloo', 'nccl' or 'mixed' ('threads')",
    "run.devices=[0, 0]": "GPU 0 is there 2 times",
    "run.devices=[1, cuda:1]": "GPU 1 is there 2 times",
    "run.devices=[gpu]": "'gpu' is not a device",
    "run.devices=[0.5]": "must be a list of devices",
    "run.devices=[]": "names 0 devices for 1 workers",
    "run.timeout_s=0": "must be more than 0 (0)",
    "run.portable=yes": "must be true or false, is the string 'yes'",
    "run=5": "must be a section with keys, is 5",
    "seed=9223372036854775808": "must be less than 9223372036854775808",
    "workers=3": "unknown key; did you mean 'run.workers'?",
    "training.eval_steps=3": "unknown key; did you mean 'training.evaluate_every'?",
    "learning_rate=3": "unknown key; did you mean 'optimizer.lr'?",
    "gradient_accumulation_steps=4": "unknown key; training.batch_size is the rows of one update over all workers",
    "model.load_in_4bit=true": "unknown key; did you mean 'model.quantize'?",
    "optimiser.lr=1": "unknown key; did you mean 'optimizer.lr'?",
    "seed.a=3": "must be an integer",
}


def test_every_name_of_another_trainer_leads_to_a_key_that_exists() -> None:
    keys = {f"{section}.{key}" for section, values in Config() if isinstance(values, BaseModel) for key in dict(values)}
    assert {meant for meant in FOREIGN_NAMES.values() if " " not in meant} <= keys
    assert [name for name in FOREIGN_NAMES if name in {key.partition(".")[2] for key in keys}] == []


@pytest.mark.parametrize("override", BAD)
def test_each_bad_value_is_one_line_with_the_key_and_the_value(override: str) -> None:
    (said,) = faults(None, [override])
    assert said.startswith(f"--set {override.split('=')[0]}: ")
    assert BAD[override] in said


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["run.portable=true", "run.backend=nccl"], "run.portable: is of CPUs; with nccl leave it false (true)"),
        (
            ["run.portable=true", "run.devices=[0, cpu]"],
            "run.portable: is of CPUs; with devices [0, 'cpu'] leave it false (true)",
        ),
        (
            ["run.portable=true", "model.dtype=bfloat16"],
            "run.portable: needs model.dtype=float32: CPUs compute bfloat16 each in its way",
        ),
        (["model.quantize=nf4"], "model.quantize: needs model.base: the embedded model is small (nf4)"),
        (
            ["model.quantize=nf4", "model.base=b", "adapter.kind=none"],
            "model.quantize: is for frozen weights, and adapter.kind=none has none (nf4)",
        ),
        (
            ["model.quantize=nf4", "model.base=b", "run.devices=[0, cpu]", "run.backend=mixed"],
            "model.quantize: needs devices of one kind: CPUs and GPUs pack weights differently (nf4)",
        ),
        (
            ["adapter.dora=true", "adapter.dropout=0.1", "model.quantize=nf4", "model.base=b"],
            "adapter.dora: needs adapter.dropout=0 with nf4, else each layer keeps its weight unpacked (0.1)",
        ),
        (
            ["adapter.exclude=[o_proj]", "adapter.kind=none"],
            "adapter.exclude: is of an adapter, and adapter.kind=none trains every weight without one (['o_proj'])",
        ),
        (["run.devices=[0, 1]", "run.workers=3"], "run.devices: names 2 devices for 3 workers ([0, 1])"),
        (
            ["training.early_stopping_patience=2", "data.validation_fraction=0"],
            "needs rows to validate on: data.validation, or a data.validation_fraction above 0 (2)",
        ),
        (["run.step_deadline_s=3", "run.backend=inline"], "needs ranks of their own, which inline has not"),
    ],
)
def test_values_that_do_not_go_together_are_refused_at_the_one_to_change(overrides: list[str], said: str) -> None:
    (found,) = faults(None, overrides)
    assert found.startswith(f"--set {overrides[0].partition('=')[0]}: ")
    assert said in found


def test_values_that_go_together_are_taken() -> None:
    assert load_config(None, ["run.portable=true", "run.devices=[cpu, cpu]"]).run.portable
    assert load_config(None, ["run.devices=[0, cuda:1, cpu, cpu]"]).run.workers == 4
    assert load_config(None, ["training.early_stopping_patience=2"]).training.early_stopping_patience == 2
    assert load_config(None, ["data.validation_fraction=0"]).training.early_stopping_patience is None


@pytest.mark.parametrize(
    ("content", "overrides", "expected"),
    [
        (b"seed: 1\nrun: \xff\n", (), "config.yaml:2: not UTF-8: byte 0xff at byte 13 of the file"),
        (b"- 1\n", (), "config.yaml:1: must hold keys and values, is [1]"),
        (b"seed: [1\n", (), "config.yaml:2: malformed YAML"),
        (b"seed: 1\nseed: 2\n", (), "config.yaml:2 seed: is there already, on line 1"),
        # The override of a key does not hide that the section in the file is wrong.
        (b"optimizer: adamw\n", ["optimizer.lr=1e-3"], "--set optimizer.lr: optimizer must be a section, is 'adamw'"),
    ],
)
def test_a_file_that_is_no_configuration_is_said_with_its_line(
    tmp_path: Path, content: bytes, overrides: Sequence[str], expected: str
) -> None:
    assert any(said.startswith(expected) for said in faults(written(tmp_path, content), overrides))


def test_every_flag_has_a_key_and_is_named_in_its_faults() -> None:
    for key, flag in FLAGS.items():
        (said,) = faults(None, (), {key: 0.5})
        assert said.startswith(f"{flag}: must be ")


def test_a_file_that_is_not_there_or_a_folder_is_said(tmp_path: Path) -> None:
    path = written(tmp_path, "")
    assert faults(path.with_name("confg.yaml")) == ["confg.yaml: no such file; did you mean 'config.yaml'?"]
    assert faults(tmp_path)[0].endswith("is a folder; name a file in it")


STRINGS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=12)
TRICKY = st.sampled_from(["1e-3", "no", "null", "~", "0x1F", "010", "1_000", "12:30", "a: b", "#", "'", "- x", "true"])


@given(STRINGS | TRICKY, st.floats(1e-5, 1e3), st.lists(STRINGS | TRICKY, min_size=1, max_size=3, unique=True))
def test_what_is_written_is_read_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, text: str, number: float, names: list[str]
) -> None:
    plain: dict[str, Any] = {
        "model": {"base": text},
        "optimizer": {"lr": number, "eps": number},
        "adapter": {"targets": names},
        "run": {"devices": [0, "cuda:1", "cpu"], "workers": 3, "dir": text},
    }
    config = Config.model_validate(plain)
    assert load_config(written(tmp_path_factory.mktemp("written"), to_yaml(config))) == config
    assert Config.model_validate(config.model_dump(mode="json")) == config


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().run.workers = 3


# The template that `andon init` writes.


def test_the_template_is_read_back_to_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(template(), encoding="utf-8")
    assert load_config(path) == Config()


def test_the_template_shows_every_key_and_fits_a_terminal() -> None:
    shown = yaml.safe_load(template())
    plain = Config().model_dump()
    assert shown.keys() == plain.keys()
    assert all(shown[name].keys() == part.keys() for name, part in plain.items() if isinstance(part, dict))
    assert max(map(len, template().splitlines())) <= 120


# The identity of a run.

PLACED = {
    *("run.workers=4", "run.backend=inline", "run.devices=[cpu, cpu, cpu]", "run.dir=elsewhere", "run.log_every=1"),
    *("run.progress=never", "run.timeout_s=5", "run.grace_s=5", "run.resume=auto", "contracts.enabled=false"),
    *("contracts.base_every=7", "training.keep_checkpoints=1", "training.checkpoint_every=5"),
}
DEFINING = {
    *("seed=43", "model.hidden_size=128", "model.dropout=0.0", "model.dtype=bfloat16", "model.new_tokens=[<a>, <b>]"),
    *("adapter.kind=none", "adapter.targets=[q_proj]", "data.validation_fraction=0.2", "data.class_weights=inverse"),
    *("optimizer.lr=1e-3", "optimizer.betas=[0.9, 0.99]", "optimizer.clip_norm=", "schedule.min_lr=0"),
    *("schedule.type=linear", "schedule.warmup_steps=5", "training.epochs=3", "training.batch_size=64"),
    *("training.micro_batches=4", "training.early_stopping_patience=2", "training.group_by_length=true"),
    *("training.eval_rows=5", "training.pad_to_multiple_of=1", "run.portable=true"),
}
STANDING_FOR = {
    "model.base=folder": "model.embedded",
    "data.train=a.csv": "data.embedded",
    **dict.fromkeys(("run.backend=nccl", "run.backend=mixed", "run.devices=[0, 1]"), "run.device_kind"),
    "run.devices=[0, cpu]": "run.device_kind",
}
"""Settings that define a run by what they stand for, and not by their value."""


@pytest.mark.parametrize("override", sorted(PLACED))
def test_where_a_run_lives_may_change(override: str) -> None:
    assert identity(load_config(None, [override])) == identity(Config())
    assert config_digest(load_config(None, [override])) == config_digest(Config())


@pytest.mark.parametrize("override", sorted({*DEFINING, *STANDING_FOR}))
def test_what_a_run_computes_may_not(override: str) -> None:
    was, now = identity(Config()), identity(load_config(None, [override]))
    key = STANDING_FOR.get(override, override.partition("=")[0])
    assert differences(was, now) == [(key, was[key], now[key])]
    assert config_digest(load_config(None, [override])) != config_digest(Config())


def test_a_rate_below_the_default_of_the_lowest_is_no_fault() -> None:
    assert load_config(None, ["optimizer.lr=1e-8"]).optimizer.lr == 1e-8
    assert load_config(None, ["schedule.type=constant", "schedule.min_lr=1"]).schedule.min_lr == 1


def test_the_task_defines_a_run_and_none_is_a_classifier() -> None:
    named, other = (identity(load_config(None, [f"task={task}"])) for task in ("classification", "regression"))
    assert named == identity(Config())
    assert differences(named, other) == [("task", "classification", "regression")]


def test_compiled_passes_define_a_run_and_so_does_their_checkpointing() -> None:
    """Eager passes have the same bits with activation checkpointing and without it."""
    changed = differences(identity(Config()), identity(load_config(None, ["training.compile=graphs"])))
    assert changed == [("training.activation_checkpointing", None, False), ("training.compile", "off", "graphs")]


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
    facts = {"data.embedded", "model.embedded", "adapter.new", "run.device_kind"}
    found = identity(load_config(None, ["training.compile=graphs"]))  # else checkpointing has the same bits
    assert set(found) == (keys - PLACING) | facts


def test_a_key_on_one_side_only_is_a_difference() -> None:
    assert differences({"a": 1, "c": 2}, {"b": 3, "c": 2}) == [("a", 1, None), ("b", None, 3)]
