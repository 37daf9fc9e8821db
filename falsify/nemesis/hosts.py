"""Two or three hosts on this machine, so that a network between them can be broken.

    with lan(2) as hosts:
        subprocess.Popen(hosts[0].command(["python", "job.py"]))
        hosts[0].drop(hosts[1])

A host is a set of namespaces with one network interface. The first host's interface is a bridge, to which the others
are connected. Its processes see only each other. A host has a name that all hosts know, and its own /dev/shm, which
also holds its temporary files, because sockets in the file system cross network namespaces. The hosts share everything
else, also the run folder. Needs root, `ip`, `tc`, `unshare` and `nsenter`.

Nothing remains. The first process of a host reads from a pipe of this process. Once the pipe is closed, because the
context or this process ended, the first process ends. The kernel then kills the host's other processes and removes its
namespaces with their interfaces.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import psutil

from .planting import UnavailableError

T = TypeVar("T")

INTERFACE = "e0"
"""The network interface of every host, besides `lo`."""
_NOWHERE = "02:00:00:00:00:99"
"""The address of a network card that does not exist."""
_CLONE_NEWNET = 0x40000000
_SCRATCH = "/dev/shm"
# `$0` is the name of the host. A process that ignores SIGCHLD needs not wait for orphans.
_SETTLE = f"""hostname "$0" && mount -t tmpfs none {_SCRATCH} && echo "$1" >{_SCRATCH}/hosts &&
mount --bind {_SCRATCH}/hosts /etc/hosts && echo ready && trap '' CHLD && exec cat"""
_CONNECTED_S = 10.0
"""How long a datagram may take between two new hosts on a busy machine."""


@dataclass(frozen=True)
class Host:
    """A host of a `lan`. pid: of its first process. interface: for gloo."""

    pid: int
    hostname: str
    address: str
    interface: str = INTERFACE

    def command(self, command: Sequence[str]) -> list[str]:
        """A command line that runs `command` on this host, in this process's working directory."""
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--uts", "--net", "--pid", f"--wd={Path.cwd()}"]
        return [*enter, "env", f"TMPDIR={_SCRATCH}", f"GLOO_SOCKET_IFNAME={self.interface}", *command]

    def run(self, *command: str) -> str:
        """The output of a network tool on this host. Raises `OSError` with its error output if it fails."""
        entered = ["nsenter", f"--target={self.pid}", "--net", *command]
        done = subprocess.run(entered, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip() or f'exit {done.returncode}'}")
        return done.stdout

    def set_link(self, state: Literal["up", "down"]) -> None:
        self.run("ip", "link", "set", INTERFACE, state)

    def drop(self, other: Host) -> None:
        """Lose silently everything that this host sends to `other`."""
        to_nowhere = ("lladdr", _NOWHERE, "nud", "permanent", "dev", INTERFACE)
        self.run("ip", "neigh", "replace", other.address, *to_nowhere)

    def undrop(self, other: Host) -> None:
        """Undo `drop`, if it was called."""
        if _NOWHERE in self.run("ip", "neigh", "show", other.address, "dev", INTERFACE):
            self.run("ip", "neigh", "del", other.address, "dev", INTERFACE)

    def throttle(self, rate: str) -> str:
        """Limit what this host sends to `rate` (as `tc` writes it: 10mbit). Returns the kernel's queue."""
        if shutil.which("tc") is None:
            raise UnavailableError("this machine has no tc (iproute2)")
        bucket = ("rate", rate, "burst", "32kbit", "latency", "400ms")
        self.run("tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *bucket)
        return self.run("tc", "qdisc", "show", "dev", INTERFACE).strip()

    def unthrottle(self) -> None:
        self.run("tc", "qdisc", "replace", "dev", INTERFACE, "root", "noqueue")

    def free_port(self) -> int:
        with self.inside(lambda: socket.create_server((self.address, 0))) as listener:
            return int(listener.getsockname()[1])

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
        """Call `work` in a thread on this host's network. A socket stays on the network on which it was made."""

        def enter() -> T:
            libc = ctypes.CDLL(None, use_errno=True)
            with Path(f"/proc/{self.pid}/ns/net").open("rb") as handle:
                if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
                    number = ctypes.get_errno()
                    raise OSError(number, f"setns: {os.strerror(number)}")
            return work()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(enter).result()


@contextmanager
def lan(size: int) -> Iterator[tuple[Host, ...]]:
    """`size` hosts that are connected with each other. Raises `UnavailableError` if this machine allows none."""
    with ExitStack() as stack:
        try:
            hosts = _connected(size, stack)
        except OSError as error:
            raise UnavailableError(f"no hosts in network namespaces: {error}") from error
        if not hosts[0].reaches(hosts[-1], _CONNECTED_S):
            raise UnavailableError("two network namespaces do not reach each other")
        yield hosts


def _connected(size: int, stack: ExitStack) -> tuple[Host, ...]:
    addresses = {f"host{number}": f"10.77.0.{number + 1}" for number in range(size)}
    known = "\n".join(["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())])
    hosts = [stack.enter_context(_started(name, address, known)) for name, address in addresses.items()]
    hosts[0].run("ip", "link", "add", INTERFACE, "type", "bridge")
    for host in hosts[1:]:
        port, peer = host.hostname, ("peer", "name", INTERFACE, "netns", str(host.pid))
        hosts[0].run("ip", "link", "add", port, "type", "veth", *peer)
        hosts[0].run("ip", "link", "set", port, "master", INTERFACE, "up")
    for host in hosts:
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            host.run("ip", "link", "set", interface, "up")
    return tuple(hosts)


@contextmanager
def _started(name: str, address: str, known: str) -> Iterator[Host]:
    apart = ["unshare", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with subprocess.Popen(
        [*apart, "sh", "-c", _SETTLE, name, known],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        answer = process.stdout.readline().strip()
        if answer != "ready":
            raise OSError(answer)
        (first,) = psutil.Process(process.pid).children()
        yield Host(first.pid, name, address)
