"""The environment of a process, and its fingerprint: the part that numerical results depend on bit for bit."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from andon_contracts.legible import text_of

_PACKAGES = ("andon", "torch", "transformers", "peft", "safetensors", "tokenizers", "numpy", "icontract")
_ACCELERATOR_PACKAGES = (  # the names of their wheels for CUDA 12 and 13
    "triton", "pytorch-triton", "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
)  # fmt: skip
_BIT_PACKAGES = ("torch", "transformers", "peft", "numpy")
# Variables of `_SWITCHES` that place the work and do not change bits.
_PLACING_FLAGS = (
    "CUDA_VISIBLE_DEVICES KMP_AFFINITY MKL_NUM_THREADS OMP_NUM_THREADS PYTHONHASHSEED PYTORCH_NVML_BASED_CUDA_CHECK"
)
# Variables that choose a kernel or how it splits its work, by prefix. The values of those listed are recorded. Another
# variable with a prefix is recorded as "set", because it may hold a password, and not at all if `_UNRECORDED` matches
# its name (paths, caches, logs, secrets). Other variables are not recorded.
_SWITCHES: Mapping[str, str] = {
    "": (
        "ATEN_CPU_CAPABILITY CUDA_FORCE_PTX_JIT CUDA_MPS_ACTIVE_THREAD_PERCENTAGE CUDA_VISIBLE_DEVICES "
        "DISABLE_ADDMM_CUDA_LT DISABLE_PTXAS_OPT DNNL_MAX_CPU_ISA KMP_AFFINITY MKL_CBWR MKL_ENABLE_INSTRUCTIONS "
        "MKL_NUM_THREADS NVIDIA_TF32_OVERRIDE OMP_NUM_THREADS ONEDNN_MAX_CPU_ISA PYTHONHASHSEED "
        "PYTORCH_NVML_BASED_CUDA_CHECK TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_BLAS_PREFER_CUBLASLT"
    ),
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
_UNRECORDED = re.compile(
    r"_(API|AUTH|CACHE|CREDENTIALS?|DEBUG|DIR|DUMP|FILENAME|HOME|HOST|JOB|KEY|LOG|LOGGING|LOGINFO|LOGPATH|PASS|PASSWORD"
    r"|PATH|PORT|PRINT|PROFILE|PROTON|PROVENANCE|REDIS|SECRET|THREADS|TIMEOUT|TOKEN|TRACE|URL|USER|VERBOSE|WORKER)(_|$)"
)
_DRIVER = Path("/proc/driver/nvidia/version")
_INSTRUCTIONS = frozenset({"avx", "avx2", "fma", "f16c", "amx_bf16", "amx_int8", "amx_tile", "asimd", "sve", "bf16"})


def environment(threads: int | None = None, devices: Sequence[str] = ()) -> dict[str, object]:
    """The environment of a run: versions (read, not imported), machine, CPU, instruction sets, threads, flags.

    threads: the intra-op threads of a replica. devices: the models of the accelerators in use; they add the driver and
    the kernel libraries. The caller passes both, so that this function does not start torch.
    """
    model, instructions = _cpu()
    names = (*_PACKAGES, *_ACCELERATOR_PACKAGES) if devices else _PACKAGES
    driver, _, _ = (text_of(_DRIVER) if devices else "").partition("\n")
    version = re.search(r"\s(\d+(?:\.\d+)+)\s", f"{driver} ")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "packages": {name: version_of(name) for name in names},
        "cpu": model,
        "instructions": instructions,
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "devices": sorted(set(devices)),
        "driver": version and version[1],
        "flags": {name: text for name in sorted(os.environ) if (text := _flag(name)) is not None},
    }


def fingerprint(environment: Mapping[str, Any]) -> dict[str, str]:
    """The part of `environment` that bits depend on, flat. Runs with equal fingerprints have equal bits.

    With accelerators it includes the sources of their kernels: driver, Triton, cuBLAS, cuDNN, andon and its `sources`,
    if any. It excludes the number of cores, workers and accelerators. If `portable` (how products are summed) is set,
    it names the least CPU that such a run needs.
    """
    packages, flags = environment["packages"], environment["flags"]
    names = (*_BIT_PACKAGES, *(("andon", *_ACCELERATOR_PACKAGES) if environment["devices"] else ()))
    parts = {name: str(packages[name]) for name in names if packages.get(name) is not None}
    for name in ("machine", "libc", "cpu", "instructions", "threads"):
        parts[name] = str(environment[name])
    if environment.get("portable"):
        parts |= {"cpu": "any with AVX2", "instructions": "avx2", "products": str(environment["portable"])}
    parts["python"] = ".".join(str(environment["python"]).split(".")[:2])  # its random generator draws row orders
    parts["devices"] = ", ".join(environment["devices"])
    if environment.get("driver") is not None:
        parts["driver"] = str(environment["driver"])
    parts |= {f"source {name}": str(digest) for name, digest in (environment.get("sources") or {}).items()}
    return parts | {f"flag {name}": str(flags[name]) for name in sorted(flags.keys() - {*_PLACING_FLAGS.split()})}


def version_of(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _flag(name: str) -> str | None:
    prefix = next((prefix for prefix in _SWITCHES if prefix and name.startswith(prefix)), "")
    if name.removeprefix(prefix) in _SWITCHES[prefix].split():
        return os.environ[name]
    # PTXAS_OPTIONS may hold any text.
    return "set" if name == "PTXAS_OPTIONS" or (prefix and not _UNRECORDED.search(name)) else None


def _cpu() -> tuple[str, str]:
    model, flags = platform.processor() or platform.machine(), ""
    for line in text_of(Path("/proc/cpuinfo")).splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if name == "model name":
            model = value
        elif name in ("flags", "Features"):
            flags = value
            break
    known = {flag for flag in flags.split() if flag in _INSTRUCTIONS or flag.startswith(("avx512", "avx_"))}
    return model, " ".join(sorted(known))
