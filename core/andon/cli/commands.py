"""The commands and their options. Each command imports what it needs when it is called."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import wraps
from importlib.metadata import EntryPoint, entry_points
from itertools import tee
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.exceptions import Exit as Ended

from andon.console.messages import Exit, InputError, Problem, command_line, install_hint, module_command, put, say
from andon.launch.context import bind_to_parent
from andon_contracts.liveness.process import exit_text

PLUGINS = "andon.commands"
"""Entry point group for commands of other packages: a name for a click command."""
_MOST_WORKERS = 4096
_NUMBER = re.compile(r".* is not a valid (integer|float)( range)?\.")
_ANYTHING: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}


class _Command(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            if (plain := _NUMBER.fullmatch(error.message)) is None:
                raise
            remedy = f"must be a {'whole ' if plain[1] == 'integer' else ''}number"
            raise click.BadParameter(remedy, ctx=ctx, param=error.param, param_hint=error.param_hint) from None
        except click.NoSuchOption as error:
            if any("--set" in option.opts for option in self.params):
                from andon.config.load import meant_by

                meant = meant_by(error.option_name.lstrip("-").replace("-", "_"))
                if meant:
                    remedy = f"Use --set {meant}=VALUE" if " " not in meant else meant
                    raise click.NoSuchOption(error.option_name, f"{error.message} {remedy}.", ctx=ctx) from None
            raise

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # click would exit with 1
            say("interrupted")
            raise Ended(int(Exit.INTERRUPTED)) from None

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first sentence of the docstring; click would cut it at `limit`."""
        return f"{(self.help or '').partition('. ')[0].rstrip('.')}."


class _Commands(click.Group):
    command_class = _Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of their definition."""
        return [*self.commands]


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="andon", message="%(version)s", help="Print the version.")
def app() -> None:
    """Finds silent errors in data-parallel training: checks any loop, tests trainers, trains reproducibly."""


class ConfigArguments(NamedTuple):
    """A command's configuration file, overrides (KEY=VALUE) and flags by dotted key."""

    file: Path | None
    overrides: Sequence[str]
    flags: dict[str, Any]


_WEIGHED = re.compile(r"(.+)=([-+]?[0-9.][-+0-9.e]*)")


def _train_files(arguments: Sequence[str]) -> object:
    files: list[dict[str, object]] = []
    for argument in arguments:
        weighed = _WEIGHED.fullmatch(argument)
        try:
            files.append({"path": argument} if weighed is None else {"path": weighed[1], "weight": float(weighed[2])})
        except ValueError:
            files.append({"path": argument})
    return files[0]["path"] if len(files) == 1 and "weight" not in files[0] else files


_FLAGS = {
    "backend": "run.backend",
    "task": "task",
    "validation_data": "data.validation",
    "eval_data": "data.eval",
    "text_column": "data.text_column",
    "label_column": "data.label_column",
    "model": "model.base",
}
_WEIGHTED = "Training rows: JSONL, CSV, TSV or Parquet. Repeat it for more files. Each row occurs WEIGHT times."
_SHARED = (
    click.argument("config", type=Path, required=False, help="YAML file; by default the built-in demo."),
    click.option("--backend", help="auto, inline, gloo, nccl or mixed."),
    click.option("--task", metavar="NAME", help="The task, such as regression; by default it follows from the data."),
    click.option("--data", multiple=True, metavar="FILE[=WEIGHT]", help=_WEIGHTED),
    click.option("--validation-data", help="Rows that choose the weights; by default some training rows."),
    click.option("--eval-data", help="Rows to evaluate on, never trained on."),
    click.option("--text-column", help="Column of the texts."),
    click.option("--label-column", help="Column of the labels."),
    click.option("--model", help="Hugging Face model folder or hub id of the base."),
    click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one setting, as in optimizer.lr=1e-3."
    ),
)


def _configured(command: Callable[..., None]) -> Callable[..., None]:
    """Add the parameters of a configuration to `command`, which receives them as a `ConfigArguments`, first."""

    @wraps(command)
    def wrapper(config: Path | None, data: tuple[str, ...], overrides: tuple[str, ...], **values: Any) -> None:
        flags = {key: values.pop(name) for name, key in _FLAGS.items()}
        flags["data.train"] = _train_files(data) if data else None
        given = {key: value for key, value in flags.items() if value is not None}
        command(ConfigArguments(config, overrides, given), **values)

    for each in reversed(_SHARED):
        wrapper = each(wrapper)
    return wrapper


@app.command()
@click.option("--workers", type=int, help="Ranks on this machine.")
@click.option("--resume", help="auto: continue --run-dir, or the newest unfinished run.")
@click.option("--run-dir", help="Folder of the run; a new one under runs/ by default.")
@click.option("--quiet", is_flag=True, help="Print no progress and no scores.")
@click.option("--json", "as_json", is_flag=True, help="Print metrics as lines of JSON.")
@click.option("--verbose", is_flag=True, help="Print all metrics, audits and digests, too.")
@_configured
def train(
    arguments: ConfigArguments,
    workers: int | None,
    resume: str | None,
    run_dir: str | None,
    quiet: bool,
    as_json: bool,
    verbose: bool,
) -> None:
    """Fine-tune a model on your rows. Any number of workers gives the same bits."""
    modes = [name for name, on in (("quiet", quiet), ("json", as_json), ("verbose", verbose)) if on]
    if len(modes) > 1:
        raise InputError.at(f"--{modes[0]}", f"cannot be combined with --{modes[1]}; give one of them")
    progress = modes[0] if modes else None
    flags = {"run.progress": progress, "run.workers": workers, "run.resume": resume, "run.dir": run_dir}
    from andon.cli.train import run_training

    own = {key: value for key, value in flags.items() if value is not None}
    raise Ended(int(run_training(arguments.file, arguments.overrides, own | arguments.flags)))


@app.command()
@click.argument("path", type=Path, help="A folder for config.yaml, or the file itself (.yaml).")
def init(path: Path) -> None:
    """Write a commented config.yaml with every setting at its default."""
    from andon.config.load import template
    from andon.config.source import is_folder, is_there
    from andon.run.atomic import storage, write_whole

    target = path if path.suffix in (".yaml", ".yml") and not is_folder(path) else path / "config.yaml"
    if is_there(target):
        raise InputError.at(target, "already exists; delete it, or name another file")
    with storage(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, template().encode())
    put(f"wrote {target}", f"next: {command_line('andon', 'train', target)}")


def in_a_child(command: str) -> None:
    """Fork. The child returns and runs the command; the parent waits and exits with its code, or logs the signal that
    killed it and exits with 71. If torch is loaded, the process must not fork and runs the command itself."""
    if "torch" in sys.modules:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        bind_to_parent(parent)
        return
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except KeyboardInterrupt:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    if code < 0:
        say(f"{command} {exit_text(code)}")
    raise Ended(code if code >= 0 else int(Exit.RANK_LOST))


@app.command()
@click.option("--workers", type=click.IntRange(min=1), help="Ranks on this machine.")
@click.option("--show-row", type=int, help="Show this training row token by token; the first is 0.")
@_configured
def check(arguments: ConfigArguments, workers: int | None, show_row: int | None) -> None:
    """Check settings, data and model without training. Reports rows, steps and workers, or every mistake."""
    from andon.integrations.trackers import require
    from andon.training.existing import settings_for

    loaded = settings_for(arguments.file, arguments.overrides, {"run.workers": workers, **arguments.flags})
    in_a_child("check")
    from andon.training.preview import describe

    require(loaded.run.report_to, loaded.model.quantize)
    for line in describe(loaded, show_row):
        put(line)


@app.command()
@click.argument("folder", type=Path, default=Path("runs"), help="The folder for runs; by default runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--timeout", type=click.FloatRange(min=1), default=60.0, help="Time limit of each check in seconds.")
def doctor(folder: Path, as_json: bool, timeout: float) -> None:
    """Check whether this machine can train, and how to repair it. Exit code 0 if it can, else 1."""
    from andon.inspection.doctor import examine

    checks = []
    for each in examine(folder, timeout):
        checks.append(each)
        if not as_json:
            put(f"{each.level:<8} {each.name}: {each.found}", *([f"         -> {each.todo}"] if each.todo else []))
    can = all(each.level != "problem" for each in checks)
    if as_json:
        put(*json.dumps({"can_train": can, "checks": [each._asdict() for each in checks]}, indent=2).splitlines())
    else:
        put("andon train can run here" if can else "andon train cannot run here: repair each problem above")
    raise Ended(int(Exit.OK if can else Exit.CRASHED))


@app.command(context_settings={**_ANYTHING, "help_option_names": []})  # the script parses its own options
@click.pass_context
def watch(context: click.Context) -> None:
    """Run your own training script and check every update. See andon watch --help."""
    # Registered only for --help: `main` runs it without importing click.
    from andon_contracts.watch.script import main

    raise Ended(main(context.args))


@app.command()
@click.option("--workers", help="Numbers of workers, as in 1,2,4; by default run.workers.")
@click.option("--gpu-memory", type=float, metavar="GIB", help="Plan for GPUs of this size instead of this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; sizes are in bytes.")
@_configured
def plan(arguments: ConfigArguments, workers: str | None, gpu_memory: float | None, as_json: bool) -> None:
    """Estimate the memory that a run needs on each device. Exit code 0 if it fits, else 2."""
    from andon.training.choices import placed
    from andon.training.existing import settings_for

    if gpu_memory is not None and not 0 < gpu_memory < 2**20:
        raise InputError.at("--gpu-memory", f"must be a number of GiB above 0, is {gpu_memory}")
    loaded = settings_for(arguments.file, arguments.overrides, arguments.flags)
    parts = [part.strip() for part in workers.split(",")] if workers is not None else []
    if not all(re.fullmatch("[0-9]{1,4}", part) and 1 <= int(part) <= _MOST_WORKERS for part in parts):
        raise InputError.at("--workers", f"must be numbers from 1 to {_MOST_WORKERS}, as in 1,2,4, is {workers!r}")
    counts = tuple(dict.fromkeys(map(int, parts)))
    in_a_child("plan")
    from andon.training.forecast import forecast, machine_here

    size = None if gpu_memory is None else int(gpu_memory * 2**30)
    loaded, _ = placed(loaded, None if size is None else max(counts, default=1))
    counts = counts or (loaded.run.workers,)
    memory = forecast(loaded, counts, machine_here(size, max(counts)))
    if as_json:
        put(*json.dumps(memory.as_dict(), indent=2).splitlines())
    else:
        put(*memory.lines())
    if not all(world.fits for world in memory.worlds):
        raise Ended(int(Exit.USAGE))


_finished_run = click.argument("run", type=Path, help="Run folder.")
_base = click.option("--model", metavar="PATH", help="The base model, if it was moved; its digest must match.")
_checkpoint = click.option(
    "--checkpoint", metavar="best|last|STEP", help="Use this checkpoint; by default the result of the run."
)
_bad_rows = click.option(
    "--bad-rows", default="refuse", metavar="refuse|skip", help="skip: leave out and list unusable rows."
)
_device = click.option(
    "--device", default="auto", metavar="auto|cpu|cuda[:N]", help="auto: a GPU if torch can use one."
)
_same_as_data = click.option("--data", type=Path, help="The same as DATA.")
_texts = click.option("--text-column", help="Column of the texts; as in the run by default.")
_output = click.option("--output", type=Path, help="Write a .csv, .tsv, .jsonl or .parquet file instead.")


@app.command("eval")
@_finished_run
@click.argument("file", type=Path, required=False, metavar="[DATA]", help="Rows with labels.")
@_same_as_data
@_texts
@click.option("--label-column", help="Column of the labels; as in the run by default.")
@_bad_rows
@_base
@_checkpoint
@_device
def evaluate(
    run: Path,
    file: Path | None,
    data: Path | None,
    text_column: str | None,
    label_column: str | None,
    bad_rows: str,
    model: str | None,
    checkpoint: str | None,
    device: str,
) -> None:
    """Score a run's model on a file; prints JSON."""
    from andon.cli.results import one_file
    from andon.config.source import require_file
    from andon.training.existing import require_run

    folder = require_run(run, checkpoint)
    path = one_file(file, data)
    if path is None:
        raise InputError.at("DATA", "name a file of rows with labels: andon eval RUN FILE")
    require_file(path)
    from andon.training.inference import load_run, read_labelled, scored

    columns = {"text_column": text_column, "label_column": label_column}
    rows = read_labelled(folder, path, checkpoint=checkpoint, bad_rows=bad_rows, **columns)
    trained = load_run(folder, model, checkpoint=checkpoint, device=device)
    put(*json.dumps(scored(trained, rows), indent=2).splitlines())


@app.command()
@_finished_run
@click.argument("file", type=Path, required=False, metavar="[DATA]", help="Texts: JSONL, CSV, TSV or Parquet.")
@_same_as_data
@_texts
@_bad_rows
@click.option("--all-scores", is_flag=True, help="Also print the probability of every label.")
@_output
@_base
@_checkpoint
@_device
def predict(
    run: Path,
    file: Path | None,
    data: Path | None,
    text_column: str | None,
    bad_rows: str,
    all_scores: bool,
    output: Path | None,
    model: str | None,
    checkpoint: str | None,
    device: str,
) -> None:
    """Label the texts of a file or the lines of standard input. Prints a JSON object for each, with its columns.

    A column with the name of a result, such as `label`, is printed as `input_label`. If the rows have the run's label
    column, `correct` says whether the prediction is that label.
    """
    from andon.cli.results import check_output, one_file, put_rows, records, texts_of
    from andon.training.existing import require_run, require_task
    from andon.training.rows import TEXT_TASKS, skip_notes

    folder = require_run(run, checkpoint)
    require_task(folder, TEXT_TASKS, "generate")
    path = one_file(file, data)
    check_output(output, path)
    texts = texts_of(folder, path, text_column, bad_rows)
    say(*skip_notes(texts.skipped, 20, option="--bad-rows skip"))
    from andon.training.inference import load_run
    from andon.training.inference import predict as predicted
    from andon.training.material import cut_texts_note

    trained = load_run(folder, model, checkpoint=checkpoint, device=device)
    rows, firsts = tee(texts.rows())
    pairs = None
    if path is not None and trained.config.data.text_pair_column is not None:
        firsts, seconds = tee(firsts)  # an unread `tee` iterator would buffer every row
        pairs = (str(row.pair) for row in seconds)
    predictions = predicted(trained, (row.text for row in firsts), pairs=pairs)
    labels = trained.labels if all_scores else None
    label_column = trained.config.data.label_column or "label"
    put_rows(records(rows, texts.columns, predictions, labels, output, label_column), output)
    if note := cut_texts_note(trained.tokenizer.truncated, trained.config):
        say(note)


@app.command()
@_finished_run
@click.argument("prompt", nargs=-1, help="Prompts; without them --data, or lines of standard input.")
@click.option("--data", type=Path, help="Prompts: JSONL, CSV, TSV or Parquet.")
@click.option("--prompt-column", help="Column of the prompts; by default prompt, else messages.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, help="The most tokens of one answer.")
@_output
@_base
@_checkpoint
@_device
def generate(
    run: Path,
    prompt: tuple[str, ...],
    data: Path | None,
    prompt_column: str | None,
    max_new_tokens: int,
    output: Path | None,
    model: str | None,
    checkpoint: str | None,
    device: str,
) -> None:
    """Answer prompts by greedy decoding. Prints a JSON object for each."""
    from andon.cli.results import cell, check_output, put_rows, read_lines
    from andon.config.schema import CAUSAL
    from andon.data.conversations import read_prompts
    from andon.data.rows import text_fault
    from andon.training.existing import require_run, require_task

    folder = require_run(run)
    require_task(folder, CAUSAL, "predict")
    if prompt and data is not None:
        raise InputError.at("--data", f"{data} cannot be combined with a prompt; give one of them")
    check_output(output, data)
    faults = [fault for each in prompt if (fault := text_fault(each)) is not None]
    if faults:
        raise InputError([Problem("the prompt", fault) for fault in faults])
    if data is None and prompt_column is not None:
        raise InputError.at("--prompt-column", f"{prompt_column} names a column of a file; add --data")
    prompts: Sequence[Any]
    prompts = prompt or (read_lines(sys.stdin.buffer)[0] if data is None else read_prompts(data, prompt_column))
    from andon.training.inference import answer, load_run

    trained = load_run(folder, model, checkpoint=checkpoint, device=device)
    rows = (asdict(each) for each in answer(trained, prompts, max_new_tokens))
    put_rows(({**row, "prompt": cell(row["prompt"], output)} for row in rows), output)


@app.command()
@_finished_run
@click.argument("target", type=Path, metavar="DIR", help="A new folder.")
@click.option("--merge", is_flag=True, help="Merge the adapter into the base model.")
@click.option("--dtype", help="float32 or bfloat16, the type of merged weights; by default as in the run.")
@click.option(
    "--check", default="rows", metavar="rows|full|none", help="Compare a few outputs with the run's, many, or none."
)
@_base
@_checkpoint
@_device
def export(
    run: Path,
    target: Path,
    merge: bool,
    dtype: str | None,
    check: str,
    model: str | None,
    checkpoint: str | None,
    device: str,
) -> None:
    """Export a run's model for transformers and peft, with a model card."""
    from andon.training.existing import config_of, require_run

    folder = require_run(run)
    config = config_of(folder)
    whole = merge or config.adapter.kind == "none"
    if dtype is not None and not whole:
        raise InputError.at("--dtype", "is for --merge; an adapter is written in float32, as it was trained")
    from andon.training.export import CHECKS, DTYPES, export_run, require_place, result_of
    from andon.training.inference import load_run

    chosen = dtype or ("float32" if config.adapter.kind == "none" else config.model.dtype)
    for option, value, known in (("--dtype", chosen, tuple(DTYPES)), ("--check", check, CHECKS)):
        if value not in known:
            raise InputError.at(option, f"{value!r} is not one of {', '.join(known)}")
    require_place(target)
    result_of(folder)
    trained = load_run(folder, model, checkpoint=checkpoint, device=device)
    lines = export_run(trained, target, chosen if whole else None, check)
    put(f"wrote {target}: {f'a model of transformers in {chosen}' if whole else 'an adapter of peft'}", *lines)


_run = click.argument("run", type=Path, help="Run folder, or its ledger.jsonl.")


def _put_each(lines: Iterable[str]) -> None:
    for line in lines:
        put(line)


@app.command()
@_run
@click.option("--step", type=int, help="Show this step: rows, losses, digests, ranks.")
def show(run: Path, step: int | None) -> None:
    """List the events of a run, or the rows, losses and digests of one step."""
    from andon.inspection.recorded import open_recorded
    from andon.inspection.show import one_step, overview, texts_of

    recorded = open_recorded(run)
    _put_each(overview(recorded) if step is None else one_step(recorded, step, texts_of(recorded.folder)))


@app.command()
@click.argument("path", type=Path, help="Folder of a watch, a bundle in it, a run, or the name of a clause.")
def explain(path: Path) -> None:
    """Explain a violation. What was promised, what was seen, where, and how to look further."""
    from andon.inspection.explain import explain as explained

    _put_each(explained(path))


@app.command()
@click.argument("one", type=Path, help="Run folder, ledger, or configuration (.yaml).")
@click.argument("other", type=Path, help="Run folder, ledger, or configuration (.yaml).")
def diff(one: Path, other: Path) -> None:
    """Find the first step at which two runs differ. Exit code 0 same, 1 different, 2 not comparable."""
    from andon.inspection.difference import compare, read_side

    differences = compare(read_side(one), read_side(other))
    _put_each(differences.lines)
    raise Ended(differences.result.value)


@app.command()
@click.argument("run", type=Path, help="Run folder; nothing is written into it.")
@click.option("--steps", required=True, help="Steps to compute again, as in 3:7.")
@click.option("--workers", type=int, help="Ranks on this machine; by default as in the run, at most one per core.")
@click.option("--backend", help="inline, gloo, nccl or mixed.")
def replay(run: Path, steps: str, workers: int | None, backend: str | None) -> None:
    """Compute steps of a run again and compare the bits. Exit code 0 same, 1 different, 2 not comparable."""
    from andon.inspection.replay import ReplayFailed, replay_run

    try:
        differences = replay_run(run, steps, workers, backend)
    except ReplayFailed as error:
        say(str(error))
        raise Ended(int(error.ends_with)) from None
    _put_each(differences.lines)
    raise Ended(differences.result.value)


@app.command()
@_run
@click.argument("other", type=Path, required=False, help="A second run, shown next to the first.")
@click.option("--html", type=Path, help="The file to write; by default RUN/report.html or RUN/report-OTHER.html.")
def report(run: Path, other: Path | None, html: Path | None) -> None:
    """Write an HTML page on a run, or on two side by side: curves, scores, events, differences."""
    # The default name contains the other run's, so that no report overwrites another.
    suffix = "" if other is None else f"-{other.resolve().name if other.is_dir() else other.stem}"
    page = f"report{suffix}.html" if run.is_dir() else f"{run.stem}{suffix}.html"
    target = html or (run / page if run.is_dir() else run.with_name(page))
    if target.suffix not in (".html", ".htm"):
        raise InputError.at("--html", f"{target} must end in .html or .htm, so that no file of a run is overwritten")
    paths = [run] if other is None else [run, other]
    with ThreadPoolExecutor() as threads:  # verify in other processes while this one reads the ledgers
        pending = [threads.submit(plugin_output, "verify", "--verbose", "--", str(path)) for path in paths]
        from andon.inspection.difference import compare, read_side
        from andon.inspection.report.page import Page, Verdict, load_run_view, write_page

        runs = [load_run_view(read_side(path)) for path in paths]
        verdicts = [None if (output := each.result()) is None else Verdict(*output) for each in pending]
    write_page(Page(runs, verdicts, compare(*(each.side for each in runs)) if other is not None else None), target)
    put(f"wrote {target}")


def plugin_output(name: str, *arguments: str) -> tuple[int, list[str]] | None:
    """Run another package's command in a process: its exit code and output lines, or None if it is not installed.

    If standard output is empty, as after an error, the lines are those of standard error.
    """
    if not entry_points(group=PLUGINS, name=name):
        return None
    command = module_command("andon", name, *arguments)
    process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return process.returncode, (process.stdout or process.stderr).decode(errors="backslashreplace").splitlines()


def _absent(point: EntryPoint, error: ModuleNotFoundError) -> click.Command:
    def refuse() -> None:
        raise InputError.at(f"andon {point.name}", f"{error.name} is not installed; {install_hint('judge')}")

    return click.Command(point.name, callback=refuse, help=f"(needs {error.name})", context_settings=_ANYTHING)


# A plugin whose libraries are missing is listed too; calling it names the missing library.
for _point in sorted(entry_points(group=PLUGINS), key=attrgetter("name")):
    try:
        app.add_command(_point.load(), _point.name)
    except ModuleNotFoundError as _error:
        app.add_command(_absent(_point, _error))
