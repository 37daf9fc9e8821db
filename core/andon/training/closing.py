"""How a run ends: the last scores, the adapter, the ledger's account, and the summary last of all."""

from __future__ import annotations

import time
from collections.abc import Mapping

from andon.messages import say
from andon.metrics.scores import Scores
from andon.problems import InputError
from andon.training.budget import hold_to_budget
from andon.training.evaluation import evaluate
from andon.training.journal import FolderJournal
from andon.training.outputs import Result, write_adapter, write_results
from andon.training.session import Session
from andon.training.trainer import Journal, Outcome, Trainer
from andon_contracts.digest import hex64
from andon_contracts.fields import Real
from andon_contracts.record import Broken, End
from andon_contracts.violation import Violation


def finish(session: Session, journal: Journal, outcome: Outcome, violations: int) -> None:
    """Score the rows never trained on (every rank takes part), then write what the run came to (rank 0).

    A run that was preempted gets neither scores nor an adapter: it goes on later. violations: recorded before.
    """
    material, progress = session.material, outcome.progress
    scores: Scores | None = None
    if outcome.reason != "preempted":
        scores = evaluate(session.backend, session.models, material.evaluation_task, material.evaluation_ids)
    memory = hold_to_budget(session.backend, progress.step, session.planned_bytes)
    if not isinstance(journal, FolderJournal):
        return
    if scores is not None:
        journal.evaluated(progress.step, material.plan.epoch_of(progress.step), scores, "held-out")
        write_adapter(session.folder, session.primary.model, material)
    weights = session.primary.weights_digest()
    journal.append(
        End(progress.step, outcome.reason, {"weights": hex64(weights)}, final_loss=Real.of(progress.last_loss))
    )
    _summarise(session, journal, outcome, weights, scores, violations, memory)


def record_violation(
    session: Session, journal: Journal, violation: Violation, trainer: Trainer, violations: int
) -> None:
    """The last lines of the ledger, and a summary of the last step that held. Checkpoints stay what they were.

    violations: recorded before this one. A disk that refuses must not hide the violation.
    """
    if not isinstance(journal, FolderJournal):
        return
    finding = violation.finding
    try:
        journal.append(
            Broken(
                clause=violation.clause or "unnamed",
                step=finding.step,
                ranks=finding.ranks,
                tensor=finding.tensor,
                seen=finding.seen,
                details=dict(finding.details),
            )
        )
        journal.append(End(trainer.progress.step, "violation", {"weights": hex64(trainer.weights)}, violations=1))
        last = Outcome(trainer.progress, "violation")
        _summarise(session, journal, last, trainer.weights, None, violations + 1, {})
    except InputError as refused:
        say(f"the violation could not be recorded: {refused}")


def _summarise(
    session: Session,
    journal: FolderJournal,
    outcome: Outcome,
    weights: int,
    scores: Scores | None,
    violations: int,
    memory: Mapping[str, int],
) -> None:
    progress = outcome.progress
    result = Result(
        reason=outcome.reason,
        steps=progress.step,
        best_step=progress.best_step,
        last_loss=progress.last_loss,
        world_size=session.backend.world_size,
        backend=session.backend.name,
        weights_digest=hex64(weights),
        initial_weights_digest=hex64(session.initial_weights),
        ledger_head=journal.head,
        wall_s=time.time() - session.started,
        violations=violations,
        memory=memory,
    )
    write_results(session.folder, session.environment, result, scores)
