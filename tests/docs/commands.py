"""Run the commands of a page of the docs: `python -m tests.docs.commands docs/watch.md`.

A page is run from top to bottom in one fresh folder. Fenced blocks have these meanings:

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

import argparse
import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

REASONS = {
    "GPU": "the machine that runs the tests has no GPU",
    "two machines": "it has one machine",
    "scheduler": "it has no Slurm, Ray or Kubernetes",
    "network": "it downloads: the hub, git, pip",
    "service": "it needs an account elsewhere",
    "long": "it takes more than a minute",
}
"""Why a command is not run."""
COMMANDS = {
    "andon": "-P -m andon",
    "python": "",
    "torchrun": "-m torch.distributed.run",
    "pytest": "-m pytest",
    "accelerate": "-P -m accelerate.commands.accelerate_cli",
}
"""Commands in the path of a block, as arguments of the interpreter that runs the page."""
SECONDS = 300
"""The longest that one block may take."""
_FENCE = re.compile(r"( *)```([^`\s]*)\s*$")
_MARK = re.compile(r"<!-- (exit|with|not run:|file|needs|setup:?)(?:\s+(.*?))?\s*(-->)?$")
_NAMED = re.compile(r"[Ss]ave (?:(?:it|this) )?as `([\w./-]+)`:$")


@dataclass
class Block:
    """A fenced block or a setup comment, with the marks above it."""

    kind: str
    text: str
    line: int
    exit: int = 0
    replaced: list[tuple[str, str]] = field(default_factory=list)
    reason: str | None = None
    file: str | None = None
    needs: str | None = None

    def command(self) -> str:
        """The text to run, with the replacements of `with`."""
        text = self.text
        for old, new in self.replaced:
            assert old in text, f"line {self.line}: the block has no {old!r} to replace"
            text = text.replace(old, new)
        return text

    def action(self) -> str:
        """What is done with the block."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return "skip"
        if self.file:
            return "save"
        if self.kind in ("bash", "setup"):
            return "check" if self.reason else "run"
        return {"text": "compare", "python": "parse", "yaml": "parse", "json": "parse"}.get(self.kind, "ignore")


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order. Raises ValueError for a mark that is unknown or marks nothing."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    mark, prose, needs = Block("", "", 0), "", None

    def until(end: str, start: int) -> Iterator[str]:
        for number in range(start, len(lines)):
            if lines[number].strip() == end:
                return
            yield lines[number]
        raise ValueError(f"{page.name}:{start}: nothing closes this block")

    at = 0
    while at < len(lines):
        line, at = lines[at], at + 1
        if fence := _FENCE.match(line):
            text = list(until("```", at))
            mark.kind, mark.line = fence[2], at
            mark.text = "".join(f"{each.removeprefix(fence[1])}\n" for each in text)
            if named := _NAMED.search(prose):
                mark.file = named[1]
            mark.needs = needs
            if mark.reason and mark.reason not in REASONS:
                raise ValueError(f"{page.name}:{at}: {mark.reason!r} is not one of {', '.join(REASONS)}")
            if mark.kind != "bash" and (mark.reason or mark.exit or mark.replaced):
                raise ValueError(f"{page.name}:{at}: the mark above belongs to a bash block")
            found.append(mark)
            mark, prose, at = Block("", "", 0), "", at + len(text) + 1
        elif line.startswith("<!-- ") and (each := _MARK.match(line)):
            name, value, closed = each[1], each[2] or "", each[3]
            if name == "setup":
                text = list(until("-->", at))
                found.append(Block("setup", "\n".join([*text, ""]), at, needs=needs))
                at += len(text) + 1
            elif not closed:
                raise ValueError(f"{page.name}:{at}: a mark ends on its line")
            elif name == "setup:":
                found.append(Block("setup", f"{value}\n", at, needs=needs))
            elif name == "needs":
                needs = value
            elif name == "exit":
                mark.exit = int(value)
            elif name == "with":
                old, _, new = value.partition(" => ")
                mark.replaced.append((old, new))
            elif name == "file":
                mark.file = value
            else:
                mark.reason = value
        elif line.strip():
            if mark != Block("", "", 0):
                raise ValueError(f"{page.name}:{at}: a block must follow the mark above")
            prose = line
            if line.startswith("#"):
                needs = None
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


def environment(page: Path, folder: Path) -> dict[str, str]:
    """Variables for the commands of a page: a path with the tested code in `folder`, and the checkout as ANDON."""
    for name, arguments in COMMANDS.items():
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        command.chmod(0o755)
    root = next(each for each in page.resolve().parents if (each / "pyproject.toml").is_file())
    return os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "ANDON": str(root), "COLUMNS": "120"}


def run(page: Path, folder: Path, told: bool = False) -> int:
    """Do what the page says in `folder`, an empty one. Returns how many bash blocks ran.

    Raises AssertionError for the first block that does not do what the page says. told: print each block and its time.
    """
    work, commands = folder / "work", folder / "bin"
    work.mkdir()
    commands.mkdir()
    variables = environment(page, commands)
    printed: str | None = None
    ran = 0
    for block in blocks(page):
        action, place, start = block.action(), f"{page.name}:{block.line}", time.monotonic()
        if action == "save":
            path = work / str(block.file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif action == "run":
            printed = _execute(block, place, work, variables)
            ran += block.kind == "bash"
        elif action == "compare" and printed is not None:
            lost = missing(block.text, printed)
            assert lost == [], f"{place}: the page shows {lost}, but this was printed:\n{printed}"
        elif action == "parse":
            _parse(block, place)
        elif action in ("check", "skip") and block.kind == "bash":
            printed = None
        if told:
            print(f"{place}: {action} {block.kind} {time.monotonic() - start:.1f} s", flush=True)
    return ran


def _execute(block: Block, place: str, work: Path, variables: dict[str, str]) -> str:
    text = block.command()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=work,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == block.exit, f"{place}: exit {done.returncode}, not {block.exit}\n{text}\n{done.stdout}"
    return done.stdout


def _parse(block: Block, place: str) -> None:
    try:
        {"python": ast.parse, "yaml": yaml.safe_load, "json": json.loads}[block.kind](block.text)
    except (SyntaxError, ValueError, yaml.YAMLError) as error:
        raise AssertionError(f"{place}: {error}") from None


def main() -> None:
    """Run the pages of the command line, or list what would be done with each block."""
    parser = argparse.ArgumentParser(description="Run the commands of pages of the docs.")
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--list", action="store_true", help="print what would be done with each block")
    options = parser.parse_args()
    for page in options.pages:
        if options.list:
            for block in blocks(page):
                first = block.command().strip().partition("\n")[0]
                print(f"{page.name}:{block.line}: {block.action()} {block.kind}: {block.file or first}")
            continue
        with tempfile.TemporaryDirectory(prefix="page") as folder:
            run(page, Path(folder), told=True)


if __name__ == "__main__":
    main()
