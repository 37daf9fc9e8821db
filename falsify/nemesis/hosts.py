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

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from andon_contracts.liveness.process import Process

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
FOLDER = Path(tempfile.gettempdir())
"""Where the folders of hosts are."""
_PREFIX = "andonnet"
_GONE_S = 10.0
_MADE_S = 10.0
"""How long a datagram may take between two hosts that were just made, on a machine that does much else."""
_numbers = count()


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
    return Process(int(parts[1]), int(parts[2])).state() != "gone"


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
