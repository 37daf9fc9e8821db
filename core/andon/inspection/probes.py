"""What `andon doctor` tries in processes of its own, since any of it may hang, or end its process.

    python -m andon.inspection.probes libraries|network|folder DIR|inline|gloo|nccl

The last line on standard output is JSON, by the names that the functions here give; or it holds only an `error`.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from andon.console.exits import Exit
from andon.console.problems import InputError
from andon.launch.launcher import launch, warm_up
from andon.run.atomic import storage, temporary_beside

IMPORTED = ("torch", "transformers", "peft", "safetensors", "numpy", "pydantic", "yaml", "jinja2", "icontract")
"""What a run imports; that it is installed does not say that it can be."""
_ENTRY = "andon.inspection.probes:add_up"
_RANKS = 2


def libraries() -> dict[str, Any]:
    """What cannot be imported (`broken`: name to error), and the GPUs that torch finds (`gpus`, `cuda`)."""
    broken = {}
    for name in IMPORTED:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a library may raise anything while it is imported
            broken[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if "torch" in broken:
        return {"broken": broken, "gpus": [], "cuda": None}
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"broken": broken, "gpus": names, "cuda": torch.version.cuda}


def network() -> dict[str, Any]:
    """The interfaces, this host's name, the addresses that it resolves to (`addresses`), those of them that are this
    machine's (`ours`), and what is wrong with the interface that gloo is told to use (`named`)."""
    from andon.launch.joining import interface_problem

    host = socket.gethostname()
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except socket.gaierror:
        found = []
    return {
        "interfaces": [name for _, name in socket.if_nameindex()],
        "host": host,
        "addresses": found,
        "ours": [address for address in found if _is_ours(address)],
        "named": interface_problem(),
    }


def _is_ours(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as tried:
        try:
            tried.bind((address, 0))
        except OSError:
            return False
    return True


def folder(name: str) -> dict[str, Any]:
    """The bytes that are free there (`free`), and whether a lock that one holds is kept from another (`locks`).

    Writes a file into the folder and takes it away again. Raises `InputError` where the folder takes none.
    """
    file = temporary_beside(Path(name) / "doctor")
    with storage(file):
        with open(file, "xb") as one, open(file, "rb") as other:
            file.unlink()  # at once: nothing is left, however this process ends
            one.write(b"\0" * 4096)
            one.flush()
            os.fsync(one.fileno())
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
                locks = False
            except BlockingIOError:
                locks = True
        return {"free": shutil.disk_usage(name).free, "locks": locks}


def backend(name: str) -> dict[str, Any]:
    """Two ranks, or as many as GPUs where there are fewer, add up their numbers on the backend; their number (`ranks`).

    Raises `InputError` where ranks of their own do not end well, or the sum is another.
    """
    import torch

    from andon.backend.inprocess import InlineBackend

    if name == "inline":
        sent = [torch.full((_RANKS, 1, 1), rank + 1.0) for rank in range(_RANKS)]
        _held([float(each) for each in InlineBackend([torch.device("cpu")] * _RANKS).exchange(sent, [1] * _RANKS)[0]])
        return {"ranks": _RANKS}
    ranks = min(_RANKS, torch.cuda.device_count()) if name == "nccl" else _RANKS
    warm_up(("torch", "torch.distributed", "andon.launch.rank"))
    with tempfile.TemporaryDirectory() as reports:
        # Its own end is the doctor's to decide, who ends all of this.
        ended = launch(_ENTRY, {"backend": name}, workers=ranks, run_folder=Path(reports), timeout_s=3600)
    if ended.exit is not Exit.OK:
        raise InputError(ended.cause)
    return {"ranks": ranks}


def add_up(payload: Mapping[str, str]) -> int:
    """One rank of `backend`; returns an `Exit`."""
    import torch

    from andon.backend.group import GroupBackend, groups_of
    from andon.launch.joining import join

    name = payload["backend"]
    _, rank, world = join(groups_of(name), timeout_s=3600)
    device = torch.device("cuda", rank) if name == "nccl" else torch.device("cpu")
    if name == "nccl":
        torch.cuda.set_device(device)
    group = GroupBackend(name, device)
    try:
        sent = torch.full((world, 1, 1), rank + 1.0, device=device)
        _held([float(each) for each in group.exchange([sent], [1] * world)[0]])
    finally:
        group.close()
    return Exit.OK


def _held(numbers: Sequence[float]) -> None:
    """Raises `InputError` if the ranks' numbers, received by rank, are not 1 to their count by their sum."""
    ranks, found = len(numbers), sum(numbers)
    if found != ranks * (ranks + 1) / 2:
        raise InputError(f"{ranks} ranks added 1 to {ranks} up to {found:g}")


def main(arguments: list[str]) -> int:
    """Run one probe by its name, and write what it found, or its `error`; returns an `Exit`."""
    plain: Mapping[str, Callable[[], dict[str, Any]]] = {"libraries": libraries, "network": network}
    what = arguments[0]
    try:
        found = plain[what]() if what in plain else folder(arguments[1]) if what == "folder" else backend(what)
    except InputError as error:
        found = {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever it is, the doctor tells it
        found = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
