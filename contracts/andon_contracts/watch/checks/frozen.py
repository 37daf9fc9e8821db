"""The frozen weights: unchanged, on every rank.

All are read at the start. Before each update some of them are read again, so that `ROUND` updates cover all. All are
read at once if a version counter of torch changed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from andon_contracts.laws.law import Law, Observations, Seen, in_lockstep
from andon_contracts.laws.update import FROZEN, frozen_tensor
from andon_contracts.observe import Look, Observer, chained
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.checks.structure import Structure, untrained_copies
from andon_contracts.watch.checks.weights import State, Weights, version_marks

ROUND = 64
"""The number of updates in which every frozen weight is read once."""


def _changed_on_all(seen: Seen[object]) -> bool:
    # Several ranks all changed frozen weights, to equal values if these were equal before: the loop may intend it.
    if len(seen.observations) == 1 or any(o.values["base"] == o.values["first base"] for o in seen.observations):
        return False
    return "base" not in seen.differing or "first base" in seen.differing


def _changed_by_loop(seen: Seen[object]) -> Finding | None:
    if not _changed_on_all(seen):
        return None
    what = "a frozen weight changed in the same way on all ranks"
    return Finding(what, seen.step, (), frozen_tensor(seen, "frozen weights"))


_DIGESTS = ("base", "first base")


class Frozen(Check):
    before_laws = (
        Law("base-frozen/before", _DIGESTS, lambda seen: None if _changed_on_all(seen) else FROZEN.check(seen)),
        # Broken hardware does not change all ranks in the same way, so this does not stop the run.
        Law("base-frozen/alike", _DIGESTS, _changed_by_loop, suspicion=True),
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # Teachers and moving averages inside the model follow the trained weights.
        copies = untrained_copies(context.subject)
        self._base = FrozenBase([p for p in context.subject.frozen.values() if id(p) not in copies])
        self._closing_line = ""

    def cover(self) -> Mapping[str, Cover]:
        none = Cover("not applicable", "no parameter is frozen")
        return {"base-frozen": LIVE if self.context.subject.frozen else none}

    def look(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        return self._base.look(self.context.pace.every)

    def before(self, probe: OptimizerProbe) -> Values:
        weights = probe.check(Weights)
        # Merging trained weights into the base (ReLoRA) changes all of it.
        merged = weights.written and weights.synchrony.state is State.TOGETHER and bool(self._base.parameters)
        return self._values(self._base.digest(whole=merged))

    def _values(self, digest: int) -> Values:
        changed = None if self._reported or digest == self._base.first else self._base.changed()
        subject = self.context.subject
        index = 0 if changed is None else subject.names.index(subject.names_by_id()[id(changed)]) + 1
        return {"base": digest, "first base": self._base.first, "base at": index}

    @property
    def _reported(self) -> bool:
        verdicts = self.context.verdicts
        return verdicts.is_reported(FROZEN.clause) or verdicts.suspected[FROZEN.clause] > 0

    def align(self, said: Observations) -> Observations:
        """If all ranks merged the same trained weights into the base, replace the first base. Also changes `_base`."""
        if not self._base.parameters or not in_lockstep(said) or not all(o.values["written"] for o in said):
            return said
        differing = Seen[object](said, None).differing
        diverged = "weights" in differing or ("base" in differing and "first base" not in differing)
        if diverged or any(o.values["base"] == o.values["first base"] for o in said):
            return said
        self._base.accept()
        return tuple(replace(o, values={**o.values, "first base": o.values["base"]}) for o in said)

    def judge_close(self) -> None:
        """Read all frozen weights once more, on this rank alone, because closing is not collective.

        They are not read if weights were written since the last update: a merge or a load may have changed them.
        """
        context = self.context
        if FROZEN.clause not in context.verdicts.live or self._reported or not context.steps:
            return
        untouched = self._base.untouched and all(probe.check(Weights).untouched for probe in context.probes)
        why = "weights were written after the last update"
        if untouched:
            why = context.check(Structure).change_since_start()
        if why:
            self._closing_line = f"  base-frozen: not read again at the close, because {why}"
            return
        self.judge_alone(FROZEN, context.updates, self._values(self._base.read_all()))

    def closing_lines(self) -> list[str]:
        return [self._closing_line]


class FrozenBase:
    """Digests `parameters`, which must not change. `first` is the digest of the accepted values, in [0, 2^64)."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self._looks = 0
        self.accept()

    def accept(self) -> None:
        """Read all parameters. Later reads are compared with their present values."""
        self.first = self.read_all()
        self._first_digests = list(self._digests)

    def read_all(self) -> int:
        self._marks = version_marks(self.parameters)
        # A parameter is read in the turn in which its first byte lies, if all bytes are spread over the turns.
        begins = list(accumulate((each.nbytes for each in self.parameters), initial=0))
        self._turns = [begin * ROUND // max(begins[-1], 1) for begin in begins[:-1]]
        self._observers = [Observer() for _ in self.parameters]
        self._reading = dict(enumerate(map(self._read, range(len(self.parameters)))))
        self._digests = [look.digest for look in self._reading.values()]
        self._now = chained(len(self._digests), self._digests)
        return self._now

    def _read(self, index: int) -> Look:
        return self._observers[index].look([self.parameters[index]])

    @property
    def untouched(self) -> bool:
        return self._marks == version_marks(self.parameters)

    def look(self, turns: int = 1) -> list[list[Tensor]]:
        """Start reading the parameters of the next `turns`, a divisor of `ROUND`.

        Returns lists of tensors to copy to the CPU before `digest` is called.
        """
        self._reading = {}
        self._written = not self.untouched
        if self._written:
            return []
        turn = self._looks % ROUND
        self._looks += turns
        due = range(bisect_left(self._turns, turn), bisect_left(self._turns, turn + turns))
        self._reading = {index: self._read(index) for index in due}
        return [look.device_sums for look in self._reading.values()]

    def digest(self, *, whole: bool = False) -> int:
        """The digest of all parameters as last read. Call it once after each `look`. whole: read all of them now."""
        if whole:
            return self.read_all()
        if self._written:
            return self.first if self._trained_now() else self.read_all()
        changed = {index: look.digest for index, look in self._reading.items() if look.digest != self._digests[index]}
        if changed:
            if self._trained_now():
                return self.first
            for index, digest in changed.items():
                self._digests[index] = digest
            self._now = chained(len(self._digests), self._digests)
        return self._now

    def _trained_now(self) -> bool:
        """Whether the loop began to train some of the parameters. If so, drop these and accept the others anew."""
        left = [parameter for parameter in self.parameters if not parameter.requires_grad]
        if len(left) == len(self.parameters):
            return False
        self.parameters = left
        self.accept()
        return True

    def changed(self) -> torch.nn.Parameter | None:
        """The first parameter that differs from its accepted value; None if none differs. Reads all parameters."""
        now = (self._read(index).digest for index in range(len(self.parameters)))
        return next((p for p, a, b in zip(self.parameters, now, self._first_digests, strict=True) if a != b), None)
