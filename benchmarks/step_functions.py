"""How many functions of ours one step runs: `python -m benchmarks.step_functions`.

Trains a few steps of the embedded job on two inline workers, and counts the distinct functions of the contracts and of
the trainer that the fifth step calls, from the trainer's advance to the line of the ledger. Methods of comprehensions
and lambdas are counted apart; those of icontract are not ours. `--list` names each with its calls.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

import andon
import andon_contracts
from andon.cli.train import run_training
from andon.step.plan import GlobalBatch
from andon.training.trainer import Trainer

_STEP = 5
_ANONYMOUS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")
_PLACES = tuple(str(Path(str(package.__file__)).parent) for package in (andon, andon_contracts))


def counted(backend: str, workers: int) -> Counter[CodeType]:
    """The calls of each function of ours in one step."""
    calls: Counter[CodeType] = Counter()
    advance = Trainer._advance

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_PLACES):
            calls[frame.f_code] += 1

    def watched(trainer: Trainer, batch: GlobalBatch) -> bool:
        if batch.step != _STEP:
            return advance(trainer, batch)
        sys.setprofile(profile)
        try:
            return advance(trainer, batch)
        finally:
            sys.setprofile(None)

    Trainer._advance = watched  # type: ignore[method-assign,assignment]
    try:
        with tempfile.TemporaryDirectory() as folder:
            flags = {"run.dir": f"{folder}/run", "run.backend": backend, "run.workers": workers}
            run_training(None, [f"training.max_steps={_STEP + 3}", "contracts.audit_every=0"], flags)
    finally:
        Trainer._advance = advance  # type: ignore[method-assign]
    return calls


def main() -> int:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("inline", "threads"), default="inline")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="name each function, with its calls")
    options = parser.parse_args()
    calls = counted(options.backend, options.workers)
    if options.list:
        for code, number in sorted(calls.items(), key=lambda each: (each[0].co_filename, each[0].co_firstlineno)):
            print(f"{code.co_filename}:{code.co_firstlineno} {code.co_qualname} {number}")
    named = [code for code in calls if not code.co_qualname.endswith(_ANONYMOUS)]
    files = {code.co_filename for code in named}
    print(f"{len(named)} functions in {len(files)} files, {len(calls)} with anonymous ones; {calls.total()} calls")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
