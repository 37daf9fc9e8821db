"""Divides the keys of a configuration: those that define a run must stay the same on resume, others only place it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from andon.config.schema import CLASSIFICATION, Config, Run

NAMING = frozenset(
    f"data.{key}" for key in ("train", "eval", "text_column", "text_pair_column", "label_column", "label_separator")
) | {"model.base", "model.revision"}
"""Keys that name data and models. These may move, so the digests of their contents are compared instead."""
PLACING = NAMING.union(
    ("data.cache", "training.keep_checkpoints", "training.checkpoint_every", "training.checkpoint_minutes"),
    ("contracts.enabled", "contracts.base_every", "contracts.audit_every", "contracts.audit_coverage"),
    (f"run.{key}" for key in Run.model_fields if key != "portable"),
)
"""Keys that may change between a run and its resume."""


def identity(config: Config) -> dict[str, Any]:
    """JSON values, by dotted key, that define the run: every key that is not in `PLACING`, and some derived ones.

    `data.embedded`, `model.embedded`: whether the embedded data and model are used. `data.weights`: weights of the
    training files, unless it is one file of weight 1. `run.device_kind`: results have the same bits on any number of
    devices of one kind, but not across kinds.
    """
    defining = {key: value for key, value in by_dotted_key(config).items() if key not in PLACING}
    defining["task"] = config.task or CLASSIFICATION
    if config.training.compile == "off":
        # Recomputing changes bits only in compiled passes, where other operations may be fused.
        defining.pop("training.activation_checkpointing", None)
    weights = [file.weight for file in config.data.files]
    if weights not in ([], [1.0]):
        defining["data.weights"] = weights
    return defining | {
        "data.embedded": config.data.train is None,
        "model.embedded": config.model.base is None,
        "run.device_kind": device_kind(config.run),
    }


def by_dotted_key(config: Config) -> dict[str, Any]:
    """Every setting of `config` as a JSON value."""
    values: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        values |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return values


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
    """SHA-256 (hex) of `identity(config)`: the same wherever the run is placed."""
    text = json.dumps(identity(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
