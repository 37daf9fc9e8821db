"""One worker: a model with its adapter, and training with the gradient half and the step half apart."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from andon.model.adapter import attach, trainable_parameters
from andon.model.build import build_base
from andon.model.task import predictions
from andon.pipeline.config import ClassifyConfig, TransformerConfig
from andon.pipeline.samples import NOTHING, BatchResult, CurrentRows, SafetySample, SampleEncoder
from andon.problems import InputError, Problem, install_hint
from andon.step.contracts import LeafReport, judge_leaves, plan_leaves, reports_of
from andon.step.keyed import KeyedRandomness, needs_full_interception
from andon.step.leaf import Leaf
from andon.step.optimizer import OptimizerSpec
from andon.step.plan import GlobalBatch
from andon.step.replica import PartialGradient, Replica
from andon.step.tree import fold
from andon_contracts.agree import Observation
from andon_contracts.observe import nonfinite
from andon_contracts.policy import clause, enforced, require
from andon_contracts.violation import Finding


def build_model(model_config: TransformerConfig, config: ClassifyConfig, seed: int) -> nn.Module:
    """The base of `model_config` on the CPU with LoRA on queries and values and a trainable head; the same every time.

    Raises `InputError` for a shape that no such model has, and where a library that makes it is not installed.
    """
    try:
        base = build_base(model_config.to_model_spec(config, seed))
        return attach(base, model_config.to_adapter_spec(config), seed)
    except ModuleNotFoundError as error:
        raise InputError([Problem("model", f"{error.name} is not installed; {install_hint('train')}")]) from error


def _explain_norm(norm: float, step: int) -> Finding:
    return Finding(seen=f"the gradient to apply has the norm {norm}", step=step, tensor="gradient")


@clause("finite", _explain_norm)
def _norm_is_finite(norm: float, step: int) -> bool:
    """The norm, hence every element, is finite."""
    return math.isfinite(norm)


@require(_norm_is_finite)
def _judge_norm(norm: float, step: int) -> None:
    """Before the update. Raises `Violation`."""


def _explain_forward(name: str, step: int, broken: bool) -> Finding:
    return Finding(seen="the forward pass gave values that are not finite", step=step, tensor=name)


@clause("finite", _explain_forward)
def _output_is_finite(name: str, step: int, broken: bool) -> bool:
    """No NaN or Inf came out, so none can be mistaken for a large but finite loss (V10, V29)."""
    return not broken


@require(_output_is_finite)
def _judge_output(name: str, step: int, broken: bool) -> None:
    """After a forward pass without an update. Raises `Violation`."""


class ClassifyPipeline:
    """A classifier that can train alone, or lend its gradient half to others (seed S12 to S20).

    `train_batch` is `accumulate_gradients` and `apply_accumulated_gradients`; with the same `micro_batches` it leaves
    the bits that a coordinator leaves, whatever its number of replicas.
    """

    def __init__(
        self,
        model_config: TransformerConfig,
        config: ClassifyConfig,
        *,
        device: str | torch.device = "cpu",
        seed: int = 0,
        micro_batches: int = 8,
        optimizer: OptimizerSpec | None = None,
        model: nn.Module | None = None,
    ) -> None:
        """seed: of the weights that are drawn and of dropout. micro_batches: M, the leaves of the sum of a batch.

        optimizer: AdamW with weight decay 0.01 if None. model: one that `build_model` made, to use instead of another.
        Raises `InputError` for what cannot be built, before anything is.
        """
        if micro_batches < 1:
            raise InputError([Problem("micro_batches", f"{micro_batches} must be at least 1")])
        self.model_config = model_config
        self.config = config
        self.micro_batches = micro_batches * config.accumulation_steps
        self._encoder = SampleEncoder(model_config, config)
        where = torch.device(device)
        self.model = (build_model(model_config, config, seed) if model is None else model).to(where).train()
        self._rows = CurrentRows(self._encoder.of_ids([[0]], [0]))
        intercept_all = needs_full_interception(self._probe, where)
        randomness = KeyedRandomness(seed, where, intercept_all=intercept_all)
        spec = OptimizerSpec() if optimizer is None else optimizer
        self.replica = Replica(self.model, trainable_parameters(self.model), spec, randomness, where)
        self._rate = config.learning_rate
        self._sum: torch.Tensor | None = None
        self._samples = 0
        self._calls = 0

    def _probe(self) -> object:
        device = next(self.model.parameters()).device
        return self._rows.loss_sum(self.model, self._rows.load([0], device))

    @property
    def device(self) -> torch.device:
        """Where the model and its optimizer live."""
        return self.replica.device

    @property
    def num_trainable_parameters(self) -> int:
        """Elements of the adapter and the head: the sum of r * (d_in + d_out), and the head's own."""
        return self.replica.parameters.count

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

        No samples: zeros, and nothing changes. Raises `InputError` for bad samples and `Violation` for what is not
        finite, with weights, moments and counts untouched; `ValueError` if accumulated gradients wait to be applied.
        """
        if self._samples:
            msg = f"the gradient of {self._samples} samples waits: apply_accumulated_gradients or zero_gradients first"
            raise ValueError(msg)
        result = self.accumulate_gradients(samples)
        if not result.total:
            return result
        try:
            norm = self.apply_accumulated_gradients(result.total)
        finally:
            self.zero_gradients()
        return replace(result, grad_norm=norm)

    def accumulate_gradients(self, samples: Sequence[SafetySample]) -> BatchResult:
        """Add the gradient of the SUM of the samples' losses to what is accumulated; no update (seed S15).

        The result's grad_norm is 0: there is no gradient of the whole batch yet. Raises as `train_batch` does; what
        was accumulated before is then as it was.
        """
        if not samples:
            return NOTHING
        self._rows.rows = self._encoder.of_samples(samples)
        partial, reports = self._compute(len(samples))
        (root,) = partial.roots.values()
        self._sum = root.clone() if self._sum is None else self._sum.add_(root)
        self.replica.release(partial)
        self._samples += len(samples)
        self._calls += 1
        losses = [report.loss_sum for report in reports]
        total = fold((0, len(losses)), losses.__getitem__, operator.add, float)
        return BatchResult(total / len(samples), sum(report.correct for report in reports), len(samples), 0.0)

    def _compute(self, count: int) -> tuple[PartialGradient, tuple[LeafReport, ...]]:
        """The micro-batches of rows 0 to count - 1, numbered on from earlier calls so that each has its own masks."""
        step, first = self.replica.updates + 1, self._calls * self.micro_batches
        parts = GlobalBatch(step, 0, 0, tuple(range(count))).micro_batches(self.micro_batches)
        planned = plan_leaves(parts, (range(self.micro_batches),), self._rows)
        plan = [replace(leaf, index=first + leaf.index) for leaf in planned]
        leaves = [Leaf(leaf.index, leaf.ids[0] if leaf.ids else 0, leaf.ids) for leaf in plan]
        node = (first, first + self.micro_batches)
        partial = self.replica.gradients(step, leaves, [node], self._rows, checked=enforced())
        reports = reports_of([Observation(0, step, 0, "accumulated", {}, partial.reports)])
        if enforced():
            judge_leaves(reports, plan, step)
        return partial, reports

    def apply_accumulated_gradients(self, total_samples: int) -> float:
        """Divide the accumulated sum by `total_samples`, clip, take one update, start anew (seed S15).

        Returns the norm before clipping. Raises `ValueError` if nothing is accumulated or more than `total_samples`
        are; `Violation` if the gradient is not finite (nothing has changed then).
        """
        if self._sum is None or total_samples < self._samples:
            msg = f"{self._samples} samples are accumulated, so their sum cannot be divided by {total_samples}"
            raise ValueError(msg)
        norm = self._apply(self._sum, total_samples)
        self.zero_gradients()
        return norm

    def zero_gradients(self) -> None:
        """Forget what is accumulated."""
        self._sum, self._samples, self._calls = None, 0, 0

    def _apply(self, gradient: torch.Tensor, divisor: int) -> float:
        replica = self.replica
        replica.set_gradient([gradient], divisor)
        norm = float(replica.gradient_norm())
        _judge_norm(norm, replica.updates + 1)
        replica.clip(self.config.gradient_clip_norm, norm)
        replica.set_rate(self._rate)
        replica.apply()
        return norm

    def collect_lora_gradients(self) -> torch.Tensor:
        """What is accumulated, as fp32 [num_trainable_parameters] on the CPU: a SUM over samples (zeros: none).

        In the order of `gradient_layout`, without the padding of the flat buffer (seed S19).
        """
        flat = self.replica.parameters
        source = torch.zeros_like(flat.gradient) if self._sum is None else self._sum
        return torch.cat([view.reshape(-1) for view in flat.views(source).values()]).cpu()

    def apply_lora_gradients(self, flat: torch.Tensor | Sequence[float]) -> float:
        """Take one update with a gradient that is already reduced and divided, laid out as `collect_lora_gradients`.

        It is clipped as any other; returns the norm before that. Raises `ValueError` for another length and
        `Violation` for a value that is not finite (V31); nothing has changed then.
        """
        given = torch.as_tensor(flat, dtype=torch.float32).detach()
        if given.dim() != 1 or given.numel() != self.num_trainable_parameters:
            msg = f"a gradient of shape {tuple(given.shape)} for {self.num_trainable_parameters} trainable parameters"
            raise ValueError(msg)
        parameters = self.replica.parameters
        padded = torch.zeros_like(parameters.gradient)
        parts = torch.split(given.to(self.device), [math.prod(slot.shape) for slot in parameters.slots])
        for view, part in zip(parameters.views(padded).values(), parts, strict=True):
            view.copy_(part.view(view.shape))
        return self._apply(padded, 1)

    def forward_only(self, ids: Sequence[int], label: int) -> tuple[float, int]:
        """w[label] * cross entropy of one row of token ids, and the class predicted (the first of equals); S17.

        In eval mode, without a gradient. Raises `InputError` for a bad id or label, `Violation` where the logits are
        not finite: they are not masked into a finite loss (V29).
        """
        rows = self._encoder.of_ids([ids], [label])
        batch = rows.load([0], self.device)
        logits = predictions(self.model, batch)
        _judge_output("logits", self.replica.updates, bool(nonfinite(logits)))
        return float(rows.row_losses(logits, batch["labels"])), int(logits.argmax(dim=1))

    def forward_hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """fp32 [len(ids), hidden_size]: the last hidden states of one row, adapter included, in eval mode (S9).

        Raises as `forward_only` does.
        """
        batch = self._encoder.of_ids([ids], [0]).load([0], self.device)
        base: Any = self.model.get_base_model()  # type: ignore[operator]
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                backbone = getattr(base, base.base_model_prefix)
                states = backbone(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        finally:
            self.model.train(training)
        length = int(batch["attention_mask"].sum())
        hidden: torch.Tensor = states.last_hidden_state[0, :length].float()
        _judge_output("hidden states", self.replica.updates, bool(nonfinite(hidden)))
        return hidden
