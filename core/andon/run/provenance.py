"""The facts that determine a run's result: versions, machine and flags, commit, and digests of its inputs."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from andon.console.messages import InputError, reading
from andon.run.atomic import write_json
from andon_contracts.fingerprint import environment as environment_of_process
from andon_contracts.fingerprint import fingerprint as fingerprint
from andon_contracts.untrusted import read_json

_CORE = Path(__file__).resolve().parents[1]
_COMPILED_BY = ("model", "fast")
"""Packages whose code determines the bits of a compiled pass."""


def environment(
    threads: int | None = None, devices: Sequence[str] = (), *, portable: str | None = None
) -> dict[str, object]:
    """The machine and versions of a run: `andon_contracts.fingerprint.environment`, and more.

    portable: the order of additions in products with `run.portable`; the fingerprint is then the same for all types of
    CPU. With devices also `sources`: digests of our code that rewrites and compiles passes for them, which affects bits
    as a library does.
    """
    facts = environment_of_process(threads, devices)
    sources = {f"andon.{folder}": source_digest(_CORE / folder) for folder in _COMPILED_BY} if devices else {}
    return facts | ({"sources": sources} if devices else {}) | ({"portable": portable} if portable else {})


def source_digest(folder: Path) -> str:
    """SHA-256 (16 hex digits) of the names and contents of the Python files directly in `folder`."""
    summed = hashlib.sha256()
    for file in sorted(folder.glob("*.py")):
        content = file.read_bytes()
        summed.update(f"{file.name} {len(content)}\n".encode() + content)
    return summed.hexdigest()[:16]


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, ...]:
    """The differences between two fingerprints, as `name: ours, theirs`; empty if bits are comparable."""
    pairs = {name: (ours.get(name, "none"), theirs.get(name, "none")) for name in sorted({*ours, *theirs})}
    return tuple(f"{name}: {mine}, {other}" for name, (mine, other) in pairs.items() if mine != other)


def commit() -> str | None:
    """The git commit that this file was checked out from, with `-dirty` if tracked files differ; None elsewhere.

    The file must be tracked, because an installed package may lie inside another repository.
    """
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    head = _git(here.parent, "rev-parse", "HEAD")
    dirty = head and _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{head}-dirty" if dirty else head or None


def write_provenance(
    path: Path,
    *,
    identity: str,
    digests: Mapping[str, str],
    environment: Mapping[str, object],
    new_tokens: Mapping[str, int] | None = None,
) -> None:
    """Write a run's commit, configuration identity, input digests, environment and ids of new tokens."""
    content = {
        "commit": commit(),
        "identity": identity,
        "digests": dict(digests),
        "environment": dict(environment),
        "fingerprint": fingerprint(environment),
    }
    write_json(path, content | ({"new_tokens": dict(new_tokens)} if new_tokens else {}))


@dataclass(frozen=True)
class Provenance:
    """The content of a run's provenance file: digests by name, fingerprint, and Andon's commit."""

    path: Path
    digests: Mapping[str, str]
    fingerprint: Mapping[str, str]
    commit: str | None = None

    def digest(self, name: str) -> str:
        """The digest `name`. Raises `InputError` if the file has none."""
        if name not in self.digests:
            raise InputError.at(self.path, f"has no digest of {name!r}")
        return self.digests[name]


def read_provenance(path: Path) -> Provenance:
    """Read a file of `write_provenance`. Raises `InputError` if it cannot be read or is another file."""
    with reading(path, "is not the provenance of a run"):
        content = read_json(path)
    content = content if isinstance(content, dict) else {}
    digests, machine, commit = (content.get(name) for name in ("digests", "fingerprint", "commit"))
    if not (_is_mapping_of_strings(digests) and _is_mapping_of_strings(machine)):
        raise InputError.at(path, "is not the provenance of a run: it must hold digests and a fingerprint")
    return Provenance(path, digests, machine, commit if isinstance(commit, str) else None)


def _is_mapping_of_strings(values: object) -> TypeGuard[dict[str, str]]:
    return isinstance(values, dict) and all(isinstance(value, str) for value in values.values())


def _git(folder: Path, *arguments: str) -> str | None:
    # A git hook that runs us sets GIT_DIR to another repository.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # Otherwise `git status` writes to the index, and leaves its lock if the disk fails.
    clean["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], env=clean, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
