"""The facts that determine a run's result (versions, machine, commit, digests of its inputs), and its outcome.

The summary is the file that is written last.
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from andon.console.messages import InputError, reading
from andon.run.atomic import write_json
from andon_contracts.fields import Count, Hex16, Part, Real
from andon_contracts.fingerprint import environment as environment_of_process
from andon_contracts.fingerprint import fingerprint as fingerprint
from andon_contracts.fingerprint import version_of
from andon_contracts.untrusted import read_json

_CORE = Path(__file__).resolve().parents[1]
_COMPILED_BY = ("model", "fast")
"""Packages whose code determines the bits of a compiled pass."""


def environment(
    threads: int | None = None,
    devices: Sequence[str] = (),
    *,
    portable: str | None = None,
    libraries: Sequence[str] = (),
) -> dict[str, object]:
    """The machine and versions of a run: `andon_contracts.fingerprint.environment`, and more.

    portable: the order of additions in products with `run.portable`; the fingerprint is then the same for all types of
    CPU. libraries: optional ones that compute in this run. `sources`: their versions, and with devices digests of our
    code that rewrites and compiles passes for them, which affects bits as a library does.
    """
    facts = environment_of_process(threads, devices)
    sources = {f"andon.{folder}": source_digest(_CORE / folder) for folder in _COMPILED_BY} if devices else {}
    sources |= {name: str(version_of(name)) for name in libraries}
    return facts | ({"sources": sources} if sources else {}) | ({"portable": portable} if portable else {})


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


EVALUATION, LAST_VALIDATION = "evaluation", "last validation"
"""The rows of the last scores: evaluation rows, or the validation rows that selected the best checkpoint."""
_QUOTED = {
    "accuracy": "accuracy",
    "macro_f1": "macro-F1",
    "mcc": "MCC",
    "exact_match": "exact match",
    "perplexity": "perplexity",
    "token_accuracy": "token accuracy",
    "reward_accuracy": "reward accuracy",
    "margin": "reward margin",
    "micro_f1": "micro-F1",
    "subset_accuracy": "subset accuracy",
    "f1": "span F1",
    "rmse": "RMSE",
    "spearman": "Spearman",
    "pearson": "Pearson",
    "mae": "MAE",
}
"""The scores in one-line summaries, in this order, and their display names."""


@dataclass(frozen=True)
class Head(Part):
    """The head of the ledger: its number of lines and the digest of the last."""

    count: Count
    digest: Hex16


@dataclass(frozen=True)
class Summary(Part):
    """The result of a run.

    steps: updates. contracts: how often rank 0 evaluated each clause; violations: how many were broken. final_loss: the
    loss of the last update. eval: the last scores as JSON, with the digest of the confusion matrix
    (`metrics/confusion`) in place of the matrix; evaluated_on: their rows; labels: the order of their classes. reason:
    that of the ledger's end record. finished: the run reached its planned or early end, and is not resumed. kept_step:
    the step of the best checkpoint if `weights_digest` and `eval` are of its weights (`training.keep`); None: they are
    of the last step's. memory, in bytes: `planned` and `peak` of the GPU that needed most, `process_peak` of rank 0's
    process. dropped_values: values in the ranks' store that were ignored because no rank wrote them. updates: of the
    last command, which took `wall_s`. skipped: unusable rows of the scored file, which `eval` is without.
    """

    run: str
    finished: bool
    reason: str
    steps: Count
    world_size: Count
    backend: str
    weights_digest: Hex16
    initial_weights_digest: Hex16
    contracts: Mapping[str, Count]
    violations: Count
    wall_s: float
    ledger: Head
    fingerprint: Mapping[str, str]
    final_loss: Real | None = None
    eval: Mapping[str, Any] = field(default_factory=dict)
    best_step: Count | None = None
    kept_step: Count | None = None
    memory: Mapping[str, Count] = field(default_factory=dict)
    evaluated_on: str = EVALUATION
    labels: tuple[str, ...] = ()
    dropped_values: Count | None = None
    updates: Count | None = None
    skipped: Count | None = None


def write_summary(path: Path, summary: Summary) -> None:
    """Write `summary` atomically, with the names of classes; a score that is not finite becomes null.

    Raises `ValueError` for a field of a wrong type and `InputError` if the disk fails.
    """
    content = summary.to_json()
    content["eval"] = _finite(with_labels(summary.eval, summary.labels))
    Summary.from_json(content)
    write_json(path, content)


def read_summary(path: Path) -> Summary:
    """The summary at `path`. Raises `InputError` naming the file and the field that is wrong or missing."""
    with reading(path, "is not the summary of a run"):
        return Summary.from_json(read_json(path))


def quoted(values: Mapping[str, Any]) -> dict[str, float]:
    """The scores of `values` for a one-line summary, by display name."""
    return {word: values[name] for name, word in _QUOTED.items() if values.get(name) is not None}


def with_labels(scores: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """`scores`; each entry of `classes`, if there are any, gets its `label`."""
    named = [{"label": label} | one for label, one in zip(labels, scores.get("classes") or (), strict=False)]
    return {**scores, "classes": named} if named else dict(scores)


def labelled(scores: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """`scores` with the classes' names, if they have any, and without undefined scores (None).

    `labels` names the class numbers, from 0, in the cells of `confusion`.
    """
    values = with_labels({name: value for name, value in scores.items() if value is not None}, labels)
    if "classes" not in values:
        return values
    confusion = {"confusion": values.pop("confusion")} if "confusion" in values else {}
    return values | {"labels": list(labels)} | confusion


def _finite(value: object) -> object:
    if isinstance(value, Real):
        return _finite(value.to_json())
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
