"""Compares run folders with the undisturbed run, without the trainer's own code."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"


@dataclass(frozen=True)
class Undisturbed:
    """The run without faults. It has a checkpoint and a ledger line of every update."""

    folder: Path

    @cached_property
    def result(self) -> tuple[str, str, int]:
        """Digest of the final weights, the final loss as hexadecimal, the number of updates."""
        return _result(self.folder)

    @cached_property
    def lines(self) -> dict[int, list[object]]:
        return dict(_lines(self.folder))

    def lacking(self, updates: int) -> str:
        """Why this run cannot be compared with: an update is missing or damaged. Empty if it can."""
        if self.result[2] != updates or set(self.lines) != set(range(1, updates + 1)):
            return f"{len(self.lines)} of {updates} updates are in its ledger, {self.result[2]} in its summary"
        broken = [path.name for step in range(1, updates + 1) if not intact(path := _checkpoint(self.folder, step))]
        return f"not whole: {', '.join(broken)}" if broken else ""

    def differs(self, folder: Path) -> str:
        """How a finished run in `folder` differs; empty if it does not.

        Compares the result, every ledger line, and the checkpoint of the last update, which holds the moments too.
        """
        if not (folder / "summary.json").exists():
            return "it is not finished"
        found, same = _result(folder), "the result is the same, but"
        if found != self.result:
            return f"{found} where {self.result} belongs"
        if other := self.accepted(folder, self.result[2])[1]:
            return f"{same} not {', '.join(other[:3])}"
        if unsaid := sorted(set(self.lines) - dict(_lines(folder)).keys()):
            return f"{same} the ledger lacks the updates {', '.join(map(str, unsaid[:3]))}"
        last = _checkpoint(folder, self.result[2])
        return "" if intact(last) else f"{same} {last.name} is not there, whole"

    def accepted(self, folder: Path, step: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The valid checkpoints and ledger lines after update `step`, and those that this run does not have."""
        newer, other = [], []
        for path in sorted(folder.glob("checkpoints/step-????????")):  # no other name is accepted
            if intact(path):
                newer += [path.name] * (int(path.name.removeprefix("step-")) > step)
                other += [path.name] * (_state(path) != _state(self.folder / "checkpoints" / path.name))
        for number, line in _lines(folder):
            newer += [f"ledger line of step {number}"] * (number > step)
            other += [f"ledger line of step {number}"] * (line != self.lines.get(number))
        return tuple(newer), tuple(other)


def intact(checkpoint: Path) -> bool:
    """True if every file of a checkpoint has the size and the digest in its manifest."""
    try:
        manifest: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_bytes())
        for name, facts in manifest["files"].items():
            data = (checkpoint / name).read_bytes()
            if (len(data), hashlib.sha256(data).hexdigest()) != (facts["bytes"], facts["sha256"]):
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08}"


def _state(checkpoint: Path) -> object:
    """Bytes of the tensors (weights and moments), and the position in the data; None without a checkpoint."""
    try:
        return (checkpoint / TENSORS).read_bytes(), json.loads((checkpoint / STATE).read_bytes())["progress"]
    except OSError:
        return None


def _result(folder: Path) -> tuple[str, str, int]:
    found = json.loads((folder / "summary.json").read_bytes())
    return found["weights_digest"], found["final_loss"]["hex"], found["steps"]


def _lines(folder: Path) -> list[tuple[int, list[object]]]:
    """Number, rows, loss, norm and rate of every update in the ledger, repeated ones too, without a torn last line."""
    path = folder / "ledger.jsonl"
    found = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        try:
            event = json.loads(line) if line.endswith(b"\n") else {}
        except ValueError:
            continue  # the checker of the chain finds it
        if event.get("kind") == "step":
            content = [event["ids"], *(event[name]["hex"] for name in ("loss", "grad_norm", "lr"))]
            found.append((event["step"], content))
    return found
