"""What a run will need, for each number of workers, before anything of it exists; and what becomes a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from andon.backend.base import InlineBackend
from andon.backend.devices import Accelerator
from andon.config.load import load_config
from andon.config.schema import Config
from andon.console.messages import InputError
from andon.data.tokens import byte_tokenizer
from andon.model.adapter import save_base
from andon.model.memory import MemoryPlan
from andon.training import forecast
from andon.training.forecast import (
    Machine,
    MemoryPlanner,
    NotPlannable,
    WorldPlan,
    agree_on_devices,
    drop_graphs_if_too_big,
    hold_to_budget,
    uses_cuda_graphs,
)
from andon.training.material import prepare
from andon_contracts.policy import evaluations, reset_evaluations, suspended
from tests.model.tiny import LABELS, base_of, changed, spec
from tests.training.runs import SMALL, write_jsonl

MIB = 2**20
LARGE = 2**40


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("forecast") / "rows.jsonl")


def configured(data: Path, *more: str) -> Config:
    return load_config(None, [*SMALL, f"data.train={data}", *more])


def plans(config: Config, workers: list[int], machine: Machine) -> list[WorldPlan]:
    return list(forecast.forecast(config, workers, machine).worlds)


def test_how_busy_workers_are_and_who_idles(data: Path) -> None:
    two, three, six = plans(configured(data, "run.backend=inline"), [2, 3, 6], Machine((), LARGE))
    assert (two.micro_batches_of_each, two.efficiency) == ((2, 2), 1.0)
    assert sorted(three.micro_batches_of_each) == [1, 1, 2]
    assert three.efficiency == pytest.approx(4 / 6)
    assert six.micro_batches_of_each.count(0) == 2
    assert six.idle == "2 of 6 workers have no row in any update: an update has 8 rows in 4 micro-batches"
    assert not three.idle
    assert six.efficiency == pytest.approx(4 / 6)


def test_a_plan_for_gpus_that_are_not_there_says_so(data: Path) -> None:
    nccl, allowed, gloo = (
        plans(configured(data, *settings), [2], Machine((), LARGE))[0]
        for settings in (["run.backend=nccl"], ["run.backend=nccl", "run.cpu_fallback=true"], ["run.backend=gloo"])
    )
    assert "nccl needs a GPU" in nccl.problem
    assert [need.kind for need in allowed.devices] == ["cpu"]
    assert "training on the CPU" in allowed.note
    assert not gloo.note


def test_processes_need_a_base_each_and_replicas_in_one_share_it(data: Path) -> None:
    one, three = plans(configured(data, "run.backend=gloo"), [1, 3], Machine((), LARGE))
    assert three.devices[0].needed >= 3 * (one.devices[0].needed - one.devices[0].each_rank.partials)
    (together,) = plans(configured(data, "run.backend=inline"), [3], Machine((), LARGE))
    assert together.devices[0].needed < 0.5 * three.devices[0].needed


def test_ranks_share_a_base_that_is_loaded_as_it_was_saved(data: Path, tmp_path: Path) -> None:
    base = changed(spec(dtype="bfloat16"), vocab_size=byte_tokenizer().vocab_size)
    save_base(base_of(base), tmp_path, LABELS)
    byte_tokenizer().save(tmp_path)
    for dtype, bases in (("bfloat16", 1), ("float32", 3)):
        loaded = base_of(changed(base, base=str(tmp_path), dtype=dtype))
        assert (f"{tmp_path}/model.safetensors" in Path("/proc/self/maps").read_text()) == (bases == 1)
        del loaded
        config = configured(data, f"model.base={tmp_path}", f"model.dtype={dtype}", "run.backend=nccl")
        _, need = plans(config, [3], Machine((LARGE,) * 3, LARGE))[0].devices
        assert need.needed == bases * need.each_rank.base + 3 * (need.each_rank.weights + forecast.PROCESS)


def test_compiled_passes_are_bounded_by_eager_ones_and_the_graphs_that_stay(data: Path) -> None:
    settings = ["run.backend=nccl", "run.cuda_graphs=never", "training.compile_lengths=1"]
    eager, kernels, graphs = (
        plans(configured(data, *settings, *more), [1], Machine((LARGE,), LARGE))[0].devices[0].each_rank
        for more in (["training.pad_to_multiple_of=128"], ["training.compile=kernels"], ["training.compile=graphs"])
    )
    assert kernels == eager
    assert eager.activations < graphs.activations
    assert graphs == replace(eager, graphs=eager.evaluation, activations=graphs.activations)
    assert graphs.graphs > 0


def test_more_workers_than_gpus_are_planned_with_a_note_and_the_hosts_share_of_ram(data: Path) -> None:
    one, two, three = plans(
        configured(data, "run.backend=nccl", "run.workers=1"), [1, 2, 3], Machine((LARGE,) * 2, LARGE)
    )
    assert one.fits
    assert two.fits
    assert two.devices[0].each_rank.outside - one.devices[0].each_rank.outside == forecast.NCCL_BUFFERS
    assert "3 workers for 2 GPUs of this host" in three.note
    assert three.fits
    assert [(need.kind, need.ranks) for need in three.devices] == [("cuda", 3), ("host", 2)]


def test_what_updates_on_the_cpu_is_planned_there(data: Path) -> None:
    more = ("run.workers=2", "adapter.kind=none")
    (alone,) = plans(configured(data, "run.backend=nccl", *more), [2], Machine((LARGE,) * 2, LARGE))
    (mixed,) = plans(configured(data, "run.backend=mixed", *more), [2], Machine((LARGE,), LARGE))
    gpu, host = (next(need.each_rank for need in mixed.devices if need.kind == kind) for kind in ("cuda", "host"))
    there = next(need.each_rank for need in alone.devices if need.kind == "cuda")
    assert (gpu.moments, there.moments) == (0, 2 * there.weights)
    assert (host.weights, host.gradient, host.moments) == (gpu.weights, gpu.weights, 2 * gpu.weights)


def test_the_smallest_gpu_counts_and_one_setting_with_which_it_fits_is_named(data: Path) -> None:
    given = ("run.backend=nccl", "run.cuda_graphs=always", "model.hidden_size=128", "model.max_length=64")
    free = forecast.forecast(configured(data, *given), [2], Machine((LARGE,) * 2, LARGE))
    needed = free.worlds[0].devices[0].needed
    assert free.remedy is None
    found = forecast.forecast(configured(data, *given), [2], Machine((LARGE, needed - 1), LARGE))
    need = found.worlds[0].devices[0]
    assert (need.budget, need.fits) == (needed - 1, False)
    assert found.remedy is not None
    changed = forecast.forecast(
        configured(data, *given, found.remedy.setting), [2], Machine((LARGE, needed - 1), LARGE)
    )
    assert changed.worlds[0].fits
    assert changed.worlds[0].devices[0].needed == found.remedy.needed < needed
    assert forecast.forecast(configured(data, *given), [2], Machine((LARGE, 700 * MIB), LARGE)).remedy is None


def test_a_model_that_cannot_be_followed_is_bad_input_to_a_plan_and_a_warning_to_a_run(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, gpu = configured(data), Accelerator(0, "a GPU", LARGE, LARGE)
    backend: Any = SimpleNamespace(name="nccl", ranks=[0], world_size=1, devices=[torch.device("cuda", 0)])
    monkeypatch.setattr(forecast, "look_at", lambda _: gpu)
    monkeypatch.setattr(forecast, "of_all_ranks", lambda found: {0: found})

    def failing(error: Exception) -> None:
        def phases(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(forecast, "traced_bytes", phases)

    failing(RuntimeError("no such shape\nand more"))
    expected = r"model\.base: its memory cannot be planned \(RuntimeError: no such shape\)"
    with pytest.raises(NotPlannable, match=expected):
        plans(config, [1], Machine((), LARGE))
    assert agree_on_devices(prepare(config), backend) is None
    assert "warning: model.base: its memory cannot be planned" in capsys.readouterr().err
    failing(InputError("model.base: is wrong"))
    for planning in (
        lambda: plans(config, [1], Machine((), LARGE)),
        lambda: agree_on_devices(prepare(config), backend),
    ):
        with pytest.raises(InputError, match="is wrong") as caught:
            planning()
        assert not isinstance(caught.value, NotPlannable)


@pytest.mark.parametrize("compiled", ["off", "kernels", "graphs"])
def test_a_run_that_does_not_fit_is_refused_before_its_start(
    data: Path, compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled passes too: the plan of eager ones, and what captured graphs hold."""
    more = ("run.backend=nccl", "run.workers=1", f"training.compile={compiled}", "run.cuda_graphs=never")
    config = configured(data, *more, "model.hidden_size=128", "model.max_length=64")
    backend: Any = SimpleNamespace(name="nccl", ranks=[0], world_size=1, devices=[torch.device("cuda", 0)])
    needed = MemoryPlanner(prepare(config)).plan(config, "cuda", 1).needed
    room = [needed]
    monkeypatch.setattr(forecast, "look_at", lambda _: Accelerator(0, "a GPU", room[0], room[0]))
    monkeypatch.setattr(forecast, "of_all_ranks", lambda found: {0: found})
    planned = agree_on_devices(prepare(config), backend)
    assert planned is not None
    assert (planned.graphs > 0) == (compiled == "graphs")
    room[0] -= 1
    with pytest.raises(InputError, match=r"too small for .* it would fit with --set training\.micro_batches=8"):
        agree_on_devices(prepare(config), backend)


class Peaked(InlineBackend):
    """Two ranks on GPUs that held 900 bytes and, at 1000 planned, one byte more than a tenth above the plan."""

    peaks = (900, 1101)

    def gather(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.tensor([peak]) for peak in self.peaks]


def test_a_peak_above_the_plan_and_a_tenth_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Peaked([torch.device("cpu")] * 2)
    found = hold_to_budget(backend, 7, 1000)
    assert (found["planned"], found["peak"]) == (1000, 1101)
    said = "memory-budget suspected at step 7 on rank 1: the peak of GPU memory was 1101 bytes, above the 1000 planned"
    assert f"warning: {said} + 10 %" in capsys.readouterr().err
    backend.peaks = (1100, 900)
    reset_evaluations()
    hold_to_budget(backend, 7, 1000)
    assert capsys.readouterr().err == ""
    assert evaluations() == {"memory-budget": 1}
    with suspended():
        hold_to_budget(backend, 7, 10)
    assert capsys.readouterr().err == ""


GIB = 1 << 30
NCCL = {"backend": "nccl"}
ALWAYS = {"backend": "nccl", "cuda_graphs": "always"}


@pytest.mark.parametrize(
    ("settings", "kind", "activations", "expected"),
    [
        ({"run": NCCL}, "cuda", GIB, True),
        ({"run": {"backend": "inline"}}, "cuda", GIB, True),
        ({"run": {"backend": "mixed"}}, "cuda", GIB, False),
        ({"run": {"backend": "mixed", "cuda_graphs": "always"}}, "cuda", GIB, False),
        ({"run": NCCL}, "cuda", 8 * GIB, True),
        ({"run": NCCL}, "cuda", 8 * GIB + 1, False),
        ({"run": NCCL}, "cuda", None, False),
        ({"run": NCCL}, "cpu", GIB, False),
        ({"run": NCCL, "task": "sft"}, "cuda", GIB, False),
        ({"run": NCCL, "task": "sft", "training": {"packing": True}}, "cuda", GIB, True),
        ({"run": ALWAYS, "task": "sft"}, "cuda", GIB, True),
        ({"run": ALWAYS}, "cuda", 9 * GIB, True),
        ({"run": ALWAYS}, "cuda", None, True),
        ({"run": {"backend": "nccl", "cuda_graphs": "never"}}, "cuda", GIB, False),
        ({"run": ALWAYS, "training": {"compile": "kernels"}}, "cuda", GIB, False),
        ({"run": ALWAYS, "training": {"activation_checkpointing": True}}, "cuda", GIB, False),
    ],
)
def test_small_eager_passes_are_captured(
    settings: dict[str, object], kind: str, activations: int | None, expected: bool
) -> None:
    """Never what is compiled or checkpointed, nor beside a CPU."""
    assert uses_cuda_graphs(Config.model_validate(settings), kind, activations) is expected


@pytest.mark.parametrize(
    ("asked", "compiled", "free", "kept"),
    [("auto", "off", 15, 5), ("auto", "off", 14, 0), ("always", "off", 14, 5), ("auto", "graphs", 14, 5)],
)
def test_graphs_are_left_out_where_there_is_no_room(asked: str, compiled: str, free: int, kept: int) -> None:
    """Ten bytes of weights and five of graphs. Only graphs that the user asked for, or compiled, count as needed."""
    plan = MemoryPlan(base=10, graphs=5)
    settings = {"run": {"backend": "nccl", "cuda_graphs": asked}, "training": {"compile": compiled}}
    assert drop_graphs_if_too_big(plan, Config.model_validate(settings), free) == replace(plan, graphs=kept)
