"""docs/seed.md leads from every row of the seed to code and tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
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


@cache
def table() -> dict[str, tuple[str, ...]]:
    text = (ROOT / "docs" / "seed.md").read_text(encoding="utf-8")
    rows = ROWS.findall(text)
    found = {row[0]: tuple(row[1:]) for row in rows}
    assert len(found) == len(rows), "an id has two rows"
    return found


@cache
def all_tests() -> dict[str, str]:
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
    files, names, docstrings = re.findall(r"`([^`]+)`", code), re.findall(r"`(test_\w+)`", tests), all_tests()
    assert files
    assert names
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert [name for name in names if name not in docstrings] == []
    if row[0] in "TV":
        assert [name for name in names if not re.search(rf"\b{row}\b", docstrings[name])] == []


def test_tests_of_the_seed_and_of_the_text_are_the_same() -> None:
    """No test of an id is missing from the page, and no test that the page names is gone."""
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "seed.md").read_text(encoding="utf-8")))
    assert named <= all_tests().keys()
    assert {name for name in all_tests() if re.match(r"test_[vt]\d\d_", name)} <= named


def test_the_names_of_the_seed_are_importable() -> None:
    """R5, R7: from `andon` itself."""
    for name in NAMES:
        assert getattr(andon, name).__name__ == name
