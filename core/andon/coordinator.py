"""Data-parallel training of a classifier with replicas in one process: the seed's coordinator on the trainer's step.

The bits do not depend on the number of replicas. Few samples and a single replica use the same code path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from andon.backend.base import InlineBackend
from andon.backend.devices import named_devices
from andon.config.schema import Optimizer
from andon.console.messages import InputError, Problem
from andon.pipeline import (
    NOTHING,
    BatchResult,
    ClassifyConfig,
    ClassifyPipeline,
    SafetySample,
    TransformerConfig,
    build_classifiers,
    encode,
)
from andon.step.flat import REPLACED
from andon.step.plan import GlobalBatch
from andon.step.step import StepResult, TrainingStep
from andon_contracts.agree import minority
from andon_contracts.policy import clause, enforced, ensure, require
from andon_contracts.violation import Finding

Device = str | int | torch.device


@clause(
    "cpu-fallback",
    lambda devices, result: Finding(f"asked for {list(map(str, devices))}, chosen were {list(map(str, result))}"),
)
def _as_asked_or_cpu(devices: Sequence[Device], result: Sequence[torch.device]) -> bool:
    requested = [str(device).strip() for device in devices]
    names = [f"cuda:{int(each)}" if each.isdigit() else {"cuda": "cuda:0"}.get(each, each) for each in requested]
    pairs = zip(names, result, strict=False)
    return len(result) == len(names) and all(each.type == "cpu" or str(each) == name for name, each in pairs)


@ensure(_as_asked_or_cpu)
def resolve_devices(devices: Sequence[Device], *, cpu_fallback: bool = False) -> tuple[torch.device, ...]:
    """One device per replica (F-DP-004). Integers are indices of GPUs; 'cpu' may be repeated.

    cpu_fallback: put replicas whose GPU does not exist on the CPU, and log a warning. Raises `InputError` listing all
    problems: no devices, an invalid name, a missing or repeated GPU (V15).
    """
    if isinstance(devices, str) or not len(devices):
        raise InputError.at("devices", f"At least one GPU index required, or 'cpu', in a list; got {devices!r}")
    return named_devices(devices, where="devices", absent="cpu" if cpu_fallback else "refuse")


def _detached(self: DataParallelCoordinator) -> tuple[int, ...]:
    return tuple(rank for rank, each in enumerate(self.pipelines) if not each.replica.parameters.weights_attached())


@clause("replicas-agree", lambda self, samples: Finding(REPLACED, self.updates + 1, _detached(self), "weights"))
def _optimizers_own_the_weights(self: DataParallelCoordinator, samples: Sequence[SafetySample]) -> bool:
    return not samples or not _detached(self)


def _digests(self: DataParallelCoordinator) -> list[tuple[tuple[str, int], ...]]:
    return [tuple(each.items()) for each in self.last_step.ranks] if self.last_step else []


def _explain_states(self: DataParallelCoordinator, samples: Sequence[SafetySample]) -> Finding:
    seen = "the replicas do not report the same weights, optimizer state and gradient"
    return Finding(seen, self.updates, minority(_digests(self)))


@clause("replicas-agree", _explain_states)
def _all_updated_alike(self: DataParallelCoordinator, samples: Sequence[SafetySample]) -> bool:
    return not samples or len(set(_digests(self))) == 1


@clause("samples-once", lambda samples, result: Finding(f"{result.total} of {len(samples)} samples were trained on"))
def _every_sample_counted(samples: Sequence[SafetySample], result: BatchResult) -> bool:
    return result.total == len(samples)


class DataParallelCoordinator:
    """Trains one replica of a classifier per device as one model (seed R6; C-DP-001, C-DP-002).

    pipelines: all replicas by rank. num_gpus: their number, also on CPUs (seed R13). updates: the number of updates.
    last_step: the last update in detail, with reports per micro-batch and digests; None before the first.
    """

    def __init__(
        self,
        model_config: TransformerConfig,
        classify_config: ClassifyConfig,
        devices: Sequence[Device],
        micro_batches: int = 8,
        *,
        seed: int = 0,
        optimizer: Optimizer | None = None,
        cpu_fallback: bool = False,
        base_every: int = 1,
    ) -> None:
        """devices: see `resolve_devices`; their replicas compute in turn (`andon train` uses processes).

        micro_batches: M, the leaves of the sum; results depend on it, and not on the number of devices. seed: for
        initial weights and dropout. optimizer: None: AdamW with weight decay 0.01. base_every: compare the frozen
        weights every this many updates; raise it for large models. All replicas are copies of one model (V19). Raises
        `InputError` before anything is built, and `Violation` if the replicas start from different states.
        """
        placed = resolve_devices(devices, cpu_fallback=cpu_fallback)
        counts = {"micro_batches": micro_batches, "base_every": base_every}
        if wrong := [Problem(name, f"{value} must be at least 1") for name, value in counts.items() if value < 1]:
            raise InputError(wrong)
        self.model_config = model_config
        self.config = classify_config
        self.updates = 0
        self.last_step: StepResult | None = None
        self._base_every = base_every
        self._rate = classify_config.learning_rate
        replicas = build_classifiers(model_config, classify_config, seed, optimizer, placed)
        self.pipelines = tuple(
            ClassifyPipeline(model_config, classify_config, micro_batches=micro_batches, replica=replica)
            for replica in replicas
        )
        self.num_gpus = len(self.pipelines)
        parts, rows = self.pipelines[0].micro_batches, encode(model_config, classify_config, [([0], 0)])
        self._step = TrainingStep(InlineBackend(placed), replicas, rows, parts, classify_config.gradient_clip_norm)
        self._step.attest_start({})
        self._base = replicas[0].base_digest() if enforced() else 0

    @property
    def primary_pipeline(self) -> ClassifyPipeline:
        """Replica 0, for evaluation and inference (R14, R15). If it is trained alone, the next step raises."""
        return self.pipelines[0]

    @property
    def learning_rate(self) -> float:
        """The rate of the next update, on every replica."""
        return self._rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        for pipeline in self.pipelines:
            pipeline.learning_rate = rate
        self._rate = rate

    @require(_optimizers_own_the_weights)
    @ensure(_all_updated_alike)
    @ensure(_every_sample_counted)
    def train_batch_parallel(self, samples: Sequence[SafetySample]) -> BatchResult:
        """One update of all replicas on `samples`, which may be fewer than the replicas (C-DP-002, seed R16).

        Without samples, returns zeros and changes nothing. Raises `InputError` for any bad sample before anything is
        computed (V20), and `Violation` naming clause, step, rank and micro-batch. If that is before the optimizer step,
        as for every non-finite value, no replica has changed (V9).
        """
        if not samples:
            return NOTHING
        rows = encode(self.model_config, self.config, [(each.input_ids(), each.label) for each in samples])
        step = self.updates + 1
        if self.updates % self._base_every == 0:
            self._step.attest_base(step, self._base)
        self._step.task = rows
        self.last_step = last = self._step(GlobalBatch(step, 0, 0, tuple(range(len(samples)))), self._rate, step)
        self.updates = step
        return BatchResult(last.loss, last.correct, last.rows, last.grad_norm)
