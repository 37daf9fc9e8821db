"""The weights: equal on all replicas before and after each update, or where the loop synchronises them.

If DDP, FSDP2 or collectives of the loop were seen to reduce, the ranks must agree before the update. Otherwise they
must agree after it: an optimizer may reduce inside its `step`. If nothing was seen to reduce and weights differ, the
loop may average them later, as local SGD does: a suspicion until they agree again, and at the close a violation.

A weight is read after each update. Before the next one it is read again if its version counter or its memory changed,
and before every 16th update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from operator import attrgetter

from torch import Tensor

from andon_contracts.agree import Observation, bits_of
from andon_contracts.laws.law import Law, Seen
from andon_contracts.laws.update import REPLICAS
from andon_contracts.observe import Look, Observer
from andon_contracts.violation import NOT_SEEN_REDUCED, Finding
from andon_contracts.watch.check import Check, Context, Cover, OptimizerProbe, Values

_REREAD = 16
_SEVERAL = 2
"""After so many updates that left equal weights, weights that differ are a fault, even if nothing seems to reduce."""
_GAPS, _SLACK = 4, 16
"""Weights that agree now and then are overdue after four times the longest time apart, and sixteen updates."""
_OF_GRADIENTS = frozenset({"gradients-agree"})
_OF_STATES = frozenset({"optimizers-agree", "buffers-agree"})
_OF_WEIGHTS = frozenset({"replicas-agree"})
_version = attrgetter("_version")


def _not_parted(seen: Seen[object]) -> Finding | None:
    if "weights" not in seen.differing:
        return None
    what = (
        f"the trainable weights part here, and {NOT_SEEN_REDUCED}. Where the loop brings them together later (local "
        "SGD) this is right, and they are held to agree there; where it never does, the close says so"
    )
    return Finding(what, seen.step, (), (*seen.odd("weights"), "weights")[0])


def _met(seen: Seen[object]) -> Finding | None:
    since = seen.said[0].values["parted"]
    what = f"the ranks' weights parted after update {since} and never agreed again until the close"
    return Finding(what, seen.step, (), "weights") if since else None


PARTED = Law("replicas-agree/parted", ("weights",), _not_parted, look=("weights",), suspicion=True)
"""After an update whose reducer is not known: only what follows can tell whether the weights may differ."""
_MET_AT_CLOSE = Law("replicas-agree/close", ("parted",), _met)


class Weights(Check):
    """The weights of one optimizer."""

    before_laws = (REPLICAS,)
    after_laws = (REPLICAS,)

    def __init__(self, context: Context, probe: OptimizerProbe) -> None:
        super().__init__(context)
        self._probe = probe
        self.synchrony = Synchrony()
        self._observer = Observer(stable=True)
        self._look: Look | None = None
        self._digest = 0
        self._at_begin: Values = {}
        """What was read when a step with a closure began, before the closure ran."""
        self._versions: list[int] = []
        self._elements_reduced = 0
        self.written = False
        """Whether the weights were written between the last update and this one."""

    def cover(self) -> Mapping[str, Cover]:
        return {"replicas-agree": self.context.between_replicas()}

    def observers(self) -> Iterator[Observer]:
        yield self._observer

    def reducing(self, tensor: Tensor, group: object, waits: bool) -> None:
        if not self.context.muted and self.context.is_of_all_ranks(group):
            self._elements_reduced += tensor.numel()

    def begin_step(self) -> None:
        """A step with a closure begins. It may move the weights by the rank's own gradient before it calls that."""
        self._look_before(self._probe.updates + 1)
        self._at_begin = self._values()

    def look(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        self._look = None
        if not self._at_begin:
            self._look_before(probe.updates + 1)
        return [] if self._look is None else [self._look.device_sums]

    def _look_before(self, step: int) -> None:
        read = not self.untouched or step % _REREAD == 0 or self.synchrony.watchful
        self._look = self._observer.look(self._probe.members) if read else None

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        return {"reduces": self._reducer().value}

    def before(self, probe: OptimizerProbe) -> Values:
        values = self._at_begin or self._values()
        self.written = bool(values["written"])
        return values

    def _values(self) -> Values:
        last = self._digest
        if self._look is not None:
            self._digest = self._look.digest
        written = last not in (0, self._digest)  # before the first update nothing is known of what was left
        return {"weights": self._digest, "weights read": int(self._look is not None), "written": int(written)}

    def _reducer(self) -> Reducer:
        """Who was seen to reduce the gradients of this window."""
        mine = [each for each in self.context.subject.reducers if each.holds(self._probe.held)]
        if self.context.subject.sharded or any(each.reduces for each in mine):
            return Reducer.KNOWN
        there = sum(p.numel() for p in self._probe.members if p.grad is not None)
        if self._elements_reduced and self._elements_reduced >= there / 2:
            return Reducer.KNOWN
        return Reducer.LEFT_OUT if mine else Reducer.UNKNOWN

    def deferred(self, seen: Seen[object]) -> frozenset[str]:
        return self.synchrony.before(seen)

    @property
    def untouched(self) -> bool:
        """Whether no version counter or address of the weights changed since the last update."""
        return self._marks() == self._versions

    def _marks(self) -> list[int]:
        return [*map(_version, self._probe.members), *map(Tensor.data_ptr, self._probe.members)]

    def look_after(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        self._at_begin = {}
        self._look = self._observer.look(probe.members, norm=self.context.settings.recording)
        self._versions = self._marks()
        return [self._look.device_sums, self._look.norms]

    def after(self, probe: OptimizerProbe) -> Callable[[], Values]:
        look = self._look
        assert look is not None

        def values() -> Values:
            self._digest = look.digest
            share = probe.norm_share(probe.members, look.norm) if self.context.settings.recording else 0.0
            return {"weights": self._digest, "norm share": bits_of(share)}

        return values

    def new_window(self, probe: OptimizerProbe) -> None:
        self._elements_reduced = 0
        for wrapper in self.context.subject.reducers:
            wrapper.turn()

    def discarded(self, probe: OptimizerProbe) -> None:
        self._elements_reduced = 0

    def judge_close(self) -> None:
        """Weights that parted must have agreed again. Each rank knows it of all."""
        parted = self.synchrony.since if self.synchrony.state is State.APART else 0
        verdicts = self.context.verdicts
        if not parted or "replicas-agree" not in verdicts.live:
            return
        said = (Observation(self.context.exchange.rank, self._probe.updates, 0, "close", {"parted": parted}),)
        judgement = verdicts.judgement((_MET_AT_CLOSE,), Seen[object](said, None))
        for law in judgement.broken():
            verdicts.take(judgement.violation(law), self.context.scene(applied=True), alone=True, by_all=True)

    def closing_lines(self) -> list[str]:
        return [self.synchrony.closing_line()]


class Reducer(Enum):
    """Whether anything was seen to reduce the gradients of an update."""

    UNKNOWN = 0
    KNOWN = 1
    LEFT_OUT = 2  # a wrapper that reduces was told not to, or has a communication hook of the loop's


class State(Enum):
    """How the ranks' weights are."""

    TOGETHER = "equal after every update, as far as the loop is known"
    APART = "different for the first time: a fault, unless the loop averages them later"
    LOCAL = "different between the updates at which the loop averages them"


class Synchrony:
    """How the ranks of one optimizer agree, by its updates so far; the same on all ranks.

    since: the update after which the weights parted last. met: how often they agreed again. longest: the most updates
    after which they did. known: in the window at hand, the ranks must agree before the update.
    """

    def __init__(self) -> None:
        self.state = State.TOGETHER
        self.since = self.met = self.longest = 0
        self.known = True
        self._reduced_before = self._left_out = self._states_equal = False
        self._agreed = self._alike = self._unlike = self._written_apart = 0
        self._left: Sequence[int] = ()

    def before(self, seen: Seen[object]) -> frozenset[str]:
        """The clauses that do not apply before this update."""
        how = {Reducer(value) for value in seen.column("reduces")}
        seen_to = len(seen.said) == 1 or Reducer.KNOWN in how
        alike = "gradient" not in seen.differing
        self._left_out = Reducer.LEFT_OUT in how or (self._reduced_before and not seen_to)
        self._reduced_before |= seen_to
        # If the gradients agreed in every update so far, something reduces them before it.
        learned = self._alike > 0 and not (self._unlike or self._left_out)
        self._alike += alike and any(seen.column("norm"))
        self._unlike += not alike
        self.known = seen_to or alike or learned
        self._left = seen.column("weights")
        if self.state is State.TOGETHER:
            return frozenset() if self.known else _OF_GRADIENTS
        if "weights" not in seen.differing:
            self._meet(seen.step - 1)
        elif self.state is State.APART and self.known:
            # A loop that averages weights does not reduce gradients as well: these weights must agree all the time.
            self.state = State.TOGETHER
            return frozenset()
        elif all(seen.column("written")):
            if self.state is State.LOCAL and not self._written_apart:
                return _OF_GRADIENTS | _OF_STATES
            self._written_apart += self.state is State.APART
        return _OF_GRADIENTS | _OF_STATES | _OF_WEIGHTS

    def after(self, seen: Seen[object]) -> frozenset[str]:
        """The clauses that do not apply after this update. `parted` says whether it is a suspicion instead."""
        equal = "weights" not in seen.differing
        if self.state is not State.TOGETHER:
            if equal:
                self._meet(seen.step)
            return frozenset() if self.overdue(seen.step) else _OF_STATES | _OF_WEIGHTS
        if equal:
            # An update that moves nothing, as the first of a warm-up, shows nothing.
            self._agreed += seen.column("weights") != self._left
            # Equal weights: optimizers that never kept the same each have a part of the states, as sharded ones do.
            self._states_equal |= "optimizer" not in seen.differing
            apart = "optimizer" in seen.differing and "updates" not in seen.differing
            return _OF_STATES if apart and not self._states_equal else frozenset()
        if self.known or (self._agreed >= _SEVERAL and not self._left_out):
            return frozenset()
        self.state, self.since = State.APART, seen.step
        return _OF_STATES | _OF_WEIGHTS

    def parted(self, step: int) -> bool:
        """Whether the weights parted just after update `step`: a fault, or local SGD."""
        return self.state is State.APART and self.since == step

    def overdue(self, step: int) -> bool:
        """Whether weights that a loop averages now and then have been apart for far longer than ever before."""
        return self.state is State.LOCAL and step - self.since > _GAPS * self.longest + _SLACK

    @property
    def watchful(self) -> bool:
        """Whether the weights must be read before every update, even if their versions did not change."""
        return self.state is not State.TOGETHER

    def _meet(self, step: int) -> None:
        self.longest = max(self.longest, step - self.since + 1)
        self.met += 1
        self.state, self.since = State.LOCAL, step + 1

    def closing_line(self) -> str:
        """The closing line of a loop that averages its weights now and then; "" for others."""
        if self.state is not State.LOCAL:
            return ""
        apart = f"at most {self.longest} update{'s' * (self.longest > 1)} apart"
        return f"  replicas-agree: held where the loop synchronises its weights, {self.met} times, {apart}"
