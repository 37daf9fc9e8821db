"""What goes wrong inside one rank. Each is a plant: it patches the trainer in the rank that its option `rank` names.

Those with an option `step` strike in that update, once; the others before the first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from andon_falsify.nemesis.planting import Planting

if TYPE_CHECKING:
    import torch

    from andon.step.replica import Replica


def _before_step(plan: Planting, fault: Callable[[Replica], str | None]) -> None:
    """Call `fault` with the rank's replica when the update of the option `step` begins; its result is the proof."""
    from andon.step.step import TrainingStep

    call = TrainingStep.__call__

    def step(self: TrainingStep, batch: Any, *args: Any, **named: Any) -> Any:
        if plan.here and batch.step == plan.options["step"]:
            proof = fault(self._replicas[0])
            if proof is not None:
                plan.struck(batch.step - 1, proof)
        return call(self, batch, *args, **named)

    TrainingStep.__call__ = step  # type: ignore[method-assign]


def raises(plan: Planting) -> None:
    """The rank raises an error that nobody foresaw."""

    def fail(replica: Replica) -> None:
        plan.struck(plan.options["step"] - 1, f"rank {plan.options['rank']} raises")
        raise RuntimeError("planted: an error of one rank")

    _before_step(plan, fail)


def sleeps(plan: Planting) -> None:
    """The rank takes `seconds` longer for one update."""

    def sleep(replica: Replica) -> None:
        plan.struck(plan.options["step"] - 1, f"rank {plan.options['rank']} sleeps {plan.options['seconds']} s")
        time.sleep(plan.options["seconds"])

    _before_step(plan, sleep)


def never_joins(plan: Planting) -> None:
    """The rank is started, and never connects to the others."""
    if plan.here:
        plan.struck(0, f"rank {plan.options['rank']} does not connect")
        time.sleep(3600.0)


def shows_weights(plan: Planting) -> None:
    """No fault: the rank writes down where its weights lie in memory, and how many bytes they are."""

    def show(replica: Replica) -> None:
        weights = replica.parameters.weights
        part = plan.proofs.with_name("weights.part")
        part.write_text(f"{os.getpid()} {weights.data_ptr()} {weights.numel() * 4}")
        part.replace(where_weights_lie(plan.proofs.parent))

    _before_step(plan, show)


def where_weights_lie(scratch: Path) -> Path:
    """What `shows_weights` writes: process id, address, bytes."""
    return scratch / "weights"


def loss_is_nan(plan: Planting) -> None:
    """The loss of one micro-batch is NaN."""
    from andon.model.task import ClassificationTask

    due: list[bool] = []
    _before_step(plan, lambda replica: due.append(True))
    inner = ClassificationTask.loss_sum

    def loss_sum(self: Any, model: Any, batch: Any) -> Any:
        found = inner(self, model, batch)
        if not due:
            return found
        due.clear()
        plan.struck(plan.options["step"] - 1, f"a loss on rank {plan.options['rank']} is NaN")
        return replace(found, loss_sum=found.loss_sum * float("nan"))

    ClassificationTask.loss_sum = loss_sum  # type: ignore[method-assign]


def flips(plan: Planting) -> None:
    """A bit of one number changes: `what` is weights, moments, gradient (as reduced) or own (before the reduction)."""
    from andon.step.replica import Replica

    due: list[bool] = []
    _before_step(plan, lambda replica: due.append(True))
    what = plan.options["what"]
    method = {"weights": "apply", "moments": "apply", "gradient": "set_gradient", "own": "_leaf"}[what]
    inner = getattr(Replica, method)

    def changed(self: Replica, *args: Any, **named: Any) -> Any:
        result = inner(self, *args, **named)
        if due:
            due.clear()
            target = {
                "weights": self.parameters.weights.data,
                "moments": self.optimizer_state().get("exp_avg"),
                "gradient": self.parameters.gradient,
                "own": self.parameters.gradient,
            }[what]
            assert target is not None
            plan.struck(plan.options["step"] - 1, f"rank {plan.options['rank']}, {what}: {_flipped(target)}")
        return result

    setattr(Replica, method, changed)


def _flipped(tensor: torch.Tensor) -> str:
    """Turn the sign of the largest number of a flat fp32 tensor by its highest bit; what was done."""
    import torch

    place = int(tensor.abs().argmax())
    before = float(tensor[place])
    tensor.view(torch.int32)[place] ^= -(1 << 31)
    return f"[{place}] was {before:.3e}, is {float(tensor[place]):.3e}"


def skips_a_step(plan: Planting) -> None:
    """The rank passes over one update, and is ahead of the others from then on."""
    from andon.step.plan import BatchPlan

    inner = BatchPlan.batch

    def batch(self: BatchPlan, step: int) -> Any:
        at = plan.options["step"]
        if not plan.here or step < at or step == self.total_steps:
            return inner(self, step)
        if step == at:
            plan.struck(at - 1, f"rank {plan.options['rank']} goes from update {at - 1} to {at + 1}")
        return inner(self, step + 1)

    BatchPlan.batch = batch  # type: ignore[method-assign]


def other_rate(plan: Planting) -> None:
    """The rank's optimizer gets twice the rate of its schedule in one update."""
    from andon.step.replica import Replica

    due: list[bool] = []
    _before_step(plan, lambda replica: due.append(True))
    inner = Replica.set_rate

    def set_rate(self: Replica, rate: float) -> None:
        if due:
            due.clear()
            plan.struck(plan.options["step"] - 1, f"rank {plan.options['rank']} takes {2 * rate:.2e}, not {rate:.2e}")
            rate *= 2
        inner(self, rate)

    Replica.set_rate = set_rate  # type: ignore[method-assign]


def other_config(plan: Planting) -> None:
    """The rank's configuration has another `value` for `key` ("optimizer.lr")."""
    import andon.training.run

    inner = andon.training.run.train

    def train(config: Any, *args: Any, **named: Any) -> Any:
        if plan.here:
            section, _, key = str(plan.options["key"]).rpartition(".")
            value = plan.options["value"]
            part = getattr(config, section).model_copy(update={key: value}) if section else value
            config = config.model_copy(update={section or key: part})
            plan.struck(0, f"rank {plan.options['rank']} has {plan.options['key']}={value}")
        return inner(config, *args, **named)

    andon.training.run.train = train


def other_order(plan: Planting) -> None:
    """The rank takes the rows of each batch in the reverse order."""
    from andon.step.plan import BatchPlan

    inner = BatchPlan.batch

    def batch(self: BatchPlan, step: int) -> Any:
        found = inner(self, step)
        if not plan.here:
            return found
        if step == 1:
            plan.struck(0, f"rank {plan.options['rank']} takes {found.ids[::-1]}, not {found.ids}")
        return replace(found, ids=found.ids[::-1])

    BatchPlan.batch = batch  # type: ignore[method-assign]


def other_base(plan: Planting) -> None:
    """One frozen weight of the rank is larger by 1."""
    from andon.training import session

    inner = vars(session)["build_base"]

    def build(spec: Any) -> Any:
        model = inner(spec)
        if plan.here:
            name, tensor = next(iter(model.named_parameters()))
            tensor.data.view(-1)[0] += 1.0
            plan.struck(0, f"rank {plan.options['rank']} has another {name}")
        return model

    vars(session)["build_base"] = build


def other_tokens(plan: Planting) -> None:
    """The rank's tokenizer leaves out the last token of every text."""
    from andon.data.tokens import HuggingFaceTokenizer

    inner = HuggingFaceTokenizer.encode

    def encode(self: Any, texts: Any, max_length: int) -> list[list[int]]:
        plan.struck(0, f"rank {plan.options['rank']} leaves out the last token of {len(texts)} texts")
        return [ids[:-1] or ids for ids in inner(self, texts, max_length)]

    if plan.here:
        HuggingFaceTokenizer.encode = encode  # type: ignore[method-assign]


def other_library(plan: Planting) -> None:
    """The rank has another version of a library."""
    from andon.training import session

    inner = vars(session)["environment"]

    def environment(*args: Any) -> dict[str, Any]:
        found = dict(inner(*args))
        plan.struck(0, f"rank {plan.options['rank']} has torch 2.0.0, not {found['packages']['torch']}")
        return found | {"packages": found["packages"] | {"torch": "2.0.0"}}

    if plan.here:
        vars(session)["environment"] = environment
