"""The configuration schema: every key with its type, bounds, default and description.

Unknown keys and values of another type are refused: the string "1e-3" for a number, 3.0 for an integer. The defaults
are the embedded run: generated shell snippets, a small Qwen3, LoRA on all of it, two workers. `andon.training.choices`
chooses unset settings for which a pretrained base needs other values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=1, le=1 << 20)]
"""A number that memory or processes grow with; a larger one is a mistake or an attack."""
Steps = Annotated[int, Field(ge=1, le=1 << 40)]
Name = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_as_tuple)]


class Section(BaseModel):
    """A section of the configuration: frozen, without unknown keys or type conversion.

    A key in `automatic` with the value `auto` counts as unset, so that a value is chosen for it. Its default is that of
    the embedded run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())
    automatic: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.automatic = frozenset(name for name, field in cls.model_fields.items() if field.json_schema_extra)

    @model_validator(mode="before")
    @classmethod
    def _auto_is_unset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {key: value for key, value in values.items() if not (value == "auto" and key in cls.automatic)}

    def _faults(self) -> Iterator[tuple[str, str]]:
        yield from ()

    @model_validator(mode="after")
    def _keys_fit(self) -> Self:
        for key, what in self._faults():
            raise PydanticCustomError("beside", "{what}", {"what": what, "key": key})
        return self


def setting(default: Any, description: str) -> Any:
    """A key with its default, and its description for config.yaml."""
    return Field(default=default, description=description)


def auto(default: Any, description: str) -> Any:
    """The same, for a key in `automatic`."""
    return Field(default=default, description=description, json_schema_extra={"auto": True})


class Model(Section):
    """The base model. The sizes describe the embedded one and are unused if `base` is set."""

    base: Name | None = setting(None, "folder or hub id of a transformers model; null: the embedded one")
    revision: Name | None = setting(None, "branch, tag or commit of a base on the hub; null: its main branch")
    architecture: Literal["decoder", "encoder"] = setting("decoder", "of the embedded model: Qwen3, or BERT (encoder)")
    hidden_size: Size = setting(64, "a multiple of num_attention_heads")
    num_hidden_layers: Annotated[int, Field(ge=1, le=1000)] = 2
    num_attention_heads: Size = 4
    num_key_value_heads: Size = setting(4, "divides num_attention_heads (decoder)")
    intermediate_size: Size = 128
    dropout: Share = auto(0.1, "of attention; of an encoder's hidden states too; auto: 0 for dpo")
    max_length: Size = auto(128, "tokens of a row, longer rows are cut; auto, with a base: the longest row")
    dtype: Literal["float32", "bfloat16"] = auto(
        "float32", "of frozen weights, trained ones are float32; auto: on GPUs as saved; nf4: bfloat16"
    )
    quantize: Literal["none", "nf4"] = setting(
        "none", "nf4: frozen linear layers in 4 bits, computed in dtype; needs andon[qlora]"
    )
    new_tokens: Names = setting((), "sft, dpo: added to the tokenizer, as in ['<tool>', '</tool>']; their rows train")

    def _faults(self) -> Iterator[tuple[str, str]]:
        for token in self.new_tokens:
            if token != token.strip():
                yield "new_tokens", f"{token!r} begins or ends with white space, which texts have anyway"
            if self.new_tokens.count(token) > 1:
                yield "new_tokens", f"names {token!r} twice ({list(self.new_tokens)})"
        if self.revision is not None and self.base is None:
            yield "revision", f"needs model.base, a model on the hub ({self.revision!r})"
        if self.quantize != "none" and self.base is None:
            yield "quantize", f"needs model.base: the embedded model is small ({self.quantize})"
        if self.base is None:
            heads = self.num_attention_heads
            if self.hidden_size % heads:
                yield "hidden_size", f"must be a multiple of num_attention_heads, {heads} ({self.hidden_size})"
            if self.architecture == "decoder" and (self.hidden_size // heads) % 2:
                yield "hidden_size", f"must give each of {heads} heads an even size ({self.hidden_size})"
            if self.architecture == "decoder" and heads % self.num_key_value_heads:
                yield "num_key_value_heads", f"must divide num_attention_heads, {heads} ({self.num_key_value_heads})"


UNUSED_WITH_BASE = frozenset(("model.architecture", "model.hidden_size", "model.intermediate_size")) | {
    f"model.num_{what}" for what in ("hidden_layers", "attention_heads", "key_value_heads")
}
"""By dotted key, the settings of the embedded model; a run with `model.base` does not read them."""


class Adapter(Section):
    """What is trained besides the classification head."""

    kind: Literal["lora", "none"] = setting("lora", "none trains every weight")
    init: Name | None = setting(None, "folder of a peft adapter to go on from; null: a new adapter")
    r: Size = setting(16, "rank")
    alpha: Positive = setting(32.0, "the update is scaled by alpha / r")
    rslora: bool = setting(False, "scale by alpha / sqrt(r) instead")
    dora: bool = setting(False, "train the length of each row of a weight apart from its direction")
    dropout: Share = auto(0.1, "auto: 0.05 with a pretrained base, 0 for dpo, and for dora in nf4")
    targets: Literal["all-linear"] | Names | None = setting(
        "all-linear", "modules to adapt: all-linear, or a list of names; null is all-linear"
    )
    exclude: Names = setting((), "modules not to adapt, as in [o_proj]")
    modules_to_save: Names = setting((), "modules that train whole and are saved with the adapter")

    def _faults(self) -> Iterator[tuple[str, str]]:
        own = type(self).model_fields
        for key in ("init", "rslora", "dora", "exclude", "modules_to_save") if self.kind == "none" else ():
            if (value := getattr(self, key)) != own[key].default:
                written = "true" if value is True else list(value) if isinstance(value, tuple) else value
                yield key, f"is of an adapter, and adapter.kind=none trains every weight without one ({written})"
        for key in ("exclude", "modules_to_save"):
            if len(set(names := getattr(self, key))) < len(names):
                yield key, f"names a module twice ({list(names)})"
        if isinstance(self.targets, tuple):
            if not self.targets:
                yield "targets", "names no module; to train without an adapter set adapter.kind=none ([])"
            if len(set(self.targets)) < len(self.targets):
                yield "targets", f"names a module twice ({list(self.targets)})"


class TrainFile(Section):
    """A file to train on. weight: how often each row occurs in an epoch; 0.5 uses half of the rows."""

    path: Name
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0


def _as_files(value: object) -> object:
    if not isinstance(value, list | tuple):
        return value
    return tuple({"path": each} if isinstance(each, str) else each for each in value)


ONE_FILE, SEVERAL_FILES = "<file>", "<files>"
"""Union tags of `data.train`, which pydantic puts into an error's location. They are not keys."""
_Train = Annotated[
    Annotated[Name, Tag(ONE_FILE)] | Annotated[tuple[TrainFile, ...], Tag(SEVERAL_FILES)],
    Discriminator(lambda value: SEVERAL_FILES if isinstance(value, tuple) else ONE_FILE),
    BeforeValidator(_as_files),
]


class Data(Section):
    """Where rows come from. Files are .jsonl, .json (an object a line, or an array), .csv, .tsv or .parquet."""

    train: _Train | None = setting(None, "a file, or a list of files with path and weight; null: generated rows")
    validation: Name | None = setting(None, "validation file, which chooses the weights; null: some training rows")
    eval: Name | None = setting(None, "evaluation file, never trained on; null: the validation rows")
    text_column: Name | None = setting(None, "null: input or text")
    label_separator: Name | None = setting(
        None, "between several labels in one string, as in a;b; null: labels are lists"
    )
    text_pair_column: Name | None = setting(
        None, "of a second text, which the tokenizer joins to the first; null: no second text"
    )
    label_column: Name | None = setting(None, "null: label")
    bad_rows: Literal["refuse", "skip"] = setting(
        "refuse", "rows that cannot be used end the run, or are skipped, counted and listed"
    )
    limit: Count | None = setting(None, "read this many training rows, validation rows included; null: all")
    validation_fraction: Share = setting(0.1, "of the training rows; drawn at random by the seed, not by class")
    train_on: Literal["assistant", "all"] = setting("assistant", "sft: tokens of answers alone, or of all messages")
    cache: Name | None = setting(
        None, "sft: folder that keeps tokens for later runs too; null: the run's, until it ends"
    )
    class_weights: Literal["uniform", "inverse", "sqrt_inverse"] = setting(
        "uniform", "of the loss, with sum K: uniform, inverse (of frequency) or sqrt_inverse"
    )

    def _faults(self) -> Iterator[tuple[str, str]]:
        for key in ("validation", "eval"):
            if self.train is None and getattr(self, key) is not None:
                yield key, f"needs data.train: the embedded data already has such rows ({getattr(self, key)!r})"
        if self.limit is not None and self.train is None:
            yield "limit", f"needs data.train; the embedded data is used as it is ({self.limit})"
        paths = [file.path for file in self.files]
        if self.train is not None and not paths:
            yield "train", "names no file ([])"
        for path in paths:
            if paths.count(path) > 1:
                yield "train", f"names {path!r} twice; to have its rows twice give it the weight 2"

    @property
    def files(self) -> tuple[TrainFile, ...]:
        """The files to train on; empty for the embedded data."""
        if isinstance(self.train, str):
            return (TrainFile(path=self.train),)
        return self.train or ()


class Optimizer(Section):
    """How weights change."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Positive = auto(2.5e-3, "peak; auto: LoRA 1e-3, sft 2e-4, dpo 5e-6; all weights 5e-5, 2e-5, 5e-7")
    betas: Annotated[tuple[Share, Share], BeforeValidator(_as_tuple)] = setting((0.9, 0.999), "adamw")
    eps: Positive = setting(1e-8, "adamw")
    weight_decay: NotNegative = 0.01
    momentum: Share = setting(0.0, "sgd")
    clip_norm: Positive | None = setting(1.0, "norm of the whole gradient, clipped once; null: not clipped")


class Schedule(Section):
    """The learning rate of a step: linear warm-up to optimizer.lr, then as `type` says."""

    type: Literal["cosine", "linear", "constant"] = setting(
        "cosine", "after the warm-up: half a cosine or a line down to min_lr, or constant"
    )
    warmup_fraction: Annotated[float, Field(ge=0, le=1)] = setting(0.1, "of all steps")
    warmup_steps: Annotated[int, Field(ge=0)] | None = setting(None, "in place of warmup_fraction")
    min_lr: NotNegative = setting(1e-6, "reached at the last step unless constant; optimizer.lr if that is lower")

    def _faults(self) -> Iterator[tuple[str, str]]:
        if self.warmup_steps is not None and self.warmup_fraction != type(self).model_fields["warmup_fraction"].default:
            what = f"and warmup_fraction ({self.warmup_fraction}) both set the warm-up: remove one"
            yield "warmup_steps", f"{what} ({self.warmup_steps})"


class Training(Section):
    """How long and in which portions."""

    epochs: Steps = auto(2, "auto: 3 with a pretrained base, 1 for dpo")
    max_steps: Steps | None = setting(None, "end after this many steps; null: after the epochs")
    batch_size: Steps = setting(32, "rows of one step, over all workers, before they are packed")
    micro_batches: Size = auto(8, "parts of a batch, on which the result depends; auto: 8, more for long rows")
    packing: bool = auto(False, "sft, dpo: rows share a sequence of max_length tokens; auto, with a base: on")
    group_by_length: bool = auto(False, "rows of similar length share a batch, another order; auto, with a base: on")
    pad_to_multiple_of: Size = setting(
        8, "padded lengths are multiples of this; 1 wastes least; compile has its own lengths"
    )
    beta: Positive = setting(0.1, "dpo: the larger, the closer the model stays to its start, the reference")
    compile: Literal["off", "kernels", "graphs"] = auto(
        "off", "on GPUs: fused kernels, or these in CUDA graphs; auto: graphs for long runs"
    )
    compile_lengths: Size = setting(4, "padded lengths that are compiled; each takes a minute")
    activation_checkpointing: bool = setting(
        False, "recompute activations in the backward pass: less memory, more time"
    )
    early_stopping_patience: Count | None = setting(None, "evaluations without a better validation loss; null: never")
    keep: Literal["best", "last"] = auto(
        "last", "weights that are the result: of the best validation loss, or last; auto: best"
    )
    checkpoint_every: Count | None = setting(None, "steps; at the end of every epoch anyway")
    eval_rows: Count | None = setting(
        None, "validate and evaluate on this many rows at most, drawn from the seed; null: all"
    )
    checkpoint_minutes: Positive | None = auto(
        None, "between checkpoints, at most 5 % of the time; null: never; auto: 15 with a base"
    )
    evaluate_every: Count | None = setting(None, "steps; at the end of every epoch anyway")
    keep_checkpoints: Count = setting(3, "number of newest checkpoints kept, in addition to the best")

    def _faults(self) -> Iterator[tuple[str, str]]:
        if "micro_batches" in self.model_fields_set and self.micro_batches > self.batch_size:
            what = f"must not be more than training.batch_size, {self.batch_size} ({self.micro_batches})"
            yield "micro_batches", what


class Contracts(Section):
    """What is checked while training."""

    enabled: bool = True
    base_every: Count = setting(50, "steps between two checks that the frozen weights are untouched")
    audit_every: Annotated[int, Field(ge=0)] | None = setting(
        None, "steps between two audits; 0: none; null: chosen so that audits cost 1 %"
    )
    audit_coverage: Size | Literal["all"] = setting(
        1, "micro-batches of each rank that another one computes again in an audit, or all"
    )


_DEVICE = re.compile(r"cpu|(cuda:)?\d{1,4}")


class Run(Section):
    """Where a run lives and what it says; none of this but `portable` changes its result."""

    workers: Annotated[int, Field(ge=1, le=1 << 14)] = auto(
        2, "ranks on this machine; auto: one a GPU, else with a base up to one a core, or 2"
    )
    backend: Literal["inline", "gloo", "nccl", "mixed"] = auto(
        "gloo", "inline: in one process; gloo, nccl, mixed; auto: nccl on GPUs, else gloo"
    )
    cpu_fallback: bool = setting(False, "true: train on the CPU if nccl finds no working GPU")
    devices: Annotated[tuple[str | int, ...], BeforeValidator(_as_tuple)] | None = setting(
        None, "one for each worker, as in [0, 1] or [cuda:0, cpu]; null: the backend's own"
    )
    cuda_graphs: Literal["auto", "always", "never"] = setting(
        "auto", "of eager passes on GPUs, the same bits; auto: up to 8 GiB a micro-batch"
    )
    portable: bool = setting(False, "for the same bits on any x86 CPU with AVX2; took 1.1 x to 1.4 x the time")
    dir: Name | None = setting(None, "folder of the run; null: a new one under runs/")
    log_every: Count = setting(10, "steps between two lines; after 12 s without one there is another")
    report_to: Annotated[tuple[Literal["tensorboard", "wandb"], ...], BeforeValidator(_as_tuple)] = setting(
        (), "also give metrics to these, as in [tensorboard, wandb]"
    )
    progress: Literal["auto", "never", "verbose", "quiet", "json"] = setting(
        "auto", "auto: a bar on a terminal; never: lines; verbose: all values; quiet: nothing; json"
    )
    timeout_s: Positive = setting(600.0, "a rank that does not answer for this long counts as lost")
    step_deadline_s: Positive | None = setting(
        None, "an update that takes longer ends the run; null: it is only said to be slow"
    )
    grace_s: Positive = setting(30.0, "time to reach a step's end and a checkpoint after SIGTERM")
    max_restarts: Annotated[int, Field(ge=0, le=1 << 20)] = setting(
        0, "how often a failed run restarts from its last checkpoint, on this machine"
    )
    resume: Literal["never", "auto"] = setting("never", "auto: go on from the newest valid checkpoint")

    @model_validator(mode="before")
    @classmethod
    def _a_worker_for_each_device(cls, values: Any) -> Any:
        devices = values.get("devices") if isinstance(values, Mapping) else None
        if isinstance(devices, list | tuple) and values.get("workers", "auto") == "auto":
            return {**values, "workers": max(len(devices), 1)}
        return values

    def _faults(self) -> Iterator[tuple[str, str]]:
        for key in ("step_deadline_s", "max_restarts"):
            if self.backend == "inline" and (value := getattr(self, key)):
                yield key, f"needs ranks of their own, which inline has not: gloo, nccl or mixed ({value})"
        if self.portable and (self.backend in ("nccl", "mixed") or {*map(str, self.devices or ())} - {"cpu"}):
            where = f"devices {list(self.devices)}" if self.devices else self.backend
            yield "portable", f"is of CPUs; with {where} leave it false (true)"
        if self.devices is None:
            return
        names = [str(name) for name in self.devices]
        for name in names:
            if not _DEVICE.fullmatch(name):
                yield "devices", f"{name!r} is not a device; write cpu, or the index of a GPU as 0 or cuda:0"
        gpus = [int(name.removeprefix("cuda:")) for name in names if name != "cpu"]
        for gpu in gpus:
            if gpus.count(gpu) > 1:
                yield "devices", f"GPU {gpu} is there {gpus.count(gpu)} times ({list(self.devices)})"
        if not names or self.workers % len(names):  # a run on several hosts names those of one host
            yield "devices", f"names {len(names)} devices for {self.workers} workers ({list(self.devices)})"


_EMBEDDED_SFT: Mapping[str, Mapping[str, object]] = {
    "model": {"dropout": 0.0},
    "adapter": {"kind": "none"},
    "optimizer": {"lr": 5e-3},
    "training": {"epochs": 3},
}
"""Defaults of the embedded run of `task: sft`, which trains a randomly initialized model."""
CLASSIFICATION, REGRESSION, MULTI_LABEL = "classification", "regression", "multi-label"
TOKEN_CLASSIFICATION, SFT, DPO = "token-classification", "sft", "dpo"
"""The tasks, as a configuration names them."""
CAUSAL = (SFT, DPO)
"""The tasks of causal language models, whose rows are conversations."""


class Config(Section):
    """The whole configuration of a run."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = setting(42, "the one seed of a run")
    task: Literal["classification", "regression", "multi-label", "token-classification", "sft", "dpo"] | None = setting(
        None, "what is learned of a row, one of docs/fine-tune.md; null: as the data says"
    )
    model: Model = Model()
    adapter: Adapter = Adapter()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    training: Training = Training()
    contracts: Contracts = Contracts()
    run: Run = Run()

    @model_validator(mode="before")
    @classmethod
    def _embedded_sft_learns(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        parts = {name: values.get(name, {}) for name in ("data", *_EMBEDDED_SFT)}
        if values.get("task") != SFT or not all(isinstance(part, Mapping) for part in parts.values()):
            return values
        if parts["data"].get("train") is not None or parts["model"].get("base") is not None:
            return values
        own = {name: {key: value for key, value in parts[name].items() if value != "auto"} for name in _EMBEDDED_SFT}
        return {**values, **{name: {**defaults, **own[name]} for name, defaults in _EMBEDDED_SFT.items()}}

    @property
    def rate_fault(self) -> str:
        """Why `schedule.min_lr` conflicts with `optimizer.lr`; empty if it does not."""
        own, default = self.schedule, Schedule.model_fields["min_lr"].default
        if own.type == "constant" or own.min_lr <= self.optimizer.lr or own.min_lr == default:
            return ""
        return f"must not be more than optimizer.lr, {self.optimizer.lr} ({own.min_lr})"

    def _faults(self) -> Iterator[tuple[str, str]]:
        known = self.model.base is None or "lr" in self.optimizer.model_fields_set  # else it is chosen later
        if known and self.rate_fault:
            yield "schedule.min_lr", self.rate_fault
        if self.run.portable and self.model.dtype != "float32":
            yield "run.portable", f"needs model.dtype=float32: CPUs compute {self.model.dtype} each in its way"
        if self.model.quantize != "none":
            packed, places = self.model.quantize, {str(each) == "cpu" for each in self.run.devices or ()}
            if self.adapter.kind == "none":
                yield "model.quantize", f"is for frozen weights, and adapter.kind=none has none ({packed})"
            if self.adapter.dora and self.adapter.dropout and "dropout" in self.adapter.model_fields_set:
                what = f"needs adapter.dropout=0 with {packed}, else each layer keeps its weight unpacked"
                yield "adapter.dora", f"{what} ({self.adapter.dropout})"
            if self.run.portable:
                yield "run.portable", f"needs model.quantize=none: each type of CPU computes {packed} in its own way"
            if self.run.backend == "mixed" or len(places) > 1:
                what = "needs devices of one kind: CPUs and GPUs pack weights differently"
                yield "model.quantize", f"{what} ({packed})"
        patience = self.training.early_stopping_patience
        if patience is not None and self.data.validation_fraction == 0 and self.data.validation is None:
            what = f"needs rows to validate on: data.validation, or a data.validation_fraction above 0 ({patience})"
            yield "training.early_stopping_patience", what
