"""The weights: equal on all replicas before and after each update, or where the loop synchronises them.

A weight is read after each update. Before the next one it is read again if its version counter or its memory changed,
and before every 16th update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

from torch import Tensor

from andon_contracts.agree import Observation, bits_of
from andon_contracts.laws.law import Law, Seen
from andon_contracts.laws.update import REPLICAS
from andon_contracts.observe import Look, Observer
from andon_contracts.violation import NOT_SEEN_REDUCED, Finding
from andon_contracts.watch.check import Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.synchrony import Reducer, State, Synchrony

_REREAD = 16
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
        return [] if self._look is None else [self._look.waiting]

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
        return [self._look.waiting, self._look.norms]

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
