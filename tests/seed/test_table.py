"""Every test (T) and every defect (V) of the seed has a test here, and its public names exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import andon

IDS = [*(f"T{n}" for n in range(1, 26)), *(f"V{n}" for n in range(1, 32))]
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
def docstrings() -> list[str]:
    """Those of all tests in this folder."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(__file__).parent.glob("test_*.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [ast.get_docstring(each) or "" for each in functions if each.name.startswith("test_")]


@pytest.mark.parametrize("name", IDS)
def test_a_test_names_each_id_of_the_seed(name: str) -> None:
    assert any(re.search(rf"\b{name}\b", text) for text in docstrings())


def test_the_names_of_the_seed_are_importable() -> None:
    """R5, R7: from `andon` itself."""
    for name in NAMES:
        assert getattr(andon, name).__name__ == name
