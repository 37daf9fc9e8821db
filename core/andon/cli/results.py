"""Input and output of `andon predict` and `andon generate`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from andon.config.schema import TOKEN_CLASSIFICATION
from andon.config.source import is_there
from andon.console.messages import InputError, Problem, ProblemList, command_line, put, say
from andon.data.formats import encoded, is_table, require_kind
from andon.data.origins import ALL_ROWS, RowSelection
from andon.data.readers import TEXT_COLUMNS, TextRow, Texts, read_texts
from andon.data.rows import text_fault
from andon.run.atomic import write_whole
from andon.run.folder import RunFolder
from andon.training.existing import config_of
from andon.training.rows import selection_of
from andon_contracts.legible import legible

if TYPE_CHECKING:
    from andon.training.inference import Predicted

_DIGITS = 9  # significant digits of a probability in a file, which identify any fp32 value


def put_rows(rows: Iterable[dict[str, Any]], output: Path | None) -> None:
    if output is not None:
        counter = count()
        write_whole(output, encoded(output, (row for row, _ in zip(rows, counter, strict=False))))
        put(f"wrote {output}: {next(counter)} rows")
        return
    for row in rows:
        text = json.dumps(row, ensure_ascii=False, default=str)
        # Terminal control characters are escaped as JSON, which keeps the value.
        if not put(text if legible(text) == text else json.dumps(row, default=str)):
            return


def cell(value: object, output: Path | None) -> object:
    """`value` for a cell of `output`: in a table, lists and mappings become JSON text."""
    nested = isinstance(value, Mapping | list) and output is not None and is_table(output)
    return json.dumps(value, ensure_ascii=False, default=str) if nested else value


def one_file(file: Path | None, data: Path | None) -> Path | None:
    if file is not None and data is not None:
        raise InputError.at("--data", f"{data} and {file} are both named; name one file")
    return file if file is not None else data


def check_output(output: Path | None, data: Path | None) -> None:
    if output is None:
        return
    require_kind(output)
    if is_there(output) and not output.is_file():
        raise InputError.at("--output", f"{output} exists and is not a regular file")
    if not output.parent.is_dir():
        raise InputError.at("--output", f"folder {output.parent} does not exist")
    if data is not None and is_there(data) and is_there(output) and output.samefile(data):
        raise InputError.at("--output", f"{output} is the file that is read; name another")


def texts_of(folder: RunFolder, data: Path | None, text_column: str | None, bad_rows: str) -> Texts:
    config = config_of(folder)
    selection = selection_of(config.data, train=False, bad_rows=bad_rows)
    column, words = text_column or config.data.text_column, config.task == TOKEN_CLASSIFICATION
    if data is not None and data.suffix.lower() == ".txt":
        what = "unknown kind of file '.txt'; if it has one text per line, use:"
        raise InputError.at(data, f"{what} {command_line('andon', 'predict', folder.path)} < {data}")
    if data is not None:
        pair = config.data.text_pair_column
        return read_texts(data, text_column=column, text_pair_column=pair, words=words, selection=selection)
    if text_column is not None:
        what = f"is for files, and standard input has one text per line; for a file: {_typed(folder, text_column)}"
        raise InputError.at("--text-column", what)
    texts, skipped = read_lines(sys.stdin.buffer, selection)
    first = texts[0]
    fields = [field.strip(" \"'") for field in re.split(r"[,;\t]", first)]
    names = any(name in fields for name in ((column,) if column else TEXT_COLUMNS))
    if (len(fields) > 1 and names) or first.lstrip().startswith('{"'):
        header = "the first line of standard input reads like the header of a table, but each line is one text"
        say(f"warning: {header}; for a table use: {_typed(folder, column)}")
    return Texts((), lambda: map(TextRow, texts), skipped)


def _typed(folder: RunFolder, column: str | None) -> str:
    named = ["--text-column", column] if column else []
    return command_line("andon", "predict", folder.path, "--data", "FILE.csv", *named)


def records(
    rows: Iterable[TextRow],
    columns: Sequence[str],
    predictions: Iterable[Predicted],
    labels: Sequence[str] | None,
    output: Path | None,
    label_column: str,
) -> Iterator[dict[str, Any]]:
    """Each row's columns, then its prediction without a text that has a column; clashing columns become `input_NAME`.
    columns: of the whole file. labels: whose probabilities to add; None: as `Predicted.record` defines it.
    label_column: of the classes that the rows have; `correct` then compares them with the predicted ones."""

    def rounded(value: float) -> float:
        return round(value, 6) if output is None else float(f"{value:.{_DIGITS}g}")

    for row, predicted in zip(rows, predictions, strict=True):
        new = predicted.record(labels, rounded)
        fields: Mapping[str, object] = dict.fromkeys(columns) | dict(row.fields)
        if row.named:
            repeated = ("text", "tokens") if row.named[0] == "tokens" else ("text",)
            new = {name: value for name, value in new.items() if name not in repeated}
        if "label" in new and label_column in fields:
            right = fields[label_column]
            new["correct"] = None if right in (None, "") else str(right) == new["label"]
        used = new.keys() | {f"{key}_{name}" for key, each in new.items() if isinstance(each, dict) for name in each}
        own = {_free(name, used | (fields.keys() - {name})): cell(value, output) for name, value in fields.items()}
        yield own | new


def _free(name: str, used: Collection[str]) -> str:
    return _free(f"input_{name}", used) if name in used else name


def read_lines(lines: Iterable[bytes], selection: RowSelection = ALL_ROWS) -> tuple[list[str], Sequence[Problem]]:
    """Decode `lines` of standard input: one text a line, without line ends; and the faults of skipped lines.

    Raises `InputError` with every fault at stdin:LINE (not UTF-8, empty, a NUL character), or if there are no lines.
    """
    problems = ProblemList(skips=selection.skip_bad)
    texts: list[str] = []
    for number, line in enumerate(lines, start=1):
        where = f"stdin:{number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            byte = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
            problems.add_row(where, f"is not UTF-8: {byte}{selection.hint}")
            continue
        fault = text_fault(text)
        if fault is None:
            texts.append(text)
        else:
            problems.add_row(where, f"the text {fault}{selection.hint}")
    if not texts and not problems:
        problems.add("stdin", "holds no texts; write one per line")
    problems.raise_if_any()
    return texts, problems.skipped
