"""The frozen weights: unchanged, on every rank.

All are read at the start. Before each update one part of them is read again, so that `ROUND` updates cover all. All are
read at once if a version counter of torch changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from andon_contracts.laws.law import Law, Observations, Seen, in_lockstep
from andon_contracts.laws.update import FROZEN, frozen_tensor
from andon_contracts.observe import chained, dense_parts, flat_digest, has_list_kernels, to_cpu
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.checks.structure import Structure, untrained_copies
from andon_contracts.watch.checks.weights import State, Weights, version_marks

if TYPE_CHECKING:
    from andon_contracts.kernels import ListSums

ROUND = 64
"""The number of updates in which every frozen weight and every large buffer is read once."""
_PART_BYTES = 1 << 20


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
        self._first_sums = list(self._sums)
        sums = iter(sums_of_parts([[tensor] for part in self._parts if len(part) > 1 for tensor in part]))
        self._first_tensor_sums = [list(islice(sums, len(part))) if len(part) > 1 else [] for part in self._parts]

    def read_all(self) -> int:
        self._marks = version_marks(self.parameters)
        self._parts = list(parts_of(self.parameters))
        self._readers: dict[tuple[int, int], tuple[slice, PartReader]] = {}  # by the first turn and their number
        self._sums = sums_of_parts(self._parts)
        self._now = chained(len(self._sums), self._sums)
        return self._now

    @property
    def untouched(self) -> bool:
        return self._marks == version_marks(self.parameters)

    def look(self, turns: int = 1) -> list[list[Tensor]]:
        """Start reading the parts of the next `turns`, a divisor of `ROUND`.

        Returns lists of tensors to copy to the CPU before `digest` is called.
        """
        self._written = not self.untouched
        if self._written:
            return []
        turn = self._looks % ROUND
        self._looks += turns
        if (turn, turns) not in self._readers:
            part = slice(len(self._parts) * turn // ROUND, len(self._parts) * (turn + turns) // ROUND)
            self._readers[turn, turns] = part, PartReader(self._parts[part])
        self._turn = self._readers[turn, turns]
        return [self._turn[1].look()]

    def digest(self, *, whole: bool = False) -> int:
        """The digest of all parameters as last read. Call it once after each `look`. whole: read all of them now."""
        if whole:
            return self.read_all()
        if self._written:
            return self.first if self._trained_now() else self.read_all()
        part, reader = self._turn
        sums = reader.sums()
        if sums != self._sums[part]:
            self._sums[part] = sums
            if self._trained_now():
                return self.first
            self._now = chained(len(self._sums), self._sums)
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
        parts = zip(parts_of(self.parameters), self._first_sums, self._first_tensor_sums, strict=True)
        for part, first, of_tensors in parts:
            if sums_of_parts([part]) != [first]:
                odd = (each for each, was in zip(part, of_tensors, strict=False) if sums_of_parts([[each]]) != [was])
                address = next(odd, part[0]).data_ptr()
                spans = ((p, each.data_ptr(), each.nbytes) for p in self.parameters for each in dense_parts(p))
                return next((p for p, begin, size in spans if begin <= address < begin + size), None)
        return None


class PartReader:
    """Digests the same parts repeatedly, each a list of tensors. A GPU with Triton reads its parts in one launch."""

    def __init__(self, parts: Sequence[Sequence[Tensor]]) -> None:
        self._parts = parts
        by_device: dict[torch.device, list[int]] = {}
        for index, part in enumerate(parts):
            device = part[0].device
            if has_list_kernels(device) and all(each.device == device and each.is_contiguous() for each in part):
                by_device.setdefault(device, []).append(index)
        self._on_gpu: list[tuple[list[int], list[Tensor], ListSums]] = []
        for device, indices in by_device.items():
            rows: list[tuple[int, int, int]] = []
            for row, part in enumerate(parts[index] for index in indices):
                # Each tensor is summed as if it were filled up to whole words.
                first_words = accumulate((-(-each.nbytes // 8) for each in part), initial=0)
                rows += [(each.nbytes, word, row) for each, word in zip(part, first_words, strict=False)]
            tensors = [each for index in indices for each in parts[index]]
            from andon_contracts.kernels import ListSums  # needs Triton

            self._on_gpu.append((indices, tensors, ListSums(device, rows)))
        gpu = {index for indices in by_device.values() for index in indices}
        self._others = [index for index in range(len(parts)) if index not in gpu]

    def look(self) -> list[Tensor]:
        """Start reading. Waits for a GPU only if no kernel can read a part. Returns the tensors that `sums` needs."""
        self._sums = {index: flat_digest(self._parts[index]) for index in self._others}
        self._waiting = [sums.read(tensors) for _, tensors, sums in self._on_gpu]
        return self._waiting

    def sums(self) -> list[int]:
        """A digest in [0, 2^64) for each part, in order."""
        to_cpu(self._waiting)
        for (indices, _, _), sums in zip(self._on_gpu, self._waiting, strict=True):
            self._sums |= {index: value % (1 << 64) for index, value in zip(indices, sums.tolist(), strict=True)}
        return [self._sums[index] for index in range(len(self._parts))]


def sums_of_parts(parts: Sequence[Sequence[Tensor]]) -> list[int]:
    reader = PartReader(parts)
    reader.look()
    return reader.sums()


def parts_of(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields lists of views of the `tensors`, in order, of about `_PART_BYTES` each. Large tensors are sliced."""
    part: list[Tensor] = []
    size = 0
    for tensor in chain.from_iterable(map(dense_parts, tensors)):
        # Only a contiguous tensor has slices that stay views of it.
        dense = tensor.is_contiguous()
        slices = torch.split(tensor.view(-1), max(1, _PART_BYTES // tensor.element_size())) if dense else (tensor,)
        for piece in slices:
            if part and size + piece.nbytes > _PART_BYTES:
                yield part
                part, size = [], 0
            part.append(piece)
            size += piece.nbytes
    if part:
        yield part
