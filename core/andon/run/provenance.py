"""Where a run comes from: versions, machine and flags, commit, and the digests of what went in (design, rule 9)."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from andon.console.problems import InputError, Problem
from andon.run.atomic import write_json
from andon_contracts.fingerprint import environment as environment_of_process
from andon_contracts.fingerprint import fingerprint as fingerprint
from andon_contracts.untrusted import read_json

_CORE = Path(__file__).resolve().parents[1]
_COMPILED_BY = ("model", "fast")
"""Folders of the code that decides what a compiled pass computes."""


def environment(
    threads: int | None = None, devices: Sequence[str] = (), *, portable: str | None = None
) -> dict[str, object]:
    """Machine and versions that a run runs on, as `andon_contracts.fingerprint.environment` says it of a process.

    portable: of a run that is (`run.portable`), how its products add; its fingerprint is one for all kinds of CPU.
    With devices also `sources`, digests of the code that rewrites and compiles passes for them: our version number
    is one for many states of a checkout, and a rewriting decides bits as much as a library does.
    """
    found = environment_of_process(threads, devices)
    sources = {f"andon.{folder}": source_digest(_CORE / folder) for folder in _COMPILED_BY} if devices else {}
    return found | ({"sources": sources} if devices else {}) | ({"portable": portable} if portable else {})


def source_digest(folder: Path) -> str:
    """SHA-256 (16 hex digits) of the Python files right in `folder`, of names and contents; it does not matter where
    the folder is."""
    summed = hashlib.sha256()
    for file in sorted(folder.glob("*.py")):
        content = file.read_bytes()
        summed.update(f"{file.name} {len(content)}\n".encode() + content)
    return summed.hexdigest()[:16]


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, ...]:
    """The differences between two fingerprints, as `name: ours, theirs`; empty where bits may be compared."""
    names = sorted(set(ours) | set(theirs))
    return tuple(
        f"{name}: {ours.get(name, 'none')}, {theirs.get(name, 'none')}"
        for name in names
        if ours.get(name) != theirs.get(name)
    )


def commit() -> str | None:
    """The git commit that this file was checked out from, with `-dirty` where tracked files differ; None elsewhere.

    An installed package that lies inside somebody's repository is not from there: the file must be tracked.
    """
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    head = _git(here.parent, "rev-parse", "HEAD")
    if not head:
        return None
    return f"{head}-dirty" if _git(here.parent, "status", "--porcelain", "--untracked-files=no") else head


def write_provenance(
    path: Path,
    *,
    identity: str,
    digests: Mapping[str, str],
    environment: Mapping[str, object],
    new_tokens: Mapping[str, int] | None = None,
) -> None:
    """Write what the run comes from: the commit, the configuration's identity, digests (data, base model) by name, and
    the ids of new tokens, where there are any."""
    found = ({"new_tokens": dict(new_tokens)} if new_tokens else {}) | {
        "commit": commit(),
        "identity": identity,
        "digests": dict(digests),
        "environment": dict(environment),
        "fingerprint": fingerprint(environment),
    }
    write_json(path, found)


@dataclass(frozen=True)
class Provenance:
    """The content of a run's provenance file: digests by name, what its bits may depend on, and Andon's commit."""

    path: Path
    digests: Mapping[str, str]
    fingerprint: Mapping[str, str]
    commit: str | None = None

    def digest(self, name: str) -> str:
        """The digest of this name. Raises `InputError` where the file has none."""
        if name not in self.digests:
            raise InputError([Problem(str(self.path), f"has no digest of {name!r}")])
        return self.digests[name]


def read_provenance(path: Path) -> Provenance:
    """The file that `write_provenance` wrote. Raises `InputError` for one that cannot be read or is another."""
    try:
        found = read_json(path)
    except OSError as error:
        raise InputError([Problem(str(path), f"cannot be read: {error.strerror}")]) from error
    except ValueError as error:
        raise InputError([Problem(str(path), f"is no provenance of a run: {error}")]) from error
    parts = [_mapping(found).get(name) for name in ("digests", "fingerprint")]
    if not all(isinstance(part, dict) and all(isinstance(value, str) for value in part.values()) for part in parts):
        raise InputError([Problem(str(path), "is no provenance of a run: it must hold digests and a fingerprint")])
    digests, machine = ({name: str(value) for name, value in _mapping(part).items()} for part in parts)
    commit = _mapping(found).get("commit")
    return Provenance(path, digests, machine, commit if isinstance(commit, str) else None)


def _git(folder: Path, *arguments: str) -> str | None:
    # A hook that calls us sets GIT_DIR for another repository.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # `git status` would otherwise write to the index, and leave its lock where the disk refuses.
    clean["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], env=clean, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
