"""docs/seed.md leads from every row of the seed to code and tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import andon

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.compile(r"^\| ([RNTV]\d+[abc]?) \| ([^|]*) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)
IDS = [
    *(f"R{n}" for n in range(1, 25)),
    *(f"R25{part}" for part in "abc"),
    *(f"R{n}" for n in range(26, 29)),
    *(f"N{n}" for n in range(1, 13)),
    *(f"T{n}" for n in range(1, 26)),
    *(f"V{n}" for n in range(1, 32)),
]
NAMES = (
    "DataParallelCoordinator",
    "ClassifyPipeline",
    "ClassifyConfig",
    "BatchResult",
    "SafetySample",
    "shard_samples",
    "average_gradients",
    "has_non_finite",
)


def table() -> dict[str, tuple[str, ...]]:
    """The rows of docs/seed.md by id."""
    text = (ROOT / "docs" / "seed.md").read_text(encoding="utf-8")
    rows = ROWS.findall(text)
    found = {row[0]: tuple(row[1:]) for row in rows}
    assert len(found) == len(rows), "an id has two rows"
    return found


def all_tests() -> dict[str, str]:
    """Every test of this folder with its docstring."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name] = ast.get_docstring(node) or ""
    return found


def test_every_row_of_the_seed_has_its_row() -> None:
    """R1 to R28, N1 to N12, T1 to T25, V1 to V31: each once, and no others."""
    assert list(table()) == IDS


@pytest.mark.parametrize("row", IDS)
def test_a_row_leads_to_code_and_tests_that_exist(row: str) -> None:
    """File and tests are there; the docstrings of tests name the V or T row that they test."""
    _, code, tests, _ = table()[row]
    files = re.findall(r"`([^`]+)`", code)
    names = re.findall(r"`(test_\w+)`", tests)
    assert files
    assert names
    for file in files:
        assert (ROOT / file).is_file(), file
    docstrings = all_tests()
    for name in names:
        assert name in docstrings, name
        if row[0] in "TV":
            assert re.search(rf"\b{row}\b", docstrings[name]), f"{name} does not say that it tests {row}"


def test_every_test_of_a_violation_is_in_the_table() -> None:
    """No test of V1 to V31 is forgotten in the table."""
    named = {name for row in table().values() for name in re.findall(r"test_\w+", row[2])}
    assert {name for name in all_tests() if re.match(r"test_[vt]\d\d_", name)} - named == {
        "test_t21_the_number_of_trainable_parameters"
    }


def test_tests_named_in_the_text_exist() -> None:
    """The prose names tests too."""
    text = (ROOT / "docs" / "seed.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(test_\w+)`", text)) <= all_tests().keys()


def test_the_names_of_the_seed_are_importable() -> None:
    """R5, R7: from `andon` itself."""
    for name in NAMES:
        assert getattr(andon, name).__name__ == name
