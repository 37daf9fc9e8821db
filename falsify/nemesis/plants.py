"""What is planted in the trainer's own processes: what goes wrong inside one rank, and protections that are off.

Each is called once in each process before anything of it runs. A fault patches the rank that its option `rank` names;
with an option `step` it strikes in that update, once. What switches a protection off is for controls, so that the judge
can be seen to notice; it notes when it acts, since a control in which the trainer never came by it proves nothing.
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
from typing import TYPE_CHECKING, Any, TypeVar

from .planting import Planting

if TYPE_CHECKING:
    import torch

    from andon.step.replica import Replica

New = TypeVar("New", bound=Callable[..., Any])


def replaces(owner: object, name: str) -> Callable[[New], New]:
    """What is decorated takes the place of `owner.name`, and gets what was there before all other arguments.

    Raises `AttributeError` where nothing was: what is patched was renamed.
    """
    former = getattr(owner, name)

    def put(new: New) -> New:
        setattr(owner, name, lambda *args, **named: new(former, *args, **named))
        return new

    return put


def _before_step(plan: Planting, fault: Callable[[Replica], object]) -> None:
    """Call `fault` with the rank's replica when the update of the option `step` begins."""
    from andon.step.step import TrainingStep

    @replaces(TrainingStep, "__call__")
    def step(former: Any, self: TrainingStep, batch: Any, *args: Any, **named: Any) -> Any:
        if plan.here and batch.step == plan.options["step"]:
            fault(self._replicas[0])
        return former(self, batch, *args, **named)


class _Due:
    """Whether the update of the option `step` is under way and the fault has not happened; true once."""

    def __init__(self, plan: Planting) -> None:
        self._plan, self._due = plan, False
        _before_step(plan, lambda replica: setattr(self, "_due", True))

    def now(self) -> bool:
        """Take it: it is due no more."""
        due, self._due = self._due, False
        return due

    def struck(self, proof: str) -> None:
        """Note that it happens now, on this rank."""
        self._plan.struck(self._plan.options["step"] - 1, f"rank {self._plan.options['rank']}{proof}")


# what goes wrong inside a rank


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
    from andon.tasks.text import ClassificationTask

    due = _Due(plan)

    @replaces(ClassificationTask, "loss_sum")
    def loss_sum(former: Any, *args: Any) -> Any:
        found = former(*args)
        if not due.now():
            return found
        due.struck(": a loss is NaN")
        return replace(found, loss_sum=found.loss_sum * float("nan"))


def flips(plan: Planting) -> None:
    """A bit of one number changes: `what` is weights, moments, gradient (as reduced) or own (before the reduction)."""
    from andon.step.replica import Replica

    due, what = _Due(plan), plan.options["what"]
    method = {"weights": "apply", "moments": "apply", "gradient": "set_gradient", "own": "_leaf"}[what]

    @replaces(Replica, method)
    def changed(former: Any, self: Replica, *args: Any, **named: Any) -> Any:
        result = former(self, *args, **named)
        if due.now():
            target = {
                "weights": self.parameters.weights.data,
                "moments": self.optimizer_state().get("exp_avg"),
                "gradient": self.parameters.gradient,
                "own": self.parameters.gradient,
            }[what]
            assert target is not None
            due.struck(f", {what}: {_flipped(target)}")
        return result


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

    @replaces(BatchPlan, "batch")
    def batch(former: Any, self: BatchPlan, step: int) -> Any:
        at = plan.options["step"]
        if not plan.here or step < at or step == self.total_steps:
            return former(self, step)
        if step == at:
            plan.struck(at - 1, f"rank {plan.options['rank']} goes from update {at - 1} to {at + 1}")
        return former(self, step + 1)


def other_rate(plan: Planting) -> None:
    """The rank's optimizer gets twice the rate of its schedule in one update."""
    from andon.step.replica import Replica

    due = _Due(plan)

    @replaces(Replica, "set_rate")
    def set_rate(former: Any, self: Replica, rate: float) -> None:
        if due.now():
            due.struck(f" takes {2 * rate:.2e}, not {rate:.2e}")
            rate *= 2
        former(self, rate)


def other_config(plan: Planting) -> None:
    """The rank's configuration has another `value` for `key` ("optimizer.lr")."""
    import andon.training.run

    @replaces(andon.training.run, "train")
    def train(former: Any, config: Any, *args: Any, **named: Any) -> Any:
        if plan.here:
            section, _, key = str(plan.options["key"]).rpartition(".")
            value = plan.options["value"]
            part = getattr(config, section).model_copy(update={key: value}) if section else value
            config = config.model_copy(update={section or key: part})
            plan.struck(0, f"rank {plan.options['rank']} has {plan.options['key']}={value}")
        return former(config, *args, **named)


def other_order(plan: Planting) -> None:
    """The rank takes the rows of each batch in the reverse order."""
    from andon.step.plan import BatchPlan

    @replaces(BatchPlan, "batch")
    def batch(former: Any, self: BatchPlan, step: int) -> Any:
        found = former(self, step)
        if not plan.here:
            return found
        if step == 1:
            plan.struck(0, f"rank {plan.options['rank']} takes {found.ids[::-1]}, not {found.ids}")
        return replace(found, ids=found.ids[::-1])


def other_base(plan: Planting) -> None:
    """One frozen weight of the rank is larger by 1."""
    from andon.training import build as building

    @replaces(building, "build_base")
    def build(former: Any, *args: Any) -> Any:
        model = former(*args)
        if plan.here:
            name, tensor = next(iter(model.named_parameters()))
            tensor.data.view(-1)[0] += 1.0
            plan.struck(0, f"rank {plan.options['rank']} has another {name}")
        return model


def other_tokens(plan: Planting) -> None:
    """The rank's tokenizer leaves out the last token of every text."""
    from andon.data.tokens import Tokenizer

    if plan.here:

        @replaces(Tokenizer, "encode")
        def encode(former: Any, self: Any, texts: Any, max_length: int) -> list[list[int]]:
            plan.struck(0, f"rank {plan.options['rank']} leaves out the last token of {len(texts)} texts")
            return [ids[:-1] or ids for ids in former(self, texts, max_length)]


def other_library(plan: Planting) -> None:
    """The rank has another version of a library."""
    from andon.training import session

    if plan.here:

        @replaces(session, "environment")
        def environment(former: Any, *args: Any) -> dict[str, Any]:
            found = dict(former(*args))
            plan.struck(0, f"rank {plan.options['rank']} has torch 2.0.0, not {found['packages']['torch']}")
            return found | {"packages": found["packages"] | {"torch": "2.0.0"}}


def dies_while_saving(plan: Planting) -> None:
    """Rank 0 is killed as it gives the checkpoint of the option `step`, or a later one, its name."""
    from andon.run import checkpoint

    @replaces(checkpoint, "_put_in_place")
    def dying(former: Any, temporary: Path, final: Path) -> None:
        step = int(final.name.removeprefix("step-"))
        if step >= plan.options["step"]:
            plan.struck(step - 1, f"SIGKILL to rank 0 before {temporary.name} became {final.name}")
            os.kill(os.getpid(), signal.SIGKILL)
        former(temporary, final)


# protections that are off


def moments_lost(plan: Planting) -> None:
    """A resume restores the weights and the place in the data, and begins with moments of zero."""
    import torch

    from andon.step.replica import Replica

    @replaces(Replica, "restore")
    def forgetful(former: Any, self: Replica, weights: Any, state: Any, updates: int) -> None:
        kept = {name: value if name == "step" else torch.zeros_like(value) for name, value in state.items()}
        former(self, weights, kept, updates)
        plan.acted()


def sums_by_rank(plan: Planting) -> None:
    """Gradients are added rank by rank, in an order that depends on the number of ranks."""
    from andon.step import reduce

    @replaces(reduce, "finish")
    def finish(former: Any, node: Any, roots: Any, add: Any) -> Any:
        plan.acted()
        return functools.reduce(add, roots.values())


def no_orphan_guard(plan: Planting) -> None:
    """Ranks do not end with their launcher."""
    from andon.launch import orphan

    if "RANK" in os.environ:
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG, which may have been asked for already

    @replaces(orphan, "_end_now")
    def end(former: Any) -> None:
        plan.acted()

    @replaces(orphan, "_ask_for_death_signal")
    def ask(former: Any) -> None:
        return None


def slow_steps(plan: Planting) -> None:
    """Every update takes half a second more, so that an orphan is still there when it is looked for."""
    from andon.training.trainer import Trainer

    @replaces(Trainer, "_advance")
    def slow(former: Any, self: Trainer, batch: Any) -> Any:
        plan.acted()
        time.sleep(0.5)
        return former(self, batch)


def deaf_ranks(plan: Planting) -> None:
    """Signals do to ranks what they do to any process that does not listen: they end it."""
    if "RANK" in os.environ:
        for signum in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, signal.SIG_DFL)
        plan.acted()


def no_reports(plan: Planting) -> None:
    """Ranks do not write down why they ended."""
    from andon.launch import rank

    @replaces(rank, "_record")
    def record(former: Any, report: Any) -> None:
        plan.acted()


def lenient_reader(plan: Planting) -> None:
    """Rows that cannot be used are passed over in silence."""
    from andon.console.problems import ProblemList

    @replaces(ProblemList, "add")
    def add(former: Any, self: ProblemList, where: str, what: str) -> None:
        plan.acted()


def unverified(plan: Planting) -> None:
    """A checkpoint is loaded as it is: nothing is held against its manifest."""
    from safetensors.torch import load

    from andon.run import checkpoint
    from andon_contracts.digest import hex64, tree_digest

    @replaces(checkpoint, "_read")
    def believe(former: Any, folder: Path, use: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        plan.acted()
        listed = json.loads((folder / checkpoint.MANIFEST).read_bytes())
        tensors = load((folder / checkpoint.TENSORS).read_bytes())
        del listed["sha256"]
        step = int(folder.name.partition(".")[0].removeprefix("step-"))
        manifest = checkpoint.Manifest.from_json(listed | {"digest": hex64(tree_digest(tensors)), "step": step})
        state = json.loads((folder / checkpoint.STATE).read_bytes())
        return manifest, state, {name: use(tensor) for name, tensor in tensors.items()}


def forgiven(plan: Planting) -> None:
    """What the disk refuses is passed over: a checkpoint, a line, a result, an fsync."""
    from andon.console.problems import InputError
    from andon.run.ledger import LedgerWriter
    from andon.training import journal
    from andon.training import run as running

    def forgive(owner: object, name: str) -> None:
        @replaces(owner, name)
        def quiet(former: Any, *args: Any, **named: Any) -> Any:
            try:
                return former(*args, **named)
            except (OSError, InputError):
                plan.acted()

    forgive(journal.FolderJournal, "checkpoint")
    forgive(journal.MetricsWriter, "write")
    forgive(journal, "write_confusion")
    forgive(LedgerWriter, "append")
    forgive(LedgerWriter, "sync")
    forgive(running, "write_adapter")
    forgive(running, "write_summary")
    forgive(os, "fsync")


def no_fsync(plan: Planting) -> None:
    """Nothing is ever synced."""
    os.fsync = lambda fd: plan.acted()


def saves_in_place(plan: Planting) -> None:
    """Checkpoints are written under their final name, the manifest first; rank 0 is killed within the next file."""
    from andon.run import checkpoint

    @replaces(checkpoint, "temporary_beside")
    def beside(former: Any, path: Path) -> Path:
        return path

    @replaces(checkpoint, "_put_in_place")
    def put(former: Any, temporary: Path, final: Path) -> None:
        return None

    @replaces(checkpoint, "write_new")
    def dying(former: Any, path: Path, data: bytes | Iterator[bytes]) -> None:
        step = int(path.parent.name.removeprefix("step-"))
        if step >= plan.options["step"]:
            former(path, data[: len(data) // 2] if isinstance(data, bytes) else itertools.islice(data, 1))
            plan.struck(step - 1, f"SIGKILL to rank 0 within {path.parent.name}/{path.name}")
            os.kill(os.getpid(), signal.SIGKILL)
        former(path, data)
