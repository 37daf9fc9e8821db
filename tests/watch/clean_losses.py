"""Right loops by what they minimise, and by how shards, scalers and repeated batches enter into it.

A sum over the rank's terms is divided by their number on all ranks and multiplied by the number of ranks, because the
wrapper takes a mean. So two ranks train what one process trains.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.nn.functional import all_gather
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from tests.watch.clean import Kind
from tests.watch.clean_communication import ROWS, Course, mean, share
from tests.watch.clean_loops import ddp_with, momentum, sgd
from tests.watch.clean_models import LayerNormed, Normed
from tests.watch.loop import CLASSES, FEATURES

Loss = Callable[[Any, int], Tensor]
_WORDS, _LENGTH, _GROUP = 11, 7, 4


class Speaker(nn.Module):
    """Logits of the next word, [rows, length, words], from the mean of the words so far, and perhaps their value."""

    def __init__(self, *, values: bool = False) -> None:
        super().__init__()
        self.words, self.next = nn.Embedding(_WORDS, 16), nn.Linear(16, _WORDS)
        self.value = nn.Linear(16, 1) if values else None

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor | None]:
        so_far = self.words(words).cumsum(1) / torch.arange(1.0, words.shape[1] + 1)[:, None]
        return self.next(torch.tanh(so_far)), None if self.value is None else self.value(so_far).squeeze(-1)


def texts(step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Words of this rank's rows [rows, length + 1], which of them are trained [rows, length], and an advantage each."""
    made = torch.Generator().manual_seed(step % 50)
    words = torch.randint(_WORDS, (ROWS, _LENGTH + 1), generator=made)
    trained = torch.arange(_LENGTH) < torch.randint(1, _LENGTH + 1, (ROWS, 1), generator=made)
    rewards = torch.randn(ROWS // _GROUP, _GROUP, generator=made)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)).flatten()
    mine = torch.arange(dist.get_rank(), ROWS, dist.get_world_size()).tensor_split(parts)[part]
    return words[mine], trained[mine], advantages[mine]


def over_all(terms: Tensor, count: Tensor | float) -> Tensor:
    """The sum of the terms over the count of all ranks, for a wrapper that takes the mean over ranks."""
    total = torch.as_tensor(count, dtype=torch.float64).clone()
    dist.all_reduce(total)
    return terms.sum() * dist.get_world_size() / total.float()


def log_likelihood(model: Any, words: Tensor) -> Tensor:
    return -F.cross_entropy(model(words[:, :-1])[0].transpose(1, 2), words[:, 1:], reduction="none")


def token_sum(model: Any, step: int) -> Tensor:
    words, trained, _ = texts(step)
    return over_all(-log_likelihood(model, words) * trained, trained.sum())


def focal(model: Any, step: int) -> Tensor:
    x, y = share(step)
    losses = F.cross_entropy(model(x), y, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def class_weights(model: Any, step: int) -> Tensor:
    x, y = share(step)
    weights = torch.arange(1.0, CLASSES + 1)
    return over_all(F.cross_entropy(model(x), y, weights, reduction="none"), weights[y].sum())


def several_labels(model: Any, step: int) -> Tensor:
    x, y = share(step)
    wanted = (torch.arange(CLASSES) <= y[:, None]).float()
    return F.binary_cross_entropy_with_logits(model(x), wanted, pos_weight=torch.full((CLASSES,), 2.0))


@functools.cache
def teacher(kind: type[nn.Module]) -> nn.Module:
    """Another model of this kind, the same on all ranks, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return kind().eval().requires_grad_(False)


def distilled(model: Any, step: int) -> Tensor:
    """The labels, and the teacher's distribution at a temperature of 2."""
    x, y = share(step)
    logits, wanted = model(x), teacher(LayerNormed)(x)
    soft = F.kl_div((logits / 2).log_softmax(-1), (wanted / 2).log_softmax(-1), reduction="batchmean", log_target=True)
    return 0.5 * F.cross_entropy(logits, y) + 0.5 * 4 * soft


def soft_labels(model: Any, step: int) -> Tensor:
    x, _ = share(step)
    return F.cross_entropy(model(x), (3 * teacher(LayerNormed)(x)).softmax(-1))


def preferred(model: Any, step: int) -> Tensor:
    """Pairs of texts: the first is to gain on the second, by the measure of a fixed model."""
    words, trained, _ = texts(step)
    gains = [
        ((log_likelihood(model, each) - log_likelihood(teacher(Speaker), each)) * trained).sum(1)
        for each in (words, words.flip(1))
    ]
    return -F.logsigmoid(0.5 * (gains[0] - gains[1])).mean()


def contrastive(model: Any, step: int) -> Tensor:
    """Each row is to find its own view among those of all ranks, gathered with their gradients."""
    x, _ = share(step)
    one, other = (F.normalize(model(each), dim=-1) for each in (x, x + 0.1 * x.flip(1)))
    first = dist.get_rank() * len(x)
    return F.cross_entropy(5 * one @ torch.cat(all_gather(other)).T, torch.arange(first, first + len(x)))


def full(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def by_policy(level: str) -> Loss:
    """Clipped ratios to the policy of four updates before, advantages of both signs, several updates of a rollout.

    level: "token", all tokens of the global batch weigh alike; "sequence", all texts do; "value": and a value is
    learned beside the policy, whose entropy is rewarded.
    """
    old: list[Any] = []

    def loss(model: Any, step: int) -> Tensor:
        if step % 4 == 1 or not old:
            with torch.no_grad():
                held = {name: full(p) for name, p in getattr(model, "module", model).named_parameters()}
            old[:] = [held]
        words, trained, advantages = texts(step // 4)
        with torch.no_grad():
            policy = functools.partial(functional_call, Speaker(values="value.bias" in old[0]), old[0])
            before = log_likelihood(policy, words)
        logits, values = model(words[:, :-1])
        now = -F.cross_entropy(logits.transpose(1, 2), words[:, 1:], reduction="none")
        ratio, gain = (now - before).exp(), advantages[:, None]
        terms = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain) * trained
        if level == "sequence":
            return over_all(terms.sum(1) / trained.sum(1), len(words))
        if level == "value":
            chances = logits.log_softmax(-1)
            terms = terms + trained * (0.5 * (values - gain) ** 2 + 0.01 * (chances.exp() * chances).sum(-1))
        return over_all(terms, trained.sum())

    return loss


def by(loss: Loss) -> Callable[[nn.Module, int], None]:
    return lambda model, step: loss(model, step).backward()


def weighed_window(model: Any, step: int) -> None:
    """Three micro-batches of other lengths, divided by the tokens of all of them."""
    count = sum(texts(step, part, 3)[1].sum() for part in range(3))
    for part in range(3):
        words, trained, _ = texts(step, part, 3)
        model.require_backward_grad_sync = part == 2
        over_all(-log_likelihood(model, words) * trained, count).backward()


def makes_states_first(model: nn.Module, optimizer: Any, step: int) -> None:
    """Before the first update an empty one at a rate of 0, twice, so that the states are there."""
    if step == 1:
        kept, rate = [p.grad for p in model.parameters()], optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = 0.0
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = rate
        for p, gradient in zip(model.parameters(), kept, strict=True):
            p.grad = gradient


def by_depth(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": [p], "lr": 1e-2 * 0.5 ** (len(parameters) - i)} for i, p in enumerate(parameters)]
    return torch.optim.AdamW(groups, lr=1e-2)


def touching_zero(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """From next to nothing up and back to it, again and again."""
    return LambdaLR(optimizer, lambda step: math.sin(math.pi * step / 6) ** 2)


# shards


def shards(shape: tuple[int, ...] | None = None, factor: float | None = None, **how: Any) -> Any:
    """shape: of the mesh, whose first dimension replicates; None: all ranks shard. factor: by what sums are divided."""

    def wrap(model: nn.Module) -> nn.Module:
        names = ("replicate", "shard") if shape else ("shard",)
        mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)
        layers = [each for each in model.children() if list(each.parameters()) and not isinstance(each, Adapter)]
        adapters = {p for each in model.modules() if isinstance(each, Adapter) for p in each.parameters()}
        for each in (*layers, model):
            fully_shard(each, mesh=mesh, ignored_params=adapters, **how)
            if factor is not None:
                each.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
                each.set_gradient_divide_factor(factor)  # type: ignore[operator]
        return model

    return wrap


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(torch.tanh(self.down(x)))


def adapted() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), Adapter(), nn.Linear(16, CLASSES))


def reduces_adapters(model: nn.Module, *_: object) -> None:
    """The shards reduce themselves; the adapters, plain tensors on each rank, are reduced by the loop."""
    mean(p.grad for each in model.modules() if isinstance(each, Adapter) for p in each.parameters())


def classes(model: Any, step: int) -> Tensor:
    x, y = share(step)
    return F.cross_entropy(model(x), y)


def clipped_shards(model: nn.Module, *_: object) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def synchronised_last(model: Any, step: int) -> None:
    """Two micro-batches of which the last reduces."""
    x, y = share(step)
    for number, part in enumerate(torch.arange(len(x)).tensor_split(2)):
        model.set_requires_gradient_sync(number == 1)
        (F.cross_entropy(model(x[part]), y[part]) / 2).backward()


def sharded_token_sum(model: Any, step: int) -> Tensor:
    """The sum over the count of all ranks; the shards add it up over ranks."""
    return token_sum(model, step) / dist.get_world_size()


def echoed(model: Any, step: int) -> Tensor:
    return classes(model, step // 2)


def valued() -> nn.Module:
    return Speaker(values=True)


_BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
COURSES: dict[str, Course] = {
    "PPO with a value": Course(backward=by(by_policy("value")), model=valued),
    "GRPO, tokens alike": Course(backward=by(by_policy("token")), model=Speaker),
    "GRPO, sequences alike": Course(backward=by(by_policy("sequence")), model=Speaker),
    "DPO": Course(backward=by(preferred), model=Speaker),
    "masked token sums": Course(backward=by(token_sum), model=Speaker, optimizer=sgd),
    "masked token sums, an output without a loss": Course(
        backward=by(token_sum), model=valued, wrap=ddp_with(find_unused_parameters=True)
    ),
    "token-weighted windows": Course(backward=weighed_window, model=Speaker, optimizer=sgd),
    "focal loss": Course(backward=by(focal)),
    "class weights": Course(backward=by(class_weights)),
    "several labels": Course(backward=by(several_labels), optimizer=momentum),
    "distillation": Course(backward=by(distilled)),
    "soft labels": Course(backward=by(soft_labels), optimizer=sgd),
    "contrastive, gathered with gradients": Course(backward=by(contrastive), optimizer=sgd),
    "states made by an empty update": Course(before=makes_states_first),
    "rate by depth": Course(optimizer=by_depth),
    "rate that touches zero": Course(scheduled=touching_zero, optimizer=momentum, model=Normed),
    "data echoing": Course(backward=by(echoed)),
    "data echoing, rate that touches zero": Course(backward=by(echoed), scheduled=touching_zero, optimizer=sgd),
    "FSDP2, adapters reduced by hand": Course(
        backward=by(classes), model=adapted, wrap=shards(), before=reduces_adapters, optimizer=sgd
    ),
    "FSDP2, replicas of a shard": Course(backward=by(classes), wrap=shards((2, 1)), before=clipped_shards),
    "FSDP2, shards of a replica": Course(backward=by(classes), wrap=shards((1, 2)), optimizer=momentum),
    "FSDP2, bf16, windows": Course(
        backward=synchronised_last, wrap=shards(mp_policy=_BF16), before=clipped_shards, optimizer=sgd
    ),
    "FSDP2, sums over ranks": Course(
        backward=by(sharded_token_sum), model=Speaker, wrap=shards(factor=1.0), optimizer=sgd
    ),
    "FSDP2, PPO with a value": Course(
        backward=by(by_policy("value")), model=valued, wrap=shards(), before=clipped_shards
    ),
}
_LIGHT = ("masked token sums, an output without a loss", "data echoing", "FSDP2, PPO with a value")
KINDS = {**{f"aim: {name}": Kind(loop, weight="light" if name in _LIGHT else "many") for name, loop in COURSES.items()}}
