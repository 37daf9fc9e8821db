"""Files of labelled texts: the formats, and an error message for each fault."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.console.messages import InputError
from andon.data.origins import RowSelection
from andon.data.readers import read
from andon.data.rows import DataSet, LabelSets, Targets

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12).filter(
    lambda text: bool(text.strip())
)
LABELS = st.lists(st.sampled_from(["spam", "ham", "a, b", 'the "third"', "two\nlines"]), min_size=2, max_size=9)


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def faults(path: Path, **how: object) -> list[str]:
    with pytest.raises(InputError) as caught:
        read(DataSet, path, **how)  # type: ignore[arg-type]
    return [line.replace(f"{path.parent}{os.sep}", "") for line in str(caught.value).split("\n")]


def pairs(data: DataSet) -> list[tuple[str, str]]:
    return [(row.text, data.labels[row.label]) for row in data.rows]


@given(st.sampled_from([None, 0, 2]), st.data())
def test_all_formats_give_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, indent: int | None, data: st.DataObject
) -> None:
    labels = data.draw(LABELS.filter(lambda found: len(set(found)) > 1))
    rows = [(data.draw(WORDS), label) for label in labels]
    folder = tmp_path_factory.mktemp("formats")
    for delimiter, name in ((",", "rows.csv"), ("\t", "rows.TSV")):
        with (folder / name).open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([("text", "label"), *rows])
    lines = "\r\n".join(json.dumps({"input": text, "label": label}) for text, label in rows)
    written(folder, "rows.jsonl", lines)
    array = json.dumps([{"text": text, "label": label, "x": ["]", {}]} for text, label in rows], indent=indent)
    written(folder, "rows.json", f"\n {array}\n")
    found = [read(DataSet, folder / name) for name in ("rows.csv", "rows.TSV", "rows.jsonl", "rows.json")]
    for each in found:
        assert pairs(each) == rows
        assert each.labels == tuple(sorted(set(labels)))
        assert [row.id for row in each.rows] == list(range(len(rows)))
    assert len({each.digest for each in found}) == 1


def test_a_byte_order_mark_crlf_blank_lines_and_either_name_of_the_text_are_read(tmp_path: Path) -> None:
    table = written(tmp_path, "a.csv", b"\xef\xbb\xbftext,label\r\none,1\r\n\r\ntwo,0\r\n")
    lines = written(tmp_path, "a.json", b'\xef\xbb\xbf{"text": "one", "label": 1}\r\n\n{"input": "two", "label": 0}')
    assert pairs(read(DataSet, table)) == pairs(read(DataSet, lines)) == [("one", "1"), ("two", "0")]
    assert read(DataSet, lines).labels == ("0", "1")


def test_semicolons_between_fields_are_found(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('text;label\n"one, two";yes\nthree;no\n')
    data = read(DataSet, path)
    assert [(row.text, row.label) for row in data.rows] == [("one, two", 1), ("three", 0)]
    assert data.origins is not None
    assert data.origins.notes == [f"note: {path}: its fields are separated by ';'"]
    path.write_text('"te;xt",label\none,yes\nthree;four,no\n')
    assert [row.text for row in read(DataSet, path, text_column="te;xt").rows] == ["one", "three;four"]


def test_named_columns_are_used_and_others_are_left_alone(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", "category,text,question\nx,1,who\ny,2,what\n")
    assert pairs(read(DataSet, path, text_column="question", label_column="category")) == [("who", "x"), ("what", "y")]


def test_a_text_of_ten_megabytes_is_a_text(tmp_path: Path) -> None:
    before = csv.field_size_limit(1000)
    try:
        data = read(DataSet, written(tmp_path, "a.csv", f"text,label\n{'x' * 10**7},a\ny,b\n"))
        after = csv.field_size_limit()
    finally:
        csv.field_size_limit(before)
    assert len(data.rows[0].text) == 10**7
    assert after == 1000


@pytest.mark.parametrize("name", ["no.csv", "nope.csv", "rows.cvs", ".", "empty.csv", "header.csv", "pipe.csv"])
def test_what_is_no_file_of_rows_is_refused_with_its_path(tmp_path: Path, name: str) -> None:
    written(tmp_path, "on.csv", "text,label\n")
    written(tmp_path, "empty.csv", "")
    written(tmp_path, "header.csv", "text,label\n")
    os.mkfifo(tmp_path / "pipe.csv")
    (said,) = faults(tmp_path / name)
    expected = {
        "no.csv": "no.csv: no such file; did you mean 'on.csv'?",
        "nope.csv": "nope.csv: no such file",
        "rows.cvs": "rows.cvs: unknown kind of file '.cvs'; known are .jsonl, .json, .csv, .tsv, .parquet",
        ".": "is a folder; name a file in it",
        "empty.csv": "empty.csv: is empty",
        "header.csv": "header.csv: has no rows",
        "pipe.csv": "pipe.csv: is not a regular file",
    }[name]
    assert said.endswith(expected)


def test_each_byte_that_is_not_utf8_is_named_with_its_line_and_offset(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbftext,label\nab\xffc,x\nd\0,y\n"
    said = faults(written(tmp_path, "a.csv", content))
    assert said[0] == f"a.csv:2: not UTF-8: byte 0xff at byte {content.index(0xFF)} of the file"
    assert said[1].startswith(f"a.csv:3: a NUL byte at byte {content.index(0)} of the file")
    assert faults(written(tmp_path, "b.csv", "text,label\n".encode("utf-16"))) == ["b.csv: is UTF-16; save it as UTF-8"]


BAD_LINES = {
    '{"text": "a", "label": 0': "malformed JSON: Expecting ',' delimiter at column 25",
    '{"text": "a\\ud800", "label": 0}': "text holds a lone surrogate at character 1",
    '{"text": "a\\u0000", "label": 0}': "text holds a NUL character",
    '{"text": "", "label": 0}': "text is empty",
    '{"text": " \\t", "label": 0}': "text is only white space",
    '{"text": null, "label": 0}': "text must be a string, is null",
    '{"text": 7, "label": 0}': "text must be a string, is 7",
    '{"label": 0}': "has no column 'input' or 'text'; there are 'label'",
    '{"txet": "a", "label": 0}': "has no column 'input' or 'text'; there are 'txet', 'label'; did you mean 'txet'?",
    '{"text": "a", "input": "b", "label": 0}': "has both 'input' and 'text'",
    '{"text": "a"}': "has no column 'label'; there are 'text'",
    '{"text": "a", "label": -1}': "label -1 is negative",
    '{"text": "a", "label": 0.0}': "label 0.0 is a float",
    '{"text": "a", "label": null}': "label is null",
    '{"text": "a", "label": false}': "label False is a bool",
    '{"text": "a", "label": [0]}': "label [0] is a list",
    '{"text": "a", "label": "zero"}': "label 'zero' is of another type than 2 others, which are integers",
    '{"text": "a", "label": NaN}': "malformed JSON: NaN is not a JSON number",
    '{"text": "a", "label": 0, "label": 1}': "malformed JSON: the key 'label' is there twice",
    '{"text": "a", "label": ' + "1" * 5000 + "}": "malformed JSON: an integer of 5000 digits, and at most 400 are read",
    '{"text": ' + "[" * 200_000 + "}": "malformed JSON: nested too deeply",
    '[{"text": "a", "label": 0}]': "must be a JSON object, is [{'text': 'a', 'label': 0}]",
    '"a"': "must be a JSON object, is 'a'",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=BAD_LINES.values())
def test_each_fault_of_a_line_is_said_with_file_line_and_value(tmp_path: Path, line: str) -> None:
    good = '{"text": "good", "label": 0}', '{"text": "better", "label": 1}'
    (said,) = faults(written(tmp_path, "a.jsonl", f"{good[0]}\n\n{line}\n{good[1]}\n"))
    assert said.startswith(f"a.jsonl:3: {BAD_LINES[line]}")


BAD_ARRAYS = {
    '[{"text": "a", "label": 0}': "a.json: malformed JSON: Expecting ',' delimiter at column 27",
    "[]": "a.json: has no rows",
    '[{"text": "a",\n  label: 1}]': "a.json: malformed JSON: Expecting property name enclosed in double quotes at line "
    "2, column 3 ('label: 1}]')",
    '[{"text": "a", "label": 0},\n "b"]': "a.json row 2: must be a JSON object, is 'b'",
    '[{"text": "a", "label": 0}]\n[{"text": "b"}]': "a.json: malformed JSON: Extra data at line 2, column 1",
}


@pytest.mark.parametrize("array", BAD_ARRAYS)
def test_each_fault_of_an_array_is_said_with_its_line(tmp_path: Path, array: str) -> None:
    (said,) = faults(written(tmp_path, "a.json", array))
    assert said.startswith(BAD_ARRAYS[array])


BAD_ROWS = {
    "a": "has 1 fields, the header has 2: ['a']",
    "a,0,b": "has 3 fields, the header has 2: ['a', '0', 'b']",
    '"a"b,0': "malformed: ',' expected after '\"'",
    "a,": "label is empty",
    "a,1.0": "label 1.0 is a number with a fraction",
    "a,1e3": "label 1e3 is a number with a fraction",
}


@pytest.mark.parametrize("row", BAD_ROWS)
def test_each_fault_of_a_row_is_said_with_the_line_on_which_it_starts(tmp_path: Path, row: str) -> None:
    (said,) = faults(written(tmp_path, "a.csv", f'text,label\n"two\nlines",0\n{row}\nb,1\n'))
    assert said.startswith(f"a.csv:4: {BAD_ROWS[row]}")


SKIPS = RowSelection(skip_bad=True)
SKIPPED = {
    "a.jsonl": '{"text": "a", "label": "x"}\n{"text": "", "label": null}\n{oops\n\n{"text": "b", "label": "y"}\n'
    '{"text": "c", "label": 7}\n{"text": "d", "label": "x"}\n',
    "a.csv": 'text,label\na,x\n,x\nb,y,z\n"b",y\nc,\nd,x\n',
    "a.json": '[{"text": "a", "label": "x"}, 3, {"label": "x"}, {"text": "b", "label": "y"}, null,'
    ' {"text": "d", "label": "x"}]',
}


@pytest.mark.parametrize("name", SKIPPED)
def test_bad_rows_are_skipped_and_listed_and_the_others_are_numbered_from_0(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, name, SKIPPED[name])
    data = read(DataSet, path, selection=SKIPS)
    assert pairs(data) == [("a", "x"), ("b", "y"), ("d", "x")]
    assert data.ids == (0, 1, 2)
    assert data.origins is not None
    listed = {problem.where for problem in data.origins.skipped}
    assert len(listed) == len(data.origins.skipped) == 3
    assert not listed & {data.origins.where(id_) for id_ in data.ids}
    assert {line.split(": ")[0] for line in faults(path)} == {
        where.replace(f"{tmp_path}{os.sep}", "") for where in listed
    }
    first = read(DataSet, path, selection=RowSelection(skip_bad=True, limit=2))
    assert first.rows == data.rows[:2]
    known = read(DataSet, path, selection=SKIPS, labels=("x",))
    assert pairs(known) == [("a", "x"), ("d", "x")]
    assert known.origins is not None
    assert known.origins.where(1) == data.origins.where(2)
    assert known.origins.skipped[-1].what.startswith("label 'y' is unknown")


def test_what_leaves_no_row_or_is_wrong_with_the_file_is_refused_even_so(tmp_path: Path) -> None:
    cases = {
        '{"text": "", "label": "x"}\n{oops\n': "none of its 2 rows can be used; {path}:1: text is empty",
        '{"text": "a", "label": "z"}\n': "no row can be used; {path}:1: label 'z' is unknown",
    }
    for content, said in cases.items():
        path = written(tmp_path, "a.jsonl", content)
        with pytest.raises(InputError) as caught:
            read(DataSet, path, labels=("x", "y"), selection=SKIPS)
        assert said.format(path=path) in str(caught.value)
    for content in (b"te\xffxt,label\na,x\nb,y\n", b"words,label\na,x\n"):
        with pytest.raises(InputError, match=r"a\.csv:1: "):
            read(DataSet, written(tmp_path, "a.csv", content), selection=SKIPS)


def test_a_limit_ends_reading_before_what_follows(tmp_path: Path) -> None:
    one = written(tmp_path, "a.jsonl", '{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n{oops\n')
    two = written(tmp_path, "b.jsonl", "{oops\n")
    data = read(DataSet, one, two, selection=RowSelection(limit=2))
    assert pairs(data) == [("a", "x"), ("b", "y")]
    assert data.origins is not None
    assert data.origins.sizes == (2, 0)


BAD_TABLES = {
    'a.csv text,label\na,0\n"b,1\nc,0\nd,1\n': "a.csv:3: malformed: unexpected end of data",
    'a.tsv text\tlabel\n"a\tb"\tx\n"I went\ty\nand\tx\ncame ."\ty\nend\tx\n': "a.tsv:3: a quote opens here and "
    "closes on line 5, and the lines between look like rows",
}


@pytest.mark.parametrize("table", BAD_TABLES, ids=["an open quote", "a quote over rows"])
def test_what_is_wrong_between_rows_is_said_where_it_begins(tmp_path: Path, table: str) -> None:
    name, _, content = table.partition(" ")
    (said,) = faults(written(tmp_path, name, content))
    assert said.startswith(BAD_TABLES[table])


def test_columns_that_are_missing_doubled_or_in_doubt_are_said_once(tmp_path: Path) -> None:
    assert faults(written(tmp_path, "a.csv", "texts,lable,x\na,0,1\nb,1,1\n")) == [
        "a.csv:1: has no column 'input' or 'text'; there are 'texts', 'lable', 'x'; did you mean 'texts'?",
        "a.csv:1: has no column 'label'; there are 'texts', 'lable', 'x'; did you mean 'lable'?",
    ]
    assert faults(written(tmp_path, "b.csv", "text,text,label\na,b,0\n")) == ["b.csv:1: 2 columns are named 'text'"]
    assert len(faults(written(tmp_path, "c.csv", "text,label\na,0\n"), text_column="q", label_column="c")) == 2


def test_one_class_only_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", "text,label\na,x\nb,x\n")
    assert faults(path) == ["a.csv: all 2 rows have the label 'x'; a classifier needs two classes at least"]
    assert read(DataSet, path, labels=("w", "x")).counts() == (0, 2)


def test_labels_of_an_evaluation_file_are_those_of_training_by_name(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"text": "a", "label": "ham"}\n{"text": "b", "label": "spam"}\n')
    assert [row.label for row in read(DataSet, path, labels=("spam", "eggs", "ham")).rows] == [2, 0]
    assert faults(path, labels=("spam", "hams")) == [
        "a.jsonl:1: label 'ham' is unknown; there are 'spam', 'hams'; did you mean 'hams'?"
    ]
    numbers = written(tmp_path, "b.csv", "text,label\na,0\nb,5\n")
    assert faults(numbers, labels=("0", "1")) == ["b.csv:3: label '5' is unknown; there are '0', '1'"]


@pytest.mark.parametrize("bad", [1, 19, 20, 21, 50])
def test_at_most_twenty_problems_are_shown_and_the_rest_is_counted(tmp_path: Path, bad: int) -> None:
    rows = "".join(f"a,{10 + row}\n" for row in range(bad))
    said = faults(written(tmp_path, "a.csv", "text,label\na,0\nb,1\n" + rows), labels=("0", "1"))
    assert sum("is unknown" in line for line in said) == min(bad, 20)
    assert len(said) == min(bad, 20) + (bad > 20)
    if bad > 20:
        assert f" {bad - 20} more" in said[-1]


def test_one_fault_of_many_lines_is_told_of_three(tmp_path: Path) -> None:
    said = faults(written(tmp_path, "a.csv", "text,label\na,0\nb,1\n" + ",0\n" * 50))
    assert [line.split(" ")[0] for line in said[:3]] == ["a.csv:4:", "a.csv:5:", "a.csv:6:"]
    assert said[3:] == ["... and 47 more of the same, the last at a.csv:53"]


def test_a_line_beyond_the_limit_is_refused_without_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("andon.data.formats.LONGEST_LINE", 64)
    said = faults(written(tmp_path, "a.jsonl", '{"text": "a", "label": 0}\n' + "x" * 1000))
    assert said[-1] == "a.jsonl:2: longer than 64 bytes; nothing after it was read"


def test_parquet_is_read_like_the_others(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": ["a", "b"], "label": [10, 9]}), path)
    assert pairs(read(DataSet, path)) == [("a", "10"), ("b", "9")]
    assert read(DataSet, path).labels == ("9", "10")
    parquet.write_table(arrow.table({"text": ["a", None], "label": [0, 1]}), path)
    assert faults(path) == ["a.parquet row 2: text must be a string, is null"]
    assert faults(written(tmp_path, "b.parquet", b"no"))[0].startswith("b.parquet: is not a Parquet file")


def test_without_pyarrow_the_extra_to_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (said,) = faults(written(tmp_path, "a.parquet", b"PAR1"))
    assert "needs pyarrow; run: pip install '.[parquet]' in a checkout of andon" in said


def test_numbers_are_read_as_they_are(tmp_path: Path) -> None:
    lines = written(tmp_path, "a.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": -0.25}')
    table = written(tmp_path, "a.csv", "text,label\na,1e0\nb, -.25\n")
    assert [row.label for row in read(Targets, lines).rows] == [row.label for row in read(Targets, table).rows]
    names = written(tmp_path, "names.csv", "text,label\na,one\nb,other\n")
    assert read(Targets, lines).digest == read(Targets, table).digest != read(DataSet, names).digest


@pytest.mark.parametrize(
    ("label", "fault"),
    [
        ("NaN", "NaN is not a JSON number"),
        ("null", "label is null"),
        ('"high"', "label 'high' is a str, and a number is learned"),
        ("true", "label True is a bool, and a number is learned"),
        ("[1.0]", "label [1.0] is a list, and a number is learned"),
        ("1e300", "label 1e+300 is beyond 3e+38, and a model gives numbers of fp32"),
        (f"1{'0' * 350}", "is beyond 3e+38, and a model gives numbers of fp32"),
        ("\tnan", "label 'nan' is not finite"),
        ("\t-inf", "label '-inf' is beyond"),
        ("\t3,5", "label '3,5' is not a number"),
        ("\t1_0", "label '1_0' is not a number"),  # for Python it is one
        ("\t", "label '' is not a number"),
    ],
)
def test_what_is_no_number_is_told_with_its_line(tmp_path: Path, label: str, fault: str) -> None:
    """As JSON, or as the cell of a table if the label begins with a tab."""
    rows = [f'{{"text": "a", "label": {each}}}' for each in ("1", label, "2.5")]
    path = written(tmp_path, "a.jsonl", "\n".join(rows))
    if label.startswith("\t"):
        path = written(tmp_path, "a.tsv", f"text\tlabel\nb{label}\nc\t2.5\n")
    with pytest.raises(InputError) as caught:
        read(Targets, path)
    (line,) = str(caught.value).split("\n")
    assert line.startswith(f"{path}:2: ")
    assert fault in line


@pytest.mark.parametrize(
    ("name", "content", "task"),
    [
        ("a.jsonl", '{"text": "a", "label": 0.5}', "regression"),
        ("a.csv", "text,label\na,0.5\n", "regression"),
        ("a.jsonl", '{"text": "a", "label": ["x"]}', "multi-label"),
    ],
)
def test_what_is_no_class_names_the_task_that_takes_it(tmp_path: Path, name: str, content: str, task: str) -> None:
    assert all(f"--task {task}" in line for line in faults(written(tmp_path, name, content)))


def test_sets_of_labels_are_lists_or_strings_with_a_separator(tmp_path: Path) -> None:
    lines = '{"text": "a", "labels": ["x", "y"]}\n{"text": "b", "labels": []}\n{"text": "c", "labels": ["y"]}'
    first = read(LabelSets, written(tmp_path, "a.jsonl", lines))
    assert (first.labels, [row.label for row in first.rows]) == (("x", "y"), [(0, 1), (), (1,)])
    table = written(tmp_path, "a.csv", "text,label\na,y; x\nb,\nc,y\n")
    assert read(LabelSets, table, label_separator=";").digest == first.digest


@pytest.mark.parametrize(
    ("labels", "fault"),
    [
        ('"x;y"', "label 'x;y' is one string; write a list, or say what is between labels"),
        ("null", "label None is a NoneType, and a list of labels is learned"),
        ('["x", 3]', "label 3 is a int, and labels are strings"),
        ('["x", ""]', "label '' is empty"),
        ('["x", "x"]', "label 'x' is there twice"),
        ('["x", "z"]', "label 'z' is unknown; there are 'x', 'y'"),
    ],
)
def test_what_is_no_set_of_labels_is_told_with_its_line(tmp_path: Path, labels: str, fault: str) -> None:
    path = written(tmp_path, "a.jsonl", f'{{"text": "a", "label": ["y"]}}\n{{"text": "b", "label": {labels}}}')
    with pytest.raises(InputError) as caught:
        read(LabelSets, path, labels=("x", "y"))
    assert str(caught.value).startswith(f"{path}:2: {fault}")
    with pytest.raises(InputError, match="no row has a label"):
        read(LabelSets, written(tmp_path, "b.jsonl", '{"text": "a", "label": []}'))


def test_a_quotation_over_two_rows_of_a_tsv_joins_no_rows(tmp_path: Path) -> None:
    rows = [("plain", "x"), ('"I went home .', "y"), ("it rained", "x"), ('she left ."', "y"), ('a "b" c', "x")]
    lines = "".join(f"{text}\t{label}\n" for text, label in rows)
    path = written(tmp_path, "a.tsv", "text\tlabel\n" + lines + '"said ""so"""\tx\n')
    assert pairs(read(DataSet, path)) == [*rows, ('said "so"', "x")]


def test_quoted_fields_of_a_tsv_may_span_lines(tmp_path: Path) -> None:
    rows = [("one\ntwo", "x"), ("a\tb", "y")]
    for name, quoting in (("all.tsv", csv.QUOTE_ALL), ("few.tsv", csv.QUOTE_MINIMAL)):
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file, delimiter="\t", quoting=quoting).writerows([("text", "label"), *rows])
        assert pairs(read(DataSet, tmp_path / name)) == rows


def test_a_row_of_a_tsv_whose_fields_are_all_empty_is_refused(tmp_path: Path) -> None:
    for name, comma in (("a.tsv", "\t"), ("a.csv", ",")):
        path = written(tmp_path, name, f"text{comma}label\none{comma}x\n{comma}\n\ntwo{comma}y\n")
        found, hint = faults(path, selection=RowSelection(option="--skip")), "is empty; to skip such rows: --skip"
        assert found == [f"{name}:3: text {hint}", f"{name}:3: label {hint}"]
