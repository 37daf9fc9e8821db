"""Eval, predict, generate, export: what a finished run is used for."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import count, tee
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from andon.config.schema import SFT, TOKEN_CLASSIFICATION
from andon.config.source import is_there, require_file
from andon.console.messages import command_line, put, say
from andon.console.problems import InputError, Problem, ProblemList
from andon.data.conversations import Message, read_prompts
from andon.data.formats import encoded, is_table, require_kind
from andon.data.labels import text_fault
from andon.data.readers import TEXT_COLUMNS, TextRow, Texts, read_texts
from andon.run.atomic import write_whole
from andon.run.folder import RunFolder
from andon.run.summary import labelled
from andon.training.existing import config_of, require_run, require_task
from andon.training.rows import READERS
from andon_contracts.legible import legible

if TYPE_CHECKING:
    from andon.training.inference import Predicted

_DIGITS = 9
"""Significant digits of a probability in a file: as many as tell any two of fp32 apart."""

FinishedRun = Annotated[Path, typer.Argument(help="Run folder.")]
Base = Annotated[
    str | None, typer.Option("--model", metavar="PATH", help="Where the run's base is now; checked to be the same one.")
]
Checkpoint = Annotated[
    str | None, typer.Option(metavar="best|last|STEP", help="Weights of this checkpoint; the run's result by default.")
]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda[:N]", help="auto: a GPU if torch can use one.")]


def evaluate(
    run: FinishedRun,
    file: Annotated[Path | None, typer.Argument(metavar="DATA", help="Rows with labels.")] = None,
    data: Annotated[Path | None, typer.Option(help="The same as DATA.")] = None,
    text_column: Annotated[str | None, typer.Option(help="Column of the texts; as in the run by default.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Column of the labels; as in the run by default.")] = None,
    model: Base = None,
    checkpoint: Checkpoint = None,
    device: Device = "auto",
) -> None:
    """Score a run's model on a file; prints JSON."""
    folder = require_run(run)
    given = _one_file(file, data)
    if given is None:
        raise InputError([Problem("DATA", "name a file of rows with labels: andon eval RUN FILE")])
    require_file(given)
    from andon.training.inference import evaluate_run, load_run, read_labelled

    rows = read_labelled(folder, given, text_column=text_column, label_column=label_column)
    trained = load_run(folder, model, checkpoint=checkpoint, device=device)
    scores = labelled(evaluate_run(trained, rows).as_dict(), rows.labels)
    put(*json.dumps(scores, indent=2).splitlines())


def predict(
    run: FinishedRun,
    file: Annotated[Path | None, typer.Argument(metavar="DATA", help="Texts: JSONL, CSV, TSV or Parquet.")] = None,
    data: Annotated[Path | None, typer.Option(help="The same as DATA.")] = None,
    text_column: Annotated[str | None, typer.Option(help="Column of the texts; as in the run by default.")] = None,
    all_scores: Annotated[bool, typer.Option("--all-scores", help="The probability of every label too.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write a .csv, .tsv, .jsonl or .parquet file instead.")] = None,
    model: Base = None,
    checkpoint: Checkpoint = None,
    device: Device = "auto",
) -> None:
    """Label texts of a file, or lines of standard input. Prints one JSON object each, with the columns of the file.

    A column that has the name of a result, as `label`, is printed as `input_label`.
    """
    folder = require_run(run)
    require_task(folder, READERS.keys() - {SFT}, "generate")
    given = _one_file(file, data)
    _check_output(output, given)
    found = _texts(folder, given, text_column)
    from andon.training.inference import load_run, predict

    trained = load_run(folder, model, checkpoint=checkpoint, device=device)
    rows, firsts = tee(found.rows())
    pairs = None
    if given is not None and trained.config.data.text_pair_column is not None:
        firsts, seconds = tee(firsts)  # a copy that nobody reads would hold every row
        pairs = (str(row.pair) for row in seconds)
    predictions = predict(trained, (row.text for row in firsts), pairs=pairs)
    labels = trained.labels if all_scores else None
    _put_rows(_records(rows, found.columns, predictions, labels, output), output)
    if cut := trained.tokenizer.truncated:
        say(f"note: {cut} texts were cut to {trained.config.model.max_length} tokens (model.max_length)")


def generate(
    run: FinishedRun,
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Prompts; else --data, or a line each of standard input.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Prompts: JSONL, CSV, TSV or Parquet.")] = None,
    prompt_column: Annotated[
        str | None, typer.Option(help="Column of the prompts; prompt, else messages, by default.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 256,
    output: Annotated[Path | None, typer.Option(help="Write a .csv, .tsv, .jsonl or .parquet file instead.")] = None,
    model: Base = None,
    checkpoint: Checkpoint = None,
    device: Device = "auto",
) -> None:
    """Answer prompts, with the likeliest token at each place. Prints one JSON object each."""
    folder = require_run(run)
    require_task(folder, (SFT,), "predict")
    if prompt and data is not None:
        raise InputError([Problem("--data", f"{data}, and a prompt beside it; give one of them")])
    _check_output(output, data)
    faults = [fault for each in prompt or () if (fault := text_fault(each)) is not None]
    if faults:
        raise InputError([Problem("the prompt", fault) for fault in faults])
    if data is None and prompt_column is not None:
        raise InputError([Problem("--prompt-column", f"{prompt_column}, a column of a file; give --data beside it")])
    prompts: Sequence[str | Sequence[Message]]
    prompts = prompt or (_lines(sys.stdin.buffer) if data is None else read_prompts(data, prompt_column))
    from andon.training.inference import answer, load_run

    trained = load_run(folder, model, checkpoint=checkpoint, device=device)
    rows = (asdict(each) for each in answer(trained, prompts, max_new_tokens))
    _put_rows(({**row, "prompt": _cell(row["prompt"], output)} for row in rows), output)


def _put_rows(rows: Iterable[dict[str, Any]], output: Path | None) -> None:
    if output is not None:
        counter = count()
        write_whole(output, encoded(output, (row for row, _ in zip(rows, counter, strict=False))))
        put(f"wrote {output}: {next(counter)} rows")
        return
    for row in rows:
        text = json.dumps(row, ensure_ascii=False, default=str)
        # What would act on a terminal is written as JSON itself escapes it, so that the value stays the same.
        if not put(text if legible(text) == text else json.dumps(row, default=str)):
            return


def _cell(value: object, output: Path | None) -> object:
    """`value` as `output` can hold it: in a column of a table, lists and mappings are JSON."""
    nested = isinstance(value, Mapping | list) and output is not None and is_table(output)
    return json.dumps(value, ensure_ascii=False, default=str) if nested else value


def export(
    run: FinishedRun,
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    merge: Annotated[bool, typer.Option("--merge", help="Base and adapter as one model of transformers.")] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16, of a whole model's weights; as the run had them by default."),
    ] = None,
    check: Annotated[
        str, typer.Option(metavar="rows|full|none", help="Compare a few answers with the run's, many, or none.")
    ] = "rows",
    model: Base = None,
    checkpoint: Checkpoint = None,
    device: Device = "auto",
) -> None:
    """Write a run's model for others, with its card. Stock transformers reads it."""
    folder = require_run(run)
    config = config_of(folder)
    whole = merge or config.adapter.kind == "none"
    if dtype is not None and not whole:
        raise InputError([Problem("--dtype", "is for --merge; an adapter is written in float32, as it was trained")])
    from andon.training.export import CHECKS, DTYPES, export_run, require_place, result_of
    from andon.training.inference import load_run

    chosen = dtype or ("float32" if config.adapter.kind == "none" else config.model.dtype)
    for option, value, known in (("--dtype", chosen, tuple(DTYPES)), ("--check", check, CHECKS)):
        if value not in known:
            raise InputError([Problem(option, f"{value!r} is not one of {', '.join(known)}")])
    require_place(target)
    result_of(folder, ())
    trained = load_run(folder, model, checkpoint=checkpoint, device=device)
    said = export_run(trained, target, chosen if whole else None, check)
    put(f"wrote {target}: {f'a model of transformers in {chosen}' if whole else 'an adapter of peft'}", *said)


def _one_file(file: Path | None, data: Path | None) -> Path | None:
    if file is not None and data is not None:
        raise InputError([Problem("--data", f"{data}, and {file} beside it; name one file of texts")])
    return file if file is not None else data


def _check_output(output: Path | None, data: Path | None) -> None:
    if output is None:
        return
    require_kind(output)
    if is_there(output) and not output.is_file():
        raise InputError([Problem("--output", f"{output} is there and is no file")])
    if not output.parent.is_dir():
        raise InputError([Problem("--output", f"there is no folder {output.parent}")])
    if data is not None and is_there(data) and is_there(output) and output.samefile(data):
        raise InputError([Problem("--output", f"{output} is the file that is read; name another")])


def _texts(folder: RunFolder, data: Path | None, text_column: str | None) -> Texts:
    config = config_of(folder)
    column, words = text_column or config.data.text_column, config.task == TOKEN_CLASSIFICATION
    if data is not None:
        return read_texts(data, text_column=column, text_pair_column=config.data.text_pair_column, words=words)
    if text_column is not None:
        what = f"names a column of a file, and standard input has a text a line: {_typed(folder, text_column)}"
        raise InputError([Problem("--text-column", what)])
    texts = _lines(sys.stdin.buffer)
    if _is_header(texts[0], (column,) if column else TEXT_COLUMNS):
        say(
            "warning: the first line of standard input reads like the header of a table, and was labelled as a text, as"
        )
        say(f"every line is; for a table: {_typed(folder, column)}")
    return Texts((), lambda: map(TextRow, texts))


def _typed(folder: RunFolder, column: str | None) -> str:
    named = ["--text-column", column] if column else []
    return command_line("andon", "predict", folder.path, "--data", "FILE.csv", *named)


def _is_header(line: str, columns: Sequence[str]) -> bool:
    fields = [field.strip(" \"'") for field in re.split(r"[,;\t]", line)]
    return (len(fields) > 1 and any(name in fields for name in columns)) or line.lstrip().startswith('{"')


def _records(
    rows: Iterable[TextRow],
    columns: Sequence[str],
    predictions: Iterable[Predicted],
    labels: Sequence[str] | None,
    output: Path | None,
) -> Iterator[dict[str, Any]]:
    """One record a text: the columns of its file in their order, then the prediction, which repeats no text that has a
    column. columns: of all rows of the file. labels: of the probabilities to tell; None: of the likeliest alone."""

    def rounded(value: float) -> float:
        return round(value, 6) if output is None else float(f"{value:.{_DIGITS}g}")

    for row, one in zip(rows, predictions, strict=True):
        told = one.record(labels, rounded)
        fields: Mapping[str, object] = dict.fromkeys(columns) | dict(row.fields)
        if row.named:
            repeated = ("text", "tokens") if row.named[0] == "tokens" else ("text",)
            told = {name: value for name, value in told.items() if name not in repeated}
        taken = told.keys() | {f"{key}_{name}" for key, each in told.items() if isinstance(each, dict) for name in each}
        found = {_free(name, taken | (fields.keys() - {name})): _cell(value, output) for name, value in fields.items()}
        yield found | told


def _free(name: str, taken: Collection[str]) -> str:
    return _free(f"input_{name}", taken) if name in taken else name


def _lines(lines: Iterable[bytes]) -> list[str]:
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
