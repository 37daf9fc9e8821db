"""Digests by name of all that a checkpoint must bring back, beside the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from andon_contracts.digest import digests_by_name
from andon_contracts.observe import flat_digest, plain
from andon_contracts.untrusted import read_json
from andon_contracts.watch.optimizer_probe import OptimizerProbe
from andon_contracts.watch.values import kept_digest, state_digest


def live_digests(probes: Sequence[OptimizerProbe]) -> dict[str, int]:
    """The digests of weights, buffers, optimizer states and hyperparameters, by name. Collective where sharded."""
    found: dict[str, int] = {}
    subject = probes[0].subject
    found |= {f"weights {n}": d for n, d in digests_by_name(_dense(subject.parameters)).items()}
    found |= {f"buffer {n}": d for n, d in digests_by_name(_dense(subject.buffers_by_name())).items()}
    for probe in probes:
        found |= {
            f"optimizer state {n}": state_digest(
                {key: _whole(each) for key, each in probe.optimizer.state.get(p, {}).items()}
            )
            for n, p in probe.parameters.items()
        }
        found |= {
            f"group {index} {key}": kept_digest(value)
            for index, group in enumerate(probe.optimizer.param_groups)
            for key, value in group.items()
            if not key.startswith("param")
        }
    return found


def random_state() -> dict[str, int]:
    """The digest of torch's random state of this rank."""
    return {"random state": flat_digest([torch.get_rng_state()])}


def of_tensors(tensors: Mapping[str, Tensor], probes: Sequence[OptimizerProbe]) -> dict[str, int]:
    """The digests of `tensors` under the names that `live_digests` gives to the model's parameters."""
    known = probes[0].subject.parameters
    return {f"weights {n}": d for n, d in digests_by_name(_dense(tensors)).items() if n in known}


def _dense(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: plain(_whole(tensor)) for name, tensor in tensors.items()}


def _whole(value: Any) -> Any:
    """A sharded tensor put together from all ranks, so that its digest is one wherever it is kept; else the value."""
    gathered = getattr(value, "full_tensor", None)
    return value if gathered is None else gathered()


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".andon.json")


def write_digests(path: Path, digests: Mapping[str, int]) -> None:
    """Write `digests` beside the checkpoint at `path`. Raises `OSError` where the disk refuses."""
    text = json.dumps({name: f"{digest:x}" for name, digest in digests.items()}, indent=1, sort_keys=True)
    _beside(path).write_text(text + "\n", encoding="utf-8")


def updates_of(probes: Sequence[OptimizerProbe]) -> dict[str, int]:
    """How many updates each optimizer has made, by a name in the file."""
    return {_count_name(index): probe.updates for index, probe in enumerate(probes)}


def _count_name(index: int) -> str:
    return f"updates of optimizer {index + 1}" if index else "updates"


def read_digests(path: Path, optimizers: int = 1) -> tuple[dict[str, int], list[int], str]:
    """The digests beside the checkpoint at `path`, the updates of each of so many optimizers, and why there are none.

    That is "" where there are. An optimizer whose updates the file does not have made as many as the first one.
    """
    try:
        found = {name: int(text, 16) for name, text in read_json(_beside(path)).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return {}, [0] * optimizers, f"{_beside(path)} does not say what was saved: {error}"
    first = found.get("updates", 0)
    updates = [found.pop(_count_name(index), first) for index in range(optimizers)]
    return found, updates, ""
