"""`andon doctor`: checks whether Andon can train on this machine, and suggests fixes.

    python -m andon.inspection.doctor libraries|gloo|folder DIR

This module imports nothing that may be broken or missing. Libraries, ranks and disks may hang, so each is probed in a
separate process with a time limit. The last line of its output is JSON: a list of checks, or the error as a string.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from andon.console.messages import Exit, InputError, install_hint, module_command
from andon.launch.fork_server import require_sockets
from andon_contracts.fingerprint import environment, version_of

IMPORTED = ("torch", "transformers", "peft", "safetensors", "numpy", "pydantic", "yaml", "jinja2", "icontract")
"""Libraries that a run imports. An installed library may still fail to import."""
_LITTLE = 1 << 30
_DRIVER = Path("/proc/driver/nvidia/version")
_RANKS = 2
_FAILED = {
    "libraries": ("libraries", "try: python -c 'import torch, transformers, peft'"),
    "gloo": (
        "backend gloo",
        "check the libraries above, TMPDIR, GLOO_SOCKET_IFNAME and ulimit -n; or train with --backend inline",
    ),
    "folder": ("folder", "choose another one: andon doctor DIR, then andon train --run-dir DIR/NAME"),
}
"""By probe: the name of the check that it fails, and what to do then."""


class Check(NamedTuple):
    """Result of one check, and what to do about it.

    level: ok, info, warning or problem. With a problem, `andon train` cannot run here.
    """

    name: str
    level: str
    found: str
    todo: str = ""


def examine(folder: Path, limit_s: float) -> Iterator[Check]:
    """Yield each check when it is done. folder: for run folders; limit_s: time limit of each probe."""
    name = f"andon {version_of('andon') or 'of unknown version'}, Python {sys.version.split()[0]} ({sys.executable})"
    if sys.version_info < (3, 11):  # noqa: UP036 - no installer has checked a checkout on the path
        yield Check("andon", "problem", name, "Andon needs Python 3.11 or newer")
    else:
        yield Check("andon", "ok", name)
    here = environment()
    portable = "with" if "avx2" in str(here["instructions"]).split() else "without"
    yield Check("machine", "ok", f"{here['platform']}, {here['cpu']}, {here['cores']} CPUs {portable} AVX2")
    where = next((each for each in (folder, *folder.absolute().parents) if each.is_dir()), Path("/"))
    for probe, *arguments in (("libraries",), ("gloo",), ("folder", str(where.absolute()))):
        try:
            if probe == "gloo":
                require_sockets()  # here, as a probe gets another TMPDIR
            yield from _checks(limit_s, probe, *arguments)
        except InputError as error:
            title, todo = _FAILED[probe]
            what = f"{', '.join(IMPORTED)} cannot be imported: {error}" if probe == "libraries" else str(error)
            yield Check(title, "problem", what, todo)


def _checks(limit_s: float, *arguments: str) -> list[Check]:
    # A socket's path has at most 107 bytes, so the probe gets a short folder.
    short = "/tmp" if os.access("/tmp", os.W_OK) else None
    try:
        scratch = tempfile.TemporaryDirectory(prefix=f"ad-{os.getpid()}-", dir=short, ignore_cleanup_errors=True)
    except OSError as error:
        what = f"no folder for temporary files ({error.strerror}); set TMPDIR to a writable folder"
        raise InputError(what) from error
    with scratch:
        probe = subprocess.Popen(
            module_command("andon.inspection.doctor", *arguments),
            env=os.environ | {"TMPDIR": scratch.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that `killpg` ends everything that the probe started
        )
        try:
            out, errors = probe.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise InputError(f"no answer within {limit_s:g} s; --timeout SECONDS waits longer") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(probe.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a process blocked on a lost disk cannot be killed
                probe.wait(2.0)
    result = None
    with suppress(ValueError):
        result = json.loads(out.decode(errors="replace").splitlines()[-1] if out.strip() else "")
    if isinstance(result, list):
        return [Check(*each) for each in result]
    last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
    raise InputError(result if isinstance(result, str) else f"the check exited with {probe.returncode}: {last[0]}")


def _libraries() -> Iterator[Check]:
    broken = False
    for module in IMPORTED:
        name = "pyyaml" if module == "yaml" else module
        version = version_of(name)
        try:
            importlib.import_module(module)
            yield Check(f"library {name}", "ok", version or "installed, version unknown")
        except Exception as error:  # noqa: BLE001 - a library may raise anything while it is imported
            broken = broken or module == "torch"
            why = f"cannot be imported: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            yield Check(f"library {name}", "problem", f"{version} {why}" if version else why, install_hint("train"))
    driver, gpus, cuda, nccl = "", list[str](), None, False
    with suppress(OSError):
        driver = _DRIVER.read_text(errors="replace").partition("\n")[0].removeprefix("NVRM version: ")
    if not broken:
        import torch

        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        cuda = torch.version.cuda
        nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    if gpus:
        count = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
        summary = f"{count}; torch for CUDA {cuda}; driver {driver or 'unknown'}"
        todo = "" if nccl else "install a torch that has NCCL, or use --backend gloo"
        yield Check("gpus", "ok" if nccl else "warning", f"{summary}; {'NCCL' if nccl else 'no NCCL'}", todo)
    elif not driver:
        yield Check("gpus", "info", "none; this machine has no NVIDIA driver")
    else:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "install a torch that is built for CUDA" if cuda is None else "the driver may be too old for it"
        todo = f"CUDA_VISIBLE_DEVICES={hidden!r} may hide them" if hidden is not None else why
        yield Check("gpus", "warning", f"torch finds none (its CUDA: {cuda or 'none'}); driver {driver}", todo)


def _folder(name: str) -> Iterator[Check]:
    from andon.run.atomic import storage, temporary_beside

    file = temporary_beside(Path(name) / "doctor")
    with storage(file), open(file, "xb") as written:
        file.unlink()  # at once, so that a killed probe leaves no file
        written.write(b"\0" * 4096)
        written.flush()
        os.fsync(written.fileno())
        free = shutil.disk_usage(name).free
    todo = "free some space: each checkpoint holds trained weights and optimizer moments" if free < _LITTLE else ""
    yield Check("folder", "warning" if todo else "ok", f"{name}: {free / 2**30:.1f} GiB free", todo)


def _gloo() -> Iterator[Check]:
    from andon.launch.launcher import launch, warm_up

    warm_up(("torch", "torch.distributed", "andon.launch.rank"))
    with tempfile.TemporaryDirectory() as reports:
        entry = "andon.inspection.doctor:gather_ranks"
        # `_checks` kills this process after its own limit, which is usually shorter.
        ended = launch(entry, {}, workers=_RANKS, run_folder=Path(reports), timeout_s=3600)
    if ended.exit is not Exit.OK:
        raise InputError(ended.cause)
    yield Check("backend gloo", "ok", f"{_RANKS} ranks started and exchanged data")


def gather_ranks(payload: Mapping[str, str]) -> int:
    """Entry point of a rank of the gloo check. Raises `InputError` if the all-gather gives other numbers."""
    import torch.distributed as dist

    from andon.launch.joining import join

    _, rank, world = join("gloo", timeout_s=3600)
    gathered: list[int | None] = [None] * world
    dist.all_gather_object(gathered, rank)
    if gathered != [*range(world)]:
        raise InputError(f"{world} ranks sent the numbers 0 to {world - 1}, and received {gathered}")
    return Exit.OK


def main(arguments: list[str]) -> int:
    """Run one probe by its name and print its checks as JSON."""
    probe, *where = arguments
    result: list[Check] | str
    try:
        result = list(_folder(*where) if probe == "folder" else {"libraries": _libraries, "gloo": _gloo}[probe]())
    except Exception as error:  # noqa: BLE001 - the doctor reports any error
        result = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    sys.stdout.write(f"{json.dumps(result)}\n")
    sys.stdout.flush()
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
