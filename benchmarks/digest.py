"""The cost of a digest beside a plain sum of the same memory, on a GPU: `python -m benchmarks.digest`.

Both read it once; a sum of fp32 values is what torch has for that. `with the finite check` counts the values that are
not finite in the same pass. Medians of interleaved calls, each timed by the device's own clock. On a CPU it runs small.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial

import torch

from andon_contracts.digest import word_sum_tensor
from andon_contracts.observe import word_sums
from benchmarks.gpu_job import between, mark, rest
from benchmarks.runs import table

_ADAPTER = 5_900_000
"""Trainable values of the reference job."""


def main() -> int:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=8.0 if cuda else 0.01)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    found, rows = {}, []
    for name, values in (("large", int(options.gigabytes * 1e9) // 4), ("adapter", _ADAPTER)):
        memory = torch.randn(values, device=device)
        works: dict[str, Callable[[], object]] = {
            "plain sum": memory.sum,
            "digest": partial(word_sum_tensor, memory),
            "digest with the finite check": partial(word_sums, [memory], finite=True),
        }
        times = interleaved(works, options.rounds, device)
        for work, seconds in times.items():
            rows.append((name, work, f"{1e6 * seconds:.1f}", f"{4 * values / seconds / 1e12:.2f}"))
        found[name] = {work: {"us": 1e6 * seconds} for work, seconds in times.items()}
        found[name]["ratio"] = {"of a sum's speed": times["plain sum"] / times["digest"]}
        del memory, works
    print(table(("memory", "work", "microseconds", "TB/s"), rows))
    print(json.dumps({"device": torch.cuda.get_device_name() if cuda else "CPU", **found}))
    good = found["large"]["ratio"]["of a sum's speed"] >= 0.95 and found["adapter"]["digest"]["us"] <= 50
    return 0 if good else 1


def interleaved(works: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    for work in works.values():
        for _ in range(3):
            work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(timed(work, device))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def timed(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        # Work queued before keeps the device busy while the host launches: what is timed is the device alone.
        torch.cuda._sleep(400_000)  # type: ignore[no-untyped-call]
    first = mark(device)
    work()
    last = mark(device)
    rest(device)
    return between(first, last)


if __name__ == "__main__":
    raise SystemExit(main())
