"""Networks that break, on runs under torchrun on several hosts: rows 10 and 12 to 17 (issue 5, item 5).

Each host has one agent and one rank; all share the run folder. The promise concerns the end of the ranks
(`host_agent`), and that of torchrun only if it restarts them.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations

from psutil import Process

from .hosts import Host, lan, unavailable
from .language import Fault, Guard, Nemesis, Place, Promise
from .planting import Struck
from .processes import alive, command_line, family, send
from .run import TIMEOUT_S, Launch, NotStruckError, Run

_STRIKES = 6
"""The number of updates after which a fault strikes."""
_WITHIN_S = TIMEOUT_S + 2.0
_ANSWER_S = 60.0
_ARRIVES_S = 5.0
"""How long a datagram may take on a busy machine."""
_LAST_INTERFACE = "ANDON_LAST_HOST_IFNAME"
"""In a launch's environment: the network interface for the last host's rank."""


@dataclass(frozen=True)
class Hosts(Place):
    """`size` hosts, with torchrun on each. restarts: torchrun continues after its rank has failed."""

    size: int
    restarts: bool = False

    def needs(self) -> str | None:
        return unavailable() or None

    @contextmanager
    def taken(self, run: Run) -> Iterator[None]:
        with lan(self.size) as run.hosts:
            yield

    def start(self, run: Run, launch: Launch) -> None:
        """Start one agent on each host. The first host holds the rendezvous."""
        endpoint = f"{run.hosts[0].hostname}:{run.hosts[0].free_port()}"
        wrong = dict(launch.environment).get(_LAST_INTERFACE, "")
        size = ["--nnodes", str(self.size), "--nproc-per-node", "1", *["--max-restarts", "3"] * self.restarts]
        # The rank writes to another stream than torchrun, so that their output can be told apart.
        rank = ["--no-python", "sh", "-c", 'exec "$@" 2>&1', "sh", sys.executable, *run.arguments(launch)]
        for number, host in enumerate(run.hosts):
            meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "nemesis"]
            meeting += ["--local-addr", host.address, "--rdzv-conf", f"is_host={int(number == 0)}"]
            log, keep = run.scratch / f"agent-{number}", str(int(self.restarts))
            agent = [sys.executable, "-m", f"{__package__}.host_agent", str(run.folder), str(log), keep]
            variables = {"GLOO_SOCKET_IFNAME": wrong} if wrong and number == self.size - 1 else {}
            run.spawn(host.command([*agent, "--", *size, *meeting, *rank], variables), launch)


def _ranks_of(run: Run) -> list[Process]:
    """The processes of the ranks, by host."""

    def is_rank(line: str) -> bool:
        above = "torch.distributed.run" in line or "host_agent" in line or line.startswith("sh ")
        return "-m andon train" in line and not above

    members = [process for command in run.commands for process in family(command.pid)]
    return [process for process in members if is_rank(command_line(process))]


@dataclass(frozen=True)
class Cut:
    """A broken connection between hosts.

    pair: the numbers of the two hosts, which both still reach all others; empty: the last host and all others. way:
    `link` (the last host's interface goes down), or the lost messages: `both`, `to` the second host, `from` it.
    """

    way: str = "both"
    pair: tuple[int, ...] = ()

    def make(self, run: Run) -> None:
        if self.way == "link":
            run.hosts[-1].unplug()
            return
        for one, other in self._lost(run):
            one.drop(other)

    def mend(self, run: Run) -> None:
        """Undo `make`, even if only a part of it was done."""
        if self.way == "link":
            run.hosts[-1].plug()
            return
        for one, other in self._lost(run):
            one.undrop(other)

    def _lost(self, run: Run) -> list[tuple[Host, Host]]:
        """The pairs (sender, receiver) without a connection."""
        *rest, last = [run.hosts[number] for number in self.pair] or run.hosts
        ways = {"to": [(host, last) for host in rest], "from": [(last, host) for host in rest]}
        return ways.get(self.way) or ways["to"] + ways["from"]

    def proof(self, run: Run) -> str:
        """Send datagrams between all hosts. Raises `NotStruckError` if the wrong ones arrive."""
        lost = self._lost(run)
        for pair in permutations(run.hosts, 2):
            one, other = pair
            if pair in lost and one.reaches(other):
                raise NotStruckError(f"datagrams from {one.hostname} to {other.hostname} arrive")
            if pair not in lost and not one.reaches(other, _ARRIVES_S):
                raise NotStruckError(f"datagrams from {one.hostname} to {other.hostname} do not arrive either")
        named = ", ".join(f"{one.hostname} to {other.hostname}" for one, other in lost)
        return f"no datagram arrives from {named}; all others do"


def _cut(cut: Cut, then: Callable[[Run, float, str], Struck] | None = None) -> Fault:
    """Cut the hosts off each other while ranks train.

    then: called with the run, the time of the cut and its proof; default: the cut lasts until all has ended.
    """

    def strike(run: Run) -> Struck:
        at, step = run.reach(_STRIKES)
        cut.make(run)
        proof = cut.proof(run)
        return Struck(at, step + 1, proof) if then is None else then(run, at, proof)

    return Fault(strike, cut.mend)


def cut_for(cut: Cut, seconds: float) -> Fault:
    """Cut for less than `run.timeout_s`: the run makes no update meanwhile, and continues."""

    def wait(run: Run, at: float, proof: str) -> Struck:
        step = run.steps
        time.sleep(max(0.0, seconds - (time.monotonic() - at)))
        if run.over() or run.steps != step:
            raise NotStruckError(f"updates {step} to {run.steps} were made while the hosts were apart")
        cut.mend(run)
        return Struck(at, step, f"{proof}; after {seconds:g} s they do again, no update was made meanwhile")

    return _cut(cut, wait)


def cut_until_ended(cut: Cut) -> Fault:
    """Cut until the ranks have ended. Then torchrun itself restarts them from the last checkpoint."""

    def strike(run: Run) -> Struck:
        run.reach(_STRIKES)
        before = _ranks_of(run)
        if len(before) != len(run.hosts):
            raise NotStruckError(f"{len(before)} ranks are there instead of {len(run.hosts)}")
        at, step = time.monotonic(), run.steps
        cut.make(run)
        proof = cut.proof(run)
        while any(map(alive, before)):
            if time.monotonic() - at > _ANSWER_S:
                raise NotStruckError(f"ranks live on {_ANSWER_S:g} s after the cut")
            time.sleep(0.01)
        ended = time.monotonic() - at
        cut.mend(run)
        return Struck(at, step + 1, f"{proof}; all ranks had ended after {ended:.1f} s, then it was mended")

    return Fault(strike, cut.mend)


def slowed(rate: str, *, ends: bool = False) -> Fault:
    """The last host sends at `rate` until a rank reports that it is slow, or until the run ends (`ends`)."""

    def strike(run: Run) -> Struck:
        at, step = run.reach(_STRIKES)
        last, made = run.hosts[-1], ""
        bucket = last.throttle(rate)
        if not bucket.startswith("qdisc tbf "):
            raise NotStruckError(f"the last host sends by {bucket}")
        if not ends:
            run.wait_for(lambda: "usually takes" in run.said(), "said to be slow", _ANSWER_S)
            last.unthrottle()
            made = f"; {run.steps - step} updates were made in {time.monotonic() - at:.1f} s"
        return Struck(at, step, f"the last host sends by {bucket}{made}")

    return Fault(strike, heal=lambda run: run.hosts[-1].unthrottle())


def _stop_one_at_the_start(run: Run) -> Struck:
    """Stop the last rank as soon as all are there. After another rank has ended, kill its agent too."""
    run.wait_for(lambda: len(_ranks_of(run)) == len(run.hosts), "all ranks there")
    at, stopped = time.monotonic(), _ranks_of(run)[-1]
    seen = send(stopped, signal.SIGSTOP)
    if seen is None or not seen.startswith("stopped"):
        raise NotStruckError(f"process {stopped.pid} had ended: {seen}")
    began, waited = time.monotonic(), None
    while waited is None and time.monotonic() - began < _ANSWER_S:
        if any(command.poll() is not None for command in run.commands[:-1]):
            waited = round(time.monotonic() - began, 1)
            for process in reversed(family(run.commands[-1].pid)):
                process.kill()
        time.sleep(0.01)
    return Struck(at, 0, f"process {stopped.pid} is {seen}; another rank ended after {waited} s")


def _wrong_interface(run: Run) -> Struck:
    return Struck(time.monotonic(), 0, "GLOO_SOCKET_IFNAME=nowhere0 on the last host")


def _ended(*says: str, within_s: float = _WITHIN_S, at_once: bool = True) -> Promise:
    return Promise((71, 72), says, within_s, at_once=at_once)


def _named(size: int) -> Promise:
    """Each rank ends in time and names the ranks that it no longer reaches."""
    last = size - 1
    rest = "rank 0" if size == 2 else f"ranks {', '.join(map(str, range(last)))}"
    here = f"{rest} of {size} (on {', '.join(f'host{number}' for number in range(last))}) gave no sign of life"
    return _ended(here, f"rank {last} of {size} (on host{last}) gave no sign of life")


def _goes_on(*says: str) -> Promise:
    return Promise((0,), (*says, "held-out after step"), heal_says=("is finished",))


_TWO, _THREE = Hosts(2), Hosts(3)
_TIMEOUT = Guard("run.timeout_s", "not over", ("run.timeout_s=3600",))
_SHORT = "nothing ends the run; longer partitions show that the bound is looked at"
_RESTARTED = "the same partition without a restart has one"
_BETWEEN = "all ranks give signs of life, but no message got through in the update of step"
"""Printed if all ranks reach the store, but not each other."""
_ADDRESSES = "wrong address of the network card, "
_FIRST_REACHES = Cut(pair=(1, 2))


def _between(
    name: str,
    how: str,
    fault: Fault,
    promise: Promise,
    place: Place = _TWO,
    guard: Guard | str = _TIMEOUT,
    settings: tuple[str, ...] = (),
) -> Nemesis:
    """guard: a guard, or why there is none."""
    off, none = (None, guard) if isinstance(guard, str) else (guard, "")
    return Nemesis(name, how, promise, (fault,), off, none, Launch("", settings), place=place)


NEMESES = (
    _between("link cut", "the interface of one of two hosts goes down", _cut(Cut("link")), _named(2)),
    _between("silent drop, both ways", f"{_ADDRESSES}on both hosts", _cut(Cut()), _named(2)),
    _between("silent drop, one way", f"{_ADDRESSES}on the first host", _cut(Cut("to")), _named(2)),
    _between("silent drop, the other way", f"{_ADDRESSES}on the last host", _cut(Cut("from")), _named(2)),
    _between("one of three hosts cut off", f"{_ADDRESSES}both ways", _cut(Cut()), _named(3), _THREE),
    _between(
        "two of three hosts cut off each other",
        f"{_ADDRESSES}on both; the first one, with the store, reaches both",
        _cut(_FIRST_REACHES),
        _ended(_BETWEEN),
        _THREE,
    ),
    _between(
        "two of three hosts cut off each other, one with the store",
        f"{_ADDRESSES}on both; the last one reaches both",
        _cut(Cut(pair=(0, 1))),
        _ended("rank 1 of 3 (on host1) gave no sign of life", "ranks 0, 2 of 3 (on host0, host2) gave no sign of life"),
        _THREE,
    ),
    _between("short partition", "silent drop for 3 s", cut_for(Cut(), 3.0), _goes_on(), _TWO, _SHORT),
    _between(
        *("long partition, restarted", "silent drop until all ranks have ended", cut_until_ended(Cut())),
        _goes_on("gave no sign of life for"),
        Hosts(2, restarts=True),
        _RESTARTED,
    ),
    _between(
        *("short partition of two of three hosts", "silent drop between two for 3 s; the first one reaches both"),
        cut_for(_FIRST_REACHES, 3.0),
        _goes_on(),
        _THREE,
        _SHORT,
    ),
    _between(
        "long partition of two of three hosts, restarted",
        "silent drop between two until all ranks have ended; the first one reaches both",
        cut_until_ended(_FIRST_REACHES),
        _goes_on(_BETWEEN),
        Hosts(3, restarts=True),
        _RESTARTED,
    ),
    _between(
        *("slow link", "a token bucket of 24 kbit/s at one host", slowed("24kbit")),
        Promise((0,), ("exchange data in the update of step|slow: in the update of step",), heal_says=("is finished",)),
        guard="nothing ends the run",
    ),
    _between(
        *("slow link, deadline of a step", "the same, with run.step_deadline_s=1.5", slowed("24kbit", ends=True)),
        _ended("took longer than run.step_deadline_s, 1.5 s", within_s=5.0, at_once=False),
        _TWO,
        Guard("run.step_deadline_s", "not over", ("run.step_deadline_s=null",)),
        ("run.step_deadline_s=1.5",),
    ),
    _between(
        *("rank missing at the start", "SIGSTOP before it meets the others", Fault(_stop_one_at_the_start)),
        Promise((72, -signal.SIGKILL), (f"did not come within {TIMEOUT_S:g} s",)),
    ),
    Nemesis(
        *("wrong interface", "GLOO_SOCKET_IFNAME names one that is not there"),
        Promise(
            (2, 71),
            ("GLOO_SOCKET_IFNAME: nowhere0: no such interface on host1, only lo, e0", "of 2 cannot join: GLOO_SOCKET"),
        ),
        (Fault(_wrong_interface, before_start=True),),
        no_guard="gloo itself refuses such an interface; what is judged is what the ranks say of it",
        launched=Launch("", environment=((_LAST_INTERFACE, "nowhere0"),)),
        resumed=Launch(""),
        undisturbed=Launch(""),
        place=_TWO,
    ),
)
