"""Time and memory before the first step of instruction tuning: `python -m benchmarks.start_time`.

How long the rows take before a run begins, and how much memory a rank then holds: with all rows and tokens in memory;
with an empty cache folder; and with the same folder again, as at a resume. Each is measured in its own process.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from andon.config.load import load_config
from andon.training.material import prepare
from benchmarks.runs import environment, last_object, table

_WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]


def main() -> int:
    """The exit code is 0 if a start from the cache takes at most a fifth of one without it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(prepared(*options.one)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        data, draw = Path(folder) / "talk.jsonl", random.Random("data start")
        with data.open("w", encoding="utf-8") as file:
            for number in range(options.rows):
                asked = " ".join([*draw.choices(_WORDS, k=8), str(number)])
                said = " ".join(draw.choices(_WORDS, k=draw.randint(3, 40)))
                messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
                file.write(json.dumps({"messages": messages}) + "\n")
        lines, seconds = [], {}
        for name, cache in {"in memory": "", "cached, first": f"{folder}/c", "cached, again": f"{folder}/c"}.items():
            command = [sys.executable, "-m", "benchmarks.start_time", "--one", str(data), cache]
            done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
            found = last_object(done.stdout)
            seconds[name] = found["seconds"]
            lines.append((name, *(f"{value:.1f}" for value in found.values())))
    print(table(("rows and tokens", "seconds", "MiB at the peak", "MiB of no file afterwards"), lines))
    return 0 if seconds["cached, again"] * 5 <= seconds["in memory"] else 1


def prepared(data: str, cache: str) -> dict[str, float]:
    settings = [f"data.cache={cache}"] * bool(cache)
    config = load_config(None, ["task=sft", f"data.train={data}", "model.max_length=512", *settings])
    began = time.perf_counter()
    material = prepare(config)
    material.task.planned_content(material.plan.batch(1).ids)
    seconds = time.perf_counter() - began
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, own = (int(status[name].split()[0]) / 1024 for name in ("VmHWM", "RssAnon"))
    return {"seconds": seconds, "peak": peak, "own": own}


if __name__ == "__main__":
    raise SystemExit(main())
