"""What a report says of where it was made: versions of the libraries, and the machine."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable
from pathlib import Path

from andon_falsify.peers.registry import installed

_ALWAYS = ("andon", "torch", "transformers", "peft")


def versions(more: Iterable[str] = ()) -> dict[str, str]:
    """The installed versions by name: Python, ours, the libraries that we train with, and `more`."""
    found = {name: installed(name) for name in dict.fromkeys((*_ALWAYS, *more))}
    return {"python": platform.python_version()} | {name: number for name, number in found.items() if number}


def fingerprint() -> dict[str, str]:
    """What bits depend on: the processor, the operating system, torch with its build."""
    import torch

    found = {"cpu": _processor(), "os": f"{platform.system()} {platform.machine()}", "torch": torch.__version__}
    if torch.cuda.device_count():
        found["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return found


def _processor() -> str:
    """The name of the processor as Linux gives it; of elsewhere what Python knows."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
