"""A finished run's model as a folder for others: merged into its base, or the adapter by itself.

A merged model is loaded again by transformers alone, as whoever gets it does, and its probabilities are held against
the run's own: a merge that is wrong, or that loses what was learned to rounding, does not go out without a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from andon.config.schema import Config
from andon.config.source import is_there, loading
from andon.console.problems import InputError, Problem
from andon.model.adapter import merged, save_base
from andon.run.atomic import whole_folder
from andon.run.folder import RunFolder
from andon.run.ledger import LedgerError, read_ledger
from andon.run.provenance import read_provenance
from andon.run.summary import read_summary
from andon.training.card import Form, Result, card
from andon.training.existing import config_of, go_on_with
from andon.training.inference import Prediction, TrainedRun, predict, rows_of
from andon.training.outputs import CARD, form_of, save_tokenizer, write_model_files
from andon_contracts.record import Start

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What a model may be written in."""
_MOST_ROWS = 256
"""Rows that a drift is measured on; of more of them this many, evenly spaced."""
_MOST_DRIFT = 1e-3
"""Of a probability, of a model that computes in fp32 and is written in it: sums in another order are far below."""
_BATCH = 16
NOT_MEASURED = "its drift was not measured: the run's rows are gone or have changed"


@dataclass(frozen=True)
class Drift:
    """How far the probabilities of a written model are from the run's own.

    rows: how many of the `total` rows of the last scores were compared. largest: difference of one probability.
    changed: rows that get another label.
    """

    rows: int
    total: int
    largest: float
    changed: int

    def __str__(self) -> str:
        of = f"{self.total}" if self.rows == self.total else f"{self.rows} of {self.total}"
        return (
            f"on {of} evaluation rows no probability differs from the run's own by more than {self.largest:.1e}, "
            f"and {self.changed} rows get another label"
        )


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
    return Result(
        labels=tuple(labels),
        rows=first.plan.rows,
        steps=summary.steps,
        scores=summary.eval,
        evaluated_on=summary.evaluated_on,
        weights=summary.weights_digest,
        world_size=summary.world_size,
        backend=summary.backend,
    )


def export_adapter_of(run: TrainedRun, target: Path) -> None:
    """Write what the run trained as a new folder, whole or not at all; the embedded base goes along in it.

    For a run of every weight that is the whole model. Raises `InputError` as `require_place` and `result_of` do.
    """
    result, config = result_of(run.folder, run.labels), config_of(run.folder)
    reference = _reference(run, config)
    with whole_folder(target) as path:
        write_model_files(path, run.model, config, run.tokenizer, run.labels, reference)
        if form_of(config) is Form.COMPLETE:
            save_base(run.model, path / reference, run.labels)
        _write_card(path, run.folder, config, result, form_of(config), target.name)


def _reference(run: TrainedRun, config: Config) -> str:
    """Where stock peft finds the base: a hub id, the whole path of a folder, or the name of the one that goes along."""
    if config.model.base is None:
        return "base"
    on_hub = not Path(config.model.base).expanduser().is_absolute()
    return config.model.base if on_hub else str(Path(str(run.config.model.base)).expanduser().resolve())


def export_merged(run: TrainedRun, target: Path, dtype: str = "float32") -> str:
    """Write the run's model as transformers reads it, without peft, as a new folder: whole or not at all.

    The adapter is added to the base in fp32, and the sum written in `dtype` (a key of `DTYPES`). Returns what is to be
    said of the drift. The model of `run` is of no use afterwards. Raises `InputError` as `export_adapter_of` does, and
    `RuntimeError` for a model that was written and gives other probabilities than the run's.
    """
    result, config = result_of(run.folder, run.labels), config_of(run.folder)
    found = rows_of(run)
    texts = [] if found is None else list(found.evaluated_on.texts())
    shown = (
        [texts[place * len(texts) // _MOST_ROWS] for place in range(_MOST_ROWS)] if len(texts) > _MOST_ROWS else texts
    )
    before = [each for each in predict(run, shown, _BATCH) if isinstance(each, Prediction)]
    plain = merged(run.model).to(DTYPES[dtype])
    whole = form_of(config) is Form.WHOLE
    with whole_folder(target) as path:
        save_base(plain, path, run.labels)
        save_tokenizer(run.tokenizer, path, config.model.max_length)
        del plain
        said = NOT_MEASURED
        if shown:
            drift = _drift(before, _probabilities(path, shown), len(texts))
            exact = dtype == "float32" and (whole or config.model.dtype == "float32")
            if not math.isfinite(drift.largest) or (exact and drift.largest > _MOST_DRIFT):
                msg = f"the written model is not the run's: {drift}"
                raise RuntimeError(msg)
            said = str(drift)
        note = f"Its weights are in {dtype}{'' if whole else ', merged in float32'}; {said}."
        _write_card(path, run.folder, config, result, Form.WHOLE if whole else Form.MERGED, target.name, note)
    return said


def _drift(before: Sequence[Prediction], after: Sequence[Sequence[float]], total: int) -> Drift:
    ours = torch.tensor([one.probabilities for one in before], dtype=torch.float64)
    theirs = torch.tensor(after, dtype=torch.float64)
    changed = int((ours.argmax(dim=1) != theirs.argmax(dim=1)).sum())
    return Drift(len(before), total, float((ours - theirs).abs().max()), changed)


def _probabilities(folder: Path, texts: Sequence[str]) -> list[list[float]]:
    """Of each class for each text, by transformers alone from the files in `folder`."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    place = str(folder)
    with loading(place, place):
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
        model = AutoModelForSequenceClassification.from_pretrained(
            place, dtype="auto", local_files_only=True, trust_remote_code=False
        ).eval()

    def batches() -> Iterator[list[list[float]]]:
        for first in range(0, len(texts), _BATCH):
            chosen = list(texts[first : first + _BATCH])
            batch = tokenizer(chosen, padding=True, truncation=True, return_tensors="pt")
            yield model(**batch).logits.float().softmax(dim=1).tolist()

    with torch.no_grad():
        return [row for batch in batches() for row in batch]


def _write_card(
    path: Path, folder: RunFolder, config: Config, result: Result, form: Form, name: str, note: str = ""
) -> None:
    text = card(config, read_provenance(folder.provenance), result, form, name, note)
    (path / CARD).write_text(text, encoding="utf-8")
