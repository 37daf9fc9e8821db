"""Changes inside the trainer's own processes: faults of one rank, and protections that are switched off.

Each plant is called once in each process, before all else. A fault changes the rank of its option `rank`; with an
option `step` it strikes once, in that update. A control switches a protection off to show that the judge notices. It
records that it acts, because a control that the trainer never reached proves nothing.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from .planting import Planting

if TYPE_CHECKING:
    from andon.step.replica import Replica
    from andon.step.step import TrainingStep

PlantFunction = Callable[[Planting], None]
TARGETS: set[str] = set()  # of `replaces`
WEIGHTS = "weights"
"""The file in `scratch` that `shows_weights` writes."""


def _replace(target: str, new: Callable[..., Any]) -> None:
    """Replace `target` ("module:owner.name") by `new`, which also gets the former. `AttributeError`: it was renamed."""
    owner, _, name = target.replace(":", ".").rpartition(".")
    former = resolve_name(target)
    setattr(resolve_name(owner), name, lambda *args, **named: new(former, *args, **named))


def replaces(
    target: str, when: Literal["always", "here", "in step"] = "always"
) -> Callable[[Callable[..., Any]], PlantFunction]:
    """Make a plant that replaces `target`. The decorated function gets the `Planting`, the former, and the arguments.

    when: `here` limits it to the rank of the option `rank`, `in step` also to the first call in the update `step`;
    `always` records that the trainer reached it.
    """

    TARGETS.add(target)

    def plant_of(new: Callable[..., Any]) -> PlantFunction:
        def plant(plan: Planting) -> None:
            due = _once_in_step(plan) if when == "in step" else lambda: True

            def instead(former: Callable[..., Any], *args: Any, **named: Any) -> Any:
                if when == "always":
                    plan.acted()
                return new(plan, former, *args, **named) if due() else former(*args, **named)

            if when == "always" or plan.here:
                _replace(target, instead)

        return plant

    return plant_of


def before_step(fault: Callable[[Planting, TrainingStep], object]) -> PlantFunction:
    """Make a plant that calls `fault` before the update of the option `step`, on the rank of the option `rank`."""

    @replaces("andon.step.step:TrainingStep.__call__", "here")
    def plant(plan: Planting, former: Any, self: TrainingStep, batch: Any, *args: Any, **named: Any) -> Any:
        if batch.step == plan.options["step"]:
            fault(plan, self)
        return former(self, batch, *args, **named)

    return plant


def _once_in_step(plan: Planting) -> Callable[[], bool]:
    """Returns a function that is true once after the update of the option `step` has begun."""
    due: list[bool] = []
    before_step(lambda _plan, _step: due.append(True))(plan)
    return lambda: bool(due) and due.pop()


def _strikes(plan: Planting, proof: str) -> None:
    plan.struck(plan.options.get("step", 1) - 1, f"rank {plan.options['rank']}{proof}")


# Faults of one rank.


@before_step
def raises(plan: Planting, _step: TrainingStep) -> None:
    _strikes(plan, " raises")
    raise RuntimeError("planted: an error of one rank")


@before_step
def sleeps(plan: Planting, _step: TrainingStep) -> None:
    _strikes(plan, f" sleeps {plan.options['seconds']} s")
    time.sleep(plan.options["seconds"])


def never_joins(plan: Planting) -> None:
    if plan.here:
        _strikes(plan, " does not connect")
        time.sleep(3600.0)


@before_step
def shows_weights(plan: Planting, step: TrainingStep) -> None:
    """No fault: the rank writes its process id, and the address and size in bytes of its weights."""
    weights = step._replicas[0].parameters.weights
    part = plan.scratch / "weights.part"
    part.write_text(f"{os.getpid()} {weights.data_ptr()} {weights.numel() * 4}")
    part.replace(plan.scratch / WEIGHTS)


@replaces("andon.tasks.text:ClassificationTask.loss_sum", "in step")
def loss_is_nan(plan: Planting, former: Any, *args: Any) -> Any:
    found = former(*args)
    _strikes(plan, ": a loss is NaN")
    return replace(found, loss_sum=found.loss_sum * float("nan"))


_FLIPPED_AFTER = {"weights": "apply", "moments": "apply", "gradient": "set_gradient", "own": "_leaf"}


def flips(plan: Planting) -> None:
    """The largest number of `what` changes its sign: weights, moments, gradient (reduced) or own (not yet reduced)."""
    what = plan.options["what"]

    @replaces(f"andon.step.replica:Replica.{_FLIPPED_AFTER[what]}", "in step")
    def flip(plan: Planting, former: Any, self: Replica, *args: Any, **named: Any) -> Any:
        result = former(self, *args, **named)
        targets = {"weights": self.parameters.weights.data, "moments": self.optimizer_state().get("exp_avg")}
        tensor = targets.get(what, self.parameters.gradient)
        assert tensor is not None
        place = int(tensor.abs().argmax())
        before = float(tensor[place])
        tensor[place].neg_()
        _strikes(plan, f", {what}: [{place}] was {before:.3e}, is {float(tensor[place]):.3e}")
        return result

    flip(plan)


@replaces("andon.step.plan:BatchPlan.batch", "here")
def skips_a_step(plan: Planting, former: Any, self: Any, step: int) -> Any:
    """The rank skips one update, and is ahead of the others from then on."""
    at = plan.options["step"]
    if step < at or step == self.total_steps:
        return former(self, step)
    if step == at:
        _strikes(plan, f" goes from update {at - 1} to {at + 1}")
    return former(self, step + 1)


@replaces("andon.step.replica:Replica.set_rate", "in step")
def other_rate(plan: Planting, former: Any, self: Replica, rate: float) -> None:
    _strikes(plan, f" takes {2 * rate:.2e}, not {rate:.2e}")
    former(self, 2 * rate)


@replaces("andon.training.run:train", "here")
def other_config(plan: Planting, former: Any, config: Any, *args: Any, **named: Any) -> Any:
    """The rank's configuration has another `value` for `key` ("optimizer.lr")."""
    section, _, key = str(plan.options["key"]).rpartition(".")
    value = plan.options["value"]
    part = getattr(config, section).model_copy(update={key: value}) if section else value
    _strikes(plan, f" has {plan.options['key']}={value}")
    return former(config.model_copy(update={section or key: part}), *args, **named)


@replaces("andon.step.plan:BatchPlan.batch", "here")
def other_order(plan: Planting, former: Any, self: Any, step: int) -> Any:
    found = former(self, step)
    if step == 1:
        _strikes(plan, f" takes {found.ids[::-1]}, not {found.ids}")
    return replace(found, ids=found.ids[::-1])


@replaces("andon.training.build:build_base", "here")
def other_base(plan: Planting, former: Any, *args: Any) -> Any:
    model = former(*args)
    name, tensor = next(iter(model.named_parameters()))
    tensor.data.view(-1)[0] += 1.0
    _strikes(plan, f" has another {name}")
    return model


@replaces("andon.training.material:encoded_texts", "here")
def other_tokens(plan: Planting, former: Any, *args: Any) -> Any:
    found = former(*args)
    _strikes(plan, f" leaves out the last token of {len(found.tokens)} texts")
    return replace(found, tokens=[ids[:-1] or ids for ids in map(list, found.tokens)])


@replaces("andon.training.run:environment", "here")
def other_library(plan: Planting, former: Any, *args: Any, **named: Any) -> dict[str, Any]:
    found = dict(former(*args, **named))
    _strikes(plan, f" has torch 2.0.0, not {found['packages']['torch']}")
    return found | {"packages": found["packages"] | {"torch": "2.0.0"}}


@replaces("andon.run.checkpoint:_put_in_place")
def dies_while_saving(plan: Planting, former: Any, temporary: Path, final: Path) -> None:
    """Rank 0 is killed as it renames the checkpoint of the option `step` or a later one."""
    step = int(final.name.removeprefix("step-"))
    if step >= plan.options["step"]:
        plan.struck(step - 1, f"SIGKILL to rank 0 before {temporary.name} became {final.name}")
        os.kill(os.getpid(), signal.SIGKILL)
    former(temporary, final)


# Protections that are off.


@replaces("andon.step.replica:Replica.restore")
def moments_lost(_plan: Planting, former: Any, self: Any, weights: Any, state: Any, updates: int) -> None:
    """A resume restores the weights and the position in the data, but sets the moments to zero."""
    import torch

    kept = {name: value if name == "step" else torch.zeros_like(value) for name, value in state.items()}
    former(self, weights, kept, updates)


@replaces("andon.step.reduce:finish")
def sums_by_rank(_plan: Planting, _former: Any, _node: Any, roots: Any, add: Any) -> Any:
    """Gradients are added rank by rank, so the order depends on the number of ranks."""
    return functools.reduce(add, roots.values())


def no_orphan_guard(plan: Planting) -> None:
    """Ranks survive their launcher."""
    if "RANK" in os.environ:
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG, which may have been requested already
    _replace("andon.launch.context:_end_now", lambda _: plan.acted())
    _replace("andon.launch.context:_ask_for_death_signal", lambda _: None)


@replaces("andon.training.trainer:Trainer._advance")
def slow_steps(_plan: Planting, former: Any, self: Any, batch: Any) -> Any:
    """Every update takes half a second longer, so that an orphan still runs when it is looked for."""
    time.sleep(0.5)
    return former(self, batch)


def deaf_ranks(plan: Planting) -> None:
    """Signals end ranks, as they end any process without handlers."""
    if "RANK" in os.environ:
        for signum in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, signal.SIG_DFL)
        plan.acted()


def silent(plan: Planting) -> None:
    """The function that the option `target` names does nothing."""
    _replace(plan.options["target"], lambda *_args, **_named: plan.acted())


@replaces("andon.run.checkpoint:_read")
def unverified(_plan: Planting, _former: Any, folder: Path, use: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A checkpoint is loaded without a comparison with its manifest."""
    from safetensors.torch import load

    from andon.run import checkpoint
    from andon_contracts.digest import hex64, tree_digest

    listed = json.loads((folder / checkpoint.MANIFEST).read_bytes())
    tensors = load((folder / checkpoint.TENSORS).read_bytes())
    del listed["sha256"]
    step = int(folder.name.partition(".")[0].removeprefix("step-"))
    manifest = checkpoint.Manifest.from_json(listed | {"digest": hex64(tree_digest(tensors)), "step": step})
    state = json.loads((folder / checkpoint.STATE).read_bytes())
    return manifest, state, {name: use(tensor) for name, tensor in tensors.items()}


def forgiven(plan: Planting) -> None:
    """Errors of the disk are ignored, for a checkpoint, a line, a result, an fsync."""
    from andon.console.messages import InputError

    def quiet(former: Any, *args: Any, **named: Any) -> Any:
        try:
            return former(*args, **named)
        except (OSError, InputError):
            plan.acted()

    for target in (
        "andon.training.trainer:FolderJournal.checkpoint",
        "andon.training.trainer:MetricsWriter.write",
        "andon.training.trainer:write_confusion",
        "andon.run.ledger:LedgerWriter.append",
        "andon.run.ledger:LedgerWriter.sync",
        "andon.training.run:write_adapter",
        "andon.training.run:write_summary",
        "os:fsync",
    ):
        _replace(target, quiet)


def saves_in_place(plan: Planting) -> None:
    """Checkpoints are written under their final name, the manifest first. Rank 0 is killed within the next file."""

    def dying(former: Any, path: Path, data: bytes | Iterator[bytes]) -> None:
        step = int(path.parent.name.removeprefix("step-"))
        if step >= plan.options["step"]:
            former(path, data[: len(data) // 2] if isinstance(data, bytes) else itertools.islice(data, 1))
            plan.struck(step - 1, f"SIGKILL to rank 0 within {path.parent.name}/{path.name}")
            os.kill(os.getpid(), signal.SIGKILL)
        former(path, data)

    _replace("andon.run.checkpoint:temporary_beside", lambda _, path: path)
    _replace("andon.run.checkpoint:_put_in_place", lambda _, _temporary, _final: None)
    _replace("andon.run.checkpoint:write_new", dying)
