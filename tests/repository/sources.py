"""The project's own source as the repository tests read it: files, syntax trees, imports."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"andon_contracts": "contracts", "andon": "core", "andon_falsify": "falsify"}
"""Import package to the folder of the checkout that holds it."""

TEXT = {".py", ".md", ".toml", ".ini", ".txt", ".yaml", ".yml", ".json", ".csv", ".cfg", ".sh", ""}


@dataclass(frozen=True)
class Import:
    """One imported name. `type_only`: for type checkers. `deferred`: inside a function, so not at import time.

    `source` is what the name is taken from: of `from a import b` it is a, also where the name is a.b.
    """

    name: str
    source: str
    line: int
    type_only: bool
    deferred: bool


@dataclass(frozen=True)
class Module:
    """One Python file of the project, by the name under which it is imported (tests: by their path)."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The top-level package."""
        return self.name.partition(".")[0]

    def at(self, line: int) -> str:
        """A place that a reader can go to."""
        return f"{self.path.relative_to(ROOT)}:{line}"


def parse(path: Path, name: str) -> Module:
    """The module in the file at `path`."""
    return Module(name, path, *_parsed(path))


@cache
def _parsed(path: Path) -> tuple[str, ast.Module]:
    # Most rules ask for each file twice, by its path and by its module's name; to parse them all takes seconds.
    text = path.read_text(encoding="utf-8")
    return text, ast.parse(text, filename=str(path))


@cache
def packaged() -> tuple[Module, ...]:
    """Every module of the three packages, in the source tree."""
    found = []
    for package, folder in PACKAGES.items():
        for path in sorted((ROOT / folder / package).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found.append(parse(path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)))
    return tuple(found)


@cache
def python_files() -> tuple[Module, ...]:
    """Every Python file of the checkout, tests included."""
    return tuple(parse(path, str(path.relative_to(ROOT))) for path in files() if path.suffix == ".py")


@cache
def files() -> tuple[Path, ...]:
    """Every text file of the checkout that is not an output; hidden folders other than .ci hold outputs."""
    outputs = {"__pycache__", "dist", "build", "runs", "htmlcov"}
    found: list[Path] = []
    for folder, inside, names in os.walk(ROOT):
        top = Path(folder) == ROOT
        inside[:] = sorted(
            name
            for name in inside
            if not (name.startswith(".") and name != ".ci") and name != "__pycache__" and not (top and name in outputs)
        )
        found += [Path(folder, name) for name in sorted(names) if Path(name).suffix in TEXT and name[0] != "."]
    return tuple(found)


@cache
def imports(module: Module) -> tuple[Import, ...]:
    """What a module imports, with relative imports resolved; `from a import b` gives a.b where that is a module."""
    return tuple(_walk(module, module.tree, type_only=False, deferred=False))


def _walk(module: Module, node: ast.AST, *, type_only: bool, deferred: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, alias.name, child.lineno, type_only, deferred) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = _base(module, child)
            for alias in child.names:
                full = f"{base}.{alias.name}"
                name = full if full in _module_names() else base
                yield Import(name, base, child.lineno, type_only, deferred)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for part in child.body:
                yield from _walk(module, ast.Module([part], []), type_only=True, deferred=deferred)
            for part in child.orelse:
                yield from _walk(module, ast.Module([part], []), type_only=type_only, deferred=deferred)
        else:
            inside = deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(module, child, type_only=type_only, deferred=inside)


def _base(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.name.split(".")
    climb = node.level - (module.path.name == "__init__.py")
    above = package[: len(package) - climb]
    return ".".join([*above, node.module] if node.module else above)


@cache
def _module_names() -> frozenset[str]:
    return frozenset(module.name for module in packaged())


def within(name: str, *packages: str) -> bool:
    """Whether a dotted name is one of `packages` or lies in one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)
