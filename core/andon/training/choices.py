"""Chooses values of unset settings, for the data, the base model and the devices.

`placed` chooses backend and workers before ranks start. `for_rows` chooses what depends on tokens and on the base,
equally on every rank: the number of workers, the GPU model and time do not matter. The choices are saved in the run's
config.yaml, and a resume keeps them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andon.backend import host
from andon.config.load import identity
from andon.config.schema import CAUSAL, DPO, Config, Section
from andon.console.messages import InputError
from andon.data.hub import at_hand
from andon.launch.context import RankContext, is_rank
from andon.launch.portable import can_take_effect, obstacles

_CAP = 512
_CAP_CAUSAL = 2048
_ROOM = 128
"""Limits of an automatic `model.max_length`; its least value for tasks of texts and labels."""
_PARTS = 8
_TOKENS = 4096
"""Most tokens of a micro-batch, unless a single row has more."""
_RATES = {("lora", True): 2e-4, ("lora", False): 1e-3, ("none", True): 2e-5, ("none", False): 5e-5}
"""Learning rates by adapter kind, and whether the head is pretrained: a new head needs a higher rate. For dpo a
fortieth of the pretrained head's: it moves a model that was tuned before.

MiniLM on BANKING77 with LoRA, 3 epochs: accuracy 0.46 with 2e-4, 0.87 with 1e-3, 0.88 with 2e-3."""
_COMPILE_PAYS = 2e17
"""FLOPs of a run from which compilation, a minute for each length, saves more time than it takes."""
_GIB = 2**30


def is_set(config: Config, key: str) -> bool:
    """Whether `key`, as in `run.backend`, was set by the user or chosen."""
    section, name = key.split(".")
    return name in getattr(config, section).model_fields_set


def value_of(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy of `config` with `values` by dotted key; those keys count as set."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    parts = {name: getattr(config, name).model_copy(update=own) for name, own in sections.items()}
    return config.model_copy(update=parts)


def inherited(config: Config, before: Config) -> Config:
    """A resumed run's `config` with unset values, except workers, from `before`, the run's first configuration."""
    was = {key: value_of(before, key) for key in automatic_keys(config) if key != "run.workers"}
    if _is_demo(config):
        was["run.portable"] = before.run.portable
    return _where_unset(config, was)


def automatic_keys(config: Config) -> list[str]:
    """Dotted keys whose unset values are chosen automatically."""
    return [f"{name}.{key}" for name, part in config if isinstance(part, Section) for key in sorted(part.automatic)]


def _where_unset(config: Config, values: Mapping[str, Any]) -> Config:
    return with_values(config, {key: value for key, value in values.items() if not is_set(config, key)})


def placed(config: Config, gpus: int | None = None) -> tuple[Config, str]:
    """Choose backend and workers. Returns `config` with them, and a line on the choice, or "" if it needs none.

    gpus: their number (None: those that this process sees). By default a run on the user's own data or base uses all
    GPUs, at most one per micro-batch (min(8, batch_size), the smallest number that can be chosen). On CPUs a pretrained
    base gets a worker for each physical core and micro-batch, as far as memory holds their fp32 copies of it with the
    state of full or LoRA training; the embedded model gets two.
    """
    run, base = config.run, config.model.base
    named, counted = is_set(config, "run.backend"), is_set(config, "run.workers")
    if config.data.train is None and base is None and not named:
        return with_values(config, {"run.backend": run.backend, "run.workers": run.workers}), ""
    if named and counted and not run.cpu_fallback:
        return config, ""
    available = host.gpus() if gpus is None else gpus
    backend: str = run.backend
    if not named:
        kinds = {"gloo" if str(name) == "cpu" else "nccl" for name in run.devices or ()}
        chosen = "nccl" if available and not run.portable else "gloo"
        backend = chosen if not kinds else kinds.pop() if len(kinds) == 1 else "mixed"
    most = min(_PARTS, config.training.batch_size)
    if is_set(config, "training.micro_batches"):
        most = config.training.micro_batches
    workers, why = run.workers, ""
    if backend == "nccl" and not available and run.cpu_fallback:
        why = "no GPU is usable here (clause cpu-fallback)"
    elif backend == "gloo" and not counted and base is not None:
        why = f"{available} GPUs are not used" if available else ""
    elif backend == "nccl" and not named and counted and _workers_here(workers) > available:
        why = f"{_workers_here(workers)} workers are on this host, and it has {available} GPUs" if available else ""
    else:
        line = ""
        if backend == "nccl" and available and not counted:
            workers = len(run.devices) if run.devices else min(available, most) or 1
            why = f" of {available} GPUs: an update has {most} micro-batches" if workers == most < available else ""
            line = f"auto: {workers} nccl worker{'s' * (workers > 1)}{why}"
        return with_values(config, {"run.backend": backend, "run.workers": workers}), line

    # On CPUs
    if not counted and base is not None:
        workers, free = min(most, host.physical_cores()), host.free_ram()
        try:
            folder = Path(at_hand(base, config.model.revision)).expanduser()
            size = sum(file.stat().st_size for file in [*folder.glob("*.safetensors")] or folder.glob("*.bin"))
            half = 'float16"' in (folder / "config.json").read_text(encoding="utf-8")
        except (InputError, OSError, ValueError):
            free = None  # loading says what is wrong with it
        if free and size:
            needed = size * (2 if half else 1) * (6 if config.adapter.kind == "none" else 1.25) + _GIB
            fitting = max(int(free // needed), 1)
            if fitting < workers:
                workers, why = fitting, why or f"each needs about {needed / _GIB:.1f} GiB of memory"
    line = f"auto: {workers} gloo worker{'s' * (workers > 1)}"
    return with_values(config, {"run.backend": "gloo", "run.workers": workers}), f"{line}: {why}" if why else line


def _is_demo(config: Config) -> bool:
    return not is_set(config, "run.portable") and identity(config) == identity(Config())


def portable_demo(config: Config) -> tuple[Config, str]:
    """Make the demo portable if possible. Returns `config`, and a line that says why it is not portable, or "".

    Portable, the demo has one digest on all CPUs with AVX2.
    """
    if not _is_demo(config):
        return config, ""
    why = "; ".join(f"{problem.where} {problem.what}" for problem in obstacles())
    if not why and not can_take_effect(config.run):
        why = "torch has computed in this process before"
    return with_values(config, {"run.portable": not why}), f"auto: run.portable=false, since {why}" if why else ""


@dataclass(frozen=True)
class Base:
    """Facts of a base. positions: most tokens of a row (None: no limit). weights: their number. dtype: as saved."""

    positions: int | None
    weights: int
    dtype: str


def capped(config: Config, task: str, base: Base | None) -> Config:
    """`config` with an unset `model.max_length` at the largest value that may be chosen."""
    if base is None or is_set(config, "model.max_length"):
        return config
    most = _CAP_CAUSAL if task in CAUSAL else _CAP
    cap = most if base.positions is None else min(most, base.positions)
    # Still unset: `for_rows` chooses the final value from the rows' tokens.
    model = config.model.model_construct(config.model.model_fields_set, **dict(config.model) | {"max_length": cap})
    return config.model_copy(update={"model": model})


def usual_values(config: Config, task: str) -> dict[str, Any]:
    """The choices for unset values, by dotted key, that depend neither on rows nor on the device (on a CPU)."""
    values: dict[str, Any] = dict.fromkeys(("training.packing", "training.group_by_length"), False)
    values["model.dtype"] = "float32"
    based = config.model.base is not None
    if based or config.data.train is not None:
        values["training.keep"] = "best"
    if task == DPO:  # the answers' log-probabilities are compared with those of another pass
        values |= {"model.dropout": 0.0, "adapter.dropout": 0.0}
    if based:
        grouped = is_set(config, "training.group_by_length") and config.training.group_by_length
        packing = task in CAUSAL and not grouped
        if is_set(config, "training.packing"):
            packing = config.training.packing
        dora_in_nf4 = config.adapter.dora and config.model.quantize != "none"
        values |= {
            "optimizer.lr": _RATES[config.adapter.kind, task in CAUSAL] / (40 if task == DPO else 1),
            "adapter.dropout": 0.0 if task == DPO or dora_in_nf4 else 0.05,
            "training.epochs": 1 if task == DPO else 3,
            "training.checkpoint_minutes": 15.0,
            "training.packing": packing,
            "training.group_by_length": not packing,
        }
    return values


def for_rows(
    config: Config, task: str, base: Base | None, lengths: Sequence[int], longest: int, *, on_gpus: bool
) -> Config:
    """Choose every unset value except micro_batches from the rows and the base. config: from `capped`.

    lengths: tokens of each row of an epoch. longest: tokens of the longest row that is trained on or scored. Raises
    `InputError` if `schedule.min_lr` is above the chosen learning rate.
    """
    model, values = config.model, usual_values(config, task)
    if base is not None and on_gpus:
        values["model.dtype"] = base.dtype if model.quantize == "none" else "bfloat16"
    config = _where_unset(config, values)
    if fault := config.rate_fault:
        raise InputError.at("schedule.min_lr", fault)
    pays = False
    if on_gpus and base is not None and model.quantize == "none":  # unknown for packed weights
        # Six FLOPs for each weight and token.
        training, epochs = config.training, float(config.training.epochs)
        if training.max_steps is not None:
            epochs = min(epochs, training.max_steps * training.batch_size / max(len(lengths), 1))
        pays = 6.0 * base.weights * sum(lengths) * epochs >= _COMPILE_PAYS
    config = _where_unset(config, {"training.compile": "graphs" if pays else "off"})
    # Room for longer texts to predict. Only compiled lengths depend on the limit, so it costs nothing otherwise.
    least = _ROOM if task not in CAUSAL and config.training.compile == "off" else 0
    limit = config.model.max_length if base is None else min(-(-max(longest, least) // 8) * 8, config.model.max_length)
    return _where_unset(config, {"model.max_length": limit})


def with_micro_batches(config: Config, rows: int, length: int) -> Config:
    """Choose an unset number of micro-batches: 8, or more if a base needs it to keep each at 4,096 tokens or one row.

    rows: rows or packs of an update. length: tokens of the longest, padded.
    """
    if is_set(config, "training.micro_batches"):
        return config
    parts = min(_PARTS, config.training.batch_size)
    if config.model.base is not None:
        parts = max(parts, -(-rows // max(_TOKENS // length, 1)))
    return with_values(config, {"training.micro_batches": parts})


def settings_line(config: Config) -> str:
    model, training, adapter = config.model, config.training, config.adapter
    trained = "all weights" if adapter.kind == "none" else f"LoRA r={adapter.r}"
    dtype = model.dtype if model.quantize == "none" else f"{model.quantize} computed in {model.dtype}"
    layout = "packed" if training.packing else "grouped by length" if training.group_by_length else "in random order"
    return (
        f"settings: {trained}, lr {config.optimizer.lr:g}, {training.epochs} epochs, batches of {training.batch_size} "
        f"rows {layout} in {training.micro_batches} micro-batches, max_length {model.max_length}, {dtype}, "
        f"compile {training.compile}"
    )


def _workers_here(workers: int) -> int:
    if not is_rank():
        return workers
    only_own = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip(", ").isdigit()
    return 1 if only_own else RankContext.from_environment().local_world_size
