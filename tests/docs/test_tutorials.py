"""Every tutorial does what it says: what it saves is saved, what it runs is run, what it shows is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.sources import ROOT

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"(?:ave (?:it )?as `(?P<file>[\w.]+)`:\n\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
"""A fenced block, with the name of the file that the words before it give it."""
COMMANDS = {"andon": "-m andon", "python": "", "torchrun": "-m torch.distributed.run"}
"""What a reader has in the path, as arguments of the interpreter that runs the tests."""


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A path in which the commands are those of the code that is tested."""
    folder = tmp_path_factory.mktemp("bin")
    for name, arguments in COMMANDS.items():
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        command.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def missing(shown: str, printed: str) -> list[str]:
    """The lines that a page shows and that were not printed in this order; `...` stands for anything."""
    lost, lines = [], iter(printed.splitlines())
    for line in shown.splitlines():
        pattern = re.compile(".*".join(map(re.escape, line.split("..."))))
        if line != "..." and not any(pattern.fullmatch(each) for each in lines):
            lost.append(line)
            lines = iter(())
    return lost


# Cheaper by default: tests/docs/test_pages.py (each command and option of a page exists).
@pytest.mark.deep
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_the_tutorial_does_what_it_says(tutorial: Path, path: str, tmp_path: Path) -> None:
    """In a fresh folder, block by block: a file is saved, a command ends with 0, what is shown was just printed."""
    printed, ran = "", 0
    for block in BLOCK.finditer(tutorial.read_text(encoding="utf-8")):
        text = block["text"]
        if block["file"]:
            (tmp_path / block["file"]).write_text(text)
        elif block["kind"] == "bash":
            command = ["bash", "-euo", "pipefail", "-c", text]
            done = subprocess.run(
                command,
                cwd=tmp_path,
                env=os.environ | {"PATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            printed, ran = done.stdout, ran + 1
            assert done.returncode == 0, f"{text}\n{printed}"
        else:
            assert block["kind"] == "text", f"a block that nothing is done with: {text}"
            assert missing(text, printed) == [], printed
    assert ran >= 2


def test_what_is_not_printed_is_missed() -> None:
    """A line that was not printed, or not in this order, is lost; what stands for anything is not."""
    printed = "one 1.5 s\ntwo\nthree"
    assert missing("one ... s\n...\nthree\n", printed) == []
    assert missing("two\none ... s\n", printed) == ["one ... s"]
    assert missing("on\n", printed) == ["on"]
