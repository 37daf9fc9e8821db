"""Time and memory before the first step, and of a report: `python -m benchmarks.start_time data|report`.

`data`: how long the rows of instruction tuning take before a run begins, and what a rank holds of them: with all rows
and tokens in memory; with an empty cache folder; and with the same folder again, as at a resume. Each in its own
process.

`report`: how long `andon report` takes, and how large its page is. The records of a short real run are repeated, with
the rows and rates of a run of `--steps` steps and an evaluation every 100 steps. `andon verify` is part of that time.
"""

from __future__ import annotations

import argparse
import json
import random
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
from andon.training.material import prepare
from andon_contracts.fields import Real
from andon_contracts.record import Evaluation, Record, Start, Step
from benchmarks.runs import environment, last_object, run, table

_WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]
_SHORT = 64
"""Updates of the short run: an epoch and one more, so that all rows are known."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("data", "report"))
    parser.add_argument("--rows", type=int, default=200_000, help="of data")
    parser.add_argument("--model", default="", help="of data: a folder with a tokenizer; else bytes are tokens")
    parser.add_argument("--steps", type=int, default=10_000, help="of the run that is reported")
    parser.add_argument("--times", type=int, default=5, help="reports")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(prepared(*options.one)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "report":
            return reported(RunFolder(Path(folder) / "run"), options.steps, options.times)
        return started(Path(folder), options.rows, options.model)


def started(folder: Path, rows: int, model: str) -> int:
    """The table of `data`; 0 if a start from the cache takes at most a fifth of one that keeps nothing."""
    data, draw = folder / "talk.jsonl", random.Random("data start")
    with data.open("w", encoding="utf-8") as file:
        for number in range(rows):
            asked = " ".join([*draw.choices(_WORDS, k=8), str(number)])
            said = " ".join(draw.choices(_WORDS, k=draw.randint(3, 40)))
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": messages}) + "\n")
    lines, seconds = [], {}
    for name, cache in {"in memory": "", "kept, first": f"{folder}/c", "kept, again": f"{folder}/c"}.items():
        command = [sys.executable, "-m", "benchmarks.start_time", "data", "--one", str(data), model, cache]
        done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
        found = last_object(done.stdout)
        seconds[name] = found["seconds"]
        lines.append((name, *(f"{value:.1f}" for value in found.values())))
    print(table(("rows and tokens", "seconds", "MiB at the peak", "MiB of no file afterwards"), lines))
    return 0 if seconds["kept, again"] * 5 <= seconds["in memory"] else 1


def prepared(data: str, model: str, cache: str) -> dict[str, float]:
    settings = [f"data.cache={cache}"] * bool(cache) + [f"model.base={model}"] * bool(model)
    config = load_config(None, ["task=sft", f"data.train={data}", "model.max_length=512", *settings])
    began = time.perf_counter()
    material = prepare(config)
    material.task.planned_content(material.plan.batch(1).ids)
    seconds = time.perf_counter() - began
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, own = (int(status[name].split()[0]) / 1024 for name in ("VmHWM", "RssAnon"))
    return {"seconds": seconds, "peak": peak, "own": own}


def reported(folder: RunFolder, steps: int, times: int) -> int:
    run(folder.path, "--backend", "inline", "--set", f"training.max_steps={_SHORT}")
    lengthen(folder, steps)
    took, before = [], resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(times):
        began = time.perf_counter()
        words = [sys.executable, "-m", "andon", "report", str(folder.path)]
        subprocess.run(words, check=True, env=environment(), stdout=subprocess.DEVNULL)
        took.append(time.perf_counter() - began)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / times
    size = (folder.path / "report.html").stat().st_size
    print(
        f"{steps} steps: {statistics.median(took):.2f} s (least {min(took):.2f} s, {processor:.2f} s of processor "
        f"time, andon verify included), {size / 1e6:.2f} MB"
    )
    return 0


def lengthen(folder: RunFolder, steps: int) -> None:
    records, epochs = list(read_ledger(folder.ledger)), steps // (_SHORT - 2) + 1
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


def lengthened(records: list[Record], config: Config, steps: int) -> Iterator[Record]:
    """The records of a run of `steps` steps with the rows and rates of `config`, the rest as in the short one."""
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
        ranks = (replace(record.ranks[0], ids=batch.ids[:half]), replace(record.ranks[1], ids=batch.ids[half:]))
        place = {"step": number, "epoch": batch.epoch, "position": batch.position, "lr": Real.of(rates.rate(number))}
        yield replace(record, **place, ids=batch.ids, count=len(batch.ids), ranks=ranks)  # type: ignore[arg-type]
        if number % 100 == 0:
            yield replace(next(scored), step=number)
    yield replace(records[-1], step=steps)


if __name__ == "__main__":
    raise SystemExit(main())
