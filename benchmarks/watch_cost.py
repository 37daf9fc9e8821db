"""The cost of `andon.watch` to a loop: `torchrun --standalone --nproc-per-node 2 -m benchmarks.watch_cost`.

In each process stand three replicas of one loop (DDP over gloo, a small transformer encoder with dropout, clipping,
AdamW), with the same weights and the same masks. One is watched, two are not. They take every step in turn, on the
same rows and in an order that goes round, so that each step is measured three times within a fraction of a second:
watched, not watched, and not watched again as a control. While an unwatched replica steps, the watch hears nothing of
the loop's calls. A step lasts from a barrier until its slowest rank is done. Printed are the medians of the
ratios step by step with an interval that holds the median of 95 % of such samples, the difference in milliseconds,
and, as a proof that the three did the same, whether they ended with the same weights. The same of processor time says
what the watch computes, whoever else has the cores: that of the loop's thread, on the rank where a step takes most of
it, without waits that sleep. `--pieces` says where the time of the watch goes on rank 0, in microseconds a step;
measuring that costs time too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.mesh import Mesh
from andon_contracts.observe import Extremes
from andon_contracts.watch import Watch
from andon_contracts.watch.exchange import Exchange
from andon_contracts.watch.gradient_hooks import GradientHooks
from andon_contracts.watch.intercept import listen, unlisten
from andon_contracts.watch.model_state import FrozenBase
from andon_contracts.watch.optimizer_probe import OptimizerProbe
from andon_contracts.watch.optimizer_state import OptimizerState
from andon_contracts.watch.updates import Updates
from benchmarks.runs import table

WARM_UP = 8
ROLES = ("watched", "unwatched", "control")
_TOKENS, _CLASSES, _RANK_LORA = 512, 4, 8


@dataclass(frozen=True)
class Shape:
    """The loop: what is trained, and how large it is. The defaults take about 50 ms a step on one core a rank."""

    trained: str = "full"
    width: int = 96
    layers: int = 3
    rows: int = 16
    length: int = 48
    optimizer: str = "adamw"
    told: bool = False
    """Whether `w.batch` is told the rows of each step."""


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter: base(x) + B(A(x)), B = 0 at the start."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, _RANK_LORA, bias=False)
        self.lora_B = nn.Linear(_RANK_LORA, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        adapted: Tensor = self.base(x) + self.lora_B(self.lora_A(x))
        return adapted


class Block(nn.Module):
    """One encoder layer: attention and a feed-forward network, each with dropout and a residual."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.dropout = nn.Dropout(0.1)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, length, width] to the same."""
        y = self.norms[0](x)
        y = nn.functional.scaled_dot_product_attention(
            self._split(self.query(y)), self._split(self.key(y)), self._split(self.value(y))
        )
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        fed: Tensor = x + self.dropout(self.down(nn.functional.gelu(self.up(self.norms[1](x)))))
        return fed


class Encoder(nn.Module):
    """A classifier of token rows: embeddings, blocks, a head over the mean."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, shape.width)
        self.place = nn.Parameter(0.02 * torch.randn(shape.length, shape.width))
        self.blocks = nn.Sequential(*(Block(shape.width) for _ in range(shape.layers)))
        self.head = nn.Linear(shape.width, _CLASSES)
        if shape.trained == "lora":
            self.requires_grad_(False)
            self.head.requires_grad_(True)
            for block in self.blocks.children():
                for name in ("query", "key", "value", "out", "up", "down"):
                    setattr(block, name, Adapted(block.get_submodule(name)))  # type: ignore[arg-type]

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows, length] token ids to [rows, classes]."""
        logits: Tensor = self.head(self.blocks(self.embedding(tokens) + self.place).mean(1))
        return logits


class Loop:
    """One replica of the loop on this rank."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(1)
        self.shape = shape
        self.model = DistributedDataParallel(Encoder(shape))
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        kind = torch.optim.AdamW if shape.optimizer == "adamw" else torch.optim.SGD
        self.optimizer = kind(self.trained, lr=1e-3)

    def step(self, number: int, tell: Callable[[Sequence[int]], None] | None = None) -> None:
        """One update, on rows and with masks that `number` and the rank decide."""
        rank = dist.get_rank()
        torch.manual_seed(1000 * number + rank)
        tokens = torch.randint(_TOKENS, (self.shape.rows, self.shape.length))
        if tell is not None:
            first = (number * dist.get_world_size() + rank) * self.shape.rows
            tell(range(first, first + self.shape.rows))
        loss = nn.functional.cross_entropy(self.model(tokens), tokens[:, 0] % _CLASSES)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        """The trained weights."""
        return [p.detach() for p in self.trained]


@contextmanager
def _deaf(watch: Watch) -> Iterator[None]:
    """Unwatched steps run with torch's own functions, as if no watch were there."""
    unlisten(watch.hearing)
    try:
        yield
    finally:
        listen(watch.hearing)


def _slowest(seconds: Sequence[float]) -> list[float]:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    slowest: list[float] = found.tolist()
    return slowest


PIECES: dict[str, tuple[type, str]] = {
    "hooks on the leaves": (Extremes, "add"),
    "before the update: look": (OptimizerProbe, "before"),
    "  extremes of the leaves": (GradientHooks, "read"),
    "  gradient": (OptimizerProbe, "_look_at_gradient"),
    "  frozen weights": (FrozenBase, "digest"),
    "before and after: exchange": (Exchange, "__call__"),
    "  and of it waiting": (Mesh, "gather"),
    "before the update: all": (Updates, "before"),
    "after the update: look": (OptimizerProbe, "after"),
    "  optimizer state": (OptimizerState, "look"),
    "after the update: all": (Updates, "after"),
}
"""What is timed by `--pieces`: a part that is indented is contained in the one above."""


@contextmanager
def timed_pieces() -> Iterator[dict[str, list[float]]]:
    """Seconds in each piece, by step: a value is added to with each call, and whoever reads them begins a new one."""
    spent: dict[str, list[float]] = {name: [0.0] for name in PIECES}
    originals = {name: getattr(owner, method) for name, (owner, method) in PIECES.items()}

    def around(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: object, **kwargs: object) -> object:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent[name][-1] += time.perf_counter() - start

        return timed

    for name, (owner, method) in PIECES.items():
        setattr(owner, method, around(name, originals[name]))
    try:
        yield spent
    finally:
        for name, (owner, method) in PIECES.items():
            setattr(owner, method, originals[name])


def measure(shape: Shape, pairs: int, spent: dict[str, list[float]] | None = None) -> dict[str, object]:
    """The figures of `pairs` steps, equal on all ranks; needs a process group. spent: of `timed_pieces`."""
    loops = {role: Loop(shape) for role in ROLES}
    watched = loops["watched"]
    seconds: dict[str, list[float]] = {role: [] for role in ROLES}
    busy: dict[str, list[float]] = {role: [] for role in ROLES}
    orders = list(itertools.permutations(ROLES))
    with andon.watch(watched.model, watched.optimizer, action="raise") as watch:
        for number in range(1, WARM_UP + pairs + 1):
            for role in orders[number % len(orders)]:
                if role == "watched":
                    taken, used = _timed(lambda n=number: watched.step(n, watch.batch if shape.told else None))  # type: ignore[misc]
                else:
                    with _deaf(watch):
                        taken, used = _timed(lambda n=number, one=loops[role]: one.step(n))  # type: ignore[misc]
                if number > WARM_UP:
                    seconds[role].append(taken)
                    busy[role].append(used)
            for piece in (spent or {}).values():
                piece.append(0.0)
        evaluations = sum(watch.evaluations.values())
    whole = {role: _slowest(taken) for role, taken in seconds.items()}
    same = all(map(torch.equal, watched.weights(), loops["control"].weights()))
    most = {role: _slowest(used) for role, used in busy.items()}
    return _figures(shape, whole, watched.weights(), same, evaluations / (WARM_UP + pairs)) | _of_processor(most)


def _timed(step: Callable[[], None]) -> tuple[float, float]:
    """Seconds that the step took, and seconds of a processor that this thread had in it."""
    dist.barrier()
    start, used = time.perf_counter(), time.thread_time()
    step()
    return time.perf_counter() - start, time.thread_time() - used


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The order statistics that enclose the median of what `values` are a sample of, 19 times of 20."""
    ordered, count = sorted(values), len(values)
    half = 1.96 * math.sqrt(count) / 2
    low, high = math.floor((count - 1) / 2 - half), math.ceil((count - 1) / 2 + half)
    return ordered[max(low, 0)], ordered[min(high, count - 1)]


def _figures(
    shape: Shape, seconds: dict[str, list[float]], weights: Sequence[Tensor], same: bool, evaluations: float
) -> dict[str, object]:
    return {
        "pairs": len(seconds["watched"]),
        "ranks": dist.get_world_size(),
        **_compared(seconds),
        **{f"{role}_ms": round(1e3 * statistics.median(taken), 3) for role, taken in seconds.items()},
        **{f"{role}_mean_ms": round(1e3 * statistics.fmean(taken), 3) for role, taken in seconds.items()},
        "trained_tensors": len(weights),
        "trained_elements": sum(weight.numel() for weight in weights),
        "evaluations_per_step": round(evaluations, 2),
        "same_weights_as_unwatched": same,
        "loop": asdict(shape),
    }


def _compared(seconds: dict[str, list[float]]) -> dict[str, object]:
    """Ratios step by step to what is not watched, each with its interval, and the watched step's difference."""
    found: dict[str, object] = {}
    for first in ("watched", "control"):
        ratios = [a / b for a, b in zip(seconds[first], seconds["unwatched"], strict=True)]
        found[f"{first}_over_unwatched"] = round(statistics.median(ratios), 4)
        found[f"{first}_over_unwatched_interval"] = [round(end, 4) for end in median_interval(ratios)]
    extra = [a - b for a, b in zip(seconds["watched"], seconds["unwatched"], strict=True)]
    return found | {"extra_ms": round(1e3 * statistics.median(extra), 3)}


def _of_processor(seconds: dict[str, list[float]]) -> dict[str, object]:
    return {f"processor_{name}": figure for name, figure in _compared(seconds).items()}


def _microseconds(piece: Sequence[float]) -> int:
    return round(1e6 * statistics.median(piece[WARM_UP:-1]))


_RATIOS = {"watched / unwatched": "watched_over_unwatched", "control / unwatched": "control_over_unwatched"}


def _shown(found: dict[str, object], name: str) -> str:
    return f"{found[name]} in {found[f'{name}_interval']}"


def rows_of(found: dict[str, object]) -> list[list[object]]:
    """The figures as rows of a table."""
    steps: list[list[object]] = [[f"{role} step, median", f"{found[f'{role}_ms']} ms"] for role in ROLES]
    for of, kind in (("", ""), (", of a processor", "processor_")):
        steps += [[name + of, _shown(found, kind + key)] for name, key in _RATIOS.items()]
        steps.append([f"watched - unwatched{of}", f"{found[f'{kind}extra_ms']} ms"])
    return steps


def main() -> int:
    """Measure; print a table and one JSON object on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--trained", choices=("full", "lora"), default="full")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--rows", type=int, default=Shape.rows, help="rows of a rank's batch: the length of a step")
    parser.add_argument("--width", type=int, default=Shape.width)
    parser.add_argument("--pieces", action="store_true", help="say where the time of the watch goes")
    parser.add_argument("--told", action="store_true", help="tell the watch the rows of each step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = Shape(options.trained, options.width, rows=options.rows, optimizer=options.optimizer, told=options.told)
    with timed_pieces() if options.pieces else nullcontext() as spent:
        found = measure(shape, options.pairs, spent)
    if int(os.environ.get("RANK", "0")) == 0:
        print(table(["what", "figure"], rows_of(found)))
        if spent:
            print(table(["piece", "us a step"], [[name, _microseconds(piece)] for name, piece in spent.items()]))
        print(json.dumps(found, indent=2))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
