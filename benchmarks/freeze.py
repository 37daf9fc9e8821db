"""The gate of every refactoring: what Andon does today, as JSON.

`python -m benchmarks.freeze --write` runs every planted fault and a fixed set of commands, and writes
`tests/golden/{trainer,loops,watch,nemeses,runs,refusals}.json`.
Without `--write` it runs them again and prints each row that differs. `--only trainer --only watch` chooses parts. The
exit code is 1 if a row differs, or if a fault has problems: its check missed it, failed for another reason, or failed
without the fault. `--backend nccl` runs the trainer's faults on GPUs and compares nothing.

A row of a kill matrix holds the fault, the claim or clause that caught it, the step, and the reason. Numbers inside a
reason are written as `#`, so that a row is the same on two CPUs. A row of `runs` holds digests, which belong to one
machine: `runs.json` names the CPU and the versions that it was written on. 18 nemeses are not frozen: they need network
namespaces, or a library that loads lazily. Only those that the file names are played.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from andon_falsify.ranks.pool import RankPools
from andon_falsify.ranks.trainer import AndonTrainer
from andon_falsify.subjects.placing import CPU_BACKENDS, GPU_BACKENDS
from andon_falsify.subjects.trace import Remembering
from andon_falsify.verdict import Counterexample
from benchmarks.runs import environment
from falsify.nemesis.bench import NEMESES, Bench
from falsify.nemesis.language import Nemesis
from falsify.nemesis.language import Row as Played
from falsify.power import looped
from falsify.power.laboratory import Laboratory, LoopLaboratory, untried
from falsify.power.looped.fault import Inside
from falsify.power.registry import FAULTS

Row = dict[str, Any]
ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
_STEP = re.compile(r"\bsteps? (\d+)")
_NUMBER = re.compile(
    r"(?<=\.andon-tmp)-\d+-[0-9a-f]+|0x[0-9a-f.]+p[+-]\d+|\b[0-9a-f]{16}\b|-?\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b"
)


def _reason(text: str) -> str:
    return _NUMBER.sub("#", text)


def _found(found: Counterexample | None) -> Row:
    if found is None:
        return {}
    named = _STEP.search(found.where)
    where = {"step": int(named[1]) if named else None, "where": found.where}
    return {**where, "reason": _reason(found.what), "equals": found.equals}


def trainer(backends: Sequence[str] = CPU_BACKENDS) -> Iterator[Row]:
    """Faults of our trainer by backend: the clause that stops the run, and the claims that fall without contracts."""
    with RankPools() as pools:
        for backend in backends:
            laboratory = Laboratory(Remembering(AndonTrainer(pools)))
            for fault in FAULTS:
                by_backend = fault.kind in ("trainer", "resume")
                if (by_backend and untried(fault, backend)) or not (by_backend or backend == "inline"):
                    continue
                trial = laboratory.attempt(fault, backend)
                yield {
                    "fault": fault.name,
                    "backend": backend,
                    "claim": fault.claim,
                    "clause": trial.guarded.clause if trial.guarded else "",
                    "fallen": sorted(trial.planted.fallen),
                    "problems": [_reason(each) for each in trial.problems],
                    **_found(trial.shown),
                }


def loops() -> Iterator[Row]:
    """Faults of a foreign loop: the claims that fall, judged from outside."""
    with RankPools() as pools:
        laboratory = LoopLaboratory(pools, every_claim=True)
        for fault in looped.FAULTS:
            if isinstance(fault.outside, str):
                yield {"fault": fault.name, "not shown": fault.outside}
                continue
            trial = laboratory.attempt(fault)
            yield {
                "fault": fault.name,
                "claim": trial.claim,
                "fallen": sorted(trial.planted.fallen),
                "problems": [_reason(each) for each in trial.problems],
                **_found(trial.shown),
            }


def watch() -> Iterator[Row]:
    """Faults that a watch sees in a loop: each finding as clause and step, at once and by the one line alone."""
    from tests.watch.test_planted_faults import SEEN, Ranks, said_by

    ranks = Ranks()
    for number, (fault, inside) in enumerate(SEEN):
        pairs, by_one_line = zip(*ranks.tried(number), strict=True)
        steps = [step for clause, step in pairs[0][1].found if clause == inside.clause]
        problems = ["without the fault something is found"] * any(right.found for right, _ in pairs)
        late = min(steps, default=inside.by + bool(inside.clause)) > inside.by
        problems += ["its clause does not find it in time"] * late
        right, wrong = by_one_line[0] or pairs[0]
        problems += ["without the fault the one line finds it"] * bool(right.found or said_by(inside, right))
        yield {
            "fault": fault.name,
            "lines": list(inside.lines),
            "clause": inside.clause,
            "by": inside.by,
            "step": min(steps, default=None),
            "problems": problems,
            "found": [[list(each) for each in wrong.found] for _, wrong in pairs],
            "without the fault": [[list(each) for each in right.found] for right, _ in pairs],
            "one line": [list(each) for each in wrong.found] if by_one_line[0] else [],
            **({"says": said} if (said := said_by(inside, wrong)) else {}),
        }
    for fault in looped.FAULTS:
        if not isinstance(fault.inside, Inside):
            yield {"fault": fault.name, "not seen": fault.inside}


def disturbed() -> Iterator[Row]:
    """Faults in real runs: exit codes, whether every promise holds, and what is found with a protection off."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
        bench = Bench.prepare(Path(base), 1)
        frozen = {row["fault"] for row in json.loads((GOLDEN / "nemeses.json").read_text(encoding="utf-8"))}
        chosen = [nemesis for nemesis in NEMESES if nemesis.name in frozen]
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 3)) as pool:
            played = zip(chosen, pool.map(bench.play, chosen), strict=True)
            yield from (_disturbed(nemesis, row) for nemesis, row in played)


def _disturbed(nemesis: Nemesis, row: Played) -> Row:
    return {
        "fault": nemesis.name,
        "skipped": row.skipped,
        "codes": [] if row.phase is None else list(row.phase.ending.codes),
        "good": row.good,
        "wrong": [_reason(each) for each in row.wrong],
        "guard off": [_reason(each) for each in (row.unguarded or ())[:1]],
    }


_SHORT = ("--set", "training.max_steps=12", "--set", "training.epochs=1")
_UNCLIPPED = ("--set", "optimizer.clip_norm=null")
_SGD = ("--set", "optimizer.name=sgd", "--set", "optimizer.lr=0.05", *_UNCLIPPED)
_SMALL = (*_SHORT, *_UNCLIPPED, "--set", "training.epochs=2", "--set", "training.batch_size=8")
RUNS: Mapping[str, tuple[str, ...]] = {
    "demo, gloo, 2 workers": (),
    "demo, inline, 1 worker": ("--backend", "inline", "--workers", "1"),
    "short, gloo, 3 workers": (*_SHORT, "--workers", "3"),
    "short, gloo, 4 workers": (*_SHORT, "--workers", "4"),
    "unclipped, inline, 4 workers": (*_SHORT, *_UNCLIPPED, "--backend", "inline", "--workers", "4"),
    "unclipped, gloo, 2 workers": (*_SHORT, *_UNCLIPPED),
    "sgd, unclipped, inline, 3 workers": (*_SHORT, *_SGD, "--backend", "inline", "--workers", "3"),
    "sgd, unclipped, gloo, 2 workers": (*_SHORT, *_SGD),
    "all weights, unclipped, inline": (*_SHORT, *_SGD, "--set", "adapter.kind=none", "--backend", "inline"),
    "sft, unclipped": ("--task", "sft", *_SHORT, *_UNCLIPPED),
    "sft, packed, unclipped": ("--task", "sft", *_SHORT, *_UNCLIPPED, "--set", "training.packing=true"),
    "regression, unclipped": ("--task", "regression", "--data", f"{ROOT}/examples/data/regression.csv", *_SMALL),
    "multi-label, unclipped": ("--data", f"{ROOT}/examples/data/multi_label.jsonl", *_SMALL),
    "token-classification, unclipped": ("--data", f"{ROOT}/examples/data/tags.jsonl", *_SMALL),
    "bfloat16, unclipped": (*_SHORT, *_UNCLIPPED, "--set", "model.dtype=bfloat16"),
    "activation checkpointing, unclipped": (*_SHORT, *_UNCLIPPED, "--set", "training.activation_checkpointing=true"),
    "portable, unclipped": (*_SHORT, *_UNCLIPPED, "--set", "run.portable=true"),
}

REFUSALS: Mapping[str, tuple[str, ...]] = {
    "unknown key": ("train", "--set", "optimizer.learning_rate=1"),
    "several wrong values": ("train", "--set", "optimizer.lr=x", "--set", "training.epochs=0", "--workers", "0"),
    "no data file": ("train", "--data", "absent.csv"),
    "no such column": ("train", "--data", "rows.csv", "--text-column", "body"),
    "dirty rows": ("check", "--data", "dirty.jsonl"),
    "no such model": ("train", "--data", "rows.csv", "--model", "absent"),
    "no such run": ("show", "absent"),
    "loss is not finite": ("train", "--set", "optimizer.lr=1e30", *_SHORT, "--workers", "1", "--run-dir", "nan"),
    "folder is taken": ("train", *_SHORT, "--run-dir", "taken", "--workers", "1"),
    "resume with another rate": ("train", *_SHORT, "--run-dir", "taken", "--resume", "auto", "--set", "optimizer.lr=1"),
}
"""Commands that end otherwise than well, in a folder that holds the files of `_inputs`."""


def _andon(folder: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "andon", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def _machine() -> Row:
    names = ("torch", "transformers", "peft", "numpy")
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    versions = {name: metadata.version(name) for name in names}
    return {"cpu": cpu[1] if cpu else "", "python": platform.python_version(), **versions}


def runs() -> Iterator[Row]:
    """What a seeded run leaves: exit code, digests, final loss, the kinds of its ledger's lines, its files."""
    yield {"run": "machine", **_machine()}
    with tempfile.TemporaryDirectory() as base:
        for name, arguments in RUNS.items():
            folder = Path(base) / "run"
            done = _andon(Path(base), ["train", *arguments, "--run-dir", "run"])
            lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
            steps = [line for line in lines if line["kind"] == "step"]
            files = sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())
            yield {
                "run": name,
                "exit": done.returncode,
                "weights": steps[-1]["digests"]["weights"],
                "optimizer": steps[-1]["digests"]["optimizer"],
                "loss": steps[-1]["loss"]["hex"],
                "ledger": [line["kind"] for line in lines if line["kind"] != "step"],
                "identity": lines[0]["identity"],
                "files": files,
            }
            shutil.rmtree(folder)


def refusals() -> Iterator[Row]:
    """What a command says that ends otherwise than well, with its exit code."""
    with tempfile.TemporaryDirectory() as base:
        _inputs(Path(base))
        for name, arguments in REFUSALS.items():
            done = _andon(Path(base), arguments)
            said = done.stderr.replace(base, ".").splitlines()
            yield {"command": name, "exit": done.returncode, "said": [_reason(line) for line in said if line.strip()]}


def _inputs(folder: Path) -> None:
    (folder / "rows.csv").write_text("text,label\n" + "".join(f"word {n},{'ab'[n % 2]}\n" for n in range(40)))
    (folder / "dirty.jsonl").write_text('{"text": "a", "label": "x"}\n{"text": 1}\nnot json\n')
    _andon(folder, ["train", *_SHORT, "--run-dir", "taken", "--workers", "1"])


PARTS: Mapping[str, Callable[[], Iterator[Row]]] = {
    "trainer": trainer,
    "loops": loops,
    "watch": watch,
    "nemeses": disturbed,
    "runs": runs,
    "refusals": refusals,
}


def _write(name: str, rows: Sequence[Row]) -> None:
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (GOLDEN / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _differences(name: str, rows: Sequence[Row]) -> int:
    frozen = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    was, now = ({str(list(row.items())[:2]): row for row in each} for each in (frozen, json.loads(json.dumps(rows))))
    different = [key for key in dict.fromkeys((*was, *now)) if was.get(key) != now.get(key)]
    for key in different:
        print(f"DIFFERS {name}\n  was {was.get(key)}\n  is  {now.get(key)}")
    return len(different)


def main() -> int:
    """Run the chosen parts; write them, or compare them with what was written. 1 if a row differs or has problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=tuple(PARTS), help="one part; repeat for more")
    parser.add_argument("--write", action="store_true", help="write the files instead of comparing with them")
    backends = (*CPU_BACKENDS, *GPU_BACKENDS)
    parser.add_argument("--backend", action="append", choices=backends, help="trainer on it, compared with nothing")
    options = parser.parse_args()
    if options.backend and (options.write or options.only):
        parser.error("--backend compares with nothing: leave out --write and --only")
    different = unwell = 0
    for name in ["trainer"] if options.backend else options.only or PARTS:
        rows = []
        for row in trainer(options.backend) if options.backend else PARTS[name]():
            print(f"{name}: {json.dumps(row, ensure_ascii=False)}", flush=True)
            rows.append(row)
        unwell += sum(bool(row.get("problems") or not row.get("good", True)) for row in rows)
        if options.write and not options.backend:
            _write(name, rows)
        elif not options.backend:
            different += _differences(name, rows)
    print(f"{different} rows differ, {unwell} faults have problems")
    return 1 if different or unwell else 0


if __name__ == "__main__":
    raise SystemExit(main())
