"""The unit of a watch: a check owns one concern, from the hooks that observe it to the laws that judge it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from andon_contracts.act import Scene, agreement
from andon_contracts.agree import Observation
from andon_contracts.laws.law import Law, Observations, Seen, in_lockstep
from andon_contracts.liveness.halt import HaltSignal
from andon_contracts.observe import Observer, norm_of
from andon_contracts.violation import Finding
from andon_contracts.watch.exchange import Exchange, Replicas
from andon_contracts.watch.intercept import Listener
from andon_contracts.watch.judging import Verdicts
from andon_contracts.watch.ledger import Recorder
from andon_contracts.watch.model_probe import ModelProbe
from andon_contracts.watch.pace import Pace
from andon_contracts.watch.settings import Settings
from andon_contracts.watch.values import layout_digest

Values = dict[str, int]
Laws = Sequence[Law[Seen[object]]]
C = TypeVar("C", bound="Check")


@dataclass(frozen=True)
class Cover:
    """Whether a clause is checked here, and why not, or why only in part. remedy: the argument that would change it."""

    state: Literal["live", "degraded", "not applicable", "not observable"]
    why: str = ""
    remedy: str = ""

    @property
    def live(self) -> bool:
        return self.state in ("live", "degraded")


LIVE = Cover("live")


def declared(given: object, argument: str) -> Cover:
    """The cover of a clause that needs an argument of `andon.watch`."""
    return LIVE if given else Cover("not observable", f"{argument} was not given", argument)


@dataclass
class Batch:
    """The number of rows of one call of `Watch.batch`, and whether their forward pass drew random numbers."""

    rows: int
    random: Tensor | None = None  # the random state before that pass, if it is known
    drew: bool = False


class Rows:
    """The rows of the present window on this rank whose gradients the loop has not thrown away."""

    def __init__(self) -> None:
        self.skipped_windows: list[list[int]] = []  # the rows of each window whose update a loss scaler skipped
        self.is_past = False
        """True while a past update is reported: parameters may already have the gradients of the next one."""
        self.discarded = 0  # how often gradients were thrown away
        self.new_window()

    def new_window(self) -> None:
        """Forget the rows: an update used them."""
        self.ids: list[int] = []
        self.contents: list[int] = []
        self.loss_sum, self.loss_rows = 0.0, 0
        self.reported: float | None = None
        self.batches: list[Batch] = []
        self.unused = 0
        """The number of rows in the latest batch; 0 after its update, or a `zero_grad` after its backward pass."""

    def add(self, ids: Sequence[int], contents: Sequence[int]) -> None:
        self.batches.append(Batch(len(ids)))
        self.unused = len(ids)
        self.ids.extend(ids)
        self.contents.extend(contents)

    def discard(self) -> None:
        """Forget the rows whose gradients the loop threw away. A batch that had no backward pass yet stays."""
        self.discarded += 1
        count = len(self.ids) - self.unused
        del self.ids[:count], self.contents[:count]
        self.batches = self.batches[-1:] if self.unused else []

    @property
    def latest(self) -> Batch | None:
        return self.batches[-1] if self.batches else None


@dataclass
class Context:
    """What the checks of one watch share. `verdicts` and `recorder` are set after `cover` of every check was called."""

    subject: ModelProbe
    settings: Settings
    exchange: Exchange
    replicas: Replicas
    halt: HaltSignal | None = None
    rows: Rows = field(default_factory=Rows)
    probes: list[OptimizerProbe] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)  # the checks that belong to the whole loop
    all_checks: list[Check] = field(default_factory=list)  # every check once: those of the whole loop first
    verdicts: Verdicts = field(init=False)
    recorder: Recorder = field(init=False)
    pace: Pace = field(init=False)
    full: bool = True  # whether the present window of an optimizer ends with an update that is read in full
    added_s: float = 0.0  # seconds of the host that the watch added to the loop
    busy_s: float = 0.0  # the same without waiting for other ranks and devices
    steps: int = 0  # the updates of all optimizers since the watch began
    last_equal: int | None = None
    """The last update after which all ranks had the same weights; None before that, and with one rank."""
    backward: Any = None  # the loop's backward pass that runs now (`LossPass`); None between them
    muted: bool = False  # true while an audit runs the model: the hooks ignore its calls
    portable: bool = False
    """Whether digests must be the same on all kinds of devices, because the ranks' devices differ."""
    longest: int = 0
    """The number of elements of the largest trained CPU tensor on any rank. It bounds the error of torch's norms."""

    def __post_init__(self) -> None:
        budget = None if self.settings.recording else self.settings.budget
        self.pace = Pace(budget, self.subject.gpu())

    @property
    def world(self) -> int:
        return self.exchange.world_size

    @property
    def ranks_have_own_rows(self) -> bool:
        """Whether every rank must train on different rows. Ranks with different parts of the model may share rows."""
        shared = self.replicas.cut and self.settings.replicate is not None
        return self.world > 1 and self.subject.every_rank_has_rows and not shared

    @property
    def updates(self) -> int:
        """The number of updates, with those before the watch, of the optimizer that has made most."""
        return max(probe.updates for probe in self.probes)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the seconds of the block to `added_s` and `busy_s`. Blocks are not nested."""
        began, busy = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.added_s += time.perf_counter() - began
            self.busy_s += time.thread_time() - busy

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within `timed`: the block waits for a device, which may keep the processor busy."""
        busy = time.thread_time()
        try:
            yield
        finally:
            self.busy_s -= time.thread_time() - busy

    def check(self, kind: type[C]) -> C:
        """The check of class `kind` that belongs to the whole loop."""
        return next(each for each in self.checks if isinstance(each, kind))

    def scene(self, *, applied: bool = False) -> Scene:
        return Scene(self.world, applied=applied)

    def scene_of(self, probe: OptimizerProbe, before: Observations, *, applied: bool) -> Scene:
        """The facts around a finding that its message shows. before: the values of all ranks before the update."""
        unread = probe.unread_before if applied else probe.unread
        known = tuple(replace(o, step=o.step - unread) for o in before)
        comparable = before and in_lockstep(before) and self.replicas.any_held_twice
        said = agreement(known, moments=probe.states_equal) if comparable else ""
        rates_differ = bool(said) and "rate" in Seen(before, None).differing
        return Scene(self.world, applied, self.last_equal, said, rates_differ, unread, tensors=len(probe.names))

    def between_ranks(self) -> Cover:
        """The cover of a clause that compares ranks."""
        return LIVE if self.world > 1 else Cover("not observable", "one process: nothing to compare")

    def between_replicas(self) -> Cover:
        """The cover of a clause that compares ranks that hold the same part of the model."""
        if self.world > 1 and self.replicas.cut:
            parts = len(set(self.replicas.parts))
            return Cover("live", f"between the {self.replicas.copies} replicas of each of {parts} parts")
        if self.world > 1 and self.subject.sharded and (self.replicas.whole or self.subject.even):
            what = ["of shards only how often each rank writes to its own"] * bool(self.subject.even)
            what += [f"the {len(self.replicas.whole)} tensors that all hold whole"] * bool(self.replicas.whole)
            return Cover("degraded", ", and ".join(what))
        if self.world > 1 and (self.subject.sharded or not self.replicas.any_held_twice):
            return Cover("not applicable", "no other rank holds the same part")
        return self.between_ranks()


class OptimizerProbe:
    """The trained parameters of one optimizer, in the order of its groups.

    checks: those of the whole loop and of this optimizer, in the order of judging: causes before effects.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, context: Context) -> None:
        names = context.subject.names_by_id()
        held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in names and p.requires_grad]
        self.optimizer = optimizer
        self.context = context
        self.number = len(context.probes)  # from 0, in the order in which the loop passed the optimizers
        self.checks: Sequence[Check] = ()
        self.members = tuple(held)
        self.parameters: dict[str, torch.nn.Parameter] = {names[id(p)]: p for p in held}
        self.names = tuple(self.parameters)
        self.index = {id(p): index for index, p in enumerate(held)}
        self.held = frozenset(self.index)
        self.whole = [p for p in held if id(p) in context.replicas.whole]
        self.even = [p for p in held if id(p) in context.subject.even]
        self.layout = layout_digest(self.parameters)
        self._slot = {name: index for index, name in enumerate(context.subject.names)}
        self.updates = context.settings.start
        self.skipped = 0  # the number of updates that a loss scaler skipped. Their rows count as used in the plan
        self.states_equal = False  # whether all ranks had the same optimizer state after the last update
        self.made = 0  # the number of updates since the watch began
        self.full = True  # whether the next update is read in full
        self.unread = self.unread_before = 0  # updates in a row that were not read, before the next and the last one

    def check(self, kind: type[C]) -> C:
        return next(each for each in self.checks if isinstance(each, kind))

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.members if p.grad is not None]

    def place(self, member: int) -> int:
        """Convert index + 1 of a member into index + 1 of its name in `ModelProbe.names`; 0 stays 0."""
        return member and self._slot[self.names[member - 1]] + 1

    def norm_share(self, norm: float, *, gradients: bool = False) -> float:
        """The norm of this rank's members; of shards, a share: the sum of its squares is that of the whole norm."""
        shards, by_parts = self.context.subject.shards, dict[int, list[Tensor]]()
        for each in self.members if shards else ():
            if (tensor := each.grad if gradients else each) is not None:
                by_parts.setdefault(shards[id(each)].parts if id(each) in shards else 1, []).append(tensor)
        share = math.sqrt(sum(norm_of(each) ** 2 * n / self.context.world for n, each in by_parts.items()))
        return share if shards else norm

    def reduced(self) -> None:
        if self.full:
            for check in self.checks:
                check.reduced(self)

    def updated(self) -> None:
        self.unread_before, self.unread = self.unread, 0 if self.full else self.unread + 1
        self.context.rows.new_window()
        for check in self.checks:
            check.updated(self)
        self._new_window()

    def skip(self) -> None:
        """A loss scaler skipped the update, because a gradient is not finite."""
        self.skipped += 1
        rows = self.context.rows
        rows.skipped_windows.append(rows.ids)  # the plan counts them as used
        rows.new_window()
        self._new_window()

    def _new_window(self) -> None:
        context, settings = self.context, self.context.settings
        audited = settings.reference is not None and (self.updates - settings.start) % settings.every == 0
        self.full = audited or context.pace.reads(self.made + 1)
        context.full = any(probe.full for probe in context.probes)
        for check in self.checks:
            check.new_window(self)

    def discarded(self) -> None:
        for check in self.checks:
            check.discarded(self)

    def gradients_vanished(self) -> None:
        """The loop set a gradient to None within a window, so it threw away all gradients of the window."""
        self.context.rows.discard()
        self.discarded()


class Check(Listener):
    """One concern of a watched loop: what it observes, the integers it sends to all ranks, and its laws.

    It takes part in the updates that are read in full (`Pace`). Hooks see every window; `Context.full` says which kind.

    A check belongs to one optimizer or to the whole loop. `probe` is the optimizer that makes the update. The order:

    1. The loop calls the model, `backward`, clips and reduces: `forward`, the calls of `Listener`, `reduced`.
    2. Just before the optimizer's step: `look` starts reading tensors, `meanwhile` returns values that the host knows
       while devices still work, `before` the values that were read. All ranks gather these values as a table.
    3. `align` may adjust the table, `deferred` names clauses that do not apply to this update. `before_laws` are
       evaluated in the order of the checks. Then `judge` does what needs further gathers or state.
    4. After the step: `look_after`, `after`, `after_laws`; `updated`, and `new_window` for the next gradients.

    `new_window` also follows an update that a loss scaler skipped; `discarded`, gradients that the loop threw away.
    Of these methods only `judge` communicates, on all ranks or on none.
    """

    before_laws: Laws = ()
    after_laws: Laws = ()
    observers: Sequence[Observer] = ()  # `ranks_met` makes their digests portable if the ranks' devices differ

    def __init__(self, context: Context) -> None:
        self.context = context

    def cover(self) -> Mapping[str, Cover]:
        """The clauses of this check, and whether they can be checked here."""
        return {}

    def ranks_met(self) -> None:
        """Called once, when `context.portable` and `context.longest` are known from all ranks."""
        for observer in self.observers:
            observer.portable = self.context.portable

    def hooks(self) -> list[Callable[[], None]]:
        """Install hooks. Returns functions that remove them."""
        return []

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward pass of a watched module begins, with gradients or without."""

    def forwarded(self) -> None:
        """A forward pass of a watched module ended."""

    def reduced(self, probe: OptimizerProbe) -> None:
        """The gradient is reduced and unscaled, and not clipped yet."""

    def look(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        """Start reading before an update. Returns lists of tensors to copy to the CPU before `before` is called."""
        return []

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        """Values that the host knows without waiting for a device. The names are the same in every update."""
        return {}

    def before(self, probe: OptimizerProbe) -> Values:
        """Values that were read before the update. The table of all checks has the same names in every update."""
        return {}

    def align(self, said: Observations) -> Observations:
        """Return `said`, the values of all ranks, with this check's adjusted. Must give the same on every rank."""
        return said

    def deferred(self, seen: Seen[object]) -> frozenset[str]:
        """Return the clauses that are not evaluated before this update. Called only if the ranks are in lockstep."""
        return frozenset()

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        """Judge what needs further gathers or state. said: the values of all ranks; aligned: these after `align`."""

    def look_after(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        """Start reading after an update. Returns lists of tensors to copy to the CPU for the function of `after`."""
        return []

    def after(self, probe: OptimizerProbe) -> Callable[[], Values]:
        """Return a function that gives the values after the update. It is called when their tensors are on the CPU."""
        return dict

    def updated(self, probe: OptimizerProbe) -> None:
        """The update was made."""

    def new_window(self, probe: OptimizerProbe) -> None:
        """The gradients of the next update begin to accumulate."""

    def discarded(self, probe: OptimizerProbe) -> None:
        """The gradients so far were thrown away."""

    def judge_close(self) -> None:
        """Judge what only the end of the loop shows. Other ranks may not take part."""

    def judge_alone(
        self, law: Law[Seen[object]], step: int, values: Mapping[str, int], *, by_all: bool = False
    ) -> None:
        """At the close: judge `law` by the values of this rank alone. by_all: every other rank has the same values."""
        verdicts, said = self.context.verdicts, (Observation(self.context.exchange.rank, step, 0, "close", values),)
        judgement = verdicts.judgement((law,), Seen[object](said, None, self.context.subject.names))
        verdicts.report_alone(judgement, self.context.scene(applied=True), on_all_ranks=by_all)

    def closing_lines(self) -> list[str]:
        """Lines for the closing message."""
        return []


def parameter_name(names: Sequence[str], index: int) -> str:
    return names[index] if 0 <= index < len(names) else f"parameter {index}"


def indexed(seen: Seen[object], name: str, what: str) -> Finding | None:
    """A finding that says `what` of the parameter whose index + 1 a rank sends as `name`; None if all ranks send 0."""
    first = next((value for value in seen.column(name) if value), None)
    if first is None:
        return None
    tensor = parameter_name(seen.names, first - 1)
    return Finding(f"{tensor} {what}", seen.step, seen.ranks(name), tensor)


def none_has(law: str, name: str, what: str, *, suspicion: bool = False) -> Law[Seen[object]]:
    """The law that all ranks send 0 as `name`. Else it is the index + 1 of a parameter; a message says `what` of it."""
    return Law(law, (name,), lambda seen: indexed(seen, name, what), suspicion=suspicion)
