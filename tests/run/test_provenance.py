"""Provenance: what bits depend on is in the fingerprint, what they do not is not, and nothing about it can fail."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest

from andon.problems import InputError
from andon.run import provenance
from andon.run.provenance import commit, differences, environment, fingerprint, read_provenance, write_provenance


def test_versions_are_those_installed() -> None:
    """Versions come from the installed packages; one that is not there is None."""
    found = environment(threads=1)
    packages = found["packages"]
    assert isinstance(packages, Mapping)
    assert packages["torch"] == metadata.version("torch")
    assert found["threads"] == 1
    json.dumps(found, allow_nan=False)


def test_only_known_flags_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that choose kernels are recorded; others, which may be secrets, are not."""
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("SECRET_TOKEN", "s3cr3t")
    found = environment()
    assert "s3cr3t" not in json.dumps(found)
    assert fingerprint(found)["flag ATEN_CPU_CAPABILITY"] == "default"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpu", "another"),
        ("threads", 7),
        ("libc", "musl"),
        ("instructions", "sse"),
        ("devices", ["H200"]),
        ("python", "3.99.0"),
    ],
)
def test_the_fingerprint_changes_with_what_bits_depend_on(name: str, value: object) -> None:
    """Another CPU, thread count, libc, instruction set, accelerator or Python is another fingerprint, and named."""
    ours = environment(threads=1)
    (difference,) = differences(fingerprint(ours), fingerprint(ours | {name: value}))
    assert difference.startswith(f"{name}: ")


def test_the_fingerprint_ignores_where_it_runs() -> None:
    """Kernel, Python patch version, number of cores and a library that computes nothing do not change it."""
    ours = environment(threads=1)
    packages = ours["packages"]
    assert isinstance(packages, Mapping)
    patch = f"{sys.version_info.major}.{sys.version_info.minor}.999"
    theirs = ours | {"cores": 99, "platform": "other", "python": patch, "packages": {**packages, "safetensors": "9"}}
    assert fingerprint(theirs) == fingerprint(ours)
    assert differences(fingerprint(ours), fingerprint(theirs)) == ()
    other = ours | {"packages": {**packages, "torch": "1.0"}}
    assert fingerprint(other) != fingerprint(ours)


def test_the_fingerprint_survives_json() -> None:
    """A fingerprint read back from environment.json is the one that was computed."""
    ours = environment(threads=2, devices=["B", "A", "B"])
    assert fingerprint(json.loads(json.dumps(ours))) == fingerprint(ours)
    assert fingerprint(ours)["devices"] == "A, B"


def test_the_commit_is_a_commit_or_none() -> None:
    """In a checkout it is 40 digits, possibly dirty; as an installed package None."""
    found = commit()
    assert found is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", found)


def test_the_commit_of_a_repository_around_us_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package installed inside somebody's repository has no commit; without git there is none either."""
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    (tmp_path / "provenance.py").touch()
    assert commit() is None
    provenance._git(tmp_path, "init", "-q")
    assert commit() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() is None


def test_provenance_says_what_went_in(tmp_path: Path) -> None:
    """The file holds the commit, the configuration's identity, the digests by name and the fingerprint."""
    ours = environment(threads=1)
    write_provenance(tmp_path / "p.json", identity="ab" * 8, digests={"data": "cd" * 8}, environment=ours)
    found = json.loads((tmp_path / "p.json").read_text())
    assert (found["identity"], found["digests"]) == ("ab" * 8, {"data": "cd" * 8})
    assert found["commit"] == commit()
    assert found["fingerprint"] == fingerprint(found["environment"])


def test_provenance_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Digests by name, and the fingerprint; a digest that is not there is named."""
    ours = environment(threads=1)
    write_provenance(tmp_path / "p.json", identity="ab" * 8, digests={"data": "cd" * 8}, environment=ours)
    found = read_provenance(tmp_path / "p.json")
    assert found.digest("data") == "cd" * 8
    assert found.fingerprint == fingerprint(ours)
    with pytest.raises(InputError, match=r"p\.json: has no digest of 'base'"):
        found.digest("base")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b"{}", b'{"digests": {"a": 1}, "fingerprint": {}}', None]
)
def test_a_damaged_provenance_is_bad_input(tmp_path: Path, content: bytes | None) -> None:
    """Cut, emptied, of another form, or not there: one problem at the file."""
    if content is not None:
        (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(InputError, match=r"p\.json: "):
        read_provenance(tmp_path / "p.json")
