"""Eval, predict, generate, export: what a finished run is used for."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from andon.config.schema import SFT, TOKEN_CLASSIFICATION
from andon.config.source import is_there, require_file
from andon.console.messages import command_line, put, say
from andon.console.problems import InputError, Problem, ProblemList
from andon.data.conversations import Message, read_prompts
from andon.data.formats import encoded, require_kind
from andon.data.labels import text_fault
from andon.data.readers import TEXT_COLUMNS, Texts, read_texts
from andon.run.atomic import write_whole
from andon.run.folder import RunFolder
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


def evaluate(
    run: FinishedRun,
    data: Annotated[Path, typer.Argument(help="Rows with labels.")],
    text_column: Annotated[str | None, typer.Option(help="Column of the texts; as in the run by default.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Column of the labels; as in the run by default.")] = None,
    model: Base = None,
) -> None:
    """Score a run's model on a file; prints JSON."""
    folder = require_run(run)
    require_file(data)
    from andon.training.inference import evaluate_run, load_run, named, read_labelled

    rows = read_labelled(folder, data, text_column=text_column, label_column=label_column)
    put(*json.dumps(named(evaluate_run(load_run(folder, model), rows), rows.labels), indent=2).splitlines())


def predict(
    run: FinishedRun,
    file: Annotated[Path | None, typer.Argument(metavar="DATA", help="Texts: JSONL, CSV, TSV or Parquet.")] = None,
    data: Annotated[Path | None, typer.Option(help="The same as DATA.")] = None,
    text_column: Annotated[str | None, typer.Option(help="Column of the texts; as in the run by default.")] = None,
    all_scores: Annotated[bool, typer.Option("--all-scores", help="The probability of every label too.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write a .csv, .tsv, .jsonl or .parquet file instead.")] = None,
    model: Base = None,
) -> None:
    """Label texts of a file, or lines of standard input. Prints one JSON object each."""
    folder = require_run(run)
    require_task(folder, READERS.keys() - {SFT}, "generate")
    given = _one_file(file, data)
    _check_output(output, given)
    found = _texts(folder, given, text_column)
    from andon.training.inference import load_run, predict

    trained = load_run(folder, model)
    labels = trained.labels if all_scores else None
    rows = _records(
        found, predict(trained, found.texts, pairs=found.pairs), labels, None if output is None else _DIGITS
    )
    _put_rows(rows, output)


def generate(
    run: FinishedRun,
    prompt: Annotated[str | None, typer.Argument(help="What is asked; else --data, or a line each.")] = None,
    data: Annotated[Path | None, typer.Option(help="Prompts: JSONL, CSV, TSV or Parquet.")] = None,
    prompt_column: Annotated[
        str | None, typer.Option(help="Column of the prompts; prompt, else messages, by default.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 256,
    output: Annotated[Path | None, typer.Option(help="Write a .csv, .tsv, .jsonl or .parquet file instead.")] = None,
    model: Base = None,
) -> None:
    """Answer prompts, with the likeliest token at each place. Prints one JSON object each."""
    folder = require_run(run)
    require_task(folder, (SFT,), "predict")
    if prompt is not None and data is not None:
        raise InputError([Problem("--data", f"{data}, and a prompt beside it; give one of them")])
    _check_output(output, data)
    if prompt is not None:
        fault = text_fault(prompt)
        if fault is not None:
            raise InputError([Problem("the prompt", fault)])
    if data is None and prompt_column is not None:
        raise InputError([Problem("--prompt-column", f"{prompt_column}, a column of a file; give --data beside it")])
    prompts: Sequence[str | Sequence[Message]]
    if prompt is not None:
        prompts = [prompt]
    else:
        prompts = _lines(sys.stdin.buffer) if data is None else read_prompts(data, prompt_column)
    from andon.training.inference import answer, load_run

    rows = (asdict(each) for each in answer(load_run(folder, model), prompts, max_new_tokens))
    _put_rows(rows, output)


def _put_rows(rows: Iterable[dict[str, Any]], output: Path | None) -> None:
    """Print rows as they come, one JSON object each; or write them, all or none."""
    if output is not None:
        whole = list(rows)
        write_whole(output, encoded(output, whole))
        put(f"wrote {output}: {len(whole)} rows")
        return
    for row in rows:
        text = json.dumps(row, ensure_ascii=False)
        # What would act on a terminal is written as JSON itself escapes it, so that the value stays the same.
        if not put(text if legible(text) == text else json.dumps(row)):
            return


def export(
    run: FinishedRun,
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    merge: Annotated[bool, typer.Option("--merge", help="Base and adapter as one model of transformers.")] = False,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16, of a whole model's weights.")] = None,
    model: Base = None,
) -> None:
    """Write a run's model for others, with its card. Stock transformers reads it."""
    folder = require_run(run)
    config = config_of(folder)
    whole = merge or config.adapter.kind == "none"
    if dtype is not None and not whole:
        raise InputError([Problem("--dtype", "is for --merge; an adapter is written in float32, as it was trained")])
    from andon.training.export import DTYPES, export_adapter_of, export_merged, require_place, result_of
    from andon.training.inference import load_run

    chosen = dtype or "float32"
    if chosen not in DTYPES:
        raise InputError([Problem("--dtype", f"{chosen!r} is not one of {', '.join(DTYPES)}")])
    require_place(target)
    result_of(folder, ())
    trained = load_run(folder, model)
    if whole:
        said = export_merged(trained, target, chosen)
        put(f"wrote {target}: a model of transformers in {chosen}", *said)
    else:
        said = export_adapter_of(trained, target)
        put(f"wrote {target}: an adapter of peft", *said)


def _one_file(file: Path | None, data: Path | None) -> Path | None:
    if file is not None and data is not None:
        raise InputError([Problem("--data", f"{data}, and {file} beside it; name one file of texts")])
    return file if file is not None else data


def _check_output(output: Path | None, data: Path | None) -> None:
    """Raise `InputError`, before anything is read, for a file that cannot be written or is the one that is read."""
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
    """What is to be labelled. Raises `InputError` with every fault of it."""
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
    return Texts(tuple(texts), None)


def _typed(folder: RunFolder, column: str | None) -> str:
    named = ["--text-column", column] if column else []
    return command_line("andon", "predict", folder.path, "--data", "FILE.csv", *named)


def _is_header(line: str, columns: Sequence[str]) -> bool:
    """Whether a line names a column of texts beside another one, or is the first of JSON Lines."""
    fields = [field.strip(" \"'") for field in re.split(r"[,;\t]", line)]
    return (len(fields) > 1 and any(name in fields for name in columns)) or line.lstrip().startswith('{"')


def _records(
    found: Texts, predictions: Iterable[Predicted], labels: Sequence[str] | None, digits: int | None
) -> Iterator[dict[str, Any]]:
    """One record a text, in order. labels: of the probabilities to tell; None: of the likeliest alone. digits:
    significant ones of a probability; None: six places."""

    def rounded(value: float) -> float:
        return round(value, 6) if digits is None else float(f"{value:.{digits}g}")

    for place, one in enumerate(predictions):
        row: dict[str, Any] = {} if found.ids is None else {"id": found.ids[place]}
        row |= one.record(labels, rounded)
        yield row if found.pairs is None else row | {"text_pair": found.pairs[place]}


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
