"""The faults of optimizers, adapters, restored state and hardware."""

# ruff: noqa: D102 - an override does what its class says
from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.watch import planted as p
from tests.watch.loop import Loop, Model, plan, schedule
from tests.watch.planted import RANK


class RatePerMicro(Loop):
    """The scheduler is stepped with every micro-batch."""

    def set_rate(self, step: int) -> None:
        for group in self.opt.param_groups:
            group["lr"] = schedule(self.micro_batches * (step - 1) + 1)


class StaleOptimizer(Loop):
    """A parameter was re-created after the optimizer was made."""

    def before_watch(self) -> None:
        self.model.get_submodule("head").weight = nn.Parameter(self.model.get_parameter("head.weight").clone())


class HeadFrozen(Loop):
    """The head is not trained."""

    def build(self) -> nn.Module:
        model = super().build()
        model.get_submodule("head").requires_grad_(False)
        return model


class DecayOnBias(Loop):
    """Weight decay on everything."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        made = super().optimizer(model)
        made.param_groups[1]["weight_decay"] = 0.1
        return made


class DetachedModel(Model):
    """The adapter gets no gradient."""

    def adapter(self, x: Tensor) -> Tensor:
        return super().adapter(x).detach()


class Detached(Loop):
    """The adapter is detached from the loss."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return DetachedModel()


class BaseTrained(Loop):
    """The base is trained."""

    def build(self) -> nn.Module:
        return super().build().requires_grad_(True)


class AdapterFrozen(Loop):
    """The adapter is not trained."""

    def build(self) -> nn.Module:
        model = super().build()
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.requires_grad_(False)
        return model


class Tied(p.WithLate):
    """Right: two layers share their weight."""

    def build(self) -> nn.Module:
        model = super().build()
        model.get_submodule("late").weight = model.get_parameter("head.weight")
        return model

    def options(self) -> dict[str, Any]:
        return {**super().options(), "tied": [("late.weight", "head.weight")]}


class Untied(Tied):
    """Wrapping copied the shared weight."""

    def build(self) -> nn.Module:
        model = super().build()
        model.get_submodule("late").weight = nn.Parameter(model.get_parameter("head.weight").detach().clone())
        return model


class Resumed(Loop):
    """Right: after step 3 all is saved, lost, and loaded again."""

    resume_after = 3

    def after_update(self, step: int) -> None:
        if step != self.resume_after:
            return
        path = self.path()
        self.watch.saved(path)
        weights = {n: t.clone() for n, t in self.model.state_dict().items()}
        groups = [dict(group) for group in self.opt.param_groups]
        states = [{k: v.clone() for k, v in self.opt.state[q].items()} for g in groups for q in g["params"]]
        random = torch.get_rng_state()
        self.lose()
        self.load_weights(weights)
        self.broadcast_buffers()
        for state, q in zip(self.order(states), (q for g in groups for q in g["params"]), strict=True):
            self.opt.state[q] = state
        self.load_groups(groups)
        self.load_random(random)
        if "loaded" in self.lines:
            self.watch.loaded(path)

    def path(self) -> Path:
        """A name that all ranks have."""
        name = [tempfile.mkdtemp() if self.rank == 0 else ""]
        dist.broadcast_object_list(name, 0)
        return Path(str(name[0])) / "checkpoint.pt"

    def lose(self) -> None:
        """A new process: another random state, fresh weights, no moments."""
        torch.manual_seed(99)
        fresh = Model().state_dict()
        self.model.load_state_dict(fresh)
        self.opt.state.clear()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """All of them."""
        self.model.load_state_dict(weights)

    def order(self, states: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """As saved."""
        return states

    def load_groups(self, groups: list[dict[str, Any]]) -> None:
        """The learning rate among them."""
        for group, saved in zip(self.opt.param_groups, groups, strict=True):
            group["lr"] = saved["lr"]

    def load_random(self, state: Tensor) -> None:
        """As saved."""
        torch.set_rng_state(state)
        self.notes = [state.sum().item()]


class HeadLost(Resumed):
    """Only the adapter was saved."""

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.model.load_state_dict({n: t for n, t in weights.items() if "head" not in n}, strict=False)


class PrefixMismatch(Resumed):
    """The names carry a prefix, and nothing is loaded."""

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.model.load_state_dict({f"module.{n}": t for n, t in weights.items()}, strict=False)


class MomentsPermuted(Resumed):
    """The moments of two tensors of one shape are exchanged."""

    def order(self, states: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        return [states[1], states[0], *states[2:]]


class RateRestarts(Resumed):
    """The schedule begins anew."""

    def load_groups(self, groups: list[dict[str, Any]]) -> None:
        for group in self.opt.param_groups:
            group["lr"] = schedule(1)

    def set_rate(self, step: int) -> None:
        for group in self.opt.param_groups:
            group["lr"] = schedule(step if step <= self.resume_after else step - self.resume_after)


class OneUpdateFewer(Loop):
    """The last update is not made."""

    def step(self, step: int) -> None:
        if step < self.steps:
            super().step(step)


class OneUpdateMore(Loop):
    """One update is made after the last."""

    def finish(self) -> None:
        self.step(self.steps + 1)
        self.trace.states.append(self.state())


class BatchSkipped(Loop):
    """One batch too many is skipped on resume."""

    def global_batch(self, step: int) -> list[int]:
        return plan(step if step <= 3 else step + 1)


class RandomLost(Resumed):
    """The random state is not restored."""

    def load_random(self, state: Tensor) -> None:
        self.notes = [torch.get_rng_state().sum().item()]


class OneRankReloads(Resumed):
    """Only the first rank loads."""

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        if self.rank == 0:
            super().load_weights(weights)


class WeightFlipped(Loop):
    """One copy of a weight changes."""

    def before_update(self, step: int) -> None:
        if step == 4 and self.rank == RANK:
            with torch.no_grad():
                self.model.get_parameter("lora_A.weight")[0, 0] *= 1 + 2**-10


class WeightFlippedUnseen(Loop):
    """The same below torch, as hardware does it: no version counter moves."""

    def before_update(self, step: int) -> None:
        if step == 4 and self.rank == RANK:
            self.model.get_parameter("lora_A.weight").data.view(torch.int32)[0, 0] ^= 1 << 12


class GradientCorrupt(Loop):
    """One copy of the reduced gradient changes."""

    def clip(self, step: int) -> None:
        if step == 4 and self.rank == RANK:
            self.model.get_parameter("head.weight").grad[0, 0] += 0.5  # type: ignore[index]
        super().clip(step)


class OtherRounding(Loop):
    """One rank rounds otherwise."""

    def before_update(self, step: int) -> None:
        if step == 4 and self.rank == RANK:
            with torch.no_grad():
                self.model.get_parameter("head.weight").mul_(1 + 2**-23)
