"""Networks that break, on runs under torchrun on several hosts.

Each host has one agent and one rank; all share the run folder. The promise concerns the end of the ranks
(`host_agent`), and that of torchrun only if it restarts them.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import permutations

from psutil import Process

from .hosts import INTERFACE, lan
from .language import Fault, Guard, Nemesis, Place, Promise
from .planting import NotStruckError, Struck
from .processes import alive, command_line, family, send
from .run import TIMEOUT_S, Launch, Run

_STRIKES = 6
"""The number of updates after which a fault strikes."""
_WITHIN_S = TIMEOUT_S + 2.0
_ANSWER_S = 60.0
_ARRIVES_S, _LOST_S = 5.0, 0.5
"""How long a datagram may take on a busy machine, and after which time it is lost."""


@dataclass(frozen=True)
class Hosts(Place):
    """`size` hosts, with torchrun on each. restarts: torchrun continues after its rank has failed."""

    size: int
    restarts: bool = False

    @contextmanager
    def taken(self, run: Run) -> Iterator[None]:
        with lan(self.size) as run.hosts:
            yield

    def start(self, run: Run, launch: Launch) -> None:
        """Start one agent on each host. The first host holds the rendezvous."""
        endpoint = f"{run.hosts[0].hostname}:{run.hosts[0].free_port()}"
        size = ["--nnodes", str(self.size), "--nproc-per-node", "1", *["--max-restarts", "3"] * self.restarts]
        for number, host in enumerate(run.hosts):
            meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "nemesis"]
            meeting += ["--local-addr", host.address, "--rdzv-conf", f"is_host={int(number == 0)}"]
            log, keep = run.scratch / f"agent-{number}", str(int(self.restarts))
            agent = [sys.executable, "-m", f"{__package__}.host_agent", str(run.folder), str(log), keep]
            run.spawn(host.command([*agent, "--", *size, *meeting, *run.rank_command(launch)]), launch)


def _ranks_of(run: Run) -> list[Process]:
    members = [process for command in run.commands for process in family(command.pid)]
    return [each for each in members if command_line(each).startswith(f"{sys.executable} -m andon train")]


@dataclass(frozen=True)
class Cut:
    """Lost messages, as pairs of host numbers (sender, receiver). link: because the last host's interface is down."""

    lost: tuple[tuple[int, int], ...]
    link: bool = False

    def make(self, run: Run) -> None:
        if self.link:
            run.hosts[-1].set_link("down")
        for one, other in () if self.link else self.lost:
            run.hosts[one].drop(run.hosts[other])

    def mend(self, run: Run) -> None:
        """Undo `make`, even if only a part of it was done."""
        if self.link:
            run.hosts[-1].set_link("up")
        for one, other in self.lost:
            run.hosts[one].undrop(run.hosts[other])

    def proof(self, run: Run) -> str:
        """Send datagrams between all hosts. Raises `NotStruckError` if the wrong ones arrive."""
        for pair in permutations(range(len(run.hosts)), 2):
            one, other = (run.hosts[number] for number in pair)
            if one.reaches(other, _LOST_S if pair in self.lost else _ARRIVES_S) == (pair in self.lost):
                arrive = "arrive" if pair in self.lost else "do not arrive either"
                raise NotStruckError(f"datagrams from {one.hostname} to {other.hostname} {arrive}")
        named = ", ".join(f"{run.hosts[one].hostname} to {run.hosts[other].hostname}" for one, other in self.lost)
        return f"no datagram arrives from {named}; all others do"


def both_ways(*pairs: tuple[int, int]) -> Cut:
    return Cut((*pairs, *(pair[::-1] for pair in pairs)))


def cut_off(cut: Cut) -> Fault:
    """Cut the hosts off each other until all has ended."""

    def strike(run: Run) -> Struck:
        at, step = run.reach(_STRIKES)
        cut.make(run)
        return Struck(at, step + 1, cut.proof(run))

    return Fault(strike, cut.mend)


def cut_for(cut: Cut, seconds: float) -> Fault:
    """Cut for less than `run.timeout_s`: the run makes no update meanwhile, and continues."""

    def strike(run: Run) -> Struck:
        struck, step = cut_off(cut).strike(run), run.steps
        time.sleep(max(0.0, seconds - (time.monotonic() - struck.at)))
        if run.over() or run.steps != step:
            raise NotStruckError(f"updates {step} to {run.steps} were made while the hosts were apart")
        cut.mend(run)
        proof = f"{struck.proof}; after {seconds:g} s they do again, no update was made meanwhile"
        return Struck(struck.at, step, proof)

    return Fault(strike, cut.mend)


def cut_until_ended(cut: Cut) -> Fault:
    """Cut until the ranks have ended. Then torchrun itself restarts them from the last checkpoint."""

    def strike(run: Run) -> Struck:
        run.reach(_STRIKES)
        ranks = _ranks_of(run)
        if len(ranks) != len(run.hosts):
            raise NotStruckError(f"{len(ranks)} ranks are there instead of {len(run.hosts)}")
        struck = cut_off(cut).strike(run)
        run.wait_for(lambda: not any(map(alive, ranks)), "all ranks had ended", _ANSWER_S)
        ended = time.monotonic() - struck.at
        cut.mend(run)
        return replace(struck, proof=f"{struck.proof}; all ranks had ended after {ended:.1f} s, then it was mended")

    return Fault(strike, cut.mend)


def slowed(*, ends: bool = False) -> Fault:
    """The last host sends at 24 kbit/s until a rank reports that it is slow, or until the run ends (`ends`)."""

    def strike(run: Run) -> Struck:
        at, step = run.reach(_STRIKES)
        last, made = run.hosts[-1], ""
        bucket = last.throttle("24kbit")
        if not bucket.startswith("qdisc tbf "):
            raise NotStruckError(f"the last host sends by {bucket}")
        if not ends:
            run.wait_for(lambda: "usually takes" in run.output(), "said to be slow", _ANSWER_S)
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
    with suppress(NotStruckError):  # without its guard the run goes on
        run.wait_for(lambda: any(each.poll() is not None for each in run.commands[:-1]), "another ended", _ANSWER_S)
        for process in reversed(family(run.commands[-1].pid)):
            process.kill()
    return Struck(at, 0, f"process {stopped.pid} is {seen}; {time.monotonic() - at:.1f} s until another rank ended")


def _interface(run: Run, name: str) -> Struck:
    run.hosts = (*run.hosts[:-1], replace(run.hosts[-1], interface=name))
    return Struck(time.monotonic(), 0, f"GLOO_SOCKET_IFNAME={name} on the last host")


def _ended(*says: str, within_s: float = _WITHIN_S, at_once: bool = True) -> Promise:
    return Promise((71, 72), says, within_s, at_once=at_once)


def _goes_on(*says: str) -> Promise:
    return Promise((0,), (*says, "evaluation after step"), heal_says=("is finished",))


_TWO, _THREE = Hosts(2), Hosts(3)
_ALONE = "gave no sign of life"
_BOTH_END = _ended(f"rank 0 of 2 (on host0) {_ALONE}", f"rank 1 of 2 (on host1) {_ALONE}")
_ALL_END = _ended(f"ranks 0, 1 of 3 (on host0, host1) {_ALONE}", f"rank 2 of 3 (on host2) {_ALONE}")
_TIMEOUT = Guard("run.timeout_s", "not over", ("run.timeout_s=3600",))
_SHORT = "nothing ends the run; longer partitions show that the bound is looked at"
_RESTARTED = "the same partition without a restart has one"
_BETWEEN = "all ranks give signs of life, but no message got through in the update of step"
"""Printed if all ranks reach the store, but not each other."""
_ADDRESSES = "wrong address of the network card, "
_APART, _FIRST_REACHES = both_ways((0, 1)), both_ways((1, 2))


def _between(
    name: str,
    how: str,
    fault: Fault,
    promise: Promise,
    place: Place = _TWO,
    guard: Guard | str = _TIMEOUT,
    settings: tuple[str, ...] = (),
) -> Nemesis:
    return Nemesis(name, how, promise, fault, guard, Launch("", settings), place=place)


NEMESES = (
    _between("link cut", "the interface of one of two hosts goes down", cut_off(replace(_APART, link=True)), _BOTH_END),
    _between("silent drop, both ways", f"{_ADDRESSES}on both hosts", cut_off(_APART), _BOTH_END),
    _between("silent drop, one way", f"{_ADDRESSES}on the first host", cut_off(Cut(((0, 1),))), _BOTH_END),
    _between("silent drop, the other way", f"{_ADDRESSES}on the last host", cut_off(Cut(((1, 0),))), _BOTH_END),
    _between(
        "one of three hosts cut off", f"{_ADDRESSES}both ways", cut_off(both_ways((0, 2), (1, 2))), _ALL_END, _THREE
    ),
    _between(
        "two of three hosts cut off each other",
        f"{_ADDRESSES}on both; the first one, with the store, reaches both",
        cut_off(_FIRST_REACHES),
        _ended(_BETWEEN),
        _THREE,
    ),
    _between(
        "two of three hosts cut off each other, one with the store",
        f"{_ADDRESSES}on both; the last one reaches both",
        cut_off(_APART),
        _ended(f"rank 1 of 3 (on host1) {_ALONE}", f"ranks 0, 2 of 3 (on host0, host2) {_ALONE}"),
        _THREE,
    ),
    _between("short partition", "silent drop for 3 s", cut_for(_APART, 3.0), _goes_on(), _TWO, _SHORT),
    _between(
        *("long partition, restarted", "silent drop until all ranks have ended", cut_until_ended(_APART)),
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
        *("slow link", "a token bucket of 24 kbit/s at one host", slowed()),
        Promise((0,), ("exchange data in the update of step|slow: in the update of step",), heal_says=("is finished",)),
        guard="nothing ends the run",
    ),
    _between(
        *("slow link, deadline of a step", "the same, with run.step_deadline_s=1.5", slowed(ends=True)),
        _ended("took longer than run.step_deadline_s, 1.5 s", within_s=5.0, at_once=False),
        _TWO,
        Guard("run.step_deadline_s", "not over", ("run.step_deadline_s=null",)),
        ("run.step_deadline_s=1.5",),
    ),
    _between(
        *("rank missing at the start", "SIGSTOP before it meets the others", Fault(_stop_one_at_the_start)),
        Promise((72, -signal.SIGKILL), (f"did not come within {TIMEOUT_S:g} s",)),
    ),
    _between(
        *("wrong interface", "GLOO_SOCKET_IFNAME names an interface that does not exist"),
        Fault(lambda run: _interface(run, "nowhere0"), lambda run: _interface(run, INTERFACE), before_start=True),
        Promise(
            (2, 71),
            ("GLOO_SOCKET_IFNAME: nowhere0: no such interface on host1, only lo, e0", "of 2 cannot join: GLOO_SOCKET"),
        ),
        guard="gloo itself refuses such an interface; what is judged is what the ranks say of it",
    ),
)
