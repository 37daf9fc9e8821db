"""The pictures of the README, in docs/pictures: a terminal in which a model is trained twice, and the page of a run.

    python -m benchmarks.pictures

It trains for a minute, on two workers and on three, and needs Chromium (Debian's package of that name) for the page.
Exit codes: 0, 2 where there is no Chromium, 1 where a command ended with another code than 0.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.repository.sources import ROOT
from tests.support.browser import CHROMIUM, Browser

PICTURES = ROOT / "docs" / "pictures"
COLUMNS = 104
WINDOW = (1000, 1117)
"""Width and height of the picture of a page: down to the end of its first curves."""
SESSION = (
    "andon train --run-dir two --workers 2 --set run.log_every=50",
    "andon train --run-dir three --workers 3 --set run.log_every=50",
    "andon diff two three",
)
"""What is typed."""


def typed(command: str, folder: Path) -> str:
    """What `command` prints in `folder`, called `~` there. Raises `CalledProcessError` where it does not end with 0."""
    words = [sys.executable, "-m", *command.split()]
    done = subprocess.run(words, cwd=folder, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.stdout.replace(str(folder), "~")


def recorded(printed: Sequence[tuple[str, str]]) -> str:
    """Commands and what they printed as a terminal in SVG, which loads nothing from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for command, said in printed:
        console.print(Text.assemble(("$ ", "green"), (command, "bold")))
        console.print(Text(said.rstrip()))
    svg = console.export_svg(title="andon", unique_id="andon")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def main() -> int:
    """Make the pictures."""
    if not CHROMIUM.exists():
        print(f"there is no {CHROMIUM} (Debian's package chromium)", file=sys.stderr)
        return 2
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            printed = [(command, typed(command, folder)) for command in SESSION]
            typed("andon report two", folder)
        except subprocess.CalledProcessError as error:
            print(error.stdout, file=sys.stderr)
            return 1
        (PICTURES / "terminal.svg").write_text(recorded(printed), encoding="utf-8")
        with Browser(folder / "profile") as browser:
            browser.wide(*WINDOW)
            browser.open(folder / "two" / "report.html")
            browser.value("document.documentElement.style.scrollbarWidth = 'none'")
            (PICTURES / "report.png").write_bytes(browser.picture())
    return 0


if __name__ == "__main__":
    sys.exit(main())
