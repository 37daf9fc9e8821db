"""One model with its optimizer: gradients of its micro-batches, the update, and its state as tensors by name.

Names and values of the state do not depend on the flat layout or on the number of ranks.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from andon.backend.base import Backend
from andon.config.schema import Optimizer
from andon.step.captured import CapturedPasses
from andon.step.flat import (
    REPLACED,
    FlatParameters,
    Master,
    Shards,
    counts_updates,
    layout_of,
    moments_of,
    optimizer_of,
    parted,
    state_names,
    undecayed,
)
from andon.step.message import WIDTH
from andon.step.micro_batch import Batch, Leaf, LeafResult, PassResult, Task, keyed_randomness, reports_of_leaves
from andon.step.reduce import Node, fold
from andon.step.slices import SliceExchange, layers_of
from andon_contracts.digest import join, kernels, seal, tensor_digest, tree_digest, word_sum_tensor
from andon_contracts.observe import finite_total, flat_norm, nonfinite, word_sums
from andon_contracts.policy import enforced

WEIGHTS, OPTIMIZER = "weights", "optimizer"  # the names of the two parts of a state


@dataclass(frozen=True)
class PartialGradient:
    """The subtree roots of one replica, and its reports: int64 [micro-batches, WIDTH] on its device."""

    roots: Mapping[Node, torch.Tensor]
    reports: torch.Tensor
    kept: dict[Node, torch.Tensor] = field(default_factory=dict)  # copies of the sums that an audit needs


class Replica:
    """A model whose trainable parameters live in one flat buffer, with its optimizer.

    With `shards`, the optimizer is divided among the ranks (ZeRO-1): this rank has the moments of its slice, and
    updates the weights of its slice. No other rank can check a slice, so it is digested whenever it has been written,
    and again before it is used: `moved` compares the two. Audits recompute updates.
    """

    def __init__(
        self,
        model: nn.Module,
        trainable: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        seed: int,
        device: torch.device,
        master_on: torch.device | None = None,
        captured: CapturedPasses | None = None,
        backend: Backend | None = None,
    ) -> None:
        """model: already on `device`. trainable: its trainable parameters in canonical order, all fp32. seed: for the
        randomness of its passes. master_on: `device` of `Master`. captured: captures passes as CUDA graphs; same bits.
        backend: divides the optimizer among its ranks, of which one is local, if it is large (`Shards.divides`).

        Raises `ValueError` as `FlatParameters` does, for a parameter that requires a gradient and is not in
        `trainable`, and for a norm layer that keeps running statistics.
        """
        self.model = model
        self.device = device
        exempt = undecayed(model, trainable)
        ordered = sorted(trainable, key=exempt.__contains__)  # stable: parameters without weight decay come last
        layout = {name: trainable[name] for name in ordered}
        size, self._backend, self.shards = layout_of(layout)[1], backend, None
        if backend is not None and Shards.divides(size, backend.world_size):
            self.shards = Shards(size, backend.ranks[0], backend.world_size)
        self.parameters = FlatParameters(layout, device, self.shards.capacity if self.shards else 0)
        self.settings = optimizer
        undecayed_slots = (slot.start for slot in self.parameters.slots if slot.name in exempt)
        self.decayed = next(undecayed_slots, size)
        self.master = Master(self.parameters, master_on, self.decayed, self.shards)
        self.optimizer = optimizer_of(optimizer, [(each.weights, each.decays) for each in self.master.ranges])
        self._state: dict[str, torch.Tensor] = {}
        self.captured = captured
        self.keeping: frozenset[Node] | None = None
        """The sums that the next `gradients` call copies for an audit; None: no audit is due."""
        self.seed = seed
        self._count = torch.zeros((), device=self.master.device)
        self._closed: torch.Tensor | None = None
        self.whole: dict[str, torch.Tensor] = {}
        """The optimizer state of all ranks on the CPU while rank 0 saves it; see `gather_state`."""
        # Word sums of the slices of the gradient and of each moment when they were last written; None: unknown.
        self._divided: torch.Tensor | None = None
        self._updated: torch.Tensor | None = None
        self._readers: dict[int, Any] = {}
        self.exchange: SliceExchange | None = None
        self.layers = layers_of(model)  # they wait for gathered weights one by one: see `SliceExchange`
        self._own_norm = torch.zeros(())  # of the slice, before clipping
        # A GPU adds the blocks of all ranks in the order of the buffer. On a CPU the sum is exact, in any order.
        self._block_places: torch.Tensor | None = None
        if self.shards is not None and device.type == "cuda":
            self._block_places = torch.tensor(self.shards.places_of_blocks(), device=device)
        # Buffers of the gradient's size, reused every step: at most one per tree level and per root.
        self._spare: list[torch.Tensor] = []
        owned = self._owned = {id(parameter) for parameter in trainable.values()}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.requires_grad and id(tensor) not in owned:
                what = "requires a gradient but is not among the trainable parameters; freeze it or train it"
                raise ValueError(f"{name} {what}")
        for name, module in model.named_modules():
            # Ranks process different micro-batches, so these buffers would depend on rank and world size (faults F11).
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
                what = "keeps running statistics of the micro-batches that its rank happened to see; replace it"
                raise ValueError(f"{name} {what}")

    def gradients(
        self, step: int, leaves: Sequence[Leaf], roots: Sequence[Node], task: Task, *, checked: bool
    ) -> PartialGradient:
        """Run forward and backward of `leaves`, from left to right, and sum the gradients in the subtrees `roots`.

        checked: digest each micro-batch's rows, and check its gradient for NaN and Inf. Raises `RuntimeError` if the
        model's trainable parameters or gradients are no longer views of the flat buffers.
        """
        by_index = {leaf.index: leaf for leaf in leaves}
        results: list[LeafResult] = []
        kept: dict[Node, torch.Tensor] = {}
        gradient, keeping = self.parameters.gradient, self.keeping

        def compute(index: int) -> torch.Tensor:
            results.append(self._leaf(step, by_index[index], task, checked=checked))
            if keeping is not None:
                results[-1].gradient = word_sum_tensor(gradient)
            return gradient

        def keep(node: Node, value: torch.Tensor) -> None:
            if node in (keeping or ()):
                kept[node] = value.clone()  # rare, and a spare buffer would never be freed

        self._prepare()
        sums: dict[Node, torch.Tensor] = {}
        for left, node in zip(reversed(range(len(roots))), roots, strict=True):
            if self.exchange is not None and self.exchange.overlapping and keeping is None and not left:
                self._overlapped(node, compute, sums, self.exchange)
            else:
                value = fold(node, compute, self._add, self._save, keep if keeping else None)
                # A divided optimizer leaves the model's gradient alone until the next pass.
                sums[node] = self._save(value) if self.shards is None or left else value
        if not self.parameters.attached():
            raise RuntimeError(REPLACED)  # also with contracts off
        return PartialGradient(sums, reports_of_leaves(results, task, self.device, checked=checked), kept)

    def _overlapped(
        self, node: Node, compute: Callable[[int], Any], sums: dict[Node, torch.Tensor], exchange: SliceExchange
    ) -> None:
        """`fold` the last subtree `node` into `sums`, and reduce each bucket when its last pass has completed it."""
        (low, high), lefts = node, list[torch.Tensor]()
        while high - low > 1:
            middle = (low + high) // 2
            lefts.append(self._save(fold((low, middle), compute, self._add, self._save)))
            low = middle
        last = compute(low)
        sums[node] = lefts[0] if lefts else last
        exchange.reduce(sums, lefts, last)
        self._spare += lefts[1:]

    def _save(self, value: torch.Tensor) -> torch.Tensor:
        if value is not self.parameters.gradient:
            return value
        return (self._spare.pop() if self._spare else torch.empty_like(value)).copy_(value)

    def _add(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        # In place, so that the tree holds at most one buffer for each level.
        left.add_(right)
        if right is not self.parameters.gradient:
            self._spare.append(right)
        return left

    def completed(self, partial: PartialGradient | None, roots: Sequence[Node]) -> PartialGradient:
        """`partial` (None: the pass raised) with zeros for the `roots` that it lacks."""
        # On GPUs a failed rank must join the collectives that the others enter before they have read of the failure.
        if partial is None:
            reports = torch.empty((0, WIDTH), dtype=torch.int64, device=self.device)
            kept = dict.fromkeys(self.keeping or (), torch.zeros_like(self.parameters.gradient))
            partial = PartialGradient({}, reports, kept)
        missing = {node: torch.zeros_like(self.parameters.gradient) for node in roots if node not in partial.roots}
        return PartialGradient({**partial.roots, **missing}, partial.reports, partial.kept) if missing else partial

    def compiled(self) -> None:
        """Let passes wait for all gathered weights, as the layers of a compiled model cannot. Before `TrainingStep`."""
        self.layers = []

    def _passing(self) -> AbstractContextManager[None]:
        return nullcontext() if self.exchange is None else self.exchange.passing()

    def _prepare(self) -> None:
        self.parameters.attach_gradient()
        # Setting the mode of a thousand modules takes milliseconds; checking it is cheaper.
        if not all(module.training for module in self.model.modules()):
            self.model.train()

    def _leaf(self, step: int, leaf: Leaf, task: Task, *, checked: bool) -> LeafResult:
        # A micro-batch without rows is still a leaf of the tree; its gradient is exactly zero.
        if not leaf.ids:
            with self._passing():
                self.parameters.gradient.zero_()
            return LeafResult(leaf)
        batch = task.load(leaf.ids, self.device)
        drawing = functools.partial(keyed_randomness, self.seed, step, leaf.index, self.device)
        if self.captured is None:
            with drawing():
                return LeafResult(leaf, batch, self._pass(task, batch, checked=checked))
        # A graph reads a copy of the batch, so the pass digests that copy.
        compute = functools.partial(self._pass, task, checked=checked, content=checked)
        return LeafResult(leaf, batch, self.captured((task, checked), batch, drawing, compute))

    def _pass(self, task: Task, batch: Batch, *, checked: bool, content: bool = False) -> PassResult:
        with self._passing():
            self.parameters.gradient.zero_()
            loss = task.loss_sum(self.model, batch)
            loss.loss_sum.backward()  # type: ignore[no-untyped-call]
        total = finite_total(self.parameters.gradient) if checked else None
        rows = task.content(batch) if content else None
        return PassResult(loss.loss_sum.detach(), loss.correct, loss.terms, total, rows)

    def recomputed(
        self, step: int, leaves: Sequence[Leaf], roots: Sequence[Node], known: Mapping[Node, torch.Tensor], task: Task
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The word sums of the gradients of `leaves`, and of the sums `roots` of these and the `known` sums, which are
        overwritten. For audits."""
        by_index, gradient = {leaf.index: leaf for leaf in leaves}, self.parameters.gradient
        own: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []

        def compute(index: int) -> torch.Tensor:
            self._leaf(step, by_index[index], task, checked=False)
            own.append(word_sum_tensor(gradient))
            return gradient

        self._prepare()
        # Eager, so that the audit of a captured pass compares it with the eager one. `known` sums do not become spare.
        captured, spare, self.captured, self._spare = self.captured, self._spare, None, [*self._spare]
        try:
            for node in roots:
                value = fold(node, compute, self._add, self._save, known=known)
                sums.append(word_sum_tensor(value))
                self._spare += [value] * (value is not gradient)
        finally:
            self.captured, self._spare = captured, spare
        return own, sums

    def release(self, partial: PartialGradient) -> None:
        """Reuse the roots' buffers in the next step."""
        self._spare.extend(root for root in partial.roots.values() if root is not self.parameters.gradient)

    def finalize_gradient(
        self, pieces: Sequence[torch.Tensor], divisor: int, rate: float, limit: float | None, *, checked: bool
    ) -> torch.Tensor:
        """Divide the summed gradient by the number of loss terms, clip it, and set the learning rate.

        pieces, divisor: see `set_gradient`. Returns int64 on the device: the device's values of `message.REDUCED`, or
        unless `checked` only the bits of the norm before clipping.
        """
        self.set_gradient(pieces, divisor)
        self.set_rate(rate)
        if self.shards is not None:
            return self._finalize_slice(limit, checked=checked)
        # The weights too: a bit that flipped since the last update must be detected before the next one.
        sums = word_sums([self.master.gradient, self.weights_of_model()], finite=True) if checked else None
        norm = flat_norm(self.master.gradient)
        self.clip(limit, norm)
        norms = torch.stack([norm] if sums is None else [norm, flat_norm(self.master.gradient)])
        bits = norms.double().view(torch.int64)
        return (bits if sums is None else torch.cat([sums, bits])).to(self.device)

    def _finalize_slice(self, limit: float | None, *, checked: bool) -> torch.Tensor:
        gradient = self.master.gradient
        norm = flat_norm(gradient, self._of_all_blocks).double()
        if checked:
            moved, (own,) = self.moved(), self._slice_sums([gradient])
            sums = torch.stack([own, nonfinite(gradient).long(), word_sum_tensor(self.weights_of_model())])
        self.clip(limit, norm)
        if not checked:
            return norm.view(torch.int64).reshape(1)
        # This slice's deviation from one clipping, as part of the norm of the whole gradient.
        factor = torch.ones_like(norm) if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)
        clipped = factor * norm + (flat_norm(gradient).double() - factor * self._own_norm)
        return torch.cat([sums, torch.stack([norm, clipped]).view(torch.int64), moved])

    def _division(self) -> tuple[Shards, Backend]:
        if self.shards is None or self._backend is None:
            raise ValueError("the ranks do not divide this optimizer")
        return self.shards, self._backend

    def _of_all_blocks(self, sums: torch.Tensor) -> torch.Tensor:
        """The rows of every rank's blocks, on a GPU in the order of the buffer, so that their sum has fixed bits."""
        shards, backend = self._division()
        self._own_norm = sums.sum().sqrt()
        # In fp64 a CPU squares half a block at once.
        rows = shards.longest * (2 if sums.is_cpu else 1)
        padded = nn.functional.pad(sums, (0, 0, 0, rows - sums.shape[0]))
        every = torch.cat(backend.gather([padded]))
        return every if self._block_places is None else every[self._block_places]

    def _slice_sums(self, held: Sequence[torch.Tensor]) -> torch.Tensor:
        """int64 [len(held)]: the word sums of these slices at their positions in the buffer. The sums of all ranks add
        up to that of the whole."""
        shards, _ = self._division()
        parts = [part for each in held for part in shards.cut(each)]
        starts = [span.start // 2 for span in shards.spans]  # in words of two elements
        if held and held[0].is_cuda and (triton := kernels()) is not None:
            if len(held) not in self._readers:
                rows = [(part.nbytes, starts[i % len(starts)], i // len(starts)) for i, part in enumerate(parts)]
                self._readers[len(held)] = triton.ListSums(self.device, rows)
            sums: torch.Tensor = self._readers[len(held)].read(parts)
            return sums
        sums = torch.zeros(len(held), dtype=torch.int64, device=self.device)
        for place, part in enumerate(parts):
            sums[place // len(starts)] += word_sum_tensor(part, starts[place % len(starts)])
        return sums

    def _moments(self) -> list[torch.Tensor]:
        return [self._state[name] for name in moments_of(self.settings) if name in self._state]

    def moved(self) -> torch.Tensor:
        """int64 [1 + moments]: whether the slice of the gradient, and of each moment, differs from what was written."""
        now = self._slice_sums([self.master.gradient, *self._moments()])
        gradient = now[:1] if self._divided is None else self._divided
        moved = now != torch.cat([gradient, now[1:] if self._updated is None else self._updated])
        return nn.functional.pad(moved.long(), (0, 1 + len(moments_of(self.settings)) - len(now)))

    def gather_state(self) -> None:
        """On rank 0 copy the whole optimizer state to `whole`, on the CPU. Collective; only with `shards`."""
        shards, backend = self._division()
        for name, held in self._state.items():
            self.whole[name] = torch.empty(self.parameters.size) if held.dim() and shards.rank == 0 else held
            for (start, width), own in zip_longest(shards.buckets, shards.cut(held)) if held.dim() else ():
                rows = held.new_zeros((shards.world, width))
                if own is not None:
                    rows[shards.rank, : own.numel()] = own
                backend.fill([rows])
                if shards.rank == 0:
                    self.whole[name][start : start + rows.numel()] = rows.view(-1)[: self.parameters.size - start]

    def set_gradient(self, pieces: Sequence[torch.Tensor], divisor: int) -> None:
        """Set the gradient to the concatenated `pieces` divided by `divisor`, the global number of loss terms."""
        start = 0
        for piece in pieces:
            # One division after all sums: the rounding of a mean of means would depend on the number of ranks.
            torch.div(piece.to(self.master.device), divisor, out=self.master.gradient[start : start + piece.numel()])
            start += piece.numel()
        if self.shards is not None:
            self._divided = self._slice_sums([self.master.gradient]) if enforced() else None

    def clip(self, limit: float | None, norm: torch.Tensor | float) -> None:
        """Clip the gradient to the L2 norm `limit` (None: no clipping). norm: its norm as reported, 0-dim fp32."""
        if limit is not None:
            # Clip by the reported norm instead of computing it again.
            total = torch.as_tensor(norm, dtype=torch.float32, device=self.master.device)
            nn.utils.clip_grads_with_norm_([each.weights for each in self.master.ranges], limit, total)

    def after_update(self) -> torch.Tensor:
        """The values of `message.updated`, int64 on the device. The sum of a moment that does not exist is 0."""
        moments = self._moments()
        if self.shards is None:
            sums = word_sums([self.weights_of_model(), *moments], finite=False)
        else:
            self._updated = self._slice_sums(moments) if self._updated is None else self._updated
            sums = torch.cat([word_sum_tensor(self.weights_of_model()).view(1), self._updated])
        missing = sums.new_zeros(len(moments_of(self.settings)) - len(moments))
        bits = self._state.get("step", self._count).reshape(1).view(torch.int32).to(torch.int64)
        return torch.cat([sums, missing, bits]).to(self.device)

    def weights_of_model(self) -> torch.Tensor:
        """The flat weights of the model, detached, on the master's device."""
        return self.parameters.weights.detach().to(self.master.device)

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def gate(self, closed: torch.Tensor | None) -> None:
        """Make `apply` do nothing while `closed` (0-dim fp32 on the device) is 1; None: it always updates.

        Raises `ValueError` if the optimizer is not fused, because only a fused one can skip an update on its device.
        """
        if closed is not None and not self.optimizer.defaults.get("fused"):
            msg = f"{self.settings.name} on {self.device} is not fused, so its device cannot keep it from updating"
            raise ValueError(msg)
        self._closed = closed
        # torch's GradScaler uses these attributes to skip the update of a fused optimizer.
        self.optimizer.found_inf = closed  # type: ignore[attr-defined]
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]

    def apply(self) -> None:
        """Run one optimizer update at the current learning rate."""
        self._begin()
        self.optimizer.step()
        self.master.push_weights(self.parameters)
        if self.shards is not None:
            self._updated = self._slice_sums(self._moments()) if enforced() else None
        if not counts_updates(self.settings):
            # Counted on the device: the host does not know yet whether the gate skipped the update.
            self._count += 1.0 if self._closed is None else 1.0 - self._closed

    def _begin(self) -> None:
        if not self._state:
            shaped = {"step": self._count}
            names = sorted(state_names(self.settings))
            self._hold({name: torch.zeros_like(shaped.get(name, self.master.gradient)) for name in names})

    def recomputed_update(self, subject: int) -> torch.Tensor:
        """int64 [1 + moments]: the word sums of the weights and moments that the next update leaves in the slice of
        rank `subject`, computed here from copies. Collective, before `apply`; only with `shards`. For audits."""
        shards, backend = self._division()
        self._begin()
        moments, size, scalars = self._moments(), shards.block, [(n, s) for n, s in self._state.items() if not s.dim()]
        names = [name for name in moments_of(self.settings) if name in self._state]
        sums = torch.zeros(1 + len(moments), dtype=torch.int64, device=self.device)
        every = [shards.blocks_of(rank) for rank in range(shards.world)]
        parts = [torch.split(each, size) for each in (self.master.gradient, *moments)]
        for turn in range(shards.longest):
            sent = sums.new_zeros((2 + len(moments), size), dtype=torch.float32)
            if turn < len(every[shards.rank]):
                block = every[shards.rank][turn]
                own = [self.parameters.weights.detach()[block], *(each[turn] for each in parts)]
                sent[:, : own[0].numel()] = torch.stack(own)
            received = backend.gather([sent])[subject]
            for span, decays in parted(every[subject][turn : turn + 1], self.decayed):
                first = span.start - every[subject][turn].start
                weights, gradient, *own = (row[first : first + span.stop - span.start].clone() for row in received)
                parameter = nn.Parameter(weights)
                parameter.grad, optimizer = gradient, optimizer_of(self.settings, [(parameter, decays)])
                optimizer.param_groups[0]["lr"] = self.rate
                optimizer.state[parameter] |= dict(zip(names, own, strict=True)) | {n: s.clone() for n, s in scalars}
                optimizer.step()
                sums += torch.stack([word_sum_tensor(each, span.start // 2) for each in (weights, *own)])
        return sums

    def updated_slice(self) -> torch.Tensor:
        """int64 [1 + moments]: the word sums of the weights and moments in this rank's slice, as the update left it."""
        shards, _ = self._division()
        return self._slice_sums([shards.slice_of(self.parameters.weights.detach()), *self._moments()])

    @property
    def updates(self) -> int:
        """The number of updates, as the optimizer counts them; for SGD, which does not, our own count."""
        return int(self._state.get("step", self._count))

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Flat moments, with `shards` their slices, and the count `step`, by name. Empty before the first update."""
        return dict(self._state)

    def _hold(self, state: Mapping[str, torch.Tensor]) -> None:
        """Make `state` the optimizer's state: each range gets its slice of the moments and a copy of the count."""
        self._state = dict(state)
        for place, each in enumerate(self.master.ranges):
            held = self.optimizer.state[each.weights]
            held.clear()
            for name, value in state.items():
                held[name] = value[each.held] if value.dim() else value.clone() if place else value

    def restore(self, weights: torch.Tensor, optimizer_state: Mapping[str, torch.Tensor], updates: int) -> None:
        """Restore the flat weights, the optimizer's whole tensors by name, and the count of updates."""
        self.parameters.weights.data.copy_(weights)
        if self.master.separate:
            self.master.weights.data.copy_(self.parameters.weights.data)
        self._count.fill_(updates)
        if self.shards is not None:
            optimizer_state = {n: self.shards.slice_of(v) if v.dim() else v for n, v in optimizer_state.items()}
        # Copies, because the optimizer writes into its state.
        self._hold({name: value.to(self.master.device, copy=True) for name, value in optimizer_state.items()})
        self._updated = self._slice_sums(self._moments()) if self.shards is not None and enforced() else None

    def layout_digest(self) -> int:
        """Digest of the names, shapes and offsets of the trainable tensors."""
        text = repr([(slot.name, slot.shape, slot.start) for slot in self.parameters.slots])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def weights_digest(self) -> int:
        return tensor_digest(self.parameters.weights.detach())

    def optimizer_digest(self) -> int:
        """The digest of the whole optimizer state. Collective with `shards`."""
        if self.shards is None or self._backend is None:
            return tree_digest(self._state)
        total = torch.stack(self._backend.gather([self._slice_sums(self._moments())])).sum(0).tolist()
        names = [name for name in moments_of(self.settings) if name in self._state]
        parts = {n: seal(s, torch.float32, (self.parameters.size,)) for n, s in zip(names, total, strict=True)}
        return join(parts | {name: tensor_digest(self._state[name]) for name in self._state.keys() - names})

    def base_digest(self) -> int:
        return tree_digest(self.frozen())

    def reduced_gradient(self) -> dict[str, torch.Tensor]:
        """The optimizer's gradient by parameter name, sharing storage."""
        return self.parameters.views(self.master.gradient)

    def frozen(self) -> dict[str, torch.Tensor]:
        """`frozen_tensors` of the model."""
        return frozen_tensors(self.model, self._owned)


def frozen_tensors(model: nn.Module, trained: Set[int] | None = None) -> dict[str, torch.Tensor]:
    """Frozen parameters and all buffers by name, sharing storage, with the scales of packed weights.

    A packed weight keeps its scales in its attribute `quant_state`, neither as parameters nor as buffers. trained: ids
    of the trained parameters; None: those that require a gradient.
    """
    every = dict(model.named_parameters())
    trained = {id(each) for each in every.values() if each.requires_grad} if trained is None else trained
    frozen = {name: each.detach() for name, each in every.items() if id(each) not in trained}
    frozen |= {name: each.detach() for name, each in model.named_buffers()}
    for name, parameter in every.items():
        states = {f"{name}.quant_state": getattr(parameter, "quant_state", None)}
        while states:
            path, state = states.popitem()
            for key, value in vars(state).items() if state is not None else ():
                if isinstance(value, torch.Tensor):
                    frozen[f"{path}.{key}"] = value
                elif type(value) is type(state):  # the scales of the scales
                    states[f"{path}.{key}"] = value
    return frozen


def base_digest(model: nn.Module, device: torch.device | None = None) -> int:
    """The 64-bit digest of `frozen_tensors`. device: computes it, one tensor at a time; None: where they are."""
    frozen = frozen_tensors(model)
    if device is None:
        return tree_digest(frozen)
    return join({name: tensor_digest(each.to(device)) for name, each in frozen.items()})


def state_tensors(replica: Replica) -> dict[str, torch.Tensor]:
    """Weights as `weights/NAME`, moments as `optimizer/MOMENT/NAME`, scalars as `optimizer/NAME`; sharing storage.

    With `Replica.shards` only on rank 0, after `gather_state`.
    """
    flat = replica.parameters
    tensors = {f"{WEIGHTS}/{name}": view for name, view in flat.weight_views().items()}
    for kind, value in (replica.optimizer_state() if replica.shards is None else replica.whole).items():
        if value.numel() == flat.size:
            tensors |= {f"{OPTIMIZER}/{kind}/{name}": view for name, view in flat.views(value).items()}
        else:
            tensors[f"{OPTIMIZER}/{kind}"] = value
    return tensors


def restore_state(replica: Replica, tensors: Mapping[str, torch.Tensor], updates: int) -> None:
    """Restore the tensors of `state_tensors` from after `updates` updates.

    Raises `ValueError`, before anything changes, naming every tensor that is missing, unexpected, or misshapen.
    """
    flat, kinds = replica.parameters, state_names(replica.settings) if updates else frozenset()
    moments = kinds & {*moments_of(replica.settings)}
    wanted = {f"{WEIGHTS}/{slot.name}": slot.shape for slot in flat.slots}
    wanted |= {f"{OPTIMIZER}/{kind}/{slot.name}": slot.shape for kind in moments for slot in flat.slots}
    wanted |= {f"{OPTIMIZER}/{kind}": () for kind in kinds - moments}
    faults = [f"{name} is missing" for name in wanted if name not in tensors]
    faults += [f"{name} is not part of this model's state" for name in tensors if name not in wanted]
    for name, tensor in tensors.items():
        if name in wanted and (tensor.dtype, tuple(tensor.shape)) != (torch.float32, wanted[name]):
            faults.append(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not torch.float32 {wanted[name]}")
    if faults:
        raise ValueError("; ".join(faults))

    def flattened(prefix: str) -> torch.Tensor:
        whole = torch.zeros(flat.size)  # on the CPU, as a GPU may not have room for whole moments
        for name, view in flat.views(whole).items():
            view.copy_(tensors[f"{prefix}/{name}"])
        return whole

    state = {kind: flattened(f"{OPTIMIZER}/{kind}") for kind in sorted(moments)}
    state |= {kind: tensors[f"{OPTIMIZER}/{kind}"] for kind in sorted(kinds - moments)}
    replica.restore(flattened(WEIGHTS), state, updates)
