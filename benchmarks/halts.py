"""Stop four ranks from one of them, wherever the others are: `python -m benchmarks.halts`.

Each round starts ranks, brings all but rank 1 to a place (in a collective, in backward, in the data loader, or each in
another), lets rank 1 break (a violation, an error, no memory, SIGKILL, SIGSTOP), and measures the seconds from there
to the end of the last rank. A round is good if that is within the limit, every rank ended other than with 0, every
live rank said why, and no process is left, those of the data loader included. On GPUs, where torch has several ways to
handle errors of NCCL: `--backend nccl --places collective,backward,layers,graph --handling 0,1,2,3`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from benchmarks.halting_rank import CULPRIT, PLACES, REASON
from benchmarks.runs import table
from falsify.nemesis.processes import alive, family

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ON_CPUS = "collective,backward,layers,loader,reading,mixed"
_MIXED = ("collective", "", "backward", "loader", "layers", "reading")
"""Where the ranks are when each is in another place."""
_SAYS = {
    "violation": REASON,
    "error": f"failed at step 1, before its forward pass, which is no violation: ValueError: {REASON}",
    "memory": "ran out of memory at step 1, before its forward pass, which is no violation: ",
    "killed": "died at step 1, before its forward pass, which is no violation: ",
    "stopped": "hangs at step 1, before its forward pass, which is no violation: ",
}
"""What every live rank must say, by what rank 1 did."""


@dataclass(frozen=True)
class Started:
    """The processes of a round: its ranks, or torch's launcher, and what meets them."""

    processes: tuple[subprocess.Popen[bytes], ...]
    launched: bool
    store: TCPStore | None = None
    """Held here, as a launcher holds it: no rank is more needed than another."""

    def members(self) -> set[int]:
        """Those that run, with what descends from them."""
        return {pid for process in self.processes if process.poll() is None for pid in family(process.pid)}


@dataclass(frozen=True)
class Round:
    """The outcome of one round; `ended` says of each rank how: exit code, and whether it was ended or raised."""

    place: str
    cause: str
    seconds: float
    codes: tuple[int, ...]
    ended: tuple[str, ...]
    left: tuple[int, ...]
    silent: tuple[int, ...]

    def good(self, limit_s: float) -> bool:
        """Whether it kept what is promised."""
        return self.seconds <= limit_s and not self.left and not self.silent and 0 not in self.codes


def main() -> int:
    """Print a line for each round and a table; 0 if all were good."""
    options = _options()
    rounds, count = [], 0
    for number in range(options.rounds):
        place, cause, handling = _turn(number, options)
        try:
            found = _round(place, cause, handling, options)
        except RuntimeError as error:
            print(f"{number} {place} {cause} did not start: {error}", flush=True)
            continue
        rounds.append(found)
        good = found.good(options.limit + options.patience * (cause == "stopped"))
        count += good
        print(
            f"{number} {place} {cause}{f' handling {handling}' * bool(handling)} {found.seconds:.2f} s "
            f"{', '.join(found.ended)}{'' if good else f'  NOT GOOD: left {found.left}, silent {found.silent}'}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in rounds], indent=1) + "\n")
    print(_summary(rounds))
    times = sorted(one.seconds for one in rounds)
    spread = f"; median {statistics.median(times):.2f} s, longest {times[-1]:.2f} s" if times else ""
    print(f"{count} of {options.rounds} good{spread}")
    return 0 if count == options.rounds else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--places", default=_ON_CPUS, help=f"of {','.join(PLACES)},mixed")
    parser.add_argument("--causes", default="violation", help=f"of {','.join(_SAYS)}")
    parser.add_argument("--backend", default="gloo", help="gloo, or nccl with a device for each rank")
    parser.add_argument("--handling", default="", help=f"values of {_HANDLING}, in turn; as it is if not given")
    parser.add_argument("--soft", action="store_true", help="without hard_stop")
    parser.add_argument("--torchrun", action="store_true", help="under torch's launcher, which ends ranks too")
    parser.add_argument("--ready-within", type=float, default=180.0, help="until rank 1 breaks, in seconds")
    parser.add_argument("--timeout", type=float, default=60.0, help="of the loop's process group, in seconds")
    parser.add_argument("--patience", type=float, default=2.0, help="for a stopped process, added to the limit")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds")
    parser.add_argument("--show", action="store_true", help="print what the ranks said")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for given, known in ((options.places, (*PLACES, "mixed")), (options.causes, tuple(_SAYS))):
        if unknown := [word for word in given.split(",") if word not in known]:
            parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
    if options.ranks <= CULPRIT:
        parser.error(f"rank {CULPRIT} breaks, so there must be {CULPRIT + 1} or more")
    return options


def _turn(number: int, options: argparse.Namespace) -> tuple[str, str, str]:
    """The place, the cause and the way to handle errors of round `number`: all places first, then the next cause."""
    chosen = []
    for each in (options.places, options.causes, options.handling):
        several = each.split(",")
        chosen.append(several[number % len(several)])
        number //= len(several)
    place, cause, handling = chosen
    return place, cause, handling


def _summary(rounds: Sequence[Round]) -> str:
    rows = []
    for place, cause in dict.fromkeys((one.place, one.cause) for one in rounds):
        these = [one for one in rounds if (one.place, one.cause) == (place, cause)]
        times = [one.seconds for one in these]
        how = dict.fromkeys(word.partition(" ")[2] for one in these for word in one.ended)
        left = sum(len(one.left) for one in these)
        rows.append(
            (place, cause, len(these), f"{statistics.median(times):.2f}", f"{max(times):.2f}", left, "; ".join(how))
        )
    return table(("others are", "rank 1", "rounds", "median s", "longest s", "left", "how they ended"), rows)


def _round(place: str, cause: str, handling: str, options: argparse.Namespace) -> Round:
    """Raises `RuntimeError`, with what was written, if the ranks do not come to where rank 1 breaks."""
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        started = _start(_words(place, cause, folder, options), folder, handling, options)
        began = _wait_for_start(folder, started, options.ready_within)
        ranks = [int((folder / f"pid-{rank}").read_text()) for rank in range(options.ranks)]
        seconds, members = _wait_for_end(started, ranks, began, options.timeout + 30)
        left = _end_what_is_left(started, members)
        codes = tuple(process.wait() for process in started.processes)
        said = _said(folder, options)
        if options.show:
            print("\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(said)), flush=True)
    return Round(
        place,
        cause,
        seconds,
        codes,
        tuple(_how(rank, codes, said) for rank in range(options.ranks)),
        left,
        tuple(rank for rank, text in enumerate(said) if _SAYS[cause] not in text and not _mute(rank, cause)),
    )


def _words(place: str, cause: str, folder: Path, options: argparse.Namespace) -> list[str]:
    """The words that a rank is told."""
    places = [_MIXED[rank % len(_MIXED)] if place == "mixed" else place for rank in range(options.ranks)]
    words = [",".join(places), cause, str(folder), f"--timeout={options.timeout}"]
    words += [f"--patience={options.patience}", f"--backend={options.backend}"]
    return words + ["--hard-stop"] * (not options.soft)


def _wait_for_end(started: Started, ranks: list[int], began: float, patience: float) -> tuple[float, set[int]]:
    """Seconds from `began` to the end of the last rank, `patience` if some do not end; and all processes seen."""
    members = started.members()
    ends: dict[int, float] = {}
    while len(ends) < len(ranks) and time.monotonic() < began + patience:
        ends |= {pid: time.monotonic() for pid in ranks if pid not in ends and not alive(pid)}
        members |= {pid for rank in ranks if rank not in ends for pid in family(rank)}
        time.sleep(0.01)
    return (max(ends.values()) - began if len(ends) == len(ranks) else patience), members


def _end_what_is_left(started: Started, members: set[int]) -> tuple[int, ...]:
    """Kill those of `members` that outlived the round and are not torch's launcher; who they were."""
    for process in started.processes:
        if not started.launched and not alive(process.pid):
            process.wait()
    time.sleep(0.2)
    launchers = {process.pid for process in started.processes} if started.launched else set()
    left = tuple(sorted(pid for pid in members - launchers if alive(pid)))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def _mute(rank: int, cause: str) -> bool:
    """Whether a rank cannot say anything."""
    return rank == CULPRIT and cause in ("killed", "stopped")


def _start(words: list[str], folder: Path, handling: str, options: argparse.Namespace) -> Started:
    module = ["-m", "benchmarks.halting_rank", *words]
    environment = os.environ | ({_HANDLING: handling} if handling else {})
    if options.torchrun:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
        launcher += ["--log-dir", str(folder / "logs"), "--redirects", "2"]
        with (folder / "launcher").open("wb") as file:
            line = [sys.executable, *launcher, *module]
            return Started((subprocess.Popen(line, env=environment, stdout=file, stderr=file),), launched=True)
    store = TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    found = []
    for rank in range(options.ranks):
        own = environment | address | {"RANK": str(rank), "WORLD_SIZE": str(options.ranks)}
        with (folder / f"said-{rank}").open("wb") as file:
            found.append(subprocess.Popen([sys.executable, *module], env=own, stdout=file, stderr=file))
    return Started(tuple(found), launched=False, store=store)


def _wait_for_start(folder: Path, started: Started, patience: float) -> float:
    """When rank 1 broke, by the monotonic clock; raises `RuntimeError` if not within `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        ended = any(process.poll() is not None for process in started.processes)
        if (folder / "began").exists() and (told := (folder / "began").read_text()):
            return float(told)
        if ended or time.monotonic() > deadline:
            for pid in started.members():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in started.processes:
                process.wait()
            why = "a process ended" if ended else f"{patience:g} s went by"
            raise RuntimeError(f"{why} before rank {CULPRIT} broke\n{_written(folder)}")
        time.sleep(0.005)


def _written(folder: Path) -> str:
    """All that ranks and torch's launcher wrote, by the name of the file."""
    paths = [path for pattern in ("said-*", "launcher", "logs/**/*.log") for path in sorted(folder.glob(pattern))]
    return "\n".join(f"--- {path.relative_to(folder)}\n{path.read_text(errors='replace')}" for path in paths)


def _said(folder: Path, options: argparse.Namespace) -> list[str]:
    if not options.torchrun:
        return [(folder / f"said-{rank}").read_text() for rank in range(options.ranks)]
    # The launcher ends the other ranks as soon as it sees one gone: what counts is what it names as the cause.
    text = (folder / "launcher").read_text()
    return [text.partition("Root Cause")[2]] * options.ranks


def _how(rank: int, codes: Sequence[int], said: Sequence[str]) -> str:
    if len(codes) == 1:
        return f"{rank}: by the launcher"
    text = said[rank]
    word = "ended by its own thread" if "  ended    rank" in text else "raised" if "Traceback" in text else "was ended"
    return f"{rank}: {word}, exit {codes[rank]}"


if __name__ == "__main__":
    raise SystemExit(main())
