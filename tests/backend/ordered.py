"""Digests of products in one order, from a new process: `python -m tests.backend.ordered [all]`."""

from __future__ import annotations

import hashlib
import sys

import torch

from andon.launch.portable import portable_kernels


def digest(*, all_kernels: bool = False) -> str:
    drawn = torch.Generator().manual_seed(0)
    x, found = torch.randn(64, 700, generator=drawn), hashlib.sha256()
    torch.nn.functional.gelu(x)  # from now on oneDNN knows which CPU it has
    with portable_kernels():
        for rows, columns, outputs in ((1, 700, 9), (37, 1024, 384), (300, 640, 5), (64, 1536, 384)):
            a, b = torch.randn(rows, columns, generator=drawn), torch.randn(columns, outputs, generator=drawn)
            bias = torch.randn(outputs, generator=drawn)
            for left in (a, a.t().contiguous().t()):
                for right in (b, b.t().contiguous().t()):
                    found.update((left @ right).numpy().tobytes())
                    found.update(torch.addmm(bias, left, right).numpy().tobytes())
        if all_kernels:
            x.requires_grad_()
            made = torch.nn.functional.gelu(x)
            made.sum().backward()
            assert x.grad is not None
            for each in (made, x.grad, torch.nn.functional.conv1d(x.detach()[None], torch.ones(3, 64, 5))):
                found.update(each.detach().numpy().tobytes())
    return found.hexdigest()


def require_torch_as_before() -> None:
    """After portable kernels, and after an error in them, where the caller had turned oneDNN off and where not."""
    a, b, x = torch.randn(33, 900), torch.randn(900, 31), torch.randn(64, 700)
    gelu = torch.nn.functional.gelu
    for enabled in (True, False):
        torch.backends.mkldnn.enabled = enabled
        plain = a @ b, gelu(x)
        try:
            with portable_kernels():
                assert not torch.equal(a @ b, plain[0])
                assert torch.equal(gelu(x), plain[1]) is not enabled
                raise KeyError
        except KeyError:
            pass
        assert torch.equal(a @ b, plain[0])
        assert torch.equal(gelu(x), plain[1])
        assert torch.backends.mkldnn.enabled is enabled
    torch.backends.mkldnn.enabled = True


if __name__ == "__main__":
    if not sys.argv[1:]:
        require_torch_as_before()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        print(digest(all_kernels=bool(sys.argv[1:])))
