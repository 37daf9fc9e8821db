"""Provenance and summary: the fingerprint has what bits depend on; a wrong file is refused with its field."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from andon.console.messages import InputError
from andon.run import summary as provenance
from andon.run.summary import (
    Head,
    Summary,
    commit,
    differences,
    environment,
    fingerprint,
    read_provenance,
    read_summary,
    source_digest,
    write_provenance,
    write_summary,
)
from andon_contracts import fingerprint as machine
from andon_contracts.fields import Real


def test_versions_are_those_installed() -> None:
    found = environment(threads=1)
    packages = found["packages"]
    assert isinstance(packages, Mapping)
    assert packages["torch"] == metadata.version("torch")
    assert found["threads"] == 1
    json.dumps(found, allow_nan=False)


def test_switches_of_compilers_are_recorded_but_for_places_and_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    switches = {
        "ATEN_CPU_CAPABILITY": "default",
        "TORCH_COMPILE_DISABLE": "1",
        "TRITON_F32_DEFAULT": "tf32",
        "CUBLAS_EMULATION_STRATEGY": "eager",
        "PYTORCH_TUNABLEOP_ENABLED": "1",
    }
    unknown = ("TORCHINDUCTOR_A_SWITCH_OF_TOMORROW", "CUDNN_ANY", "PTXAS_OPTIONS")
    others = ("TORCHINDUCTOR_REDIS_ANY", "TORCH_COMPILE_ANY_URL", "TORCHINDUCTOR_CACHE_DIR", "TRITON_PTXAS_PATH")
    others += ("TRITON_API_TOKEN", "CUDNN_X_PASSWORD", "TORCHINDUCTOR_SECRET")
    before = fingerprint(environment())
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    for name in (*unknown, *others):
        monkeypatch.setenv(name, "redis://user:s3cr3t@host")
    found = environment()
    assert "s3cr3t" not in json.dumps(found)
    assert fingerprint(found) == before | {
        f"flag {name}": value for name, value in {**switches, **dict.fromkeys(unknown, "set")}.items()
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpu", "another"),
        ("threads", 7),
        ("libc", "musl"),
        ("instructions", "sse"),
        ("devices", ["H200"]),
        ("driver", "1.2.3"),
        ("python", "3.99.0"),
    ],
)
def test_the_fingerprint_changes_with_what_bits_depend_on(name: str, value: object) -> None:
    ours = environment(threads=1, devices=["H100"])
    (difference,) = differences(fingerprint(ours), fingerprint(ours | {name: value}))
    assert difference.startswith(f"{name}: ")


def test_the_fingerprint_of_a_portable_run_is_one_for_all_cpus() -> None:
    ours, plain = environment(threads=1, portable="one after the other"), environment(threads=1)
    theirs = ours | {"cpu": "another", "instructions": "avx avx2 avx512f fma"}
    assert fingerprint(theirs) == fingerprint(ours)
    assert fingerprint(theirs | {"libc": "musl"}) != fingerprint(ours)
    apart = [each.partition(":")[0] for each in differences(fingerprint(ours), fingerprint(plain))]
    assert apart == ["cpu", "instructions", "products"]
    assert fingerprint(ours | {"portable": "two and two"}) != fingerprint(ours)
    assert "portable" not in plain


@pytest.mark.parametrize("name", ["andon", "triton", "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu13"])
def test_what_makes_the_kernels_of_an_accelerator_is_in_its_fingerprint(name: str) -> None:
    for devices, expected in ((["H200"], [f"{name}: none, 9"]), ([], [])):
        ours = environment(threads=1, devices=devices)
        packages = ours["packages"]
        assert isinstance(packages, Mapping)
        without = fingerprint(ours | {"packages": {**packages, name: None}})
        assert list(differences(without, fingerprint(ours | {"packages": {**packages, name: "9"}}))) == expected


@pytest.mark.parametrize("folder", ["model", "fast"])
def test_the_code_that_compiles_passes_is_in_the_fingerprint_of_an_accelerator(folder: str) -> None:
    ours = environment(threads=1, devices=["H200"])
    sources = ours["sources"]
    assert isinstance(sources, Mapping)
    changed = ours | {"sources": {**sources, f"andon.{folder}": "0" * 16}}
    (difference,) = differences(fingerprint(ours), fingerprint(changed))
    digest = source_digest(Path(provenance.__file__).parents[1] / folder)
    assert difference == f"source andon.{folder}: {digest}, {'0' * 16}"
    assert not [name for name in fingerprint(environment(threads=1)) if name.startswith("source")]


def test_the_digest_of_code_is_of_names_and_contents(tmp_path: Path) -> None:
    states = [{"a.py": "1\n", "b.py": "2\n"}, {"a.py": "1\n", "c.py": "2\n"}, {"a.py": "1\n2\n"}, {"a.py": "1\n"}]
    found = []
    for place, files in enumerate([*states, states[0]]):
        folder = tmp_path / str(place)
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        found.append(source_digest(folder))
    assert found[-1] == found[0]
    assert len(set(found)) == len(states)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n", "535.129.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC 13\n", "570.86.15"),
        ("something else\n", None),
        ("", None),
    ],
)
def test_the_driver_is_the_one_that_the_kernel_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, expected: str | None
) -> None:
    monkeypatch.setattr(machine, "_DRIVER", tmp_path / "version")
    assert environment(devices=["H200"])["driver"] is None
    (tmp_path / "version").write_text(line)
    assert environment(devices=["H200"])["driver"] == expected


def test_the_fingerprint_ignores_where_it_runs() -> None:
    ours = environment(threads=1)
    packages = ours["packages"]
    assert isinstance(packages, Mapping)
    patch = f"{sys.version_info.major}.{sys.version_info.minor}.999"
    theirs = ours | {"cores": 99, "platform": "other", "python": patch, "packages": {**packages, "safetensors": "9"}}
    assert fingerprint(theirs) == fingerprint(ours)
    assert differences(fingerprint(ours), fingerprint(theirs)) == ()
    other = ours | {"packages": {**packages, "torch": "1.0"}}
    assert fingerprint(other) != fingerprint(ours)


def test_the_commit_of_a_repository_around_us_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    (tmp_path / "provenance.py").touch()
    assert commit() is None
    provenance._git(tmp_path, "init", "-q")
    assert commit() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() is None


def test_provenance_is_read_as_it_was_written(tmp_path: Path) -> None:
    ours = environment(threads=2, devices=["B", "A", "B"])
    write_provenance(tmp_path / "p.json", identity="ab" * 8, digests={"data": "cd" * 8}, environment=ours)
    body = json.loads((tmp_path / "p.json").read_text())
    assert (body["identity"], body["commit"]) == ("ab" * 8, commit())
    found = read_provenance(tmp_path / "p.json")
    assert found.digest("data") == "cd" * 8
    assert found.fingerprint == fingerprint(ours) == fingerprint(body["environment"])
    assert found.fingerprint["devices"] == "A, B"
    with pytest.raises(InputError, match=r"p\.json: has no digest of 'base'"):
        found.digest("base")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b"{}", b'{"digests": {"a": 1}, "fingerprint": {}}', None]
)
def test_a_damaged_provenance_is_bad_input(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(InputError, match=r"p\.json: "):
        read_provenance(tmp_path / "p.json")


# The summary.

SUMMARY = Summary(
    run="r1",
    finished=True,
    reason="finished",
    steps=60,
    world_size=2,
    backend="gloo",
    weights_digest="ab" * 8,
    initial_weights_digest="cd" * 8,
    contracts={"replicas-agree": 120},
    violations=0,
    wall_s=12.5,
    ledger=Head(62, "ef" * 8),
    fingerprint={"torch": "2.13"},
    final_loss=Real.of(0.1),
    eval={"accuracy": 0.9, "macro_f1": 0.8, "confusion": "ab" * 8},
    best_step=50,
)


def test_a_summary_survives(tmp_path: Path) -> None:
    for summary in (SUMMARY, replace(SUMMARY, final_loss=None, best_step=None, eval={}, finished=False)):
        write_summary(tmp_path / "s.json", summary)
        assert read_summary(tmp_path / "s.json") == summary


def test_scores_that_are_not_finite_become_null(tmp_path: Path) -> None:
    summary = replace(SUMMARY, eval={"auroc": math.nan, "per": [math.inf, 1.0]}, final_loss=Real.of(math.nan))
    write_summary(tmp_path / "s.json", summary)
    found = read_summary(tmp_path / "s.json")
    assert found.eval == {"auroc": None, "per": [None, 1.0]}
    assert found.final_loss == Real.of(math.nan)


def test_a_wrong_summary_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wall_s must be a float"):
        write_summary(tmp_path / "s.json", replace(SUMMARY, wall_s=12))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("text", "says"), [("{", "not the summary"), ("{}", "run is missing"), ("[]", "object")])
def test_a_wrong_summary_is_an_input_error(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(InputError, match=says) as caught:
        read_summary(tmp_path / "s.json")
    assert "s.json" in str(caught.value)
    with pytest.raises(InputError, match="No such file"):
        read_summary(tmp_path / "none.json")
