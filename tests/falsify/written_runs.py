"""Runs of a script that are written down: the script copies the ledger that a test wrote for its number of ranks."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from andon_falsify.history import chain_digest

PLAIN = {"grad_norm": 1.0, "loss": 1.0, "weights_norm": 1.0, "lr": 1.0}
COPYING = """
import os, pathlib, shutil, sys
folder, world = pathlib.Path(sys.argv[1]), sys.argv[2]
again = folder / f"{world}.again"
shutil.copyfile(again if again.exists() else folder / world, os.environ["ANDON_LEDGER"])
(folder / f"{world}.next").exists() and (folder / f"{world}.next").rename(again)
"""


def lines(*steps: dict[str, Any]) -> list[bytes]:
    """A ledger of updates with these fields; norms are plain numbers here."""
    written: list[bytes] = []
    for number, fields in enumerate(steps, start=1):
        found: dict[str, Any] = {"v": 5, "kind": "step", "step": number, "world": 2, "ids": [], "ranks": [], **fields}
        for name in PLAIN.keys() & found.keys():
            found[name] = {"value": found[name], "hex": float(found[name]).hex()}
        prev = chain_digest(written[-1].removesuffix(b"\n")) if written else "0" * 16
        written.append(json.dumps({"seq": number - 1, "prev": prev, **found}).encode() + b"\n")
    return written


def copying(folder: Path, norms: dict[str, float], more: str = "") -> str:
    """The command of a script whose two updates have these gradient norms, by number of ranks (`1.next`: later)."""
    for name, norm in norms.items():
        step = {**PLAIN, "grad_norm": norm, "world": int(name.partition(".")[0])}
        (folder / name).write_bytes(b"".join(lines(step, step)))
    return f"{shlex.join([sys.executable, '-c', COPYING, str(folder)])} {{world}} {{local_batch}} {more}"
