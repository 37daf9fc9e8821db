"""Init, check, doctor: what is done before the first run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from andon.cli.apart import in_a_child
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
from andon.config.load import load_config, template
from andon.config.source import is_folder, is_there
from andon.console.exits import Exit
from andon.console.messages import command_line, put
from andon.console.problems import InputError, Problem
from andon.inspection.doctor import examine
from andon.integrations.trackers import require
from andon.run.atomic import storage, write_whole
from andon.run.folder import RUNS


def init(path: Annotated[Path, typer.Argument(help="A folder for config.yaml, or the file itself (.yaml).")]) -> None:
    """Write a commented config.yaml with every setting at its default."""
    target = path if path.suffix in (".yaml", ".yml") and not is_folder(path) else path / "config.yaml"
    if is_there(target):
        raise InputError([Problem(str(target), "is there already")])
    with storage(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, template().encode())
    put(f"wrote {target}", f"next: {command_line('andon', 'train', target)}")


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
    made_of = material(task, data, eval_data, text_column, label_column, model)
    loaded = load_config(config, overrides or (), {"run.workers": workers, "run.backend": backend, **made_of})
    in_a_child("check")
    from andon.training.preview import describe

    require(loaded.run.report_to)
    for line in describe(loaded, show_row):
        put(line)


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
