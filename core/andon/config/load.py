"""Loads a configuration from a YAML file, `--set` overrides and flags, and reports all problems at once. Generates the
commented configuration of `andon init` from the schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from andon.config.document import MOST_BYTES, KeyPath, dump, parse
from andon.config.schema import ONE_FILE, SEVERAL_FILES, Config, Section, TrainFile
from andon.config.source import require_file
from andon.console.problems import InputError, Problem, ProblemList, did_you_mean, shown

_HEAD = """\
# Every setting of a run at its default. Keys that are left out keep their defaults.
# Train with: andon train config.yaml [--workers N] [--set KEY=VALUE]
"""
_COMMENT_COLUMN = 36
FLAGS = {"run.workers": "--workers", "run.backend": "--backend", "run.resume": "--resume", "run.dir": "--run-dir"}
FLAGS |= {"task": "--task", "data.train": "--data", "data.eval": "--eval-data", "model.base": "--model"}
FLAGS |= {"data.text_column": "--text-column", "data.label_column": "--label-column"}
"""Command-line flags, by the dotted key that they set."""

_MEANT = {
    ("adapter", "targets"): "must be all-linear, or a list of module names",
    ("run", "devices"): "must be a list of devices, each cpu or the index of a GPU",
}
"""Messages for keys of more than one type, since pydantic's errors for each type would confuse."""
_WANTED = {"float_type": "a number", "int_type": "an integer", "bool_type": "true or false"}
_WANTED |= {"string_type": "a string", "tuple_type": "a list", "model_type": "a section with keys"}
_BOUNDS = {"greater_than": "more than", "greater_than_equal": "at least"}
_BOUNDS |= {"less_than": "less than", "less_than_equal": "at most"}
_KINDS = {str: "the string ", bool: "", dict: "the section ", list: "the list ", tuple: "the list "}

_SECTIONS = {name: part for name, part in Config() if isinstance(part, Section)}
_KEYS: list[KeyPath] = [
    path for name, _ in Config() for path in ((name,), *((name, key) for key, _ in _SECTIONS.get(name, ())))
]
_BATCH = "training.batch_size is the rows of one update over all workers"
_BY_ANSWER = {
    "optimizer.lr": "learning_rate",
    "optimizer.name": "optim optimizer",
    "optimizer.clip_norm": "max_grad_norm gradient_clipping",
    "optimizer.betas": "adam_beta1 adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "schedule.type": "lr_scheduler lr_scheduler_type",
    "schedule.warmup_fraction": "warmup_ratio",
    "training.epochs": "num_train_epochs num_epochs",
    "training.evaluate_every": "eval_steps",
    "training.checkpoint_every": "save_steps",
    "training.keep_checkpoints": "save_total_limit",
    "training.packing": "sample_packing",
    "training.activation_checkpointing": "gradient_checkpointing",
    "training.compile": "torch_compile",
    "training.eval_rows": "max_eval_samples",
    "run.log_every": "logging_steps",
    "run.dir": "output_dir",
    "run.resume": "resume_from_checkpoint",
    "run.report_to": "use_wandb wandb_project",
    "model.base": "model_name_or_path model_name base_model",
    "model.revision": "model_revision",
    "model.max_length": "max_seq_length max_seq_len sequence_len cutoff_len",
    "model.dtype": "torch_dtype",
    "adapter.kind": "use_peft",
    "adapter.r": "lora_r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.targets": "target_modules lora_target lora_target_modules lora_target_linear",
    "data.train": "train_file datasets dataset dataset_name",
    "data.eval": "validation_file eval_dataset test_datasets",
    "data.text_column": "dataset_text_field",
    "data.validation_fraction": "val_set_size",
    "data.limit": "max_samples max_train_samples",
    "data.train_on": "train_on_inputs assistant_only_loss completion_only_loss",
    "data.cache": "dataset_prepared_path",
    f"{_BATCH}; training.micro_batches splits it": "per_device_train_batch_size train_batch_size micro_batch_size",
    f"{_BATCH}, summed over training.micro_batches": "gradient_accumulation_steps",
    "evaluation batches follow from training.micro_batches": "per_device_eval_batch_size eval_batch_size",
    "quantized weights are not supported; model.dtype=bfloat16 halves frozen ones": "load_in_4bit load_in_8bit",
    "model.dtype=bfloat16 is for the frozen weights; weights that train are float32": "bf16 fp16",
    "not supported: every worker holds the whole model": "deepspeed fsdp fsdp_config",
    "set training.evaluate_every; every epoch ends with an evaluation too": "eval_strategy evaluation_strategy",
    "set training.checkpoint_every; every epoch ends with a checkpoint too": "save_strategy saves_per_epoch",
    "set training.keep; best is the lowest validation loss": "load_best_model_at_end metric_for_best_model",
    "attention needs no setting: torch chooses the kernel": "flash_attention flash_attn attn_implementation",
    "nothing is uploaded; `andon export` writes a folder that you can upload": "push_to_hub hub_model_id",
    "the tokenizer's own chat template is used; to change it, edit the model's folder": "chat_template",
    "not supported": "neftune_noise_alpha use_dora use_rslora lora_use_rslora modules_to_save lora_modules_to_save",
}
FOREIGN_NAMES: Mapping[str, str] = {name: meant for meant, names in _BY_ANSWER.items() for name in names.split()}
"""By setting of the HF Trainer, TRL or Axolotl: Andon's key, or a sentence if none corresponds."""


def load_config(path: Path | None, overrides: Sequence[str] = (), flags: Mapping[str, object] | None = None) -> Config:
    """Load the configuration at `path` (None: all defaults), then apply `overrides`, then `flags`.

    overrides: KEY=VALUE with a dotted key and a YAML value; later ones win. flags: values by dotted key; None is
    ignored. An empty section or file keeps its defaults.

    Raises `InputError` with every problem, each at file:line and key, `--set KEY`, or the flag: unreadable or malformed
    YAML, duplicate keys, unknown keys (with the nearest known one), wrong types, values out of bounds.
    """
    problems = ProblemList()
    values, lines = ({}, {}) if path is None else _read(Path(path), problems)
    # An empty section, as `optimizer:`, keeps its defaults.
    tree = {key: value for key, value in values.items() if value is not None or key not in Config.model_fields}
    origins: dict[KeyPath, str] = {}

    def set_value(key: str, value: object, where: str) -> None:
        path, section = tuple(key.split(".")), tree
        for depth, name in enumerate(path[:-1], start=1):
            inner = section.setdefault(name, {})
            if not isinstance(inner, dict):
                problems.add(where, f"{'.'.join(path[:depth])} must be a section, is {shown(inner)}")
                return
            section = inner
        section[path[-1]] = value
        origins[path] = where

    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            problems.add(f"--set {shown(override)}", "must be KEY=VALUE, as in optimizer.lr=1e-3")
            continue
        try:
            set_value(key, parse(text, f"--set {key}", problems)[0], f"--set {key}")
        except InputError as error:
            for problem in error.problems:
                problems.add(f"--set {key}", problem.what)
    for key, value in (flags or {}).items():
        if value is not None:
            set_value(key, value, FLAGS.get(key, f"--set {key}"))
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        for key_path, what in _faults(error):
            problems.add(_where(key_path, path, lines, origins), what)
        problems.raise_if_any()
        raise
    problems.raise_if_any()
    return config


def config_from(values: Mapping[str, object]) -> Config:
    """Validate `values` by section and key. Raises `InputError` with every problem, by dotted key."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        problems = [Problem(".".join(key_path), what) for key_path, what in _faults(error)]
        raise InputError(problems) from error


def to_yaml(config: Config) -> str:
    """Every key of `config` as YAML; `load_config` reads it back to an equal configuration."""
    return dump(config.model_dump(mode="json"))


def _read(path: Path, problems: ProblemList) -> tuple[dict[str, Any], Mapping[KeyPath, int]]:
    require_file(path, empty=True)
    try:
        with path.open("rb") as file:
            content = file.read(4 * MOST_BYTES + 4)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise InputError.at(path, f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        what = f"not UTF-8: byte 0x{content[error.start]:02x} at byte {error.start} of the file"
        line = content[: error.start].count(b"\n") + 1
        raise InputError.at(f"{path}:{line}", what) from error
    values, lines = parse(text, str(path), problems)
    if not isinstance(values, dict | None):
        raise InputError.at(f"{path}:1", f"must hold keys and values, is {shown(values)}")
    return values or {}, lines


def _where(key_path: KeyPath, path: Path | None, lines: Mapping[KeyPath, int], origins: Mapping[KeyPath, str]) -> str:
    """Where to correct the value at `key_path`: the last override or flag that set it, else the line of the key or an
    enclosing key, else the key."""
    name, around = ".".join(key_path), [key_path[:end] for end in range(len(key_path), 0, -1)]
    places = [origins[each] for each in around if each in origins]
    places += [f"{path}:{lines[each]} {name}" for each in around if each in lines]
    places += [where for each, where in origins.items() if each[: len(key_path)] == key_path]
    return places[0] if places else name


def _faults(error: ValidationError) -> Iterator[tuple[KeyPath, str]]:
    seen: set[KeyPath] = set()
    for details in error.errors(include_url=False):
        # Without the union tag that pydantic adds after the key.
        key_path = tuple(str(part) for part in details["loc"] if part not in (ONE_FILE, SEVERAL_FILES))
        if details["type"] == "beside":
            key_path = (*key_path, *str(details["ctx"]["key"]).split("."))
        elif key_path[:2] in _MEANT:
            key_path = key_path[:2]
        if key_path not in seen:
            seen.add(key_path)
            yield key_path, _what(key_path, details)


def _what(key_path: KeyPath, details: ErrorDetails) -> str:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "beside":
        return str(context["what"])
    if kind == "extra_forbidden":
        return f"unknown key{_suggestion(key_path)}"
    if key_path in _MEANT:
        return f"{_MEANT[key_path]} ({shown(value)})"
    if kind in _WANTED:
        return f"must be {_WANTED[kind]}, is {_KINDS.get(type(value), '')}{shown(value)}"
    if kind == "string_unicode":
        return f"is not UTF-8 ({shown(value)}); a configuration is UTF-8, so rename the file or folder"
    if kind == "literal_error":
        choices = str(context["expected"])
        names = choices.replace(" or ", ", ").replace("'", "").split(", ")
        return f"must be {choices} ({shown(value)}){did_you_mean(value, names) if isinstance(value, str) else ''}"
    if kind in _BOUNDS:
        (bound,) = context.values()
        return f"must be {_BOUNDS[kind]} {f'{bound:g}' if isinstance(bound, float) else bound} ({shown(value)})"
    return f"{details['msg'][:1].lower()}{details['msg'][1:]} ({shown(value)})"


def _suggestion(path: KeyPath) -> str:
    """Hint for an unknown key: the key with its name elsewhere, a foreign name's meaning, or the nearest name."""
    if path[:2] == ("data", "train"):
        return f"; known here: {', '.join(TrainFile.model_fields)}"
    if meant := meant_by(path[-1]):
        return f"; did you mean {meant!r}?" if " " not in meant else f"; {meant}"
    siblings = {each[-1]: ".".join(each) for each in _KEYS if each[:-1] == path[:-1]}
    for names in (siblings, {each[-1]: ".".join(each) for each in _KEYS}):
        if near := did_you_mean(path[-1], names):
            name = near.split("'")[1]
            return f"; did you mean {names[name]!r}?"
    return f"; known here: {', '.join(siblings) or 'nothing'}"


def meant_by(name: str) -> str:
    """The dotted key with this name in any section, else what `FOREIGN_NAMES` has for it; empty for an unknown name."""
    for path in sorted(_KEYS, key=lambda path: -len(path)):
        if path[-1] == name and name not in _SECTIONS:
            return ".".join(path)
    return FOREIGN_NAMES.get(name, "")


def template() -> str:
    """A config.yaml with every key at its default and commented."""
    return _HEAD + "\n".join(_entries(Config(), "")) + "\n"


def _entries(values: Section, indent: str) -> Iterator[str]:
    plain = values.model_dump(mode="json")
    for name, field in type(values).model_fields.items():
        inner = getattr(values, name)
        if isinstance(inner, Section):
            about = " ".join((type(inner).__doc__ or "").split())
            yield f"\n# {about}\n{name}:"
            yield from _entries(inner, indent + "  ")
        else:
            automatic = name in type(values).automatic and name not in values.model_fields_set
            # As the only entry of a list, which keeps it on one line.
            value = "auto" if automatic else dump([plain[name]], flow=True).strip()[1:-1]
            setting = f"{indent}{name}: {value}"
            yield f"{setting:<{_COMMENT_COLUMN}}# {field.description}" if field.description else setting
