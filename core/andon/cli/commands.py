"""The commands and their options. Each command imports what it needs when it is called."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import EntryPoint, entry_points, version
from itertools import tee
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Argument, Context, Option, Typer
from typer import Exit as Ended
from typer.core import TyperCommand

from andon.console.messages import Exit, InputError, Problem, command_line, install_hint, module_command, put, say
from andon.launch.context import bind_to_parent
from andon_contracts.liveness.process import exit_text

PLUGINS = "andon.commands"
"""Entry point group for commands of other packages: a name for a typer app or a function."""
_MOST_WORKERS = 4096
_NUMBER = re.compile(r"Input should be a valid (integer|number), .*|.* is not a valid (?:integer|float)\.")
_ANYTHING: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}

app = Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _show_version(requested: bool) -> None:
    if requested:
        put(version("andon"))
        raise Ended


@app.callback()
def andon(
    shown: Annotated[
        bool, Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    """Finds silent errors in data-parallel training: checks any loop, tests trainers, trains reproducibly."""


class _Command(TyperCommand):
    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().make_context(*args, **kwargs)
        except Exception as error:
            # By class name: some versions of typer vendor click, others import it.
            fault: Any = error
            if (plain := _NUMBER.fullmatch(str(getattr(fault, "message", "")))) is not None:
                fault.message = f"must be a {'whole ' if plain[1] == 'integer' else ''}number"
            unknown: Any = error if type(error).__name__ == "NoSuchOption" else None
            if unknown is not None and any("--set" in option.opts for option in self.params):
                from andon.config.load import meant_by

                meant = meant_by(unknown.option_name.lstrip("-").replace("-", "_"))
                if meant:
                    unknown.message += f". Use --set {meant}=VALUE" if " " not in meant else f"; {meant}"
                    unknown.possibilities = None
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # typer exits without a message
            say("interrupted")
            raise


def _listed(function: Callable[..., None], name: str = "", **settings: Any) -> Callable[..., None]:
    """Register the command; the first sentence of its docstring is its line in the list of commands."""
    first = (function.__doc__ or "").strip().partition(". ")[0].rstrip(".")
    app.command(name or function.__name__, cls=_Command, short_help=f"{first}.", **settings)(function)
    return function


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


def _config_arguments(
    config: Annotated[Path | None, Argument(help="YAML file; by default the built-in demo.")] = None,
    backend: Annotated[str | None, Option(help="auto, inline, gloo, nccl or mixed.")] = None,
    task: Annotated[
        str | None, Option(metavar="NAME", help="The task, such as regression; by default it follows from the data.")
    ] = None,
    data: Annotated[
        list[str] | None,
        Option(
            metavar="FILE[=WEIGHT]",
            help="Training rows: JSONL, CSV, TSV or Parquet. Repeat it for more files. Each row occurs WEIGHT times.",
        ),
    ] = None,
    eval_data: Annotated[str | None, Option(help="Rows to evaluate on, never trained on.")] = None,
    text_column: Annotated[str | None, Option(help="Column of the texts.")] = None,
    label_column: Annotated[str | None, Option(help="Column of the labels.")] = None,
    model: Annotated[str | None, Option(help="Hugging Face model folder or hub id of the base.")] = None,
    overrides: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override one setting, as in optimizer.lr=1e-3.")
    ] = None,
) -> ConfigArguments:
    flags = {
        "run.backend": backend,
        "task": task,
        "data.train": _train_files(data) if data else None,
        "data.eval": eval_data,
        "data.text_column": text_column,
        "data.label_column": label_column,
        "model.base": model,
    }
    return ConfigArguments(config, overrides or (), {key: value for key, value in flags.items() if value is not None})


def _configured(command: Callable[..., None]) -> Callable[..., None]:
    """Add the parameters of `_config_arguments` to `command`, which receives a `ConfigArguments` first."""
    file, *shared = inspect.signature(_config_arguments, eval_str=True).parameters.values()
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    def wrapper(**values: Any) -> None:
        command(_config_arguments(**{each.name: values.pop(each.name) for each in (file, *shared)}), **values)

    parameters = [file, *own, *shared]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {each.name: each.annotation for each in parameters}
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    return wrapper


@_listed
@_configured
def train(
    arguments: ConfigArguments,
    workers: Annotated[int | None, Option(help="Ranks on this machine.")] = None,
    resume: Annotated[str | None, Option(help="auto: continue --run-dir, or the newest unfinished run.")] = None,
    run_dir: Annotated[str | None, Option(help="Folder of the run; a new one under runs/ by default.")] = None,
    quiet: Annotated[bool, Option("--quiet", help="Print no progress and no scores.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print metrics as lines of JSON.")] = False,
    verbose: Annotated[bool, Option("--verbose", help="Print all metrics, audits and digests, too.")] = False,
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


@_listed
def init(path: Annotated[Path, Argument(help="A folder for config.yaml, or the file itself (.yaml).")]) -> None:
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
    """Fork. The child returns and runs the command; the parent waits and exits with the child's code.

    If a signal kills the child, the parent logs the signal and any sign of an out-of-memory kill, and exits with 71.
    Ctrl-C and the parent's death kill the child. If torch is loaded, the process must not fork and runs the command
    itself.
    """
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


@_listed
@_configured
def check(
    arguments: ConfigArguments,
    workers: Annotated[int | None, Option(min=1, help="Ranks on this machine.")] = None,
    show_row: Annotated[int | None, Option(help="Show this training row token by token; the first is 0.")] = None,
) -> None:
    """Check settings, data and model without training. Reports rows, steps and workers, or every mistake."""
    from andon.config.load import load_config
    from andon.integrations.trackers import require

    loaded = load_config(arguments.file, arguments.overrides, {"run.workers": workers, **arguments.flags})
    in_a_child("check")
    from andon.training.preview import describe

    require(loaded.run.report_to, loaded.model.quantize)
    for line in describe(loaded, show_row):
        put(line)


@_listed
def doctor(
    folder: Annotated[Path, Argument(help="The folder for runs.")] = Path("runs"),
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
    timeout: Annotated[float, Option(min=1, help="Time limit of each check in seconds.")] = 60,
) -> None:
    """Check whether this machine can train, and how to repair it. Exit code 0 if it can, else 1."""
    from andon.inspection.doctor import examine

    checks = []
    for each in examine(folder, timeout):
        checks.append(each)
        if not as_json:
            put(f"{each.level:<8} {each.name}: {each.found}", *([f"         -> {each.todo}"] if each.todo else []))
    can = all(each.level != "problem" for each in checks)
    if as_json:
        result = {"can_train": can, "checks": [each._asdict() for each in checks]}
        put(*json.dumps(result, indent=2).splitlines())
    else:
        put("andon train can run here" if can else "andon train cannot run here: repair each problem above")
    raise Ended(int(Exit.OK if can else Exit.CRASHED))


def watch(context: Context) -> None:
    """Run your own training script and check every update. See andon watch --help."""
    # Registered only for --help: `main` runs it without importing typer.
    from andon_contracts.watch.script import main

    raise Ended(main(context.args))


_listed(watch, context_settings={**_ANYTHING, "help_option_names": []})  # the script parses its own options


@_listed
@_configured
def plan(
    arguments: ConfigArguments,
    workers: Annotated[str | None, Option(help="Numbers of workers, as in 1,2,4; by default run.workers.")] = None,
    gpu_memory: Annotated[
        float | None, Option(metavar="GIB", help="Plan for GPUs of this size instead of this machine.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object; sizes are in bytes.")] = False,
) -> None:
    """Estimate the memory that a run needs on each device. Exit code 0 if it fits, else 2."""
    from andon.config.load import load_config
    from andon.training.choices import placed

    if gpu_memory is not None and not 0 < gpu_memory < 2**20:
        raise InputError.at("--gpu-memory", f"must be a number of GiB above 0, is {gpu_memory}")
    loaded = load_config(arguments.file, arguments.overrides, arguments.flags)
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


FinishedRun = Annotated[Path, Argument(help="Run folder.")]
Base = Annotated[
    str | None, Option("--model", metavar="PATH", help="The base model, if it was moved; its digest must match.")
]
Checkpoint = Annotated[
    str | None, Option(metavar="best|last|STEP", help="Use this checkpoint; by default the result of the run.")
]
Device = Annotated[str, Option(metavar="auto|cpu|cuda[:N]", help="auto: a GPU if torch can use one.")]
SameAsData = Annotated[Path | None, Option("--data", help="The same as DATA.")]
Output = Annotated[Path | None, Option(help="Write a .csv, .tsv, .jsonl or .parquet file instead.")]


def evaluate(
    run: FinishedRun,
    file: Annotated[Path | None, Argument(metavar="DATA", help="Rows with labels.")] = None,
    data: SameAsData = None,
    text_column: Annotated[str | None, Option(help="Column of the texts; as in the run by default.")] = None,
    label_column: Annotated[str | None, Option(help="Column of the labels; as in the run by default.")] = None,
    model: Base = None,
    checkpoint: Checkpoint = None,
    device: Device = "auto",
) -> None:
    """Score a run's model on a file; prints JSON."""
    from andon.cli.results import one_file
    from andon.config.source import require_file
    from andon.training.existing import require_run

    folder = require_run(run)
    path = one_file(file, data)
    if path is None:
        raise InputError.at("DATA", "name a file of rows with labels: andon eval RUN FILE")
    require_file(path)
    from andon.training.inference import load_run, read_labelled, scored

    rows = read_labelled(folder, path, text_column=text_column, label_column=label_column)
    trained = load_run(folder, model, checkpoint=checkpoint, device=device)
    put(*json.dumps(scored(trained, rows), indent=2).splitlines())


_listed(evaluate, "eval")


@_listed
def predict(
    run: FinishedRun,
    file: Annotated[Path | None, Argument(metavar="DATA", help="Texts: JSONL, CSV, TSV or Parquet.")] = None,
    data: SameAsData = None,
    text_column: Annotated[str | None, Option(help="Column of the texts; as in the run by default.")] = None,
    all_scores: Annotated[bool, Option("--all-scores", help="Also print the probability of every label.")] = False,
    output: Output = None,
    model: Base = None,
    checkpoint: Checkpoint = None,
    device: Device = "auto",
) -> None:
    """Label the texts of a file or the lines of standard input. Prints a JSON object for each, with its columns.

    A column with the name of a result, such as `label`, is printed as `input_label`.
    """
    from andon.cli.results import check_output, one_file, put_rows, records, texts_of
    from andon.training.existing import require_run, require_task
    from andon.training.rows import TEXT_TASKS

    folder = require_run(run, checkpoint)
    require_task(folder, TEXT_TASKS, "generate")
    path = one_file(file, data)
    check_output(output, path)
    texts = texts_of(folder, path, text_column)
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
    put_rows(records(rows, texts.columns, predictions, labels, output), output)
    if note := cut_texts_note(trained.tokenizer.truncated, trained.config):
        say(note)


@_listed
def generate(
    run: FinishedRun,
    prompt: Annotated[
        list[str] | None, Argument(help="Prompts; without them --data, or lines of standard input.")
    ] = None,
    data: Annotated[Path | None, Option(help="Prompts: JSONL, CSV, TSV or Parquet.")] = None,
    prompt_column: Annotated[
        str | None, Option(help="Column of the prompts; by default prompt, else messages.")
    ] = None,
    max_new_tokens: Annotated[int, Option(min=1, help="The most tokens of one answer.")] = 256,
    output: Output = None,
    model: Base = None,
    checkpoint: Checkpoint = None,
    device: Device = "auto",
) -> None:
    """Answer prompts by greedy decoding. Prints a JSON object for each."""
    from andon.cli.results import cell, check_output, put_rows, read_lines
    from andon.config.schema import SFT
    from andon.data.conversations import read_prompts
    from andon.data.rows import text_fault
    from andon.training.existing import require_run, require_task

    folder = require_run(run)
    require_task(folder, (SFT,), "predict")
    if prompt and data is not None:
        raise InputError.at("--data", f"{data} cannot be combined with a prompt; give one of them")
    check_output(output, data)
    faults = [fault for each in prompt or () if (fault := text_fault(each)) is not None]
    if faults:
        raise InputError([Problem("the prompt", fault) for fault in faults])
    if data is None and prompt_column is not None:
        raise InputError.at("--prompt-column", f"{prompt_column} names a column of a file; add --data")
    prompts: Sequence[Any]
    prompts = prompt or (read_lines(sys.stdin.buffer) if data is None else read_prompts(data, prompt_column))
    from andon.training.inference import answer, load_run

    trained = load_run(folder, model, checkpoint=checkpoint, device=device)
    rows = (asdict(each) for each in answer(trained, prompts, max_new_tokens))
    put_rows(({**row, "prompt": cell(row["prompt"], output)} for row in rows), output)


@_listed
def export(
    run: FinishedRun,
    target: Annotated[Path, Argument(metavar="DIR", help="A new folder.")],
    merge: Annotated[bool, Option("--merge", help="Merge the adapter into the base model.")] = False,
    dtype: Annotated[
        str | None, Option(help="float32 or bfloat16, the type of merged weights; by default as in the run.")
    ] = None,
    check: Annotated[
        str, Option(metavar="rows|full|none", help="Compare a few outputs with the run's, many, or none.")
    ] = "rows",
    model: Base = None,
    checkpoint: Checkpoint = None,
    device: Device = "auto",
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


Run = Annotated[Path, Argument(help="Run folder, or its ledger.jsonl.")]


def _put_each(lines: Iterable[str]) -> None:
    for line in lines:
        put(line)


@_listed
def show(
    run: Run,
    number: Annotated[int | None, Argument(metavar="[STEP]", help="The same as --step.")] = None,
    step: Annotated[int | None, Option(help="Show this step: rows, losses, digests, ranks.")] = None,
) -> None:
    """List the events of a run, or the rows, losses and digests of one step."""
    if number is not None and step is not None:
        raise InputError.at("--step", f"is {step}, and the argument is {number}; give one of them")
    from andon.inspection.recorded import open_recorded
    from andon.inspection.show import one_step, overview, texts_of

    step = number if step is None else step
    recorded = open_recorded(run)
    _put_each(overview(recorded) if step is None else one_step(recorded, step, texts_of(recorded.folder)))


@_listed
def explain(path: Annotated[Path, Argument(help="Bundle of a violation, its run, or the name of a clause.")]) -> None:
    """Explain a violation. What was promised, what was seen, where, and how to look further."""
    from andon.inspection.explain import explain as explained

    _put_each(explained(path))


@_listed
def diff(
    one: Annotated[Path, Argument(help="Run folder, ledger, or configuration (.yaml).")],
    other: Annotated[Path, Argument(help="Run folder, ledger, or configuration (.yaml).")],
) -> None:
    """Find the first step at which two runs differ. Exit code 0 same, 1 different, 2 not comparable."""
    from andon.inspection.difference import compare, read_side

    differences = compare(read_side(one), read_side(other))
    _put_each(differences.lines)
    raise Ended(differences.result.value)


@_listed
def replay(
    run: Annotated[Path, Argument(help="Run folder; nothing is written into it.")],
    steps: Annotated[str, Option(help="Steps to compute again, as in 3:7.")],
    workers: Annotated[
        int | None, Option(help="Ranks on this machine; by default as in the run, at most one per core.")
    ] = None,
    backend: Annotated[str | None, Option(help="inline, gloo, nccl or mixed.")] = None,
) -> None:
    """Compute steps of a run again and compare the bits. Exit code 0 same, 1 different, 2 not comparable."""
    from andon.inspection.replay import ReplayFailed, replay_run

    try:
        differences = replay_run(run, steps, workers, backend)
    except ReplayFailed as error:
        say(str(error))
        raise Ended(int(error.ends_with)) from None
    _put_each(differences.lines)
    raise Ended(differences.result.value)


@_listed
def report(
    run: Run,
    other: Annotated[Path | None, Argument(help="A second run, shown next to the first.")] = None,
    html: Annotated[
        Path | None, Option(help="The file to write; by default RUN/report.html or RUN/report-OTHER.html.")
    ] = None,
) -> None:
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


def _absent(point: EntryPoint, error: ModuleNotFoundError) -> Callable[[], None]:
    def command() -> None:
        raise InputError.at(f"andon {point.name}", f"{error.name} is not installed; {install_hint('falsify')}")

    return command


# A plugin whose libraries are missing is listed too; calling it names the missing library.
for _point in sorted(entry_points(group=PLUGINS), key=attrgetter("name")):
    try:
        _loaded = _point.load()
    except ModuleNotFoundError as _error:
        app.command(_point.name, help=f"(needs {_error.name})", context_settings=_ANYTHING)(_absent(_point, _error))
        continue
    if isinstance(_loaded, Typer):
        app.add_typer(_loaded, name=_point.name)
    else:
        # Without `short_help`, typer would cut the docstring in mid-sentence.
        _first = (_loaded.__doc__ or "").partition("\n")[0]
        app.command(_point.name, cls=getattr(_loaded, "command_class", None), short_help=_first)(_loaded)
