"""What benchmarks and nemeses import from us is there: no type checker reads all of them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository.sources import ROOT

OURS = ("andon", "andon_contracts", "andon_falsify")
FOLDERS = ("benchmarks", "falsify/nemesis")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def named(path: Path) -> Iterator[tuple[str, str]]:
    """Each (module of ours, name) that `path` imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in OURS:
            yield from ((node.module, each.name) for each in node.names)


def is_there(module: str, name: str) -> bool:
    """Whether the name is in the module, or a module in the package."""
    try:
        found = importlib.import_module(module)
        return hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}") is not None
    except ImportError:
        return False


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_every_name_is_there(path: Path) -> None:
    """A module that was moved, or a class that was renamed, is found here and not when somebody measures."""
    assert [f"{module}.{name}" for module, name in sorted(set(named(path))) if not is_there(module, name)] == []


def test_a_name_that_is_not_there_is_seen() -> None:
    """The test above would see one."""
    assert not is_there("andon_falsify.claims.ledgers", "Run")
    assert not is_there("andon.nowhere", "x")
    assert is_there("andon_falsify.claims", "ledgers")
