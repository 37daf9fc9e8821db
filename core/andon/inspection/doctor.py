"""What `andon doctor` finds: whether Andon can train on this machine, what keeps it from that, and what to do.

Nothing is imported here that may be broken or missing: what needs torch, a disk or a network runs as a process of its
own (`probes`), for a bounded time, and is ended with all that it started.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from andon.console.problems import InputError, install_hint
from andon.inspection.probes import IMPORTED
from andon.launch.fork_server import require_sockets
from andon.launch.interpreter import module_command
from andon_contracts.fingerprint import environment, version_of

EXTRAS = {
    "train": {
        "transformers": "transformers",
        "peft": "peft",
        "safetensors": "safetensors",
        "pydantic": "pydantic",
        "typer": "typer",
        "rich": "rich",
        "jinja2": "jinja2",
        "pyyaml": "yaml",
        "numpy": "numpy",
    },
    "falsify": {"hypothesis": "hypothesis", "pytest": "pytest", "pytest-xdist": "xdist"},
    "parquet": {"pyarrow": "pyarrow"},
    "lightning": {"lightning": "lightning"},
    "accelerate": {"accelerate": "accelerate"},
    "tensorboard": {"tensorboard": "tensorboard"},
    "wandb": {"wandb": "wandb"},
}
"""What each extra brings: the name of a distribution, and of what is imported."""
_NEEDED = {"torch": "torch", "icontract": "icontract"}
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_LITTLE = 1 << 30
_LITTLE_SHARED = 64 << 20
"""What containers have by default, and NCCL soon uses up."""
_DRIVER = Path("/proc/driver/nvidia/version")
_SHARED = Path("/dev/shm")
_INTERFACE = "GLOO_SOCKET_IFNAME"
_END_S = 2.0

Level = Literal["ok", "info", "warning", "problem"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: what was found, and what to do where it is not well.

    A `problem` keeps `andon train` from running here; a `warning` keeps from less. `info` says what is not there and
    is not needed.
    """

    name: str
    level: Level
    found: str
    todo: str = ""


def examine(folder: Path, limit_s: float) -> Iterator[Check]:
    """All checks, each as soon as it is done. folder: where runs are to be; limit_s: the most that each may take."""
    yield _ourselves()
    yield _machine()
    seen = _probe(limit_s, "libraries")
    yield from _libraries(seen)
    yield from _extras()
    gpus = seen.get("gpus", [])
    yield _gpus(seen, gpus)
    yield _network(_probe(limit_s, "network"))
    for name in ("inline", "gloo", *(["nccl"] if gpus else [])):
        yield _backend(name, _probe(limit_s, name))
    if not gpus:
        yield Check("backend nccl", "info", "not tried: torch finds no GPU")
    yield _temporary()
    yield _folder(folder, limit_s)
    yield _shared_memory(len(gpus))


def _probe(limit_s: float, *arguments: str) -> Mapping[str, Any]:
    # In a short path where there is one: a socket's has at most 107 bytes, and TMPDIR itself is looked at apart.
    short = "/tmp" if os.access("/tmp", os.W_OK) else None
    prefix = f"ad-{os.getpid()}-"
    try:
        with tempfile.TemporaryDirectory(prefix=prefix, dir=short, ignore_cleanup_errors=True) as scratch:
            return _answer(limit_s, arguments, scratch)
    except OSError as error:
        return {"error": f"no folder for temporary files ({error.strerror}); set TMPDIR to one that can be written"}


def _answer(limit_s: float, arguments: tuple[str, ...], scratch: str) -> Mapping[str, Any]:
    # A session of its own: whoever ends it ends all that it started. What they leave lies in `scratch`.
    probe = subprocess.Popen(
        module_command("andon.inspection.probes", *arguments),
        env=os.environ | {"TMPDIR": scratch},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, said = probe.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {limit_s:g} s (--timeout)"}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(probe.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # one that waits for a disk that is gone cannot be ended
            probe.wait(_END_S)
    with suppress(ValueError):
        found = json.loads(out.decode(errors="replace").splitlines()[-1] if out.strip() else "")
        if isinstance(found, dict):
            return found
    last = said.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
    return {"error": f"ended with {probe.returncode}: {last[0]}"}


def _ourselves() -> Check:
    name = f"andon {version_of('andon') or 'of unknown version'}, Python {sys.version.split()[0]} ({sys.executable})"
    if sys.version_info < (3, 11):  # noqa: UP036 - a checkout on a path is asked for nothing
        return Check("andon", "problem", name, "Andon needs Python 3.11 or newer")
    return Check("andon", "ok", name)


def _machine() -> Check:
    here = environment()
    threads = [f"{name}={os.environ[name]}" for name in _THREADS if name in os.environ]
    cores = f"{here['cores']} of {os.cpu_count()} CPUs"
    told = f"{here['platform']}, {here['cpu']}, {cores}, {', '.join(threads) or 'no limit on threads is set'}"
    return Check("machine", "ok", f"{told} (each rank has one thread)")


def _libraries(seen: Mapping[str, Any]) -> Iterator[Check]:
    if "error" in seen:
        what = f"{', '.join(IMPORTED)} cannot be imported: {seen['error']}"
        yield Check("libraries", "problem", what, "try: python -c 'import torch, transformers, peft'")
        return
    names = {module: name for name, module in (_NEEDED | EXTRAS["train"]).items()}
    for module in IMPORTED:
        version = version_of(names[module])
        if module not in seen["broken"]:
            yield Check(f"library {names[module]}", "ok", version or "there, of unknown version")
            continue
        what = f"cannot be imported: {seen['broken'][module]}"
        if version is not None:
            what = f"{version} {what}"
        yield Check(f"library {names[module]}", "problem", what, install_hint("train"))


def _extras() -> Iterator[Check]:
    """What is installed of each extra, without importing it; `train` is needed, and its libraries have said so."""
    for extra, brought in EXTRAS.items():
        missing = [name for name, module in brought.items() if not _is_there(module)]
        if not missing:
            versions = ", ".join(f"{name} {version_of(name) or 'of unknown version'}" for name in brought)
            yield Check(f"extra {extra}", "ok", versions)
        else:
            level: Level = "problem" if extra == "train" else "info"
            yield Check(f"extra {extra}", level, f"not installed: {', '.join(missing)}", install_hint(extra))


def _gpus(seen: Mapping[str, Any], gpus: list[str]) -> Check:
    driver = ""
    with suppress(OSError):
        driver = _DRIVER.read_text(errors="replace").partition("\n")[0].removeprefix("NVRM version: ")
    if gpus:
        count = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
        return Check("gpus", "ok", f"{count}; torch for CUDA {seen.get('cuda')}; driver {driver or 'unknown'}")
    if not driver:
        return Check("gpus", "info", "none, and no NVIDIA driver")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = "install a torch that is built for CUDA" if seen.get("cuda") is None else "the driver may be too old for it"
    todo = f"CUDA_VISIBLE_DEVICES={hidden!r} may hide them" if hidden is not None else why
    return Check("gpus", "warning", f"torch (for CUDA {seen.get('cuda')}) finds none; driver {driver}", todo)


def _network(seen: Mapping[str, Any]) -> Check:
    """On one machine ranks meet without the host's name; torchrun's, on several, look for an interface by it."""
    if "error" in seen:
        what = f"the host's name was looked up: {seen['error']}"
        return Check("network", "warning", what, "several machines: correct /etc/hosts, or the name server")
    names = ", ".join(seen["interfaces"])
    if seen["named"]:
        todo = f"unset {_INTERFACE}, or name one that is there"
        return Check("network", "problem", f"{_INTERFACE}={os.environ.get(_INTERFACE)}: {seen['named']}", todo)
    found = f"interfaces {names}; host {seen['host']} is {', '.join(seen['addresses']) or 'no address'}"
    others = [name for name in seen["interfaces"] if name != "lo"]
    advice = f"several machines: set {_INTERFACE} to the one to use ({', '.join(others) or names})"
    if not seen["ours"] and _INTERFACE not in os.environ:
        return Check("network", "warning", f"{found}, which is none of this machine's", advice)
    if (
        others
        and _INTERFACE not in os.environ
        and all(each.startswith("127.") or each == "::1" for each in seen["ours"])
    ):
        return Check("network", "info", f"{found}, which other machines cannot reach", advice)
    return Check("network", "ok", found)


def _backend(name: str, seen: Mapping[str, Any]) -> Check:
    if "error" not in seen:
        return Check(f"backend {name}", "ok", f"{seen['ranks']} ranks have added up their numbers")
    todo = {
        "inline": "a run on one process cannot work: look at the libraries above",
        "gloo": "see the network, the folder for temporary files and ulimit -n; --backend inline needs no ranks",
        "nccl": "NCCL_DEBUG=INFO says more; --backend gloo trains on the CPU",
    }
    return Check(f"backend {name}", "warning" if name == "nccl" else "problem", seen["error"], todo[name])


def _folder(folder: Path, limit_s: float) -> Check:
    where = next((each for each in (folder, *folder.absolute().parents) if each.is_dir()), Path("/"))
    seen = _probe(limit_s, "folder", str(where.absolute()))
    if "error" in seen:
        return Check("folder", "problem", seen["error"], "name another one for runs: andon doctor DIR, then --run-dir")
    free = f"{where.absolute()}: {_size(seen['free'])} free"
    if not seen["locks"]:
        return Check("folder", "problem", f"{free}, and its locks keep nobody out", "name a folder on another disk")
    if seen["free"] < _LITTLE:
        return Check("folder", "warning", free, "make room: each checkpoint holds trained weights and moments")
    return Check("folder", "ok", f"{free}, files are locked")


def _temporary() -> Check:
    try:
        require_sockets()
    except InputError as error:
        return Check("temporary files", "problem", str(error), "--backend inline needs none")
    return Check("temporary files", "ok", f"{tempfile.gettempdir()} takes sockets")


def _shared_memory(gpus: int) -> Check:
    try:
        size = shutil.disk_usage(_SHARED).free
    except OSError as error:
        return Check("shared memory", "warning", f"{_SHARED}: {error.strerror}", "ranks need it; mount a tmpfs there")
    if size <= _LITTLE_SHARED and gpus > 1:
        return Check("shared memory", "warning", f"{_SHARED}: {_size(size)} free", "a container: --shm-size=1g")
    return Check("shared memory", "ok", f"{_SHARED}: {_size(size)} free")


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= _LITTLE else f"{size / 2**20:.0f} MiB"


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
