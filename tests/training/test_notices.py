"""Notices, comparisons between ranks, and refusals before the first step."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from andon.backend.base import GroupBackend, InlineBackend
from andon.config.load import load_config
from andon.config.schema import Config
from andon.console.messages import Exit, InputError
from andon.metrics.scores import Confusion, scores
from andon.model.masks import Masking
from andon.run.atomic import json_bytes
from andon.run.summary import environment
from andon.step.plan import BatchPlan
from andon.training import material as notices
from andon.training import run
from andon.training.material import idleness, learns_nothing
from andon.training.preview import describe
from andon.training.run import _usable, agree_on_start, clocks_apart
from andon.training.trainer import Progress
from andon_contracts.fields import Real
from andon_contracts.record import GENESIS, RankPart, Step, StepDigests, encode
from tests.repository.sources import ROOT
from tests.support.ranks import run_ranks
from tests.training.runs import Runs, write_jsonl


def test_workers_without_rows_and_contradicting_labels_are_said(runs: Runs, tmp_path: Path) -> None:
    idle = "56 of 60 workers have no row in any update: an update has 8 rows in 4 micro-batches"
    assert idleness(BatchPlan((1,) * 41, 8, 4, 0, 2), 60) == idle
    data = write_jsonl(tmp_path / "train.jsonl")
    data.write_text(data.read_text() + '{"text": "?", "label": "red"}\n{"text": "?", "label": "blue"}\n')
    said = list(describe(load_config(None, runs.overrides("run.workers=60", f"data.train={data}"))))
    assert [f"note: {idle}" in said, "equal texts have different labels (1 text)" in str(said)] == [True, True]


@pytest.mark.parametrize(
    ("steps", "more", "warned"),
    [(1, (), True), (2, (), False), (1, ("schedule.type=constant",), False), (1, ("schedule.min_lr=0.01",), False)],
)
def test_a_run_of_one_update_at_the_lowest_rate_is_said(
    runs: Runs, steps: int, more: tuple[str, ...], warned: bool
) -> None:
    config = load_config(None, runs.overrides(*more), {})
    plan = BatchPlan(tuple(range(8 * steps)), batch_size=8, micro_batches=4, seed=0, epochs=1)
    assert bool(learns_nothing(plan, config)) == warned
    if warned:
        assert "one update, and its learning rate is 1e-06 (optimizer.lr is 0.01)" in learns_nothing(plan, config)


def test_check_and_train_say_that_nothing_is_learned(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = (f"data.train={write_jsonl(tmp_path / 'few.jsonl', 9)}", "training.epochs=1")
    config = load_config(None, runs.overrides(*few), {})
    (line,) = [line for line in describe(config) if "one update" in line]
    assert runs.train(tmp_path / "run", *few) == Exit.OK
    assert f"andon: {line}\n" in capsys.readouterr().err


H = "0123456789abcdef"


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("confusion.MOST_BYTES", r"data\.eval: the confusion matrix of \d+ rows of 3 classes may take \d+ bytes"),
        ("MOST_JSON", r"data\.train: 3 labels of \d+ bytes in all may make summary\.json \d+ bytes"),
        ("MOST_SETTINGS", r"data\.train: 3 labels of \d+ bytes in all may make adapter/config\.json \d+ bytes"),
        ("MAX_LINE", r"training\.batch_size: the ledger's line of a step of 8 rows on 2 workers may take \d+ bytes"),
    ],
)
def test_what_would_not_fit_is_said_before_the_run(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, limit: str, said: str
) -> None:
    """`andon check` names the key, the size and the limit; it would end the run at its first line, or its last."""
    config = load_config(None, runs.overrides(), {"run.backend": "inline"})
    assert any("rows to train on" in line for line in describe(config))
    monkeypatch.setattr(f"andon.training.material.{limit}", 10)
    with pytest.raises(InputError, match=said):
        list(describe(config))


def test_no_class_takes_more_of_a_summary_than_is_reserved() -> None:
    wrong, right = (((k, (k + 1) % 99, 10**9 + k) for k in range(99)), ((k, k, 12_345_678 + k) for k in range(99)))
    found = scores(Confusion(99, tuple(sorted([*wrong, *right])))).as_dict()
    text = json_bytes({"eval": {"classes": found["classes"]}})
    assert len(text) < 99 * notices._CLASS


def test_no_rank_takes_more_of_a_line_than_is_reserved() -> None:
    part = RankPart(rank=1 << 14, leaves=(), ids=(), weights=H, gradient=H, optimizer=H, content=H)
    real = Real.of(0.1)
    step: Any = Step(1, 0, 0, (), 0, real, real, real, 0, 1, "inline", StepDigests(H, H, H, H), ())
    one = len(encode(step, 0, GENESIS))
    assert len(encode(replace(step, ranks=(part,) * 100), 0, GENESIS)) - one < 100 * notices._RANK
    ids = tuple(range(900, 1000))
    own = replace(part, ids=ids)
    more = len(encode(replace(step, ids=ids, ranks=(own,)), 0, GENESIS)) - one
    assert more < 2 * len(ids) * len("999,") + notices._RANK


def session(backend: str, devices: list[str]) -> Any:
    where = SimpleNamespace(backend=SimpleNamespace(name=backend, world_size=1, ranks=(0,)))
    return SimpleNamespace(run=where, environment=environment(1, devices))


def test_ranks_of_one_kind_have_everything_alike_and_of_two_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        (backend, kind): attested(backend, Masking.TOKENS, monkeypatch, [kind] if kind else [])["versions"]
        for backend in ("nccl", "gloo", "mixed")
        for kind in ("H200", "A100", "")
    }
    for backend in ("nccl", "gloo"):
        assert len({found[backend, "H200"], found[backend, "A100"], found[backend, ""]}) == 3
    assert found["mixed", "H200"] == found["mixed", ""]


def attested(
    backend: str, masking: Masking, monkeypatch: pytest.MonkeyPatch, devices: Sequence[str] = ("H200",)
) -> dict[str, int]:
    """What a rank with these devices sends to the others before the first step."""
    shown: list[dict[str, int]] = []
    alike = SimpleNamespace(digest="one")
    starting = session(backend, [*devices])
    starting.config, starting.run.writes = Config(), True
    starting.material = SimpleNamespace(rows=alike, tokenizer=alike)
    starting.run.primary = SimpleNamespace(model=None, device=torch.device("cuda", 0), optimizer_digest=lambda: 1)
    starting.run.step = SimpleNamespace(attest_start=shown.append)
    monkeypatch.setattr(run, "masking_of", lambda *_: masking)
    agree_on_start(starting, Progress())
    return shown[0]


def test_ranks_compare_how_their_models_are_told_who_sees_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {each: attested("nccl", each, monkeypatch)["attention"] for each in Masking}
    assert len(set(found.values())) == len(Masking)
    assert len({attested("mixed", each, monkeypatch)["attention"] for each in Masking}) == 1


def test_a_model_at_which_the_host_waits_for_the_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attested("nccl", Masking.UNMASKED, monkeypatch)
    assert capsys.readouterr().err == ""
    attested("nccl", Masking.TOKENS, monkeypatch)
    assert "which makes the CPU wait for the GPU at each pass" in capsys.readouterr().err


# What ranks find out together: GPUs that do not work, clocks that are apart

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine on which no GPU works")
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def decided(backend: str, allowed: bool, *more: str) -> tuple[str, str]:
    devices = (GPU, CPU) if backend == "mixed" else (GPU, torch.device("cuda", 1))
    flags = {"run.backend": backend, "run.workers": 2, "run.cpu_fallback": allowed}
    try:
        rank = torch.distributed.get_rank()
        name, device = _usable(load_config(None, more, flags), backend, devices[rank], rank)
    except InputError as error:
        return "refused", str(error)
    return name, device.type


@without_gpu
@pytest.mark.parametrize(("backend", "instead"), [("nccl", "gloo"), ("mixed", "mixed")])
def test_all_ranks_go_to_the_cpu_if_no_gpu_works_and_that_was_asked_for(backend: str, instead: str) -> None:
    assert [outcome.get() for outcome in run_ranks(2, decided, backend, True)] == [(instead, "cpu")] * 2
    for outcome in run_ranks(2, decided, backend, False):
        assert outcome.get()[0] == "refused"
        assert "run.cpu_fallback=true" in outcome.get()[1]


@without_gpu
def test_gpus_that_were_asked_for_by_name_are_not_passed_over() -> None:
    for outcome in run_ranks(2, decided, "nccl", True, "run.devices=[0, 1]"):
        assert [f"run.devices[{n}]: GPU {n} cannot be used" in outcome.get()[1] for n in (0, 1)] == [True, True]


def _late_clock(seconds: float) -> str:
    if dist.get_rank() == 1:
        true = time.time_ns
        time.time_ns = lambda: true() - int(seconds * 1e9)
    return clocks_apart(GroupBackend("gloo", torch.device("cpu")))


@pytest.mark.parametrize(("seconds", "words"), [(0.0, ""), (20.0, "rank 1's is 20.0 s behind"), (-3600.0, "ahead")])
def test_clocks_that_are_apart_are_told(seconds: float, words: str) -> None:
    said = [outcome.get() for outcome in run_ranks(3, _late_clock, seconds)]
    assert len(set(said)) == 1
    assert (words in said[0]) if words else said[0] == ""
    assert clocks_apart(InlineBackend([torch.device("cpu")] * 2)) == ""


def test_the_lines_of_the_docs_name_the_number_of_workers() -> None:
    text = (ROOT / "docs" / "machines.md").read_text()
    blocks = [part for part in re.findall(r"(?ms)^```bash\n(.*?)^```$", text) if "torchrun" in part]
    lines = [block for block in blocks if not re.search(r"--nnodes \d+:\d+", block)]
    assert len(lines) == 2
    lines += re.findall(
        r"(?m)^[^#\n]*\bandon train\b(?:.*\\\n)*.*", (ROOT / "examples" / "engines" / "andon.sbatch").read_text()
    )
    assert len(lines) == 3
    assert [block for block in lines if "--workers" not in block] == []
