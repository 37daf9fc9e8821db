"""How many bytes a step a watch keeps for ever in one process: `python -X tracemalloc -m benchmarks.watch_growth`.

The same loop runs without and with a watch. `tracemalloc` counts the memory that Python holds after half of the steps,
when everything that has a bound is full, and again at the end. It must trace from the start of the process (`-X`): it
does not count what was allocated before, so that replacing such memory looks like growth.
"""

from __future__ import annotations

import argparse
import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import andon

LOOPS = ("epochs", "next(iter(loader))", "rows=")
_ROWS, _BATCH = 256, 8


def growth(loop: str, steps: int, *, watched: bool) -> float:
    """Bytes a step that stay, over the second half of `steps` updates of one of `LOOPS`."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    told = {"rows": _ROWS} if loop == "rows=" else {}
    marks: list[int] = []
    with andon.watch(model, optimizer, **told) if watched else nullcontext() as watch:  # type: ignore[arg-type]
        for step, (rows, ids) in enumerate(_batches(loop, steps), 1):
            if told and watch is not None:
                watch.batch(ids)
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (steps // 2, steps):
                gc.collect()
                marks.append(tracemalloc.get_traced_memory()[0])
    return (marks[1] - marks[0]) / (steps - steps // 2)


def _batches(loop: str, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    data = TensorDataset(torch.randn(_ROWS, 4), torch.arange(_ROWS))
    loader = DataLoader(data, batch_size=_BATCH, shuffle=True)
    made = 0
    while made < steps:
        for rows, ids in [next(iter(loader))] if loop == "next(iter(loader))" else loader:
            if made < steps:
                made += 1
                yield rows, ids


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    steps = parser.parse_args().steps
    if not tracemalloc.is_tracing():
        parser.error("start it by python -X tracemalloc -m benchmarks.watch_growth")
    print(f"bytes a step that stay, over the last {steps - steps // 2:,} of {steps:,} steps of one process")
    for loop in LOOPS:
        alone, watched = (growth(loop, steps, watched=watched) for watched in (False, True))
        print(f"{loop:20}  without a watch {alone:8.1f}   with one {watched:8.1f}")


if __name__ == "__main__":
    main()
