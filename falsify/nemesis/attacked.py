"""Runs of four ranks that somebody on the same machine attacks: `python -m falsify.nemesis.attacked --seconds 1800`.

In turn `andon train`, called at every port at which it listens, from before its ranks meet until it has ended, and a
loop under torchrun and `andon.watch`, into whose store lies are written too. Both are to end with the bits of one that
was left alone, the watch having seen what was wrong afterwards; a watch may also halt, in words. Anything else is a
loss, and ends this with 1.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .attacker import Caller, Forger, listeners
from .left_behind import Undisturbed
from .processes import family, send
from .run import SETTINGS, command, environment, row_lines
from .watched_loop import REASON

WORKERS = 4
_LIMIT_S = 180.0
_PAUSE_S = 0.005
_PATIENT = "run.timeout_s=60"
_CALLS = 20
"""So many in a row, before it is looked where a run listens now."""
_EACH = 3
"""So many lies of each kind are told to a loop before it goes on."""


@dataclass(frozen=True)
class Attacked:
    """What came of one attacked run: how it was lost, or nothing; what was said to it; whether it halted in words."""

    loss: str
    said: Counter[str] = field(default_factory=Counter)
    halted: str = ""


def train(folder: Path, seed: int | None, *, guesses: bool = False) -> Attacked:
    """`andon train` in `folder / "run"`; with a seed: attacked. Its bits are for the caller to compare.

    guesses: as `Caller` makes them.
    """
    folder.mkdir(parents=True)
    for name in ("rows", "held"):
        (folder / f"{name}.jsonl").write_bytes(b"".join(row_lines(name, 86 if name == "rows" else 30)))
    settings = [part for value in (*SETTINGS, _PATIENT) for part in ("--set", value)]
    files = ["--data", str(folder / "rows.jsonl"), "--eval-data", str(folder / "held.jsonl")]
    arguments = command(folder / "run", "--workers", str(WORKERS), *files, *settings)
    log, caller = folder / "said", Caller(seed or 0, guesses=guesses)
    with log.open("wb") as said:
        process = subprocess.Popen(arguments, stdout=said, stderr=said, env=environment())
    loss = ""
    try:
        deadline = time.monotonic() + _LIMIT_S
        while process.poll() is None and time.monotonic() < deadline:
            if seed is not None:
                loss = loss or _call(caller, process.pid)
            time.sleep(_PAUSE_S)
    finally:
        caller.close()
        process.kill()
        process.wait()
    if process.returncode != 0:
        loss = f"ended with {process.returncode}: {log.read_text()[-2000:]}"
    return Attacked(loss, caller.said)


def _call(caller: Caller, launcher: int) -> str:
    """Some calls at each listener; what is wrong with these, if anything is."""
    found, own = listeners(family(launcher)), listeners([launcher])
    for host, port in found * _CALLS:
        caller.call(host, port)
    far = [host for host, _ in found if not host.is_loopback]
    return f"it listens at {far[0]}" if far else f"the launcher listens at {own[0][0]}:{own[0][1]}" if own else ""


def watch(folder: Path, seed: int | None, bits: str = "") -> Attacked:
    """A loop under torchrun and `andon.watch`; with a seed: attacked, until it is told to go on to its end.

    bits: of a loop that was left alone.
    """
    folder.mkdir(parents=True)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
    arguments = [sys.executable, *start, "-m", f"{__package__}.watched_loop", str(folder)]
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(arguments, stdout=said, stderr=said, env=environment())
    caller, counts = Caller(seed or 0), Counter[str]()
    try:
        _until(process, lambda: _all(folder, "port"))
        if seed is not None:
            forger = Forger(int((folder / "port-0").read_text()), seed)
            ports = listeners(pid for pid in family(process.pid) if pid != process.pid)
            kinds = [kind for kind in forger.kinds for _ in range(_EACH)]

            def attack() -> None:
                forger.forge(kinds.pop() if kinds else "")
                for host, port in ports:
                    caller.call(host, port)

            _until(process, lambda: not kinds, attack)
            (folder / "go").touch()
            _until(process, lambda: _all(folder, "weights"), attack)
            counts = forger.forged + caller.said
        else:
            (folder / "go").touch()
            _until(process, lambda: _all(folder, "weights"))
        (folder / "calm").touch()
        _until(process, lambda: False)
    except RuntimeError as error:  # the store has ended with the loop
        counts["cut short"] += 1
        if process.poll() is None:
            _until(process, lambda: False)
        if process.poll() is None:
            return Attacked(f"it hangs: {error}", counts)
    finally:
        caller.close()
        for pid in family(process.pid)[::-1]:
            send(pid, signal.SIGKILL)
        process.wait()
    return _judged(folder, bits, counts)


def _judged(folder: Path, bits: str, counts: Counter[str]) -> Attacked:
    text = (folder / "said").read_text(errors="replace")
    if not _all(folder, "weights"):
        halted = next((line for line in text.splitlines() if "Violation: " in line or "andon: rank" in line), "")
        return Attacked("" if halted else f"it ended without a word of ours: {text[-2000:]}", counts, halted)
    found = {(folder / f"weights-{rank}").read_text() for rank in range(WORKERS)}
    if len(found) != 1 or (bits and found != {bits}):
        return Attacked(f"its bits are {found}, and not {bits}", counts)
    for rank in range(WORKERS):
        path = folder / f"rank-{rank}.json"
        told = json.loads(path.read_text()) if path.exists() else {}
        if not told.get("found") or told["before"]:
            return Attacked(f"rank {rank} made of what was wrong: {told}; {text[-2000:]}", counts)
        if REASON not in told["woken"]:
            return Attacked(f"rank {rank} was woken by {told['woken']!r}; {text[-2000:]}", counts)
    return Attacked("", counts)


def bits_of(folder: Path) -> str:
    """The bits of a loop that has ended."""
    return (folder / "weights-0").read_text()


def _all(folder: Path, name: str) -> bool:
    return all((folder / f"{name}-{rank}").exists() for rank in range(WORKERS))


def _until(process: subprocess.Popen[bytes], what: Callable[[], bool], doing: Callable[[], None] | None = None) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not what() and process.poll() is None and time.monotonic() < deadline:
        if doing is not None:
            doing()
        time.sleep(_PAUSE_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack for so long; 1 where anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m falsify.nemesis.attacked", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--guesses", action="store_true", help="say to gloo what a rank would: known to end runs")
    asked = parser.parse_args(arguments)
    deadline, said, lost, halted, runs = time.monotonic() + asked.seconds, Counter[str](), 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="andon-attacked-") as place:
        beside = Path(place)
        alone = train(beside / "train", None), watch(beside / "watch", None)
        for each in alone:
            if each.loss:
                print(f"without an attack: {each.loss}")
                return 1
        whole, bits = Undisturbed(beside / "train" / "run").result, bits_of(beside / "watch")
        while time.monotonic() < deadline:
            runs += 1
            folder, seed = beside / str(runs), asked.seed * 1_000_003 + runs
            found = train(folder, seed, guesses=asked.guesses) if runs % 2 else watch(folder, seed, bits)
            loss = found.loss
            if runs % 2 and not loss and Undisturbed(folder / "run").result != whole:
                loss = f"its bits are {Undisturbed(folder / 'run').result}, and not {whole}"
            said, lost, halted = said + found.said, lost + bool(loss), halted + bool(found.halted)
            name = "train" if runs % 2 else "watch"
            print(f"{runs} {name}: {loss or found.halted or 'ok'} ({found.said.total()} messages)", flush=True)
    print(f"{runs} runs, {lost} lost, {halted} halted in words; " + ", ".join(f"{n} {k}" for k, n in said.items()))
    return int(lost > 0 or runs == 0)


if __name__ == "__main__":
    raise SystemExit(main())
