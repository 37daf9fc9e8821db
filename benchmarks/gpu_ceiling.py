"""The speed of a device's matrix products, for a moment and for long: `python -m benchmarks.gpu_ceiling`.

A GPU that draws all the power it may lowers its clock, so ten products in a row say more than it can keep up. Square
products of bf16 on random numbers (zeros need less power), then those of one layer of the reference job in the order of
a step, each replayed from a CUDA graph. Prints a table and JSON. On a CPU with `--size 256 --seconds 0.2`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from benchmarks.device_time import between, mark, rest
from benchmarks.gpu_job import SHAPES, Shape
from benchmarks.runs import table

IN_A_ROW = 10


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--size", type=int, default=8192 if cuda else 256)
    parser.add_argument("--seconds", type=float, default=5.0 if cuda else 0.2, help="of what is kept up")
    parser.add_argument("--shape", choices=SHAPES, default="reference" if cuda else "tiny")
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    shape = SHAPES[options.shape]
    jobs = {
        f"{options.size} x {options.size}": (square(options.size, device), 2.0 * IN_A_ROW * options.size**3),
        f"a layer of {options.shape}, {options.rows} rows": (
            layer(shape, options.rows, device),
            shape.products / shape.layers / shape.batch * options.rows,
        ),
    }
    rows = []
    for name, (work, operations) in jobs.items():
        run = replayed(work, device)
        first = seconds_of(run, device)
        last, end = first, time.perf_counter() + options.seconds
        while time.perf_counter() < end:
            last = seconds_of(run, device)
        rows.append([name, *(round(operations / each / 1e12, 1) for each in (first, last))])
    print(table(["products", "TFLOP/s at first", f"after {options.seconds:g} s"], rows))
    name = torch.cuda.get_device_name(device) if cuda else "CPU"
    print(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}))
    return 0


def square(size: int, device: torch.device) -> Callable[[], None]:
    """Ten products of the same two matrices of `size` rows and columns."""
    a, b = _drawn(size, size, device), _drawn(size, size, device)
    out = torch.empty_like(a)

    def work() -> None:
        for _ in range(IN_A_ROW):
            torch.mm(a, b, out=out)

    return work


def layer(shape: Shape, rows: int, device: torch.device) -> Callable[[], None]:
    """A layer's products with frozen weights: forward, and backward to their inputs."""
    wide, narrow = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    sizes = [(shape.hidden, wide), (shape.hidden, narrow), (shape.hidden, narrow), (wide, shape.hidden)]
    sizes += [(shape.hidden, shape.inner), (shape.hidden, shape.inner), (shape.inner, shape.hidden)]
    weights = [_drawn(out, into, device) for into, out in sizes]
    inputs = {size: _drawn(rows * shape.length, size, device) for pair in sizes for size in pair}

    def work() -> None:
        for weight in weights:
            torch.mm(inputs[weight.shape[1]], weight.t())
        for weight in reversed(weights):
            torch.mm(inputs[weight.shape[0]], weight)

    return work


def replayed(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """`work` from a CUDA graph; on a CPU as it is."""
    work()
    if device.type != "cuda":
        return work
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def seconds_of(run: Callable[[], None], device: torch.device) -> float:
    """Of one run after another that is not timed, the device at rest before and after."""
    run()
    first = mark(device)
    run()
    last = mark(device)
    rest(device)
    return between(first, last)


def _drawn(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16)


if __name__ == "__main__":
    raise SystemExit(main())
