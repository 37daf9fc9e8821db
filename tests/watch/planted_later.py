"""The faults of randomness, optimizers, adapters, restored state, evaluation and hardware; and the table of all."""

# ruff: noqa: D102 - an override does what its class says
from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.watch import planted as p
from tests.watch.loop import ROWS, Loop, Model, plan, schedule
from tests.watch.planted import RANK, Planted


class Streams(Loop):
    """Right: masks differ between ranks, the shuffle is one."""

    def before_watch(self) -> None:
        self.shared = torch.Generator().manual_seed(7)

    def seed(self, step: int) -> int:
        """The seed of this rank's masks."""
        return 1000 * self.rank + step

    def before_update(self, step: int) -> None:
        torch.manual_seed(self.seed(step))
        self.draw(step)
        self.watch.rng("dropout", "differ")
        self.watch.rng("shuffle", "agree", self.shared.get_state())
        self.notes = [torch.rand(2).tolist(), torch.rand(2, generator=self.shared).tolist()]

    def draw(self, step: int) -> None:
        """Nothing is drawn between."""


class SameMasks(Streams):
    """One seed on all ranks."""

    def seed(self, step: int) -> int:
        return step


class DrawnOnOneRank(Streams):
    """One rank draws from the shared stream."""

    def draw(self, step: int) -> None:
        if step == 4 and self.rank == RANK:
            torch.rand(1, generator=self.shared)


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


class Evaluated(Loop):
    """Right: all rows once, twice the same."""

    def finish(self) -> None:
        for turn in range(2):
            ids = self.evaluation_ids()
            answers = self.predict(ids, turn)
            right = torch.tensor([sum(a == int(self.y[i]) for a, i in zip(answers, ids, strict=True)), len(ids)])
            dist.all_reduce(right)
            metrics = {"accuracy": self.accuracy(right)}
            self.notes = [*self.notes, ids, answers, metrics]
            self.watch.evaluated(ids, answers, self.y[torch.tensor(ids)], metrics, rows=ROWS)
        self.trace.states.append(self.state())

    def evaluation_ids(self) -> list[int]:
        """This rank's rows."""
        return list(range(self.rank, ROWS, self.world))

    @torch.no_grad()
    def predict(self, ids: Sequence[int], turn: int) -> list[int]:
        """The classes."""
        self.model.eval()
        found: list[int] = self.model(self.x[torch.tensor(list(ids))]).argmax(1).tolist()
        self.model.train()
        return found

    def accuracy(self, right: Tensor) -> float:
        """From the counts of all ranks."""
        return float(right[0]) / float(right[1])


class EvaluationPadded(Evaluated):
    """Filled up to the same number of rows on each rank."""

    def evaluation_ids(self) -> list[int]:
        mine = super().evaluation_ids()
        return mine + [0] * (-(-ROWS // self.world) - len(mine))


class IntegerMean(Evaluated):
    """A mean of integers, rounded down."""

    def accuracy(self, right: Tensor) -> float:
        return float(100 * right[0] // right[1]) / 100


class DropoutInEvaluation(Evaluated):
    """Noise that is on in evaluation."""

    def predict(self, ids: Sequence[int], turn: int) -> list[int]:
        found = super().predict(ids, turn)
        return [(a + turn * (i == 3)) % 3 for a, i in zip(found, ids, strict=True)]


class LocalLoss(Loop):
    """The loss of this rank is reported as the loss of all."""

    def reported(self, step: int, micro: int, loss_sum: float, rows: int) -> float | None:
        known = super().reported(step, micro, loss_sum, rows)
        if known is None:
            return None
        local = sum(float(str(n)) for n in self.notes) / rows * self.world
        self.notes = [*self.notes, "local"]
        return local


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
            self.model.get_parameter("lora_A.weight").data.view(torch.int32)[0, 0] ^= 1


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


TABLE: tuple[Planted, ...] = (
    Planted("F01", "initial weights differ", "replicas-agree", 0, p.RankSeed),
    Planted("F02", "wrapper bypassed, nothing reduced", "gradients-agree", 1, p.NoReduce),
    Planted("F04", "adapter outside the wrapper", "gradients-agree", 1, p.AdaptersLocal),
    Planted("F05", "layer added after wrapping", "gradients-agree", 1, p.AddedLate, clean=p.WithLate),
    Planted("F05", "layer injected while watched", "parameters-kept", 3, p.AddedAfterWatch),
    Planted("F08", "parameter replaced", "parameters-kept", 3, p.Replaced),
    Planted("F10", "only the last micro-batch reduced", "gradients-agree", 1, p.LastMicroOnly),
    Planted("F11", "buffers not synchronised", "buffers-agree", 1, p.BuffersLocal),
    Planted("F13", "moment of one rank corrupt", "optimizers-agree", 4, p.MomentCorrupt),
    Planted("F14", "rank-local learning rate", "hyperparameters-agree", 5, p.LocalRate),
    Planted("F16", "sum instead of mean", "gradient-law", 1, p.SumNotMean, ("batch", "reference")),
    Planted("F17", "mean of ranks' means", "gradient-law", 5, p.MeanOfMeans, ("batch", "reference")),
    Planted("F19", "averaged twice", "gradient-law", 1, p.DoubleAverage, ("batch", "reference")),
    Planted("F20", "loss times world size", "gradient-law", 1, p.LossTimesWorld, ("batch", "reference")),
    Planted("F22", "class weights normalised locally", "gradient-law", 1, p.ClassWeightsLocal, ("batch", "reference"),
            p.ClassWeights),
    Planted("F23", "reduction of a temporary", "gradients-agree", 1, p.ReducedTemporary),
    Planted("F25", "collectives in another order", "collectives-agree", 1, p.OtherOrder),
    Planted("F26", "stale gradient on one rank", "gradient-law", 2, p.StaleGradient, ("batch", "reference")),
    Planted("F28", "mean of micro-batches' means", "gradient-law", 5, p.MeanOfMicroMeans, ("batch", "reference")),
    Planted("F29", "accumulation divided twice", "gradient-law", 1, p.DividedTwice, ("batch", "reference")),
    Planted("F31", "zero_grad missing", "gradient-fresh", 2, p.NoZero),
    Planted("F32", "zero_grad for each micro-batch", "samples-once", 1, p.ZeroPerMicro, ("batch", "plan")),
    Planted("F34", "partial window dropped", "samples-once", 5, p.WindowDropped, ("batch", "plan")),
    Planted("F35", "partial window with the full divisor", "gradient-law", 5, p.WindowFullDivisor,
            ("batch", "reference")),
    Planted("F37", "clip norm summed over replicas", "clip-once", 2, p.ClipDoubleNorm, ("clip", "reduced"),
            p.ClipByHand),
    Planted("F38", "clip before unscale", "clip-once", 1, p.ClipScaled, ("clip", "reduced")),
    Planted("F40", "overflow zeroed by clip", "finite", 3, p.Overflow),
    Planted("F41", "NaN hidden by nan_to_num", "finite", 3, p.NanHidden),
    Planted("F43", "loss scale of one rank", "scaler-agrees", 4, p.ScaleLocal, ("scaler",), p.Scaled),
    Planted("F44", "16-bit adapter", "precision-sufficient", 0, p.LowPrecision),
    Planted("F44", "updates rounded away", "update-applied", 2, p.LowPrecision),
    Planted("F46", "sampler pads", "samples-once", 5, p.Padded, ("batch",)),
    Planted("F47", "drop_last", "samples-once", 5, p.DropLast, ("batch", "plan")),
    Planted("F49", "rank-local order of data", "content-planned", 1, p.LocalOrder, ("batch", "content", "contents")),
    Planted("F50", "data not sharded", "samples-once", 1, p.NotSharded, ("batch",)),
    Planted("F52", "label map of one rank", "content-planned", 1, p.LabelMap, ("batch", "content", "contents")),
    Planted("F53", "labels shifted", "content-planned", 1, p.ShiftedLabels, ("batch", "content", "contents")),
    Planted("F55", "same dropout masks", "randomness-declared", 1, SameMasks, ("rng",), Streams),
    Planted("F56", "same augmentation", "randomness-declared", 1, SameMasks, ("rng",), Streams),
    Planted("F58", "dropout in evaluation", "evaluation-once", 6, DropoutInEvaluation, ("evaluated",), Evaluated),
    Planted("F59", "shared stream drawn on one rank", "randomness-declared", 4, DrawnOnOneRank, ("rng",), Streams),
    Planted("F61", "scheduler for each micro-batch", "learning-rate-planned", 2, RatePerMicro, ("schedule",)),
    Planted("F62", "optimizer holds stale parameters", "parameters-kept", 0, StaleOptimizer),
    Planted("F64", "head frozen", "parameters-kept", 0, HeadFrozen, ("trainable",)),
    Planted("F65", "weight decay on biases", "groups-planned", 1, DecayOnBias, ("groups",)),
    Planted("F67", "adapter gets no gradient", "gradient-present", 1, Detached),
    Planted("F68", "base trained", "parameters-kept", 0, BaseTrained, ("trainable",)),
    Planted("F70", "adapter frozen", "parameters-kept", 0, AdapterFrozen, ("trainable",)),
    Planted("F71", "tied weights untied", "parameters-kept", 0, Untied, ("tied",), Tied),
    Planted("F73", "head not restored", "checkpoint-whole", 4, HeadLost, ("saved", "loaded"), Resumed),
    Planted("F74", "nothing loaded", "checkpoint-whole", 4, PrefixMismatch, ("saved", "loaded"), Resumed),
    Planted("F76", "moments permuted", "checkpoint-whole", 4, MomentsPermuted, ("saved", "loaded"), Resumed),
    Planted("F77", "schedule restarts", "checkpoint-whole", 4, RateRestarts, ("saved", "loaded"), Resumed),
    Planted("F79", "batch skipped on resume", "samples-once", 4, BatchSkipped, ("batch", "plan")),
    Planted("F80", "random state not restored", "checkpoint-whole", 4, RandomLost, ("saved", "loaded"), Resumed),
    Planted("F83", "only one rank reloads", "checkpoint-whole", 4, OneRankReloads, ("saved", "loaded"), Resumed),
    Planted("F85", "evaluation pads", "evaluation-once", 6, EvaluationPadded, ("evaluated",), Evaluated),
    Planted("F86", "metric from integers", "evaluation-once", 6, IntegerMean, ("evaluated",), Evaluated),
    Planted("F88", "loss of one rank reported", "loss-reported", 1, LocalLoss, ("loss",)),
    Planted("F89", "bit flip in a weight", "replicas-agree", 4, WeightFlipped),
    Planted("F89", "bit flip below torch", "replicas-agree", 4, WeightFlippedUnseen),
    Planted("F91", "corruption after the reduction", "gradients-agree", 4, GradientCorrupt),
    Planted("F92", "one rank rounds otherwise", "replicas-agree", 4, OtherRounding),
)  # fmt: skip
"""Every fault that is planted; `by` is the step of the catalogue at which it shows at the latest."""
