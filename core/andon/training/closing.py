"""How a run ends: the last scores, the adapter, the ledger's account, and the summary last of all."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from andon.messages import say
from andon.metrics.scores import Scores
from andon.model.backbone import backbone_of
from andon.model.compiled import CompiledPasses
from andon.problems import InputError
from andon.training.budget import hold_to_budget
from andon.training.evaluation import evaluate
from andon.training.journal import HELD_OUT, FolderJournal, evaluation_of
from andon.training.outputs import Result, write_adapter, write_results
from andon.training.past import Past
from andon.training.repeat import require_repeated
from andon.training.session import Session
from andon.training.trainer import Journal, Outcome, Trainer
from andon_contracts.digest import hex64
from andon_contracts.fields import Real
from andon_contracts.record import Broken, End, Record
from andon_contracts.violation import Violation


def finish(session: Session, journal: Journal, outcome: Outcome, past: Past) -> None:
    """Score the rows never trained on (every rank takes part), then write what the run came to (rank 0).

    A run that was preempted gets neither scores nor an adapter: it goes on later. What the ledger has already, from a
    process that ended before its summary was there, must come out again, and is not written twice.
    """
    material, progress = session.material, outcome.progress
    scores: Scores | None = None
    if outcome.reason != "preempted":
        scores = evaluate(session.backend, session.models, material.evaluation_task, material.evaluation_ids)
    memory = hold_to_budget(session.backend, progress.step, session.planned_bytes)
    epoch, weights = material.plan.epoch_of(progress.step), session.primary.weights_digest()
    scored = evaluation_of(progress.step, epoch, scores) if scores is not None else None
    end = End(progress.step, outcome.reason, {"weights": hex64(weights)}, final_loss=Real.of(progress.last_loss))
    require_repeated(progress.step, (*_other("scores", past.evaluated, scored), *_other("end", past.ended, end)))
    if not isinstance(journal, FolderJournal):
        return
    _tell_of_eager_passes(session)
    if scores is not None:
        journal.evaluated(progress.step, epoch, scores, HELD_OUT, recorded=past.evaluated == scored)
        write_adapter(session.folder, session.primary.model, material)
    if past.ended != end:
        journal.append(end)
    _summarise(session, journal, outcome, weights, scores, past, memory)


def _tell_of_eager_passes(session: Session) -> None:
    passes = backbone_of(session.primary.model).forward
    if isinstance(passes, CompiledPasses) and passes.eager:
        say(f"compile: {passes.eager} training passes of rank 0 ran eagerly, since their micro-batches were not full")


def _other(what: str, before: Record | None, now: Record | None) -> tuple[str, ...]:
    """The difference between what the ledger has already and what came out now."""
    return () if before in (None, now) else (f"{what}: {before}, now {now}",)


def record_violation(session: Session, journal: Journal, violation: Violation, trainer: Trainer, past: Past) -> None:
    """The last lines of the ledger, and a summary of the last step that held. Checkpoints stay what they were.

    past: before this part of the run. A disk that refuses must not hide the violation.
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
        again = replace(past, violations=past.violations + 1, ended=None)
        _summarise(session, journal, last, trainer.weights, None, again, {})
    except InputError as refused:
        say(f"the violation could not be recorded: {refused}")


def _summarise(
    session: Session,
    journal: FolderJournal,
    outcome: Outcome,
    weights: int,
    scores: Scores | None,
    past: Past,
    memory: Mapping[str, int],
) -> None:
    progress, ended = outcome.progress, past.ended is not None
    result = Result(
        reason=outcome.reason,
        steps=progress.step,
        best_step=progress.best_step,
        last_loss=progress.last_loss,
        world_size=past.world if ended else session.backend.world_size,
        backend=past.backend if ended else session.backend.name,
        weights_digest=hex64(weights),
        initial_weights_digest=hex64(session.initial_weights),
        ledger_head=journal.head,
        wall_s=time.time() - session.started,
        violations=past.violations,
        memory=memory,
    )
    write_results(session.folder, session.environment, result, scores)
