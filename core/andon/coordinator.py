"""Data-parallel training of a classifier with replicas in one process: the seed's coordinator, over the trainer's step.

The bits do not depend on the number of replicas, and there is no other path for few samples or for one replica.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from andon.backend.devices import named_devices
from andon.backend.inprocess import InlineBackend
from andon.config.schema import Optimizer
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
    config_of,
)
from andon.step.flat import REPLACED
from andon.step.plan import GlobalBatch
from andon.step.step import StepResult, TrainingStep
from andon.training.build import build_replicas
from andon_contracts.agree import minority
from andon_contracts.policy import clause, enforced, ensure, require
from andon_contracts.violation import Finding

Device = str | int | torch.device


def _explain_fallback(devices: Sequence[Device], result: Sequence[torch.device]) -> Finding:
    return Finding(seen=f"asked for {list(map(str, devices))}, chosen were {list(map(str, result))}")


@clause("cpu-fallback", _explain_fallback)
def _as_asked_or_cpu(devices: Sequence[Device], result: Sequence[torch.device]) -> bool:
    """One device for each requested one: that one, or the CPU."""
    return len(result) == len(devices) and all(
        device.type == "cpu" or str(device) == _canonical(asked) for asked, device in zip(devices, result, strict=True)
    )


@ensure(_as_asked_or_cpu)
def resolve_devices(devices: Sequence[Device], *, cpu_fallback: bool = False) -> tuple[torch.device, ...]:
    """A device for each replica (F-DP-004). Integers are indices of GPUs; 'cpu' may be repeated.

    cpu_fallback: put replicas whose GPU does not exist on the CPU, and log a warning. Raises `InputError` with all that
    is wrong: no devices, a name that is no device, a GPU that is absent or named twice (V15).
    """
    if isinstance(devices, str) or not len(devices):
        raise InputError([Problem("devices", f"At least one GPU index required, or 'cpu'; got {devices!r}")])
    return named_devices(devices, where="devices", absent="cpu" if cpu_fallback else "refuse")


def _canonical(device: Device) -> str:
    text = str(device).strip()
    if text.isdigit():
        return f"cuda:{int(text)}"
    return "cuda:0" if text == "cuda" else text


def _detached(self: DataParallelCoordinator) -> tuple[int, ...]:
    return tuple(rank for rank, each in enumerate(self.pipelines) if not each.replica.parameters.weights_attached())


def _explain_detached(self: DataParallelCoordinator, samples: Sequence[SafetySample]) -> Finding:
    return Finding(REPLACED, self.updates + 1, _detached(self), "weights")


@clause("replicas-agree", _explain_detached)
def _optimizers_own_the_weights(self: DataParallelCoordinator, samples: Sequence[SafetySample]) -> bool:
    """The weights with which every model computes are those that its optimizer updates."""
    return not samples or not _detached(self)


def _explain_states(self: DataParallelCoordinator, samples: Sequence[SafetySample]) -> Finding:
    last = self.last_step
    seen = "the replicas do not report the same weights, optimizer state and gradient"
    return Finding(seen, self.updates, minority([tuple(each.items()) for each in last.ranks]) if last else ())


@clause("replicas-agree", _explain_states)
def _all_updated_alike(self: DataParallelCoordinator, samples: Sequence[SafetySample]) -> bool:
    """After a step all replicas reported equal digests."""
    last = self.last_step
    return not samples or (last is not None and len({tuple(each.items()) for each in last.ranks}) == 1)


def _explain_rows(samples: Sequence[SafetySample], result: BatchResult) -> Finding:
    return Finding(f"{result.total} of {len(samples)} samples were trained on")


@clause("samples-once", _explain_rows)
def _every_sample_counted(samples: Sequence[SafetySample], result: BatchResult) -> bool:
    return result.total == len(samples)


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
        optimizer: Optimizer | None = None,
        cpu_fallback: bool = False,
        base_every: int = 1,
    ) -> None:
        """devices: see `resolve_devices`; their replicas compute in turn (`andon train` uses processes).

        micro_batches: M, the leaves of the sum; results depend on it, and not on the number of devices.
        seed: of initial weights and dropout. optimizer: AdamW with weight decay 0.01 if None.
        base_every: compare the frozen weights before every so many updates; raise it for large models.

        All replicas are copies of one model (V19). Raises `InputError`, before anything is built, and `Violation` if
        the replicas do not start alike.
        """
        placed = resolve_devices(devices, cpu_fallback=cpu_fallback)
        found = ProblemList()
        for name, value in (("micro_batches", micro_batches), ("base_every", base_every)):
            if value < 1:
                found.add(name, f"{value} must be at least 1")
        found.raise_if_any()
        self.model_config = model_config
        self.config = classify_config
        self._base_every = base_every
        self._encoder = SampleEncoder(model_config, classify_config)
        config = config_of(model_config, classify_config, seed, optimizer)
        built = build_model(model_config, classify_config, seed)  # before any row: it refuses what has no model
        rows = self._encoder.of_ids([[0]], [0])
        self._backend = InlineBackend(placed)
        replicas = build_replicas(built, config, self._backend, rows, 0, own_base=True)
        self._pipelines = tuple(
            ClassifyPipeline(model_config, classify_config, micro_batches=micro_batches, replica=replica)
            for replica in replicas
        )
        self._rate = classify_config.learning_rate
        self._updates = 0
        self._last: StepResult | None = None
        parts = micro_batches * classify_config.accumulation_steps
        self._step = TrainingStep(self._backend, replicas, rows, parts, classify_config.gradient_clip_norm)
        self._step.attest_start({})
        self._base = replicas[0].base_digest() if enforced() else 0

    def __enter__(self) -> DataParallelCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the backend."""
        self._backend.close()

    @property
    def num_gpus(self) -> int:
        """The number of replicas, on whatever devices (seed R13)."""
        return len(self._pipelines)

    @property
    def primary_pipeline(self) -> ClassifyPipeline:
        """Replica 0, for evaluation and inference (R14, R15). If it is trained alone, the next step raises."""
        return self._pipelines[0]

    @property
    def pipelines(self) -> tuple[ClassifyPipeline, ...]:
        """All replicas by rank."""
        return self._pipelines

    @property
    def updates(self) -> int:
        """The number of updates taken."""
        return self._updates

    @property
    def last_step(self) -> StepResult | None:
        """The last update in detail: micro-batches by rank, digests."""
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

    @require(_optimizers_own_the_weights)
    @ensure(_all_updated_alike)
    @ensure(_every_sample_counted)
    def train_batch_parallel(self, samples: Sequence[SafetySample]) -> BatchResult:
        """One update of all replicas on `samples`, of which there may be fewer than replicas (C-DP-002, seed R16).

        No samples: zeros, and nothing changes. Raises `InputError` for any bad sample before anything is computed
        (V20), and `Violation` naming clause, step, rank and micro-batch. If it is found before the update, as every
        non-finite value is, weights, moments and counts of all replicas are unchanged (V9).
        """
        if not samples:
            return NOTHING
        rows = self._encoder.of_samples(samples)
        step = self._updates + 1
        if (step - 1) % self._base_every == 0:
            self._step.attest_base(step, self._base)
        self._step.task = rows
        self._last = self._step(GlobalBatch(step, 0, 0, tuple(range(len(samples)))), self._rate, step)
        self._updates = step
        return BatchResult(self._last.loss, self._last.correct, self._last.rows, self._last.grad_norm)
