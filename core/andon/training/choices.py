"""The settings that nobody set, chosen once for the data, the base model and the devices.

`placed` chooses where a run trains, before ranks are started, and needs no torch. `for_rows` chooses what depends on
tokens and on the base: every rank computes the same choices, because they do not depend on the number of workers,
the kind of GPU, or time. Whatever is chosen stands in the run's config.yaml, and `inherited` keeps it at a
resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andon.backend import host
from andon.config.identity import identity
from andon.config.schema import SFT, Config, Model, Section
from andon.console.problems import InputError, Problem
from andon.data.hub import at_hand
from andon.launch.portable import can_take_effect, obstacles

_CAP = 512
_CAP_SFT = 2048
"""Most tokens of a row; a longer one is cut."""
_PARTS = 8
_TOKENS = 4096
"""Of a micro-batch at most, unless one row has more."""
_RATES = {("lora", True): 2e-4, ("lora", False): 1e-3, ("none", True): 2e-5, ("none", False): 5e-5}
"""By the adapter's kind, and whether the head is pretrained too: one that is drawn anew needs a higher rate.

MiniLM on BANKING77 with LoRA, 3 epochs: accuracy 0.46 with 2e-4, 0.87 with 1e-3, 0.88 with 2e-3."""
_COMPILE_PAYS = 2e17
"""Floating-point operations of a run from which compiling, a minute for each length, takes less time than it saves."""
_GIB = 2**30


def is_set(config: Config, key: str) -> bool:
    """Whether `key`, as in `run.backend`, has a value that the user gave or that was chosen."""
    section, name = key.split(".")
    return name in getattr(config, section).model_fields_set


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """`config` with other values by dotted key; those keys count as set."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    parts = {name: getattr(config, name).model_copy(update=own) for name, own in sections.items()}
    return config.model_copy(update=parts)


def inherited(config: Config, before: Config) -> Config:
    """`config` of a resumed run, with unset values filled from `before`, the run's first configuration.

    How many workers there are is chosen again.
    """
    was = {key: getattr(getattr(before, key.split(".")[0]), key.split(".")[1]) for key in automatic_keys(config)}
    del was["run.workers"]
    if _is_demo(config):
        was["run.portable"] = before.run.portable
    return _where_unset(config, was)


def automatic_keys(config: Config) -> list[str]:
    """The dotted keys for which a value is chosen if none is set."""
    return [f"{name}.{key}" for name, part in config if isinstance(part, Section) for key in sorted(part.automatic)]


def _where_unset(config: Config, values: Mapping[str, Any]) -> Config:
    return with_values(config, {key: value for key, value in values.items() if not is_set(config, key)})


# Where a run trains


def placed(config: Config, gpus: int | None = None) -> tuple[Config, str]:
    """`config` with its backend and workers, and a line that says what was chosen, or "" for the embedded run.

    gpus: how many there are (None: torch is asked). Without settings, a run on the user's own data or base takes all
    GPUs, at most one per micro-batch (min(8, batch_size), the smallest M that can be chosen). On CPUs a pretrained base
    gets a worker for each physical core, as far as memory holds their copies of it; the embedded model gets two.
    """
    run = config.run
    if config.data.train is None and config.model.base is None and not is_set(config, "run.backend"):
        return with_values(config, {"run.backend": run.backend, "run.workers": run.workers}), ""
    if is_set(config, "run.backend") and is_set(config, "run.workers") and not run.cpu_fallback:
        return config, ""
    there = host.gpus() if gpus is None else gpus
    asked = is_set(config, "run.backend")
    backend = run.backend if asked else _backend(config, there)
    if backend == "nccl" and not there and run.cpu_fallback:
        return _on_cpus(config, "no GPU is usable here (clause cpu-fallback)")
    if backend == "gloo" and not is_set(config, "run.workers") and config.model.base is not None:
        return _on_cpus(config, f"{there} GPUs are not used" if there else "")
    if backend == "nccl" and not asked and is_set(config, "run.workers") and run.workers > there:
        return _on_cpus(config, f"{run.workers} workers were asked for, and there are {there} GPUs" if there else "")
    if backend != "nccl" or not there or is_set(config, "run.workers"):
        return with_values(config, {"run.backend": backend, "run.workers": run.workers}), ""
    most = _fewest_parts(config)
    workers = len(run.devices) if run.devices else min(there, most) or 1
    why = f" of {there} GPUs: an update has {most} micro-batches" if workers == most < there else ""
    found = with_values(config, {"run.backend": backend, "run.workers": workers})
    return found, f"auto: {workers} nccl worker{'s' * (workers > 1)}{why}"


def _is_demo(config: Config) -> bool:
    """Whether `config` leaves `run.portable` open and is the run of the defaults, wherever it is placed."""
    return not is_set(config, "run.portable") and identity(config) == identity(Config())


def portable_demo(config: Config) -> tuple[Config, str]:
    """`config`, portable if it is the demo and can be, and a line that says why not, or "".

    So the demo has one digest on all CPUs with AVX2.
    """
    if not _is_demo(config):
        return config, ""
    why = "; ".join(f"{problem.where} {problem.what}" for problem in obstacles())
    if not why and not can_take_effect(config.run):
        why = "torch has computed in this process before"
    return with_values(config, {"run.portable": not why}), f"auto: run.portable=false, since {why}" if why else ""


def _on_cpus(config: Config, why: str) -> tuple[Config, str]:
    """`config` on gloo, with workers for the CPUs if none are set, and the line that says so."""
    workers, memory = config.run.workers, ""
    if not is_set(config, "run.workers") and config.model.base is not None:
        workers, memory = _cpu_workers(config)
    found = with_values(config, {"run.backend": "gloo", "run.workers": workers})
    line, reason = f"auto: {workers} gloo worker{'s' * (workers > 1)}", why or memory
    return found, f"{line}: {reason}" if reason else line


def _backend(config: Config, gpus: int) -> str:
    if config.run.devices:
        kinds = {"gloo" if str(name) == "cpu" else "nccl" for name in config.run.devices}
        return kinds.pop() if len(kinds) == 1 else "mixed"
    return "nccl" if gpus and not config.run.portable else "gloo"


def _fewest_parts(config: Config) -> int:
    training = config.training
    return training.micro_batches if is_set(config, "training.micro_batches") else min(_PARTS, training.batch_size)


def _cpu_workers(config: Config) -> tuple[int, str]:
    """As many as have work, a core and memory: each process has the base in fp32, and trains all of it or a LoRA."""
    most = min(_fewest_parts(config), host.physical_cores())
    free, size = host.free_ram(), _fp32_bytes(config.model)
    if not free or not size:
        return most, ""
    needed = size * (6 if config.adapter.kind == "none" else 1.25) + _GIB
    fitting = max(int(free // needed), 1)
    return (most, "") if fitting >= most else (fitting, f"each needs about {needed / _GIB:.1f} GiB of memory")


def _fp32_bytes(model: Model) -> int:
    """The size of the base's weights; 0 if they are not on this machine."""
    try:
        folder = Path(at_hand(str(model.base), model.revision)).expanduser()
        files = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
        size = sum(file.stat().st_size for file in files)
        half = 'float16"' in (folder / "config.json").read_text(encoding="utf-8")
    except (InputError, OSError, ValueError):
        return 0  # loading says what is wrong with it
    return size * (2 if half else 1)


# What follows from rows and the base


@dataclass(frozen=True)
class Base:
    """The facts about a base model that choices depend on.

    positions: most tokens of a row (None: no limit). weights: how many. dtype: that of its checkpoint, float32 or
    bfloat16.
    """

    positions: int | None
    weights: int
    dtype: str


def capped(config: Config, task: str, base: Base | None) -> Config:
    """`config` with the most tokens of a row that may be chosen, where none is set."""
    if base is None or is_set(config, "model.max_length"):
        return config
    most = _CAP_SFT if task == SFT else _CAP
    cap = most if base.positions is None else min(most, base.positions)
    # It does not count as set: what is chosen in the end is known from the rows' tokens.
    model = config.model.model_construct(config.model.model_fields_set, **dict(config.model) | {"max_length": cap})
    return config.model_copy(update={"model": model})


def for_rows(
    config: Config, task: str, base: Base | None, lengths: Sequence[int], longest: int, *, on_gpus: bool
) -> Config:
    """`config`, capped, with every unset value chosen from the rows and the base, except micro_batches.

    lengths: tokens of each row of an epoch. longest: tokens of the longest row that is trained on or scored. Raises
    `InputError` for a lowest rate above the rate that is chosen.
    """
    values: dict[str, Any] = {
        "model.max_length": config.model.max_length,
        "model.dtype": "float32",
        "training.packing": False,
        "training.group_by_length": False,
    }
    if base is not None or config.data.train is not None:
        values["training.keep"] = "best"
    if base is not None:
        grouped = is_set(config, "training.group_by_length") and config.training.group_by_length
        packing = task == SFT and not grouped
        if is_set(config, "training.packing"):
            packing = config.training.packing
        values |= {
            "optimizer.lr": _RATES[config.adapter.kind, task == SFT],
            "adapter.dropout": 0.05,
            "training.epochs": 3,
            "training.checkpoint_minutes": 15.0,
            "model.max_length": min(-(-longest // 8) * 8, config.model.max_length),
            "model.dtype": base.dtype if on_gpus else "float32",
            "training.packing": packing,
            "training.group_by_length": not packing,
        }
    config = _where_unset(config, values)
    if fault := config.rate_fault:
        raise InputError([Problem("schedule.min_lr", fault)])
    pays = on_gpus and base is not None and _pays(config, base, lengths)
    return _where_unset(config, {"training.compile": "graphs" if pays else "off"})


def with_micro_batches(config: Config, rows: int, length: int) -> Config:
    """`config` with its number of micro-batches: 8, or more to keep each at 4,096 tokens or one row.

    rows: of an update, or its packs; length: tokens of the longest, padded.
    """
    if is_set(config, "training.micro_batches"):
        return config
    parts = min(_PARTS, config.training.batch_size)
    if config.model.base is not None:
        parts = max(parts, -(-rows // max(_TOKENS // length, 1)))
    return with_values(config, {"training.micro_batches": parts})


def _pays(config: Config, base: Base, lengths: Sequence[int]) -> bool:
    """Whether compiled passes save more time than compiling takes: six operations for each weight and token."""
    training = config.training
    epochs = float(training.epochs)
    if training.max_steps is not None:
        epochs = min(epochs, training.max_steps * training.batch_size / max(len(lengths), 1))
    return 6.0 * base.weights * sum(lengths) * epochs >= _COMPILE_PAYS


def settings_line(config: Config) -> str:
    """One log line with the settings that decide result and speed."""
    model, training, adapter = config.model, config.training, config.adapter
    trained = "all weights" if adapter.kind == "none" else f"LoRA r={adapter.r}"
    layout = "packed" if training.packing else "grouped by length" if training.group_by_length else "in random order"
    return (
        f"settings: {trained}, lr {config.optimizer.lr:g}, {training.epochs} epochs, batches of {training.batch_size} "
        f"rows {layout} in {training.micro_batches} micro-batches, max_length {model.max_length}, {model.dtype}, "
        f"compile {training.compile}"
    )
