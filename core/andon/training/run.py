"""One run in one process: from a checked configuration to a finished run folder, from top to bottom.

A session is put together (`session`), restored to where the run stands (`resume`), agreed on and opened, trained
(`trainer`), and closed: the best weights, the last scores, the adapter, the ledger's account, and the summary.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from andon.backend.base import Backend
from andon.config.identity import config_digest
from andon.config.schema import Config
from andon.console.exits import Exit
from andon.console.messages import say
from andon.console.problems import InputError, Problem
from andon.integrations.tensorboard import EventFile
from andon.integrations.trackers import TENSORBOARD, WANDB, Tracker
from andon.integrations.wandb import WandbRun
from andon.launch.rank import dropped_values
from andon.metrics.confusion import digest_of
from andon.metrics.scores import Scores
from andon.model.build import backbone_of
from andon.model.compiled import CompiledPasses
from andon.model.masks import Masking, masking_of
from andon.run.columns import discard
from andon.run.folder import RunFolder
from andon.run.ledger import LedgerError, LedgerWriter
from andon.run.provenance import fingerprint
from andon.run.repeats import Repeats, apart, require_repeated
from andon.run.summary import Head, Summary, write_summary
from andon.step.replica import state_tensors
from andon.training.card import Result
from andon.training.forecast import hold_to_budget
from andon.training.history import History, violation_records
from andon.training.journal import (
    FolderJournal,
    MetricsWriter,
    SilentJournal,
    evaluation_of,
    progress_from,
)
from andon.training.material import cut_note, eval_rows_note
from andon.training.notices import few_updates, idleness, learns_nothing
from andon.training.outputs import write_adapter, write_start
from andon.training.progress import ProgressView
from andon.training.resume import AlreadyFinished, Standpoint, load_best, restore, run_identity
from andon.training.rows import changed_since, unfit_model
from andon.training.session import Session, assembled
from andon.training.trainer import Journal, Outcome, Progress, Trainer
from andon_contracts.digest import hex64
from andon_contracts.fields import Real
from andon_contracts.policy import evaluations, reset_evaluations
from andon_contracts.record import End, Plan, Record, Resume, Start
from andon_contracts.violation import Violation

CLOCKS_S = 2.0
"""How far apart, in seconds, clocks of ranks may be before that is said."""
_ALGORITHMS = dict.fromkeys(("weights", "gradient", "optimizer", "base"), "tensor-digest")
_ALGORITHMS |= {"content": "content-sums", "data": "sha256"}


def train(config: Config, folder: RunFolder, stop_asked: Callable[[], bool], started: float | None = None) -> Exit:
    """Run, or resume, the training that `config` describes in `folder`; returns `Exit.OK` or `Exit.PREEMPTED`.

    stop_asked: whether this process was asked to end at the next step boundary. started: when the command began, by
    `time.monotonic` (None: now). Raises `InputError` for what the user got wrong, `Violation` on every rank
    alike for what the system did.
    """
    reset_evaluations()
    with assembled(config, folder, started) as session:
        try:
            standpoint = restore(session)
        except AlreadyFinished:
            if session.run.writes:
                say(f"resume: the run in {folder.path} is finished, nothing to do")
            return Exit.OK
        outcome = _train(session, standpoint, stop_asked)
        if session.run.writes and outcome.reason != "preempted":
            discard(folder.tokens)
    return Exit.PREEMPTED if outcome.reason == "preempted" else Exit.OK


def _train(session: Session, standpoint: Standpoint, stop_asked: Callable[[], bool]) -> Outcome:
    checkpoint, history = standpoint.checkpoint, standpoint.history
    if session.run.writes and unfit_model(session.config):
        say(unfit_model(session.config))
    progress = progress_from(checkpoint) if checkpoint is not None else Progress()
    agree_on_start(session, progress)  # from here on rank 0 may write to what all have read
    journal = open_journal(session, standpoint, progress)
    run, material = session.run, session.material

    def validate() -> Scores:
        return session.evaluator(material.validation_task, material.validation_ids)

    trainer = run.trainer(
        journal,
        progress,
        Repeats(history.steps),
        evaluate=validate if material.validation_ids else None,
        stop_asked=stop_asked,
        clock=session.clock,
    )
    try:
        outcome = trainer.run()
        finish(session, journal, outcome, history)
    except BaseException as error:
        if isinstance(error, Violation):
            record_violation(session, journal, error, trainer, history)
        with suppress(InputError):  # the error that is being raised comes first
            journal.close()
        raise
    journal.close()
    return outcome


# What all ranks begin from


def agree_on_start(session: Session, progress: Progress) -> None:
    """Every rank starts from the same state, data, versions and place in the plan. Raises `Violation` on all ranks.

    That clocks of ranks are apart is said: reports and rendezvous go by them, and no bit does.
    """
    apart = clocks_apart(session.run.backend)
    if apart and session.run.writes:
        say(f"warning: {apart}")
    session.run.step.attest_start(
        {
            "configuration": _number(config_digest(session.config)),
            "data": _number(session.material.rows.digest),
            "tokenizer": _number(session.material.tokenizer.digest),
            "versions": _number(repr(sorted(_versions(session).items()))),
            "attention": _number(_masking(session)),
            "optimizer": session.run.primary.optimizer_digest(),
            "progress": _number(repr(progress)),
        }
    )


def clocks_apart(backend: Backend) -> str:
    """Whose clocks are further apart than `CLOCKS_S`, in words; empty where none are. Collective."""
    if len(backend.ranks) == backend.world_size:
        return ""

    def gathered(number: int) -> list[int]:
        return [int(each) for each in backend.gather([torch.tensor([number], device=backend.devices[0])])]

    gathered(0)  # from here on all ranks are at one place
    seen = gathered(time.time_ns() // 1000)
    off = {rank: (each - seen[0]) / 1e6 for rank, each in enumerate(seen) if abs(each - seen[0]) > CLOCKS_S * 1e6}
    told = ", ".join(f"rank {rank}'s is {abs(by):.1f} s {'ahead' if by > 0 else 'behind'}" for rank, by in off.items())
    return f"the clocks of the ranks are apart: {told}, by rank 0's" if off else ""


def _versions(session: Session) -> dict[str, str]:
    common: dict[str, object] = (
        {"devices": [], "driver": None, "sources": {}} if session.run.backend.name == "mixed" else {}
    )
    return fingerprint({**session.environment, **common})


def _masking(session: Session) -> str:
    """How the model is told who sees whom, which each rank finds out by itself; in `mixed` ranks on CPUs are told
    otherwise than those on GPUs. Where the host will have to wait for a GPU it is said."""
    run = session.run
    if run.backend.name == "mixed":
        return ""
    found = masking_of(run.primary.model, run.primary.device)
    if run.writes and run.primary.device.type == "cuda" and found is Masking.TOKENS:
        say("this model takes the mask of tokens, at which the host waits for the GPU once a pass")
    return found.name


def _number(text: str) -> int:
    """64 bits of SHA-256 of a text, to compare texts of ranks as integers."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


# What rank 0 writes before the first step


def open_journal(session: Session, standpoint: Standpoint, progress: Progress) -> Journal:
    """Where this rank writes what happens. On rank 0 what the run starts from is on disk before the ledger's line.

    A ledger that has the run's end already gets no line: only what is written after it may lack. Raises `InputError`
    for a disk that refuses and for a ledger that is damaged.
    """
    run, folder, config = session.run, session.folder, session.config
    if not run.writes:
        return SilentJournal()
    digests = {"initial_weights": hex64(run.initial_weights), "base": hex64(run.base)}
    write_start(folder, config, session.environment, session.material, digests)
    try:
        ledger = LedgerWriter(folder.ledger)
    except LedgerError as error:
        raise InputError([Problem("", str(error))]) from error
    if ledger.head[0] == 0:
        ledger.append(_start(session))
    elif standpoint.history.ended is None:
        if standpoint.history.retraction is not None:
            ledger.append(standpoint.history.retraction)
        ledger.append(_resume(session, standpoint, progress, ledger.torn))
    else:
        say("resume: the ledger has the end of this run; what is written after it is written again")
    _announce(session, progress.step)
    return FolderJournal(
        folder=folder,
        ledger=ledger,
        metrics=MetricsWriter(folder.metrics, progress.step, _trackers(session, progress.step)),
        view=ProgressView(
            run.plan.total_steps,
            config.run.log_every,
            config.run.progress,
            progress.step,
            counts_right=session.material.task.counts_right,
        ),
        tensors=lambda: state_tensors(run.primary),
        fixed_state={"identity": run_identity(session), "fingerprint": fingerprint(session.environment)},
        keep=config.training.keep_checkpoints,
        saved_at=progress.step,
        counts_right=session.material.task.counts_right,
    )


def _trackers(session: Session, done: int) -> Iterator[Tracker]:
    asked, folder = session.config.run.report_to, session.folder
    if TENSORBOARD in asked:
        yield EventFile(folder.events, done)
    if WANDB in asked:
        yield WandbRun(folder.path, folder.metrics, session.config.model_dump(mode="json"))


def _state_digests(session: Session) -> dict[str, str]:
    return {
        "weights": hex64(session.run.primary.weights_digest()),
        "base": hex64(session.run.base),
        "data": hex64(_number(session.material.rows.digest)),
    }


def _start(session: Session) -> Record:
    plan = session.run.plan
    return Start(
        run=session.folder.path.name,
        fingerprint=fingerprint(session.environment),
        identity=config_digest(session.config),
        plan=Plan(
            rows=len(plan.ids),
            batch_size=plan.batch_size,
            micro_batches=plan.micro_batches,
            seed=plan.seed,
            epochs=plan.epochs,
            steps=plan.total_steps,
            task=session.material.rows.task if session.config.task is not None else None,
        ),
        digests=_state_digests(session),
        world=session.run.backend.world_size,
        backend=session.run.backend.name,
        algorithms=_ALGORITHMS,
    )


def _resume(session: Session, standpoint: Standpoint, progress: Progress, torn: int) -> Record:
    return Resume(
        step=progress.step,
        identity=config_digest(session.config),
        fingerprint=fingerprint(session.environment),
        digests=_state_digests(session),
        world=session.run.backend.world_size,
        backend=session.run.backend.name,
        name=standpoint.checkpoint.path.name if standpoint.checkpoint is not None else None,
        torn=torn,
    )


def _announce(session: Session, done: int) -> None:
    config, material, backend, plan = session.config, session.material, session.run.backend, session.run.plan
    units = "packs" if config.training.packing else "rows"
    say(
        f"training on {len(plan.ids)} {units}, {plan.total_steps} steps of {plan.batch_size} {units} in "
        f"{plan.micro_batches} micro-batches, {backend.world_size} {backend.name} workers"
    )
    idle = idleness(plan, backend.world_size)
    if idle:
        say(f"warning: {idle}")
    if (config.training.max_steps or 0) > plan.total_steps:
        say(f"note: training.epochs ends the run at step {plan.total_steps}, before training.max_steps")
    for note in filter(None, (learns_nothing(plan, config), few_updates(plan, config))):
        say(note)
    if config.contracts.enabled:
        say(_audit(session, done))
    seen = material.rows.seen_in_training()
    if seen:
        total = len(material.rows.evaluated_on)
        say(f"warning: {seen} of {total} evaluation rows have a text that is also trained on; their scores flatter")
    if material.tokenizer.truncated:
        limit = config.model.max_length
        say(f"note: {material.tokenizer.truncated} texts were cut to {limit} tokens (model.max_length)")
    for note in (cut_note(material.evaluation_task, material.evaluation_ids, config), eval_rows_note(material)):
        if note:
            say(note)


def _audit(session: Session, done: int) -> str:
    """What is audited; where none of the steps after the first `done` is due, that too."""
    audit, last = session.run.step.audit, session.run.plan.total_steps
    shown = audit.describe()
    if not audit.every or done == last or any(map(audit.due, range(done + 1, last + 1))):
        return shown
    return f"{shown}; none falls into steps {done + 1} to {last}"


# What is left at the end


def finish(session: Session, journal: Journal, outcome: Outcome, history: History) -> None:
    """Load the best weights if they are kept, score the rows never trained on (every rank takes part), then write what
    the run came to (rank 0).

    A run that was preempted gets neither scores nor an adapter: it goes on later. What the ledger has already, from a
    process that ended before its summary was there, must come out again, and is not written twice.
    """
    run, material, progress = session.run, session.material, outcome.progress
    scores: Scores | None = None
    kept, digests = 0, {"weights": hex64(run.primary.weights_digest())}
    if outcome.reason != "preempted":
        if session.config.training.keep == "best":
            kept = progress.best_step
        if kept not in (0, progress.step):
            session.clock.at(progress.step, "best checkpoint")
            load_best(session, progress)
        scores = session.evaluator(material.evaluation_task, material.evaluation_ids, after=kept or progress.step)
    memory = hold_to_budget(run.backend, progress.step, session.planned_bytes)
    step, weights = kept or progress.step, run.primary.weights_digest()
    epoch, digests = run.plan.epoch_of(step), digests | ({"kept": hex64(weights)} if kept else {})
    scored = evaluation_of(step, epoch, scores) if scores is not None else None
    end = End(progress.step, outcome.reason, digests, final_loss=Real.of(progress.last_loss))
    require_repeated(progress.step, (*apart("scores", history.evaluated, scored), *apart("end", history.ended, end)))
    if not isinstance(journal, FolderJournal):
        return
    passes = backbone_of(run.primary.model).forward
    if isinstance(passes, CompiledPasses) and passes.eager:
        say(f"compile: {passes.eager} training passes of rank 0 ran eagerly, since their micro-batches were not full")
    if run.primary.captured is not None and run.primary.captured.eager:
        say(f"note: passes ran eagerly and not as CUDA graphs (run.cuda_graphs): {run.primary.captured.eager}")
    if journal.all_zero:
        why = "no row changed a trained weight; look for weights of the base model that are all zero"
        say(f"warning: the gradient of all {journal.all_zero} updates was exactly zero: {why}")
    if scores is not None:
        journal.evaluated(step, epoch, scores, material.rows.last_scores, recorded=history.evaluated == scored)
        result = _result(session, outcome, weights, scores, history, kept)
        write_adapter(session.folder, run.primary.model, material, result)
    if history.ended != end:
        journal.append(end)
    _summarise(session, journal, outcome, weights, scores, history, memory, kept)


def _result(session: Session, outcome: Outcome, weights: int, scores: Scores, history: History, kept: int) -> Result:
    world, backend = _ranks(session, history)
    return Result(
        labels=tuple(session.material.labels),
        rows=len(session.run.plan.ids),
        steps=outcome.progress.step,
        kept_step=kept or None,
        scores=scores.as_dict(),
        evaluated_on=session.material.rows.last_scores,
        weights=hex64(weights),
        world_size=world,
        backend=backend,
        confusion=scores.confusion,
    )


def _ranks(session: Session, history: History) -> tuple[int, str]:
    """How many ranks of which backend ended the run: an earlier process's, where the ledger has the end already."""
    backend = session.run.backend
    return (backend.world_size, backend.name) if history.ended is None else (history.world, history.backend)


def record_violation(
    session: Session, journal: Journal, violation: Violation, trainer: Trainer, history: History
) -> None:
    """The last lines of the ledger, and a summary of the last step that held. Checkpoints stay what they were.

    history: before this part of the run. A disk that refuses must not hide the violation.
    """
    if not isinstance(journal, FolderJournal):
        return
    step = trainer.progress.step
    try:
        for record in violation_records(violation, step, trainer.weights, journal.saved_at, history.last):
            journal.append(record)
        last = Outcome(trainer.progress, "violation")
        again = replace(history, violations=history.violations + 1, ended=None)
        _summarise(session, journal, last, trainer.weights, None, again, {})
    except InputError as refused:
        say(f"the violation could not be recorded: {refused}")


def _summarised(scores: Scores) -> dict[str, Any]:
    """The scores as the summary has them: the confusion matrix is in a file of its own."""
    quoted = {"confusion": digest_of(scores.confusion)} if scores.confusion is not None else {}
    return scores.as_dict() | quoted


def _summarise(
    session: Session,
    journal: FolderJournal,
    outcome: Outcome,
    weights: int,
    scores: Scores | None,
    history: History,
    memory: Mapping[str, int],
    kept: int = 0,
) -> None:
    """The summary, last of all: a folder that holds a finished one is a finished run."""
    progress = outcome.progress
    world, backend = _ranks(session, history)
    changed = changed_since(session.config, session.material.rows, session.began)
    for key, how in changed.items():
        say(f"warning: {key} is not what this run was trained on any more: it {how}")
    count, digest = journal.head
    write_summary(
        session.folder.summary,
        Summary(
            run=session.folder.path.name,
            finished=outcome.reason in ("finished", "early-stopping"),
            reason=outcome.reason,
            steps=progress.step,
            world_size=world,
            backend=backend,
            weights_digest=hex64(weights),
            initial_weights_digest=hex64(session.run.initial_weights),
            contracts=evaluations(),
            violations=history.violations,
            wall_s=round(time.monotonic() - session.started, 3),
            ledger=Head(count=count, digest=digest),
            fingerprint=fingerprint(session.environment),
            final_loss=Real.of(progress.last_loss),
            eval=_summarised(scores) if scores is not None else {},
            best_step=progress.best_step or None,
            kept_step=kept or None,
            evaluated_on=session.material.rows.last_scores,
            labels=tuple(session.material.labels),
            memory=memory,
            dropped_values=dropped_values() or None,
            data_changed=changed,
        ),
    )
