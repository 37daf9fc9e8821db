"""The same bits on CPUs of different kinds: what `run.portable` sets for torch and MKL, and whether it took effect.

torch and MKL choose kernels by the CPU that they find. Two variables of the environment make both choose by what any
CPU with AVX2 has; they are read once, at the first kernel and the first product of a process. What has no such
variable, or is slow by it, is in `backend/products`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from andon.config.schema import Run
from andon.console.problems import InputError, Problem, ProblemList
from andon_contracts.fingerprint import environment

SETTINGS = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"}
"""The variables, with the values at which bits do not depend on the kind of CPU."""
_KEY = "run.portable"
_ASK_BRANCH, _COMPATIBLE = 1, 3
"""MKL_CBWR_BRANCH and MKL_CBWR_COMPATIBLE of mkl_types.h."""
_UNASKED = 0
"""No branch of MKL's."""
_WANTED = ("AVX2", _COMPATIBLE)
"""What torch and MKL answer where both variables took effect."""


@contextmanager
def chosen(run: Run) -> Iterator[None]:
    """Inside, processes that are started compute portably where `run.portable` asks for it; so does this one if new.

    Afterwards the environment is as before, but for a process that has trained itself: it keeps the variables, as torch
    keeps what they said, and whatever is recorded of it later is true. Raises `InputError` for a CPU without AVX2, and
    for variables that have other values.
    """
    if not run.portable:
        yield
        return
    _require_possible()
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ.update(SETTINGS)
    try:
        yield
    finally:
        if not (run.backend == "inline" and "torch" in sys.modules and _capability_and_branch() == _WANTED):
            for name in (name for name, value in before.items() if value is None):
                os.environ.pop(name, None)


def _require_possible() -> None:
    found = ProblemList()
    if "avx2" not in str(environment()["instructions"]).split():
        found.add(_KEY, "needs a CPU with AVX2, which this one does not say it has")  # torch would not look, and crash
    for name, value in SETTINGS.items():
        if os.environ.get(name, value) != value:
            found.add(name, f"is {os.environ[name]!r} in the environment, {_KEY} needs {value!r}; unset one of the two")
    found.raise_if_any()


def require_in_effect() -> None:
    """Raise `InputError` where torch or MKL compute otherwise in this process than `chosen` asked for."""
    found = _capability_and_branch()
    if found == _WANTED:
        return
    if found[1] is None:
        raise InputError([Problem(_KEY, "needs a torch that is built with MKL")])
    settings = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
    what = (
        f"comes too late: torch has computed in this process before, with {found[0]}; start the program with "
        f"{settings}, or train in ranks, which are processes of their own (run.backend=gloo)"
    )
    raise InputError([Problem(_KEY, what)])


def _capability_and_branch() -> tuple[str, int | None]:
    """What torch's kernels use of this CPU, and MKL's branch of code; None where there is no MKL.

    Of an MKL that cannot be asked, since torch has it elsewhere, the variable is believed.
    """
    import torch  # what starts ranks needs the rest of this module, and no torch

    capability = torch.backends.cpu.get_cpu_capability()
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return capability, None
    if capability != _WANTED[0]:
        return capability, _UNASKED  # MKL settles on a branch when it is asked, and a plain run may follow
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return capability, int(ctypes.CDLL(str(library)).mkl_serv_cbwr_get(_ASK_BRANCH))
    except (OSError, AttributeError):
        return capability, _COMPATIBLE
