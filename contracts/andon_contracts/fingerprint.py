"""What a process runs on, and the part of it that bits depend on (design, The same bits, rule 9)."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

_PACKAGES = ("andon", "torch", "transformers", "peft", "safetensors", "tokenizers", "numpy", "icontract")
# What changes which kernel runs, or how it splits its work. No other variable is recorded: they may hold secrets.
_FLAGS = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "DNNL_MAX_CPU_ISA",
    "KMP_AFFINITY",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "PYTHONHASHSEED",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
_BIT_FLAGS = frozenset(_FLAGS) - {
    "CUDA_VISIBLE_DEVICES",
    "KMP_AFFINITY",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
}
_INSTRUCTIONS = frozenset({"avx", "avx2", "fma", "f16c", "amx_bf16", "amx_int8", "amx_tile", "asimd", "sve", "bf16"})
_BIT_PACKAGES = ("torch", "transformers", "peft", "numpy")


def environment(threads: int | None = None, devices: Sequence[str] = ()) -> dict[str, object]:
    """What the run runs on: versions (read, not imported), machine, CPU, instruction sets, threads, flags.

    `threads` is the number of intra-op threads of a replica, `devices` the names of the accelerators' models; the
    caller knows them, because asking for them would start torch.
    """
    cpu = _cpu()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": cpu["model"],
        "instructions": cpu["instructions"],
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "devices": sorted(set(devices)),
        "flags": {name: os.environ[name] for name in _FLAGS if name in os.environ},
    }


def fingerprint(environment: Mapping[str, object]) -> dict[str, str]:
    """The part of `environment` that bits depend on, flat: equal fingerprints promise equal bits, others nothing.

    Versions of libraries and of Python, machine, libc, CPU model and instruction sets, threads of a replica, models of
    accelerators, and flags that choose kernels. The number of cores, workers or accelerators is not in it.
    """
    packages = _mapping(environment["packages"])
    flags = _mapping(environment["flags"])
    found = {name: str(packages[name]) for name in _BIT_PACKAGES if packages.get(name) is not None}
    for name in ("machine", "libc", "cpu", "instructions", "threads"):
        found[name] = str(environment[name])
    # The order of rows is drawn by Python's generator.
    found["python"] = ".".join(str(environment["python"]).split(".")[:2])
    devices = environment["devices"]
    found["devices"] = ", ".join(map(str, devices)) if isinstance(devices, list) else str(devices)
    return found | {f"flag {name}": str(flags[name]) for name in sorted(_BIT_FLAGS & flags.keys())}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, str]:
    """Model and instruction sets as the kernel names them; empty where it does not."""
    model, flags = platform.processor() or platform.machine(), ""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = (part.strip() for part in line.partition(":"))
        if name == "model name":
            model = value
        elif name in ("flags", "Features"):
            flags = value
            break
    known = {flag for flag in flags.split() if flag in _INSTRUCTIONS or flag.startswith(("avx512", "avx_"))}
    return {"model": model, "instructions": " ".join(sorted(known))}


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
