"""`andon` with no word about how, beside other trainers with their own defaults: `python -m benchmarks.defaults PART`.

classify   `andon train --data --eval-data --model` and the HF Trainer: accuracy, loss, seconds. Give it CSV files.
sft        the same on conversations and TRL's SFTTrainer, both with LoRA: loss per token of an answer, seconds.
           `--adapter none` trains all weights on both sides. Rows and model (Qwen3-0.6B's shape) are drawn at random.
generate   `andon generate` on ragged prompts and transformers' batched generation: seconds, and how many texts agree.
merge      `andon export --merge` for a base of Qwen3-4B's shape: memory at the peak, seconds.

Whole processes run one at a time, in turns whose order alternates. Both sides get the same files. One program scores
what both wrote, loaded in fp32. The last line is a JSON object; the exit code is 1 if a median misses its aim. `--work`
keeps inputs, which are used again, and outputs. `--tiny` draws small models for a CPU. The digests of runs with all
defaults are compared by `python -m benchmarks.worlds --backends default`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.runs import environment, last_object, table

Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--work", type=Path, required=True, help="folder of inputs and outputs")
    parser.add_argument("--seeds", default="1,2,3", help="of generate and merge: numbers of the rounds")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--train", type=Path, help="classify: CSV file")
    parser.add_argument("--test", type=Path, help="classify: CSV file")
    parser.add_argument("--model", type=Path, help="classify: folder of the base")
    parser.add_argument("--text-column", default="text", help="classify")
    parser.add_argument("--label-column", default="label", help="classify")
    parser.add_argument("--rows", type=int, default=2000, help="sft: conversations to train on")
    parser.add_argument("--adapter", choices=("lora", "none"), default="lora", help="sft")
    parser.add_argument("--epochs", type=int, help="classify, sft: the same number for both sides")
    parser.add_argument("--set", action="append", default=[], help="passed on to andon train")
    options = parser.parse_args()
    if options.part == "classify" and not (options.train and options.test and options.model):
        parser.error("classify needs --train, --test and --model")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.pop(name, None)  # both sides may use all cores
    options.work = options.work.absolute()
    options.work.mkdir(parents=True, exist_ok=True)
    rows, good = PARTS[options.part](options)
    cells = [[f"{value:.4g}" if isinstance(value, float) else value for value in row.values()] for row in rows]
    print(table(list(rows[0]), cells))
    print(json.dumps({"part": options.part, "rows": rows, "good": good}))
    return 0 if good else 1


def classify(options: argparse.Namespace) -> tuple[list[Row], bool]:
    columns = {"text": options.text_column, "label": options.label_column}
    train, test, model = (str(path.absolute()) for path in (options.train, options.test, options.model))
    words = ["--text-column", columns["text"], "--label-column", columns["label"]]
    return _compared(options, (train, test, model), words, columns, {"test": test, **columns})


def sft(options: argparse.Namespace) -> tuple[list[Row], bool]:
    train, test = _talk(options, 24 if options.tiny else options.rows, 1), _talk(options, 8 if options.tiny else 200, 2)
    model = _base(options, "sft-tiny" if options.tiny else "sft-0.6b", "bfloat16")
    words = ["--set", "adapter.kind=none"] if options.adapter == "none" else []
    return _compared(options, (train, test, model), words, {"lora": options.adapter == "lora"}, {"test": test})


def _compared(
    options: argparse.Namespace, files: tuple[str, str, str], words: list[str], peer: Row, scored: Row
) -> tuple[list[Row], bool]:
    """Train on both sides with each seed. peer, scored: further arguments of what trains and scores in `default_peers`.

    Good are loss and time of at most the peer's, and an accuracy of at least its own, by the medians.
    """
    train, test, model = files
    same = {"epochs": options.epochs} if options.epochs else {}
    given = [f"training.epochs={options.epochs}"] * bool(options.epochs) + options.set

    def ours(folder: Path, seed: str) -> float:
        settings = [word for each in [f"seed={seed}", *given] for word in ("--set", each)]
        line = ["--data", train, "--eval-data", test, "--model", model, *words, *settings]
        done = timed(folder, "andon", "train", "--run-dir", f"{folder}/run", *line)
        timed(folder, "andon", "export", f"{folder}/run", f"{folder}/out", "--merge", "--dtype", "float32")
        return done.seconds

    def theirs(folder: Path, seed: str) -> float:
        place = {"train": train, "test": test, "model": model, "out": f"{folder}/out", "seed": int(seed)}
        return peer_call(folder, options.part, **place, **peer, **same).seconds

    def score(folder: Path) -> Row:
        found = peer_call(folder, f"score_{options.part}", model=f"{folder}/out", **scored).printed
        shutil.rmtree(folder / "out")
        return found

    rows = _in_turns(options, ours, theirs, score)
    found = {key: [median(row[key] for row in rows if row["side"] == side) for side in ("andon", "peer")]
             for key in ("loss", "accuracy", "time / peer's") if key in rows[0]}  # fmt: skip
    return rows, all(mine >= its if key == "accuracy" else mine <= its for key, (mine, its) in found.items())


def generate(options: argparse.Namespace) -> tuple[list[Row], bool]:
    """Good is at most 1.2 times their time, and the same text, on a base in fp32."""
    shape, count = ("sft-tiny", 12) if options.tiny else ("sft-0.6b", 200)
    run, prompts, merged = _run(options, shape, "float32", 20), _talk(options, count, 3), options.work / f"{shape}-out"
    if not merged.exists():
        timed(options.work, "andon", "export", str(run), str(merged), "--merge", "--dtype", "float32")

    def ours(folder: Path, _seed: str) -> float:
        words = ["--data", prompts, "--max-new-tokens", "64", "--output", f"{folder}/answers.jsonl"]
        return timed(folder, "andon", "generate", str(run), *words).seconds

    def theirs(folder: Path, _seed: str) -> float:
        return peer_call(folder, "generate", model=str(merged), prompts=prompts, out=f"{folder}/answers.jsonl").seconds

    def texts(folder: Path) -> Row:
        return {"texts": [json.loads(line)["answer"] for line in (folder / "answers.jsonl").open(encoding="utf-8")]}

    rows = _in_turns(options, ours, theirs, texts)
    first = next(row["texts"] for row in rows if row["side"] == "peer")
    for row in rows:
        row["same text"] = sum(mine == its for mine, its in zip(row.pop("texts"), first, strict=True)) / count
    mine = [row for row in rows if row["side"] == "andon"]
    return rows, median(row["time / peer's"] for row in mine) <= 1.2 and all(row["same text"] == 1 for row in mine)


def merge(options: argparse.Namespace) -> tuple[list[Row], bool]:
    """Good is a peak of at most 1.2 times the base's bytes, within 3 minutes. Base and result are in bf16."""
    shape = "sft-tiny" if options.tiny else "reference"
    run, base = _run(options, shape, "bfloat16", 1), Path(_base(options, shape, "bfloat16"))
    size = sum(file.stat().st_size for file in base.glob("*.safetensors")) / 2**20
    rows = []
    for number in options.seeds.split(","):
        folder = _new(options.work / f"merge-{number}")
        done = timed(folder, "andon", "export", str(run), f"{folder}/out", "--merge", "--dtype", "bfloat16")
        shutil.rmtree(folder / "out")
        rows.append({"round": number, "seconds": done.seconds, "base MiB": size, "peak MiB": done.peak,
                     "of no file": done.own, "peak / base": done.peak / size})  # fmt: skip
    return rows, all(row["peak / base"] <= 1.2 and row["seconds"] <= 180 for row in rows)


PARTS: dict[str, Callable[[argparse.Namespace], tuple[list[Row], bool]]]
PARTS = {"classify": classify, "sft": sft, "generate": generate, "merge": merge}


# Processes


@dataclass(frozen=True)
class Done:
    """peak, own: MiB at the peak of the process itself; `own` leaves out pages of files."""

    seconds: float
    peak: float
    own: float
    printed: Row


def timed(folder: Path, module: str, *words: str) -> Done:
    """Run `python -m module words` to its end. Raises `RuntimeError` with the end of what it wrote if it fails."""
    log, own, start = folder / "log.txt", 0, time.perf_counter()
    with log.open("w") as out:
        line = [sys.executable, "-m", module, *words]
        process = subprocess.Popen(line, env=environment(), stdout=out, stderr=subprocess.STDOUT)
    while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
        with suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/{process.pid}/status").read_text()
            own = max(own, int(text.split("RssAnon:")[1].split()[0]))
        time.sleep(0.02)
    seconds, text = time.perf_counter() - start, log.read_text(errors="replace")
    process.returncode = os.waitstatus_to_exitcode(ended[1])
    if process.returncode:
        raise RuntimeError(f"{module} {' '.join(words)}\nexit {process.returncode}: {text[-3000:]}")
    printed = last_object(text) if module == "benchmarks.default_peers" else {}
    return Done(seconds, ended[2].ru_maxrss / 1024, own / 1024, printed)


def peer_call(folder: Path, name: str, **arguments: Any) -> Done:
    return timed(folder, "benchmarks.default_peers", name, json.dumps(arguments))


def _in_turns(
    options: argparse.Namespace,
    ours: Callable[[Path, str], float],
    theirs: Callable[[Path, str], float],
    look: Callable[[Path], Row],
) -> list[Row]:
    """A row of each side in each round: its seconds, their ratio, and what `look` finds in its folder."""
    sides, rows = {"andon": ours, "peer": theirs}, []
    for turn, seed in enumerate(options.seeds.split(",")):
        found: dict[str, Row] = {}
        for side in list(sides)[:: -1 if turn % 2 else 1]:
            folder = _new(options.work / f"{options.part}-{side}-{seed}")
            seconds = sides[side](folder, seed)
            found[side] = {"round": seed, "side": side, "seconds": seconds, **look(folder)}
        rows += [found[side] | {"time / peer's": found[side]["seconds"] / found["peer"]["seconds"]} for side in sides]
        print(*({key: value for key, value in row.items() if key != "texts"} for row in rows[-2:]), flush=True)
    return rows


# Inputs, which are made once


def _new(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _talk(options: argparse.Namespace, rows: int, seed: int) -> str:
    """Conversations; those of seed 3 are prompts."""
    path = options.work / f"talk-{rows}-{seed}.jsonl"
    if not path.exists():
        peer_call(options.work, "talk", out=str(path), rows=rows, seed=seed, answers=seed != 3)
    return str(path)


def _base(options: argparse.Namespace, name: str, dtype: str) -> str:
    from benchmarks.gpu_job import SHAPES

    path = options.work / f"{name}-{dtype}"
    shape = replace(SHAPES[name], causal=True, length=2048, vocabulary=max(512, SHAPES[name].vocabulary))
    if not path.exists():
        peer_call(options.work, "base", out=str(path), talk=_talk(options, 60, 4), dtype=dtype, **asdict(shape))
    return str(path)


def _run(options: argparse.Namespace, shape: str, dtype: str, steps: int) -> Path:
    """A run of `steps` updates with all defaults on the model of `shape`."""
    run: Path = options.work / f"{shape}-{dtype}-run"
    if not (run / "summary.json").exists():
        files = ["--data", _talk(options, 60, 1), "--model", _base(options, shape, dtype)]
        settings = [word for each in [f"training.max_steps={steps}", *options.set] for word in ("--set", each)]
        timed(options.work, "andon", "train", "--run-dir", str(run), *files, *settings)
    return run


if __name__ == "__main__":
    raise SystemExit(main())
