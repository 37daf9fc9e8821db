"""Train, init, check, doctor; the commands of `results`, `inspect` and of other packages join them here."""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from andon.cli import inspect, plan, plugins, results
from andon.cli.options import (
    Backend,
    BaseModel,
    ConfigFile,
    EvalData,
    LabelColumn,
    Overrides,
    Task,
    TextColumn,
    TrainData,
    material,
)
from andon.config.source import is_there
from andon.console.exits import Exit
from andon.console.messages import put
from andon.console.problems import InputError, Problem
from andon.inspection.doctor import examine
from andon.integrations.trackers import require
from andon.launch.sizes import sized
from andon.run.folder import RUNS

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
    """Data-parallel LoRA training, every step a checked fact."""


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
    task: Task = None,
    data: TrainData = None,
    eval_data: EvalData = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    model: BaseModel = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no scores.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Metrics as lines of JSON on standard output.")] = False,
    overrides: Overrides = None,
) -> None:
    """Train. The result is the same to the bit for every number of workers."""
    from andon.cli.train import run_training

    count, sizing = sized(workers, max_restarts)
    if quiet and as_json:
        raise InputError([Problem("--quiet", "says nothing, and --json says it as JSON; give one of them")])
    flags: dict[str, Any] = {
        "run.progress": "quiet" if quiet else "json" if as_json else None,
        "run.workers": count,
        "run.backend": backend,
        "run.resume": resume,
        "run.dir": run_dir,
        **material(task, data, eval_data, text_column, label_column, model),
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
    task: Task = None,
    data: TrainData = None,
    eval_data: EvalData = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    model: BaseModel = None,
    overrides: Overrides = None,
    show_row: Annotated[int | None, typer.Option(help="Show a row of the training data token by token.")] = None,
) -> None:
    """Say what a run would do. Reads configuration, data, tokenizer and model as the run would."""
    from andon.config.load import load_config

    made_of = material(task, data, eval_data, text_column, label_column, model)
    loaded = load_config(config, overrides or (), {"run.workers": workers, "run.backend": backend, **made_of})
    from andon.training.preview import describe

    require(loaded.run.report_to)
    for line in describe(loaded, show_row):
        put(line)


@app.command()
def doctor(
    folder: Annotated[Path, typer.Argument(help="Where runs are to be.")] = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that each check may take at most.")] = 60,
) -> None:
    """Say whether runs can train here, and what to do where not. Ends with 0 where they can, with 1 where not."""
    found = []
    for each in examine(folder, timeout):
        found.append(each)
        if not as_json:
            put(f"{each.level:<8} {each.name}: {each.found}", *([f"         -> {each.todo}"] if each.todo else []))
    can = all(each.level != "problem" for each in found)
    if as_json:
        told = {"can_train": can, "checks": [dataclasses.asdict(each) for each in found]}
        put(*json.dumps(told, indent=2).splitlines())
    else:
        put("andon train can run here" if can else "andon train cannot run here: see each problem above")
    raise typer.Exit(int(Exit.OK if can else Exit.CRASHED))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def watch(context: typer.Context) -> None:
    """Run a training script of your own under the contracts. See andon watch --help."""
    # Listed here for --help alone: `main` runs it before typer is imported, which it does not need.
    from andon_contracts.watch.script import main

    raise typer.Exit(main(context.args))


plan.register(app)
results.register(app)
inspect.register(app)
plugins.register(app)
