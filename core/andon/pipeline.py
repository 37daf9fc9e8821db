"""The seed's pipeline: a classifier that trains alone, or computes gradient and update separately.

The seed's API on the trainer's own parts, which build, train and check the model as in `andon train`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from andon.backend.base import InlineBackend
from andon.config.load import config_from
from andon.config.schema import Config, Optimizer
from andon.console.messages import InputError, ProblemList, install_hint
from andon.model.build import ModelInterface, evaluating, without_adapter
from andon.model.masks import predictions
from andon.step import message
from andon.step.agreement import Report, ensures
from andon.step.micro_batch import plan_leaves
from andon.step.plan import GlobalBatch
from andon.step.reduce import fold
from andon.step.replica import Replica
from andon.tasks.text import ClassificationTask
from andon.training.build import build_model as build_trainable
from andon.training.build import build_replicas
from andon_contracts.agree import Observation, bits_of, real_of
from andon_contracts.laws.law import Judgement, Seen, enforce
from andon_contracts.laws.update import CALLER_GRADIENT, LEAVES, OUTPUT, REDUCED, Leaves, Output, Reduced
from andon_contracts.observe import nonfinite
from andon_contracts.policy import enforced


@dataclass(frozen=True)
class ClassifyConfig:
    """The training settings of a classifier: the twelve of the seed with its defaults (seed 2c).

    learning_rate: constant. Only the trainer has schedules and uses epochs, batch_size and log_interval.
    accumulation_steps: split every micro-batch into this many parts, still for one update (V32). gradient_clip_norm: L2
    limit of the reduced gradient, None: no clipping. class_weights: one per class, or None. max_seq_len: longer texts
    are truncated. quantize_nf4: must be False (V34). Raises `InputError` listing all problems (V16).
    """

    num_classes: int = 5
    lora_rank: int = 16
    lora_alpha: float = 16.0
    learning_rate: float = 1e-4
    epochs: int = 3
    max_seq_len: int = 512
    log_interval: int = 100
    batch_size: int = 32
    accumulation_steps: int = 1
    gradient_clip_norm: float | None = 1.0
    class_weights: Sequence[float] | None = None
    quantize_nf4: bool = False

    def __post_init__(self) -> None:
        problems = ProblemList()
        counts = ("lora_rank", "epochs", "max_seq_len", "log_interval", "batch_size", "accumulation_steps")
        of_two = "an integer of at least 2 (F-CLASS-004)"
        _check(problems, self, ["num_classes"], lambda value: _is_count(value, 2), of_two)
        _check(problems, self, counts, _is_count, "an integer of at least 1")
        _check(problems, self, ("lora_alpha", "learning_rate"), _is_positive, "a finite number above 0")
        if self.gradient_clip_norm is not None:
            _check(problems, self, ["gradient_clip_norm"], _is_positive, "a finite number above 0, or None")
        if self.quantize_nf4:
            problems.add("quantize_nf4", "True, but four-bit bases are not supported; must be False")
        weights = self.class_weights
        if weights is not None and len(weights) != self.num_classes:
            problems.add("class_weights", f"{len(weights)} weights for {self.num_classes} classes")
        for label, weight in enumerate(weights or ()):
            if not _is_positive(weight):
                problems.add(f"class_weights[{label}]", f"{weight!r} must be a finite number above 0")
        problems.raise_if_any()


def _check(
    problems: ProblemList, config: object, names: Sequence[str], test: Callable[[object], bool], wanted: str
) -> None:
    for name in names:
        if not test(getattr(config, name)):
            problems.add(name, f"{getattr(config, name)!r} must be {wanted}")


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of a base model with random weights: the fields of the seed (S7), and dropout.

    vocab_size: ids that a text may use; the model gets one more, for padding. architecture: 'decoder' (Qwen3,
    classifies the last token) or 'encoder' (BERT, classifies the first token). dropout: in the attention, in the
    adapter, and in an encoder's hidden layers. `build_model` rejects shapes that the embedded models do not support:
    real weights are trained with `andon train --model`.
    """

    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    intermediate_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    use_bias: bool = False
    head_dim_override: int | None = None
    architecture: str = "decoder"
    hf_architecture: str | None = None
    hf_model_type: str | None = None
    tie_word_embeddings: bool = False
    dropout: float = 0.0

    @classmethod
    def tiny(cls) -> TransformerConfig:
        """The seed's preset for tests: 2 layers of 64 (2 heads), 1,000 ids."""
        return cls(64, 2, 2, 256, 2, 1000, 512)

    @property
    def is_encoder(self) -> bool:
        """Whether every token attends to every other one."""
        return self.architecture == "encoder"

    def refuse_what_is_not_embedded(self) -> None:
        """Raise `InputError` for each field that the embedded model does not support."""
        problems = ProblemList()
        _check(problems, self, ["vocab_size"], _is_count, "an integer of at least 1")
        remedy = "; real weights are trained with `andon train --model`"
        fixed = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "use_bias": False}
        for name, value in {} if self.is_encoder else fixed.items():
            if getattr(self, name) != value:
                problems.add(name, f"{getattr(self, name)!r}, but the embedded decoder has {value!r}{remedy}")
        width, narrow = self.head_dim_override, self.hidden_size // max(self.num_attention_heads, 1)
        if width not in (None, narrow):
            problems.add("head_dim_override", f"{width} is not to be had: the model {remedy} has {narrow}")
        if self.is_encoder and self.num_kv_heads != self.num_attention_heads:
            problems.add("num_kv_heads", f"{self.num_kv_heads} must be {self.num_attention_heads} in an encoder")
        problems.raise_if_any()


@dataclass(frozen=True)
class SafetySample:
    """One text and its class (seed S1)."""

    input: str
    label: int

    def input_ids(self) -> list[int]:
        """The bytes of the text in UTF-8. Raises `InputError` for a lone surrogate, which has no encoding."""
        try:
            return list(self.input.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise InputError(f"{self.input!r} is not Unicode text: {error.reason}") from error


@dataclass(frozen=True)
class BatchResult:
    """The result of one batch (seed S23).

    avg_loss: sum of w[label] * cross entropy over all samples, divided once by their number. grad_norm: global L2 norm
    of the batch's gradient before clipping, also without clipping (V6).
    """

    avg_loss: float
    correct: int
    total: int
    grad_norm: float

    def accuracy(self) -> float:
        """The share of correctly predicted samples; 0 without samples."""
        return self.correct / max(self.total, 1)


NOTHING = BatchResult(0.0, 0, 0, 0.0)
"""The result without samples."""


def encode(
    shape: TransformerConfig, classify: ClassifyConfig, rows: Sequence[tuple[Sequence[int], int]]
) -> ClassificationTask:
    """A task of rows, each of token ids and a label, truncated to the model's longest input.

    Raises `InputError` naming every sample with an empty text, a byte outside of the vocabulary, or a label that is not
    a class (F-CLASS-002, V20, V30).
    """
    longest = min(classify.max_seq_len, shape.max_position_embeddings)
    return ClassificationTask(
        [ids[:longest] for ids, _ in rows],
        [label for _, label in rows],
        num_labels=classify.num_classes,
        vocab_size=shape.vocab_size,
        pad_id=shape.vocab_size,
        class_weights=classify.class_weights,
        max_length=longest,
        places=[f"sample {place}" for place in range(len(rows))],
    )


def build_model(shape: TransformerConfig, classify: ClassifyConfig, seed: int) -> nn.Module:
    """A base of `shape` on the CPU, with LoRA on queries and values and a trainable head; deterministic.

    Raises `InputError` for an unsupported shape, and if a required library is not installed.
    """
    pad = shape.vocab_size
    interface = ModelInterface("classification", tuple(map(str, range(classify.num_classes))), pad + 1, pad)
    try:
        return build_trainable(config_of(shape, classify, seed), interface)
    except ModuleNotFoundError as error:
        raise InputError.at("model", f"{error.name} is not installed; {install_hint('train')}") from error


def config_of(
    shape: TransformerConfig, classify: ClassifyConfig, seed: int, optimizer: Optimizer | None = None
) -> Config:
    """The configuration of `shape`, with LoRA on the query and value projections of every layer (seed S10).

    Raises `InputError` for each field that the embedded model does not support.
    """
    shape.refuse_what_is_not_embedded()
    same = ("architecture", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "dropout")
    model = {name: getattr(shape, name) for name in same}
    model |= {"num_key_value_heads": shape.num_kv_heads, "max_length": shape.max_position_embeddings}
    targets = ("query", "value") if shape.is_encoder else ("q_proj", "v_proj")
    adapter = {"r": classify.lora_rank, "alpha": classify.lora_alpha, "dropout": shape.dropout, "targets": targets}
    chosen = {**dict(optimizer or Optimizer()), "clip_norm": classify.gradient_clip_norm}
    return config_from({"seed": seed, "model": model, "adapter": adapter, "optimizer": chosen})


def build_classifiers(
    shape: TransformerConfig,
    classify: ClassifyConfig,
    seed: int,
    optimizer: Optimizer | None,
    devices: Sequence[torch.device],
) -> list[Replica]:
    """A replica of `build_model` on each device, each with a separate base. Raises `InputError`."""
    model = build_model(shape, classify, seed)  # before any row: it rejects unsupported shapes
    config, rows = config_of(shape, classify, seed, optimizer), encode(shape, classify, [([0], 0)])
    return build_replicas(model, config, InlineBackend(devices), rows, 0, own_base=True)


class ClassifyPipeline:
    """A classifier that trains alone, or computes gradients for updates elsewhere (seed S12 to S20).

    `train_batch` is `accumulate_gradients` and `apply_accumulated_gradients`. With equal `micro_batches` it gives the
    same bits as a coordinator with any number of replicas. num_trainable_parameters: elements of the adapter, the sum
    of r * (d_in + d_out), and of the head.
    """

    def __init__(
        self,
        model_config: TransformerConfig,
        config: ClassifyConfig,
        *,
        device: str | torch.device = "cpu",
        seed: int = 0,
        micro_batches: int = 8,
        optimizer: Optimizer | None = None,
        replica: Replica | None = None,
    ) -> None:
        """seed: for initial weights and dropout. micro_batches: M, the leaves of the sum of a batch.

        optimizer: None: AdamW with weight decay 0.01. replica: of this model and these settings; None: build one.
        Raises `InputError` for unsupported settings, before anything is built.
        """
        if micro_batches < 1:
            raise InputError.at("micro_batches", f"{micro_batches} must be at least 1")
        self.model_config = model_config
        self.config = config
        self.micro_batches = micro_batches * config.accumulation_steps
        if replica is None:
            (replica,) = build_classifiers(model_config, config, seed, optimizer, [torch.device(device)])
        self.replica = replica
        self.model = replica.model
        self.device = replica.device
        self.num_trainable_parameters = replica.parameters.count
        self._rate = config.learning_rate
        self._sum: torch.Tensor | None = None
        self._samples = self._calls = 0

    @property
    def learning_rate(self) -> float:
        """The rate of the next update."""
        return self._rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._rate = replace(self.config, learning_rate=rate).learning_rate

    def gradient_layout(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and shapes of the trainable tensors in the order of the flat gradient (F-HET-001)."""
        return tuple((slot.name, slot.shape) for slot in self.replica.parameters.slots)

    def train_batch(self, samples: Sequence[SafetySample]) -> BatchResult:
        """One update on `samples`: gradient of their mean loss, clipped once, one optimizer step (seed S14).

        Without samples, returns zeros and changes nothing. Raises, before anything changes, `InputError` for bad
        samples, `Violation` for non-finite values, and `ValueError` if accumulated gradients are pending.
        """
        if self._samples:
            msg = f"the gradient of {self._samples} samples waits: apply_accumulated_gradients or zero_gradients first"
            raise ValueError(msg)
        result = self.accumulate_gradients(samples)
        if not result.total:
            return result
        try:
            return replace(result, grad_norm=self.apply_accumulated_gradients(result.total))
        finally:
            self.zero_gradients()

    def accumulate_gradients(self, samples: Sequence[SafetySample]) -> BatchResult:
        """Add the gradient of the SUM of the samples' losses to the accumulated one; no update (seed S15).

        The result's grad_norm is 0. Raises `InputError` and `Violation` as `train_batch`, and then changes nothing.
        """
        if not samples:
            return NOTHING
        rows = [(each.input_ids(), each.label) for each in samples]
        partial, reports = self._compute(encode(self.model_config, self.config, rows)).result
        (root,) = partial.roots.values()
        self._sum = root.clone() if self._sum is None else self._sum.add_(root)
        self.replica.release(partial)
        self._samples += len(samples)
        self._calls += 1
        losses = [report.loss_sum for report in reports]
        total = fold((0, len(losses)), losses.__getitem__, operator.add, float)
        return BatchResult(total / len(samples), sum(report.correct for report in reports), len(samples), 0.0)

    @ensures(*LEAVES, of=lambda record: record.want)
    def _compute(self, rows: ClassificationTask) -> Report:
        """The gradient of all `rows`. Micro-batch indices continue from earlier calls, so that dropout masks differ."""
        step, first = self.replica.updates + 1, self._calls * self.micro_batches
        parts = GlobalBatch(step, 0, 0, tuple(range(len(rows)))).micro_batches(self.micro_batches)
        leaves, plan = plan_leaves(parts, [range(self.micro_batches)], rows, first=first)
        node = (first, first + self.micro_batches)
        partial = self.replica.gradients(step, leaves, [node], rows, checked=enforced())
        reports = message.reports_of([Observation(0, step, 0, "accumulated", {}, partial.reports)])
        seen = Seen([], Leaves(reports, plan, step))
        return Report(partial.reports, lambda _: seen, result=(partial, reports))

    def apply_accumulated_gradients(self, total_samples: int) -> float:
        """Divide the accumulated sum by `total_samples`, clip it, update once, and reset the accumulation (seed S15).

        Returns the norm before clipping. Raises, before anything changes, `ValueError` if nothing is accumulated or
        more than `total_samples` are, and `Violation` if the gradient is not finite.
        """
        if self._sum is None or total_samples < self._samples:
            msg = f"{self._samples} samples are accumulated, so their sum cannot be divided by {total_samples}"
            raise ValueError(msg)
        norm = self._apply(self._sum, total_samples, "reduced")
        self.zero_gradients()
        return norm

    def zero_gradients(self) -> None:
        """Discard the accumulated gradient."""
        self._sum, self._samples, self._calls = None, 0, 0

    def _apply(self, gradient: torch.Tensor, divisor: int, point: str) -> float:
        norm: float = self._finalize(gradient, divisor, point).result
        self.replica.apply()
        return norm

    @ensures(*REDUCED)
    def _finalize(self, gradient: torch.Tensor, divisor: int, point: str) -> Report:
        """Divide and clip the gradient under the laws of the step. Returns its norm. point: the gradient's source."""
        replica, limit, checked = self.replica, self.config.gradient_clip_norm, enforced()
        facts = replica.finalize_gradient([gradient], divisor, self._rate, limit, checked=checked)
        norm = real_of(int(facts[message.REDUCED.on_device.index("norm") if checked else 0]))

        def record(table: torch.Tensor) -> Seen[Reduced]:
            if not checked:
                return Seen([], Reduced())
            raw = (bits_of(self._rate), bits_of(replica.rate), *table.tolist())
            values = message.reduced_values(replica.parameters.size, dict(zip(message.REDUCED.names, raw, strict=True)))
            return Seen([Observation(0, replica.updates + 1, 0, point, values)], Reduced(limit=limit))

        return Report(facts, record, checked=checked, result=norm)

    def collect_lora_gradients(self) -> torch.Tensor:
        """The accumulated gradient, fp32 [num_trainable_parameters] on the CPU: a SUM over samples, or zeros (S19)."""
        flat = self.replica.parameters
        source = torch.zeros_like(flat.gradient) if self._sum is None else self._sum
        return torch.cat([view.reshape(-1) for view in flat.views(source).values()]).cpu()

    def apply_lora_gradients(self, flat: torch.Tensor | Sequence[float]) -> float:
        """Update once with a gradient that is already reduced and divided, in the order of `gradient_layout`.

        Clips it and returns the norm before clipping. Raises, before anything changes, `ValueError` for a wrong length
        and `Violation` for a non-finite value (V31).
        """
        reduced = torch.as_tensor(flat, dtype=torch.float32).detach()
        if reduced.dim() != 1 or reduced.numel() != self.num_trainable_parameters:
            msg = f"a gradient of shape {tuple(reduced.shape)} for {self.num_trainable_parameters} trainable parameters"
            raise ValueError(msg)
        padded = torch.zeros_like(self.replica.parameters.gradient)
        views = self.replica.parameters.views(padded).values()
        parts = torch.split(reduced.to(self.device), [view.numel() for view in views])
        for view, part in zip(views, parts, strict=True):
            view.copy_(part.view(view.shape))
        return self._apply(padded, 1, CALLER_GRADIENT)

    def forward_only(self, ids: Sequence[int], label: int) -> tuple[float, int]:
        """w[label] * cross entropy of one row of token ids, and the predicted class (the first in a tie); S17.

        Runs in eval mode. Raises `InputError` for a bad id or label, `Violation` if the logits are not finite (V29).
        """
        rows = encode(self.model_config, self.config, [(ids, label)])
        batch = rows.load([0], self.device)
        logits = self._finite("logits", predictions(self.model, batch))
        return float(rows.row_losses(logits, batch["labels"])), int(logits.argmax(dim=1))

    def forward_hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """fp32 [len(ids), hidden_size]: the last hidden states of one row, adapter included; see `forward_only`."""
        batch = encode(self.model_config, self.config, [(ids, 0)]).load([0], self.device)
        base: Any = without_adapter(self.model)
        with evaluating(self.model, self.device):
            backbone = getattr(base, base.base_model_prefix)
            states = backbone(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        length = int(batch["attention_mask"].sum())
        return self._finite("hidden states", states.last_hidden_state[0, :length].float())

    def _finite(self, name: str, values: torch.Tensor) -> torch.Tensor:
        rows = (0,) if nonfinite(values) else ()
        enforce(Judgement(OUTPUT, Output(name, 1, rows, self.replica.updates)))
        return values
