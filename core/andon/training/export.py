"""A finished run's model as a folder for others: merged into its base, or the adapter by itself.

A merged model is loaded again by transformers alone, as whoever gets it does, and what it says is held against the
run's own: a merge that is wrong, or that loses what was learned to rounding, does not go out without a word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from andon.config.schema import SFT, Config
from andon.config.source import is_there
from andon.console.problems import InputError, Problem
from andon.metrics.confusion import read_confusion
from andon.model.adapter import save_base, save_merged
from andon.model.build import facts_of
from andon.model.masks import padding_of
from andon.run.atomic import whole_folder
from andon.run.folder import RunFolder
from andon.run.ledger import LedgerError, read_ledger
from andon.run.summary import read_summary
from andon.tasks.sft import Asked
from andon.training.drift import EXTENTS, Questions, Said, drift, questions_of, said_by_run, said_by_written
from andon.training.existing import config_of, go_on_with
from andon.training.inference import TrainedRun, rows_of
from andon.training.outputs import Form, Result, form_of, write_card, write_model_files, write_tokenizer
from andon_contracts.record import Start

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What a model may be written in."""
CHECKS = (*EXTENTS, "none")
"""How a written model is compared with the run: on a few rows, on many (`drift.EXTENTS`), or not at all."""
NOT_MEASURED = "its drift was not measured: the run's rows are gone or have changed"
NOT_COMPARED = "it was not compared with the run (--check none)"
NOT_ASKED = "its drift was not measured: no evaluation prompt leaves the model room to answer"


def require_place(target: Path) -> None:
    """Raise `InputError` unless a new folder can be made at `target`."""
    if is_there(target) or target.is_symlink():
        raise InputError([Problem(str(target), "is there already; name a new folder")])
    if not target.absolute().parent.is_dir():
        raise InputError([Problem(str(target), f"there is no folder {target.parent}")])


def result_of(folder: RunFolder, labels: Sequence[str]) -> Result:
    """What the finished run in `folder` came to. Raises `InputError` for one that is not finished or not readable."""
    summary = read_summary(folder.summary)
    if not summary.finished:
        raise InputError([Problem(str(folder.path), f"is not finished; go on with it: {go_on_with(folder)}")])
    try:
        first = next(iter(read_ledger(folder.ledger)), None)
    except (OSError, LedgerError) as error:
        raise InputError([Problem(str(folder.ledger), f"cannot be read: {error}")]) from error
    if not isinstance(first, Start) or first.plan.rows is None:
        raise InputError([Problem(str(folder.ledger), "does not begin with the start of a run")])
    quoted = summary.eval.get("confusion")
    return Result(
        labels=tuple(labels),
        rows=first.plan.rows,
        steps=summary.steps,
        kept_step=summary.kept_step,
        scores=summary.eval,
        evaluated_on=summary.evaluated_on,
        weights=summary.weights_digest,
        world_size=summary.world_size,
        backend=summary.backend,
        confusion=read_confusion(folder.confusion, quoted) if quoted is not None else None,
    )


def export_adapter_of(run: TrainedRun, target: Path, check: str = "rows") -> tuple[str, ...]:
    """Write what the run trained as a new folder, whole or not at all; the embedded base goes along in it.

    For a run of every weight that is the whole model. The folder is loaded with stock transformers and peft and asked
    evaluation rows, as `check` says (one of `CHECKS`). Returns what is to be said of it, a line each, of which the
    first tells the drift. The model of `run` is of no use afterwards. Raises `InputError` as `require_place` and
    `result_of` do, and `RuntimeError` if the folder gives other answers than the run.
    """
    require_place(target)
    result, config = result_of(run.folder, run.labels), config_of(run.folder)
    reference, asked, form = _reference(run, config), _asked(run), form_of(config)
    compared = _answers(run, check)
    own_code = facts_of(run.model).own_code
    with whole_folder(target) as path:
        write_model_files(path, run.model, config, run.tokenizer, run.labels, reference, asked)
        if form is Form.COMPLETE:
            save_base(run.model, path / reference, run.labels)
        base = path / reference if form is Form.COMPLETE else None if form is Form.WHOLE else run.config.model.base
        drift_line = _compared(run, path, compared, base, exact=config.model.dtype == "float32")
        notes = (_of_checkpoint(run), own_code)
        said = write_card(path, run.folder, config, result, form, target.name, run.tokenizer, asked, notes)
        require_place(target)
        return drift_line, *said


def _answers(run: TrainedRun, check: str) -> tuple[Questions, Said] | str:
    if check == "none":
        return NOT_COMPARED
    found = rows_of(run)
    if found is None:
        return NOT_MEASURED
    questions = questions_of(run, found.evaluated_on, check)
    return (questions, said_by_run(run, questions)) if questions else NOT_ASKED


def _compared(
    run: TrainedRun, path: Path, compared: tuple[Questions, Said] | str, base: Path | str | None, *, exact: bool
) -> str:
    """What is said of the difference between the run and the folder at `path`, loaded by stock libraries.

    base: of an adapter, where its base is. exact: whether both compute the same products, in fp32. Frees the weights
    of the run's model, to make room for the other. Raises `RuntimeError` if they then differ by more than rounding, or
    the folder gives no finite number.
    """
    if isinstance(compared, str):
        return compared
    run.model.to("meta")
    questions, before = compared
    apart = drift(run, questions, before, said_by_written(run, path, questions, before, base))
    if not math.isfinite(apart.largest) or (exact and not apart.within_rounding):
        msg = f"the written model is not the run's: {apart}"
        raise RuntimeError(msg)
    return str(apart)


def _of_checkpoint(run: TrainedRun) -> str:
    if run.step is None:
        return ""
    return (
        f"these are the weights of the run's checkpoint of step {run.step}; the scores, the digest of the trained "
        "weights and the command in this card are those of the run's result"
    )


def _asked(run: TrainedRun) -> Asked | None:
    return Asked.read(run.folder.adapter) if run.config.task == SFT else None


def _reference(run: TrainedRun, config: Config) -> str:
    """Where stock peft finds the base: a hub id, the whole path of a folder, or the name of the one that goes along."""
    if config.model.base is None:
        return "base"
    on_hub = not Path(config.model.base).expanduser().is_absolute()
    return config.model.base if on_hub else str(Path(str(run.config.model.base)).expanduser().resolve())


def export_merged(run: TrainedRun, target: Path, dtype: str, check: str = "rows") -> tuple[str, ...]:
    """Write the run's model as transformers reads it, without peft, as a new folder: whole or not at all.

    The adapter is added to the base in fp32, weight by weight, and each sum written in `dtype` (a key of `DTYPES`).
    check, and what is returned: as for `export_adapter_of`. The model of `run` is of no use afterwards. Raises
    `InputError` as `export_adapter_of` does, and `RuntimeError` for a model that was written and does not say what the
    run's does.
    """
    require_place(target)
    result, config = result_of(run.folder, run.labels), config_of(run.folder)
    asked = _asked(run)
    compared = _answers(run, check)
    own_code = facts_of(run.model).own_code
    side = padding_of(run.model, run.device).side
    form = Form.WHOLE if form_of(config) is Form.WHOLE else Form.MERGED
    with whole_folder(target) as path:
        save_merged(run.model, path, run.labels, DTYPES[dtype])
        write_tokenizer(path, run.tokenizer, config, run.labels, asked, side)
        exact = dtype == "float32" and (form is Form.WHOLE or config.model.dtype == "float32")
        said = _compared(run, path, compared, None, exact=exact)
        how = f"its weights are in {dtype}{'' if form is Form.WHOLE else ', merged in float32'}; {said}"
        notes = (_of_checkpoint(run), how, own_code)
        written = write_card(path, run.folder, config, result, form, target.name, run.tokenizer, asked, notes)
        require_place(target)  # measuring the drift takes minutes
        return said, *written
