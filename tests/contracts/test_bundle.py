"""The bundle: a part of each rank, tensors up to a stated limit, and no violation hidden by a disk that refuses."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest
import torch

from andon_contracts import bundle
from andon_contracts.act import Scene, conclude
from andon_contracts.bundle import Evidence, write_part
from andon_contracts.record import Broken
from andon_contracts.stacks import doing, stacks
from andon_contracts.tensor_file import read_tensors
from andon_contracts.violation import Finding, Violation

FINDING = Finding("they differ", 4, (1,), "w", (("w", "aa bb"),))


def _evidence(folder: Path, rank: int, tensors: dict[str, torch.Tensor]) -> Evidence:
    return Evidence(folder, rank, 2, lambda: [rank], lambda _: iter(tensors.items()))


def test_the_account_holds_the_ledgers_record(tmp_path: Path) -> None:
    """One schema: what a ledger line would say of the violation is read by the ledger's own reader."""
    error = conclude(Violation.of("replicas-agree", FINDING), Scene(world=2), _evidence(tmp_path, 0, {}), {})
    body = json.loads((tmp_path / "4" / "replicas-agree.json").read_text())
    version = body["record"].pop("v")
    record = Broken.from_json(body["record"], version=version)
    assert record == Broken("replicas-agree", 4, (1,), "w", "they differ", {"w": "aa bb"})
    assert body["message"] == str(error)
    assert error.bundle == str(tmp_path / "4")


def test_the_account_names_the_accelerators_that_are_used(tmp_path: Path) -> None:
    evidence = dataclasses.replace(_evidence(tmp_path, 0, {}), devices=["one of a kind"])
    conclude(Violation.of("replicas-agree", FINDING), Scene(world=2), evidence, {})
    assert json.loads((tmp_path / "4" / "replicas-agree.json").read_text())["versions"]["devices"] == ["one of a kind"]


def test_only_the_first_rank_writes_the_account(tmp_path: Path) -> None:
    conclude(Violation.of("replicas-agree", FINDING), Scene(world=2), _evidence(tmp_path, 1, {}), {})
    assert [path.name for path in (tmp_path / "4").iterdir()] == ["replicas-agree"]


def test_tensors_are_kept_in_order_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "LIMIT_BYTES", 20)
    tensors = {
        "named": torch.arange(3.0),  # 12 bytes
        "odd": torch.ones(1, dtype=torch.complex128),
        "large": torch.ones(3),  # 12 more would be 24
        "small": torch.ones(2),  # 8 more are 20
    }
    assert write_part(tmp_path, "finite", _evidence(tmp_path, 0, tensors), {}, "w") == ""
    part = json.loads((tmp_path / "finite" / "rank-0.json").read_text())
    assert part["tensors"]["left out"] == ["odd", "large"]
    assert set(part["digests"]) == set(tensors)
    kept = read_tensors(tmp_path / "finite" / "rank-0.safetensors")
    assert {name: tensor.tolist() for name, tensor in kept.items()} == {"named": [0, 1, 2], "small": [1, 1]}


def test_a_disk_that_refuses_hides_no_violation(tmp_path: Path) -> None:
    (tmp_path / "4").write_text("a file where the folder should be")
    error = conclude(Violation.of("replicas-agree", FINDING), Scene(world=2), _evidence(tmp_path, 0, {}), {})
    assert error.finding == FINDING
    assert "not all of the bundle could be written: " in str(error)


def test_every_thread_is_in_the_stacks() -> None:
    begun, go = threading.Event(), threading.Event()

    def waiting_here() -> None:
        begun.set()
        go.wait()

    thread = threading.Thread(target=waiting_here, name="a reader")
    thread.start()
    begun.wait()
    try:
        found = {each["name"]: each for each in stacks()}
        assert any(frame.endswith(" waiting_here") for frame in found["a reader"]["frames"])  # type: ignore[attr-defined]
        assert [each["main"] for each in found.values()].count(True) == 1
        assert thread.ident is not None
        assert doing(thread.ident).endswith(" waiting_here")
    finally:
        go.set()
        thread.join()
