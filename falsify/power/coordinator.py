"""The seed's coordinator as a subject: samples in, batch results out, replicas to look at."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from andon.config.schema import Config, Optimizer
from andon.coordinator import DataParallelCoordinator
from andon.pipeline import ClassifyConfig, SafetySample, TransformerConfig
from andon.step.micro_batch import Leaf
from andon.step.plan import Schedule
from andon.step.replica import PartialGradient, Replica
from andon_contracts.policy import suspended
from andon_contracts.violation import Violation
from andon_falsify.subjects.assembly import plan_of
from andon_falsify.subjects.case import VOCABULARY, Case
from andon_falsify.subjects.trace import Observations, Trace, assemble_trace, copied
from andon_falsify.subjects.watching import note_end, note_result, note_start, note_state, watch_gradient

from .registry import named


class CoordinatorSubject:
    """Runs cases without dropout through `DataParallelCoordinator`, in this process. Plants the fault of the case."""

    name = "coordinator"

    def run(self, case: Case) -> Trace:
        """See `Subject.run`. Raises `ValueError` for a case with dropout or poison."""
        if case.dropout or case.poison is not None:
            raise ValueError("the coordinator is judged without dropout and poison")
        with ExitStack() as stack:
            if not case.contracts:
                stack.enter_context(suspended())
            coordinator = coordinator_of(case)
            if case.fault is not None:
                named(case.fault.partition(":")[2]).plant(coordinator, stack)
            seen = Observations(tuple(range(case.world)))
            _describe(coordinator, case, seen)
            _train(coordinator, case, seen)
        return assemble_trace(case, [seen], {}, self.name)


def coordinator_of(case: Case) -> DataParallelCoordinator:
    """The coordinator of `case`, untrained."""
    sizes = (case.hidden, case.heads, case.heads, case.inner, case.layers, VOCABULARY, case.longest)
    settings = ClassifyConfig(
        num_classes=case.rows.classes,
        lora_rank=case.rank,
        lora_alpha=2.0 * case.rank,
        learning_rate=case.lr,
        max_seq_len=case.longest,
        gradient_clip_norm=case.clip_norm,
        class_weights=case.class_weights,
    )
    return DataParallelCoordinator(
        TransformerConfig(*sizes, architecture=case.architecture),
        settings,
        ["cpu"] * case.world,
        case.micro_batches,
        seed=case.seed,
        optimizer=Optimizer(name=case.optimizer, weight_decay=case.weight_decay, momentum=case.momentum),
    )


def _samples_of(case: Case) -> list[SafetySample]:
    texts = ["".join(map(chr, row)) for row in case.rows.tokens]
    return [SafetySample(text, label) for text, label in zip(texts, case.rows.labels, strict=True)]


def _describe(coordinator: DataParallelCoordinator, case: Case, seen: Observations) -> None:
    model: Any = coordinator.pipelines[0].model
    seen.state = copied(model.state_dict())
    seen.config = model.get_base_model().config.to_dict()
    for rank, pipeline in enumerate(coordinator.pipelines):
        note_start(seen, rank, pipeline.model)
        _watch_rows(rank, pipeline.replica, case, seen)
        watch_gradient(seen, rank, pipeline.replica, values=True)


def _watch_rows(rank: int, replica: Replica, case: Case, seen: Observations) -> None:
    compute, plan = replica.gradients, plan_of(case)

    def gradients(step: int, leaves: Sequence[Leaf], *given: Any, **named: Any) -> PartialGradient:
        batch = plan.batch(step).ids
        seen.of(rank, step).leaves += [tuple(batch[place] for place in leaf.ids) for leaf in leaves]
        return compute(step, leaves, *given, **named)

    replica.gradients = gradients  # type: ignore[method-assign]


def _train(coordinator: DataParallelCoordinator, case: Case, seen: Observations) -> None:
    plan, samples = plan_of(case), _samples_of(case)
    schedule = Schedule(Config(optimizer=Optimizer(lr=case.lr)), plan.total_steps)
    by_rank = {rank: pipeline.replica for rank, pipeline in enumerate(coordinator.pipelines)}
    try:
        for step in range(1, plan.total_steps + 1):
            batch = plan.batch(step)
            coordinator.learning_rate = rate = schedule.rate(step)
            seen.at = step
            result = coordinator.train_batch_parallel([samples[row] for row in batch.ids])
            note_result(seen, batch, result.total, rate, result.avg_loss, result.grad_norm)
            note_state(seen, step, by_rank)
    except Violation as violation:
        seen.violation = (violation.clause, violation.step, str(violation))
    note_end(seen, by_rank)
