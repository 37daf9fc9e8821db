"""What runs leave in their folders, read without the trainer's own code and held against the undisturbed run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"


@dataclass(frozen=True)
class Undisturbed:
    """The run that nobody disturbed. It has a checkpoint after every update, and a ledger line of each."""

    folder: Path

    @cached_property
    def result(self) -> tuple[str, str, int]:
        """Digest of the final weights, the final loss as hexadecimal, the number of updates."""
        return _result(self.folder)

    @cached_property
    def lines(self) -> dict[int, tuple[object, ...]]:
        """What the ledger says of each update."""
        return dict(_lines(self.folder))

    def lacking(self, updates: int) -> str:
        """Why nothing can be held against this run: it is to have made so many updates, and to have all of them whole.

        Empty where it has.
        """
        if self.result[2] != updates or set(self.lines) != set(range(1, updates + 1)):
            return f"{len(self.lines)} of {updates} updates are in its ledger, {self.result[2]} in its summary"
        named = [self.folder / "checkpoints" / f"step-{step:08}" for step in range(1, updates + 1)]
        broken = [path.name for path in named if not whole(path)]
        return f"not whole: {', '.join(broken)}" if broken else ""

    def differs(self, folder: Path) -> str:
        """How what a run left in `folder` differs from this one, once it is to be finished; empty where it does not.

        Its result, every update in its ledger, and its newest checkpoint, which is of the last update: the moments too.
        """
        if not (folder / "summary.json").exists():
            return "it is not finished"
        found = _result(folder)
        if found != self.result:
            return f"{found} where {self.result} belongs"
        other = self.accepted(folder, self.result[2])[1]
        if other:
            return f"the result is the same, but not {', '.join(other[:3])}"
        unsaid = sorted(set(self.lines) - {number for number, _ in _lines(folder)})
        if unsaid:
            return f"the result is the same, but the ledger lacks the updates {', '.join(map(str, unsaid[:3]))}"
        last = f"step-{self.result[2]:08}"
        return "" if whole(folder / "checkpoints" / last) else f"the result is the same, but {last} is not there, whole"

    def accepted(self, folder: Path, step: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What was accepted of more than `step` updates (checkpoints, ledger lines), and what this run never had."""
        newer, other = [], []
        for path in sorted(folder.glob("checkpoints/step-????????")):  # what has another name is none
            if not whole(path):
                continue  # nobody accepts it
            newer += [path.name] * (int(path.name.removeprefix("step-")) > step)
            other += [path.name] * (_state(path) != _state(self.folder / "checkpoints" / path.name))
        for number, line in _lines(folder):
            newer += [f"ledger line of step {number}"] * (number > step)
            other += [f"ledger line of step {number}"] * (line != self.lines.get(number))
        return tuple(newer), tuple(other)


def whole(checkpoint: Path) -> bool:
    """Whether every file of a checkpoint is the one that its manifest names."""
    try:
        manifest: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_bytes())
        for name, facts in manifest["files"].items():
            data = (checkpoint / name).read_bytes()
            if (len(data), hashlib.sha256(data).hexdigest()) != (facts["bytes"], facts["sha256"]):
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _state(checkpoint: Path) -> object:
    """Bytes of the tensors (weights and moments) and where in the data the run is; None where there is nothing."""
    try:
        return (checkpoint / TENSORS).read_bytes(), json.loads((checkpoint / STATE).read_bytes())["progress"]
    except OSError:
        return None


def _result(folder: Path) -> tuple[str, str, int]:
    found = json.loads((folder / "summary.json").read_bytes())
    return found["weights_digest"], found["final_loss"]["hex"], found["steps"]


def _lines(folder: Path) -> list[tuple[int, tuple[object, ...]]]:
    """Number and content of every update in the ledger, repeated ones too; a torn last line is none."""
    path = folder / "ledger.jsonl"
    found = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        try:
            event = json.loads(line) if line.endswith(b"\n") else {}
        except ValueError:
            continue  # the chain's own checker is for that
        if event.get("kind") == "step":
            found.append((event["step"], tuple(_content(event))))
    return found


def _content(event: dict[str, Any]) -> Iterator[object]:
    """Rows, loss, norm and rate of an update: what is known without contracts too."""
    yield event["ids"]
    for name in ("loss", "grad_norm", "lr"):
        yield event[name]["hex"]
