"""Bits flipped in a run's state, and what a resume makes of it: `python -m benchmarks.flip_resume --trials 100`.

Each trial flips one bit, drawn from the seed with its place and step, in the memory of one rank (weights, moments, the
frozen base, a micro-batch's gradient, the reduced gradient) or, in a run that was cut off there, in a file of its
folder (a checkpoint's, or the ledger). Then the run is resumed on another number of workers, and again where it was
stopped again. It must end with the bits of the run that nobody disturbed, or be refused in words with a command that
goes on. All micro-batches are audited: a flip before the reduction is found by nothing else. Ranks live in one process.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from andon.console.exits import Exit
from andon.console.problems import InputError
from andon.step.replica import Replica
from andon.step.step import TrainingStep
from andon_contracts.violation import Violation
from benchmarks.runs import table
from tests.training.runs import STEPS, Runs, outcome, write_jsonl

IN_MEMORY = ("weights", "moments", "base", "own gradient", "reduced gradient")
IN_FILES = ("checkpoint", "ledger")
_SETTINGS = ("contracts.audit_every=1", "contracts.audit_coverage=all", "training.checkpoint_every=3")
_RESUMES = 3


class CutOff(Exception):
    """The run ends here, as a machine that loses its power does."""


@dataclass(frozen=True)
class Trial:
    """One flip: of what, in which update, on which rank of how many; `bit` and `place` as shares of what there is."""

    what: str
    step: int
    rank: int
    world: int
    again: int
    place: float
    bit: int

    @classmethod
    def draw(cls, seed: int, number: int) -> Trial:
        """The trial of this number."""
        draw = random.Random(f"flip {seed} {number}")
        what = (*IN_MEMORY, *IN_FILES)[number % (len(IN_MEMORY) + len(IN_FILES))]
        world = draw.randrange(1, 5)
        return cls(
            what,
            draw.randrange(4 if what in IN_FILES else 2, STEPS),
            draw.randrange(world),
            world,
            draw.randrange(1, 5),
            draw.random(),
            draw.randrange(32),
        )


def main() -> int:
    """Print a line for each kind of flip; 1 if a run ended with other bits, or without a way on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ends: dict[str, Counter[str]] = {}
    wrong = 0
    with tempfile.TemporaryDirectory() as base:
        runs = Runs(write_jsonl(Path(base) / "train.jsonl"))
        _train(runs, Path(base) / "whole", 2)
        wanted = outcome(Path(base) / "whole")
        for number in range(options.trials):
            trial = Trial.draw(options.seed, number)
            how = _play(trial, runs, Path(base) / str(number), wanted)
            ends.setdefault(trial.what, Counter())[how.partition(":")[0]] += 1
            if how.startswith("WRONG"):
                wrong += 1
                print(f"trial {number}: {trial}: {how}", flush=True)
    rows = [(what, found.total(), ", ".join(f"{how} {n}" for how, n in found.items())) for what, found in ends.items()]
    print(table(("flipped", "trials", "how it ended"), rows))
    print(f"{options.trials - wrong} of {options.trials} as promised (seed {options.seed})")
    return int(wrong > 0)


def _play(trial: Trial, runs: Runs, folder: Path, wanted: dict[str, Any]) -> str:
    """How the trial ended: in one or two words, and what was seen where it is wrong."""
    found, said = "not noticed", ""
    with _planted(trial) as struck, suppress(CutOff):
        try:
            _train(runs, folder, trial.world)
        except Violation as violation:
            found = f"{violation.clause}"
    if not struck:
        return "WRONG: nothing was flipped"
    if trial.what in IN_FILES:
        _flip_file(trial, folder)
    for _ in range(_RESUMES):
        try:
            said = _train(runs, folder, trial.again, resume="auto")
        except InputError as refused:
            ways = re.findall(r"andon \w+|--resume|another folder|verify", str(refused))
            return f"refused ({found})" if ways else f"WRONG: refused without a way on: {refused}"
        except Violation as violation:
            said = str(violation)
            continue
        return f"same bits ({found})" if outcome(folder) == wanted else f"WRONG: other bits ({found})"
    return f"WRONG: stopped {_RESUMES} times again: {said}"


def _train(runs: Runs, folder: Path, world: int, resume: str = "never") -> str:
    """Train in this process and give what was said. Raises `Violation`, `InputError`."""
    with redirect_stderr(StringIO()) as said:
        code = runs.train(folder, *_SETTINGS, backend="inline", workers=world, resume=resume)
    if code is not Exit.OK:
        raise RuntimeError(f"it ended with {code!r}: {said.getvalue()}")
    return said.getvalue()


@contextmanager
def _planted(trial: Trial) -> Iterator[list[str]]:
    """Inside, the flip happens when its update begins, or where its gradient is made; what comes says that it did."""
    struck: list[str] = []
    call, leaf, put = TrainingStep.__call__, Replica._leaf, Replica.set_gradient
    due: list[Replica] = []

    def strike(tensor: Tensor) -> None:
        struck.append(_flip(trial, tensor))

    def begin(self: TrainingStep, batch: Any, *args: Any, **named: Any) -> Any:
        if batch.step == trial.step and not struck:
            replica = self._replicas[trial.rank]
            if trial.what in IN_FILES:
                struck.append("cut off")
                raise CutOff
            if trial.what == "weights":
                strike(replica.parameters.weights.data)
            elif trial.what == "moments":
                strike(replica.optimizer_state()["exp_avg" if trial.bit % 2 else "exp_avg_sq"])
            elif trial.what == "base":
                frozen = [tensor for tensor in replica.frozen().values() if tensor.dtype == torch.float32]
                strike(frozen[int(trial.place * 7919) % len(frozen)])
            else:
                due.append(replica)
        return call(self, batch, *args, **named)

    def after(method: Callable[..., Any], what: str) -> Callable[..., Any]:
        def called(self: Replica, *args: Any, **named: Any) -> Any:
            result = method(self, *args, **named)
            if trial.what == what and self in due and not struck:
                strike(self.parameters.gradient if what == "own gradient" else self.master.gradient)
            return result

        return called

    TrainingStep.__call__ = begin  # type: ignore[method-assign]
    Replica._leaf = after(leaf, "own gradient")  # type: ignore[method-assign]
    Replica.set_gradient = after(put, "reduced gradient")  # type: ignore[method-assign]
    try:
        yield struck
    finally:
        TrainingStep.__call__ = call  # type: ignore[method-assign]
        Replica._leaf = leaf  # type: ignore[method-assign]
        Replica.set_gradient = put  # type: ignore[method-assign]


def _flip(trial: Trial, tensor: Tensor) -> str:
    flat = tensor.view(torch.int32).view(-1)
    place = int(trial.place * flat.numel())
    flat[place] ^= -(1 << 31) if trial.bit == 31 else 1 << trial.bit
    return f"bit {trial.bit} of element {place}"


def _flip_file(trial: Trial, folder: Path) -> None:
    """One bit of a file of the newest checkpoint, or of a whole line of the ledger."""
    files = [folder / "ledger.jsonl"]
    if trial.what == "checkpoint":
        newest = max((folder / "checkpoints").iterdir())
        files = sorted(newest.iterdir())
    path = files[trial.bit % len(files)]
    data = bytearray(path.read_bytes())
    data[int(trial.place * len(data))] ^= 1 << trial.bit % 8
    path.write_bytes(data)


if __name__ == "__main__":
    raise SystemExit(main())
