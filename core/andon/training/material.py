"""What a run works on, read and checked before any rank starts: rows, labels, tokens, the plan of batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from andon.config.identity import device_kind
from andon.config.schema import CLASSIFICATION, MULTI_LABEL, REGRESSION, SFT, TOKEN_CLASSIFICATION, Config
from andon.config.source import is_folder
from andon.console.problems import InputError, Problem
from andon.data.chat import EncodedRow, encode_each
from andon.data.conversations import ConversationSet
from andon.data.draw import Draw
from andon.data.labels import class_weights
from andon.data.origins import RowSelection
from andon.data.rows import DataSet, Examples, LabelSets, Tagged, Targets
from andon.data.tokens import Tokenizer, byte_tokenizer, pretrained_tokenizer
from andon.model.batches import length_step, padded_length
from andon.model.build import ModelInterface, facts_of, facts_of_shape, labels_in_own_order, require_decoder
from andon.model.masks import padding_note
from andon.step.plan import BatchPlan
from andon.tasks.sft import Asked, SftTask
from andon.tasks.text import (
    NO_TAG,
    ClassificationTask,
    EncodedRows,
    MultiLabelTask,
    RegressionTask,
    ScoredTask,
    TaggingTask,
)
from andon.tasks.token_rows import TokenRows
from andon.training.choices import Base, capped, for_rows, with_micro_batches, with_values
from andon.training.limits import require_records_fit
from andon.training.rows import Rows, cache_of, read_rows, task_of_run
from andon.training.token_cache import TokenisedConversations, encoded_texts, tokenised


@dataclass(frozen=True)
class Material:
    """Everything that training needs besides a backend; a function of the configuration and the files it names.

    config: with every choice. task: trained on, by the ids of `plan`. validation_task: has the rows by their own ids.
    validation_ids, evaluation_ids: the rows that are scored, at most `training.eval_rows` of each.
    """

    config: Config
    rows: Rows
    tokenizer: Tokenizer
    task: ScoredTask
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
        """Rows that were read and are skipped, since they cannot be encoded, and why."""
        tasks = dict.fromkeys((self.validation_task, self.evaluation_task))
        return tuple(problem for task in tasks for problem in skipped_of(task).values())


def prepare(config: Config, cache: Path | None = None) -> Material:
    """Read, split, encode, choose what nobody set, and plan. Raises `InputError` for anything that the user got wrong.

    cache: a folder that keeps tokens of conversations, if the configuration names none; None: they are made each time.
    """
    task_name, base = task_of_run(config), None
    tokenizer = _tokenizer(config, task_name)
    if task_name == SFT:
        if config.model.base is not None:
            # Refused here, before the tokenizer asks for a chat template.
            require_decoder(config.model.base, config.model.revision)
        # Conversations are tokenised as they are read, so the longest length must be known before.
        base = _base(config, SFT, (), tokenizer)
        config = capped(config, SFT, base)

    def conversations(paths: Sequence[Path], selection: RowSelection) -> Examples:
        return tokenised(
            cache_of(config, cache),
            paths,
            selection,
            tokenizer,
            max_length=config.model.max_length,
            train_on=config.data.train_on,
            positions=None if base is None else base.positions,
        )

    rows = read_rows(config, conversations, cache_of(config, cache))
    if task_name != SFT:
        labels = rows.train.labels
        if config.model.base is not None and rows.task != REGRESSION:
            # In the order in which the base names the same classes, so that a head it brings stays meaningful.
            labels = labels_in_own_order(config.model.base, HEADS[rows.task], labels, config.model.revision)
        rows = rows.numbered_by(labels)
        base = _base(config, task_name, rows.train.labels, tokenizer)
        config = capped(config, task_name, base)

    # Rows become tokens; what nobody set is chosen from their lengths.
    weights: tuple[float, ...] = ()
    if rows.task == CLASSIFICATION:
        weights = loss_weights(config, rows)
    elif config.data.class_weights != "uniform":
        what = f"{config.data.class_weights} is of classes, and {rows.task} has no weights"
        raise InputError([Problem("data.class_weights", what)])
    folder = cache_of(config, cache)
    whole = task_of(config, rows.train, tokenizer, weights, folder)
    scored = None if rows.evaluation is None else task_of(config, rows.evaluation, tokenizer, weights, folder)
    rows = rows.without(skipped_of(whole))
    lengths = whole.lengths[[rows.row_of(id_) for id_ in rows.train_ids]].tolist()
    longest = max(int(each.lengths.max()) for each in (whole, scored) if each is not None)
    config = for_rows(config, rows.task, base, lengths, longest, on_gpus=device_kind(config.run) == "cuda")
    padding = padding_multiple(config), config.model.max_length
    whole, scored = whole.padded_to(*padding), None if scored is None else scored.padded_to(*padding)

    # Trained on are packs, or copies of rows by weight; scored are the rows themselves, or some of them.
    task, train_ids = whole, rows.train_ids
    if config.training.packing:
        if not isinstance(whole, SftTask):
            what = "is for conversations (task sft); a class is that of one row"
            raise InputError([Problem("training.packing", what)])
        task = whole.packed([rows.row_of(id_) for id_ in train_ids])
        train_ids = tuple(range(len(task)))
    elif rows.copies > 1:
        task = whole.in_copies(rows.copies)
    if rows.sources and isinstance(whole, EncodedRows):
        whole = whole.by_source(rows.sources)
    scored_ids = [rows.validation_ids]
    if rows.evaluation is not None and scored is not None:
        scored_ids.append(usable_ids(scored, rows.evaluation.ids))
    most = config.training.eval_rows
    for place, ids in enumerate(scored_ids):
        if most is not None and most < len(ids):
            drawn = Draw(f"evaluated rows, seed {config.seed}").shuffled(ids)[:most]
            scored_ids[place] = tuple(sorted(drawn))
    plan = _plan(config, rows, train_ids, task)
    config = with_values(config, {"training.micro_batches": plan.micro_batches})
    require_records_fit(config, rows, plan, max(map(len, scored_ids)))
    return Material(
        config=config,
        rows=rows,
        tokenizer=tokenizer,
        task=task,
        validation_task=whole,
        evaluation_task=whole if scored is None else scored,
        validation_ids=scored_ids[0],
        evaluation_ids=scored_ids[-1],
        plan=plan,
        interface=interface_of(config, HEADS[rows.task], rows.train.labels, tokenizer),
    )


def _base(config: Config, task: str, labels: tuple[str, ...], tokenizer: Tokenizer) -> Base | None:
    if config.model.base is None:
        return None
    return Base(*facts_of_shape(config.model, interface_of(config, HEADS[task], labels, tokenizer)))


def skipped_of(task: ScoredTask) -> Mapping[int, Problem]:
    """Why rows of this task must be left out, by id: those that only encoding shows to be of no use."""
    return task.skipped if isinstance(task, SftTask) else {}


def usable_ids(task: ScoredTask, ids: Sequence[int]) -> tuple[int, ...]:
    """The rows of a task that is only evaluated on, but for skipped ones. Raises `InputError` if none is left."""
    skipped = skipped_of(task)
    found = tuple(id_ for id_ in ids if id_ not in skipped)
    if skipped and not found:
        raise InputError([Problem("data.eval", f"no row can be used; {skipped[min(skipped)]}")])
    return found


def eval_rows_note(material: Material) -> str:
    """How many rows are scored, if `training.eval_rows` leaves some out; else empty."""
    rows, most = material.rows, material.config.training.eval_rows
    sizes = {"validation": len(rows.validation_ids), "evaluation": len(rows.evaluation or ())}
    counts = [f"{most} of {size} {what} rows" for what, size in sizes.items() if most is not None and size > most]
    return f"note: scores are of {' and '.join(counts)} (training.eval_rows)" if counts else ""


def _tokenizer(config: Config, task: str) -> Tokenizer:
    new = config.model.new_tokens
    if new and task != SFT:
        what = f"are for conversations (task sft), and this is {task} ({', '.join(map(repr, new))})"
        raise InputError([Problem("model.new_tokens", what)])
    if config.model.base is None:
        found = byte_tokenizer(pairs=config.data.text_pair_column is not None, begins=task == SFT)
    else:
        local = is_folder(Path(config.model.base))
        found = pretrained_tokenizer(config.model.base, local_only=local, revision=config.model.revision)
    return found.with_tokens(new) if new else found


def loss_weights(config: Config, rows: Rows) -> tuple[float, ...]:
    """The weight of each class in the loss, from the rows that are trained on, each as often as an epoch has it."""
    trained_on = rows.train.subset(map(rows.row_of, rows.train_ids))
    assert isinstance(trained_on, DataSet)
    return class_weights(config.data.class_weights, trained_on.counts(), trained_on.labels)


def task_of(
    config: Config, data: Any, tokenizer: Tokenizer, weights: Sequence[float] = (), cache: Path | None = None
) -> ScoredTask:
    """The rows of `data` as what a step or an evaluation works on. weights: of each class in the loss.

    cache: the folder of the token file; None: this process encodes texts and keeps no tokens.
    """
    if isinstance(data, TokenisedConversations | ConversationSet):
        return _conversations(config, data, tokenizer)
    found = encoded_texts(cache, data, tokenizer, config.model.max_length)
    several = data.origins if data.origins is not None and len(data.origins.sizes) > 1 else None
    shared: dict[str, Any] = {
        "tokens": found.tokens,
        "columns": found.columns,
        "cut": found.cut,
        "vocab_size": tokenizer.vocab_size,
        "pad_id": tokenizer.pad_id,
        "padding_multiple": padding_multiple(config),
        "max_length": config.model.max_length,
        "places": [several.where(id_) if several else f"{data.source}: row {id_}" for id_ in data.ids],
    }
    if isinstance(data, Tagged):
        if config.data.text_pair_column is not None:
            raise InputError([Problem("data.text_pair_column", "is for texts; words have tags in one text")])
        tags = [[NO_TAG] * len(ids) for ids in found.tokens]
        unread: dict[int, dict[int, int]] = {}
        for id_, (row, places) in enumerate(zip(data.rows, found.firsts, strict=True)):
            for word, (tag, place) in enumerate(zip(row.label, places, strict=True)):
                if place >= 0:
                    tags[id_][place] = tag
                else:
                    unread.setdefault(id_, {})[word] = tag
        return TaggingTask(tags=tags, names=data.labels, unread=unread, **shared)
    shared["labels"] = [row.label for row in data.rows]
    if isinstance(data, Targets):
        return RegressionTask(**shared)
    shared |= {"num_labels": len(data.labels), "names": data.labels}
    return (
        MultiLabelTask(**shared) if isinstance(data, LabelSets) else ClassificationTask(class_weights=weights, **shared)
    )


def _conversations(config: Config, data: TokenisedConversations | ConversationSet, tokenizer: Tokenizer) -> SftTask:
    """Conversations, tokenised already or encoded here, one a row."""
    limit, train_on = config.model.max_length, config.data.train_on
    if isinstance(data, TokenisedConversations):
        tokens, encoding = data.tokens, data.encoding
    else:
        rows: list[EncodedRow] = []
        encoding = encode_each(
            tokenizer, data.form, data.rows, limit, train_on, rows.append, skip_bad=config.data.bad_rows == "skip"
        )
        tokens = TokenRows.of(rows)
    new = config.model.new_tokens
    ids = ", ".join(f"{token!r} {id_}" for token, id_ in zip(new, tokenizer.ids_of(new), strict=True))
    added = (f"new tokens, by id: {ids}; each starts as the mean of all rows before them",) if new else ()
    return SftTask(
        tokens,
        pad_id=tokenizer.pad_id,
        max_length=limit,
        padding_multiple=padding_multiple(config),
        sources=data.sources,
        notes=(f"trained tokens: {encoding.mask_source}", *added, *encoding.notes),
        asked=Asked(data.form, encoding.stops),
        skipped={id_: Problem(where, what) for id_, where, what in encoding.skipped},
    )


HEADS: Mapping[str, str] = {
    CLASSIFICATION: "classification",
    REGRESSION: "regression",
    MULTI_LABEL: "multi-label",
    TOKEN_CLASSIFICATION: "tokens",
    SFT: "causal",
}
"""By the task's name: the head of its model."""


def padding_multiple(config: Config) -> int:
    """What padded lengths are a multiple of: few lengths if each is compiled, or packs are captured, on GPUs."""
    training = config.training
    captured = training.packing and device_kind(config.run) == "cuda"
    if training.compile != "off" or captured:
        return length_step(config.model.max_length, training.compile_lengths)
    return training.pad_to_multiple_of


def cut_note(task: ScoredTask, ids: Sequence[int], config: Config) -> str:
    """How many of the rows `ids`, on which a model is scored, are cut, and what that means; empty for none."""
    cut = task.cut_rows(ids)
    if not cut:
        return ""
    missed = config.task in (SFT, TOKEN_CLASSIFICATION)
    means = "; what was cut off counts as missed, and is not in the loss" if missed else ""
    return f"note: {cut} of {len(ids)} evaluation rows are cut to {config.model.max_length} tokens{means}"


def _plan(config: Config, rows: Rows, train_ids: tuple[int, ...], task: ScoredTask) -> BatchPlan:
    """The batches of a run. Packs are shared out to as many updates an epoch as their rows would have unpacked."""
    if not train_ids:
        raise InputError("data.validation_fraction: leaves no row to train on")
    training, batch, updates = config.training, config.training.batch_size, None
    if training.packing:
        updates = min(-(-len(rows.train_ids) // batch), len(train_ids))
        batch = -(-len(train_ids) // updates)
    lengths = task.lengths[list(train_ids)].tolist()
    padded = padded_length(max(lengths), padding_multiple(config), config.model.max_length)
    return BatchPlan(
        ids=train_ids,
        batch_size=batch,
        micro_batches=with_micro_batches(config, min(batch, len(train_ids)), padded).training.micro_batches,
        seed=config.seed,
        epochs=training.epochs,
        max_steps=training.max_steps,
        lengths=tuple(lengths) if training.group_by_length else None,
        updates=updates,
    )


def interface_of(config: Config, head: str, labels: tuple[str, ...], tokenizer: Tokenizer) -> ModelInterface:
    """What a model with this head must fit. tokenizer: of the run, with its new tokens."""
    new = tokenizer.ids_of(config.model.new_tokens)
    return ModelInterface(head, labels, min(new, default=tokenizer.vocab_size), tokenizer.pad_id, new)


def warnings_of(model: nn.Module, tokenizer: Tokenizer) -> Iterator[str]:
    """Lines about what makes the answers of `model` others than its user may expect."""
    device = next(model.parameters()).device
    for note in (facts_of(model).own_code, tokenizer.own_code, padding_note(model, device)):
        if note:
            yield f"warning: {note}"
