"""Rules that ruff and import-linter cannot express. Directions of imports are contracts in pyproject.toml."""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.sources import PACKAGES, ROOT, text_files
from tests.support.messages import SNAPSHOT, snapshot

PORTS = (
    re.compile(r"(localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\]):[1-9]\d*"),
    re.compile(r"(?i)port['\"]?\s*(?:[:=]|\]\s*=|,)\s*['\"]?[1-9]\d{3,4}\b"),
)
# Written so that this file does not contain what it looks for.
MACHINE = re.compile(
    r"/wor[k]/|/far[m]/|/roo[t]/|/User[s]/|/hom[e]/[a-z]|/tm[p]/(?:bash|brief|studio)|/op[t]/(?:pypi|wheels)"
)
LIGHT = ("andon", "andon_contracts", "andon.cli.app", "andon.config.load", "andon.config.load", "andon.run.summary")
LIGHT += ("andon.data.readers", "andon.data.shell", "andon.data.tokens", "andon.run.ledger", "andon.run.summary")
HEAVY = ("torch", "transformers", "tokenizers", "peft", "accelerate", "numpy", "pyarrow", "hypothesis", "pytest")
EXTRAS = ("pydantic", "click", "rich", "jinja2", *HEAVY)


@pytest.mark.parametrize(("names", "libraries"), [(LIGHT[:2], EXTRAS), (LIGHT, HEAVY)])
def test_what_the_command_line_starts_with_loads_no_heavy_library(
    names: tuple[str, ...], libraries: tuple[str, ...]
) -> None:
    """`import andon` needs the base install alone, and `andon --help` does not wait seconds for torch."""
    loading = f"import sys; [__import__(name) for name in {names!r}]"
    program = f"{loading}; print(*(name for name in {libraries!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_change_of_words_is_seen_in_review() -> None:
    was, now = SNAPSHOT.read_text(encoding="utf-8").splitlines(), snapshot().splitlines()
    changed = "\n".join(difflib.unified_diff(was, now, SNAPSHOT.name, "the sources", n=0, lineterm=""))
    if changed:
        pytest.fail(f"{changed}\nIf these texts are meant: python -m tests.support.messages", pytrace=False)


def matching(paths: list[Path], *patterns: re.Pattern[str]) -> list[str]:
    """The places in `paths` that match a pattern."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if any(pattern.search(line) for pattern in patterns)
    ]


def test_no_file_names_a_path_of_one_machine() -> None:
    folders = {str(ROOT), str(Path.home())}
    here = [re.compile(re.escape(folder) + r"\b") for folder in folders if folder.count(os.sep) > 1]
    assert matching(text_files(), MACHINE, *here) == []


def test_no_port_is_fixed() -> None:
    """Two runs on one machine must not meet: ports are 0 or `--standalone`, stores are files."""
    assert matching([path for path in text_files() if path.suffix in (".py", ".ini", ".toml")], *PORTS) == []
    for fixed in ("MASTER_PORT" + '="29500"', "--master-port" + "=29500", "tcp://localhost" + ":29500"):
        assert any(pattern.search(fixed) for pattern in PORTS), fixed


SHIPPED = [path for package, folder in PACKAGES.items() for path in sorted((ROOT / folder / package).rglob("*.py"))]


def trusting(text: str) -> list[str]:
    """The calls in `text` that load by an `Auto...` class without `trust_remote_code=False`."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    loads = [each for each in calls if re.match(r"(?is)auto.*\.from_(pretrained|config)$", ast.unparse(each.func))]
    return [ast.unparse(each) for each in loads if "trust_remote_code=False" not in map(ast.unparse, each.keywords)]


def test_no_folder_of_a_model_runs_code() -> None:
    """SECURITY.md promises it. Without `trust_remote_code=False` transformers asks, and a yes runs the code."""
    assert [call for path in SHIPPED for call in trusting(path.read_text(encoding="utf-8"))] == []
    for text in ("AutoModel.from_pretrained(x)", "auto.from_config(x, trust_remote_code=wanted)"):
        assert trusting(text) == [text]


def test_every_python_process_is_started_in_one_way() -> None:
    """`module_command` keeps the current folder off the path, so no file there is imported by a rank."""
    found = {path for path in SHIPPED if re.search(r"[\[(]\s*sys\.executable", path.read_text(encoding="utf-8"))}
    assert found == {ROOT / "core/andon/console/messages.py"}


def test_what_benchmarks_import_of_ours_exists() -> None:
    """mypy does not check benchmarks, so this test finds imports of names that have moved."""
    lost = []
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            package = (getattr(node, "module", None) or "").partition(".")[0]
            if isinstance(node, ast.ImportFrom) and node.module and package in (*PACKAGES, "falsify", "benchmarks"):
                place = ROOT / PACKAGES.get(package, "") / node.module.replace(".", "/")
                file = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
                text = file.read_text(encoding="utf-8") if file.is_file() else ""
                inside = {each.stem for each in place.glob("*")}
                names = [each.name for each in node.names if each.name not in inside]
                lost += [f"{path}: {node.module}.{name}" for name in names if not re.search(rf"\b{name}\b", text)]
    assert lost == []
