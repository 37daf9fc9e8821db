"""Right loops that differ in how they wrap, accumulate, clip, scale, optimize and tell, written out once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.watch import Watch
from tests.watch import clean_models as models
from tests.watch.clean import Kind, Seen, ignore, seen_by
from tests.watch.loop import BATCH, PER_EPOCH, ROWS, Model, data, plan

Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
EVEN_ROWS = 32
SKIPS_FROM = 2.0**24  # A loss scale at which float16 overflows


def adamw(parameters: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, **options)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


class Reporting(torch.optim.SGD):
    """A subclass that calls its parent's step, which torch wraps too where a plain SGD was made."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


def of_a_subclass(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """`Reporting`, behind a plain optimizer of the parent class."""
    sgd(parameters)
    return Reporting(parameters, lr=1e-2)


def by_hand(model: nn.Module) -> nn.Module:
    """No wrapper: the loop itself broadcasts buffers and reduces gradients."""
    return model


def ddp_with(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: DistributedDataParallel(model, **options)


def permuted(model: nn.Module) -> nn.Module:
    """By hand, with the gradients of all matrices as columns: dense, and not in torch's order."""
    for p in model.parameters():
        if p.dim() == 2 and p.requires_grad:
            p.data = p.data.t().contiguous().t()
    return model


def falling(step: int) -> float:
    return 1e-2 / step


def warm_up(step: int) -> float:
    return 1e-3 * min(step - 1, 10)


def by_norm(limit: float, order: float = 2.0, *, apart: bool = False) -> Callable[[list[nn.Parameter]], object]:
    """apart: the first parameter for itself."""

    def clip(whole: list[nn.Parameter]) -> None:
        for part in (whole[:1], whole[1:]) if apart else (whole,):
            nn.utils.clip_grad_norm_(part, limit, norm_type=order)

    return clip


@dataclass(frozen=True)
class RightLoop:
    """How a loop is built and run; `told` is what its watch is told once."""

    model: Callable[[], nn.Module] = Model
    optimizer: Optimizers = adamw
    wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel
    accumulate: int = 1
    clip: Callable[[list[nn.Parameter]], object] = lambda _: None
    rate: Callable[[int], float] | None = None
    set_to_none: bool = True
    zero_module: bool = False
    autocast: torch.dtype | None = None
    scaled: bool = False
    closure: bool = False
    evaluate: bool = False
    ragged: bool = False
    one_seed: bool = False
    told: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, steps: int) -> Seen:
        torch.manual_seed(0)
        run = Run(self, self.model())
        torch.manual_seed(100 + (0 if self.one_seed else dist.get_rank()))
        for step in range(1, steps + 1):
            run.step(step)
        run.watch.close()
        if self.scaled and run.scaler.get_scale() >= SKIPS_FROM * 2 ** (steps / 4):
            raise RuntimeError("the scaler skipped no step")
        return seen_by(run.watch)


class Run:
    def __init__(self, how: RightLoop, inner: nn.Module) -> None:
        self.how = how
        self.inner = inner
        self.model = how.wrap(inner)
        self.optimizer = how.optimizer([p for p in inner.parameters() if p.requires_grad])
        self.scaler = torch.amp.GradScaler("cpu", enabled=how.scaled, init_scale=SKIPS_FROM, growth_interval=4)
        told = {**how.told, **({"scaler": self.scaler} if how.scaled else {})}
        self.watch: Watch = andon.watch(self.model, self.optimizer, action=ignore, **told)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def step(self, step: int) -> None:
        if self.how.rate is not None:
            self.set_rate(self.how.rate(step))
        if self.how.closure:
            self.optimizer.step(lambda: float(self.backward(step)))
        else:
            self.backward(step)
            self.scaler.unscale_(self.optimizer)
            self.how.clip([p for p in self.model.parameters() if p.requires_grad])
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.how.evaluate and self.rank == 0:
            self.evaluate()

    def set_rate(self, rate: float) -> None:
        group = self.optimizer.param_groups[0]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate

    @torch.no_grad()
    def evaluate(self) -> None:
        self.model.eval()
        self.inner(data()[0])
        self.model.train()

    def backward(self, step: int) -> Tensor:
        zeroed = self.model if self.how.zero_module else self.optimizer
        zeroed.zero_grad(set_to_none=self.how.set_to_none)
        x, y = data()
        rows = len(x) if self.how.ragged and step % 3 == 0 else EVEN_ROWS
        total = torch.zeros(())
        parts = torch.arange(self.rank, rows, self.world).tensor_split(self.how.accumulate)
        for number, part in enumerate(parts, 1):
            self.model.require_backward_grad_sync = number == len(parts)  # type: ignore[assignment]
            total += self.micro_batch(x[part], y[part], rows)
        if self.how.wrap in (by_hand, permuted):
            self.reduce()
        dist.all_reduce(total)
        return total

    def micro_batch(self, x: Tensor, y: Tensor, rows: int) -> Tensor:
        if self.how.wrap in (by_hand, permuted):
            for name, buffer in self.model.named_buffers():
                if name in self.model.state_dict():
                    dist.broadcast(buffer, 0)
        dtype = self.how.autocast
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            share = nn.functional.cross_entropy(self.model(x), y, reduction="sum") / rows
        # The reduction is a mean over ranks.
        self.scaler.scale(share * self.world).backward()
        return share.detach()

    def reduce(self) -> None:
        for p in (p for p in self.model.parameters() if p.requires_grad):
            there = torch.tensor(p.grad is not None, dtype=torch.int32)
            dist.all_reduce(there)
            if there:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= self.world


# loops that tell their rows, and do with them what is right and unusual


def as_array(ids: list[int]) -> Any:
    return np.array(ids, dtype=np.int64)


def as_scalars(ids: list[int]) -> Any:
    return [np.int32(row) if row % 2 else torch.tensor(row) for row in ids]


@dataclass(frozen=True)
class Told:
    """A loop over 37 rows in batches of 8 that tells its rows.

    start: the updates done before. skips: whether a batch of these rows is left out on all ranks. scored: whether
    every rank evaluates all rows for itself. scaled: whether a scaler leaves out updates, which use up rows all the
    same, and losses are told. told: what the watch is told once, beside the number of rows.
    """

    form: Callable[[list[int]], Any] = list
    start: int = 0
    skips: Callable[[int], bool] = lambda _: False
    scored: bool = False
    scaled: bool = False
    model: Callable[[], nn.Module] = Model
    told: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, steps: int) -> Seen:
        torch.manual_seed(0)
        inner = self.model()
        model = DistributedDataParallel(inner)
        optimizer = momentum([p for p in inner.parameters() if p.requires_grad])
        scaler = torch.amp.GradScaler("cpu", enabled=self.scaled, init_scale=SKIPS_FROM, growth_interval=4)
        told = {**self.told, "scaler": scaler} if self.scaled else self.told
        w = andon.watch(model, optimizer, action=ignore, rows=ROWS, start=self.start, **told)
        torch.manual_seed(100 + dist.get_rank())
        x, y = data()
        number = self.start
        for _ in range(steps):
            number += 1
            while self.skips(number):
                number += 1
            ids = plan(number)
            mine = ids[dist.get_rank() :: dist.get_world_size()]
            optimizer.zero_grad()
            w.batch(self.form(mine))
            with torch.autocast("cpu", dtype=torch.float16, enabled=self.scaled):
                loss = nn.functional.cross_entropy(model(x[mine]), y[mine], reduction="sum")
            scaler.scale(loss * dist.get_world_size() / len(ids)).backward()
            if self.scaled:
                total = loss.detach().double()
                dist.all_reduce(total)
                w.loss(loss.detach(), len(mine))
                w.expect("loss", float(total / len(ids)), "mean")
            scaler.step(optimizer)
            scaler.update()
            if self.scored and number % PER_EPOCH == 0:
                self._score(w, inner)
        w.close()
        return seen_by(w)

    @torch.no_grad()
    def _score(self, w: Any, inner: nn.Module) -> None:
        inner.eval()
        x, y = data()
        found = inner(x).argmax(1)
        w.evaluated(self.form(list(range(ROWS))), found, y, {"accuracy": float((found == y).float().mean())}, rows=ROWS)
        inner.train()


def loss_sum(model: nn.Module, ids: Sequence[int]) -> tuple[Tensor, int]:
    x, y = data()
    index = torch.tensor(list(ids))
    return nn.functional.cross_entropy(model(x[index]), y[index], reduction="sum"), len(ids)


def every_tenth(number: int) -> bool:
    """A batch in each second epoch, somewhere in its middle."""
    return number % (2 * PER_EPOCH) == BATCH - 1


def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW in one kernel, which itself skips an update that overflowed."""
    return adamw(parameters, fused=True)


UNUSED = {"allow": {"gradient-present": "the layer is there for another task"}}

LOOPS: dict[str, Callable[[int], Seen]] = {
    "plain loop": RightLoop(wrap=by_hand),
    "plain loop, gradients zeroed, not None": RightLoop(wrap=by_hand, set_to_none=False),
    "DDP": RightLoop(),
    "DDP, gradient views, static graph": RightLoop(
        wrap=ddp_with(gradient_as_bucket_view=True, static_graph=True), clip=by_norm(0.1)
    ),
    "AdamW foreach, clipping": RightLoop(optimizer=lambda p: adamw(p, foreach=True), clip=by_norm(1.0)),
    "AdamW fused": RightLoop(optimizer=fused),
    "SGD": RightLoop(optimizer=sgd),
    "SGD with momentum, clipping by norm": RightLoop(optimizer=momentum, clip=by_norm(0.05)),
    "SGD, clipping by value": RightLoop(optimizer=sgd, clip=lambda p: nn.utils.clip_grad_value_(p, 0.01)),
    "accumulation 4, clipping": RightLoop(accumulate=4, clip=by_norm(0.1)),
    "ragged last batch, accumulation": RightLoop(ragged=True, accumulate=2),
    "bf16 autocast": RightLoop(model=models.Normed, autocast=torch.bfloat16),
    "fp16, scaler that skips": RightLoop(scaled=True, autocast=torch.float16, clip=by_norm(1.0)),
    "fp16, scaler that skips, AdamW fused": RightLoop(scaled=True, autocast=torch.float16, optimizer=fused),
    "fp16, scaler that skips, plain loop": RightLoop(scaled=True, autocast=torch.float16, wrap=by_hand),
    "fp16, scaler that skips, gradients zeroed through the module": RightLoop(
        scaled=True, autocast=torch.float16, zero_module=True, clip=by_norm(1.0)
    ),
    "fp16, scaler that skips, gradients zeroed through the module, not None": RightLoop(
        scaled=True, autocast=torch.float16, zero_module=True, set_to_none=False, clip=by_norm(1.0)
    ),
    "fp16, scaler that skips, rows and losses told": Told(scaled=True, told={"plan": plan}),
    "warm-up from learning rate 0": RightLoop(rate=warm_up, told={"schedule": warm_up}),
    "batch norm, dropout, accumulation": RightLoop(model=models.Normed, accumulate=4),
    "batch norm, evaluation on one rank": RightLoop(model=models.Normed, optimizer=momentum, evaluate=True),
    "unused parameters, DDP": RightLoop(model=models.WithUnused, wrap=ddp_with(find_unused_parameters=True)),
    "unused parameters, plain loop, allowed": RightLoop(model=models.WithUnused, wrap=by_hand, told=UNUSED),
    "layer drop, DDP": RightLoop(model=models.layer_drop, wrap=ddp_with(find_unused_parameters=True)),
    "layer drop, plain loop, SGD": RightLoop(model=models.layer_drop, wrap=by_hand, optimizer=sgd),
    "layer drop alike on all ranks": RightLoop(model=models.layer_drop, wrap=by_hand, one_seed=True, accumulate=2),
    "checkpointed activations, tied weights": RightLoop(model=models.tied),
    "sparse gradients": RightLoop(model=models.sparse_embedding, optimizer=sgd),
    "dropout and batch norm, audited": Told(model=models.Normed, told={"reference": loss_sum, "every": 10}),
    "LBFGS": RightLoop(optimizer=lambda p: torch.optim.LBFGS(p, lr=1e-2, max_iter=3), closure=True),
    "groups clipped apart": RightLoop(clip=by_norm(0.05, apart=True), told={"clip": 0.05}),
    "clipped by the largest element": RightLoop(clip=by_norm(0.01, float("inf")), told={"clip": 0.01}),
    "clipped by the sum of magnitudes": RightLoop(clip=by_norm(0.1, 1.0), told={"clip": 0.1}),
    "rate in a float32 tensor, planned": RightLoop(
        optimizer=lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
        rate=falling,
        told={"schedule": falling},
    ),
    "warm-up from a rate that rounds away": RightLoop(model=models.LayerNormed, rate=lambda step: 2e-8 * step),
    "annealed to a rate that rounds away": RightLoop(
        model=models.LayerNormed, rate=lambda step: 1e-2 if step < 8 else 4e-8
    ),
    "residual branches that begin at 0, warm-up from 0": RightLoop(
        model=models.from_zero, optimizer=momentum, rate=lambda step: 1e-5 * (step - 1)
    ),
    "Rprop, a parameter of one element": RightLoop(
        model=models.LayerNormed, optimizer=lambda p: torch.optim.Rprop(p, lr=1e-3)
    ),
    "subclass that calls its parent's step": RightLoop(optimizer=of_a_subclass),
    "permuted gradients, plain loop": RightLoop(wrap=permuted),
    "cache that grows with the rows of a rank": RightLoop(model=models.Caching, wrap=by_hand, ragged=True),
    "rows as arrays": Told(form=as_array, scored=True, told={"plan": plan}),
    "rows as scalars of others": Told(form=as_scalars),
    "rows, resumed in mid-epoch": Told(start=8),
    "rows, resumed in mid-epoch, planned": Told(start=8, told={"plan": plan}),
    "rows, batches left out on purpose": Told(skips=every_tenth),
    "every rank scores all rows": Told(scored=True),
    "DDP that leaves statistics to the ranks": RightLoop(model=models.Normed, wrap=ddp_with(broadcast_buffers=False)),
}
KINDS = {
    **{name: Kind(loop) for name, loop in LOOPS.items()},
    "torch.compile, traced": Kind(
        RightLoop(wrap=lambda model: DistributedDataParallel(torch.compile(model, backend="aot_eager"))), weight="heavy"
    ),
    "torch.compile, to code": Kind(
        RightLoop(wrap=lambda model: torch.compile(DistributedDataParallel(model))), weight="slow"
    ),
    **{f"DDP, {name}": Kind(RightLoop(model=model), weight="many") for name, model in models.MODELS.items()},
}
