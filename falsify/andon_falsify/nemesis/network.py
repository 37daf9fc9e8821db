"""Faults of the network between hosts, on runs under torchrun: rows 10 and 12 to 17 of the catalogue (issue 5, item 5).

Each host has one agent and one rank; all share the run folder. What is judged is the end of the ranks (`host_agent`),
and of torchrun only where it restarts them.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from andon_falsify.nemesis.hosts import Host, Lan, unavailable
from andon_falsify.nemesis.processes import alive, command_line, family
from andon_falsify.nemesis.protocol import Launch, Nemesis, NotStruckError, Promise, Struck
from andon_falsify.nemesis.run import TIMEOUT_S, Run
from andon_falsify.nemesis.schedule import send

_STEP = 6
"""After so many updates a fault strikes."""
_WITHIN_S = TIMEOUT_S + 2.0
_ENDS = (71, 72)
_ANSWER_S = 60.0
_WRONG = "ANDON_LAST_HOST_IFNAME"
_GOES_ON = Promise((0,), ("held-out after step",), heal_says=("is finished",))
_COMES_BACK = Promise((0,), ("gave no sign of life for", "held-out after step"), heal_says=("is finished",))


@dataclass(frozen=True, kw_only=True)
class BetweenHosts(Nemesis):
    """A fault of the network between `size` hosts. settings: of the run. off: what switches off its guard.

    keeps_agents: whether torchrun is left to itself once its rank has failed. arguments: more of torchrun's.
    """

    size: int = 2
    settings: tuple[str, ...] = ()
    off: str = "run.timeout_s=3600"
    keeps_agents: bool = False
    arguments: tuple[str, ...] = ()
    _lans: dict[Path, Lan] = field(default_factory=dict, init=False, repr=False, compare=False)

    def needs(self) -> str | None:
        """Why there can be no hosts on this machine."""
        return unavailable() or None

    def prepare(self, run: Run) -> None:
        """Hosts of this run's own."""
        self._lans[run.scratch] = Lan.of(self.size)

    def launch(self, *, guarded: bool) -> Launch:
        """As many workers as torchrun starts."""
        return Launch(workers="", settings=(*self.settings, *(() if guarded else (self.off,))))

    def calm_key(self) -> object:
        """So many hosts, and what torchrun is told."""
        return BetweenHosts, self.calm(), self.size, self.keeps_agents, self.arguments

    def start(self, run: Run, launch: Launch) -> None:
        """One agent on each host; the first one holds the rendezvous."""
        hosts = self.hosts(run)
        endpoint = f"{hosts[0].hostname}:{hosts[0].free_port()}"
        for number, host in enumerate(hosts):
            run.spawn(self._command(run, launch, number, host, endpoint), launch)

    def _command(self, run: Run, launch: Launch, number: int, host: Host, endpoint: str) -> list[str]:
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "nemesis"]
        meeting += ["--local-addr", host.address, "--rdzv-conf", f"is_host={int(number == 0)}"]
        size = ["--nnodes", str(self.size), "--nproc-per-node", "1", *self.arguments]
        # The rank speaks where torchrun does not, so that what it says can be told apart.
        rank = ["--no-python", "sh", "-c", 'exec "$@" 2>&1', "sh", sys.executable, *run.arguments(launch)]
        log = run.scratch / f"agent-{number}"
        agent = [sys.executable, "-m", "andon_falsify.nemesis.host_agent", str(run.folder), str(log)]
        keep = str(int(self.keeps_agents))
        wrong = dict(launch.environment).get(_WRONG, "")
        variables = {"GLOO_SOCKET_IFNAME": wrong} if wrong and number == self.size - 1 else {}
        return host.command([*agent, keep, "--", *size, *meeting, *rank], variables)

    def hosts(self, run: Run) -> tuple[Host, ...]:
        """Those of this run."""
        return self._lans[run.scratch].hosts

    def release(self, run: Run) -> None:
        """Remove the hosts. Raises `OSError` where one cannot be."""
        lan = self._lans.pop(run.scratch, None)
        if lan is not None:
            lan.close()


@dataclass(frozen=True, kw_only=True)
class Cut(BetweenHosts):
    """The last host is cut off the others while ranks train.

    way: `link` (its interface goes down), or whose messages are lost: `both`, `to` it, `from` it.
    """

    way: str = "both"
    promise: Promise = field(default_factory=lambda: _named(2))
    guard: str = "run.timeout_s"
    finds: str = "not over"

    def inject(self, run: Run) -> Struck:
        """Cut, and see that no datagram arrives where none shall."""
        run.reach(_STEP)
        at, step = time.monotonic(), run.steps
        self.cut(run)
        return Struck(at, step + 1, self.proof(run))

    def cut(self, run: Run) -> None:
        """Bring it about."""
        *rest, last = self.hosts(run)
        if self.way == "link":
            last.unplug()
        for host in rest:
            if self.way in ("both", "to"):
                host.drop(last)
            if self.way in ("both", "from"):
                last.drop(host)

    def mend(self, run: Run) -> None:
        """Take it away."""
        *rest, last = self.hosts(run)
        if self.way == "link":
            last.plug()
        for host in rest:
            if self.way in ("both", "to"):
                host.undrop(last)
            if self.way in ("both", "from"):
                last.undrop(host)

    def proof(self, run: Run) -> str:
        """What arrives and what does not, between the last host and the first. Raises `NotStruckError` otherwise."""
        first, *_, last = self.hosts(run)
        arrives = first.reaches(last), last.reaches(first)
        if arrives != (self.way == "from", self.way == "to"):
            raise NotStruckError(f"datagrams to and from the last host arrive: {arrives}")
        words = {True: "arrive", False: "do not arrive"}
        return f"datagrams to {last.hostname} {words[arrives[0]]}, from it {words[arrives[1]]}"

    def undo(self, run: Run) -> None:
        """Mend it, where it was cut."""
        if not all(one.reaches(other) for one, other in _pairs(self.hosts(run))):
            self.mend(run)


@dataclass(frozen=True, kw_only=True)
class Short(Cut):
    """Cut for less than `run.timeout_s`: nothing is seen but a line, and the run goes on."""

    seconds: float
    promise: Promise = _GOES_ON
    guard: str = ""
    no_guard: str = "nothing ends the run; longer partitions show that the bound is looked at"

    def inject(self, run: Run) -> Struck:
        """Cut, and mend after some seconds; no update is made meanwhile."""
        run.reach(_STEP)
        at = time.monotonic()
        self.cut(run)
        proof, step = self.proof(run), run.steps
        time.sleep(max(0.0, self.seconds - (time.monotonic() - at)))
        if run.over() or run.steps != step:
            raise NotStruckError(f"updates {step} to {run.steps} were made while the hosts were apart")
        self.mend(run)
        return Struck(at, step, f"{proof}; after {self.seconds:g} s they do again, no update was made meanwhile")


@dataclass(frozen=True, kw_only=True)
class Restarted(Cut):
    """Cut until the ranks have ended; then torchrun starts them again, from the last checkpoint, by itself."""

    keeps_agents: bool = True
    arguments: tuple[str, ...] = ("--max-restarts", "3")
    promise: Promise = _COMES_BACK
    guard: str = ""
    no_guard: str = "the same partition without a restart has one"

    def inject(self, run: Run) -> Struck:
        """Cut, wait for the end of the ranks, mend."""
        run.reach(_STEP)
        before = _ranks(run)
        if len(before) != self.size:
            raise NotStruckError(f"{len(before)} ranks are there instead of {self.size}")
        at, step = time.monotonic(), run.steps
        self.cut(run)
        proof = self.proof(run)
        while any(alive(pid) for pid in before):
            if time.monotonic() - at > _ANSWER_S:
                raise NotStruckError(f"ranks live on {_ANSWER_S:g} s after the cut")
            time.sleep(0.01)
        ended = time.monotonic() - at
        self.mend(run)
        return Struck(at, step + 1, f"{proof}; all ranks had ended after {ended:.1f} s, then it was mended")


@dataclass(frozen=True, kw_only=True)
class Slow(BetweenHosts):
    """What the last host sends comes slowly, at `rate`. ends: whether that is to end the run (its deadline)."""

    rate: str
    ends: bool = False

    def inject(self, run: Run) -> Struck:
        """Throttle until a rank has said that it is slow, or all have ended."""
        run.reach(_STEP)
        at, step = time.monotonic(), run.steps
        last = self.hosts(run)[-1]
        last.throttle(self.rate)
        bucket = last.sends_by()
        if not bucket.startswith("qdisc tbf "):
            raise NotStruckError(f"the last host sends by {bucket}")
        if not self.ends:
            run.wait_for(lambda: "usually takes" in run.said(), "said to be slow", _ANSWER_S)
            last.unthrottle()
            made = f"; {run.steps - step} updates were made in {time.monotonic() - at:.1f} s"
        return Struck(at, step, f"the last host sends by {bucket}{'' if self.ends else made}")

    def undo(self, run: Run) -> None:
        """Let it send as before."""
        if self.ends:
            self.hosts(run)[-1].unthrottle()


@dataclass(frozen=True, kw_only=True)
class Missing(BetweenHosts):
    """One rank is stopped before it meets the others."""

    def inject(self, run: Run) -> Struck:
        """Stop one of them as soon as it is there; once another has ended, its agent is ended too."""
        run.wait_for(lambda: len(_ranks(run)) == self.size, "all ranks there")
        at, stopped = time.monotonic(), _ranks(run)[-1]
        seen = send(stopped, signal.SIGSTOP)
        if seen is None or not seen.startswith("stopped"):
            raise NotStruckError(f"process {stopped} had ended: {seen}")
        waited = self._first_ended(run)
        if waited is not None:
            run.commands[-1].kill()
        return Struck(at, 0, f"process {stopped} is {seen}; another rank ended after {waited} s")

    def _first_ended(self, run: Run) -> float | None:
        began = time.monotonic()
        while time.monotonic() - began < _ANSWER_S:
            if any(command.poll() is not None for command in run.commands[:-1]):
                return round(time.monotonic() - began, 1)
            time.sleep(0.01)
        return None


@dataclass(frozen=True, kw_only=True)
class WrongInterface(BetweenHosts):
    """The last host's ranks are told to use an interface that it does not have."""

    before_start: bool = True

    def launch(self, *, guarded: bool) -> Launch:
        """With the wrong name."""
        return self.heal(guarded=guarded).but(environment=((_WRONG, "nowhere0"),))

    def heal(self, *, guarded: bool) -> Launch:
        """Without it."""
        return Launch(workers="")

    def calm(self) -> Launch:
        """Without it."""
        return self.heal(guarded=True)

    def inject(self, run: Run) -> Struck:
        """Nothing runs yet: the next start is told so."""
        return Struck(time.monotonic(), 0, "GLOO_SOCKET_IFNAME=nowhere0 on the last host")


def _pairs(hosts: Sequence[Host]) -> list[tuple[Host, Host]]:
    """The last host with each other one, both ways."""
    *rest, last = hosts
    return [pair for host in rest for pair in ((host, last), (last, host))]


def _ranks(run: Run) -> list[int]:
    """The processes of the ranks, by host."""
    members = [pid for command in run.commands for pid in family(command.pid)]
    return [pid for pid in members if b"-m\0andon\0train" in command_line(pid) and _is_rank(pid)]


def _is_rank(pid: int) -> bool:
    line = command_line(pid)
    return b"torch.distributed.run" not in line and b"host_agent" not in line and not line.startswith(b"sh\0")


def _named(size: int) -> Promise:
    """Each rank ends in time, with a line that names those on the other side."""
    last = size - 1
    rest = "rank 0" if size == 2 else f"ranks {', '.join(map(str, range(last)))}"
    here = f"{rest} of {size} (on {', '.join(f'host{number}' for number in range(last))}) gave no sign of life"
    there = f"rank {last} of {size} (on host{last}) gave no sign of life"
    return Promise(codes=_ENDS, says=(here, there), within_s=_WITHIN_S, at_once=True)


_SLOW = "exchange in the update of step|slow: in the update of step"
_ADDRESSES = "wrong address of the network card, "

NEMESES: tuple[Nemesis, ...] = (
    Cut(name="link cut", numbers=(12,), how="the interface of one of two hosts goes down", way="link"),
    Cut(name="silent drop, both ways", numbers=(13,), how=f"{_ADDRESSES}on both hosts"),
    Cut(name="silent drop, one way", numbers=(13,), how=f"{_ADDRESSES}on the first host", way="to"),
    Cut(name="silent drop, the other way", numbers=(13,), how=f"{_ADDRESSES}on the last host", way="from"),
    Cut(name="one of three hosts cut off", numbers=(13,), how=f"{_ADDRESSES}both ways", size=3, promise=_named(3)),
    Short(name="short partition", numbers=(14,), how="silent drop for 3 s", seconds=3.0),
    Restarted(name="long partition, restarted", numbers=(15,), how="silent drop until all ranks have ended"),
    Slow(
        name="slow link",
        numbers=(10,),
        how="a token bucket of 24 kbit/s at one host",
        rate="24kbit",
        promise=Promise((0,), (_SLOW,), heal_says=("is finished",)),
        no_guard="nothing ends the run",
    ),
    Slow(
        name="slow link, deadline of a step",
        numbers=(10,),
        how="the same, with run.step_deadline_s=1.5",
        rate="24kbit",
        ends=True,
        settings=("run.step_deadline_s=1.5",),
        promise=Promise(_ENDS, ("took longer than run.step_deadline_s, 1.5 s",), 5.0),
        guard="run.step_deadline_s",
        finds="not over",
        off="run.step_deadline_s=null",
    ),
    Missing(
        name="rank missing at the start",
        numbers=(16,),
        how="SIGSTOP before it meets the others",
        promise=Promise((72, -signal.SIGKILL), (f"did not come within {TIMEOUT_S:g} s",)),
        guard="run.timeout_s",
        finds="not over",
    ),
    WrongInterface(
        name="wrong interface",
        numbers=(17,),
        how="GLOO_SOCKET_IFNAME names one that is not there",
        promise=Promise(
            (2, 71),
            ("GLOO_SOCKET_IFNAME: nowhere0: no such interface on host1, only lo, e0", "of 2 cannot join: GLOO_SOCKET"),
        ),
        no_guard="gloo itself refuses such an interface; what is judged is what the ranks say of it",
    ),
)
