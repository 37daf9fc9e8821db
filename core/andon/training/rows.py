"""The rows of a run, read and split; without torch, so that the command line can refuse bad data at once.

What of rows depends on the task stands in `READERS` here, and what of tensors in `ENCODERS` of `training.material`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from andon.config.schema import Config, Data
from andon.console.problems import InputError, Problem
from andon.data import rewriting
from andon.data.conversations import ConversationSet, is_of_conversations, read_conversations
from andon.data.readers import read
from andon.data.rows import DataSet, Examples, frozen_split, shared_texts
from andon.data.shell import embedded
from andon.run.summary import HELD_OUT, LAST_VALIDATION


@dataclass(frozen=True)
class Rows:
    """The data sets of a run. Row ids of `train` cover training and validation; `evaluation` has its own.

    task: what is learned of a row, by its name in the configuration.
    """

    task: str
    train: Examples
    evaluation: Examples | None
    train_ids: tuple[int, ...]
    validation_ids: tuple[int, ...]

    @property
    def digest(self) -> str:
        """SHA-256 over both data sets."""
        return self.train.digest + (self.evaluation.digest if self.evaluation is not None else "")

    @property
    def trained_on(self) -> Examples:
        """The rows that are trained on."""
        return self.train.subset(self.train_ids)

    @property
    def evaluated_on(self) -> Examples:
        """The rows of the last scores: those of their own, else the validation rows."""
        return self.evaluation if self.evaluation is not None else self.train.subset(self.validation_ids)

    @property
    def last_scores(self) -> str:
        """What the last scores of a run are of: `HELD_OUT` rows, or `LAST_VALIDATION`."""
        return HELD_OUT if self.evaluation is not None else LAST_VALIDATION

    def seen_in_training(self) -> int:
        """How many rows that are evaluated on have a text that is also trained on: their scores flatter."""
        return shared_texts(self.trained_on, self.evaluated_on)


@dataclass(frozen=True)
class Reader:
    """Where the rows of a task come from.

    read: of a file; the second data set is the one that is trained on, for a file that is only evaluated on. embedded:
    of a run that names none, by its seed: to train on, and never trained on.
    """

    read: Callable[[Data, Path, Examples | None], Examples]
    embedded: Callable[[int], tuple[Examples, Examples]]


def _classes(data: Data, path: Path, like: Examples | None) -> DataSet:
    labels = None if like is None else like.labels
    return read(path, text_column=data.text_column, label_column=data.label_column, labels=labels)


def _conversations(data: Data, path: Path, like: Examples | None) -> ConversationSet:
    return read_conversations(path)


CLASSIFICATION, SFT = "classification", "sft"
READERS: Mapping[str, Reader] = {
    CLASSIFICATION: Reader(_classes, embedded),
    SFT: Reader(_conversations, rewriting.embedded),
}
"""By the task's name in the configuration."""


def task_of_run(config: Config) -> str:
    """What is learned: as configured, else what the first row of the data has columns of; a class where it is unclear.

    Raises `InputError` for a file that cannot be opened.
    """
    if config.task is not None or config.data.train is None:
        return config.task or CLASSIFICATION
    named = config.data.text_column is not None or config.data.label_column is not None
    return SFT if not named and is_of_conversations(Path(config.data.train)) else CLASSIFICATION


def with_task(config: Config) -> Config:
    """`config` with its task named where that is not a class for each row, so that the run can be read without data."""
    found = task_of_run(config)
    return config if found == CLASSIFICATION else config.model_copy(update={"task": found})


def read_rows(config: Config) -> Rows:
    """The rows that `config` names, split once and for all. Raises `InputError` with all that is wrong with them."""
    train: Examples
    evaluation: Examples | None
    task = task_of_run(config)
    reader = READERS[task]
    if config.data.train is None:
        train, evaluation = reader.embedded(config.seed)
    else:
        train = reader.read(config.data, Path(config.data.train), None)
        evaluation = reader.read(config.data, Path(config.data.eval), train) if config.data.eval is not None else None
    train_places, validation_places = frozen_split(len(train), config.data.validation_fraction, config.seed)
    ids = train.ids
    if evaluation is None and not validation_places:
        raise InputError([Problem("data", "no rows to evaluate on: name data.eval, or a data.validation_fraction > 0")])
    return Rows(task, train, evaluation, _picked(ids, train_places), _picked(ids, validation_places))


def unfit_model(config: Config) -> str:
    """A warning where rows of the user's own train the embedded model, which is made for the embedded rows; else empty.

    It is drawn at random and has seen no language: on questions to a bank it came to an accuracy of 0.56, where a
    small pretrained encoder comes to 0.80.
    """
    if config.data.train is None or config.model.base is not None:
        return ""
    return (
        "warning: no --model is given: the embedded model, small and drawn at random, trains on your rows; it has seen "
        "no language. Name a pretrained one, a folder or a hub id, as in --model sentence-transformers/all-MiniLM-L6-v2"
    )


def changed_since(config: Config, rows: Rows, started: float) -> dict[str, str]:
    """What of the data is no longer what `rows` were read from: the key of the configuration, and what is there now.

    Only files that were touched after `started` (seconds since the epoch, before they were read) are read again.
    """
    named = {"data.train": config.data.train, "data.eval": config.data.eval}
    if not any(path is not None and _touched(Path(path), started) for path in named.values()):
        return {}
    try:
        now = read_rows(config)
    except InputError as error:
        return {key: f"can no longer be read ({error})" for key, path in named.items() if path is not None}
    pairs = {"data.train": (rows.train, now.train), "data.eval": (rows.evaluation, now.evaluation)}
    return {
        key: f"has {len(after)} rows now, and {len(before)} were read"
        for key, (before, after) in pairs.items()
        if before is not None and after is not None and before.digest != after.digest
    }


def _touched(path: Path, started: float) -> bool:
    try:
        return path.stat().st_ctime >= started - 1.0  # the file system's clock may be a tick behind
    except OSError:
        return True


def _picked(ids: Sequence[int], places: Sequence[int]) -> tuple[int, ...]:
    return tuple(ids[place] for place in places)
