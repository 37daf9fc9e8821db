"""Files that a rank writes for a violation: the bundle, its tensors without pickle, and torch's error file."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from andon_contracts import act
from andon_contracts.act import Evidence, Scene, with_bundle, write_part
from andon_contracts.legible import ERROR_FILE_VARIABLE, report_to_launcher, write_error_file
from andon_contracts.record import SCHEMA_VERSION, Broken
from andon_contracts.violation import Finding, Violation

FINDING = Finding("they differ", 4, (1,), "w", (("w", "aa bb"),))


def _evidence(folder: Path, rank: int, tensors: dict[str, torch.Tensor]) -> Evidence:
    return Evidence(folder, rank, 2, lambda: [rank], lambda _: iter(tensors.items()))


def test_the_account_of_rank_0_holds_the_ledgers_record_and_names_the_accelerators(tmp_path: Path) -> None:
    """One schema: what a ledger line would say of the violation is read by the ledger's own reader."""
    violation, device = Violation.of("replicas-agree", FINDING), "one of a kind"
    with_bundle(violation, Scene(world=2), _evidence(tmp_path, 1, {}), {})
    assert [path.name for path in (tmp_path / "4").iterdir()] == ["replicas-agree"]
    evidence = dataclasses.replace(_evidence(tmp_path, 0, {}), devices=[device])
    error = with_bundle(violation, Scene(world=2), evidence, {})
    body = json.loads((tmp_path / "4" / "replicas-agree.json").read_text())
    assert body["record"].pop("v") == SCHEMA_VERSION
    record = Broken.from_json(body["record"])
    assert record == Broken("replicas-agree", 4, (1,), "w", "they differ", {"w": "aa bb"})
    assert (body["message"], body["environment"]["devices"]) == (str(error), [device])
    assert error.bundle == str(tmp_path / "4")


def test_tensors_are_kept_in_order_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(act, "LIMIT_BYTES", 20)
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
    kept = load_file(tmp_path / "finite" / "rank-0.safetensors")
    assert {name: tensor.tolist() for name, tensor in kept.items()} == {"named": [0, 1, 2], "small": [1, 1]}


def test_a_disk_that_refuses_hides_no_violation(tmp_path: Path) -> None:
    (tmp_path / "4").write_text("a file where the folder should be")
    error = with_bundle(Violation.of("replicas-agree", FINDING), Scene(world=2), _evidence(tmp_path, 0, {}), {})
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
        found = {each["name"]: each for each in act.thread_stacks()}
        assert any(frame.endswith(" waiting_here") for frame in found["a reader"]["frames"])  # type: ignore[attr-defined]
        assert not any("andon_contracts" in str(each["frames"]) for each in found.values())
        assert [each["main"] for each in found.values()].count(True) == 1
        assert thread.ident is not None
        assert act.current_activity(thread.ident).endswith(" waiting_here")
    finally:
        go.set()
        thread.join()


# Tensor files without pickle.


def _of_every_kind() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {f"of {dtype}": torch.randn(3, 5, generator=generator).to(dtype) for dtype in act.NAMES}
    return made | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "turned": torch.arange(6.0).view(2, 3).t()}


def _bits(tensor: torch.Tensor) -> list[int]:
    found: list[int] = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
    return found


def test_every_kind_comes_back_to_the_bit(tmp_path: Path) -> None:
    tensors = _of_every_kind()
    act.write_tensors(tmp_path / "t.safetensors", tensors, {"step": "3"})
    read = load_file(tmp_path / "t.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert _bits(read[name]) == _bits(tensor), name
    assert [path.name for path in tmp_path.iterdir()] == ["t.safetensors"]


def test_a_kind_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"z \(torch.complex128\)"):
        act.write_tensors(tmp_path / "t", {"z": torch.ones(1, dtype=torch.complex128)}, {})
    assert list(tmp_path.iterdir()) == []


# Torch's error file.


def _failures(folder: Path, codes: dict[int, int]) -> ChildFailedError:
    return ChildFailedError(
        "loop", {rank: ProcessFailure(rank, 100 + rank, code, str(folder / str(rank))) for rank, code in codes.items()}
    )


def test_the_culprit_is_the_root_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 2, 1):
        monkeypatch.setenv(ERROR_FILE_VARIABLE, str(tmp_path / str(rank)))
        report_to_launcher("rank 1 of 3 failed\n  where    here", late=rank != 1)
    found = _failures(tmp_path, {0: 1, 1: 1, 2: 1})
    assert found.get_first_failure()[0] == 1
    assert "rank 1 of 3 failed\n    where    here" in found.format_msg().partition("Root Cause")[2]


def test_what_anybody_wrote_does_not_act_on_the_terminal_of_torchrun(tmp_path: Path) -> None:
    write_error_file(tmp_path / "0", "bad row \x1b]0;t\x07", "bad row \x1b]0;t\x07\n  \u202e", 1)
    printed = _failures(tmp_path, {0: 1}).format_msg()
    assert "bad row \\x1b]0;t\\x07\n    \\u202e" in printed
    assert "\x1b" not in printed


def test_a_killed_rank_without_a_file_is_the_root_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_FILE_VARIABLE, str(tmp_path / "0"))
    report_to_launcher("rank 1 of 2 died", late=True)
    assert _failures(tmp_path, {0: 1, 1: -9}).get_first_failure()[0] == 1


def test_what_a_rank_wrote_of_itself_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_FILE_VARIABLE, str(tmp_path / "0"))
    report_to_launcher("the cause", late=False)
    report_to_launcher("something after it", late=False)
    assert "the cause" in (tmp_path / "0").read_text()
    report_to_launcher("rank 1 died", late=True)
    assert "rank 1 died" in (tmp_path / "0").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_without_a_launcher_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ERROR_FILE_VARIABLE, raising=False)
    report_to_launcher("x", late=False)
    monkeypatch.setenv(ERROR_FILE_VARIABLE, str(tmp_path / "gone" / "0"))
    report_to_launcher("x", late=False)
    assert list(tmp_path.iterdir()) == []
