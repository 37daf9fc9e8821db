"""What commands that read a configuration take alike: the file, what it is made of, and overrides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path | None, typer.Argument(help="YAML file; without one, the embedded example.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key, as in optimizer.lr=1e-3.")
]
Backend = Annotated[str | None, typer.Option(help="auto, inline, gloo, nccl or mixed.")]
Task = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What is learned of a row, as in regression; else as the data has it.",
    ),
]
TrainData = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="FILE[=WEIGHT]",
        help="Training rows: JSONL, CSV, TSV or Parquet; again for further files, whose rows count WEIGHT times.",
    ),
]
EvalData = Annotated[str | None, typer.Option(help="Rows to evaluate on, never trained on.")]
TextColumn = Annotated[str | None, typer.Option(help="Column of the texts.")]
LabelColumn = Annotated[str | None, typer.Option(help="Column of the labels.")]
BaseModel = Annotated[str | None, typer.Option("--model", help="Hugging Face model folder or hub id of the base.")]


_WEIGHED = re.compile(r"(.+)=([-+]?[0-9.][-+0-9.e]*)")


def _train_files(said: Sequence[str]) -> object:
    """`data.train`: one path as it is; several, or one with a weight, as sections."""
    files: list[dict[str, object]] = []
    for each in said:
        weighed = _WEIGHED.fullmatch(each)
        try:
            files.append({"path": each} if weighed is None else {"path": weighed[1], "weight": float(weighed[2])})
        except ValueError:
            files.append({"path": each})
    return files[0]["path"] if len(files) == 1 and "weight" not in files[0] else files


def material(
    task: str | None,
    data: Sequence[str] | None,
    eval_data: str | None,
    text_column: str | None,
    label_column: str | None,
    model: str | None,
) -> dict[str, object]:
    """What a run is made of, by key of the configuration; None where nothing was said."""
    return {
        "task": task,
        "data.train": _train_files(data) if data else None,
        "data.eval": eval_data,
        "data.text_column": text_column,
        "data.label_column": label_column,
        "model.base": model,
    }
