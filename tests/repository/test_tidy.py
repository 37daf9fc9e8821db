"""Rules that every file keeps. Each rule names the place and the remedy, and proves on an example that it can fail."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.repository.ratchets import LONG_CLASSES
from tests.repository.sources import ROOT, Module, files, packaged, python_files

Rule = Callable[[Module], Iterable[str]]

FUNCTION_LINES = 60
CLASS_LINES = 320
FILE_LINES = 700
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
CONTRACTS = {"require", "ensure", "invariant", "snapshot"}
COLLECTIVES = re.compile(
    r"(all_gather|all_reduce|all_to_all|broadcast|reduce_scatter|gather|scatter|reduce|send|recv|isend|irecv"
    r"|batch_isend_irecv|barrier|monitored_barrier)(_object|_object_list|_into_tensor|_tensor|_single|_coalesced)?"
)
PORTS = (
    re.compile(r"(localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\]):[1-9]\d*"),
    re.compile(r"(?i)port['\"]?\s*(?:[:=]|\]\s*=|,)\s*['\"]?[1-9]\d{3,4}\b"),
)
# Written so that this file does not contain what it looks for.
MACHINE = re.compile(
    r"/wor[k]/|/far[m]/|/roo[t]/|/User[s]/|/hom[e]/[a-z]|/tm[p]/(?:bash|brief|studio)|/op[t]/(?:pypi|wheels)"
)


def long_functions(module: Module) -> Iterator[str]:
    """A function does one thing."""
    for node in functions(module.tree):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > FUNCTION_LINES:
            yield f"{module.at(node.lineno)} {node.name} has {lines} lines of at most {FUNCTION_LINES}: split it"


def long_classes(module: Module) -> Iterator[str]:
    """A class holds one thing."""
    yield from (line for name, line in _long_classes(module) if name not in LONG_CLASSES)


def _long_classes(module: Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > CLASS_LINES:
                place = f"{module.at(node.lineno)} {node.name}"
                yield f"{module.name}.{node.name}", f"{place} has {lines} lines of at most {CLASS_LINES}: split it"


def long_files(module: Module) -> Iterator[str]:
    """A file has one subject."""
    lines = module.text.count("\n")
    if lines > FILE_LINES:
        yield f"{module.at(lines)} has {lines} lines of at most {FILE_LINES}: split it"


def vague_names(module: Module) -> Iterator[str]:
    """A module is named for what it knows."""
    if VAGUE & {*module.path.with_suffix("").relative_to(ROOT).parts}:
        yield f"{module.at(1)} is named for nothing: name it for what it knows"


def icontract_elsewhere(module: Module) -> Iterator[str]:
    """Contracts are made by `andon_contracts.policy`, so that they are counted, on under -O, and raise `Violation`."""
    if module.name == "andon_contracts.policy":
        return
    for node in ast.walk(module.tree):
        imported = isinstance(node, ast.ImportFrom) and node.module == "icontract"
        used = isinstance(node, ast.Attribute) and last_name(node.value) == "icontract" and node.attr in CONTRACTS
        if imported or used:
            yield f"{module.at(getattr(node, 'lineno', 1))} uses icontract itself: use andon_contracts.policy"


def lambda_conditions(module: Module) -> Iterator[str]:
    """A condition has a name and types, so that the message and mypy can use them."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and last_name(node.func) in CONTRACTS:
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            if any(isinstance(argument, ast.Lambda) for argument in given):
                yield f"{module.at(node.lineno)} has a lambda for a condition: write a named, typed function"


def collectives_outside_agree(module: Module) -> Iterator[str]:
    """In contracts only `agree` talks to other ranks: elsewhere a collective hangs the ranks that do not reach it.

    `mesh` is its transport between ranks of one machine.
    """
    if module.package != "andon_contracts" or module.name in ("andon_contracts.agree", "andon_contracts.mesh"):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and COLLECTIVES.fullmatch(last_name(node.func)):
            yield f"{module.at(node.lineno)} calls {last_name(node.func)}: only andon_contracts.agree may"


def prints(module: Module) -> Iterator[str]:
    """Text of others acts on a terminal: there is one way to it that writes out what is invisible."""
    if module.package not in ("andon", "andon_contracts") or module.name == "andon_contracts.legible":
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{module.at(node.lineno)} prints: use andon.console.messages, or tell of andon_contracts.legible"


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def last_name(node: ast.expr) -> str:
    """`d` of the called `a.b.d`, or an empty string."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


OFFENCES: dict[Rule, tuple[str, str]] = {
    long_functions: ("andon.long", "def f():\n" + "    pass\n" * FUNCTION_LINES),
    long_classes: ("andon.long", "class C:\n" + "    x = 1\n" * CLASS_LINES),
    long_files: ("andon.long", "x = 1\n" * (FILE_LINES + 1)),
    vague_names: ("andon.utils", ""),
    icontract_elsewhere: ("andon.step.x", "@icontract.require(named)\ndef f(): ..."),
    lambda_conditions: ("andon.step.x", "@require(lambda x: x > 0)\ndef f(x): ..."),
    prints: ("andon.step.x", "print(labels)"),
    collectives_outside_agree: ("andon_contracts.judge", "dist.all_gather_object(found, mine)"),
}
"""Each rule with the name and the text of a module that breaks it."""


@pytest.mark.parametrize("rule", OFFENCES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rule(rule: Rule) -> None:
    """The source of the three packages, the tests and the tools keep each rule."""
    named = {module.path: module for module in packaged()}
    found = [line for module in python_files() for line in rule(named.get(module.path, module))]
    assert found == []


@pytest.mark.parametrize("rule", OFFENCES, ids=lambda rule: rule.__name__)
def test_the_rule_can_fail(rule: Rule) -> None:
    """A rule that finds nothing anywhere would prove nothing."""
    name, text = OFFENCES[rule]
    assert list(rule(Module(name, ROOT / f"{name.rpartition('.')[2]}.py", text, ast.parse(text)))) != []


def test_an_exception_is_needed() -> None:
    """A class that became shorter, or went, is not excepted any more."""
    assert LONG_CLASSES - {name for module in packaged() for name, _ in _long_classes(module)} == set()


def lines_matching(paths: Iterable[Path], *patterns: re.Pattern[str]) -> list[str]:
    """The places in `paths` that one of `patterns` matches, with the line."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if any(pattern.search(line) for pattern in patterns)
    ]


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    """What is tracked holds on any machine; this checkout's own folder and the home of who runs this count too."""
    here = [
        re.compile(re.escape(folder) + r"\b") for folder in {str(ROOT), str(Path.home())} if folder.count(os.sep) > 1
    ]
    assert lines_matching(files(), MACHINE, *here) == []


def test_no_port_is_fixed() -> None:
    """Two runs on one machine never meet: ports are 0 or `--standalone`, stores are files."""
    assert lines_matching([path for path in files() if path.suffix in (".py", ".ini", ".toml")], *PORTS) == []


@pytest.mark.parametrize(
    "line",
    [
        "MASTER_PORT" + '="29500"',
        'environ["MASTER_PORT"]' + ' = "29500"',
        "--master-port" + "=29500",
        "tcp://localhost" + ":29500",
    ],
)
def test_a_fixed_port_would_be_seen(line: str) -> None:
    """The forms in which a port is usually fixed are all known."""
    assert any(pattern.search(line) for pattern in PORTS)
