"""Imports point one way, between the packages and between the parts of core, as docs/architecture.md says."""

from __future__ import annotations

import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

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
LIGHT = ("andon.cli", "andon.config", "andon.data", "andon.exits", "andon.problems")
HEAVY = ("torch", "transformers", "peft", "accelerate")


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


def test_every_module_is_named_in_the_architecture() -> None:
    """Of contracts and of core: a reader who looks for a module finds its duty."""
    named = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")))
    modules = [module for module in packaged() if module.package in ("andon", "andon_contracts")]
    names = {module.name: module.path.stem for module in modules if not module.path.stem.startswith("__")}
    assert [name for name, stem in names.items() if stem not in named] == []


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
    by_name = {module.name: module for module in packaged()}
    reached: dict[str, Module] = {name: m for name, m in by_name.items() if within(name, "andon_falsify.checkers")}
    waiting = list(reached.values())
    while waiting:
        for each in imports(waiting.pop()):
            if within(each.name, "andon_falsify") and each.name not in reached:
                reached[each.name] = by_name[each.name]
                waiting.append(by_name[each.name])
    assert reached, "there are no checkers to judge"
    assert offences(list(reached.values()), "andon", "andon_contracts") == []


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
