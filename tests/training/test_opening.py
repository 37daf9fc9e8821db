"""What ranks must have alike before the first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from andon.config.schema import Config
from andon.model.masks import Masking
from andon.run.provenance import environment
from andon.training import run
from andon.training.run import _versions, agree_on_start
from andon.training.trainer import Progress


def session(backend: str, devices: list[str]) -> Any:
    """As much of a session as says where it runs."""
    where = SimpleNamespace(backend=SimpleNamespace(name=backend, world_size=1, ranks=(0,)))
    return SimpleNamespace(run=where, environment=environment(1, devices))


def test_ranks_of_two_kinds_have_the_rest_alike() -> None:
    assert _versions(session("mixed", ["H200"])) == _versions(session("mixed", []))


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_ranks_of_one_kind_have_everything_alike(backend: str) -> None:
    assert _versions(session(backend, ["H200"])) != _versions(session(backend, ["A100"]))
    assert _versions(session(backend, ["H200"])) != _versions(session(backend, []))


def attested(backend: str, masking: Masking, monkeypatch: pytest.MonkeyPatch) -> int:
    """What a rank on a GPU shows the others of how its model is told who sees whom."""
    shown: list[dict[str, int]] = []
    alike = SimpleNamespace(digest="one")
    starting = session(backend, ["H200"])
    starting.config, starting.run.writes = Config(), True
    starting.material = SimpleNamespace(rows=alike, tokenizer=alike)
    starting.run.primary = SimpleNamespace(model=None, device=torch.device("cuda", 0), optimizer_digest=lambda: 1)
    starting.run.step = SimpleNamespace(attest_start=shown.append)
    monkeypatch.setattr(run, "masking_of", lambda *_: masking)
    agree_on_start(starting, Progress())
    return shown[0]["attention"]


def test_ranks_compare_how_their_models_are_told_who_sees_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {each: attested("nccl", each, monkeypatch) for each in Masking}
    assert len(set(found.values())) == len(Masking)
    assert len({attested("mixed", each, monkeypatch) for each in Masking}) == 1


def test_a_model_at_which_the_host_waits_for_the_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attested("nccl", Masking.UNMASKED, monkeypatch)
    assert capsys.readouterr().err == ""
    attested("nccl", Masking.TOKENS, monkeypatch)
    assert "at which the host waits for the GPU once a pass" in capsys.readouterr().err
