"""Prepares what a run trains on: rows, labels, tokens and the plan of batches. Every rank gets the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from andon.config.load import device_kind
from andon.config.schema import CAUSAL, CLASSIFICATION, DPO, MULTI_LABEL, REGRESSION, SFT, TOKEN_CLASSIFICATION, Config
from andon.config.source import MOST_BYTES as MOST_SETTINGS
from andon.config.source import is_folder
from andon.console.messages import InputError, Problem, ProblemList
from andon.data.chat import EncodedRow, encode_each
from andon.data.conversations import ConversationSet, halves
from andon.data.origins import RowSelection
from andon.data.rows import DataSet, Draw, Examples, LabelSets, Tagged, Targets, class_weights
from andon.data.tokens import Tokenizer, byte_tokenizer, pretrained_tokenizer
from andon.metrics import scores as confusion
from andon.model.build import ModelInterface, facts_of, facts_of_shape, labels_in_own_order, require_decoder
from andon.model.masks import length_step, padded_length, padding_note
from andon.step.plan import BatchPlan, Schedule
from andon.tasks.dpo import DpoTask
from andon.tasks.sft import GenerationSettings, SftTask, TokenRows
from andon.tasks.text import (
    NO_TAG,
    ClassificationTask,
    EncodedRows,
    MultiLabelTask,
    RegressionTask,
    RowOptions,
    ScoredTask,
    TaggingTask,
)
from andon.training.choices import Base, capped, for_rows, with_micro_batches
from andon.training.rows import Rows, cache_of, read_rows, task_of_run, with_task
from andon.training.token_cache import TokenisedConversations, encoded_texts, tokenised
from andon_contracts.legible import counted
from andon_contracts.record import MAX_LINE
from andon_contracts.untrusted import MOST_JSON

_FEW_UPDATES = 100
_CLASS = 280
"""The most bytes of a class's scores in a summary, without its name: four numbers, indented."""
_RANK = 300
"""The most bytes of one rank in a step's line, without its rows and micro-batches: digests and names."""
_REST = 1 << 16
"""The most bytes of everything else in a summary or in a step's line."""


def idleness(plan: BatchPlan, workers: int) -> str:
    """A note with the number of workers that would never train on a row, and why; empty if every worker has rows."""
    idle = plan.idle_ranks(workers)
    rows = min(plan.batch_size, len(plan.ids))
    unit = "row" if plan.updates is None else "pack"
    why = f"an update has {rows} {unit}{'s' * (rows != 1)} in {plan.micro_batches} micro-batches"
    return f"{idle} of {workers} workers have no row in any update: {why}" if idle else ""


def few_updates(plan: BatchPlan, config: Config) -> str:
    """A note if a run on a pretrained base has too few updates to learn much; else empty."""
    few = config.model.base is not None and config.training.max_steps is None and plan.total_steps < _FEW_UPDATES
    return f"note: {plan.total_steps} updates are few; for so few rows raise training.epochs" if few else ""


def learns_nothing(plan: BatchPlan, config: Config) -> str:
    """A warning if the run's only update is the last of its schedule, with the lowest learning rate; else empty."""
    rate, peak = Schedule(config, plan.total_steps).rate(1), config.optimizer.lr
    if plan.total_steps > 1 or rate >= peak:
        return ""
    return (
        f"warning: the run has one update, and its learning rate is {rate:g} (optimizer.lr is {peak:g}): the schedule "
        "ends at schedule.min_lr with the last update. Set training.epochs higher or training.batch_size lower, or "
        "schedule.type=constant for one update at the full rate"
    )


def require_records_fit(config: Config, rows: Rows, plan: BatchPlan, evaluated: int) -> None:
    """Raise `InputError` if the run's ledger lines, confusion matrix, summary or label names may exceed their limits.

    evaluated: the most rows of one evaluation. Sizes are worst cases.
    """
    problems = ProblemList()
    labels = rows.train.labels
    if rows.task == CLASSIFICATION:
        size = confusion.most_bytes(len(labels), evaluated)
        if size > confusion.MOST_BYTES:
            what = f"the confusion matrix of {evaluated} rows of {len(labels)} classes may take {size} bytes"
            fewer = "evaluate on fewer rows (training.eval_rows)"
            problems.add("data.eval", f"{what}, more than {confusion.MOST_BYTES}; {fewer}")
    if rows.task != REGRESSION:
        names = [len(json.dumps(label, ensure_ascii=False).encode("utf-8", "surrogatepass")) for label in labels]
        for file, size, most in (
            ("summary.json", 4 * sum(names) + _CLASS * len(names) + _REST, MOST_JSON),
            ("adapter/config.json", 2 * (sum(names) + len("    00000000: ,\n") * len(names)) + _REST, MOST_SETTINGS),
        ):
            if size > most:
                what = f"{len(names)} labels of {sum(names)} bytes in all may make {file} {size} bytes long"
                problems.add("data.train", f"{what}, more than {most}; shorten the labels, or train on fewer")
    count = min(plan.batch_size, len(plan.ids))
    digits = len(str(max(plan.ids, default=0))) + 1
    size = 2 * count * digits + plan.micro_batches * digits + config.run.workers * _RANK + _REST
    if size > MAX_LINE:
        what = f"the ledger's line of a step of {count} rows on {config.run.workers} workers may take {size} bytes"
        problems.add("training.batch_size", f"{what}, more than {MAX_LINE}; make the batch smaller")
    problems.raise_if_any()


@dataclass(frozen=True)
class Material:
    """Everything that training needs except a backend, determined by the configuration and the files it names.

    config: with all values chosen. task: the training examples, by the ids of `plan`. unpacked: the rows of
    `rows.train` by their own ids. validation_ids, evaluation_ids: the rows of `validation_task` and `evaluation_task`
    that are scored, at most `training.eval_rows` of each.
    """

    config: Config
    rows: Rows
    tokenizer: Tokenizer
    task: ScoredTask
    unpacked: ScoredTask
    validation_task: ScoredTask
    evaluation_task: ScoredTask
    validation_ids: tuple[int, ...]
    evaluation_ids: tuple[int, ...]
    plan: BatchPlan
    interface: ModelInterface

    @property
    def labels(self) -> tuple[str, ...]:
        return self.rows.train.labels

    @property
    def unusable(self) -> tuple[Problem, ...]:
        """Problems of rows that are skipped because they cannot be encoded."""
        return tuple(problem for task in dict.fromkeys(tasks_of(self)) for problem in skipped_of(task).values())


def tasks_of(material: Material) -> tuple[ScoredTask, ScoredTask, ScoredTask]:
    """The rows of the training files, of validation and of evaluation; without files of their own the same task."""
    return material.unpacked, material.validation_task, material.evaluation_task


def tokenizer_of(config: Config, task: str) -> Tokenizer:
    own = config.model
    if own.base is None:
        tokenizer = byte_tokenizer(pairs=config.data.text_pair_column is not None, begins=task in CAUSAL)
    else:
        tokenizer = pretrained_tokenizer(own.base, local_only=is_folder(Path(own.base)), revision=own.revision)
    return tokenizer.with_tokens(own.new_tokens) if own.new_tokens else tokenizer


def prepare(config: Config, cache: Path | None = None) -> Material:
    """Read, split and encode rows, choose unset values, plan batches. Raises `InputError` for a mistake of the user.

    cache: folder of the token cache, unless the configuration names one; None: tokenize every time.
    """
    config = with_task(config)
    name, own, cache = task_of_run(config), config.model, cache_of(config, cache)
    if name == DPO and config.data.train_on == "all":
        raise InputError.at("data.train_on", "all is for task sft: both answers of a pair follow the same prompt")
    if own.new_tokens and name not in CAUSAL:
        what = f"are for tasks sft and dpo, and the task is {name} ({', '.join(map(repr, own.new_tokens))})"
        raise InputError.at("model.new_tokens", what)
    tokenizer = tokenizer_of(config, name)

    def base_with(labels: tuple[str, ...]) -> Base | None:
        if own.base is None:
            return None
        return Base(*facts_of_shape(own, interface_of(config, HEADS[name], labels, tokenizer)))

    base = None
    if name in CAUSAL:
        # Conversations are tokenized while they are read, which needs max_length.
        if own.base is not None:
            require_decoder(own.base, own.revision)  # before an error about a missing chat template
        base = base_with(())
        config = capped(config, name, base)

    def conversations(paths: Sequence[Path], selection: RowSelection) -> Examples:
        limit, positions = config.model.max_length, None if base is None else base.positions
        how: dict[str, Any] = {"train_on": config.data.train_on, "positions": positions, "pairs": name == DPO}
        return tokenised(cache, paths, selection, tokenizer, max_length=limit, **how)

    rows = read_rows(config, conversations, cache)
    if name not in CAUSAL:
        labels = rows.train.labels
        if own.base is not None and name != REGRESSION:
            # In the order of the base, if it has the same classes, so that its head stays valid.
            labels = labels_in_own_order(own.base, HEADS[name], labels, own.revision)
        rows = rows.numbered_by(labels)
        base = base_with(rows.train.labels)
        config = capped(config, name, base)

    # Tokenize; choose unset values from the lengths.
    weights: tuple[float, ...] = ()
    if name == CLASSIFICATION:
        weights = loss_weights(config, rows)
    elif config.data.class_weights != "uniform":
        raise InputError(f"data.class_weights: {config.data.class_weights} is for classes, not {name}; set uniform")
    whole = task_of(config, rows.train, tokenizer, weights, cache)
    own_files = {"data.validation": rows.validation, "data.eval": rows.evaluation}
    held = {
        key: task_of(config, each, tokenizer, weights, cache) for key, each in own_files.items() if each is not None
    }
    rows = rows.without(skipped_of(whole))
    lengths = whole.lengths[[rows.row_of(id_) for id_ in rows.train_ids]].tolist()
    longest = max(each.longest for each in (whole, *held.values()))
    config = for_rows(config, name, base, lengths, longest, on_gpus=device_kind(config.run) == "cuda")
    training, padding = config.training, (padding_multiple(config), item_length(config))
    whole, held = whole.padded_to(*padding), {key: each.padded_to(*padding) for key, each in held.items()}

    # Training uses packs, or copies of rows by weight; scoring uses the rows themselves, or some of them.
    task, train_ids = whole, rows.train_ids
    if training.packing:
        if not isinstance(whole, SftTask):
            raise InputError.at("training.packing", f"is for conversations (task sft or dpo), not {name}; set false")
        task = whole.packed([rows.row_of(id_) for id_ in train_ids])
        train_ids = tuple(range(len(task)))
    elif rows.copies > 1:
        task = whole.in_copies(rows.copies)
    if rows.sources and isinstance(whole, EncodedRows):
        whole = whole.by_source(rows.sources)
    validated, scored_ids = whole, [rows.validation_ids]
    if rows.validation is not None:
        validated = held["data.validation"]
        scored_ids = [usable_ids(validated, rows.validation.ids, "data.validation")]
    scored = validated
    if rows.evaluation is not None:
        scored = held["data.eval"]
        scored_ids.append(usable_ids(scored, rows.evaluation.ids))
    most = training.eval_rows
    for place, ids in enumerate(scored_ids):
        if most is not None and most < len(ids):
            scored_ids[place] = tuple(sorted(Draw(f"evaluated rows, seed {config.seed}").shuffled(ids)[:most]))

    # The batches. An epoch of packs has as many updates as an epoch of their rows.
    if not train_ids:
        raise InputError("data.validation_fraction: leaves no row to train on; set a smaller fraction")
    batch, updates = training.batch_size, None
    if training.packing:
        updates = min(-(-len(rows.train_ids) // batch), len(train_ids))
        batch = -(-len(train_ids) // updates)
    lengths = task.lengths[list(train_ids)].tolist()
    config = with_micro_batches(config, min(batch, len(train_ids)), padded_length(max(lengths), *padding))
    plan = BatchPlan(
        ids=train_ids,
        batch_size=batch,
        micro_batches=config.training.micro_batches,
        seed=config.seed,
        epochs=training.epochs,
        max_steps=training.max_steps,
        lengths=tuple(lengths) if training.group_by_length else None,
        updates=updates,
    )
    require_records_fit(config, rows, plan, max(map(len, scored_ids)))
    return Material(
        config=config,
        rows=rows,
        tokenizer=tokenizer,
        task=task,
        unpacked=whole,
        validation_task=validated,
        evaluation_task=scored,
        validation_ids=scored_ids[0],
        evaluation_ids=scored_ids[-1],
        plan=plan,
        interface=interface_of(config, HEADS[name], rows.train.labels, tokenizer),
    )


def item_length(config: Config) -> int:
    """The most tokens of an item of the plan: of a row or a pack, and of the two answers of a pair."""
    return config.model.max_length * (2 if config.task == DPO else 1)


def skipped_of(task: ScoredTask) -> Mapping[int, Problem]:
    return task.skipped if isinstance(task, SftTask) else {}


def usable_ids(task: ScoredTask, ids: Sequence[int], key: str = "data.eval") -> tuple[int, ...]:
    """`ids` of the task of the file at `key`, without skipped rows. Raises `InputError` if all were skipped."""
    skipped = skipped_of(task)
    usable = tuple(id_ for id_ in ids if id_ not in skipped)
    if skipped and not usable:
        raise InputError.at(key, f"none of its rows can be used; the first: {skipped[min(skipped)]}")
    return usable


def eval_rows_note(material: Material) -> str:
    """A note on how many rows are scored, if `training.eval_rows` limits them; otherwise empty."""
    rows, most = material.rows, material.config.training.eval_rows
    sizes = {"validation": len(rows.validation or rows.validation_ids), "evaluation": len(rows.evaluation or ())}
    counts = [f"{most} of {size} {what} rows" for what, size in sizes.items() if most is not None and size > most]
    return f"note: scores are of {' and '.join(counts)} (training.eval_rows)" if counts else ""


def loss_weights(config: Config, rows: Rows) -> tuple[float, ...]:
    """Loss weight of each class, by the class counts of an epoch of training rows, copies included."""
    trained_on = rows.train.subset(map(rows.row_of, rows.train_ids))
    assert isinstance(trained_on, DataSet)
    return class_weights(config.data.class_weights, trained_on.counts(), trained_on.labels)


def task_of(
    config: Config, data: Any, tokenizer: Tokenizer, weights: Sequence[float] = (), cache: Path | None = None
) -> ScoredTask:
    """Encode the rows of `data` as a task to train on or score. weights: loss weight of each class.

    cache: folder of the token file; None: encode texts in this process, without a file.
    """
    if isinstance(data, TokenisedConversations | ConversationSet):
        return _conversations(config, data, tokenizer)
    if isinstance(data, Tagged) and config.data.text_pair_column is not None:
        raise InputError.at("data.text_pair_column", "is not for token classification, whose rows have one text")
    encoded = encoded_texts(cache, data, tokenizer, config.model.max_length)
    tokens = encoded.tokens
    several = data.origins if data.origins is not None and len(data.origins.sizes) > 1 else None
    shared: RowOptions = {
        "columns": encoded.columns,
        "cut": encoded.cut,
        "vocab_size": tokenizer.vocab_size,
        "pad_id": tokenizer.pad_id,
        "padding_multiple": padding_multiple(config),
        "max_length": config.model.max_length,
        "places": [several.where(id_) if several else f"{data.source}: row {id_}" for id_ in data.ids],
    }
    labels, names, count = [row.label for row in data.rows], data.labels, len(data.labels)
    if isinstance(data, Targets):
        return RegressionTask(tokens, labels, **shared)
    if isinstance(data, LabelSets):
        return MultiLabelTask(tokens, labels, num_labels=count, names=names, **shared)
    if not isinstance(data, Tagged):
        return ClassificationTask(tokens, labels, num_labels=count, class_weights=weights, names=names, **shared)
    # A word is tagged at its first token. It may have none, as when it is cut off.
    tags = [[NO_TAG] * len(ids) for ids in tokens]
    unread: dict[int, dict[int, int]] = {}
    for id_, (row_tags, places) in enumerate(zip(labels, encoded.firsts, strict=True)):
        for word, (tag, place) in enumerate(zip(row_tags, places, strict=True)):
            if place >= 0:
                tags[id_][place] = tag
            else:
                unread.setdefault(id_, {})[word] = tag
    return TaggingTask(tokens, tags, names=names, unread=unread, **shared)


def _conversations(config: Config, data: TokenisedConversations | ConversationSet, tokenizer: Tokenizer) -> SftTask:
    limit, train_on, pairs = config.model.max_length, config.data.train_on, config.task == DPO
    if isinstance(data, TokenisedConversations):
        tokens, encoding = data.tokens, data.encoding
    else:
        rows: list[EncodedRow] = []
        each = halves(data.rows) if pairs else data.rows
        skips = config.data.bad_rows == "skip"
        encoding = encode_each(tokenizer, data.form, each, limit, train_on, rows.append, skip_bad=skips)
        tokens = TokenRows.of(rows)
    new = config.model.new_tokens
    ids = ", ".join(f"{token!r} {id_}" for token, id_ in zip(new, tokenizer.ids_of(new), strict=True))
    added = (f"new tokens, by id: {ids}; each starts as the mean of all rows before them",) if new else ()
    options: dict[str, Any] = {
        "pad_id": tokenizer.pad_id,
        "max_length": item_length(config),
        "padding_multiple": padding_multiple(config),
        "sources": data.sources,
        "notes": (f"trained tokens: {encoding.mask_source}", *added, *encoding.notes),
        "asked": GenerationSettings(data.form, encoding.stops),
        "skipped": {id_ // (1 + pairs): Problem(where, what) for id_, where, what in encoding.skipped},
    }
    return DpoTask(tokens, beta=config.training.beta, **options) if pairs else SftTask(tokens, **options)


HEADS: Mapping[str, str] = {
    CLASSIFICATION: "classification",
    REGRESSION: "regression",
    MULTI_LABEL: "multi-label",
    TOKEN_CLASSIFICATION: "tokens",
    **dict.fromkeys(CAUSAL, "causal"),
}
"""The model's head, by task."""


def padding_multiple(config: Config) -> int:
    """Padded lengths are multiples of this: a large number if passes are compiled, or packs are captured on GPUs."""
    training = config.training
    captured = training.packing and device_kind(config.run) == "cuda"
    if training.compile != "off" or captured:
        return length_step(item_length(config), training.compile_lengths)
    return training.pad_to_multiple_of


def cut_texts_note(count: int, config: Config) -> str:
    """A note that `count` texts were cut to `model.max_length`; empty for none."""
    return f"note: {counted(count, 'text')} cut to {config.model.max_length} tokens (model.max_length)" if count else ""


def cut_note(task: ScoredTask, ids: Sequence[int], config: Config) -> str:
    """A note on how many of the scored rows `ids` are cut, and what that means; empty for none."""
    cut = task.cut_rows(ids)
    if not cut:
        return ""
    missed = config.task in (SFT, TOKEN_CLASSIFICATION)
    means = "; the part cut off counts as wrong in the scores and is not in the loss" if missed else ""
    return f"note: {cut} of {counted(len(ids), 'scored row')} cut to {config.model.max_length} tokens{means}"


def interface_of(config: Config, head: str, labels: tuple[str, ...], tokenizer: Tokenizer) -> ModelInterface:
    """The interface of a model with this head. tokenizer: of the run, with its new tokens."""
    new = tokenizer.ids_of(config.model.new_tokens)
    return ModelInterface(head, labels, min(new, default=tokenizer.vocab_size), tokenizer.pad_id, new)


def warnings_of(model: nn.Module, tokenizer: Tokenizer) -> Iterator[str]:
    """Warnings of model and tokenizer properties that may cause unexpected outputs."""
    device = next(model.parameters()).device
    for note in (facts_of(model).own_code, tokenizer.own_code, padding_note(model, device)):
        if note:
            yield f"warning: {note}"
