"""What a process runs on, and the part of it that bits depend on (design, The same bits, rule 9)."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

_PACKAGES = ("andon", "torch", "transformers", "peft", "safetensors", "tokenizers", "numpy", "icontract")
# Under the names of their wheels for CUDA 12 and 13.
_ACCELERATOR_PACKAGES = (
    "triton",
    "pytorch-triton",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)
# What changes which kernel runs, or how it splits its work. No other variable is recorded: they may hold secrets.
_FLAGS = (
    "ATEN_CPU_CAPABILITY",
    "CUDA_FORCE_PTX_JIT",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_VISIBLE_DEVICES",
    "DISABLE_ADDMM_CUDA_LT",
    "DISABLE_PTXAS_OPT",
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
    "TORCH_BLAS_PREFER_CUBLASLT",
)
# Compilers and libraries of kernels have many switches, which change with their versions. Values are recorded of those
# that are known to choose kernels. Of another with such a name, unless it is of places, caches, logs or secrets, only
# that it is set: it may hold a password all the same.
_SWITCHES: Mapping[str, str] = {
    "CUBLASLT_": "WORKSPACE_SIZE",
    "CUBLAS_": "EMULATE_DOUBLE_PRECISION EMULATE_SINGLE_PRECISION EMULATION_STRATEGY WORKSPACE_CONFIG",
    "CUDNN_": "",
    "PYTORCH_TUNABLEOP_": "ENABLED TUNING",
    "TORCHDYNAMO_": "DISABLE PREPARE_FREEZING",
    "TORCHINDUCTOR_": (
        "AUTOHEURISTIC_USE AUTO_CHUNKER BATCH_INVARIANT BENCHMARK_EPILOGUE_FUSION BENCHMARK_FUSION "
        "BENCHMARK_KERNEL COMPREHENSIVE_PADDING COOPERATIVE_REDUCTIONS COORDINATE_DESCENT_CHECK_ALL_DIRECTIONS "
        "COORDINATE_DESCENT_RADIUS COORDINATE_DESCENT_TUNING CPP_ENABLE_FLOATING_POINT_CONTRACT_FLAG "
        "CPP_ENABLE_UNSAFE_MATH_OPT_FLAG CPP_GEMM_MAX_K_SLICES CPP_GEMM_THREAD_FACTORS CPP_MARCH CPP_WRAPPER "
        "CUDAGRAPHS DECOMPOSE_K_THRESHOLD DETERMINISTIC DISABLED_PASSES DYNAMIC_SCALE_RBLOCK "
        "EMULATE_DIVISION_ROUNDING EMULATE_PRECISION_CASTS ENABLE_LINEAR_BINARY_FOLDING FORCE_LAYOUT_OPT FREEZING "
        "FX_COMPILE_MODE GRAPH_PARTITION LAYOUT_OPTIMIZATION LOOP_ORDERING_AFTER_FUSION MAX_AUTOTUNE "
        "MAX_AUTOTUNE_GEMM MAX_AUTOTUNE_GEMM_BACKENDS MAX_AUTOTUNE_GEMM_SEARCH_SPACE MAX_AUTOTUNE_POINTWISE "
        "MIN_NUM_SPLIT MIX_ORDER_REDUCTION MULTI_KERNEL NATIVE_MATMUL NUM_DECOMPOSE_K_SPLITS ONLINE_SOFTMAX "
        "PERMUTE_FUSION PERSISTENT_REDUCTIONS PROLOGUE_FUSION SHAPE_PADDING SPLIT_REDUCTIONS USE_FAST_MATH"
    ),
    "TORCH_COMPILE_": "BACKEND DISABLE",
    "TORCH_CUDNN_": "USE_HEURISTIC_MODE_B V8_API_DISABLED",
    "TRITON_": "DEFAULT_FP_FUSION F32_DEFAULT INTERPRET OVERRIDE_ARCH",
}
_NO_SWITCH = re.compile(
    r"_(API|AUTH|CACHE|CREDENTIALS?|DEBUG|DIR|DUMP|FILENAME|HOME|HOST|JOB|KEY|LOG|LOGGING|LOGINFO|LOGPATH|PASS|PASSWORD"
    r"|PATH|PORT|PRINT|PROFILE|PROTON|PROVENANCE|REDIS|SECRET|THREADS|TIMEOUT|TOKEN|TRACE|URL|USER|VERBOSE|WORKER)(_|$)"
)
_PLACING_FLAGS = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "KMP_AFFINITY",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "PYTHONHASHSEED",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
    }
)
_INSTRUCTIONS = frozenset({"avx", "avx2", "fma", "f16c", "amx_bf16", "amx_int8", "amx_tile", "asimd", "sve", "bf16"})
_PORTABLE = {"cpu": "any with AVX2", "instructions": "avx2"}
_BIT_PACKAGES = ("torch", "transformers", "peft", "numpy")
_DRIVER = Path("/proc/driver/nvidia/version")


def environment(threads: int | None = None, devices: Sequence[str] = ()) -> dict[str, object]:
    """What the run runs on: versions (read, not imported), machine, CPU, instruction sets, threads, flags.

    `threads` is the number of intra-op threads of a replica, `devices` the names of the accelerators' models; the
    caller knows them, because asking for them would start torch. With devices: their driver, and what makes kernels
    for them.
    """
    cpu = _cpu()
    names = (*_PACKAGES, *_ACCELERATOR_PACKAGES) if devices else _PACKAGES
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "packages": {name: version_of(name) for name in names},
        "cpu": cpu["model"],
        "instructions": cpu["instructions"],
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "devices": sorted(set(devices)),
        "driver": _driver() if devices else None,
        "flags": {name: shown for name in sorted(os.environ) if (shown := _flag(name)) is not None},
    }


def fingerprint(environment: Mapping[str, object]) -> dict[str, str]:
    """The part of `environment` that bits depend on, flat: equal fingerprints promise equal bits, others nothing.

    Versions of libraries and of Python, machine, libc, CPU model and instruction sets, threads of a replica, models of
    accelerators, and flags that choose kernels. The number of cores, workers or accelerators is not in it. With
    accelerators also what makes their kernels: driver, Triton, cuBLAS, cuDNN, andon, and its `sources` where given.
    An environment that says `portable` has the CPU that any is held to in the place of its own, and how it adds.
    """
    packages = _mapping(environment["packages"])
    flags = _mapping(environment["flags"])
    names = (*_BIT_PACKAGES, *(("andon", *_ACCELERATOR_PACKAGES) if environment["devices"] else ()))
    found = {name: str(packages[name]) for name in names if packages.get(name) is not None}
    for name in ("machine", "libc", "cpu", "instructions", "threads"):
        found[name] = str(environment[name])
    if environment.get("portable"):
        found |= _PORTABLE | {"products": str(environment["portable"])}
    # The order of rows is drawn by Python's generator.
    found["python"] = ".".join(str(environment["python"]).split(".")[:2])
    devices = environment["devices"]
    found["devices"] = ", ".join(map(str, devices)) if isinstance(devices, list) else str(devices)
    if environment.get("driver") is not None:
        found["driver"] = str(environment["driver"])
    found |= {f"source {name}": str(digest) for name, digest in _mapping(environment.get("sources")).items()}
    return found | {f"flag {name}": str(flags[name]) for name in sorted(flags.keys() - _PLACING_FLAGS)}


def _flag(name: str) -> str | None:
    """What is recorded of the variable `name`; None where nothing is, as of all that may hold a secret."""
    if name in _FLAGS:
        return os.environ[name]
    if name == "PTXAS_OPTIONS":  # any text
        return "set"
    known = next((prefix for prefix in _SWITCHES if name.startswith(prefix)), None)
    if known is None:
        return None
    if name.removeprefix(known) in _SWITCHES[known].split():
        return os.environ[name]
    return None if _NO_SWITCH.search(name) else "set"


def _driver() -> str | None:
    """The version of NVIDIA's kernel driver; None where it does not say."""
    try:
        first = _DRIVER.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return None
    found = re.search(r"\s(\d+(?:\.\d+)+)\s", f"{first} ")
    return found[1] if found is not None else None


def version_of(library: str) -> str | None:
    """The version of an installed library; None where it is not installed."""
    try:
        return metadata.version(library)
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
