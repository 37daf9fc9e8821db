"""YAML as plain values with lines, from a document that may mean harm."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.config.load import MOST_BYTES, dump, parse
from andon.console.messages import InputError, ProblemList

SCALARS = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def read(text: str) -> Any:
    problems = ProblemList()
    value, _ = parse(text, "x.yaml", problems)
    assert not problems
    return value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((number, 0.001) for number in ("1e-3", "1E-3", "1.e-3", ".001", "+1e-3")),  # 1e-3 is a string in YAML 1.1
        ("1.5E+2", 150.0),
        ("-.inf", -math.inf),
        ("010", 10),
        ("0o10", 8),
        ("0x10", 16),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("no", "no"),
        ("2026-01-01", "2026-01-01"),
        ("True", True),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("!!str 1", "1"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = read(text)
    assert found == value
    assert type(found) is type(value)
    assert math.isnan(read(".NaN"))


@given(VALUES)
def test_what_is_dumped_is_parsed_to_the_same(value: object) -> None:
    text = dump({"key": value})
    found = read(text)["key"]
    assert found == value
    assert repr(found) == repr(value)
    assert read(dump([value], flow=True)) == [value]


def test_each_key_and_item_has_its_line() -> None:
    _, lines = parse("a: 1\nb:\n  c: 2\n  d:\n    - x\n    - y\n", "x.yaml", ProblemList())
    own = {"a": 1, "b": 2, "bc": 3, "bd": 4, "bd0": 5, "bd1": 6}
    assert lines == {tuple(path): line for path, line in own.items()}


BOMB = (
    "a: &a ["
    + "x, " * 9
    + "x]\n"
    + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
        for old, new in zip("abcdefghijk", "bcdefghijkl", strict=True)
    )
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "holds more than 10000 values, aliases expanded"),
        ("a: &a [*a]", "is nested deeper than 32 levels"),
        ("a: &a {b: *a}", "is nested deeper than 32 levels"),
        ("[" * 1_000, "is nested deeper than 32 levels"),
        ("x" * (MOST_BYTES + 1), "is longer than"),
        ("a: 1\n---\nb: 2", "malformed YAML"),
        ("a: *nowhere", "malformed YAML"),
        ("a: \x01", "malformed YAML"),
    ],
)
def test_a_document_that_eats_memory_or_is_none_is_refused(text: str, said: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as caught:
            parse(text, "x.yaml", ProblemList())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert said in str(caught.value)
    assert peak < 200 * MOST_BYTES


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3", "x.yaml:3 a: is there already, on line 1"),
        ("a: {b: 1, b: 2}", "x.yaml:1 a.b: is there already, on line 1"),
        ("a: !!python/object/apply:os.system [x]", "x.yaml:1 a: the tag !python/object/apply:os.system is not supp"),
        ("a: !thing {}", "x.yaml:1 a: the tag !!thing is not supported"),
        ("a: !!int x", "x.yaml:1 a: 'x' is not a valid int"),
        ("a: !!int [1]", "x.yaml:1 a: the tag !int is not supported"),
        ("a: !!bool 3", "x.yaml:1 a: '3' is not a valid bool"),
        ("? [a]\n: 1", "x.yaml:1: a key must be a word"),
        ("a: " + "1" * 500, "x.yaml:1 a: too long a number ("),
    ],
)
def test_each_fault_of_form_is_noted_at_its_line(text: str, said: str) -> None:
    """Reading goes on, so that the faults after it are found too."""
    problems = ProblemList()
    parse(text, "x.yaml", problems)
    with pytest.raises(InputError) as caught:
        problems.raise_if_any()
    assert str(caught.value).startswith(said)
    assert len(caught.value.problems) == 1
