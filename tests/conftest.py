"""What every test starts from and must leave behind: one thread a process, no network, nothing leaked.

A test that leaves an environment variable, a path for modules, a thread, a process group or a process behind fails,
since the next test would otherwise run in its remains and fail, or pass, for reasons of which its author knows nothing.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import hypothesis
import psutil
import pytest

# Examples have no deadline: on a busy machine any of them can be slow.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

GRACE_S = 10.0  # how long what is ending may take to end; nothing waits that long unless it leaks

# Libraries set these on first use, for the whole process; pytest names the running test.
_SET_BY_OTHERS = ("PYTEST_", "COVERAGE_", "COV_CORE_", "KMP_", "TORCHINDUCTOR_", "TRITON_", "PT_", "QT_")
# multiprocessing keeps these for the life of the process; ranks that they start are looked at all the same.
_SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")

# All that some test's ranks import. `preloaded` stands last: with it the server ends at once.
_FORKED = (
    "icontract",
    "hypothesis",
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
    "peft.utils.transformers_weight_conversion",
    "andon_contracts.watch.opening",
    "andon_falsify.peers.plain",
    "andon.training.run",
    "andon.launch.rank",
    "andon.launch.server_last",
)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Under xdist: start the process that ranks are forked from, with what the ranks of all folders import.

    A process has one such server. Whoever starts it first decides what it holds, and in a run of all tests that would
    be the folder that is collected first. Where it writes is where its ranks will: into what pytest captures, so that
    what they say is shown with the test that fails, and with no other.
    """
    if hasattr(session.config, "workerinput"):  # not the environment, which a pytest within a test inherits
        from andon.launch.launcher import warm_up

        capture = session.config.pluginmanager.get_plugin("capturemanager")
        capture.resume_global_capture()
        try:
            warm_up(_FORKED)
        finally:
            capture.suspend_global_capture()


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(_SET_BY_OTHERS)}


@pytest.fixture(autouse=True)
def environment_as_found() -> Iterator[None]:
    """Fails a test that leaves an environment variable set, changed or gone; puts it back for the next one."""
    before = _environment()
    yield
    after = _environment()
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    for key in changed:
        if key in before:
            os.environ[key] = before[key]
        else:
            del os.environ[key]
    assert not changed, f"left changed in the environment: {', '.join(changed)} (use monkeypatch.setenv)"


@pytest.fixture(autouse=True)
def interpreter_as_found() -> Iterator[None]:
    """Fails a test that leaves another `__main__`, path for modules or arguments; puts them back for the next one.

    A rank that multiprocessing starts later runs `__main__` anew and looks for modules where its parent does.
    """
    main, path, argv = sys.modules["__main__"], list(sys.path), list(sys.argv)
    yield
    now = {"__main__": sys.modules["__main__"] is main, "sys.path": sys.path == path, "sys.argv": sys.argv == argv}
    sys.modules["__main__"], sys.path[:], sys.argv[:] = main, path, argv
    left = [name for name, same in now.items() if not same]
    assert not left, f"left changed in the interpreter: {', '.join(left)} (use monkeypatch)"


@pytest.fixture(autouse=True)
def threads_as_found() -> Iterator[None]:
    """Fails a test that leaves a thread of Python running; those of torch that once called Python are torch's."""
    before = set(threading.enumerate())
    yield
    for thread in _threads_but(before):
        thread.join(GRACE_S)
    left = sorted(thread.name for thread in _threads_but(before))
    assert not left, f"threads left running: {', '.join(left)} (close what started them)"


def _threads_but(before: set[threading.Thread]) -> list[threading.Thread]:
    """Threads that Python started and that were not there before; tqdm keeps one of its own from the first bar on."""
    found = [each for each in set(threading.enumerate()) - before if not isinstance(each, threading._DummyThread)]
    return [each for each in found if each.name != "tqdm_monitor"]


def _children() -> dict[int, psutil.Process]:
    found: dict[int, psutil.Process] = {}
    for pid in _below(os.getpid()):
        with suppress(psutil.NoSuchProcess):
            child = psutil.Process(pid)
            if not _is_server(child):
                found[pid] = child
    return found


def _below(pid: int) -> Iterator[int]:
    """All that descend from `pid`, by the kernel's own lists: psutil would read every process of the machine."""
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, listed.read_text().split()):
                yield child
                yield from _below(child)


def _is_server(process: psutil.Process) -> bool:
    # A rank forked from the fork server has the server's command line, so only a child of ours can be the server.
    try:
        return process.ppid() == os.getpid() and any(name in " ".join(process.cmdline()) for name in _SERVERS)
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(autouse=True)
def processes_as_found() -> Iterator[None]:
    """Fails a test that leaves a process behind, a rank's own children too, and ends what was left."""
    before = _children()
    yield
    started = [child for pid, child in _children().items() if pid not in before]
    _, left = psutil.wait_procs(started, timeout=GRACE_S) if started else ([], [])
    said = [f"{child.pid} {child.name()}" for child in left if child.is_running()]
    for child in left:
        child.kill()
    psutil.wait_procs(left, timeout=GRACE_S)
    assert not said, f"processes left running: {', '.join(said)} (wait for them, or end them by pid)"


@pytest.fixture(autouse=True)
def torch_as_found() -> Iterator[None]:
    """One thread in each operation; fails a test that leaves a process group, and undoes changes of global settings."""
    if "torch" not in sys.modules:
        yield
        return
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    deterministic, dtype = torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
    grad, filling = torch.is_grad_enabled(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the first call loads torch's compiler
        torch.use_deterministic_algorithms(deterministic)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    leaked = dist.is_available() and dist.is_initialized()
    if leaked:
        dist.destroy_process_group()
    assert not leaked, "a process group was left initialised (destroy_process_group)"
