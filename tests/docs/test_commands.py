"""Every command that a page shows is run as `tests/docs/commands.py` describes, and prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.commands import COMMANDS, blocks, missing, run
from tests.docs.test_pages import options
from tests.repository.sources import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = [page for page in PAGES if any(block.kind == "bash" and not block.reason for block in blocks(page))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_commands_stand_in_blocks_that_are_run(page: Path) -> None:
    """A command in another kind of block, an indented one, or one after a prompt would be run by no test."""
    started = rf"(?:\$ |(?:{'|'.join(COMMANDS.keys() - {'andon'})}) |andon (?:{'|'.join(options())})(?: |$)).*"
    lost = [
        f"{page.name}:{block.line}: {line}"
        for block in blocks(page)
        if block.kind not in ("bash", "setup")
        for line in block.text.splitlines()
        if re.match(started, line) and "[OPTIONS]" not in line  # a synopsis
    ]
    outside = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert lost + re.findall(rf"^ {{4,}}{started}", outside, re.MULTILINE) == []


# Cheaper by default: tests/docs/test_pages.py (each command and option of a page exists).
@pytest.mark.deep
@pytest.mark.timeout(1800)  # a page has many commands, each with its own limit
@pytest.mark.parametrize("page", RUN, ids=lambda path: path.stem)
def test_the_page_does_what_it_says(page: Path, tmp_path: Path) -> None:
    assert run(page, tmp_path) > 0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```bash\nfalse\n```\n", "exit 1, not 0"),
        ("<!-- exit 2 -->\n```bash\nexit 3\n```\n", "exit 3, not 2"),
        ("```bash\necho one\n```\n\n```text\ntwo\n```\n", "the page shows"),
        ("<!-- with 8 => 2 -->\n```bash\ntrue\n```\n", "has no '8' to replace"),
        ("Save as `a.sh`:\n\n```sh\nexit 4\n```\n\n```bash\nbash a.sh\n```\n", "exit 4, not 0"),
        ("```python\n1 +\n```\n", "invalid syntax"),
        ("<!-- not run: tired -->\n```bash\ntrue\n```\n", "'tired' is not one of GPU"),
        ("<!-- exit 2 -->\n\nA paragraph.\n", "a block must follow"),
        ("<!-- exit 2 -->\n```text\nx\n```\n", "belongs to a bash block"),
        ("```bash\ntrue\n", "nothing closes"),
    ],
)
def test_a_page_that_does_not_do_what_it_says_fails(text: str, error: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    (tmp_path / "pyproject.toml").touch()
    with pytest.raises((AssertionError, ValueError), match=error):
        run(page, tmp_path)


def test_every_mark_is_obeyed(tmp_path: Path) -> None:
    assert run(Path(__file__).with_name("sample.md"), tmp_path) == 2


def test_what_is_not_printed_is_missed() -> None:
    """A line that was not printed, or not in this order, is lost; what stands for anything is not."""
    printed = "one 1.5 s\ntwo\nthree"
    assert missing("one ... s\n...\nthree\n", printed) == []
    assert missing("two\none ... s\n", printed) == ["one ... s"]
    assert missing("on\n", printed) == ["on"]
