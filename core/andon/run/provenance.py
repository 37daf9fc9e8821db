"""Where a run comes from: versions, machine and flags, commit, and the digests of what went in (design, rule 9)."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from andon.problems import InputError, Problem
from andon.run.atomic import write_json

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


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, ...]:
    """What differs between two fingerprints, as `name: ours, theirs`; empty where bits may be compared."""
    names = sorted(set(ours) | set(theirs))
    return tuple(
        f"{name}: {ours.get(name, 'none')}, {theirs.get(name, 'none')}"
        for name in names
        if ours.get(name) != theirs.get(name)
    )


def commit() -> str | None:
    """The git commit that this file was checked out from, with `-dirty` where tracked files differ; None elsewhere.

    An installed package that lies inside somebody's repository is not from there: the file must be tracked.
    """
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    head = _git(here.parent, "rev-parse", "HEAD")
    if not head:
        return None
    return f"{head}-dirty" if _git(here.parent, "status", "--porcelain", "--untracked-files=no") else head


def write_provenance(
    path: Path, *, identity: str, digests: Mapping[str, str], environment: Mapping[str, object]
) -> None:
    """Write what the run comes from: the commit, the configuration's identity, digests (data, base model) by name."""
    found = {
        "commit": commit(),
        "identity": identity,
        "digests": dict(digests),
        "environment": dict(environment),
        "fingerprint": fingerprint(environment),
    }
    write_json(path, found)


@dataclass(frozen=True)
class Provenance:
    """What the file at `path` says of its run: digests by name, and what its bits may depend on."""

    path: Path
    digests: Mapping[str, str]
    fingerprint: Mapping[str, str]

    def digest(self, name: str) -> str:
        """The digest of this name. Raises `InputError` where the file has none."""
        if name not in self.digests:
            raise InputError([Problem(str(self.path), f"has no digest of {name!r}")])
        return self.digests[name]


def read_provenance(path: Path) -> Provenance:
    """What `write_provenance` wrote to `path`. Raises `InputError` for a file that cannot be read or is another."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError([Problem(str(path), f"cannot be read: {error.strerror}")]) from error
    except (ValueError, RecursionError) as error:
        raise InputError([Problem(str(path), f"is no provenance of a run: {error}")]) from error
    parts = [_mapping(found).get(name) for name in ("digests", "fingerprint")]
    if not all(isinstance(part, dict) and all(isinstance(value, str) for value in part.values()) for part in parts):
        raise InputError([Problem(str(path), "is no provenance of a run: it must hold digests and a fingerprint")])
    digests, machine = ({name: str(value) for name, value in _mapping(part).items()} for part in parts)
    return Provenance(path, digests, machine)


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


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says; None where there is no git, no repository, or it fails."""
    # A hook that calls us sets GIT_DIR for another repository.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # `git status` would otherwise write to the index, and leave its lock where the disk refuses.
    clean["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], env=clean, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
