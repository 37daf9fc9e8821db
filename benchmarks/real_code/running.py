"""A script is run plain, watched and with mistakes planted, and what was seen is compared with the table."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.real_code.checkout import patch, script, take_out, working
from benchmarks.real_code.row import Expected, Plant, Row

_PREAMBLE = Path(__file__).parent / "preamble"
_LIMIT_S = 100
_GRACE_S = 35
_HUNG = 124
_SHARE = re.compile(r"([\d.]+)% of the time")
_COUNTED = re.compile(r"^  ([a-z-]+): (\d+) times$", re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    """What a run left. notes: of each rank, updates and checksum. share: of the time, as the watch's closing line."""

    code: int
    seconds: float
    text: str
    notes: tuple[tuple[int, int], ...]
    alarms: tuple[Alarm, ...] = ()
    share: float | None = None

    @property
    def clauses(self) -> set[str]:
        """What was broken or suspected."""
        return {alarm.clause for alarm in self.alarms}


@dataclass(frozen=True)
class Alarm:
    """A violation or suspicion. step: its first, None where only the closing lines have it. times: how often."""

    clause: str
    step: int | None
    suspected: bool
    times: int


@dataclass
class Judged:
    """A row's result. wrong: in words, everything that is not as the table says; empty where all is."""

    name: str
    codes: tuple[int, ...] = ()
    updates: int = 0
    bits: str = ""
    share: float | None = None
    alarms: list[dict[str, object]] = field(default_factory=list)
    plants: list[dict[str, object]] = field(default_factory=list)
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def judge(row: Row, git: Path, keep: Path | None = None) -> Judged:
    """Run everything that the table has of a row. keep: a folder for what the runs printed."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="real-code-") as folder:
        root = Path(folder)
        take_out(git, row, root / "source")
        plain = _run(row, root, "plain", watched=False)
        watched = _run(row, root, "watched", watched=True)
        found = judged(row, plain, watched)
        for number, plant in enumerate(row.plants):
            ended = _run(row, root, f"planted-{number}", watched=True, plant=plant)
            caught = [asdict(alarm) for alarm in ended.alarms if alarm.clause in plant.clauses]
            found.plants.append({"name": plant.name, "caught": caught, "code": ended.code})
            if ended.code != row.code:
                found.wrong.append(f"planted, exit {ended.code}: {plant.name}: {_last_error(ended.text)}")
            elif not caught:
                found.wrong.append(f"planted and not caught: {plant.name}")
        if keep is not None:
            for file in root.glob("*.txt"):
                shutil.copy(file, keep / f"{row.name.replace('/', '-')}-{file.name}")
    found.seconds = time.perf_counter() - began
    return found


def judged(row: Row, plain: Ended, watched: Ended) -> Judged:
    """What codes, bits and alarms of the two runs are, and what of it is not as the table says."""
    codes, bits = (plain.code, watched.code), _bits(row, plain, watched)
    updates = max((count for count, _ in watched.notes), default=0)
    found = Judged(row.name, codes, updates, bits, watched.share)
    for name, ended in (("plain", plain), ("watched", watched)):
        if ended.code != row.code:
            found.wrong.append(f"{name}: exit {ended.code}, not {row.code}: {_last_error(ended.text)}")
    if not found.updates:
        found.wrong.append("no update was made")
    if found.bits not in ("equal", "unseeded"):
        found.wrong.append(f"weights of plain and watched: {found.bits}")
    for alarm in watched.alarms:
        known = _known(alarm, row.expected)
        found.alarms.append(
            asdict(alarm)
            | {
                "true": known is not None,
                "reason": known.reason if known else "",
                "finding": known.finding if known else "",
            }
        )
        if known is None:
            kind = "suspicion" if alarm.suspected else "violation"
            found.wrong.append(f"FALSE {kind}: {alarm.clause} at step {alarm.step}, {alarm.times} times")
    for expected in row.expected:
        if not any(_known(alarm, (expected,)) for alarm in watched.alarms):
            found.wrong.append(f"expected and not seen: {expected.clause} ({expected.reason})")
    return found


def _known(alarm: Alarm, expected: Sequence[Expected]) -> Expected | None:
    return next((each for each in expected if (each.clause, each.suspected) == (alarm.clause, alarm.suspected)), None)


def _bits(row: Row, plain: Ended, watched: Ended) -> str:
    """Whether the weights after every update of every rank were the same, plain and watched."""
    if row.unseeded:
        return "unseeded"
    if [updates for updates, _ in plain.notes] != [updates for updates, _ in watched.notes]:
        return "other numbers of updates"
    return "equal" if plain.notes == watched.notes else "different"


def _last_error(text: str) -> str:
    """The last line that names an error, without which a reader has nothing to go by."""
    errors = [line.strip() for line in text.splitlines() if re.search(r"\w(Error|Exception)\b", line)]
    named = [line for line in errors if "ChildFailedError" not in line]
    return (named or errors or ["no error was named"])[-1][:300]


def command(row: Row, *, watched: bool) -> list[str]:
    """The words that run a row."""
    words = [sys.executable]
    if row.ranks > 1:
        words += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(row.ranks)]
    if watched:
        words += ["-m", "andon", "watch"]
    target = ["-m", row.path] if row.module else [os.path.relpath(row.path, working(row, Path()))]
    return [*words, *target, *shlex.split(row.arguments)]


def environment(row: Row, root: Path, home: Path, notes: Path) -> dict[str, str]:
    """Of a run: no network, no GPU, a home of its own, our preamble and the checkout first on the path."""
    here = str(Path(__file__).parents[2])
    added = {
        "PYTHONPATH": os.pathsep.join([str(_PREAMBLE), str(root), os.environ.get("PYTHONPATH", ""), here]),
        "HOME": str(home),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        "REAL_CODE_CPU": "1" if row.gpu else "",
        "REAL_CODE_NOTES": str(notes),
    }
    return {**os.environ, **added, **row.environment}


def _run(row: Row, root: Path, name: str, *, watched: bool, plant: Plant | None = None) -> Ended:
    """A run; once more if it hung, since gloo's groups now and then never end (plain as well) as a process does."""
    ended = _once(row, root, name, watched, plant)
    return _once(row, root, f"{name}-again", watched, plant) if ended.code == _HUNG else ended


def _once(row: Row, root: Path, name: str, watched: bool, plant: Plant | None) -> Ended:
    """One run in a copy of the checkout of its own; what it printed is `name`.txt under `root`."""
    place, notes, ledgers, home = (root / f"{name}-{kind}" for kind in ("tree", "notes", "ledgers", "home"))
    shutil.copytree(root / "source", place, symlinks=True)
    if plant is not None:
        patch(place, plant.patches, script(row))
    for folder in (notes, ledgers, home):
        folder.mkdir()
    environ = environment(row, place, home, notes)
    if watched:
        environ["ANDON_LEDGER"] = str(ledgers / "ledger.jsonl")
    began = time.perf_counter()
    with (root / f"{name}.txt").open("w+", encoding="utf-8", errors="replace") as output:
        code = _limited(command(row, watched=watched), working(row, place), environ, output.fileno())
        output.seek(0)
        text = output.read()
    seconds = time.perf_counter() - began
    read = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(notes.iterdir())]
    noted = tuple((each["updates"], each["checksum"]) for each in read)
    shutil.rmtree(place)
    shares = [float(share) / 100 for share in _SHARE.findall(text)]
    return Ended(code, seconds, text, noted, _alarms(ledgers, text), max(shares, default=None))


def _limited(words: Sequence[str], folder: Path, environ: Mapping[str, str], output: int) -> int:
    """The exit code of a command, which is ended with all that it started when its time is over (`_HUNG`)."""
    running = subprocess.Popen(
        words, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        return running.wait(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        running.terminate()  # a launcher ends its ranks, which are sessions of their own
        with suppress(subprocess.TimeoutExpired):
            running.wait(timeout=_GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        return _HUNG


def _alarms(ledgers: Path, text: str) -> tuple[Alarm, ...]:
    """What the ledgers have, by clause; and what only closing lines have, of which no update is known."""
    lines = [json.loads(line) for file in sorted(ledgers.iterdir()) for line in file.open(encoding="utf-8")]
    broken = [line for line in lines if line["kind"] == "violation"]
    kinds = Counter((line["clause"], line["action"] == "suspected") for line in broken)
    alarms = [
        Alarm(clause, min(_step(line) for line in broken if line["clause"] == clause), suspected, times)
        for (clause, suspected), times in kinds.items()
    ]
    named = {clause for clause, _ in kinds}
    alarms += [
        Alarm(clause, None, False, int(times)) for clause, times in _COUNTED.findall(text) if clause not in named
    ]
    return tuple(alarms)


def _step(line: Mapping[str, object]) -> int:
    step = line["step"]
    return step if isinstance(step, int) else 0
