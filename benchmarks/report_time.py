"""How long `andon report` takes and how large its page is: `python -m benchmarks.report_time --steps 10000`.

A short real run is lengthened by the project's own writer of records: rows and rates are those of a run of so many
steps, losses and digests come again, with an evaluation every 100 steps. What `andon verify` needs for the same
ledger is in the time.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path

from andon.config.load import load_config, to_yaml
from andon.config.schema import Config
from andon.run.atomic import remove
from andon.run.folder import RunFolder
from andon.run.ledger import LedgerWriter, read_ledger
from andon.step.plan import BatchPlan
from andon.step.schedule import WarmupCosine
from andon_contracts.fields import Real
from andon_contracts.record import Evaluation, Record, Start, Step
from benchmarks.runs import environment, run

_SHORT = 64
"""Updates of the real run: an epoch and one more, so that all rows are known."""
_EVALUATE_EVERY = 100


def lengthened(records: list[Record], config: Config, steps: int) -> Iterator[Record]:
    """The records of a run of `steps` steps with the rows and rates of `config`, the rest as in a short one."""
    done = [record for record in records if isinstance(record, Step)]
    scored = cycle(record for record in records if isinstance(record, Evaluation))
    rows = tuple(sorted({row for record in done for row in record.ids}))
    training = config.training
    plan = BatchPlan(rows, training.batch_size, training.micro_batches, config.seed, training.epochs, steps)
    rates = WarmupCosine(config.optimizer.lr, steps, config.schedule.warmup_fraction, config.schedule.min_lr)
    start = records[0]
    assert isinstance(start, Start)
    yield replace(start, plan=replace(start.plan, steps=steps, epochs=training.epochs))
    for number, record in zip(range(1, steps + 1), cycle(done), strict=False):
        batch, half = plan.batch(number), len(plan.batch(number).ids) // 2
        ranks = (
            replace(record.ranks[0], ids=batch.ids[:half]),
            replace(record.ranks[1], ids=batch.ids[half:]),
        )
        yield replace(
            record, step=number, epoch=batch.epoch, position=batch.position, ids=batch.ids, count=len(batch.ids),
            lr=Real.of(rates.rate(number)), ranks=ranks,
        )  # fmt: skip
        if number % _EVALUATE_EVERY == 0:
            yield replace(next(scored), step=number)
    yield replace(records[-1], step=steps)


def lengthen(folder: RunFolder, steps: int) -> None:
    """Put settings, ledger and metrics of a long run in the place of those of the short one in `folder`."""
    records = list(read_ledger(folder.ledger))
    epochs = steps // (_SHORT - 2) + 1
    config = load_config(folder.config, [f"training.max_steps={steps}", f"training.epochs={epochs}"])
    folder.config.write_text(to_yaml(config))
    folder.ledger.unlink()
    with LedgerWriter(folder.ledger) as ledger:
        for record in lengthened(records, config, steps):
            ledger.append(record)
    lines = [line for line in map(json.loads, folder.metrics.read_text().splitlines()) if "seconds" in line]
    long = ({**line, "step": number} for number, line in zip(range(1, steps + 1), cycle(lines), strict=False))
    folder.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in long))
    for checkpoint in folder.checkpoints.iterdir():
        remove(checkpoint)  # it quotes the ledger of the short run, as the summary does
    folder.summary.unlink()


def main() -> None:
    """Print seconds, processor time, and bytes."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=10_000)
    arguments.add_argument("--times", type=int, default=5)
    asked = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder(Path(scratch) / "run")
        run(folder.path, "--backend", "inline", "--set", f"training.max_steps={_SHORT}")
        lengthen(folder, asked.steps)
        report = [sys.executable, "-m", "andon", "report", str(folder.path)]
        took, before = [], resource.getrusage(resource.RUSAGE_CHILDREN)
        for _ in range(asked.times):
            began = time.perf_counter()
            subprocess.run(report, check=True, env=environment(), stdout=subprocess.DEVNULL)
            took.append(time.perf_counter() - began)
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor = (spent.ru_utime + spent.ru_stime - before.ru_utime - before.ru_stime) / asked.times
        size = (folder.path / "report.html").stat().st_size
        print(
            f"{asked.steps} steps: {statistics.median(took):.2f} s (least {min(took):.2f} s, {processor:.2f} s of "
            f"processor time, andon verify in it), {size / 1e6:.2f} MB"
        )


if __name__ == "__main__":
    main()
