"""The ranks' store on one machine: what torch asks of a store, only for the user who started it."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from andon.launch import store_server
from andon.launch.joining import UnixStore
from andon.launch.store_server import StoreServer
from tests.launch.pipes import PATIENCE_S

SHORT = timedelta(seconds=0.1)
AS_NOBODY = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as reached:
    reached.connect(sys.argv[1])
    print(reached.recv(1))
"""


@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer()
    yield made
    made.close()


@pytest.mark.parametrize("prefixes", [0, 2])
def test_it_does_what_stores_of_torch_do(server: StoreServer, prefixes: int) -> None:
    """Called from Python, and through torch's own C++ as its groups call it; what one puts the other finds."""
    kept = UnixStore(server.address)
    store: Store = kept
    for number in range(prefixes):
        store = PrefixStore(f"p{number}", store)
    store.set("a", "1")
    assert (store.get("a"), store.check(["a"]), store.check(["a", "b"])) == (b"1", True, False)
    assert (store.add("n", 3), store.add("n", -1), store.get("n")) == (3, 2, b"2")
    assert store.compare_set("c", "x", "y") == b"x"
    assert not store.check(["c"])
    assert [store.compare_set("c", *pair) for pair in (("", "y"), ("x", "z"), ("y", "z"))] == [b"y", b"y", b"z"]
    assert store.multi_get(["n", "c"]) == [b"2", b"z"]
    assert (store.delete_key("c"), store.delete_key("c"), store.check(["c"])) == (True, False, False)
    store.set("bytes", bytes(range(256)))  # type: ignore[arg-type]
    assert store.get("bytes") == bytes(range(256))


def test_who_waits_keeps_nobody_else_waiting(server: StoreServer) -> None:
    store = UnixStore(server.address)
    begun = threading.Event()

    def wait() -> bytes:
        begun.set()
        return store.get("late")

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(wait)
        assert begun.wait(PATIENCE_S)
        assert not store.check(["late"])
        store.set("late", "here")
        assert found.result(PATIENCE_S) == b"here"


def test_what_does_not_come_is_an_error_of_torch(server: StoreServer) -> None:
    store = UnixStore(server.address)
    store.set_timeout(SHORT)
    for wait in (lambda: store.get("x"), lambda: store.multi_get(["x"]), lambda: store.wait(["x"], SHORT)):
        with pytest.raises(dist.DistStoreError, match="wait timeout after 100ms, keys: x"):
            wait()
    assert not store.check(["x"])


def _serve_a_store(pipe: Connection) -> None:
    pipe.send(StoreServer().address)
    pipe.recv()


def test_ranks_are_told_that_their_launcher_is_gone() -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    launcher = context.Process(target=_serve_a_store, args=(theirs,), daemon=True)
    launcher.start()
    address = ours.recv()
    store, later = UnixStore(address), UnixStore(address)
    store.set("a", "1")
    launcher.kill()
    launcher.join()
    for each in (store, later):
        with pytest.raises(dist.DistNetworkError, match="the launcher's store is gone"):
            each.get("a")
    ours.close()
    theirs.close()


def test_who_speaks_something_else_is_let_go(server: StoreServer) -> None:
    store = UnixStore(server.address)
    for said in (b"", b"\xff" * 3, b"\xff" * 4, b"\0\0\0\3get", b"\0\0\0\4none", b"\0\0\0\3add\0\0\0\1a\0\0\0\1x"):
        with Client(server.address, "AF_UNIX") as client:
            client.send_bytes(said)
            with pytest.raises((EOFError, ConnectionResetError)):
                client.recv_bytes()
    assert not store.check(["a"])


def as_nobody(server: StoreServer) -> subprocess.CompletedProcess[str]:
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    return subprocess.run([sys.executable, "-c", AS_NOBODY, server.address], capture_output=True, text=True)


@pytest.mark.parametrize("lacking", [OSError(24, "too many open files"), RuntimeError("can't start new thread")])
def test_a_lack_of_descriptors_or_threads_ends_no_store(
    server: StoreServer, lacking: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = threading.Event()

    def refuse(connection: object) -> bool:
        monkeypatch.undo()
        refused.set()
        raise lacking

    monkeypatch.setattr(store_server, "_is_ours", refuse)
    with pytest.raises(dist.DistNetworkError):
        UnixStore(server.address).set("a", "1")
    assert refused.is_set()
    kept = UnixStore(server.address)
    kept.set("a", "2")
    assert kept.get("a") == b"2"


def test_other_users_cannot_reach_it(server: StoreServer) -> None:
    assert stat.filemode(Path(server.address).parent.stat().st_mode) == "drwx------"
    assert "PermissionError" in as_nobody(server).stderr


def test_another_user_who_reaches_it_is_not_answered(server: StoreServer) -> None:
    """Were the folder open to all: the kernel says who connects."""
    folder = Path(server.address).parent
    folder.chmod(0o755)
    Path(server.address).chmod(0o777)
    tried = as_nobody(server)
    folder.chmod(0o700)
    assert tried.stdout == "b''\n", tried.stderr
