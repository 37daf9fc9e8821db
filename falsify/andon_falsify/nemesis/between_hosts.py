"""A run under torchrun on several hosts, and what of its network may break: what all such nemeses share.

Each host has one agent and one rank; all share the run folder. What is judged is the end of the ranks (`host_agent`),
and of torchrun only where it restarts them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from andon_falsify.nemesis.host import Host
from andon_falsify.nemesis.hosts import Lan, unavailable
from andon_falsify.nemesis.processes import command_line, family
from andon_falsify.nemesis.protocol import Launch, Nemesis
from andon_falsify.nemesis.run import Run

STRIKES = 6
"""After so many updates a fault strikes."""
ENDS = (71, 72)
ANSWER_S = 60.0
LAST_INTERFACE = "ANDON_LAST_HOST_IFNAME"
"""In a launch's environment: the interface that the last host's rank is told to use."""


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
        wrong = dict(launch.environment).get(LAST_INTERFACE, "")
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


def ranks_of(run: Run) -> list[int]:
    """The processes of the ranks, by host."""
    members = [pid for command in run.commands for pid in family(command.pid)]
    return [pid for pid in members if b"-m\0andon\0train" in command_line(pid) and _is_rank(pid)]


def _is_rank(pid: int) -> bool:
    line = command_line(pid)
    return b"torch.distributed.run" not in line and b"host_agent" not in line and not line.startswith(b"sh\0")
