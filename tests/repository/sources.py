"""The checkout as the repository tests read it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"andon_contracts": "contracts", "andon": "core", "andon_falsify": "falsify"}
"""Import package to the folder of the checkout that holds it."""

_TEXT = {".py", ".md", ".toml", ".ini", ".txt", ".yaml", ".yml", ".json", ".csv", ".cfg", ".sh", ""}
_OUTPUTS = {"dist", "build", "runs", "htmlcov"}


def text_files() -> list[Path]:
    """Every text file of the checkout, without outputs; hidden folders other than .ci hold outputs."""
    found: list[Path] = []
    for folder, inside, names in os.walk(ROOT):
        top = Path(folder) == ROOT
        inside[:] = [
            name
            for name in inside
            if (name[0] != "." or name == ".ci") and name != "__pycache__" and not (top and name in _OUTPUTS)
        ]
        found += [Path(folder, name) for name in names if Path(name).suffix in _TEXT and name[0] != "."]
    return sorted(found)
