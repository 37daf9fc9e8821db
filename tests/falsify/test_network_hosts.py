"""Hosts on this machine: they reach each other, lose what they are told to lose, and leave nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from random import Random

import pytest

from falsify.nemesis import hosts
from falsify.nemesis.hosts import Lan
from falsify.nemesis.left_behind import Undisturbed
from falsify.nemesis.network import NEMESES, Cut
from falsify.nemesis.run import NotStruckError, Run

pytestmark = pytest.mark.xdist_group("test_network_hosts")
needs_hosts = pytest.mark.usefixtures("hosts_here")
PATIENCE_S = 60.0
OWNER = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins with it ignored
from falsify.nemesis.hosts import Lan
from falsify.nemesis.network import NEMESES
lan = Lan.of(2)
for host in lan.hosts:
    host.start(["sleep", "600"], {}, Path("/dev/null"))
while not all(host.pids() for host in lan.hosts):
    time.sleep(0.01)
print(lan.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def hosts_here() -> None:
    """Two hosts are made to see whether there can be any: once, and only where these tests are run."""
    reason = hosts.unavailable()
    if reason:
        pytest.skip(f"no hosts in network namespaces here: {reason}")


@pytest.fixture(scope="module")
def lan(hosts_here: None) -> Iterator[Lan]:
    """Three hosts, for all tests of this module that mend what they break."""
    with Lan.of(3) as made:
        yield made


def reached(lan: Lan) -> dict[tuple[int, int], bool]:
    pairs = permutations(range(len(lan.hosts)), 2)
    return {(one, other): lan.hosts[one].reaches(lan.hosts[other], 0.1) for one, other in pairs}


@needs_hosts
def test_what_is_dropped_does_not_arrive_and_all_else_does(lan: Lan) -> None:
    """One way between two hosts: nothing else is lost, and nothing is once it is undone."""
    first, second, _ = lan.hosts
    first.drop(second)
    lost = [pair for pair, arrives in reached(lan).items() if not arrives]
    first.undrop(second)
    assert lost == [(0, 1)]
    assert all(reached(lan).values())


@needs_hosts
def test_an_unplugged_host_reaches_nobody_until_it_is_plugged_in(lan: Lan) -> None:
    """Both ways, to and from all others; the others still reach each other."""
    lan.hosts[2].unplug()
    lost = {pair for pair, arrives in reached(lan).items() if not arrives}
    lan.hosts[2].plug()
    assert lost == {(0, 2), (1, 2), (2, 0), (2, 1)}
    assert all(reached(lan).values())


@needs_hosts
def test_two_of_three_hosts_are_cut_off_each_other_alone(lan: Lan, tmp_path: Path) -> None:
    """The cut is no proof before it is made, is said when it is, and is mended once and for all."""
    cut = Cut(pair=(1, 2))
    run = Run(tmp_path, tmp_path, tmp_path, tmp_path, Undisturbed(tmp_path), Random(1), hosts=lan.hosts)
    with pytest.raises(NotStruckError, match="datagrams from host1 to host2 arrive"):
        cut.proof(run)
    cut.make(run)
    proof = cut.proof(run)
    lost = {pair for pair, arrives in reached(lan).items() if not arrives}
    cut.mend(run)
    cut.mend(run)
    assert proof == "no datagram arrives from host1 to host2, host2 to host1; all others do"
    assert lost == {(1, 2), (2, 1)}
    assert all(reached(lan).values())


@needs_hosts
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_hosts_whose_owner_is_gone(signum: signal.Signals) -> None:
    """Killed or interrupted with commands running on them: the watchman removes namespaces, processes and folder."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        there = [space for space in hosts.namespaces() if space.startswith(name)]
        owner.send_signal(signum)
        owner.wait(PATIENCE_S)
        watchman = owner.stdout.read()  # the watchman holds the other end until it is done
    assert len(there) == 3
    assert watchman == ""
    assert not [space for space in hosts.namespaces() if space.startswith(name)]
    assert name not in {path.name for path in Path(hosts.FOLDER).iterdir()}


def test_a_machine_without_the_tools_is_said_to_lack_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason of a skip names what is missing; nothing is tried."""
    monkeypatch.setenv("PATH", "")
    assert hosts.unavailable() == "this machine has no ip and no tc and no unshare (iproute2, util-linux)"
    assert all(nemesis.needs() == hosts.unavailable() for nemesis in NEMESES)
