"""What is built, pinned and documented is one and the same thing."""

from __future__ import annotations

import configparser
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.repository.sources import PACKAGES, ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_dependency_is_pinned_to_one_version_within_its_range() -> None:
    """What a user may install has been tested in one version, and constraints.txt says in which."""
    project = PROJECT["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values(), PROJECT["build-system"]["requires"]]
    lists += [[each for each in group if isinstance(each, str)] for group in PROJECT["dependency-groups"].values()]
    asked = {Requirement(text) for requirements in lists for text in requirements}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))  # exact versions, nothing else
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    others = [each for each in asked if each.name != project["name"]]
    assert [str(each) for each in others if canonicalize_name(each.name) not in versions] == []
    wrong = [str(each) for each in others if not each.specifier.contains(versions[canonicalize_name(each.name)])]
    assert wrong == []
    assert versions["torch"] == "2.13.0"


JUDGE = ["andon.config.load", "andon_falsify.claims.ledgers", "andon_falsify.report.page"]
JUDGE += [f"andon_falsify.cli.{name}" for name in ("falsify", "verify", "campaign")]
JUDGE += ["andon_falsify.campaign.script_bench", "andon_falsify.compliance.plugin", "andon_falsify.loops.task"]


def brought(texts: list[str]) -> set[str]:
    """The distributions of the requirements `texts`, and all that they require, as they are installed."""
    found, left = set(), [Requirement(text) for text in texts]
    while left:
        each = left.pop()
        if canonicalize_name(each.name) not in found and (not each.marker or each.marker.evaluate({"extra": ""})):
            found.add(canonicalize_name(each.name))
            left += map(Requirement, importlib.metadata.requires(each.name) or [])
    return found


def test_the_judge_needs_what_its_extra_brings_and_nothing_else() -> None:
    """At most 14 packages beside torch's. The trainer's libraries are not among them."""
    extra = PROJECT["project"]["optional-dependencies"]["judge"]
    judge = brought([*PROJECT["project"]["dependencies"], *extra])
    assert len(judge - brought(["torch"])) <= 14
    modules = importlib.metadata.packages_distributions().items()
    absent = [name for name, of in modules if {"andon", *judge}.isdisjoint(map(canonicalize_name, of))]
    used = [{Requirement(text).name for text in extra} & {*map(canonicalize_name, of)} and name for name, of in modules]
    program = f"import sys; sys.modules.update(dict.fromkeys({absent})); [__import__(name) for name in {JUDGE}]"
    program += f"; print(*{{*filter(str.isalpha, filter(None, {used}))}} - {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_python_versions_agree() -> None:
    floor = PROJECT["project"]["requires-python"].removeprefix(">=")
    listed = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert min(listed, key=Version) == floor
    assert PROJECT["tool"]["mypy"]["python_version"] == floor
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + floor.replace(".", "")
    assert sys.version_info[:2] >= tuple(map(int, floor.split(".")))


def test_tox_takes_its_versions_from_the_project() -> None:
    """tox.ini names groups and extras of pyproject.toml, and no environment installs past constraints.txt."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    base = tox["testenv"]
    assert base["constraints"] == "{tox_root}/constraints.txt"
    assert set(base["extras"].split()) <= PROJECT["project"]["optional-dependencies"].keys()
    groups = {group for section in tox.values() for group in section.get("dependency_groups", "").split()}
    assert groups <= PROJECT["dependency-groups"].keys()
    assert [name for name, section in tox.items() if "deps" in section] == []


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def imported_from(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (folder,) = spec.submodule_search_locations
    return Path(folder)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_tested_files_are_those_of_the_source_tree(package: str) -> None:
    """A stale wheel, a file that the wheel lacks or one that only the wheel has: none of them is what was tested."""
    source = contents(ROOT / PACKAGES[package] / package)
    assert source.keys() >= {"__init__.py", "py.typed"}
    assert contents(imported_from(package)) == source


@pytest.mark.skipif("TOX_ENV_NAME" not in os.environ, reason="not under tox: a checkout may be tested in place")
@pytest.mark.parametrize("package", PACKAGES)
def test_tox_tests_the_built_wheel(package: str) -> None:
    assert imported_from(package) != ROOT / PACKAGES[package] / package
    assert imported_from(package).is_relative_to(sys.prefix)


def test_the_readme_gives_one_line_to_run_and_one_line_to_test() -> None:
    """The first line installs and runs the main job; the second is the test command, the very line of .ci/run."""
    lines = [line.strip() for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()]
    main, test = [line for line in lines if line.startswith("python3 -m venv ")][:2]
    assert main.endswith("bin/andon train")
    assert "-c constraints.txt" in main
    assert test.endswith("bin/tox")
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1] == test


def test_the_change_log_and_the_citation_have_the_version() -> None:
    version, license_ = PROJECT["project"]["version"], PROJECT["project"]["license"]
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["version"], cited["license"]) == (version, license_)
