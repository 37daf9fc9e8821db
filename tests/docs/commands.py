"""Run the commands of pages: `python -m tests.docs.commands docs/watch.md ...`.

A page is run from top to bottom in one fresh folder, where `$ANDON` is the checkout. Fenced blocks have these meanings:

- `bash`: run it; it must exit with 0.
- `text`: the block that ran just before must have printed these lines, whole and in this order. `...` stands for
  anything within a line, a line `...` for any lines. It is not compared if that block was not run.
- any kind, after a paragraph that ends "Save as `NAME`:": write the file.
- `python` without a name: a fragment, which must compile. `yaml` and `json` without a name must parse.
- others, and blocks without a language: nothing.

HTML comments, each on a line of its own, mark the next block:

- `<!-- exit 1 -->`: the expected exit code.
- `<!-- with OLD => NEW -->`: run the block with this text replaced; the text must be in it.
- `<!-- not run: REASON -->`: only check that the commands exist. The reason is one of `REASONS`.
- `<!-- file NAME -->`: as "Save as `NAME`:", for a block that the reader need not save.

Two kinds of comment mark no block: `<!-- setup`, lines of bash, `-->` is run where it stands, as `<!-- setup: LINE -->`
is; `<!-- needs MODULE -->` skips blocks up to the next heading if the module cannot be imported.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml

REASONS = ("GPU", "two machines", "scheduler", "network", "service", "long")
"""What the machine that runs the tests lacks. `service` is an account elsewhere, `long` is more than a minute."""
COMMANDS = {
    "andon": "-P -m andon",
    "python": "",
    "torchrun": "-m torch.distributed.run",
    "pytest": "-m pytest",
    "accelerate": "-P -m accelerate.commands.accelerate_cli",
}
"""Commands in the path of a block, as arguments of the interpreter that runs the page."""
SECONDS = 300  # the longest time for one block
_FENCE = re.compile(r"( *)```([^`\s]*)\s*$")
_MARK = re.compile(r"<!-- (exit|with|not run:|file|needs|setup:?)(?:\s+(.*?))?\s*(-->)?$")
_NAMED = re.compile(r"[Ss]ave (?:(?:it|this) )?as `([\w./-]+)`:$")
_PARSERS = {"python": ast.parse, "yaml": yaml.safe_load, "json": json.loads}


@dataclass
class Block:
    """A fenced block or a setup comment, with the marks above it. needs: a module that cannot be imported."""

    kind: str = ""
    text: str = ""
    line: int = 0
    exit: int = 0
    replaced: list[tuple[str, str]] = field(default_factory=list)
    reason: str | None = None
    file: str | None = None
    needs: str | None = None

    def command(self) -> str:
        """The text to run, with the replacements of `with`."""
        text = self.text
        for old, new in self.replaced:
            assert old in text, f"the block has no {old!r} to replace"
            text = text.replace(old, new)
        return text


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order. Raises ValueError for a mark that is unknown or marks nothing."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    mark, prose, needs, at = Block(), "", None, 0

    def refuse(why: str) -> None:
        raise ValueError(f"{page.name}:{at}: {why}")

    while at < len(lines):
        line, at = lines[at], at + 1
        fence = _FENCE.match(line)
        each = _MARK.match(line)
        if fence or (each and each[1] == "setup"):
            end = next((n for n in range(at, len(lines)) if lines[n].strip() == ("```" if fence else "-->")), None)
            if end is None:
                raise ValueError(f"{page.name}:{at}: nothing closes this block")
            kind, indent = (fence[2], fence[1]) if fence else ("setup", "")
            block = mark if fence else Block()
            block.kind, block.line, block.needs = kind, at, needs
            block.text = "".join(f"{each.removeprefix(indent)}\n" for each in lines[at:end])
            if fence and (named := _NAMED.search(prose)):
                block.file = named[1]
            if block.reason and block.reason not in REASONS:
                refuse(f"{block.reason!r} is not one of {', '.join(REASONS)}")
            if kind != "bash" and (block.reason or block.exit or block.replaced):
                refuse("the mark above belongs to a bash block")
            found.append(block)
            at = end + 1
            if fence:
                mark, prose = Block(), ""
        elif each:
            name, value = each[1], each[2] or ""
            if not each[3]:
                refuse("a mark ends on its line")
            if name == "setup:":
                found.append(Block("setup", f"{value}\n", at, needs=needs))
            elif name == "needs":
                needs = value if importlib.util.find_spec(value) is None else None
            elif name == "with":
                old, _, new = value.partition(" => ")
                mark.replaced.append((old, new))
            elif name == "exit":
                mark.exit = int(value)
            elif name == "file":
                mark.file = value
            else:
                mark.reason = value
        elif line.strip():
            if mark != Block():
                refuse("a block must follow the mark above")
            prose, needs = line, None if line.startswith("#") else needs
    return found


def missing(shown: str, printed: str) -> list[str]:
    """The lines that a page shows and that were not printed in this order; `...` stands for anything."""
    lost, lines = [], iter(printed.splitlines())
    for line in shown.splitlines():
        pattern = re.compile(".*".join(map(re.escape, line.rstrip().split("..."))))
        if line != "..." and not any(pattern.fullmatch(each.rstrip()) for each in lines):
            lost.append(line)
            lines = iter(())
    return lost


def run(page: Path, folder: Path) -> int:
    """Do what the page says below `folder`, and print each block with its time. Returns how many bash blocks ran.

    Raises AssertionError for the first block that does not do what the page says.
    """
    work, path = folder / "work", folder / "bin"
    work.mkdir()
    path.mkdir()
    for name, arguments in COMMANDS.items():
        (path / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (path / name).chmod(0o755)
    root = next(each for each in page.resolve().parents if (each / "pyproject.toml").is_file())
    variables = os.environ | {"PATH": f"{path}{os.pathsep}{os.environ['PATH']}", "ANDON": str(root), "COLUMNS": "120"}
    printed: str | None = None
    ran = 0
    for block in blocks(page):
        place, start = f"{page.name}:{block.line}", time.monotonic()
        if block.needs or block.reason:
            printed = None if block.kind == "bash" else printed
        elif block.file:
            (work / block.file).parent.mkdir(parents=True, exist_ok=True)
            (work / block.file).write_text(block.text, encoding="utf-8")
        elif block.kind in ("bash", "setup"):
            printed = _execute(block, place, work, variables)
            ran += block.kind == "bash"
        elif block.kind == "text" and printed is not None:
            lost = missing(block.text, printed)
            assert lost == [], f"{place}: the page shows {lost}, but this was printed:\n{printed}"
        elif block.kind in _PARSERS:
            try:
                _PARSERS[block.kind](block.text)
            except (SyntaxError, ValueError, yaml.YAMLError) as error:
                raise AssertionError(f"{place}: {error}") from None
        print(f"{place}: {block.kind} {time.monotonic() - start:.1f} s", flush=True)
    return ran


def _execute(block: Block, place: str, work: Path, variables: dict[str, str]) -> str:
    text = block.command()
    command = ["bash", "-euo", "pipefail", "-c", text]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        # A file, since a process that the block leaves behind would keep a pipe open.
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        code = subprocess.run(command, cwd=work, env=variables, check=False, timeout=SECONDS, **streams).returncode
        output.seek(0)
        printed = output.read()
    assert code == block.exit, f"{place}: exit {code}, not {block.exit}\n{text}\n{printed}"
    return printed


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory(prefix="page") as fresh:
            run(Path(name), Path(fresh))
