"""What commands that read a configuration take alike: the file, what it is made of, and overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path | None, typer.Argument(help="YAML file; without one, the embedded example.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key, as in optimizer.lr=1e-3.")
]
Backend = Annotated[str | None, typer.Option(help="inline, threads, gloo, nccl or mixed.")]
Task = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What is learned of a row, as in regression; else as the data has it.",
    ),
]
TrainData = Annotated[str | None, typer.Option("--data", help="Training rows: JSONL, CSV, TSV or Parquet.")]
EvalData = Annotated[str | None, typer.Option(help="Rows to evaluate on, never trained on.")]
TextColumn = Annotated[str | None, typer.Option(help="Column of the texts.")]
LabelColumn = Annotated[str | None, typer.Option(help="Column of the labels.")]
BaseModel = Annotated[str | None, typer.Option("--model", help="Hugging Face model folder or hub id of the base.")]


def material(
    task: str | None,
    data: str | None,
    eval_data: str | None,
    text_column: str | None,
    label_column: str | None,
    model: str | None,
) -> dict[str, object]:
    """What a run is made of, by key of the configuration; None where nothing was said."""
    return {
        "task": task,
        "data.train": data,
        "data.eval": eval_data,
        "data.text_column": text_column,
        "data.label_column": label_column,
        "model.base": model,
    }
