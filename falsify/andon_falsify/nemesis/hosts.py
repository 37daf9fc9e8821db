"""Two or three hosts on this one machine, so that a network between them can be broken.

    with Lan.of(2) as lan:
        job = lan.hosts[0].start(["python", "job.py"], {}, log)
        lan.hosts[0].drop(lan.hosts[1])

A host is a network namespace with one interface, plugged into a bridge that stands in a namespace of its own. Its
processes see no others, it has a name that all hosts know, and a temporary folder of its own: sockets of the file
system reach from one network namespace into another. The rest, the run folder too, is shared. Needs root, `ip` and
`unshare`; `unavailable` says why where it is not possible.

Nothing is left behind. Every name holds the process that it belongs to, `close` ends what still runs and removes all,
a watchman does the same as soon as that process is gone without having closed, and `sweep` for whoever comes later.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType

from andon.launch.orphan import Process
from andon_falsify.nemesis.host import INTERFACE, Host, ip

FOLDER = Path(tempfile.gettempdir())
"""Where the folders of hosts are."""
_PREFIX = "andonnet"
_GONE_S = 10.0
_MADE_S = 10.0
"""How long a datagram may take between two hosts that were just made, on a machine that does much else."""
_numbers = count()


@dataclass
class Lan:
    """Hosts that are connected with each other, until `close`."""

    name: str
    folder: Path
    hosts: tuple[Host, ...]
    _watchman: subprocess.Popen[bytes] = field(repr=False)

    @classmethod
    def of(cls, size: int) -> Lan:
        """So many hosts. Raises `OSError` with the reason where this machine allows none."""
        owner = Process.of(os.getpid())
        assert owner is not None, "this process runs"
        name = f"{_PREFIX}-{owner.pid}-{owner.started}-{next(_numbers)}"
        folder = FOLDER / name
        watchman = _watch(name)
        hosts = tuple(Host(f"{name}-{n}", f"host{n}", f"10.77.0.{n + 1}", folder / str(n)) for n in range(size))
        lan = cls(name, folder, hosts, watchman)
        try:
            _build(lan)
        except BaseException:
            lan.close()
            raise
        return lan

    def close(self) -> None:
        """End what runs on the hosts, and remove them."""
        _remove(self.name)
        if self._watchman.stdin is not None:
            self._watchman.stdin.close()
        self._watchman.wait()

    def __enter__(self) -> Lan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def unavailable() -> str:
    """Why there can be no hosts here; empty where there can: two are made, and reach each other."""
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"this machine has no {' and no '.join(missing)} (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Lan.of(2) as lan:
            first, second = lan.hosts
            return (
                "" if first.reaches(second, _MADE_S) else "two network namespaces do not reach each other over a bridge"
            )
    except OSError as error:
        return str(error)


def left_behind() -> list[str]:
    """Namespaces of ours whose process is gone."""
    return [name for name in namespaces() if name.startswith(f"{_PREFIX}-") and not _owned(name)]


def sweep() -> list[str]:
    """Remove what processes that are gone have left; the names of the namespaces among it."""
    found = left_behind()
    folders = [path.name for path in FOLDER.glob(f"{_PREFIX}-*") if not _owned(path.name)]
    for lan in sorted({"-".join(name.split("-")[:4]) for name in (*found, *folders)}):
        _remove(lan)
    return found


def _build(lan: Lan) -> None:
    hub = f"{lan.name}-hub"
    ip("netns", "add", hub)
    ip("link", "add", "br0", "netns", hub, "type", "bridge")
    ip("-n", hub, "link", "set", "br0", "up")
    lan.folder.mkdir()
    names = [f"{host.address} {host.hostname}" for host in lan.hosts]
    (lan.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
    for number, host in enumerate(lan.hosts):
        port = f"p{number}"
        host.scratch.mkdir()
        ip("netns", "add", host.name)
        ip("link", "add", INTERFACE, "netns", host.name, "type", "veth", "peer", "name", port, "netns", hub)
        ip("-n", hub, "link", "set", port, "master", "br0", "up")
        ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            ip("-n", host.name, "link", "set", interface, "up")


def _remove(lan: str) -> None:
    """Everything whose name begins with this one: processes, namespaces with their links, the folder."""
    names = [name for name in namespaces() if name.startswith(f"{lan}-")]
    deadline = time.monotonic() + _GONE_S
    while pids := [int(pid) for name in names for pid in ip("netns", "pids", name).split()]:
        for pid in pids:
            process = Process.of(pid)
            if process is not None:
                process.send(signal.SIGKILL)
        if time.monotonic() > deadline:
            raise OSError(f"processes {pids} in {lan} could not be ended")
        time.sleep(0.01)
    for name in names:
        ip("netns", "del", name)
    shutil.rmtree(FOLDER / lan, ignore_errors=True)


def namespaces() -> list[str]:
    """The names of all network namespaces of this machine."""
    return [line.split()[0] for line in ip("netns", "list").splitlines() if line]


def _owned(name: str) -> bool:
    """Whether the process that `name` holds still runs."""
    parts = name.split("-")
    if len(parts) < 4 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return True  # none of ours
    return Process(int(parts[1]), int(parts[2])).alive()


def _watch(lan: str) -> subprocess.Popen[bytes]:
    """A process of another session that removes `lan` once this process no longer holds its end of a pipe."""
    return subprocess.Popen([sys.executable, "-m", __name__, lan], stdin=subprocess.PIPE, start_new_session=True)


def _main() -> None:
    """Be the watchman: wait for the end of the input, whatever signals come, and remove what is left then."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    _remove(sys.argv[1])


if __name__ == "__main__":
    _main()
