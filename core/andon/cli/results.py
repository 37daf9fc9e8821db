"""What `andon predict` and `andon generate` read and write."""

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
from andon.console.messages import command_line, put, say
from andon.console.problems import InputError, Problem, ProblemList
from andon.data.formats import encoded, is_table, require_kind
from andon.data.labels import text_fault
from andon.data.readers import TEXT_COLUMNS, TextRow, Texts, read_texts
from andon.run.atomic import write_whole
from andon.run.folder import RunFolder
from andon.training.existing import config_of
from andon_contracts.legible import legible

if TYPE_CHECKING:
    from andon.training.inference import Predicted

_DIGITS = 9  # significant digits of a probability in a file: as many as tell any two of fp32 apart


def put_rows(rows: Iterable[dict[str, Any]], output: Path | None) -> None:
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


def cell(value: object, output: Path | None) -> object:
    """`value` as `output` can hold it: in a column of a table, lists and mappings are JSON."""
    nested = isinstance(value, Mapping | list) and output is not None and is_table(output)
    return json.dumps(value, ensure_ascii=False, default=str) if nested else value


def one_file(file: Path | None, data: Path | None) -> Path | None:
    if file is not None and data is not None:
        raise InputError([Problem("--data", f"{data}, and {file} beside it; name one file of texts")])
    return file if file is not None else data


def check_output(output: Path | None, data: Path | None) -> None:
    if output is None:
        return
    require_kind(output)
    if is_there(output) and not output.is_file():
        raise InputError([Problem("--output", f"{output} is there and is no file")])
    if not output.parent.is_dir():
        raise InputError([Problem("--output", f"there is no folder {output.parent}")])
    if data is not None and is_there(data) and is_there(output) and output.samefile(data):
        raise InputError([Problem("--output", f"{output} is the file that is read; name another")])


def texts_of(folder: RunFolder, data: Path | None, text_column: str | None) -> Texts:
    config = config_of(folder)
    column, words = text_column or config.data.text_column, config.task == TOKEN_CLASSIFICATION
    if data is not None:
        return read_texts(data, text_column=column, text_pair_column=config.data.text_pair_column, words=words)
    if text_column is not None:
        what = f"names a column of a file, and standard input has a text a line: {_typed(folder, text_column)}"
        raise InputError([Problem("--text-column", what)])
    texts = read_lines(sys.stdin.buffer)
    first = texts[0]
    fields = [field.strip(" \"'") for field in re.split(r"[,;\t]", first)]
    names = any(name in fields for name in ((column,) if column else TEXT_COLUMNS))
    if (len(fields) > 1 and names) or first.lstrip().startswith('{"'):
        say(
            "warning: the first line of standard input reads like the header of a table, and was labelled as a text, as"
        )
        say(f"every line is; for a table: {_typed(folder, column)}")
    return Texts((), lambda: map(TextRow, texts))


def _typed(folder: RunFolder, column: str | None) -> str:
    named = ["--text-column", column] if column else []
    return command_line("andon", "predict", folder.path, "--data", "FILE.csv", *named)


def records(
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
        found = {_free(name, taken | (fields.keys() - {name})): cell(value, output) for name, value in fields.items()}
        yield found | told


def _free(name: str, taken: Collection[str]) -> str:
    return _free(f"input_{name}", taken) if name in taken else name


def read_lines(lines: Iterable[bytes]) -> list[str]:
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
