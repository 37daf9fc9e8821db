"""The outcome of a run, in one file that is written last."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from andon.console.messages import reading
from andon.run.atomic import write_json
from andon_contracts.fields import Count, Hex16, Part, Real
from andon_contracts.untrusted import read_json

HELD_OUT, LAST_VALIDATION = "held-out", "last validation"
"""The rows of the last scores: held-out rows, or the validation rows that selected the best checkpoint."""
_QUOTED = {
    "accuracy": "accuracy",
    "macro_f1": "macro-F1",
    "mcc": "MCC",
    "exact_match": "exact match",
    "perplexity": "perplexity",
    "token_accuracy": "token accuracy",
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
    process. data_changed: data files that changed during the run, and how. dropped_values: values in the ranks' store
    that were ignored because no rank wrote them.
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
    evaluated_on: str = HELD_OUT
    labels: tuple[str, ...] = ()
    dropped_values: Count | None = None
    data_changed: Mapping[str, str] = field(default_factory=dict)


def write_summary(path: Path, summary: Summary) -> None:
    """Write `summary` atomically; a score that is not finite becomes null.

    Raises `ValueError` for a field of a wrong type and `InputError` if the disk fails.
    """
    content = summary.to_json()
    content["eval"] = _finite(summary.eval)
    Summary.from_json(content)
    write_json(path, content)


def read_summary(path: Path) -> Summary:
    """The summary at `path`. Raises `InputError` naming the file and the field that is wrong or missing."""
    with reading(path, "is not the summary of a run"):
        return Summary.from_json(read_json(path))


def quoted(values: Mapping[str, Any]) -> dict[str, float]:
    """The scores of `values` for a one-line summary, by display name."""
    return {word: values[name] for name, word in _QUOTED.items() if values.get(name) is not None}


def labelled(scores: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """`scores` with the classes' names, if they have any, and without undefined scores (None).

    Each entry of `classes` gets its `label`. `labels` names the class numbers, from 0, in the cells of `confusion`.
    """
    values = {name: value for name, value in scores.items() if value is not None}
    if "classes" not in values:
        return values
    values["classes"] = [{"label": label} | one for label, one in zip(labels, values["classes"], strict=True)]
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
