"""What the docs refer to exists: links, headings, commands with their options, benchmark programs.

The deep tier builds the site and runs the commands.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from andon.cli.commands import app
from andon.console.messages import Exit
from tests.repository.sources import ROOT
from tests.repository.test_budget import BUDGET

PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s]*)\)")
CODE = re.compile(r"`([^`\n]+)`|^(?:    |\$ )(.+)$|^((?:andon|torchrun|python) .+)$", re.MULTILINE)
INVOKED = re.compile(r"(?:^|[\s/;(])andon ([a-z][a-z-]*)((?: [^|;&`]*)?)")


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    lost = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


def test_every_page_is_in_the_navigation() -> None:
    """Sphinx would warn of a page that no `toctree` names; the deep tier builds the site."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    named = {line.rpartition("<")[2].rstrip(">") for line in index.splitlines()}
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    assert [str(page) for page in pages - {Path("index")} if str(page) not in named] == []


@cache
def options() -> dict[str, set[str]]:
    """The options of each `andon` command, with those of andon_falsify."""
    return {
        name: {"--help"} | {option for word in each.params for option in (*word.opts, *word.secondary_opts)}
        for name, each in app.commands.items()
    }


def test_every_command_of_a_page_is_one_that_andon_has() -> None:
    lost = []
    for page in PAGES:
        for groups in CODE.findall(page.read_text(encoding="utf-8")):
            for name, words in INVOKED.findall(next(filter(None, groups))):
                mine = re.split(r" -m | andon |'|\"", words)[0]  # without the program that it starts
                unknown = set(re.findall(r"(?<=\s)--[a-z][a-z-]*", mine)) - options().get(name, set())
                # `andon suspicion: ...` begins the report of a watch.
                if name not in {*options(), "suspicion"} or (unknown and name != "watch"):
                    lost.append(f"{page.name}: andon {name}{words}: {sorted(unknown)}")
    assert lost == []


def test_every_program_of_a_page_exists() -> None:
    """For each `-m benchmarks.NAME` or `-m falsify.NAME` the checkout has a module."""
    if not (ROOT / "benchmarks").is_dir():
        pytest.skip("benchmarks/ is in the checkout only")
    lost = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"-m ((?:benchmarks|falsify)\.[a-z_.]+[a-z_])", text):
            place = ROOT / name.replace(".", "/")
            if not (place.with_suffix(".py").is_file() or (place / "__main__.py").is_file()):
                lost.append(f"{page.name}: {name}")
    assert lost == []


def test_the_table_of_exit_codes_is_the_programs() -> None:
    """One page has the table: a row for each code."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    rows = re.findall(r"^\| (\d+) \| `([A-Z_]+)` \|", text, re.MULTILINE)
    assert sorted((int(code), name) for code, name in rows) == sorted((exit_.value, exit_.name) for exit_ in Exit)


def test_the_table_of_versions_follows_the_package() -> None:
    """Ranges are those of pyproject.toml, tested versions those of constraints.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = project["dependencies"] + [name for names in project["optional-dependencies"].values() for name in names]
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    rows = re.findall(r"^\| ([a-z]+) \| (>=[^ ]+) \| ([0-9.]+)", (ROOT / "docs/machines.md").read_text(), re.MULTILINE)
    assert len(rows) == 5
    assert [row for row in rows if f"{row[0]}{row[1]}" not in needed or f"{row[0]}=={row[2]}" not in pinned] == []


def test_every_public_name_is_in_the_docs() -> None:
    """Commands and settings are held to the docs elsewhere; this is the Python side, without the seed's names."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    names = [*(f"andon.{name}" for name in ("train", "open_run", "watch", "assert_same", "Violation", "Halted"))]
    names += [*(f"andon.{name}" for name in ("InputError", "RunError", "RankLost", "Preempted"))]
    assert [name for name in names if name not in text] == []


def test_the_docs_stay_short() -> None:
    """Pages answer questions. What is a log of measurements belongs elsewhere."""
    limits = BUDGET["docs"]
    pages = (ROOT / "docs").rglob("*.md")
    words = {page.name: len(re.sub(r"(?s)<!--.*?-->", "", page.read_text(encoding="utf-8")).split()) for page in pages}
    long = {"claims.md": limits["generated"]}
    assert len(words) <= limits["pages"]
    assert sum(words.values()) <= limits["words"]
    assert {name: count for name, count in words.items() if count > long.get(name, limits["longest"])} == {}
