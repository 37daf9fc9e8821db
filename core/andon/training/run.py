"""A training run in one process: assemble it, restore its state, check that all ranks agree on it, train, and finish.

Rank 0 alone decides what to resume from and writes the folder; all ranks take part in everything else.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from andon.backend.base import Backend, GroupBackend, InlineBackend, groups_of
from andon.backend.devices import (
    NO_GPU,
    Placement,
    demand_determinism,
    look_at,
    none_works,
    of_all_ranks,
    placement,
    refuse_unfit,
    refuse_without_nccl,
)
from andon.config.load import config_digest, differences, identity, to_yaml
from andon.config.schema import Config
from andon.console.messages import Exit, InputError, Problem, say
from andon.integrations.tensorboard import EventFile
from andon.integrations.trackers import TENSORBOARD, WANDB, Tracker
from andon.integrations.wandb import WandbRun
from andon.launch.context import RankContext, is_rank
from andon.launch.heartbeat import Heartbeat, Timeouts
from andon.launch.joining import join
from andon.launch.portable import FORM, portable_kernels, require_in_effect
from andon.launch.rank import dropped_values, end_now, watched_by
from andon.metrics.scores import Scores, digest_of
from andon.model.adapter import save_base
from andon.model.build import backbone_of, facts_of
from andon.model.compiled import CompiledPasses
from andon.model.masks import Masking, masking_of, padded_lengths, shapes_of
from andon.model.quantize import NONE
from andon.run.atomic import whole_folder, write_json, write_whole
from andon.run.checkpoint import Checkpoint, CheckpointError, load_checkpoint, newest_valid
from andon.run.columns import discard
from andon.run.folder import RunFolder, State
from andon.run.ledger import LedgerError, LedgerWriter, Repeats, apart, require_repeated
from andon.run.summary import Head, Summary, environment, fingerprint, read_provenance, write_provenance, write_summary
from andon.run.summary import differences as other_machine
from andon.step.replica import state_tensors
from andon.step.step import UNSIGNED, RankFailed
from andon.tasks.sft import SftTask
from andon.training.build import Run, build_run
from andon.training.choices import placed, settings_line, with_values
from andon.training.existing import LENGTH, config_of, holds_a_run, how_to_train_on, require_same_as_finished
from andon.training.forecast import agree_on_devices, evaluation_batching, hold_to_budget, uses_cuda_graphs
from andon.training.material import (
    Material,
    cut_note,
    cut_texts_note,
    eval_rows_note,
    few_updates,
    idleness,
    item_length,
    learns_nothing,
    padding_multiple,
    prepare,
    skipped_of,
    warnings_of,
)
from andon.training.outputs import form_of, packing_note, write_card, write_model_files
from andon.training.reference import REFERENCE, add_references, references_digest
from andon.training.rows import class_counts, is_tokenised_as_read, notes, skip_notes, unfit_model, with_task
from andon.training.trainer import (
    Evaluator,
    FolderJournal,
    History,
    Journal,
    MetricsWriter,
    Progress,
    ProgressView,
    Trainer,
    begin_anew,
    evaluation_of,
    progress_from,
    read_history,
    violation_records,
)
from andon_contracts.digest import hex64, signed
from andon_contracts.fields import Real
from andon_contracts.laws.law import Judgement, enforce
from andon_contracts.laws.update import RESTORED, not_restored
from andon_contracts.legible import counted
from andon_contracts.liveness.diagnosis import StepClock
from andon_contracts.policy import evaluations, reset_evaluations, suspended
from andon_contracts.record import End, Plan, Resume, Start
from andon_contracts.violation import Violation


@dataclass
class Session:
    """A run with its folder, its data and its clock.

    started: start of its command, by `time.monotonic`. planned_bytes: planned memory of each GPU replica; 0 on CPUs.
    """

    config: Config
    folder: RunFolder
    material: Material
    run: Run
    environment: Mapping[str, Any]
    started: float
    clock: StepClock
    evaluator: Evaluator
    planned_bytes: int = 0


@contextmanager
def assembled(
    config: Config, folder: RunFolder, started: float | None = None, *, writing: bool = True
) -> Iterator[Session]:
    """Context manager: a run assembled on this process's backend, not yet trained. Inside, rank 0 owns the run folder.

    writing: False leaves the folder unchanged and unowned. Raises `InputError` for a mistake of the user, and for a
    folder that another process owns.
    """
    config = with_task(placed(config)[0])
    torch.set_num_threads(1)
    with ExitStack() as stack:
        if config.run.portable:
            require_in_effect()
            stack.enter_context(portable_kernels())
        if not config.contracts.enabled:
            stack.enter_context(suspended())
        if writing and (not is_rank() or RankContext.from_environment().rank == 0):
            stack.enter_context(folder.open_for_writing())
        # Before the rendezvous, as tokenizing many rows takes long.
        material = prepare(config, folder.tokens if writing else None)
        config, plan, task = material.config, material.plan, material.task
        own, compiling = config.run, config.training.compile
        clock = StepClock(compiles=compiling != "off")

        # The backend
        launched = RankContext.from_environment() if own.backend != "inline" else None
        chosen: Placement = (own.backend, (torch.device("cpu"),), "")
        problem = ""
        try:
            chosen = placement(own, on_host=None if launched is None else launched.local_world_size)
            refuse_without_nccl(chosen[0])
        except InputError as error:
            if launched is None:
                raise
            problem = str(error)  # the ranks of other hosts learn it when they meet
        name, devices, note = chosen
        if launched is not None:
            devices = (devices[launched.local_rank % len(devices)],)
        demand_determinism(devices)
        backend: Backend = InlineBackend(devices)
        if launched is not None:
            store, rank, world = join(groups_of(name), own.timeout_s, problem)
            watched_by(Heartbeat(store, rank, world, clock, Timeouts(own.timeout_s, own.step_deadline_s), end_now))
            if note and rank == 0:
                say(note)
            if world != own.workers:
                raise InputError(f"run.workers: {own.workers} were requested, {world} ranks were started")
            name, device = _usable(config, name, devices[0], rank)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            backend = joined = GroupBackend(name, device, clock=clock)
            stack.callback(joined.close)
        logs = backend.ranks[0] == 0

        # The model and its replicas
        started = time.monotonic() if started is None else started
        memory = agree_on_devices(material, backend)
        if logs and compiling != "off" and any(device.type != "cuda" for device in backend.devices):
            say(f"training.compile={compiling} is for GPUs: on the CPU the model runs eagerly")
        if logs and backend.name == "mixed":
            say("mixed: dropout differs between GPUs and CPUs, so the result depends on which rank computes which rows")
        captured = uses_cuda_graphs(config, backend.devices[0].type, memory.activations if memory else None)
        captured = captured and (memory is None or memory.graphs > 0)  # a GPU may have no room for them
        lengths = padded_lengths(item_length(config), padding_multiple(config))
        shapes = shapes_of(plan.batch_size, plan.micro_batches, lengths)
        run = build_run(config, material.interface, backend, task, plan, shapes=shapes, capture=captured)
        model = run.primary.model
        task.require_fit(model, run.primary.device)
        batching = evaluation_batching(material, config)
        clock.at(0, "reference")
        add_references(material, run, batching, folder.tokens if writing else None)
        if logs:
            settings = [settings_line(config)] if config.model.base is not None else []
            of_rows = notes(material.rows) if is_tokenised_as_read(config) else ()
            of_model = (*facts_of(model).notes, *warnings_of(model, material.tokenizer))
            for line in (*settings, *of_model, *task.notes, *of_rows, *skip_notes(material.unusable)):
                say(line)
            skipped = (*material.rows.skipped, *material.unusable)
            if skipped and writing:
                write_whole(folder.skipped, "".join(f"{problem}\n" for problem in skipped).encode())
        accelerators = [torch.cuda.get_device_name(device) for device in backend.devices if device.type == "cuda"]
        portable = FORM if own.portable else None
        libraries = () if config.model.quantize == NONE else ("bitsandbytes",)
        yield Session(
            config=config,
            folder=folder,
            material=material,
            run=run,
            environment=environment(torch.get_num_threads(), accelerators, portable=portable, libraries=libraries),
            started=started,
            clock=clock,
            evaluator=Evaluator(backend, run.replicas, batching),
            planned_bytes=memory.total if memory else 0,
        )


def _usable(config: Config, name: str, device: torch.device, rank: int) -> tuple[str, torch.device]:
    """Run a first kernel on this rank's device. Returns backend and device; the CPU if no GPU works and `cpu_fallback`.

    Collective under `nccl` and `mixed`. Raises `InputError` on every rank if only some GPUs work, if those named in
    `run.devices` do not, if two ranks use one GPU, and for GPUs of different models under `nccl`.
    """
    if name not in ("nccl", "mixed") and not config.run.devices:
        return name, device
    looks = of_all_ranks(look_at(device.index or 0) if device.type == "cuda" else None)
    fault = "" if config.run.devices else none_works(looks)
    if not fault:
        refuse_unfit(name, looks, None)
        return name, device
    if not config.run.cpu_fallback:
        raise InputError.at("run.backend", f"{name} needs a GPU that works, and none does ({fault}); {NO_GPU}")
    if rank == 0:
        say(f"no GPU works here ({fault}): training on the CPU instead of {name} (clause cpu-fallback)")
    return "gloo" if name == "nccl" else name, torch.device("cpu")


ResumePoint = tuple[Checkpoint | None, History]
"""The checkpoint to resume from (None: start from step 0), and the history in the ledger."""
_FROM_START, _DONE, _REFUSED = -1, -2, -3
"""Answers of rank 0 other than the step of a checkpoint."""
_PACKED = "quantized base"
_CLOCKS_S, _MOST_REJECTED, _HOST_BYTES = 2.0, 5, 96
"""The largest difference of clocks without a warning; the number of rejected checkpoints to list; bytes for a digest
and the name of a host."""


def train(config: Config, folder: RunFolder, stop_asked: Callable[[], bool], started: float | None = None) -> Exit:
    """Start or resume the training of `config` in `folder`; returns `Exit.OK` or `Exit.PREEMPTED`.

    stop_asked: returns whether to stop at the next step boundary. started: the command's start by `time.monotonic`
    (None: now). Raises `InputError`, and `Violation` on all ranks.
    """
    reset_evaluations()
    with assembled(config, folder, started) as session:
        run, material = session.run, session.material
        point = restore(session)
        if point is None:
            if run.writes:
                say(f"resume: the run in {folder.path} is finished, nothing to do")
            return Exit.OK
        checkpoint, history = point
        progress = progress_from(checkpoint) if checkpoint is not None else Progress()
        agree_on_start(session, progress)  # all ranks have read the folder, so rank 0 may write to it
        refuse_other_tokens(run.backend, material.tokenizer.read)
        writer = open_journal(session, checkpoint, history, progress) if run.writes else None
        journal, repeats = writer or Journal(), Repeats(history.steps)
        score = partial(session.evaluator, material.validation_task, material.validation_ids)
        evaluate = score if material.validation_ids else None
        trainer = Trainer(run, journal, progress, repeats, evaluate, stop_asked, session.clock)
        try:
            reason = trainer.run()
            finish(session, writer, reason, trainer.progress, history)
            journal.close()
        except BaseException as error:
            if writer is not None and isinstance(error, Violation):
                # Write the ledger's last lines and a summary of the last valid step; checkpoints stay.
                valid, weights, before = trainer.progress, trainer.weights, history.last
                try:
                    for record in violation_records(error, valid.step, weights, writer.saved_at, before):
                        writer.ledger.append(record)
                    again = replace(history, violations=history.violations + 1, ended=None)
                    _write_summary(session, writer, _summary(session, "violation", valid, weights, again))
                except InputError as refused:  # a failing disk must not hide the violation
                    say(f"the violation could not be recorded: {refused}")
            with suppress(InputError):  # the error that is being raised matters more
                journal.close()
            raise
        if run.writes and reason != "preempted":
            discard(folder.tokens)
    return Exit.PREEMPTED if reason == "preempted" else Exit.OK


# The state to start or resume from


def restore(session: Session) -> ResumePoint | None:
    """Load the checkpoint that rank 0 chose into every replica, and read the ledger once per rank. Collective.

    Returns None if the run is finished. Raises `InputError` on rank 0 (`RankFailed` on the others) if the folder
    holds a run and `run.resume` is not set, if the run's identity differs, or if its ledger is damaged.
    """
    run = session.run
    point: ResumePoint | None = None
    answer, refused = _FROM_START, None
    if run.writes:
        try:
            point, answer = _choose_resume_point(session)
        except InputError as error:
            answer, refused = _REFUSED, error
    # Gather even if rank 0 fails, since the other ranks wait here.
    answer = int(run.backend.gather([torch.tensor([answer], device=device) for device in run.backend.devices])[0])
    if refused is not None:
        raise refused
    if answer == _REFUSED:
        raise RankFailed("rank 0 refused to start, and says why")
    if answer == _DONE:
        return None
    if point is None:
        checkpoint = None if answer == _FROM_START else _load(session, answer)
        point = checkpoint, _history(session, checkpoint)
    if point[0] is not None:
        run.restore(point[0])
        point = replace(point[0], tensors={}), point[1]  # the file may be pruned, and its memory is not needed
    return point


def _choose_resume_point(session: Session) -> tuple[ResumePoint | None, int]:
    folder, machine = session.folder, fingerprint(session.environment)
    if session.config.run.resume != "auto":
        if folder.begun():
            raise holds_a_run(folder)
        return None, _FROM_START
    if folder.state() is State.FINISHED:
        require_same_as_finished(session.config, folder)
        return None, _DONE
    checkpoint, rejected = newest_valid(folder.checkpoints)
    history = _history(session, checkpoint)
    if folder.provenance.exists():
        try:
            was = read_provenance(folder.provenance)
        except InputError as error:
            again = "put it back as it was, or remove it: it is then written again"
            raise InputError([replace(each, what=f"{each.what}; {again}") for each in error.problems]) from error
        other = "; ".join(other_machine(was.fingerprint, machine))
        if other:
            say(f"resume: other machine or versions ({other}): the bits may differ from an uninterrupted run")
    for reason in rejected[:_MOST_REJECTED]:
        say(f"resume: rejected {reason}")
    if len(rejected) > _MOST_REJECTED:
        say(f"resume: rejected {len(rejected) - _MOST_REJECTED} more of {folder.checkpoints}")
    # Checked before the settings: the checkpoint of another run has other settings, which would hide the cause.
    if checkpoint is not None and history.head != checkpoint.head[1]:
        ledger = folder.ledger
        what = (
            f"line {checkpoint.head[0]} of {ledger.name} differs from the line that it quotes: the checkpoint is of "
            f"another run, or lines of {ledger} were lost. Put the ledger back as it was; or move this checkpoint "
            f"away, to resume from the one before it; or begin anew: {begin_anew(folder.config)}"
        )
        raise InputError.at(checkpoint.path, what)
    changed = identity_changes(session, checkpoint)
    if changed:
        rule, more = "a resumed run must keep this setting", how_to_train_on(session.config, folder, finished=False)
        others = [each for each in changed if each[0] != REFERENCE]
        if not others:
            rule = (
                f"{folder.tokens} had the values and is lost or damaged, and computed here they differ: put it back, "
            )
            rule += f"resume on a machine and with versions as at the start, or begin anew: {begin_anew(folder.config)}"
        raise InputError(
            Problem(key, f"was {before!r} when the run began, is {now!r}; {rule}{more if key in LENGTH else ''}")
            for key, before, now in others or changed
        )
    if checkpoint is None:
        say("resume: no checkpoint, starting anew")
        return (None, history), _FROM_START
    done, now = f"{checkpoint.step} of {session.material.plan.total_steps} steps done", session.run.backend.world_size
    resized = f", on {counted(history.world, 'worker')}; now on {now}" if history.world not in (0, now) else ""
    say(f"resume: from {checkpoint.path.name}, {done}{resized}")
    return (checkpoint, history), checkpoint.step


def _digests(session: Session) -> dict[str, str]:
    weights = {"base": session.run.base, "initial_weights": session.run.initial_weights}
    if session.config.model.quantize != NONE:
        weights[_PACKED] = session.run.frozen
    digests = {"data": session.material.rows.digest, "tokenizer": session.material.tokenizer.digest}
    digests |= references_digest(session.material)
    return {name: hex64(digest) for name, digest in weights.items()} | digests


def _identity(session: Session, config: Config, digests: dict[str, Any]) -> dict[str, Any]:
    return identity(config) | digests | {"labels": list(session.material.labels)}


def identity_changes(session: Session, checkpoint: Checkpoint | None) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) of identity keys that differ from `checkpoint`'s (None: from the run's start)."""
    folder = session.folder
    if checkpoint is not None:
        old = checkpoint.state.get("identity")
        if not isinstance(old, dict):
            what = "its state does not name its run; move it away, to resume from the checkpoint before it"
            raise InputError.at(checkpoint.path, what)
    elif folder.ledger.exists() and folder.provenance.exists() and folder.config.exists():
        recorded = read_provenance(folder.provenance)
        named = _digests(session).keys() - ({_PACKED} - recorded.digests.keys())
        old = _identity(session, config_of(folder), {name: recorded.digest(name) for name in named})
    else:
        return []
    return differences(old, _identity(session, session.config, _digests(session)))


def _history(session: Session, checkpoint: Checkpoint | None) -> History:
    return read_history(session.folder.ledger, fingerprint(session.environment), checkpoint)


def _load(session: Session, step: int) -> Checkpoint:
    path = session.folder.checkpoints / f"step-{step:08d}"
    try:
        return load_checkpoint(path)
    except CheckpointError as error:
        raise InputError.at(path, f"this rank cannot read it: {error}") from error


# Agreement of all ranks on the state to start from


def agree_on_start(session: Session, progress: Progress) -> None:
    """Raise `Violation` on all ranks unless state, data, versions and progress are equal on all of them. Collective."""
    run, material = session.run, session.material
    warning = clocks_apart(run.backend)
    if warning and run.writes:  # only a warning: no result depends on clocks
        say(f"warning: {warning}")
    mixed, masking = run.backend.name == "mixed", ""
    shared: dict[str, object] = {"devices": [], "driver": None, "sources": {}} if mixed else {}
    if not mixed:  # in `mixed`, ranks on CPUs and GPUs use different masks
        chosen = masking_of(run.primary.model, run.primary.device)
        masking = chosen.name
        if run.writes and run.primary.device.type == "cuda" and chosen is Masking.TOKENS:
            say("note: this model needs a mask of each row's tokens, which makes the CPU wait for the GPU at each pass")
    run.step.attest_start(
        {
            "configuration": _text_digest(config_digest(session.config)),
            "data": _text_digest(material.rows.digest),
            "tokenizer": _text_digest(material.tokenizer.digest),
            "versions": _text_digest(repr(sorted(fingerprint({**session.environment, **shared}).items()))),
            "attention": _text_digest(masking),
            "optimizer": run.primary.optimizer_digest(),
            "progress": _text_digest(repr(progress)),
        }
    )


def refuse_other_tokens(backend: Backend, files: Sequence[str]) -> None:
    """Raise `InputError` on every rank, naming the host, if its token files are not those of rank 0's host. Collective.

    files: their digests. The rows, the tokenizer and the versions are known to be equal.
    """
    own = f"{_text_digest(repr(files)):x} {socket.gethostname()}".encode()[:_HOST_BYTES].ljust(_HOST_BYTES)
    rows = backend.gather([torch.tensor(list(own), dtype=torch.uint8, device=each) for each in backend.devices])
    (first, host), *others = (bytes(row.tolist()).decode(errors="replace").split() for row in rows)
    wrong = {other: rank for rank, (digest, other) in reversed([*enumerate(others, 1)]) if digest != first}
    hosts = ", ".join(f"{other} (rank {rank})" for other, rank in sorted(wrong.items(), key=itemgetter(1)))
    what = f"the same rows have different token ids on {hosts} than on {host} (rank 0); remove the token cache"
    if wrong:
        raise InputError.at("data.cache", f"{what} there (data.cache, or tokens in the run folder), and resume the run")


def clocks_apart(backend: Backend) -> str:
    """A warning with the ranks whose clock differs from rank 0's by more than `_CLOCKS_S`; else empty. Collective."""
    if len(backend.ranks) == backend.world_size:
        return ""

    def gathered(number: int) -> list[int]:
        return [int(each) for each in backend.gather([torch.tensor([number], device=backend.devices[0])])]

    gathered(0)  # a barrier, so that all ranks read their clocks at about the same time
    seen = gathered(time.time_ns() // 1000)
    off = {rank: (each - seen[0]) / 1e6 for rank, each in enumerate(seen) if abs(each - seen[0]) > _CLOCKS_S * 1e6}
    text = ", ".join(f"rank {rank}'s is {abs(by):.1f} s {'ahead' if by > 0 else 'behind'}" for rank, by in off.items())
    return f"the clocks of the ranks differ from rank 0's: {text}" if off else ""


def _text_digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


# Files that rank 0 writes before the first step


def open_journal(
    session: Session, checkpoint: Checkpoint | None, history: History, progress: Progress
) -> FolderJournal:
    """Write the configuration, the environment and the provenance, then the ledger's line of the start or the resume.
    Raises `InputError` if a file cannot be written, and for a damaged ledger."""
    run, folder, config, material = session.run, session.folder, session.config, session.material
    machine, digest, digests = fingerprint(session.environment), config_digest(config), _digests(session)
    write_whole(folder.config, to_yaml(resolved(config, folder)).encode())
    write_json(folder.environment, session.environment)
    new = config.model.new_tokens
    write_provenance(
        folder.provenance,
        identity=digest,
        new_tokens=dict(zip(new, material.tokenizer.ids_of(new), strict=True)),
        digests=digests,
        environment=session.environment,
    )
    try:
        ledger = LedgerWriter(folder.ledger)
    except LedgerError as error:
        raise InputError.at("", str(error)) from error
    data = hex64(_text_digest(digests["data"]))
    common: dict[str, Any] = {
        "identity": digest,
        "fingerprint": machine,
        "digests": {"weights": hex64(run.primary.weights_digest()), "base": digests["base"], "data": data},
        "world": run.backend.world_size,
        "backend": run.backend.name,
    }
    if ledger.head[0] == 0:
        plan = Plan(
            rows=len(run.plan.ids),
            batch_size=run.plan.batch_size,
            micro_batches=run.plan.micro_batches,
            seed=run.plan.seed,
            epochs=run.plan.epochs,
            steps=run.plan.total_steps,
            task=material.rows.task if config.task is not None else None,
        )
        algorithms = dict.fromkeys(("weights", "gradient", "optimizer", "base"), "tensor-digest")
        algorithms |= {"content": "content-sums", "data": "sha256"}
        ledger.append(Start(run=folder.path.name, plan=plan, algorithms=algorithms, **common))
    elif history.ended is None:
        if history.retraction is not None:
            ledger.append(history.retraction)
        name = checkpoint.path.name if checkpoint is not None else None
        ledger.append(Resume(step=progress.step, name=name, torn=ledger.torn, **common))
    else:  # the ledger is complete; files written after it may be missing
        say("resume: training had ended; writing the files that are still missing")
    say(*filter(None, _announcements(session, progress.step)))
    trackers: list[Tracker] = []
    steps, own = run.plan.total_steps, config.run
    if TENSORBOARD in config.run.report_to:
        trackers.append(EventFile(folder.events, progress.step))
    if WANDB in config.run.report_to:
        trackers.append(WandbRun(folder.path, folder.metrics, config.model_dump(mode="json")))
    return FolderJournal(
        folder=folder,
        ledger=ledger,
        metrics=MetricsWriter(folder.metrics, progress.step, trackers),
        view=ProgressView(steps, own.log_every, own.progress, progress.step, run.plan.epoch_of(steps) + 1),
        tensors=lambda: state_tensors(run.primary),
        fixed_state={"identity": _identity(session, config, digests), "fingerprint": machine},
        keep=config.training.keep_checkpoints,
        saved_at=progress.step,
        counts_right=material.task.counts_right,
    )


def _announcements(session: Session, done: int) -> list[str]:
    config, material, backend, plan = session.config, session.material, session.run.backend, session.run.plan
    units, last, audit = "pack" if config.training.packing else "row", plan.total_steps, session.run.step.audit
    idle, late = idleness(plan, backend.world_size), (config.training.max_steps or 0) > last
    unaudited = audit.every and done != last and not any(map(audit.due, range(done + 1, last + 1)))
    none = f"; this run audits no step, since it has only steps {done + 1} to {last}" if unaudited else ""
    seen, total, cut = material.rows.seen_in_training(), len(material.rows.evaluated_on), material.tokenizer.truncated
    verbose, workers = config.run.progress == "verbose", counted(backend.world_size, "worker")
    batches = f"{counted(last, 'step')} of {plan.batch_size} {units}s"
    batches += f" in {plan.micro_batches} micro-batches" if verbose else ""
    seen_rows = f"the texts of {seen} of {counted(total, 'scored row')} are also trained on"
    return [
        unfit_model(config) if done == 0 else "",
        f"training on {counted(len(plan.ids), units)}: {batches}, {workers} ({backend.name})",
        class_counts(material.rows, most=5) if done == 0 else "",
        f"warning: {idle}" if idle else "",
        f"note: training.epochs ends the run at step {last}, before training.max_steps" if late else "",
        learns_nothing(plan, config),
        few_updates(plan, config),
        f"{audit.describe()}{none}" if config.contracts.enabled and verbose else "",
        f"warning: {seen_rows}, so the scores may be too high" if seen else "",
        cut_texts_note(cut, config),
        cut_note(material.evaluation_task, material.evaluation_ids, config),
        eval_rows_note(material),
    ]


# The end of the run


def finish(session: Session, journal: FolderJournal | None, reason: str, progress: Progress, history: History) -> None:
    """Load the best weights if `training.keep` is 'best', score the evaluation rows, and on rank 0 write the adapter,
    the ledger's end and the summary. Collective. A preempted run gets neither scores nor an adapter.

    Scores and end that an interrupted process has already written to the ledger must repeat, and are not written again.
    """
    scores: Scores | None = None
    run, material, kept = session.run, session.material, 0
    digests = {"weights": hex64(run.primary.weights_digest())}
    if reason != "preempted":
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
    end = End(progress.step, reason, digests, final_loss=Real.of(progress.last_loss))
    require_repeated(progress.step, (*apart("scores", history.evaluated, scored), *apart("end", history.ended, end)))
    if journal is None:
        return
    passes = backbone_of(run.primary.model).forward
    if isinstance(passes, CompiledPasses) and passes.eager:
        say(f"note: rank 0 ran {passes.eager} training passes uncompiled, since their micro-batches were not full")
    if run.primary.captured is not None and run.primary.captured.eager:
        say(f"note: passes ran eagerly and not as CUDA graphs (run.cuda_graphs): {run.primary.captured.eager}")
    if 0 < journal.updates == journal.zero_updates:
        why = "no row changed a trained weight; look for weights of the base model that are all zero"
        say(f"warning: the gradient of all {journal.updates} updates was exactly zero: {why}")
    summary = _summary(session, reason, progress, weights, history, scores, memory, kept)
    if scores is not None:
        journal.evaluated(step, epoch, scores, material.rows.last_scores, recorded=history.evaluated == scored)
        write_adapter(session, summary, scores)
    if history.ended != end:
        journal.ledger.append(end)
    _write_summary(session, journal, summary)


def load_best(session: Session, progress: Progress) -> None:
    """Load the weights of the best step into every replica. Collective.

    Raises `InputError` on a rank that cannot read the checkpoint (`RankFailed` on the others), and `Violation` on all
    ranks if a rank has other weights than the run recorded for that step (`checkpoint-whole`).
    """
    run, step, error = session.run, progress.best_step, None
    try:
        run.load_weights(_load(session, step))
    except InputError as refused:
        again = f"put it back; or move away all checkpoints from step {step} on and resume: their steps are done again"
        error = InputError([replace(each, what=f"{each.what}; {again}") for each in refused.problems])
    sent = [torch.tensor([error is None, signed(each.weights_digest())], device=each.device) for each in run.replicas]
    readable, digests = zip(*(each.tolist() for each in run.backend.gather(sent)), strict=True)
    if error is not None:
        raise error
    if not all(readable):
        raise RankFailed(f"rank {readable.index(0)} could not read the best checkpoint, of step {step}")
    loaded = tuple(digest % UNSIGNED for digest in digests)
    recorded = progress.best_weights or loaded[0]  # 0: contracts were off at that step
    enforce(Judgement(RESTORED, not_restored({"weights": recorded}, {"weights": loaded}, step, {})))


def _summary(
    session: Session,
    reason: str,
    progress: Progress,
    weights: int,
    history: History,
    scores: Scores | None = None,
    memory: Mapping[str, int] | None = None,
    kept: int = 0,
) -> Summary:
    confusion = scores.confusion if scores is not None else None
    quoted = {"confusion": digest_of(confusion)} if confusion is not None else {}  # the matrix is in its own file
    backend, ended = session.run.backend, history.ended is not None  # an earlier process ended the run
    held = session.material.rows.evaluation or session.material.rows.validation
    read = () if held is None or held.origins is None else held.origins.skipped
    left_out = 0 if held is None else len(read) + len(skipped_of(session.material.evaluation_task))
    return Summary(
        run=session.folder.path.name,
        finished=reason in ("finished", "early-stopping"),
        reason=reason,
        steps=progress.step,
        world_size=history.world if ended else backend.world_size,
        backend=history.backend if ended else backend.name,
        weights_digest=hex64(weights),
        initial_weights_digest=hex64(session.run.initial_weights),
        contracts={},
        violations=history.violations,
        wall_s=0.0,
        ledger=Head(0, ""),
        fingerprint=fingerprint(session.environment),
        final_loss=Real.of(progress.last_loss),
        eval=scores.as_dict() | quoted if scores is not None else {},
        best_step=progress.best_step or None,
        kept_step=kept or None,
        evaluated_on=session.material.rows.last_scores,
        labels=tuple(session.material.labels),
        skipped=left_out or None,
        memory=memory or {},
    )


def _write_summary(session: Session, journal: FolderJournal, summary: Summary) -> None:
    """Write the summary, which must be the last file: with it, the folder counts as finished."""
    journal.ledger.sync()
    last = replace(
        summary,
        contracts=evaluations(),
        wall_s=round(time.monotonic() - session.started, 3),
        ledger=Head(*journal.ledger.head),
        updates=journal.updates,
        dropped_values=dropped_values() or None,
    )
    write_summary(session.folder.summary, last)


def write_adapter(session: Session, result: Summary, scores: Scores) -> None:
    """Write the trained adapter atomically as a PEFT folder with tokenizer and card.

    The embedded base is written twice: into the adapter's folder for transformers, and next to it for peft, which finds
    it by a relative path, so that the run folder can be moved. Other bases are named by absolute path or hub id.
    """
    material, folder, model = session.material, session.folder, session.run.primary.model
    config = resolved(session.config, folder)
    if config.model.base is None and config.adapter.kind != "none":
        with whole_folder(folder.path / "base") as path:
            save_base(model, path, material.labels)
    task = material.unpacked
    settings = task.asked if isinstance(task, SftTask) else None
    with whole_folder(folder.adapter) as path:
        reference = config.model.base or "../base"
        write_model_files(path, model, config, material.tokenizer, material.labels, reference, settings)
        facts, form = (result, len(session.run.plan.ids), scores.confusion), form_of(config)
        notes = (packing_note(config, form), facts_of(model).own_code)
        write_card(path, folder, config, *facts, form, folder.path.name, material.tokenizer, settings, notes)


def resolved(config: Config, folder: RunFolder) -> Config:
    """`config` with its run folder and absolute paths, so that it can be used from any working directory."""

    def absolute(path: str) -> str:
        return str(Path(path).resolve())

    data, base = config.data, config.model.base
    values: dict[str, object] = {"run.dir": absolute(str(folder.path))}
    named = {"data.validation": data.validation, "data.eval": data.eval, "adapter.init": config.adapter.init}
    values |= {key: absolute(path) for key, path in named.items() if path is not None}
    if isinstance(data.train, str):
        values["data.train"] = absolute(data.train)
    elif data.train is not None:
        values["data.train"] = tuple(each.model_copy(update={"path": absolute(each.path)}) for each in data.train)
    if base is not None and Path(base).is_dir():
        values["model.base"] = absolute(base)
    return with_values(config, values)
