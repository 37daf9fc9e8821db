"""Runs of four ranks under attack from the same machine: `python -m falsify.nemesis.attacked --seconds 1800`.

They alternate: `andon train`, called at every port at which it listens, from before its ranks meet until its end; and a
loop under torchrun and `andon.watch`, with lies in its store too. Both must end with the bits of a run without an
attack, and the watch must then notice a real fault. A watch may also halt with a message. Anything else is a loss, and
the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .attacker import Caller, Forger, listeners
from .left_behind import Undisturbed
from .processes import family
from .run import Launch, Run, row_lines
from .watched_loop import REASON

WORKERS = 4
_LIMIT_S = 180.0
_PAUSE_S = 0.005
_CALLS = 20
"""The number of rounds of calls between two looks at the listeners."""
_EACH = 3
"""The number of lies of each kind before the loop may continue."""


@dataclass(frozen=True)
class Attacked:
    """loss: how the attack won; empty: it did not. sent: the messages by kind. halted: the message of a watch."""

    loss: str
    sent: Counter[str] = field(default_factory=Counter)
    halted: str = ""


def _opened(folder: Path) -> Run:
    folder.mkdir(parents=True)
    rows, eval_rows = folder / "rows.jsonl", folder / "held.jsonl"
    for path, count in ((rows, 86), (eval_rows, 30)):
        path.write_bytes(b"".join(row_lines(path.name, count)))
    return Run(folder, folder / "run", rows, eval_rows, Undisturbed(folder / "run"), random.Random(0))


def _until(run: Run, seen: Callable[[], bool], act: Callable[[], object] = lambda: None) -> None:
    """Repeat `act` until `seen()`, the end of the run, or the time limit."""
    deadline = time.monotonic() + _LIMIT_S
    while not seen() and not run.over() and time.monotonic() < deadline:
        act()
        time.sleep(_PAUSE_S)


def train(folder: Path, seed: int | None, whole: Undisturbed | None = None, *, guesses: bool = False) -> Attacked:
    """`andon train` in `folder / "run"`, under attack if there is a seed. whole: a run without an attack."""
    run, caller, losses = _opened(folder), Caller(seed or 0, guesses=guesses), list[str]()

    def call() -> None:
        processes = family(run.launcher.pid)
        found = listeners(processes)
        for host, port in found * _CALLS:
            caller.call(host, port)
        losses.extend(f"it listens at {host}" for host, _ in found if not host.is_loopback)
        losses.extend(f"the launcher listens at {host}:{port}" for host, port in listeners(processes[:1]))

    try:
        run.start(Launch(str(WORKERS), ("run.timeout_s=60",)))
        _until(run, lambda: False, call if seed is not None else lambda: None)
        ending = run.end(0.0)
    finally:
        caller.close()
        run.kill()
    if ending.codes != (0,):
        losses = [f"ended with {ending.codes[0]}: {ending.output[-2000:]}"]
    elif whole is not None and (bits := run.reference.result) != whole.result:
        losses.append(f"its bits are {bits}, and not {whole.result}")
    return Attacked(next(iter(losses), ""), caller.sent)


def watch(folder: Path, seed: int | None, bits: str = "") -> Attacked:
    """A loop under torchrun and `andon.watch`, under attack if there is a seed. bits: of a loop without an attack."""
    run, caller, counts = _opened(folder), Caller(seed or 0), Counter[str]()
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
    try:
        run.spawn([sys.executable, "-m", *torchrun, "-m", f"{__package__}.watched_loop", str(folder)], Launch())
        _until(run, lambda: _all(folder, "port"))
        ports = listeners(family(run.launcher.pid)[1:])
        forger = None if seed is None else Forger(int((folder / "port-0").read_text()), seed)
        kinds = [] if forger is None else [kind for kind in forger.kinds for _ in range(_EACH)]

        def attack() -> None:
            if forger is not None:
                forger.forge(kinds.pop() if kinds else "")
                for host, port in ports:
                    caller.call(host, port)

        _until(run, lambda: not kinds, attack)
        (folder / "go").touch()
        _until(run, lambda: _all(folder, "weights"), attack)
        counts += caller.sent + (forger.forged if forger else Counter())
        (folder / "quiet").touch()
        _until(run, lambda: False)
    except RuntimeError:  # the store has ended with the loop
        counts["cut short"] += 1
        _until(run, lambda: False)
    finally:
        hangs = not run.over()
        caller.close()
        run.kill()
    return Attacked("it hangs", counts) if hangs else _judged(folder, bits, counts, run.output())


def _judged(folder: Path, bits: str, counts: Counter[str], text: str) -> Attacked:
    if not _all(folder, "weights"):
        halted = next((line for line in text.splitlines() if "Violation: " in line or "andon: rank" in line), "")
        return Attacked("" if halted else f"it ended without a message of Andon: {text[-2000:]}", counts, halted)
    found = {(folder / f"weights-{rank}").read_text() for rank in range(WORKERS)}
    if len(found) != 1 or (bits and found != {bits}):
        return Attacked(f"its bits are {found}, and not {bits}", counts)
    for rank in range(WORKERS):
        path = folder / f"rank-{rank}.json"
        noticed = json.loads(path.read_text()) if path.exists() else {}
        if not noticed.get("found") or noticed["before"] or REASON not in noticed["woken"]:
            return Attacked(f"rank {rank} noticed {noticed}; {text[-2000:]}", counts)
    return Attacked("", counts)


def bits_of(folder: Path) -> str:
    return (folder / "weights-0").read_text()


def _all(folder: Path, name: str) -> bool:
    return all((folder / f"{name}-{rank}").exists() for rank in range(WORKERS))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m falsify.nemesis.attacked", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--guesses", action="store_true", help="send gloo what a rank would send: known to end runs")
    options = parser.parse_args()
    deadline, sent, lost, halted, runs = time.monotonic() + options.seconds, Counter[str](), 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="andon-attacked-") as place:
        base = Path(place)
        for alone in (train(base / "train", None), watch(base / "watch", None)):
            if alone.loss:
                print(f"without an attack: {alone.loss}")
                return 1
        whole, bits = Undisturbed(base / "train" / "run"), bits_of(base / "watch")
        while time.monotonic() < deadline:
            runs += 1
            folder, seed, name = base / str(runs), options.seed * 1_000_003 + runs, "train" if runs % 2 else "watch"
            if name == "train":
                found = train(folder, seed, whole, guesses=options.guesses)
            else:
                found = watch(folder, seed, bits)
            sent, lost, halted = sent + found.sent, lost + bool(found.loss), halted + bool(found.halted)
            print(f"{runs} {name}: {found.loss or found.halted or 'ok'} ({found.sent.total()} messages)", flush=True)
    print(f"{runs} runs, {lost} lost, {halted} halted in words; " + ", ".join(f"{n} {k}" for k, n in sent.items()))
    return int(lost > 0 or runs == 0)


if __name__ == "__main__":
    raise SystemExit(main())
