"""Whether kernels written in Triton can be used, said once where they cannot."""

from __future__ import annotations

import functools
import importlib.util
import warnings


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed. Where it is not, a warning says so once: the same is then computed by torch.

    A Triton that is installed and broken is not found here: its own error ends what uses it.
    """
    found = importlib.util.find_spec("triton") is not None
    if not found:
        warnings.warn(
            "Triton is not installed: what Andon checks on GPUs is computed by more and slower operations of torch",
            RuntimeWarning,
            stacklevel=2,
        )
    return found
