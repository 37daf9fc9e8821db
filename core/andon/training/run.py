"""One run in one process: from a checked configuration to a finished run folder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from andon.config.schema import Config
from andon.exits import Exit
from andon.messages import say
from andon.metrics.scores import Scores
from andon.problems import InputError
from andon.run.folder import RunFolder
from andon.training.closing import finish, record_violation
from andon.training.evaluation import evaluate
from andon.training.journal import progress_from
from andon.training.material import schedule_of
from andon.training.opening import agree_on_start, open_journal
from andon.training.repeat import Repeats
from andon.training.resume import AlreadyFinished, Standpoint, restore
from andon.training.session import Session, assembled
from andon.training.trainer import Journal, Outcome, Progress, Trainer
from andon_contracts.policy import reset_evaluations
from andon_contracts.violation import Violation


def train(config: Config, folder: RunFolder, stop_asked: Callable[[], bool], started: float | None = None) -> Exit:
    """Run, or resume, the training that `config` describes in `folder`; returns `Exit.OK` or `Exit.PREEMPTED`.

    stop_asked: whether this process was asked to end at the next step boundary. started: when the command began, in
    seconds since the epoch (None: now). Raises `InputError` for what the user got wrong, `Violation` on every rank
    alike for what the system did.
    """
    reset_evaluations()
    with assembled(config, folder, started) as session:
        try:
            standpoint = restore(session)
        except AlreadyFinished:
            if session.writes:
                say(f"resume: the run in {folder.path} is finished, nothing to do")
            return Exit.OK
        outcome = _train(session, standpoint, stop_asked)
    return Exit.PREEMPTED if outcome.reason == "preempted" else Exit.OK


def _train(session: Session, standpoint: Standpoint, stop_asked: Callable[[], bool]) -> Outcome:
    checkpoint, past = standpoint.checkpoint, standpoint.past
    progress = progress_from(checkpoint.state) if checkpoint is not None else Progress()
    agree_on_start(session, progress)  # from here on rank 0 may write to what all have read
    journal = open_journal(session, standpoint, progress)
    trainer = _trainer(session, journal, progress, Repeats(past.steps), stop_asked)
    try:
        outcome = trainer.run()
        finish(session, journal, outcome, past)
    except BaseException as error:
        if isinstance(error, Violation):
            record_violation(session, journal, error, trainer, past)
        with suppress(InputError):  # the error that is being raised comes first
            journal.close()
        raise
    journal.close()
    return outcome


def _trainer(
    session: Session, journal: Journal, progress: Progress, repeats: Repeats, stop_asked: Callable[[], bool]
) -> Trainer:
    config, material = session.config, session.material

    def validate() -> Scores:
        return evaluate(session.backend, session.models, material.task, material.rows.validation_ids)

    return Trainer(
        backend=session.backend,
        step=session.step,
        plan=material.plan,
        schedule=schedule_of(config, material.plan),
        journal=journal,
        evaluate=validate if material.rows.validation_ids else None,
        stop_asked=stop_asked,
        base_digest=session.base,
        repeats=repeats,
        progress=progress,
        weights=session.primary.weights_digest(),
        patience=config.training.early_stopping_patience,
        checkpoint_every=config.training.checkpoint_every,
        evaluate_every=config.training.evaluate_every,
        base_every=config.contracts.base_every,
        clock=session.clock,
    )
