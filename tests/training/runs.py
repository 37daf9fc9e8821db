"""Small runs for the tests of the trainer: 45 rows in three classes, 12 steps, a model of one layer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andon.cli.train import run_training
from andon.config.load import load_config
from andon.console.messages import Exit
from andon.run.folder import RunFolder
from andon.run.ledger import read_ledger
from andon.training.run import train
from andon_contracts.record import Record

PRELOAD = (
    "torch",
    "torch.distributed",
    "transformers",
    "andon.launch.rank",
    "peft",
    "andon.training.run",
    "transformers.models.qwen3.modeling_qwen3",
    "tests.training.entries",
    "andon.launch.server_last",
)
COLOURS = ("red", "green", "blue")
STEPS = 12  # two epochs of 41 rows (45 less the 4 that validate) in batches of 8: the last of an epoch holds one row
SMALL = (
    "model.hidden_size=16",
    "model.num_hidden_layers=1",
    "model.intermediate_size=16",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=2",
    "adapter.r=2",
    "training.batch_size=8",
    "training.micro_batches=4",
    "training.epochs=2",
    "training.checkpoint_every=4",
    "optimizer.lr=0.01",
    "run.log_every=100",
)


def row(number: int, classes: int = 3) -> tuple[str, str]:
    label = COLOURS[number % classes]
    return f"{'a ' * (number % 7)}{label} thing number {number}", label


def write_jsonl(path: Path, count: int = 45) -> Path:
    rows = [json.dumps({"text": text, "label": label}) for text, label in map(row, range(count))]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def write_csv(path: Path, numbers: Sequence[int]) -> Path:
    """Rows of two classes as CSV, with columns of other names than the usual."""
    rows = [",".join(row(number, 2)) for number in numbers]
    path.write_text("\n".join(["sentence,colour", *rows]) + "\n", encoding="utf-8")
    return path


@dataclass(frozen=True)
class Runs:
    """Starts runs on one data set: a file, or files with weights as JSON."""

    data: Path | str
    settings: tuple[str, ...] = ()

    def overrides(self, *more: str) -> list[str]:
        return [*SMALL, *self.settings, f"data.train={self.data}", *more]

    def train(
        self, folder: Path, *more: str, backend: str = "inline", workers: int = 1, resume: str = "never", **entry: str
    ) -> Exit:
        flags = {"run.dir": str(folder), "run.backend": backend, "run.workers": workers, "run.resume": resume}
        return run_training(None, self.overrides(*more), flags, **entry)

    def inline(
        self, folder: Path, *more: str, stop: Callable[[], bool] = lambda: False, until: int | None = None
    ) -> Exit:
        """Train in this process; each update asks `stop` whether it is the last. until: the number of the last one."""
        asked = itertools.count(1)
        if until is not None:
            return self.inline(folder, *more, stop=lambda: next(asked) == until)
        config = load_config(None, self.overrides(*more), {"run.dir": str(folder), "run.backend": "inline"})
        return train(config, RunFolder(folder), stop)

    def stopped(self, folder: Path, step: int, *more: str) -> Path:
        """Train until the end of `step`, with a checkpoint there; returns `folder`."""
        assert self.inline(folder, *more, until=step) == Exit.PREEMPTED
        return folder


def sections() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for section, name, value in (each.replace("=", ".", 1).split(".", 2) for each in SMALL):
        found.setdefault(section, {})[name] = json.loads(value)
    return found


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RunFolder(folder).summary.read_text())
    return found


def outcome(folder: Path) -> dict[str, Any]:
    found = summary(folder)
    names = ("steps", "weights_digest", "initial_weights_digest", "final_loss", "eval", "best_step", "reason")
    return {name: found[name] for name in names}


def records(folder: Path, kind: str) -> list[Any]:
    found: list[Record] = list(read_ledger(RunFolder(folder).ledger))
    return [record for record in found if record.kind == kind]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in RunFolder(folder).checkpoints.iterdir())
