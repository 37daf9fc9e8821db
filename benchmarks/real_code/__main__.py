"""Run well-known scripts plain and watched, and compare what a watch says of them with table.yaml.

A row whose repository is not in the mirror, or whose packages are not installed, is named and left out.
Exit codes: 0 all is as the table says, 1 not, 2 nothing could be run or the command line is wrong.
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
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.real_code import data
from benchmarks.runs import table

_HERE = Path(__file__).parent
_LIMIT_S, _GRACE_S, _HUNG = 100, 35, 124
_SHARE = re.compile(r"([\d.]+)% of the time")
_COUNTED = re.compile(r"^  ([a-z-]+): (\d+) times$", re.MULTILINE)


@dataclass(frozen=True)
class Expected:
    """An alarm that is right, why, and its finding in docs/findings.md, if anybody wrote something wrong."""

    clause: str
    reason: str
    finding: str = ""
    suspected: bool = False


@dataclass(frozen=True)
class Plant:
    """A mistake made on purpose by patches, after which one of the clauses must be broken."""

    name: str
    patches: Sequence[Sequence[str]]
    clauses: Sequence[str]


@dataclass(frozen=True)
class Row:
    """One script of `repository` (owner/name) at `commit`.

    module: run as `-m path`. folder: where it runs, by default beside the script. parts: which paths of the repository
    are taken out, by default all. patches: [old, new] or [old, new, file]; `old` stands there exactly once. gpu: it
    asks for GPUs, and the preamble gives it CPUs. modules: what must be installed. prepare: a function of `data` that
    makes what it reads. files: text files of ours. unseeded: why two runs of it differ.
    """

    name: str
    repository: str
    commit: str
    path: str
    family: str
    arguments: str = ""
    patches: Sequence[Sequence[str]] = ()
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
    code: int = 0
    expected: Sequence[Expected] = ()
    plants: Sequence[Plant] = ()

    @classmethod
    def read(cls, given: dict[str, Any]) -> Row:
        expected = [Expected(**each) for each in given.pop("expected", [])]
        return cls(**given | {"expected": expected, "plants": [Plant(**each) for each in given.pop("plants", [])]})

    @property
    def script(self) -> str:
        return f"{self.path.replace('.', '/')}.py" if self.module else self.path

    def working(self, root: Path) -> Path:
        return root / (str(Path(self.script).parent) if self.folder is None else self.folder)

    def git(self, mirror: Path) -> Path | None:
        """Its repository in the mirror, as `owner+name` or `owner+name.git`, bare or not."""
        name = self.repository.replace("/", "+")
        return next((folder for folder in (mirror / name, mirror / f"{name}.git") if folder.is_dir()), None)


@dataclass(frozen=True)
class Alarm:
    """A violation or suspicion. step: its first; None if only the closing lines have it. times: how often."""

    clause: str
    step: int | None
    suspected: bool
    times: int


@dataclass(frozen=True)
class Ended:
    """What a run left. notes: of each rank, updates and checksum. share: of the time, by the watch's closing line."""

    code: int
    text: str
    notes: list[tuple[int, int]]
    alarms: list[Alarm]
    share: float | None


@dataclass
class Judged:
    name: str
    codes: tuple[int, ...] = ()
    updates: int = 0
    bits: str = ""
    share: float | None = None
    alarms: list[dict[str, object]] = field(default_factory=list)
    plants: list[dict[str, object]] = field(default_factory=list)
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_code", description=__doc__)
    parser.add_argument("--mirror", type=Path, required=True, help="a folder of git repositories, named owner+name")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows by name, or by how their names begin")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything, written after each row")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keeps what the runs print")
    options = parser.parse_args(arguments)
    if not options.mirror.is_dir():
        parser.error(f"--mirror: there is no folder {options.mirror}")
    known = [Row.read(given) for given in yaml.safe_load((_HERE / "table.yaml").read_text(encoding="utf-8"))]
    rows = [row for row in known if not options.only or row.name.startswith(tuple(options.only))]
    if not rows:
        parser.error(f"--only: no row is named so; there are {', '.join(row.name for row in known)}")
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    results: list[Judged] = []
    for row in rows:
        git, absent = row.git(options.mirror), [name for name in row.modules if importlib.util.find_spec(name) is None]
        if git is None or absent:
            why = "not in the mirror" if git is None else f"not installed: {', '.join(absent)}"
            print(f"{row.name}: left out, {why}", file=sys.stderr, flush=True)
            continue
        try:
            found = judge(row, git, options.keep)
        except ValueError as error:  # a line of the table does not fit the repository
            found = Judged(row.name, wrong=[str(error)])
        results.append(found)
        said = "; ".join(found.wrong) or "as the table says"
        print(f"{found.name}: {said} ({found.seconds:.0f} s)", file=sys.stderr, flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(each) for each in results], indent=1), encoding="utf-8")
    head = ("script", "exit plain, watched", "updates", "bits", "true alarms", "false", "planted", "share")
    print(table(head, [cells(each) for each in results]))
    print(*(f"{each.name}: {wrong}" for each in results for wrong in each.wrong), sep="\n")
    return 2 if not results else 1 if any(each.wrong for each in results) else 0


def cells(each: Judged) -> tuple[str, ...]:
    true, false = (
        ", ".join(f"{alarm['clause']} ({alarm['step']})" for alarm in each.alarms if alarm["true"] is kind)
        for kind in (True, False)
    )
    planted = f"{sum(bool(plant['caught']) for plant in each.plants)} of {len(each.plants)}" if each.plants else ""
    share = "" if each.share is None else f"{each.share:.1%}"
    return (each.name, ", ".join(map(str, each.codes)), str(each.updates), each.bits, true, false, planted, share)


def judge(row: Row, git: Path, keep: Path | None) -> Judged:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="real-code-") as folder:
        root = Path(folder)
        take_out(git, row, root / "source")
        found = judged(row, run(row, root, "plain"), run(row, root, "watched"))
        for number, plant in enumerate(row.plants):
            ended = run(row, root, f"planted-{number}", plant)
            caught = [asdict(alarm) for alarm in ended.alarms if alarm.clause in plant.clauses]
            found.plants.append({"name": plant.name, "caught": caught, "code": ended.code})
            if ended.code != row.code:
                found.wrong.append(f"planted, exit {ended.code}: {plant.name}: {last_error(ended.text)}")
            elif not caught:
                found.wrong.append(f"planted and not caught: {plant.name}")
        for file in root.glob("*.txt") if keep is not None else ():
            shutil.copy(file, keep / f"{row.name.replace('/', '-')}-{file.name}")
    found.seconds = time.perf_counter() - began
    return found


def judged(row: Row, plain: Ended, watched: Ended) -> Judged:
    bits = "equal" if plain.notes == watched.notes else "different"
    if [updates for updates, _ in plain.notes] != [updates for updates, _ in watched.notes]:
        bits = "other numbers of updates"
    updates = max((count for count, _ in watched.notes), default=0)
    found = Judged(row.name, (plain.code, watched.code), updates, "unseeded" if row.unseeded else bits, watched.share)
    for name, ended in (("plain", plain), ("watched", watched)):
        if ended.code != row.code:
            found.wrong.append(f"{name}: exit {ended.code}, not {row.code}: {last_error(ended.text)}")
    if not updates:
        found.wrong.append("no update was made")
    if found.bits not in ("equal", "unseeded"):
        found.wrong.append(f"weights of plain and watched: {found.bits}")
    expected = {(each.clause, each.suspected): each for each in row.expected}
    for alarm in watched.alarms:
        known = expected.get((alarm.clause, alarm.suspected))
        finding = known.finding if known else ""
        found.alarms.append(asdict(alarm) | {"true": known is not None, "finding": finding})
        if known is None:
            kind = "suspicion" if alarm.suspected else "violation"
            found.wrong.append(f"FALSE {kind}: {alarm.clause} at step {alarm.step}, {alarm.times} times")
    for key, each in expected.items():
        if key not in {(alarm.clause, alarm.suspected) for alarm in watched.alarms}:
            found.wrong.append(f"expected and not seen: {each.clause} ({each.reason})")
    return found


def last_error(text: str) -> str:
    errors = [line.strip() for line in text.splitlines() if re.search(r"\w(Error|Exception)\b", line)]
    named = [line for line in errors if "ChildFailedError" not in line]
    return (named or errors or ["no error was named"])[-1][:300]


def take_out(git: Path, row: Row, into: Path) -> None:
    """Write the row's files at its commit, patched, and what it reads. Raises `ValueError` if the table is wrong."""
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


def patch(root: Path, patches: Sequence[Sequence[str]], default: str) -> None:
    """Put each patch into its file under `root`. Raises `ValueError` unless what it replaces stands there once."""
    for old, new, *more in patches:
        name = more[0] if more else default
        text = (root / name).read_text(encoding="utf-8") if (root / name).is_file() else ""
        if (count := text.count(old)) != 1:
            raise ValueError(f"{name}: {old!r} stands there {count} times, not once")
        (root / name).write_text(text.replace(old, new), encoding="utf-8")


def run(row: Row, root: Path, name: str, plant: Plant | None = None) -> Ended:
    ended = once(row, root, name, plant)
    return once(row, root, f"{name}-again", plant) if ended.code == _HUNG else ended


def once(row: Row, root: Path, name: str, plant: Plant | None) -> Ended:
    place, notes, ledgers, home = (root / f"{name}-{kind}" for kind in ("tree", "notes", "ledgers", "home"))
    shutil.copytree(root / "source", place, symlinks=True)
    if plant is not None:
        patch(place, plant.patches, row.script)
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
    share = max((float(share) / 100 for share in _SHARE.findall(text)), default=None)
    return Ended(code, text, [(each["updates"], each["checksum"]) for each in read], alarms_of(ledgers, text), share)


def limited(words: Sequence[str], folder: Path, environ: Mapping[str, str], output: int) -> int:
    running = subprocess.Popen(
        words, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        return running.wait(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        running.terminate()  # a launcher ends its ranks, which have their own sessions
        with suppress(subprocess.TimeoutExpired):
            running.wait(timeout=_GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        return _HUNG


def alarms_of(ledgers: Path, text: str) -> list[Alarm]:
    lines = [json.loads(line) for file in sorted(ledgers.iterdir()) for line in file.open(encoding="utf-8")]
    broken = [line for line in lines if line["kind"] == "violation"]
    steps = {line["clause"]: min(x["step"] or 0 for x in broken if x["clause"] == line["clause"]) for line in broken}
    kinds = Counter((line["clause"], line["action"] == "suspected") for line in broken)
    alarms = [Alarm(clause, steps[clause], suspected, times) for (clause, suspected), times in kinds.items()]
    closing = [(clause, int(times)) for clause, times in _COUNTED.findall(text) if clause not in steps]
    return alarms + [Alarm(clause, None, False, times) for clause, times in closing]


if __name__ == "__main__":
    raise SystemExit(main())
