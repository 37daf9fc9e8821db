"""Run well-known scripts plain and watched, and compare the watch's alarms with table.yaml.

A row is skipped, with the reason, if its repository is not in the mirror or its packages are not installed.
Exit codes: 0 everything is as in the table, 1 something differs, 2 nothing ran or the command line is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.real_code import data
from benchmarks.runs import table

_HERE = Path(__file__).parent
_LIMIT_S, _GRACE_S, _HUNG = 100, 35, 124
_COUNTED = re.compile(r"^  ([a-z-]+): \d+ times?, first at step \d+$", re.MULTILINE)
Patches = Sequence[Sequence[str]]
"""[old, new] or [old, new, file]; `old` occurs exactly once."""


@dataclass(frozen=True)
class Row:
    """One script of `repository` (owner/name) at `commit`.

    module: run as `-m path`. folder: the working directory, by default the script's. parts: the paths of the repository
    that are extracted, by default all. gpu: the script asks for GPUs, and the preamble gives it CPUs. modules: required
    packages. prepare: a function of `data` that writes its input. files: additional text files. unseeded: why two runs
    differ. expected: the alarms that are right (clause, reason, suspected, and the name of its finding).
    plants: mistakes made by patches (name, patches), each with the clauses of which one must be broken.
    """

    name: str
    repository: str
    commit: str
    path: str
    family: str
    arguments: str = ""
    patches: Patches = ()
    folder: str | None = None
    parts: Sequence[str] = ()
    module: bool = False
    ranks: int = 2
    gpu: bool = False
    modules: Sequence[str] = ()
    prepare: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    unseeded: str = ""
    expected: Sequence[Mapping[str, Any]] = ()
    plants: Sequence[Mapping[str, Any]] = ()

    @property
    def script(self) -> str:
        return f"{self.path.replace('.', '/')}.py" if self.module else self.path

    def working(self, root: Path) -> Path:
        return root / (str(Path(self.script).parent) if self.folder is None else self.folder)


class Ended(NamedTuple):
    """The result of a run.

    notes: updates and checksum of each rank. alarms: the first step of each (clause, suspected); 0 without a step.
    """

    code: int
    text: str
    notes: list[tuple[int, int]]
    alarms: dict[tuple[str, bool], int]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_code", description=__doc__)
    parser.add_argument("--mirror", type=Path, required=True, help="a folder of git repositories, named owner+name")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows whose names begin with NAME")
    options = parser.parse_args()
    known = [Row(**given) for given in yaml.safe_load((_HERE / "table.yaml").read_text(encoding="utf-8"))]
    rows = [row for row in known if not options.only or row.name.startswith(tuple(options.only))]
    if not rows or not options.mirror.is_dir():
        parser.error(f"no folder {options.mirror}, or no such row of: {', '.join(row.name for row in known)}")
    cells, wrong = [], []
    for row in rows:
        git = options.mirror / row.repository.replace("/", "+")
        absent = [name for name in row.modules if importlib.util.find_spec(name) is None]
        if absent or not git.is_dir():
            why = f"not installed: {', '.join(absent)}" if absent else f"no folder {git}"
            print(f"{row.name}: skipped, {why}", flush=True)
            continue
        try:
            line, problems = judge(row, git)
        except ValueError as error:  # the table does not fit the repository
            line, problems = [row.name, "", "", "", "", ""], [str(error)]
        print(f"{row.name}: {'; '.join(problems) or 'as in the table'}", flush=True)
        cells.append(line)
        wrong += problems
    print(table(("script", "exit plain, watched", "updates", "bits", "alarms", "planted, caught"), cells))
    return 2 if not cells else 1 if wrong else 0


def judge(row: Row, git: Path) -> tuple[list[str], list[str]]:
    """The line of a row, and what differs from the table."""
    with tempfile.TemporaryDirectory(prefix="real-code-") as folder:
        root = Path(folder)
        take_out(git, row, root / "source")
        plain, watched = run(row, root, "plain"), run(row, root, "watched")
        planted = [run(row, root, f"planted-{number}", plant["patches"]) for number, plant in enumerate(row.plants)]
    wrong = [
        f"{name}: exit {ended.code}: {last_error(ended.text)}"
        for name, ended in (("plain", plain), ("watched", watched))
        if ended.code
    ]
    bits = "unseeded" if row.unseeded else "equal" if plain.notes == watched.notes else "different"
    if bits == "different" or [count for count, _ in plain.notes] != [count for count, _ in watched.notes]:
        wrong.append("plain and watched runs differ in their weights or number of updates")
    updates = max((count for count, _ in watched.notes), default=0)
    if not updates:
        wrong.append("no update was made")
    expected = {(each["clause"], each.get("suspected", False)): each["reason"] for each in row.expected}
    wrong += [f"FALSE: {named(key)} at {step}" for key, step in watched.alarms.items() if key not in expected]
    wrong += [f"missed: {named(key)} ({why})" for key, why in expected.items() if key not in watched.alarms]
    caught = 0
    for plant, ended in zip(row.plants, planted, strict=True):
        seen = any(clause in plant["clauses"] for clause, _ in ended.alarms)
        caught += seen
        if ended.code or not seen:
            said = f"exit {ended.code}: {last_error(ended.text)}" if ended.code else "not caught"
            wrong.append(f"planted {plant['name']}: {said}")
    alarms = ", ".join(f"{named(key)} at {step}" for key, step in watched.alarms.items())
    codes = f"{plain.code}, {watched.code}"
    return [row.name, codes, str(updates), bits, alarms, f"{caught} of {len(planted)}" if planted else ""], wrong


def named(alarm: tuple[str, bool]) -> str:
    return f"{alarm[0]}{' suspected' if alarm[1] else ''}"


def last_error(text: str) -> str:
    errors = [line.strip() for line in text.splitlines() if re.search(r"\w(Error|Exception)\b", line)]
    own = [line for line in errors if "ChildFailedError" not in line]
    return (own or errors or ["no error was named"])[-1][:300]


def take_out(git: Path, row: Row, into: Path) -> None:
    """Extract the row's files at its commit, patch them, and write their input. Raises `ValueError` if the table is
    wrong."""
    with tempfile.TemporaryFile() as archive:
        archived = ["git", "-C", str(git), "archive", "--format=tar", row.commit, *row.parts]
        done = subprocess.run(archived, stdout=archive, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise ValueError(f"{row.name}: {done.stderr.strip()}")
        archive.seek(0)
        with tarfile.open(fileobj=archive) as files:
            files.extractall(into, filter="data")
    patch(into, row.patches, row.script)
    for name, text in row.files.items():
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        (into / name).write_text(text, encoding="utf-8")
    if row.prepare:
        prepare: Callable[[Path], None] = getattr(data, row.prepare)
        prepare(row.working(into))


def patch(root: Path, patches: Patches, default: str) -> None:
    """Apply each patch under `root`. Raises `ValueError` unless the replaced text occurs exactly once."""
    for old, new, *more in patches:
        name = more[0] if more else default
        text = (root / name).read_text(encoding="utf-8") if (root / name).is_file() else ""
        if (count := text.count(old)) != 1:
            raise ValueError(f"{name}: {old!r} occurs {count} times, not once")
        (root / name).write_text(text.replace(old, new), encoding="utf-8")


def run(row: Row, root: Path, name: str, patches: Patches = ()) -> Ended:
    """Run a copy of the source; once more if it hangs, as gloo's process groups now and then do when they close."""
    ended = once(row, root, name, patches)
    return once(row, root, f"{name}-again", patches) if ended.code == _HUNG else ended


def once(row: Row, root: Path, name: str, patches: Patches) -> Ended:
    place, notes, ledgers, home = (root / f"{name}-{kind}" for kind in ("tree", "notes", "ledgers", "home"))
    shutil.copytree(root / "source", place, symlinks=True)
    patch(place, patches, row.script)
    for folder in (notes, ledgers, home):
        folder.mkdir()
    path = [str(_HERE / "preamble"), str(place), os.environ.get("PYTHONPATH", ""), str(_HERE.parents[1])]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "HOME": str(home),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        "REAL_CODE_CPU": "1" if row.gpu else "",
        "REAL_CODE_NOTES": str(notes),
        **row.environment,
    }
    words = [sys.executable]
    if row.ranks > 1:
        words += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(row.ranks)]
    if not name.startswith("plain"):
        words += ["-m", "andon", "watch"]
        environ["ANDON_LEDGER"] = str(ledgers / "ledger.jsonl")
    words += ["-m", row.path] if row.module else [os.path.relpath(row.path, row.working(Path()))]
    with (root / f"{name}.txt").open("w+", encoding="utf-8", errors="replace") as output:
        code = limited([*words, *shlex.split(row.arguments)], row.working(place), environ, output.fileno())
        output.seek(0)
        text = output.read()
    read = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(notes.iterdir())]
    shutil.rmtree(place)
    return Ended(code, text, [(each["updates"], each["checksum"]) for each in read], alarms_of(ledgers, text))


def limited(words: Sequence[str], folder: Path, environ: Mapping[str, str], output: int) -> int:
    running = subprocess.Popen(
        words, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        return running.wait(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        running.terminate()  # a launcher ends its ranks, which have sessions of their own
        with suppress(subprocess.TimeoutExpired):
            running.wait(timeout=_GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        return _HUNG


def alarms_of(ledgers: Path, text: str) -> dict[tuple[str, bool], int]:
    """From the ledgers, and from the watch's closing lines the clauses that no ledger has."""
    found: dict[tuple[str, bool], int] = {}
    lines = [json.loads(line) for file in sorted(ledgers.iterdir()) for line in file.open(encoding="utf-8")]
    for line in lines:
        if line["kind"] == "violation":
            key, step = (line["clause"], line["action"] == "suspected"), line["step"] or 0
            found[key] = min(step, found.get(key, step))
    recorded = {clause for clause, _ in found}
    return found | {(clause, False): 0 for clause in _COUNTED.findall(text) if clause not in recorded}


if __name__ == "__main__":
    raise SystemExit(main())
