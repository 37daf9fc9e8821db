"""Settings that nobody set: chosen for the data, the base and the devices, and kept at a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.backend import host
from andon.config.load import config_digest, load_config, template, to_yaml
from andon.config.schema import SFT, Config
from andon.console.messages import InputError
from andon.launch import portable
from andon.training.choices import Base, capped, for_rows, inherited, is_set, placed, portable_demo, with_micro_batches

BASE = Base(positions=1024, weights=10**9, dtype="bfloat16")
OWN = ["data.train=rows.csv"]
PRETRAINED = [*OWN, "model.base=somewhere"]


def config(*overrides: str) -> Config:
    return load_config(None, overrides)


@pytest.mark.parametrize(
    ("overrides", "gpus", "backend", "workers"),
    [
        ([], 4, "gloo", 2),  # the embedded run has one digest, whatever the machine
        (OWN, 0, "gloo", 2),
        (OWN, 3, "nccl", 3),
        (PRETRAINED, 16, "nccl", 8),
        ([*PRETRAINED, "training.batch_size=16", "training.micro_batches=16"], 12, "nccl", 12),
        ([*PRETRAINED, "run.backend=gloo", "run.workers=3"], 4, "gloo", 3),
        ([*PRETRAINED, "run.workers=3"], 4, "nccl", 3),
        ([*PRETRAINED, "run.workers=3"], 2, "gloo", 3),
        ([*PRETRAINED, "run.backend=nccl", "run.workers=2", "run.cpu_fallback=true"], 0, "gloo", 2),
        ([*PRETRAINED, "run.devices=[0, 1, 2]", "run.workers=auto"], 8, "nccl", 3),
        ([*PRETRAINED, "run.portable=true"], 4, "gloo", None),
        ([*PRETRAINED, "run.devices=[0, cpu]"], 4, "mixed", 2),
        ([*PRETRAINED, "run.devices=[1]"], 4, "nccl", 1),
        ([*PRETRAINED, "run.backend=auto", "run.workers=auto"], 1, "nccl", 1),
    ],
)
def test_where_a_run_trains(overrides: list[str], gpus: int, backend: str, workers: int | None) -> None:
    found, _ = placed(config(*overrides), gpus)
    assert found.run.backend == backend
    assert found.run.workers == workers if workers is not None else found.run.workers >= 1
    assert placed(found, 0) == (found, "")  # chosen once


def test_rows_that_are_to_be_grouped_are_not_packed_and_a_lowest_rate_above_the_chosen_one_is_refused() -> None:
    grouped = for_rows(config(*PRETRAINED, "training.group_by_length=true"), SFT, BASE, [30], 30, on_gpus=False)
    assert (grouped.training.packing, grouped.training.group_by_length) == (False, True)
    assert for_rows(config(*PRETRAINED, "schedule.min_lr=1e-4"), SFT, BASE, [30], 30, on_gpus=False)
    whole = config(*PRETRAINED, "schedule.min_lr=1e-4", "adapter.kind=none")
    with pytest.raises(InputError, match=r"schedule\.min_lr: must not be more than optimizer\.lr, 2e-05"):
        for_rows(whole, SFT, BASE, [30], 30, on_gpus=False)


def test_gpus_without_work_are_said() -> None:
    assert placed(config(*PRETRAINED), 16)[1] == "auto: 8 nccl workers of 16 GPUs: an update has 8 micro-batches"


@pytest.mark.parametrize(("gib", "kind", "workers"), [(100, "lora", 4), (7, "lora", 2), (7, "none", 1), (1, "lora", 1)])
def test_on_cpus_there_are_as_many_workers_as_cores_and_memory_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: int, kind: str, workers: int
) -> None:
    """A bfloat16 base of 1 GiB is 2 GiB in fp32: 3.5 GiB for each LoRA worker, 13 for all weights."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2**30)
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}', encoding="utf-8")
    monkeypatch.setattr(host, "physical_cores", lambda: 4)
    monkeypatch.setattr(host, "free_ram", lambda: gib * 2**30)
    found, said = placed(config(*OWN, f"model.base={tmp_path}", f"adapter.kind={kind}"), 0)
    assert (found.run.backend, found.run.workers) == ("gloo", workers)
    assert ("memory" in said) == (workers < 4)


@pytest.mark.parametrize(
    ("task", "overrides", "rate"),
    [
        (SFT, [], 2e-4),
        (SFT, ["adapter.kind=none"], 2e-5),
        ("regression", [], 1e-3),
        ("classification", ["adapter.kind=none"], 5e-5),
        ("classification", ["optimizer.lr=auto"], 1e-3),
        ("classification", ["optimizer.lr=0.1"], 0.1),
    ],
)
def test_a_pretrained_base_gets_a_rate_and_dropout_of_its_own(task: str, overrides: list[str], rate: float) -> None:
    """A head that is drawn anew needs a higher rate than one that the base brings."""
    found = for_rows(config(*PRETRAINED, *overrides), task, BASE, [30], 30, on_gpus=False)
    assert (found.optimizer.lr, found.adapter.dropout, found.training.epochs) == (rate, 0.05, 3)
    embedded = for_rows(config(*OWN), task, None, [30], 30, on_gpus=False)
    assert (embedded.optimizer.lr, embedded.adapter.dropout, embedded.training.epochs) == (2.5e-3, 0.1, 2)
    packed = config(*PRETRAINED, "adapter.dora=true", "model.quantize=nf4")
    assert for_rows(packed, task, BASE, [30], 30, on_gpus=False).adapter.dropout == 0  # DoRA would unpack all layers


@pytest.mark.parametrize(
    ("overrides", "base", "keep", "minutes"),
    [
        ([], None, "last", None),
        (OWN, None, "best", None),
        (PRETRAINED, BASE, "best", 15.0),
        ([*PRETRAINED, "training.keep=last", "training.checkpoint_minutes=null"], BASE, "last", None),
    ],
)
def test_the_embedded_run_keeps_its_last_weights_and_only_a_base_saves_by_time(
    overrides: list[str], base: Base | None, keep: str, minutes: float | None
) -> None:
    training = for_rows(config(*overrides), "classification", base, [30], 30, on_gpus=False).training
    assert (training.keep, training.checkpoint_minutes) == (keep, minutes)


@pytest.mark.parametrize(
    ("task", "longest", "on_gpus", "expected"),
    [
        (SFT, 300, True, (304, "bfloat16", True, False, "off")),
        (SFT, 4000, False, (1024, "float32", True, False, "off")),
        ("classification", 37, False, (128, "float32", False, True, "off")),
        ("classification", 900, True, (512, "bfloat16", False, True, "off")),
    ],
)
def test_what_rows_and_the_base_decide(
    task: str, longest: int, on_gpus: bool, expected: tuple[int, str, bool, bool, str]
) -> None:
    """No model is asked for more tokens than it has positions; GPUs take the base's own dtype."""
    limited = capped(config(*PRETRAINED), task, BASE)
    cap = limited.model.max_length
    assert cap == {SFT: 1024}.get(task, 512)
    found = for_rows(limited, task, BASE, [20] * 9 + [min(longest, cap)], min(longest, cap), on_gpus=on_gpus)
    training = found.training
    assert (
        found.model.max_length,
        found.model.dtype,
        training.packing,
        training.group_by_length,
        training.compile,
    ) == expected


def test_a_long_run_of_a_large_model_on_gpus_is_compiled() -> None:
    """6 x 1e9 weights x 1e5 rows x 400 tokens x 3 epochs are 7.2e17 operations; with 10 updates 7.7e13."""
    lengths, whole = [400] * 100_000, config(*PRETRAINED)
    few = config(*PRETRAINED, "training.max_steps=10")
    for settings, gpus, expected in ((whole, True, "graphs"), (whole, False, "off"), (few, True, "off")):
        assert for_rows(settings, SFT, BASE, lengths, 400, on_gpus=gpus).training.compile == expected


@pytest.mark.parametrize(
    ("overrides", "rows", "length", "parts"),
    [
        (PRETRAINED, 32, 104, 8),
        (PRETRAINED, 32, 2048, 16),
        (PRETRAINED, 32, 9000, 32),
        ([*PRETRAINED, "training.batch_size=4"], 4, 104, 4),
        ([*PRETRAINED, "training.micro_batches=2"], 32, 2048, 2),
        ([*OWN, "training.batch_size=4"], 4, 128, 4),
        (OWN, 32, 4096, 8),
    ],
)
def test_a_micro_batch_has_at_most_4096_tokens(overrides: list[str], rows: int, length: int, parts: int) -> None:
    assert with_micro_batches(config(*overrides), rows, length).training.micro_batches == parts


def test_what_is_set_is_not_chosen() -> None:
    said = ["model.max_length=64", "model.dtype=float32", "training.packing=false", "training.compile=kernels"]
    said += ["training.keep=last", "training.checkpoint_minutes=null", "training.group_by_length=false"]
    said += ["training.epochs=1", "optimizer.lr=0.1", "adapter.dropout=0"]
    settings = config(*PRETRAINED, *said)
    assert capped(settings, SFT, BASE) == settings
    assert for_rows(settings, SFT, BASE, [30], 30, on_gpus=True) == settings


def test_a_resumed_run_keeps_what_was_chosen(tmp_path: Path) -> None:
    """The run began on two GPUs; it goes on from its own settings, and not from those of a machine without any."""
    begun = for_rows(placed(config(*PRETRAINED), 2)[0], SFT, BASE, [300], 300, on_gpus=True)
    (tmp_path / "config.yaml").write_text(to_yaml(with_micro_batches(begun, 3, 304)), encoding="utf-8")
    written = load_config(tmp_path / "config.yaml")
    again = inherited(config(*PRETRAINED), written)
    assert config_digest(again) == config_digest(written)
    assert (again.run.backend, is_set(again, "run.workers")) == ("nccl", False)
    other = inherited(config(*PRETRAINED, "model.dtype=float32"), written)
    assert other.model.dtype == "float32"  # named by the user: the resume refuses it by name


@pytest.mark.parametrize(
    ("overrides", "demo"),
    [
        ([], True),
        (["run.workers=3", "training.checkpoint_every=5"], True),
        *(([other], False) for other in ("run.portable=false", "run.backend=nccl", "seed=43", "model.base=x", *OWN)),
    ],
)
def test_only_the_demo_is_portable_by_default_and_only_on_cpus_with_avx2(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], demo: bool
) -> None:
    for name in portable.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(portable, "environment", lambda: {"instructions": "avx avx2"})
    found, said = portable_demo(config(*overrides))
    assert (found.run.portable, said) == (demo, "")
    monkeypatch.setattr(portable, "environment", lambda: {"instructions": "avx fma"})
    found, said = portable_demo(config(*overrides))
    assert (found.run.portable, "needs a CPU with AVX2" in said) == (False, demo)
    # A resumed run keeps its value on any CPU, and says nothing.
    for value in (True, False):
        again = inherited(config(), config(f"run.portable={value}"))
        assert (again.run.portable, portable_demo(again)) == (value, (again, ""))


def test_the_template_leaves_what_is_chosen_open(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(template(), encoding="utf-8")
    assert "max_length: auto" in template()
    found = load_config(path, PRETRAINED)
    assert not is_set(found, "model.max_length")
