"""Train, init, check, eval, predict; the commands of `inspect` and of other packages join them here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from andon.cli import inspect, plan, plugins
from andon.cli.options import (
    Backend,
    BaseModel,
    ConfigFile,
    EvalData,
    LabelColumn,
    Overrides,
    TextColumn,
    TrainData,
    material,
)
from andon.config.source import is_there, require_file
from andon.console.messages import put
from andon.console.problems import InputError, Problem, ProblemList
from andon.data.labels import text_fault
from andon.launch.sizes import sized
from andon_contracts.legible import legible

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        put(version("andon"))
        raise typer.Exit


@app.callback()
def andon(
    shown: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Say which version this is.")
    ] = False,
) -> None:
    """Data-parallel LoRA training of text classifiers, every step a checked fact."""


@app.command()
def train(
    config: ConfigFile = None,
    workers: Annotated[
        str | None, typer.Option(metavar="N|MIN:MAX", help="Ranks on this machine; MIN:MAX: a number that may change.")
    ] = None,
    max_restarts: Annotated[
        int | None, typer.Option(min=0, help="With MIN:MAX, at one size without a new checkpoint; 3 by default.")
    ] = None,
    backend: Backend = None,
    resume: Annotated[str | None, typer.Option(help="auto: go on in --run-dir, or the newest unfinished.")] = None,
    run_dir: Annotated[str | None, typer.Option(help="Folder of the run; a new one under runs/ by default.")] = None,
    data: TrainData = None,
    eval_data: EvalData = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    model: BaseModel = None,
    overrides: Overrides = None,
) -> None:
    """Train a classifier. The result is the same to the bit for every number of workers."""
    from andon.cli.train import run_training

    count, sizing = sized(workers, max_restarts)
    flags: dict[str, Any] = {
        "run.workers": count,
        "run.backend": backend,
        "run.resume": resume,
        "run.dir": run_dir,
        **material(data, eval_data, text_column, label_column, model),
    }
    given = {key: value for key, value in flags.items() if value is not None}
    raise typer.Exit(int(run_training(config, overrides or (), given, sizing=sizing)))


@app.command()
def resize(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    workers: Annotated[int, typer.Argument(help="Ranks from the next step boundary on.")],
) -> None:
    """Change the workers of a run that has --workers MIN:MAX."""
    from andon.launch.resizing import ask

    ask(run, workers)
    put(f"asked for {workers} workers; the run goes on with them from its next step boundary")


@app.command()
def init(folder: Annotated[Path, typer.Argument(help="Where config.yaml is written.")]) -> None:
    """Write a commented config.yaml with every setting at its default."""
    from andon.config.load import template
    from andon.run.atomic import storage, write_whole

    target = folder / "config.yaml"
    if is_there(target):
        raise InputError([Problem(str(target), "is there already")])
    with storage(target):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(target, template().encode())
    put(f"wrote {target}", f"next: andon train {target}")


@app.command()
def check(
    config: ConfigFile = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Ranks on this machine.")] = None,
    backend: Backend = None,
    data: TrainData = None,
    eval_data: EvalData = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    model: BaseModel = None,
    overrides: Overrides = None,
) -> None:
    """Say what a run would do. Reads configuration, data, tokenizer and model as the run would."""
    from andon.config.load import load_config

    flags = {"run.workers": workers, "run.backend": backend}
    loaded = load_config(config, overrides or (), flags | material(data, eval_data, text_column, label_column, model))
    from andon.training.preview import describe

    for line in describe(loaded):
        put(line)


@app.command(name="eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    data: Annotated[Path, typer.Argument(help="Rows with labels.")],
    text_column: Annotated[str | None, typer.Option(help="Column of the texts; as in the run by default.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Column of the labels; as in the run by default.")] = None,
) -> None:
    """Score a run's model on a file; prints JSON."""
    from andon.training.existing import require_run

    folder = require_run(run)
    require_file(data)
    from andon.training.inference import evaluate_run, load_run, named, read_labelled

    rows = read_labelled(folder, data, text_column=text_column, label_column=label_column)
    put(*json.dumps(named(evaluate_run(load_run(folder), rows), rows.labels), indent=2).splitlines())


@app.command()
def predict(run: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Label each line of standard input; prints one JSON object a line."""
    from andon.training.existing import require_run

    folder = require_run(run)
    texts = _read_texts(sys.stdin.buffer)
    from andon.training.inference import load_run, predict

    for found in predict(load_run(folder), texts):
        line = {"text": found.text, "label": found.label, "probability": round(found.probability, 6)}
        text = json.dumps(line, ensure_ascii=False)
        # What would act on a terminal is written as JSON itself escapes it, so that the value stays the same.
        if not put(text if legible(text) == text else json.dumps(line)):
            return


def _read_texts(lines: Iterable[bytes]) -> list[str]:
    """The texts in `lines`, one a line, without their line ends.

    Raises `InputError` with each fault at stdin:LINE: not UTF-8, empty, a NUL character; and for no texts at all.
    """
    found = ProblemList()
    texts: list[str] = []
    for number, line in enumerate(lines, start=1):
        where = f"stdin:{number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            found.add(where, f"is not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}")
            continue
        fault = text_fault(text)
        if fault is not None:
            found.add(where, f"the text {fault}")
        texts.append(text)
    if not texts and not found:
        found.add("stdin", "holds no texts; write one a line")
    found.raise_if_any()
    return texts


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def watch(context: typer.Context) -> None:
    """Run a training script of your own under the contracts. See andon watch --help."""
    # Listed here for --help alone: `main` runs it before typer is imported, which it does not need.
    from andon_contracts.watch.script import main

    raise typer.Exit(main(context.args))


plan.register(app)
inspect.register(app)
plugins.register(app)
