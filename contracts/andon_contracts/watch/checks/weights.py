"""The weights: equal on all replicas before and after each update, or after the loop synchronises them.

If DDP, FSDP2 or a collective of the loop reduced the gradients, the ranks must agree before the update. Otherwise they
must agree after it, because an optimizer may reduce inside its `step`. If nothing reduces and weights differ, the loop
may average them later, as local SGD does: a suspicion until they agree again, and at the close a violation.

The watch reads weights after each update. It reads them again before the next one if a version counter or an address
changed, and as long as the ranks' weights are not synchronised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from operator import attrgetter

import torch
from torch import Tensor

from andon_contracts.agree import bits_of
from andon_contracts.laws.law import Law, Seen
from andon_contracts.laws.update import REPLICAS
from andon_contracts.legible import counted
from andon_contracts.observe import Look, Observer
from andon_contracts.violation import Finding
from andon_contracts.watch.check import Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.exchange import writes, written_alike

_SEVERAL = 2
"""After this number of updates that left equal weights, weights that differ are a fault, even if nothing reduces."""
_MANY = 16  # after this number the weights are read less often, even if nothing reduces
_GAPS, _SLACK = 4, 16
"""A synchronisation is overdue after four times the most updates between two of them, plus sixteen."""
_UNREDUCED = "is the model outside DDP, or every backward pass inside no_sync()?"
_GRADIENTS = frozenset({"gradients-agree"})
_STATES = frozenset({"optimizers-agree", "buffers-agree"})
_WEIGHTS = frozenset({"replicas-agree"})


def version_marks(tensors: Sequence[Tensor]) -> list[int]:
    """A list that differs after a write. An in-place write is counted in the version; `.data = ` moves the memory."""
    parts = tensors
    if any(hasattr(kind, "to_local") for kind in set(map(type, tensors))):
        with torch.no_grad():  # autograd would give a new local tensor each time
            parts = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    # A write through the distributed tensor or its part is counted there only.
    return [*map(attrgetter("_version"), (*tensors, *parts)), *map(Tensor.data_ptr, parts)]


def _not_parted(seen: Seen[object]) -> Finding | None:
    if "weights" not in seen.differing:
        return None
    what = (
        "the trainable weights differ between ranks, and no reduction of their gradients was seen. This is right if "
        f"the loop averages the weights later (local SGD). If it never does, the close reports it: {_UNREDUCED}"
    )
    return Finding(what, seen.step, (), (*seen.differing_tensors("weights"), "weights")[0], likely="")


def _met(seen: Seen[object]) -> Finding | None:
    values = seen.observations[0].values
    what = f"the ranks' weights differed after update {values['parted']} and did not agree again before the close"
    if updates := values["unreduced"]:
        what += f"; no reduction of gradients was seen in {counted(updates, 'update')}"
    return Finding(what, seen.step, (), "weights", likely=_UNREDUCED if updates else None)


PARTED = Law("replicas-agree/parted", ("weights",), _not_parted, by_tensor=("weights",), suspicion=True)
"""After an update for which no reducer is known: only later updates show whether the weights may differ."""
_MET_AT_CLOSE = Law("replicas-agree/close", ("parted", "unreduced"), _met)


class Weights(Check):
    before_laws = (REPLICAS, written_alike("replicas-agree", "weights", "the last update"))
    after_laws = (REPLICAS,)

    def __init__(self, context: Context, probe: OptimizerProbe) -> None:
        super().__init__(context)
        self._probe = probe
        self.synchrony = Synchrony()
        self.observers = self._observer, self._whole_observer = Observer(), Observer()
        self._look: Look | None = None
        self._whole = self._whole_observer.look(())  # the last look at members that every rank holds whole
        self._digest = 0
        self._at_closure: Values = {}  # the values at the begin of a step with a closure, before it ran; else empty
        self._marks: list[int] = []
        self._touched = False  # whether the weights were written between updates since they were last read
        self._elements_reduced, self._writes = 0, writes(probe.even)
        self.written = False  # whether the weights were written between the last update and this one

    def cover(self) -> Mapping[str, Cover]:
        return {"replicas-agree": self.context.between_replicas()}

    def reducing(self, tensor: Tensor, group: object, waits: bool) -> None:
        if self._probe.full and not self.context.muted and self.context.exchange.has_all_ranks(group):
            self._elements_reduced += tensor.numel()

    def begin_step(self) -> None:
        """A step with a closure begins. It may move the weights by this rank's gradient before it calls the closure."""
        self._look_before()
        self._at_closure = self._values()

    def look(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        self._look = None
        if not self._at_closure:
            self._look_before()
        return [] if self._look is None else [self._look.device_sums, self._whole.device_sums]

    def note_writes(self) -> None:
        """Called before an update that is not read. Only frozen weights, which a merge changes, need to know."""
        self._touched |= bool(self.context.subject.frozen) and not self.untouched

    def _look_before(self) -> None:
        if self._probe.unread:  # no earlier digest to compare; weights are read after the update
            self.note_writes()
            self._look = None
            return
        # Weights that are not synchronised are read before every update.
        reads = not self.untouched or self.synchrony.state is not State.TOGETHER
        self._look = self._observer.look(self._probe.members) if reads else None
        if reads:
            self._whole = self._whole_observer.look(self._probe.whole)

    @property
    def untouched(self) -> bool:
        return self._marks == version_marks(self._probe.members)

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        wrappers = [each for each in self.context.subject.reducers if each.holds(probe.held)]
        # FSDP reduces the gradients of shards, but not those of whole tensors beside them.
        known = (self.context.subject.sharded and not probe.whole) or any(each.reduces for each in wrappers)
        if not known and self._elements_reduced:
            members = probe.whole or probe.members
            known = self._elements_reduced >= sum(p.numel() for p in members if p.grad is not None) / 2
        reducer = Reducer.KNOWN if known else Reducer.LEFT_OUT if wrappers else Reducer.UNKNOWN
        return {"reduces": reducer.value, "weights writes": abs(writes(probe.even) - self._writes)}

    def before(self, probe: OptimizerProbe) -> Values:
        values = self._at_closure or self._values()
        self.written = bool(values["written"])
        return values

    def _values(self) -> Values:
        last = self._digest
        if self._look is not None:
            self._digest = self._look.digest
        # Before the first update there is no digest to compare with.
        written, self._touched = last not in (0, self._digest) or self._touched, False
        read = int(self._look is not None)
        whole = {"whole weights": self._whole.digest}
        return {"weights": self._digest, **whole, "weights read": read, "written": int(written)}

    def deferred(self, seen: Seen[object]) -> frozenset[str]:
        return self.synchrony.before(seen, gap=self._probe.unread > 0)

    def look_after(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        self._at_closure = {}
        self._look = self._observer.look(probe.members, norm=self.context.settings.recording)
        self._whole = self._whole_observer.look(probe.whole)
        return [self._look.device_sums, self._look.norms, self._whole.device_sums]

    def after(self, probe: OptimizerProbe) -> Callable[[], Values]:
        look, whole = self._look, self._whole
        assert look is not None

        def values() -> Values:
            self._digest = look.digest
            share = probe.norm_share(look.norm) if self.context.settings.recording else 0.0
            return {"weights": self._digest, "whole weights": whole.digest, "norm share": bits_of(share)}

        return values

    def updated(self, probe: OptimizerProbe) -> None:
        if probe.full or self.context.subject.frozen:
            self._marks = version_marks(probe.members)

    def new_window(self, probe: OptimizerProbe) -> None:
        self._elements_reduced, self._writes = 0, writes(probe.even if probe.full else ())
        for wrapper in self.context.subject.reducers:
            wrapper.new_window()

    def discarded(self, probe: OptimizerProbe) -> None:
        self._elements_reduced = 0

    def judge_close(self) -> None:
        """Weights that began to differ must have agreed again. Every rank knows the state of all ranks."""
        if self.synchrony.state is State.APART:
            values = {"parted": self.synchrony.since, "unreduced": self.synchrony.unreduced}
            self.judge_alone(_MET_AT_CLOSE, self._probe.updates, values, by_all=True)

    def closing_lines(self) -> list[str]:
        return [self.synchrony.closing_line()]


class Reducer(Enum):
    """Whether the watch saw a reduction of the gradients of an update."""

    UNKNOWN = 0
    KNOWN = 1
    LEFT_OUT = 2  # a wrapper did not reduce (`no_sync`), or has a communication hook of the loop


class State(Enum):
    """How the ranks' weights compare."""

    TOGETHER = "equal after every update, as far as the loop is known"
    APART = "different for the first time: a fault, unless the loop averages them later"
    LOCAL = "different between the updates at which the loop averages them"


class Synchrony:
    """Decides from the updates so far when the ranks' weights of one optimizer must agree; the same on all ranks.

    since: the update with which the weights last began to differ. met: how often they agreed again. longest: the most
    updates that this took. known: in the present window the ranks' gradients must agree before the update.
    unreduced: the updates so far if no reduction of gradients was seen in any; else 0.
    """

    def __init__(self) -> None:
        self.state = State.TOGETHER
        self.since = self.met = self.longest = self.unreduced = 0
        self.known = True
        self._reduced_before = self._left_out = self._states_equal = False
        self._equal_weights = self._equal_gradients = self._other_gradients = self._written_apart = 0
        self._weights_before: Sequence[int] = ()

    @property
    def settled(self) -> bool:
        """Whether weights that are equal after some updates show that they are after each: the ranks reduce gradients
        before each update, or the weights were equal after many that were seen.
        """
        steady = self.known or self._equal_weights >= _MANY
        return self.state is State.TOGETHER and steady and not self._left_out

    def before(self, seen: Seen[object], *, gap: bool = False) -> frozenset[str]:
        """Learn from the values before an update. Returns the clauses that do not apply to them. Call once.

        gap: the update before was not read in full, so the ranks may have parted in it without a reduction.
        """
        reducers = {Reducer(value) for value in seen.column("reduces")}
        reduced = len(seen.observations) == 1 or Reducer.KNOWN in reducers
        equal_gradients = "gradient" not in seen.differing
        self._left_out = Reducer.LEFT_OUT in reducers or (self._reduced_before and not reduced)
        self._reduced_before |= reduced
        self.unreduced = 0 if self._reduced_before else self.unreduced + 1
        # If the gradients were equal in every update so far, something reduces them before it.
        learned = self._equal_gradients > 0 and not (self._other_gradients or self._left_out)
        self._equal_gradients += equal_gradients and any(seen.column("norm"))
        self._other_gradients += not equal_gradients
        self.known = reduced or equal_gradients or learned
        self._weights_before = seen.column("weights")
        if self.state is State.TOGETHER:
            parted = _STATES if gap else frozenset[str]()
            return frozenset() if self.known else _GRADIENTS | parted
        if "weights" not in seen.differing:
            self._meet(seen.step - 1)
        elif self.state is State.APART and self.known:
            # A loop that averages weights does not reduce gradients as well: these weights must always agree.
            self.state = State.TOGETHER
            return frozenset()
        elif all(seen.column("written")):
            if self.state is State.LOCAL and not self._written_apart:
                return _GRADIENTS | _STATES
            self._written_apart += self.state is State.APART
        return _GRADIENTS | _STATES | _WEIGHTS

    def after(self, seen: Seen[object]) -> frozenset[str]:
        """Learn from the values after an update. Returns the clauses that do not apply; if `parted`, `PARTED` does."""
        equal = "weights" not in seen.differing
        if self.state is not State.TOGETHER:
            if equal:
                self._meet(seen.step)
            overdue = self.state is State.LOCAL and seen.step - self.since > _GAPS * self.longest + _SLACK
            return frozenset() if overdue else _STATES | _WEIGHTS
        if equal:
            # An update that moves nothing, as the first of a warm-up, shows nothing.
            self._equal_weights += seen.column("weights") != self._weights_before
            # If the states never were equal although the weights are, each rank has a part of them, as in ZeRO.
            states_equal = "optimizer" not in seen.differing
            self._states_equal |= states_equal
            partial = not states_equal and "updates" not in seen.differing and not self._states_equal
            return _STATES if partial else frozenset()
        if self.known or (self._equal_weights >= _SEVERAL and not self._left_out):
            return frozenset()
        self.state, self.since = State.APART, seen.step
        return _STATES | _WEIGHTS

    def parted(self, step: int) -> bool:
        return self.state is State.APART and self.since == step

    def _meet(self, step: int) -> None:
        self.longest = max(self.longest, step - self.since + 1)
        self.met += 1
        self.state, self.since = State.LOCAL, step + 1

    def closing_line(self) -> str:
        """ "" if the loop does not average its weights now and then."""
        if self.state is not State.LOCAL:
            return ""
        apart = f"at most {counted(self.longest, 'update')} apart"
        return f"  replicas-agree: checked after {counted(self.met, 'update')} that averaged the weights, {apart}"
