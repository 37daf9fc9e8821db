"""How long the rows of instruction tuning take before a run begins, and what a rank holds of them:
`python -m benchmarks.data_start --rows 200000`.

Each line of the table is a process of its own: with all rows and tokens in memory; with a folder that keeps them, which
is empty; and with the same folder again, as at a resume.
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
from benchmarks.runs import environment, table

_WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]
_ONE = "one"
_LEAST_GAIN = 5.0


def main() -> int:
    """Print the table; 0 where a start from what is kept takes at most a fifth of one that keeps nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--model", help="folder of a transformers model, for its tokenizer; else bytes are tokens")
    parser.add_argument("--" + _ONE, nargs=3, metavar=("FILE", "MODEL", "CACHE"), help="be one of the processes")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_prepared(*options.one)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        data = _written(Path(folder) / "talk.jsonl", options.rows)
        runs = {"in memory": "", "kept, first": f"{folder}/cache", "kept, again": f"{folder}/cache"}
        found = {name: _measured(data, options.model or "", cache) for name, cache in runs.items()}
    lines = [(name, *(f"{value:.1f}" for value in values)) for name, values in found.items()]
    print(table(("rows and tokens", "seconds", "MiB at the peak", "MiB of its own afterwards"), lines))
    return 0 if found["kept, again"][0] * _LEAST_GAIN <= found["in memory"][0] else 1


def _written(path: Path, rows: int) -> Path:
    """Conversations of some 30 words, the same each time."""
    draw = random.Random("data start")
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            asked = " ".join([*draw.choices(_WORDS, k=8), str(number)])
            said = " ".join(draw.choices(_WORDS, k=draw.randint(3, 40)))
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def _measured(data: Path, model: str, cache: str) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.data_start", "--" + _ONE, str(data), model, cache]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _prepared(data: str, model: str, cache: str) -> list[float]:
    """Seconds until rows can be trained on, MiB at the peak, and MiB of no file afterwards."""
    named = {"data.cache": cache or None, "model.base": model or None}
    settings = [f"{key}={value}" for key, value in named.items() if value is not None]
    config = load_config(None, ["task=sft", f"data.train={data}", "model.max_length=512", *settings])
    began = time.perf_counter()
    material = prepare(config)
    material.task.planned_content(material.plan.batch(1).ids)
    seconds = time.perf_counter() - began
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, own = (int(status[name].split()[0]) / 1024 for name in ("VmHWM", "RssAnon"))
    return [seconds, peak, own]


if __name__ == "__main__":
    raise SystemExit(main())
