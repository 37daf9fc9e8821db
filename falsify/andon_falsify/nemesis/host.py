"""One host of a `hosts.Lan`: commands on it, and what its network loses."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

INTERFACE = "e0"
"""The one interface of every host, besides `lo`."""
_NOWHERE = "02:00:00:00:00:99"
"""An address of a network card that nobody has."""
_CLONE_NEWNET = 0x40000000
# As the first process of its space of processes, the shell reaps; the name is the shell's `$0`.
_SETTLE = """hostname "$0" && mount --bind "$TMPDIR/../hosts" /etc/hosts && mount -t tmpfs none "$TMPDIR" || exit 125
"$@"
exit $?"""


@dataclass(frozen=True)
class Host:
    """One of the hosts of a `Lan`. name: of its namespace. scratch: where its own temporary folder is mounted."""

    name: str
    hostname: str
    address: str
    scratch: Path

    def command(self, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """What runs `command` here, with these variables. Ended by SIGKILL, it ends all that it has started."""
        own = {"TMPDIR": str(self.scratch), "GLOO_SOCKET_IFNAME": INTERFACE, **environment}
        variables = [f"{name}={value}" for name, value in own.items()]
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "env", *variables]
        return ["ip", "netns", "exec", self.name, *apart, "sh", "-c", _SETTLE, self.hostname, *command]

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Run a command here, in a session of its own; what it says goes to `log`."""
        with log.open("ab") as file:
            return subprocess.Popen(
                self.command(command, environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def pids(self) -> list[int]:
        """What runs here."""
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def unplug(self) -> None:
        """Cut the link: the interface goes down."""
        ip("-n", self.name, "link", "set", INTERFACE, "down")

    def plug(self) -> None:
        """Mend the link."""
        ip("-n", self.name, "link", "set", INTERFACE, "up")

    def drop(self, other: Host) -> None:
        """Lose, without a word, all that this host sends to `other`."""
        where = ("neigh", "replace", other.address, "lladdr", _NOWHERE, "nud", "permanent", "dev", INTERFACE)
        ip("-n", self.name, *where)

    def undrop(self, other: Host) -> None:
        """Deliver again what this host sends to `other`; nothing where it is not dropped."""
        if _NOWHERE in ip("-n", self.name, "neigh", "show", other.address, "dev", INTERFACE):
            ip("-n", self.name, "neigh", "del", other.address, "dev", INTERFACE)

    def throttle(self, rate: str) -> None:
        """Let no more than `rate` (as `tc` writes it: 10mbit) leave this host."""
        bucket = ("rate", rate, "burst", "32kbit", "latency", "400ms")
        ran("tc", "-n", self.name, "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *bucket)

    def sends_by(self) -> str:
        """By what its messages leave, as the kernel says (`tc qdisc show`): "qdisc tbf ... rate 24Kbit ..."."""
        return ran("tc", "-n", self.name, "qdisc", "show", "dev", INTERFACE).strip()

    def unthrottle(self) -> None:
        """Let it send as fast as it can."""
        ran("tc", "-n", self.name, "qdisc", "replace", "dev", INTERFACE, "root", "noqueue")

    def free_port(self) -> int:
        """A port that nobody listens on here."""

        def free() -> int:
            with socket.create_server((self.address, 0)) as listener:
                return int(listener.getsockname()[1])

        return self.inside(free)

    def reaches(self, other: Host, wait_s: float = 0.5) -> bool:
        """Whether a datagram from here arrives at `other`: tried five times within `wait_s`."""
        listener = other.inside(lambda: _datagrams(other.address))
        speaker = self.inside(lambda: _datagrams(self.address))
        with listener, speaker:
            listener.settimeout(wait_s / 5)
            for _ in range(5):
                try:
                    speaker.sendto(b"andon", listener.getsockname())
                    return bool(listener.recv(16))
                except TimeoutError:
                    continue
                except OSError:
                    time.sleep(wait_s / 5)  # it has no way out at all
        return False

    def inside(self, work: Callable[[], T]) -> T:
        """What `work` returns, done by a thread in this namespace: a socket stays where it was made."""
        found: list[T] = []
        errors: list[BaseException] = []

        def enter() -> None:
            try:
                _enter(self.name)
                found.append(work())
            except BaseException as error:  # noqa: BLE001 - it belongs to who waits for the thread
                errors.append(error)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return found[0]


def _datagrams(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.bind((address, 0))
    return listener


def _enter(name: str) -> None:
    """Take the calling thread into the namespace, for good."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (Path("/run/netns") / name).open("rb") as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"setns: {os.strerror(number)}")


def ip(*arguments: str) -> str:
    """What `ip` says. Raises `OSError` as `ran` does."""
    return ran("ip", *arguments)


def ran(*command: str) -> str:
    """What a command says. Raises `OSError` with its own words where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout
