"""The files of a run folder that are not appended to: what it started from, and what it came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from andon.config.identity import config_digest
from andon.config.load import to_yaml
from andon.config.schema import Config
from andon.console.problems import InputError, Problem
from andon.data.chat import asking
from andon.data.tokens import Tokenizer
from andon.model.adapter import export_adapter, save_base
from andon.model.build import facts_of
from andon.model.masks import padding_of
from andon.run.atomic import whole_folder, write_json, write_whole
from andon.run.folder import RunFolder
from andon.run.provenance import read_provenance, write_provenance
from andon.tasks.sft import Asked, SftTask
from andon.training.card import Form, Result, card
from andon.training.material import Material

CARD = "README.md"
"""Where hubs look for the card of a model."""


def write_start(
    folder: RunFolder, config: Config, environment: Mapping[str, object], material: Material, digests: Mapping[str, str]
) -> None:
    """The resolved configuration, the environment, where everything comes from. Raises `InputError` for a bad disk."""
    write_whole(folder.config, to_yaml(resolved(config, folder)).encode())
    write_json(folder.environment, environment)
    new = config.model.new_tokens
    write_provenance(
        folder.provenance,
        identity=config_digest(config),
        new_tokens=dict(zip(new, material.tokenizer.ids_of(new), strict=True)),
        digests={**digests, "data": material.rows.digest, "tokenizer": material.tokenizer.digest},
        environment=environment,
    )


def resolved(config: Config, folder: RunFolder) -> Config:
    """`config` as it can be used again from anywhere: its run folder named, files and folders by absolute paths."""
    data, base = config.data, config.model.base
    files: dict[str, object] = {} if data.eval is None else {"eval": str(Path(data.eval).resolve())}
    if isinstance(data.train, str):
        files["train"] = str(Path(data.train).resolve())
    elif data.train is not None:
        files["train"] = tuple(file.model_copy(update={"path": str(Path(file.path).resolve())}) for file in data.train)
    model = {"base": str(Path(base).resolve())} if base is not None and Path(base).is_dir() else {}
    return config.model_copy(
        update={
            "data": data.model_copy(update=files),
            "model": config.model.model_copy(update=model),
            "run": config.run.model_copy(update={"dir": str(folder.path.resolve())}),
        }
    )


def write_adapter(folder: RunFolder, model: nn.Module, material: Material, result: Result) -> None:
    """The trained adapter as a PEFT folder with tokenizer and card, whole or not at all; an embedded base goes along.

    The embedded base lies in the adapter's folder too, so that transformers needs no other, and beside it for peft,
    named by where it is from there: the run's folder may be moved. Another base is named by its whole path or hub id.
    """
    config = resolved(material.config, folder)
    reference = config.model.base or "../base"
    if material.config.model.base is None and material.config.adapter.kind != "none":
        with whole_folder(folder.path / "base") as path:
            save_base(model, path, material.labels)
    task = material.validation_task  # of the rows themselves, whatever is made of them to train on
    asked = task.asked if isinstance(task, SftTask) else None
    with whole_folder(folder.adapter) as path:
        write_model_files(path, model, config, material.tokenizer, material.labels, reference, asked)
        note = card_note(facts_of(model).own_code)
        write_card(path, folder, config, result, form_of(config), folder.path.name, material.tokenizer, asked, note)


def write_model_files(
    path: Path,
    model: nn.Module,
    config: Config,
    tokenizer: Tokenizer,
    labels: Sequence[str],
    reference: str,
    asked: Asked | None,
) -> None:
    """Into `path` the adapter of `model`, or the whole of one without, and the tokenizer. reference: to its base.

    asked: of a model that answers, how.
    """
    named = config.model
    export_adapter(model, path, reference, labels, revision=named.revision, with_base=named.base is None)
    write_tokenizer(path, tokenizer, config, labels, asked, padding_of(model, next(model.parameters()).device).side)


def write_card(
    path: Path,
    folder: RunFolder,
    config: Config,
    result: Result,
    form: Form,
    name: str,
    tokenizer: Tokenizer,
    asked: Asked | None,
    note: str = "",
) -> tuple[str, ...]:
    """Into `path` the card of the run in `folder`. Returns what its user should know of asking it, a line each."""
    asks = None
    if asked is not None:
        asks = asking(tokenizer, asked.form)
    text = card(config, read_provenance(folder.provenance), result, form, name, note, asks)
    (path / CARD).write_text(text, encoding="utf-8")
    return () if asks is None or not asks.note else (asks.note,)


def card_note(*sentences: str) -> str:
    """Sentences as one paragraph; those that are empty are left out."""
    return " ".join(f"{each[0].upper()}{each[1:]}." for each in sentences if each)


def form_of(config: Config) -> Form:
    """What a run's own `adapter` folder holds."""
    if config.adapter.kind == "none":
        return Form.WHOLE
    return Form.COMPLETE if config.model.base is None else Form.ADAPTER


def write_tokenizer(
    path: Path, tokenizer: Tokenizer, config: Config, labels: Sequence[str], asked: Asked | None, side: str
) -> None:
    """The files of a tokenizer, which cuts texts, and pads them on `side`, as in training where they get labels; of a
    model that answers, how it is asked. Raises `InputError` for a disk that refuses."""
    if asked is not None:
        asked.write(path, tokenizer.pad_id)
    try:
        tokenizer.save(path, config.model.max_length if labels else None, side)
    except OSError:
        raise
    except Exception as error:  # the tokenizers library raises a bare Exception for a disk that refuses
        if type(error) is not Exception:
            raise
        raise InputError([Problem(str(path.parent), f"the tokenizer cannot be written: {error}")]) from error
