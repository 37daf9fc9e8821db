"""The keys of a configuration that define a run, and must be the same on resume, and those that only place it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from andon.config.schema import CLASSIFICATION, Config, Run

NAMING = frozenset(
    f"data.{key}" for key in ("train", "eval", "text_column", "text_pair_column", "label_column", "label_separator")
) | {"model.base", "model.revision"}
"""Keys that name what a run is made of. Files and folders may move: the digests of their contents are compared instead.
"""
PLACING = NAMING.union(
    ("data.cache", "training.keep_checkpoints", "training.checkpoint_every", "training.checkpoint_minutes"),
    ("contracts.enabled", "contracts.base_every", "contracts.audit_every", "contracts.audit_coverage"),
    (f"run.{key}" for key in Run.model_fields if key != "portable"),
)
"""Keys that may change between a run and its resume."""


def identity(config: Config) -> dict[str, Any]:
    """JSON values by dotted key, of all that defines the run: every key that is not `PLACING`, and some facts.

    `data.embedded`, `model.embedded`: whether the project's own are used. `data.weights`: of the files to train on, if
    there are several or the weight of one is not 1. `run.device_kind`: results have the same bits on any number of
    devices of one kind, not across kinds.
    """
    kept = {key: value for key, value in by_dotted_key(config).items() if key not in PLACING}
    kept["task"] = config.task or CLASSIFICATION
    if config.training.compile == "off":
        # The bits are the same with it and without; compiled, other operations may be fused.
        kept.pop("training.activation_checkpointing", None)
    weights = [file.weight for file in config.data.files]
    if weights not in ([], [1.0]):
        kept["data.weights"] = weights
    return kept | {
        "data.embedded": config.data.train is None,
        "model.embedded": config.model.base is None,
        "run.device_kind": device_kind(config.run),
    }


def by_dotted_key(config: Config) -> dict[str, Any]:
    """Every setting of `config` as a value of JSON."""
    found: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        found |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return found


def device_kind(run: Run) -> str:
    """The kind of a run's devices: cpu, cuda or mixed."""
    if run.devices:
        kinds = {"cpu" if str(name) == "cpu" else "cuda" for name in run.devices}
        return kinds.pop() if len(kinds) == 1 else "mixed"
    return {"nccl": "cuda", "mixed": "mixed"}.get(run.backend, "cpu")


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, value before, value now) of each key that differs, sorted; None for a key that is absent."""
    return [
        (key, was.get(key), now.get(key)) for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)
    ]


def config_digest(config: Config) -> str:
    """SHA-256 (hex) of the identity: the same for every placing of one run."""
    text = json.dumps(identity(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
