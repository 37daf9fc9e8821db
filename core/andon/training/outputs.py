"""The files of a run folder that are not appended to: what it started from, and what it came to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from andon.config.identity import config_digest
from andon.config.load import to_yaml
from andon.config.schema import Config
from andon.console.problems import InputError, Problem
from andon.model.adapter import export_adapter, save_base
from andon.run.atomic import whole_folder, write_json, write_whole
from andon.run.folder import RunFolder
from andon.run.provenance import write_provenance
from andon.tasks.sft import SftTask
from andon.training.material import Material
from andon_contracts.legible import legible_line

_MOST_LABELS = 20


def write_start(
    folder: RunFolder, config: Config, environment: Mapping[str, object], material: Material, digests: Mapping[str, str]
) -> None:
    """The resolved configuration, the environment, where everything comes from. Raises `InputError` for a bad disk."""
    write_whole(folder.config, to_yaml(resolved(config, folder)).encode())
    write_json(folder.environment, environment)
    write_provenance(
        folder.provenance,
        identity=config_digest(config),
        digests={**digests, "data": material.rows.digest, "tokenizer": material.tokenizer.digest},
        environment=environment,
    )


def resolved(config: Config, folder: RunFolder) -> Config:
    """`config` as it can be used again from anywhere: its run folder named, files and folders by absolute paths."""
    data, base = config.data, config.model.base
    files = {name: str(Path(path).resolve()) for name, path in (("train", data.train), ("eval", data.eval)) if path}
    model = {"base": str(Path(base).resolve())} if base is not None and Path(base).is_dir() else {}
    return config.model_copy(
        update={
            "data": data.model_copy(update=files),
            "model": config.model.model_copy(update=model),
            "run": config.run.model_copy(update={"dir": str(folder.path.resolve())}),
        }
    )


def write_adapter(folder: RunFolder, model: nn.Module, material: Material) -> None:
    """The trained adapter as a PEFT folder with its tokenizer, whole or not at all; the embedded model also its base.

    Stock peft resolves the base by the absolute path (or hub id) in the adapter's configuration.
    """
    base = material.model.base
    reference = str(Path(base).resolve()) if base is not None and Path(base).is_dir() else base
    if reference is None and material.adapter.kind != "none":
        beside = folder.path / "base"
        with whole_folder(beside) as path:
            save_base(model, path, material.labels)
        reference = str(beside.resolve())
    with whole_folder(folder.adapter) as path:
        export_adapter(model, path, reference or "", material.labels)
        (path / "README.md").write_text(_card(reference, material), encoding="utf-8")
        _save_tokenizer(material, path)
        if isinstance(material.task, SftTask):
            material.task.asked.write(path, material.tokenizer.pad_id)


def _card(reference: str | None, material: Material) -> str:
    """What whoever finds the adapter has to know of it: of what, from what, and how it is loaded."""
    whole = material.adapter.kind == "none"
    head = {"library_name": "transformers" if whole else "peft", "pipeline_tag": "text-classification"}
    front = "".join(
        f"{key}: {json.dumps(value)}\n" for key, value in (head | ({} if whole else {"base_model": reference})).items()
    )
    kind = (
        "A text classifier" if whole else f"A LoRA adapter of rank {material.adapter.r} on `{reference}`, with its head"
    )
    loader = "AutoModelForSequenceClassification" if whole else "AutoPeftModelForSequenceClassification"
    labels = ", ".join(f"`{legible_line(name)}`" for name in material.labels[:_MOST_LABELS])
    more = f" and {len(material.labels) - _MOST_LABELS} more" if len(material.labels) > _MOST_LABELS else ""
    return f"""---
{front}---

# A text classifier

{kind}, trained by Andon on {len(material.plan.ids)} rows (SHA-256 of the data `{material.rows.digest[:16]}`), for
{len(material.labels)} classes: {labels}{more}.

    from {"transformers" if whole else "peft"} import {loader}

    model = {loader}.from_pretrained("THIS FOLDER", num_labels={len(material.labels)})

`labels.json` names the classes in the order of their numbers; texts are cut to
{material.config.model.max_length} tokens. Scores are in `summary.json` of the run, every update in its `ledger.jsonl`.
"""


def _save_tokenizer(material: Material, path: Path) -> None:
    try:
        material.tokenizer.save(path)
    except OSError:
        raise
    except Exception as error:  # the tokenizers library raises a bare Exception for a disk that refuses
        if type(error) is not Exception:
            raise
        raise InputError([Problem(str(path.parent), f"the tokenizer cannot be written: {error}")]) from error
