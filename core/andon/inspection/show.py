"""Shows a ledger: the run from start to end, or one step with its rows, losses and digests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from andon.console.messages import InputError
from andon.inspection.recorded import Recorded, Stretch
from andon.run.folder import RunFolder
from andon.run.summary import EVALUATION, read_provenance, read_summary
from andon.training.existing import config_of
from andon.training.rows import Rows, read_rows
from andon_contracts.fields import Real
from andon_contracts.legible import counted
from andon_contracts.record import Broken, End, Evaluation, Record, Resume, Retraction, Saved, Start

_WIDTH = 100
_UNKNOWN = "unknown"
_ROW_IDS = re.compile(r"its row ids are \[([\d, ]+)\]")
_VERSIONS = ("torch", "transformers", "peft", "cpu", "devices")


@dataclass(frozen=True)
class Texts:
    """Training rows by id, or why they are not shown (`missing`)."""

    rows: Rows | None = None
    missing: str = ""


def texts_of(folder: RunFolder | None) -> Texts:
    if folder is None or not folder.config.exists():
        return Texts(missing="texts are not shown: a ledger has only the ids of rows")
    try:
        config = config_of(folder)
        rows = read_rows(config)
        recorded = read_provenance(folder.provenance).digest("data")
    except InputError as error:
        return Texts(missing=f"texts are not shown: {error.line}")
    if recorded != rows.digest:
        return Texts(missing="texts are not shown: the data has changed since the run")
    if config.training.packing:
        return Texts(missing="texts are not shown: with packing, an id is a pack of several rows")
    return Texts(rows)


def overview(run: Recorded) -> Iterator[str]:
    """Lines on all records in order; consecutive steps share one line."""
    yield f"ledger {run.ledger}"
    for record, after in zip(run.records, (*run.records[1:], None), strict=True):
        if not isinstance(record, Stretch):
            yield from event(record, run, result=isinstance(after, End))
            continue
        first, last = record.first, record.last
        if first is last:
            yield f"step        {first.step}: loss {_real(first.loss)}, weights {first.digests.weights}"
        else:
            losses = f"loss {_real(first.loss)} to {_real(last.loss)}"
            yield f"steps       {first.step} to {last.step}: {losses}, weights {last.digests.weights}"
    if not any(isinstance(record, End) for record in run.records[-1:]):
        yield "unfinished  the ledger has no end record: the run continues, or was killed"
    count, digest = run.head
    yield f"head        {count} lines, digest of the last {digest}"
    if run.torn:
        yield f"torn        {run.torn} bytes of an incomplete last line; a resume removes them"


def event(record: Record, run: Recorded, *, result: bool = False) -> Iterator[str]:
    """Lines on a record that is not a step, each after its kind and a space. result: the scores are the run's."""
    match record:
        case Start(plan=plan):
            by = f", written by a {record.writer}" if record.writer is not None else ""
            digests = _named(record.digests, ", ")
            yield f"start       {record.run} on {counted(record.world, f'{record.backend} worker')}{by}{digests}"
            if plan.steps is not None:
                yield (
                    f"plan        {plan.rows} rows, {plan.steps} steps of {plan.batch_size} rows in "
                    f"{plan.micro_batches} micro-batches, epochs {plan.epochs}, seed {plan.seed}"
                )
            else:
                yield f"plan        {_UNKNOWN if plan.rows is None else f'{plan.rows} rows an epoch'}"
            known = [f"{name} {record.fingerprint[name]}" for name in _VERSIONS if record.fingerprint.get(name)]
            yield f"machine     {', '.join(known)}"
        case Resume():
            source = f"from {record.name}" if record.name is not None else "(the run begins anew)"
            workers = counted(record.world, f"{record.backend} worker")
            torn = f"; {record.torn} bytes of a torn line were cut off" if record.torn else ""
            yield f"resume      after step {record.step} {source} on {workers}{torn}"
        case Evaluation():
            scores = ", ".join(f"{name} {_real(value)}" for name, value in sorted(record.scores.items()))
            rows = f"{record.rows} {_result_rows(run)} rows, the result" if result else f"{record.rows} validation rows"
            yield f"evaluation  after step {record.step}, {rows}: {scores}"
        case Saved():
            gone = run.folder is not None and not (run.folder.checkpoints / record.name).is_dir()
            marks = f"{', the best so far' if record.best else ''}{', removed since' if gone else ''}"
            yield f"checkpoint  {record.name}, tensors {record.digest}{marks}"
        case Broken():
            ranks = f" on ranks {' '.join(map(str, record.ranks))}" if record.ranks else ""
            tensor = f" in {record.tensor}" if record.tensor else ""
            kind = "suspicion" if record.action == "suspected" else "violation"
            action = f" ({record.action})" if record.action not in (None, "suspected") else ""
            yield f"{kind}   {record.clause} at step {record.step}{ranks}{tensor}: {record.seen}{action}"
        case Retraction():
            what, them = f"steps {record.step + 1} to {record.last} no longer count", "them"
            if record.last == record.step + 1:
                what, them = f"step {record.last} no longer counts", "it"
            yield f"retraction  {what}, since {record.clause} was broken after {them}: {record.seen}"
        case End():
            yield f"end         {record.reason} after step {record.step}{_named(record.digests, ', ')}"


def _result_rows(run: Recorded) -> str:
    with suppress(InputError):
        if run.folder is not None:
            return "evaluation" if read_summary(run.folder.summary).evaluated_on == EVALUATION else "validation"
    return "scored"


def one_step(run: Recorded, step: int, texts: Texts) -> Iterator[str]:
    """Lines on `step`: its violations, and rows, losses, digests and ranks of its last record or its retraction.

    Raises `InputError` for a step that the ledger does not have.
    """
    broken = [record for record in run.records if isinstance(record, Broken) and record.step == step]
    times = run.trajectory.numbers.count(step)
    if not times and not broken:
        steps = list(run.trajectory)
        known = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has no steps"
        raise InputError.at("--step", f"{step} is not in {run.ledger}; {known}")
    for violation in broken:
        yield from event(violation, run)
        if ids := _ROW_IDS.search(violation.seen):
            yield from filter(None, [texts.missing and f"  note        {texts.missing}"])
            yield from (f"    {row}{_text(int(row), texts.rows)}" for row in ids[1].split(", "))
    record = run.trajectory.get(step)
    if record is None:
        retracted = [each for each in run.records if isinstance(each, Retraction) and each.step < step <= each.last]
        if retracted:
            yield from event(retracted[-1], run)
        else:
            yield f"step {step} was not applied, so it has no record"
        return
    which = "" if record.optimizer_index is None else f" of optimizer {record.optimizer_index}"
    done = ", skipped by the loss scaler" if record.skipped else ""
    rows = ""
    if record.epoch is not None and record.position is not None:
        last = record.position + len(record.ids)
        rows = f": epoch {record.epoch + 1}, rows {record.position + 1} to {last} of it"
    yield f"step {step}{which}{done}{rows}"
    if times > 1:
        yield f"  computed {times} times, because of resumes; the last one is shown"
    mean = ""
    if record.loss is not None and record.count is not None:
        terms = "" if record.terms is None else f"{record.terms} terms of "
        mean = f", mean over {terms}{record.count} rows"
    right = "" if record.correct is None else f", {record.correct} right"
    yield f"  loss        {_exact(record.loss)}{mean}{right}"
    point = "as the optimizer got it" if record.gradient_at == "optimizer" else "before clipping"
    yield f"  grad_norm   {_exact(record.grad_norm)} {point}"
    yield f"  lr          {_exact(record.lr)}"
    if record.weights_norm is not None:
        yield f"  norm        {_exact(record.weights_norm)} of the trained weights, after the update"
    for name in ("content", "gradient", "weights", "optimizer"):
        yield f"  {name:<11} {getattr(record.digests, name) or _UNKNOWN}"
    yield f"  world       {counted(record.world, f'{record.backend} worker')}"
    if not record.ids:
        yield "  note        the ledger has no row numbers: only w.batch(ids) writes them"
    elif texts.missing:
        yield f"  note        {texts.missing}"
    planned = run.start is None or run.start.plan.micro_batches is not None  # a watch records no micro-batches
    for part in record.ranks:
        held = {name: getattr(part, name) for name in ("weights", "gradient", "optimizer")}
        own = {name: value for name, value in held.items() if value is not None}
        changed = {name: value for name, value in own.items() if value != getattr(record.digests, name)}
        equal = f"the digests above ({', '.join(own)})" if own else "no digests: no other rank has the same shard"
        differs = _named(changed, " ")
        leaves = f"micro-batches {' '.join(map(str, part.leaves)) or 'none'}, " if planned else ""
        yield f"  rank {part.rank}: {leaves}{f'differs:{differs}' if changed else equal}"
        for row in part.ids:
            yield f"    {row}{_text(row, texts.rows)}"


def _text(row: int, rows: Rows | None) -> str:
    content = None if rows is None else rows.train.told(rows.row_of(row))
    if rows is None or content is None:
        return ""
    learned, text = content
    shown = text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."
    where = rows.where(row)
    return f"{where and f'  {where}'}  {learned}  {shown!r}"


def _named(values: Mapping[str, str], before: str) -> str:
    return "".join(f"{before}{name} {value}" for name, value in sorted(values.items()))


def _real(value: Real | None) -> str:
    return _UNKNOWN if value is None else f"{value.value:.6g}"


def _exact(value: Real | None) -> str:
    return _UNKNOWN if value is None else f"{value.value:.9g} ({value.hex})"
