"""Imports point one way: between the packages, between their folders, down to the file; and stand at its top.

Those between the parts of core are as docs/architecture.md says. What breaks a rule today is named in `ratchets`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.repository.ratchets import IN_CYCLES, TWO_WAY
from tests.repository.sources import ROOT, Import, Module, imports, packaged, within

ABOVE = {
    "andon_contracts": ("andon", "andon_falsify"),
    "andon": ("andon_falsify",),
}
BESIDE_TRAINING = ("coordinator", "pipeline", "gradients")
"""The seed's public names stand beside `training`, and one of them may use another."""
FORBIDDEN = {
    "andon.step": ("transformers", "peft", "tokenizers", "pathlib", "json", "csv", "tempfile", "shutil"),
    "andon.run": ("transformers", "peft", "tokenizers", "andon.model"),
}
"""`step` knows no text, no transformers, no files; `run` knows no model."""
LIGHT = ("andon.cli", "andon.config", "andon.data", "andon.console.exits", "andon.console.problems")
HEAVY = ("torch", "transformers", "peft", "accelerate")

SLOW = (
    "torch",
    "torch._dynamo",
    "torch._inductor",
    "torch.utils.tensorboard",
    "tensorboard",
    "wandb",
    "transformers",
    "transformers.integrations",
    "transformers.modeling_layers",
    "peft",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "triton",
    "accelerate",
    "lightning",
    "pyarrow",
    "pandas",
    "pydantic",
    "yaml",
    "jinja2",
    "rich",
    "typer",
    "hypothesis",
    "pytest",
    "xdist",
    "andon.fast.rewrites",
)
"""Libraries that take their time to be imported, or that not every installation has; and one module of ours that
defines operators of torch, for which torch loads its compiler."""

_LISTED = "`andon --help`, which lists its command, loads a third of what the command does"
WITH_ANOTHER_REASON = {
    "andon.__main__": "an interrupt while the command line is being imported ends in one line",
    "andon_falsify.cli.falsify": _LISTED,
    "andon_falsify.cli.verify": _LISTED,
}
"""Modules with one import inside a function for a reason of its own, with that reason."""


def of_core() -> list[Module]:
    """The modules of core that have a place in the layers: all but the lazy face and the entry by `python -m`."""
    return [
        module for module in packaged() if module.package == "andon" and module.name not in ("andon", "andon.__main__")
    ]


def part(name: str) -> str:
    """The first-level part of core that a module belongs to."""
    return name.split(".")[1]


def layers() -> dict[str, int]:
    """Each part of core with the height of its layer, read from docs/architecture.md; 0 is the lowest."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    line = re.search(r"^Directions inside core: `([^`]+)`", text, re.MULTILINE)
    assert line is not None, "docs/architecture.md no longer has its line `Directions inside core: `"
    heights = {}
    for height, layer in enumerate(reversed(line[1].split("->"))):
        for name in re.findall(r"\w+", layer):
            heights[name] = height
    return heights | dict.fromkeys(BESIDE_TRAINING, heights["training"])


def offences(modules: list[Module], *forbidden: str) -> list[str]:
    """The places where one of `modules` imports something of `forbidden`."""
    return [
        f"{module.at(each.line)} imports {each.name}"
        for module in modules
        for each in imports(module)
        if within(each.name, *forbidden)
    ]


@pytest.mark.parametrize("package", ABOVE)
def test_no_package_imports_one_above_it(package: str) -> None:
    """falsify -> core -> contracts, and never back."""
    assert offences([m for m in packaged() if m.package == package], *ABOVE[package]) == []


def test_every_part_of_core_has_its_place_in_the_architecture() -> None:
    """A new folder or module at the top of core is entered in docs/architecture.md before it is used."""
    unplaced = {part(module.name) for module in of_core()} - layers().keys()
    assert unplaced == set()


def test_no_part_of_core_imports_a_higher_one() -> None:
    """cli -> training -> its parts -> config and problems; also inside functions."""
    heights = layers()
    upwards = [
        f"{module.at(each.line)} imports {each.name}"
        for module in of_core()
        for each in imports(module)
        if each.name.startswith("andon.") and higher(part(each.name), part(module.name), heights)
    ]
    assert upwards == []


def higher(one: str, other: str, heights: dict[str, int]) -> bool:
    """Whether one part lies above another; parts without a place are reported by a test of their own."""
    return one in heights and other in heights and heights[one] > heights[other]


def test_the_parts_of_core_form_no_cycle() -> None:
    """Parts of one layer may use each other, in one direction."""
    graph: dict[str, set[str]] = {}
    for module in of_core():
        used = {part(each.name) for each in imports(module) if each.name.startswith("andon.")}
        graph.setdefault(part(module.name), set()).update(used - {part(module.name)})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as cycle:
        pytest.fail(f"these parts of core import each other in a ring: {' -> '.join(cycle.args[1])}")


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_part_of_core_does_not_know_what_is_not_its_business(folder: str) -> None:
    """What step and run must not know, they do not import."""
    assert offences([m for m in packaged() if within(m.name, folder)], *FORBIDDEN[folder]) == []


def test_checkers_share_no_code_with_the_accused() -> None:
    """A checker, with all of the falsifier that it imports, shares no code with the trainer or its contracts."""
    found: dict[str, Module] = {name: m for name, m in by_name().items() if within(name, "andon_falsify.checkers")}
    waiting = list(found.values())
    while waiting:
        for each in imports(waiting.pop()):
            if within(each.name, "andon_falsify") and each.name not in found:
                found[each.name] = by_name()[each.name]
                waiting.append(found[each.name])
    assert found, "there are no checkers to judge"
    assert offences(list(found.values()), "andon", "andon_contracts") == []


def at_import(module: Module) -> list[Import]:
    """What a module imports when it is itself imported."""
    return [each for each in imports(module) if not each.type_only and not each.deferred]


def test_what_the_command_line_starts_with_names_no_heavy_library() -> None:
    """torch and transformers take seconds to import, so `andon --help` and a bad config must not wait for them."""
    light = [module for module in packaged() if within(module.name, *LIGHT)]
    heavy = [
        f"{module.at(each.line)} imports {each.name} at the top: move it into the function that needs it"
        for module in light
        for each in at_import(module)
        if within(each.name, *HEAVY)
    ]
    assert heavy == []


def test_what_the_command_line_starts_with_loads_no_heavy_library() -> None:
    """The same by trying: nor does anything that they import load one."""
    names = [module.name for module in packaged() if within(module.name, *LIGHT)]
    assert "andon.cli.app" in names
    assert loaded(names, HEAVY) == []


def test_importing_andon_loads_no_optional_library() -> None:
    """`import andon` works with the base install: no extra is needed, and none is paid for."""
    optional = ("transformers", "peft", "hypothesis", "pytest", "pydantic", "typer", "rich", "jinja2")
    assert loaded(["andon", "andon_contracts"], optional) == []


def loaded(names: list[str], libraries: tuple[str, ...]) -> list[str]:
    """Which of `libraries` a new interpreter has loaded after importing `names`."""
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(*(name for name in {libraries!r} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@cache
def by_name() -> dict[str, Module]:
    """Every module of the three packages by the name under which it is imported."""
    return {module.name: module for module in packaged()}


def graph(modules: Iterable[Module]) -> dict[str, set[str]]:
    """Each module with those of ours that it imports: for type checkers and inside functions too."""
    known = {module.name: module for module in modules}
    return {
        name: {each for one in imports(module) for each in (one.name, one.source) if each in known} - {name}
        for name, module in known.items()
    }


def reached(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    """What can be come to from `start` in one step or more."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        fresh = edges[waiting.pop()] - seen
        seen |= fresh
        waiting += fresh
    return seen


def in_cycles(edges: Mapping[str, set[str]]) -> set[str]:
    """The modules that can be come back to."""
    return {name for name in edges if name in reached(name, edges)}


def folder(name: str) -> str:
    """The folder below the package that a module lies in, or the package where it lies at the top."""
    parts = name.split(".")
    below = ".".join(parts[:2])
    return below if len(parts) > 2 or _is_package(below) else parts[0]


def _is_package(name: str) -> bool:
    return name in by_name() and by_name()[name].path.name == "__init__.py"


def two_way(edges: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    """The pairs of folders of which each imports the other; what a public face loads on first use counts too."""
    pairs = {
        (folder(name), folder(other))
        for name, others in edges.items()
        for other in others
        if folder(name) != folder(other)
    }
    return {(one, other) for one, other in pairs if (other, one) in pairs and one < other}


@cache
def loads(name: str) -> frozenset[str]:
    """Which of `SLOW` are loaded when the module `name` is imported, by itself or by what it imports."""
    seen: set[str] = set()
    waiting = [name]
    found: set[str] = set()
    while waiting:
        one = waiting.pop()
        found.update(slow for slow in SLOW if within(one, slow))
        # A module is imported after the packages that it lies in.
        for each in (".".join(one.split(".")[:depth]) for depth in range(1, one.count(".") + 2)):
            if each in by_name() and each not in seen:
                seen.add(each)
                waiting += [i.name for i in imports(by_name()[each]) if not (i.deferred or i.type_only)]
    return frozenset(found)


def without_reason(module: Module) -> list[Import]:
    """The imports inside functions that load nothing slow but what is there already when the module itself is."""
    first = [each.name for each in imports(module) if not (each.deferred or each.type_only)]
    there = {slow for name in (*first, module.name.rpartition(".")[0]) for slow in loads(name)}
    return [each for each in imports(module) if each.deferred and not loads(each.name) - there]


def test_no_module_imports_itself_by_way_of_others() -> None:
    """A file in a ring can be read, tested and moved with the whole ring only. Take what both need out of it."""
    assert in_cycles(graph(packaged())) == IN_CYCLES


def test_no_two_folders_import_each_other() -> None:
    """Of two folders one is below and knows nothing of the other. Move what is used from above down."""
    assert two_way(graph(packaged())) == TWO_WAY


def test_what_is_imported_inside_a_function_is_slow_or_optional() -> None:
    """An import stands at the top of its file, where a reader looks, unless it would load a library of `SLOW`."""
    found = {
        module.name: [f"{module.at(each.line)} imports {each.name}" for each in without_reason(module)]
        for module in packaged()
        if module.name not in WITH_ANOTHER_REASON and without_reason(module)
    }
    assert found == {}


@pytest.mark.parametrize("name", WITH_ANOTHER_REASON)
def test_a_reason_of_its_own_is_needed(name: str) -> None:
    """A module that gives one has such an import, and no more than one."""
    assert len(without_reason(by_name()[name])) == 1


def written(name: str, text: str) -> Module:
    """A module that is not there."""
    return Module(name, ROOT / "core" / f"{name.replace('.', '/')}.py", text, ast.parse(text))


def test_a_cycle_would_be_seen() -> None:
    """Also one of three, of which one imports inside a function and one for a type checker."""
    ring = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert in_cycles(ring) == {"a", "b", "c"}
    lazy = written("andon.console.exits", "def f():\n    from andon.console.problems import Problem\n")
    typed = written(
        "andon.console.problems",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from andon.console.exits import Exit\n",
    )
    assert in_cycles(graph([lazy, typed])) == {lazy.name, typed.name}


def test_folders_that_import_each_other_would_be_seen() -> None:
    """By different files, and where one of the two is the top of the package, a public face too."""
    up = written("andon.run.folder", "from andon.coordinator import DataParallelCoordinator\n")
    down = written("andon.coordinator", "from andon.run.atomic import storage\n")
    storage = written("andon.run.atomic", "")
    assert two_way(graph([up, down, storage])) == {("andon", "andon.run")}
    face = written("andon", "from andon.run.atomic import storage\n")
    assert two_way(graph([face, written("andon.run.folder", "import andon\n"), storage])) == {("andon", "andon.run")}


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("def f():\n    import json\n", True),
        ("def f():\n    from andon.console.problems import Problem\n", True),
        ("import torch\ndef f():\n    import torch.distributed\n", True),
        ("from andon.step.reduce import TreeReduction\ndef f():\n    import torch\n", True),
        ("def f():\n    import torch\n", False),
        ("def f():\n    from andon.step.reduce import TreeReduction\n", False),
        ("import torch\ndef f():\n    import torch._inductor.compile_fx\n", False),
        ("import json\n", False),
    ],
)
def test_an_import_inside_a_function_without_a_reason_would_be_seen(text: str, refused: bool) -> None:
    """It is refused where it loads nothing slow, or nothing slow that is not there at the start already."""
    assert bool(without_reason(written("andon.example", text))) == refused
