"""Data-parallel training of a classifier with replicas in one process: the seed's coordinator, made true.

A batch is cut into M micro-batches; each replica sums the gradients of its own, the sums are added along one fixed
tree, divided once by the number of samples, clipped once, and every replica takes the same update. So the bits do not
depend on the number of replicas, and there is no other path for few samples or for one replica.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from andon.backend.devices import named_devices
from andon.backend.inprocess import InlineBackend
from andon.console.problems import InputError, Problem, ProblemList
from andon.pipeline import (
    NOTHING,
    BatchResult,
    ClassifyConfig,
    ClassifyPipeline,
    SafetySample,
    SampleEncoder,
    TransformerConfig,
    build_model,
    step_spec,
)
from andon.step.flat import REPLACED
from andon.step.optimizer import OptimizerSpec
from andon.step.plan import GlobalBatch
from andon.step.step import StepResult
from andon.step.task import Batch, LeafLoss
from andon.tasks.text import ClassificationTask
from andon.training.build import build_replicas, build_step
from andon_contracts.policy import clause, enforced, ensure, require
from andon_contracts.violation import Finding

Device = str | int | torch.device


def _explain_fallback(devices: Sequence[Device], result: Sequence[torch.device]) -> Finding:
    return Finding(seen=f"asked for {list(map(str, devices))}, chosen were {list(map(str, result))}")


@clause("cpu-fallback", _explain_fallback)
def _as_asked_or_cpu(devices: Sequence[Device], result: Sequence[torch.device]) -> bool:
    """One device for each that was asked for: that one, or the CPU."""
    return len(result) == len(devices) and all(
        device.type == "cpu" or str(device) == _canonical(asked) for asked, device in zip(devices, result, strict=True)
    )


@ensure(_as_asked_or_cpu)
def resolve_devices(devices: Sequence[Device], *, cpu_fallback: bool = False) -> tuple[torch.device, ...]:
    """A device for each replica: integers are indices of GPUs, 'cpu' may be repeated.

    cpu_fallback: put replicas whose GPU does not exist on the CPU, and say so in the log; never without being asked.
    Raises `InputError` with all that is wrong: none at all, a name that is no device, a GPU that is absent or named
    twice (V15).
    """
    if isinstance(devices, str) or not len(devices):
        raise InputError([Problem("devices", f"At least one GPU index required, or 'cpu'; got {devices!r}")])
    return named_devices(devices, where="devices", absent="cpu" if cpu_fallback else "refuse")


def _canonical(device: Device) -> str:
    """`cuda:1` for 1, '1' and 'cuda:1'; what is no device stays as it was written."""
    text = str(device).strip()
    if text.isdigit():
        return f"cuda:{int(text)}"
    return "cuda:0" if text == "cuda" else text


def _explain_detached(detached: Sequence[int], step: int) -> Finding:
    return Finding(
        seen=REPLACED,
        step=step,
        ranks=tuple(detached),
        tensor="weights",
    )


@clause("replicas-agree", _explain_detached)
def _all_attached(detached: Sequence[int], step: int) -> bool:
    """The weights that every model computes with are those that its optimizer updates."""
    return not detached


@require(_all_attached)
def _judge_attached(detached: Sequence[int], step: int) -> None:
    """Before a step. Raises `Violation`."""


class _CurrentRows:
    """A `Task` whose rows are those of the batch at hand."""

    def __init__(self, rows: ClassificationTask) -> None:
        self.rows = rows

    def load(self, ids: Sequence[int], device: torch.device) -> Batch:
        """See `Task.load`."""
        return self.rows.load(ids, device)

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """See `Task.loss_sum`."""
        return self.rows.loss_sum(model, batch)

    def content(self, batch: Batch) -> torch.Tensor:
        """See `Task.content`."""
        return self.rows.content(batch)

    def planned_content(self, ids: Sequence[int]) -> torch.Tensor:
        """See `Task.planned_content`."""
        return self.rows.planned_content(ids)

    def planned_terms(self, ids: Sequence[int]) -> Sequence[int]:
        """See `Task.planned_terms`."""
        return self.rows.planned_terms(ids)


class DataParallelCoordinator:
    """One replica of a classifier on each device, trained as one (seed R6; C-DP-001, C-DP-002).

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        model_config: TransformerConfig,
        classify_config: ClassifyConfig,
        devices: Sequence[Device],
        micro_batches: int = 8,
        *,
        seed: int = 0,
        optimizer: OptimizerSpec | None = None,
        cpu_fallback: bool = False,
        base_every: int = 1,
    ) -> None:
        """devices: see `resolve_devices`; their replicas compute in turn (`andon train` has processes).

        micro_batches: M, the leaves of the sum; results depend on it, and not on the number of devices.
        seed: of initial weights and dropout. optimizer: AdamW with weight decay 0.01 if None.
        base_every: the frozen weights are digested before every so many updates; raise it for large models.

        One model is built and copied, so that all replicas start alike (V19), which is then attested. Raises
        `InputError`, before anything is built, and `Violation` if the replicas do not start alike.
        """
        placed = resolve_devices(devices, cpu_fallback=cpu_fallback)
        self._check_options(micro_batches, base_every)
        self.model_config = model_config
        self.config = classify_config
        self._base_every = base_every
        self._encoder = SampleEncoder(model_config, classify_config)
        spec = step_spec(classify_config, micro_batches, seed, optimizer)
        built = build_model(model_config, classify_config, seed)  # before any row: it refuses what has no model
        self._rows = _CurrentRows(self._encoder.of_ids([[0]], [0]))
        self._backend = InlineBackend(placed)
        replicas = build_replicas(built, spec, self._backend, self._rows, 0, own_base=True)
        self._pipelines = tuple(
            ClassifyPipeline(model_config, classify_config, micro_batches=micro_batches, replica=replica)
            for replica in replicas
        )
        self._rate = classify_config.learning_rate
        self._updates = 0
        self._last: StepResult | None = None
        self._step = build_step(spec, self._backend, replicas, self._rows)
        self._step.attest_start({})
        self._base = replicas[0].base_digest() if enforced() else 0

    @staticmethod
    def _check_options(micro_batches: int, base_every: int) -> None:
        found = ProblemList()
        for name, value in (("micro_batches", micro_batches), ("base_every", base_every)):
            if value < 1:
                found.add(name, f"{value} must be at least 1")
        found.raise_if_any()

    def __enter__(self) -> DataParallelCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the backend; replicas of one process hold nothing that needs it."""
        self._backend.close()

    @property
    def num_gpus(self) -> int:
        """Replicas, on whatever devices they are (seed R13)."""
        return len(self._pipelines)

    @property
    def primary_pipeline(self) -> ClassifyPipeline:
        """Replica 0, for evaluation and inference (R14, R15). If it is trained alone, the next step raises."""
        return self._pipelines[0]

    @property
    def pipelines(self) -> tuple[ClassifyPipeline, ...]:
        """All replicas by rank, to look at."""
        return self._pipelines

    @property
    def updates(self) -> int:
        """Updates taken."""
        return self._updates

    @property
    def last_step(self) -> StepResult | None:
        """What the last update did in detail: micro-batches by rank, digests."""
        return self._last

    @property
    def learning_rate(self) -> float:
        """The rate of the next update, on every replica."""
        return self._rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        for pipeline in self._pipelines:
            pipeline.learning_rate = rate
        self._rate = rate

    def train_batch_parallel(self, samples: Sequence[SafetySample]) -> BatchResult:
        """One update of all replicas on `samples`, of which there may be fewer than replicas (C-DP-002, seed R16).

        No samples: zeros, and nothing changes. Raises `InputError` for any bad sample before anything is computed
        (V20), and `Violation` naming clause, step, rank and micro-batch; found before the update (everything that is
        not finite is), it leaves weights, moments and counts of all replicas as they were (V9).
        """
        if not samples:
            return NOTHING
        self._rows.rows = self._encoder.of_samples(samples)
        step = self._updates + 1
        self._judge_models(step)
        self._last = self._step(GlobalBatch(step, 0, 0, tuple(range(len(samples)))), self._rate, step)
        self._updates = step
        return BatchResult(self._last.loss, self._last.correct, self._last.rows, self._last.grad_norm)

    def _judge_models(self, step: int) -> None:
        """Before a step: the models are the optimizers' own, and what is frozen has not moved."""
        if not enforced():
            return
        replicas = [pipeline.replica for pipeline in self._pipelines]
        for replica in replicas:
            replica.parameters.attach_gradient()
        _judge_attached([rank for rank, replica in enumerate(replicas) if not replica.parameters.attached()], step)
        if (step - 1) % self._base_every == 0:
            self._step.attest_base(step, self._base)
