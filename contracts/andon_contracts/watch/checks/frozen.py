"""The frozen weights: unchanged, on every rank.

All are read at the start. Before each update a part of them is read again, all of them within `ROUND` updates, and all
at once if a version counter of torch moved; so no update pays for reading all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from andon_contracts.agree import Observation
from andon_contracts.laws.law import Law, Observations, Seen, in_lockstep
from andon_contracts.laws.update import FROZEN, frozen_tensor
from andon_contracts.observe import chained, dense_parts, flat_digest, has_list_kernels, to_cpu
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.checks.weights import State, Weights

if TYPE_CHECKING:
    from andon_contracts.kernels import ListSums

ROUND = 64
"""Updates within which every frozen weight is read, and every large buffer."""
_PART_BYTES = 1 << 20
_version = attrgetter("_version")


def _changed_alike(seen: Seen[object]) -> bool:
    """Several ranks all changed what is frozen, and to the same if they began with the same: a loop may mean it."""
    if len(seen.said) == 1 or any(o.values["base"] == o.values["first base"] for o in seen.said):
        return False
    return "base" not in seen.differing or "first base" in seen.differing


def _kept(seen: Seen[object]) -> Finding | None:
    return None if _changed_alike(seen) else FROZEN.check(seen)


def _kept_by_all(seen: Seen[object]) -> Finding | None:
    if not _changed_alike(seen):
        return None
    what = "a frozen weight changed, on all ranks alike"
    return Finding(what, seen.step, (), frozen_tensor(seen, "frozen weights"))


class Frozen(Check):
    before_laws = (
        Law("base-frozen/before", ("base", "first base"), _kept),
        # Hardware does not change all ranks alike, so nobody is stopped for it.
        Law("base-frozen/alike", ("base", "first base"), _kept_by_all, suspicion=True),
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # Teachers and averages inside the model follow the trained weights.
        follows = context.subject.followers()
        self.unread = ""
        """Why the frozen weights were not read at the close, as a closing line."""
        self._base = FrozenBase([p for name, p in context.subject.frozen.items() if name not in follows])

    def cover(self) -> Mapping[str, Cover]:
        none = Cover("not applicable", "no parameter is frozen")
        return {"base-frozen": LIVE if self.context.subject.frozen else none}

    def look(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        self._base.look()
        return self._base.waiting()

    def before(self, probe: OptimizerProbe) -> Values:
        weights = probe.check(Weights)
        # After a merge of trained weights into the base (ReLoRA) all of it changed.
        merged = weights.written and weights.synchrony.state is State.TOGETHER and bool(self._base)
        return self._values(self._base.digest(whole=merged))

    def _values(self, digest: int) -> Values:
        """The digests now and at first, and the place of a weight that changed."""
        changed = None if self._reported or digest == self._base.first else self._base.changed()
        subject = self.context.subject
        place = 0 if changed is None else subject.names.index(subject.name_of()[id(changed)]) + 1
        return {"base": digest, "first base": self._base.first, "base at": place}

    @property
    def _reported(self) -> bool:
        verdicts = self.context.verdicts
        return verdicts.known(FROZEN.clause) or verdicts.suspected[FROZEN.clause] > 0

    def align(self, said: Observations) -> Observations:
        """The base as it is now becomes the first one, if all ranks merged what they trained into it, alike."""
        if not self._base or not in_lockstep(said) or not all(o.values["written"] for o in said):
            return said
        seen: Seen[object] = Seen(said, None)
        moved = all(o.values["base"] != o.values["first base"] for o in said)
        apart = "weights" in seen.differing or ("base" in seen.differing and "first base" not in seen.differing)
        if apart or not moved:
            return said
        self._base.accept()
        return tuple(replace(o, values={**o.values, "first base": o.values["base"]}) for o in said)

    def judge_close(self) -> None:
        """Read all frozen weights once more. This rank alone, because closing is not collective.

        If the model was changed after its last update, by a merge or a load, they may rightly be others.
        """
        context = self.context
        if FROZEN.clause not in context.verdicts.live or self._reported or not context.steps:
            return
        touched = not (self._base.untouched and all(probe.check(Weights).untouched for probe in context.probes))
        why = "weights were written after the last update" if touched else context.subject.became()
        if why:
            self.unread = f"  base-frozen: not read once more at the end, because {why}"
            return
        values = self._values(self._base.last_look())
        said = (Observation(context.exchange.rank, context.updates, 0, "close", values),)
        judgement = context.verdicts.judgement((FROZEN,), Seen[object](said, None, context.subject.names))
        if judgement.first is not None:
            context.verdicts.take(judgement.violation(FROZEN), context.scene(applied=True), alone=True)

    def closing_lines(self) -> list[str]:
        return [self.unread]


class FrozenBase:
    """The digest of weights that nobody is to change. All are read where a version counter of torch moved."""

    def __init__(self, frozen: Sequence[torch.nn.Parameter]) -> None:
        self._frozen = frozen
        self._parts: list[list[Tensor]] = []
        self._pieces: list[list[int]] = []
        """By part that has several tensors, the digest of each as it was at first."""
        self._sums: list[int] = []
        self._marks: list[int] = []
        self._looks = 0
        self._looked = self._moved = False
        self._turn: tuple[range, PartLook] | None = None
        self._readers: dict[int, PartReader] = {}
        """By turn, where a look is worth preparing."""
        self.first = self._begin()
        """The digest at the start, in [0, 2^64)."""
        self._now = self.first

    def __bool__(self) -> bool:
        """Whether there is anything frozen."""
        return bool(self._frozen)

    def look(self) -> None:
        """Look at the part whose turn it is; `digest`, which otherwise does so itself, says what was found."""
        self._looked, self._turn, self._moved = True, None, not self.untouched
        if self._moved:
            return
        parts, turn = len(self._parts), self._looks % ROUND
        self._looks += 1
        these = range(parts * turn // ROUND, parts * (turn + 1) // ROUND)
        if these:
            if turn not in self._readers:
                self._readers[turn] = PartReader(self._parts[these.start : these.stop])
            self._turn = these, self._readers[turn].look()

    def waiting(self) -> list[list[Tensor]]:
        """What devices have yet to say of the look, in lists that may be brought to the CPU before `digest`."""
        return [] if self._turn is None else [self._turn[1].waiting]

    def digest(self, *, whole: bool = False) -> int:
        """The digest of what was last read of each weight; one call for each update. whole: read all of them now."""
        if not self._looked:
            self.look()
        self._looked = False
        if whole:
            return self.last_look()
        if self._moved:
            return self.first if self._thawed() else self.last_look()
        if self._turn is None:
            return self._now
        these, looked = self._turn
        seen = looked.sums()
        changed = seen != self._sums[these.start : these.stop]
        self._sums[these.start : these.stop] = seen
        if changed and self._thawed():
            return self.first
        if changed:
            self._now = chained(len(self._sums), self._sums)
        return self._now

    @property
    def untouched(self) -> bool:
        """Whether no version counter moved since the last look."""
        return self._marks == self._marked()

    def accept(self) -> int:
        """What is there now is the base from here on. Returns its digest."""
        self.first = self._now = self._begin()
        return self.first

    def changed(self) -> torch.nn.Parameter | None:
        """The first weight that is not what it was at first; None where there is none."""
        for part, first, pieces in zip(parts_of(self._frozen), self._first_sums, self._pieces, strict=True):
            if sums_of_parts([part]) != [first]:
                odd = (each for each, was in zip(part, pieces, strict=False) if sums_of_parts([[each]]) != [was])
                place = next(odd, part[0]).data_ptr()
                ends = ((p, each.data_ptr(), each.nbytes) for p in self._frozen for each in dense_parts(p))
                return next((p for p, begin, size in ends if begin <= place < begin + size), None)
        return None

    def _begin(self) -> int:
        """Read all, as what it is held to. Returns the digest."""
        found = self._read_all()
        self._first_sums = list(self._sums)
        several = [part if len(part) > 1 else [] for part in self._parts]
        sums = iter(sums_of_parts([[each] for part in several for each in part]))
        self._pieces = [list(islice(sums, len(part))) for part in several]
        return found

    def last_look(self) -> int:
        """The digest of all as they are now, whatever was read before."""
        self._now = self._read_all()
        return self._now

    def _thawed(self) -> bool:
        """Whether a weight is frozen no longer; then it is none of the base, and what is left begins anew."""
        left = [parameter for parameter in self._frozen if not parameter.requires_grad]
        if len(left) == len(self._frozen):
            return False
        self._frozen = left
        self.accept()
        return True

    def _marked(self) -> list[int]:
        # A write in place is counted in the version; `.data = ` is not, and moves the memory.
        return [*map(_version, self._frozen), *map(Tensor.data_ptr, self._frozen)]

    def _read_all(self) -> int:
        self._marks = self._marked()
        self._parts, self._readers = list(parts_of(self._frozen)), {}
        self._sums = sums_of_parts(self._parts)
        return chained(len(self._sums), self._sums)


@dataclass(frozen=True)
class PartLook:
    """The sums of parts: where a CPU found them, and by device those that it has yet to say."""

    found: dict[int, int]
    places: list[list[int]]
    waiting: list[Tensor]

    def sums(self) -> list[int]:
        """One in [0, 2^64) for each part, in order. Waits for the devices, unless `waiting` was brought to the CPU."""
        to_cpu(self.waiting)
        found = dict(self.found)
        for places, sums in zip(self.places, self.waiting, strict=True):
            found |= {place: value % (1 << 64) for place, value in zip(places, sums.tolist(), strict=True)}
        return [found[place] for place in sorted(found)]


class PartReader:
    """Reads the same parts again and again, each a list of tensors: those of a GPU, with Triton, in one launch."""

    def __init__(self, parts: Sequence[Sequence[Tensor]]) -> None:
        self._others: dict[int, Sequence[Tensor]] = {}
        self._places: dict[torch.device, list[int]] = {}
        for place, part in enumerate(parts):
            device = part[0].device
            alike = all(each.device == device and each.is_contiguous() for each in part)
            if alike and has_list_kernels(device):
                self._places.setdefault(device, []).append(place)
            else:
                self._others[place] = part
        self._lists = [
            ([*chain.from_iterable(parts[i] for i in places)], _list_of(device, [parts[i] for i in places]))
            for device, places in self._places.items()
        ]

    def look(self) -> PartLook:
        """What is there now. No wait for a GPU with Triton."""
        found = {place: flat_digest(part) for place, part in self._others.items()}
        return PartLook(found, list(self._places.values()), [each.read(tensors) for tensors, each in self._lists])


def _list_of(device: torch.device, parts: Sequence[Sequence[Tensor]]) -> ListSums:
    """Of each of `parts` one sum, of its tensors as if each were filled up to whole words."""
    from andon_contracts.kernels import ListSums  # only with Triton

    rows: list[tuple[int, int, int]] = []
    for place, part in enumerate(parts):
        start = 0
        for each in part:
            rows.append((each.nbytes, start, place))
            start += -(-each.nbytes // 8)
    return ListSums(device, rows)


def sums_of_parts(parts: Sequence[Sequence[Tensor]]) -> list[int]:
    """One in [0, 2^64) for each of `parts`, as `PartReader` gives it."""
    return PartReader(parts).look().sums()


def parts_of(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """`tensors` in order as lists of views of about `_PART_BYTES`, large ones in slices."""
    part: list[Tensor] = []
    size = 0
    for tensor in chain.from_iterable(map(dense_parts, tensors)):
        for piece in _slices(tensor):
            bytes_ = piece.numel() * piece.element_size()
            if part and size + bytes_ > _PART_BYTES:
                yield part
                part, size = [], 0
            part.append(piece)
            size += bytes_
    if part:
        yield part


def _slices(tensor: Tensor) -> Sequence[Tensor]:
    # Only a contiguous tensor has slices that stay views of it.
    if not tensor.is_contiguous():
        return (tensor,)
    return torch.split(tensor.view(-1), max(1, _PART_BYTES // tensor.element_size()))
