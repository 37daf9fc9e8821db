"""Two or three hosts on this machine, so that a network between them can be broken.

    with Lan.of(2) as lan:
        subprocess.Popen(lan.hosts[0].command(["python", "job.py"], {}))
        lan.hosts[0].drop(lan.hosts[1])

A host is a network namespace with one interface, connected to a bridge in a namespace for itself. Its processes see
only each other. It has a name that all hosts know and a separate temporary folder, because sockets in the file system
cross network namespaces. The hosts share everything else, also the run folder. Needs root, `ip` and `unshare`.

Nothing remains: `close` ends the processes and removes the namespaces. If this process ends without `close`, a cleaner
process does the same.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

INTERFACE = "e0"
"""The one interface of every host, besides `lo`."""
_NOWHERE = "02:00:00:00:00:99"
"""The address of a network card that does not exist."""
_CLONE_NEWNET = 0x40000000
# The shell is the first process of its namespace, so it reaps. `$0` is the host name.
_SETTLE = """hostname "$0" && mount --bind "$TMPDIR/../hosts" /etc/hosts && mount -t tmpfs none "$TMPDIR" || exit 125
"$@"
exit $?"""
FOLDER = Path(tempfile.gettempdir())
"""Holds the folders of hosts."""
_GONE_S = 10.0
_MADE_S = 10.0
"""How long a datagram may take between two new hosts on a busy machine."""


@dataclass(frozen=True)
class Host:
    """A host of a `Lan`. name: of its namespace. scratch: the mount point of its temporary folder."""

    name: str
    hostname: str
    address: str
    scratch: Path

    def command(self, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """A command line that runs `command` on this host. SIGKILL ends it with all of its processes."""
        own = {"TMPDIR": str(self.scratch), "GLOO_SOCKET_IFNAME": INTERFACE, **environment}
        variables = [f"{name}={value}" for name, value in own.items()]
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "env", *variables]
        return ["ip", "netns", "exec", self.name, *apart, "sh", "-c", _SETTLE, self.hostname, *command]

    def unplug(self) -> None:
        """Cut the link: the interface goes down."""
        ip("-n", self.name, "link", "set", INTERFACE, "down")

    def plug(self) -> None:
        ip("-n", self.name, "link", "set", INTERFACE, "up")

    def drop(self, other: Host) -> None:
        """Lose silently everything that this host sends to `other`."""
        where = ("neigh", "replace", other.address, "lladdr", _NOWHERE, "nud", "permanent", "dev", INTERFACE)
        ip("-n", self.name, *where)

    def undrop(self, other: Host) -> None:
        """Undo `drop`, if it was called."""
        if _NOWHERE in ip("-n", self.name, "neigh", "show", other.address, "dev", INTERFACE):
            ip("-n", self.name, "neigh", "del", other.address, "dev", INTERFACE)

    def throttle(self, rate: str) -> str:
        """Limit what this host sends to `rate` (as `tc` writes it: 10mbit). Returns the kernel's queue."""
        bucket = ("rate", rate, "burst", "32kbit", "latency", "400ms")
        ran("tc", "-n", self.name, "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *bucket)
        return ran("tc", "-n", self.name, "qdisc", "show", "dev", INTERFACE).strip()

    def unthrottle(self) -> None:
        ran("tc", "-n", self.name, "qdisc", "replace", "dev", INTERFACE, "root", "noqueue")

    def free_port(self) -> int:

        def free() -> int:
            with socket.create_server((self.address, 0)) as listener:
                return int(listener.getsockname()[1])

        return self.inside(free)

    def reaches(self, other: Host, wait_s: float = 0.5) -> bool:
        """True if one of five datagrams within `wait_s` arrives at `other`."""

        def datagrams(host: Host) -> socket.socket:
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            made.bind((host.address, 0))
            return made

        listener, speaker = other.inside(lambda: datagrams(other)), self.inside(lambda: datagrams(self))
        with listener, speaker:
            listener.settimeout(wait_s / 5)
            for _ in range(5):
                try:
                    speaker.sendto(b"andon", listener.getsockname())
                    return bool(listener.recv(16))
                except TimeoutError:
                    continue
                except OSError:
                    time.sleep(wait_s / 5)  # the interface is down
        return False

    def inside(self, work: Callable[[], T]) -> T:
        """Call `work` in a thread in this namespace. A socket stays in the namespace in which it was made."""

        def enter() -> T:
            libc = ctypes.CDLL(None, use_errno=True)
            with (Path("/run/netns") / self.name).open("rb") as handle:
                if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
                    number = ctypes.get_errno()
                    raise OSError(number, f"setns: {os.strerror(number)}")
            return work()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(enter).result()


def ip(*arguments: str) -> str:
    return ran("ip", *arguments)


def ran(*command: str) -> str:
    """The output of a command. Raises `OSError` with its error output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout


@dataclass
class Lan:
    """Hosts that are connected with each other, until `close`."""

    name: str
    folder: Path
    hosts: tuple[Host, ...]
    _cleaner: subprocess.Popen[bytes] = field(repr=False)

    @classmethod
    def of(cls, size: int) -> Lan:
        """Create `size` hosts. Raises `OSError` if this machine allows none."""
        name = f"andonnet-{os.getpid()}-{time.monotonic_ns()}"
        # The cleaner is in another session. It removes the hosts once this process no longer holds its end of a pipe.
        command = [sys.executable, "-m", __name__, name]
        cleaner = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        folder = FOLDER / name
        hosts = tuple(Host(f"{name}-{n}", f"host{n}", f"10.77.0.{n + 1}", folder / str(n)) for n in range(size))
        lan = cls(name, folder, hosts, cleaner)
        try:
            lan._build()
        except BaseException:
            lan.close()
            raise
        return lan

    def _build(self) -> None:
        hub = f"{self.name}-hub"
        ip("netns", "add", hub)
        ip("link", "add", "br0", "netns", hub, "type", "bridge")
        ip("-n", hub, "link", "set", "br0", "up")
        self.folder.mkdir()
        names = [f"{host.address} {host.hostname}" for host in self.hosts]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
        for number, host in enumerate(self.hosts):
            port = f"p{number}"
            host.scratch.mkdir()
            ip("netns", "add", host.name)
            ip("link", "add", INTERFACE, "netns", host.name, "type", "veth", "peer", "name", port, "netns", hub)
            ip("-n", hub, "link", "set", port, "master", "br0", "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                ip("-n", host.name, "link", "set", interface, "up")

    def close(self) -> None:
        """End the processes on the hosts, and remove the hosts."""
        _remove(self.name)
        assert self._cleaner.stdin is not None
        self._cleaner.stdin.close()
        self._cleaner.wait()

    def __enter__(self) -> Lan:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def unavailable() -> str:
    """Why there can be no hosts here. Empty if two can be made and reach each other."""
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"this machine has no {' and no '.join(missing)} (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Lan.of(2) as lan:
            reached = lan.hosts[0].reaches(lan.hosts[1], _MADE_S)
            return "" if reached else "two network namespaces do not reach each other over a bridge"
    except OSError as error:
        return str(error)


def _remove(lan: str) -> None:
    """Remove what belongs to this LAN: processes, namespaces with their links, the folder."""
    names = [name for name in namespaces() if name.startswith(f"{lan}-")]
    deadline = time.monotonic() + _GONE_S
    while pids := [pid for name in names for pid in pids_in(name)]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise OSError(f"processes {pids} in {lan} could not be ended")
        time.sleep(0.01)
    for name in names:
        ip("netns", "del", name)
    shutil.rmtree(FOLDER / lan, ignore_errors=True)


def pids_in(namespace: str) -> list[int]:
    return [int(pid) for pid in ip("netns", "pids", namespace).split()]


def namespaces() -> list[str]:
    """The names of all network namespaces of this machine."""
    return [line.split()[0] for line in ip("netns", "list").splitlines() if line]


def _main() -> None:
    """The cleaner: wait for the end of the input, ignore signals, then remove what remains."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    _remove(sys.argv[1])


if __name__ == "__main__":
    _main()
