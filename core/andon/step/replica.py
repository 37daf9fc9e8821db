"""One model with its optimizer: gradients of its micro-batches, the update, and its state as tensors by name.

Names and values of the state do not depend on the flat layout or on the number of ranks.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import nn

from andon.config.schema import Optimizer
from andon.step.captured import CapturedPasses
from andon.step.flat import REPLACED, FlatParameters, Master, counts_updates, moments_of, state_names, undecayed
from andon.step.message import WIDTH
from andon.step.micro_batch import Batch, Leaf, LeafResult, PassResult, Task, keyed_randomness, reports_of_leaves
from andon.step.reduce import Node, fold
from andon_contracts.digest import join, tensor_digest, tree_digest, word_sum_tensor
from andon_contracts.observe import finite_total, flat_norm, word_sums

WEIGHTS, OPTIMIZER = "weights", "optimizer"  # the names of the two parts of a state


@dataclass(frozen=True)
class PartialGradient:
    """The subtree roots of one replica, and its reports: int64 [micro-batches, WIDTH] on its device."""

    roots: Mapping[Node, torch.Tensor]
    reports: torch.Tensor
    kept: dict[Node, torch.Tensor] = field(default_factory=dict)  # copies of the sums that an audit needs


class Replica:
    """A model whose trainable parameters live in one flat buffer, with its optimizer."""

    def __init__(
        self,
        model: nn.Module,
        trainable: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        seed: int,
        device: torch.device,
        master_on: torch.device | None = None,
        captured: CapturedPasses | None = None,
    ) -> None:
        """model: already on `device`. trainable: its trainable parameters in canonical order, all fp32. seed: for the
        randomness of its passes. master_on: `device` of `Master`. captured: captures passes as CUDA graphs; same bits.

        Raises `ValueError` as `FlatParameters` does, for a parameter that requires a gradient and is not in
        `trainable`, and for a norm layer that keeps running statistics.
        """
        self.model = model
        self.device = device
        exempt = undecayed(model, trainable)
        ordered = sorted(trainable, key=exempt.__contains__)  # stable: parameters without weight decay come last
        self.parameters = FlatParameters({name: trainable[name] for name in ordered}, device)
        self.settings = optimizer
        undecayed_slots = (slot.start for slot in self.parameters.slots if slot.name in exempt)
        self.master = Master(self.parameters, master_on, next(undecayed_slots, self.parameters.size))
        self.optimizer = self.master.build_optimizer(optimizer)
        self._state: dict[str, torch.Tensor] = {}
        self.captured = captured
        self.keeping: frozenset[Node] | None = None
        """The sums that the next `gradients` call copies for an audit; None: no audit is due."""
        self.seed = seed
        self._count = torch.zeros((), device=self.master.device)
        self._closed: torch.Tensor | None = None
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

        def save(value: torch.Tensor) -> torch.Tensor:
            """`value`, or a copy of it if the next micro-batch would overwrite it."""
            if value is not gradient:
                return value
            return (self._spare.pop() if self._spare else torch.empty_like(value)).copy_(value)

        def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            # In place, so that the tree holds at most one buffer for each level.
            left.add_(right)
            if right is not gradient:
                self._spare.append(right)
            return left

        def keep(node: Node, value: torch.Tensor) -> None:
            if node in (keeping or ()):
                kept[node] = value.clone()  # rare, and a spare buffer would never be freed

        self._prepare()
        sums = {node: save(fold(node, compute, add, save, keep if keeping else None)) for node in roots}
        if not self.parameters.attached():
            raise RuntimeError(REPLACED)  # also with contracts off
        return PartialGradient(sums, reports_of_leaves(results, task, self.device, checked=checked), kept)

    def completed(self, partial: PartialGradient | None, roots: Sequence[Node]) -> PartialGradient:
        """`partial` (None: the pass raised) with zeros for the `roots` that it lacks."""
        # On GPUs a failed rank must join the collectives that the others enter before they have read of the failure.
        if partial is None:
            reports = torch.empty((0, WIDTH), dtype=torch.int64, device=self.device)
            kept = dict.fromkeys(self.keeping or (), torch.zeros_like(self.parameters.gradient))
            partial = PartialGradient({}, reports, kept)
        missing = {node: torch.zeros_like(self.parameters.gradient) for node in roots if node not in partial.roots}
        return PartialGradient({**partial.roots, **missing}, partial.reports, partial.kept) if missing else partial

    def _prepare(self) -> None:
        self.parameters.attach_gradient()
        # Setting the mode of a thousand modules takes milliseconds; checking it is cheaper.
        if not all(module.training for module in self.model.modules()):
            self.model.train()

    def _leaf(self, step: int, leaf: Leaf, task: Task, *, checked: bool) -> LeafResult:
        # A micro-batch without rows is still a leaf of the tree; its gradient is exactly zero.
        if not leaf.ids:
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
        self.parameters.gradient.zero_()
        loss = task.loss_sum(self.model, batch)
        loss.loss_sum.backward()  # type: ignore[no-untyped-call]
        total = finite_total(self.parameters.gradient) if checked else None
        rows = task.content(batch) if content else None
        return PassResult(loss.loss_sum.detach(), loss.correct, loss.terms, total, rows)

    def gradient_of(self, step: int, leaf: Leaf, task: Task) -> torch.Tensor:
        """The gradient of one micro-batch alone, [size] fp32, as its owner computes it. For audits."""
        self._prepare()
        # Eager, so that the audit of a captured pass compares it with the eager one.
        captured, self.captured = self.captured, None
        try:
            self._leaf(step, leaf, task, checked=False)
        finally:
            self.captured = captured
        return self.parameters.gradient.clone()

    def release(self, partial: PartialGradient) -> None:
        """Reuse the roots' buffers in the next step."""
        self._spare.extend(partial.roots.values())

    def finalize_gradient(
        self, pieces: Sequence[torch.Tensor], divisor: int, rate: float, limit: float | None, *, checked: bool
    ) -> torch.Tensor:
        """Divide the summed gradient by the number of loss terms, clip it, and set the learning rate.

        pieces, divisor: see `set_gradient`. Returns int64 on the device: the device's values of `message.REDUCED`, or
        unless `checked` only the bits of the norm before clipping.
        """
        self.set_gradient(pieces, divisor)
        self.set_rate(rate)
        # The weights too: a bit that flipped since the last update must be detected before the next one.
        sums = word_sums([self.master.gradient, self.weights_of_model()], finite=True) if checked else None
        norm = flat_norm(self.master.gradient)
        self.clip(limit, norm)
        norms = torch.stack([norm] if sums is None else [norm, flat_norm(self.master.gradient)])
        bits = norms.double().view(torch.int64)
        return (bits if sums is None else torch.cat([sums, bits])).to(self.device)

    def set_gradient(self, pieces: Sequence[torch.Tensor], divisor: int) -> None:
        """Set the gradient to the concatenated `pieces` divided by `divisor`, the global number of loss terms."""
        start = 0
        for piece in pieces:
            summed = piece.to(self.master.device)
            # One division after all sums: the rounding of a mean of means would depend on the number of ranks.
            torch.div(summed, divisor, out=self.master.gradient[start : start + piece.numel()])
            start += piece.numel()

    def clip(self, limit: float | None, norm: torch.Tensor | float) -> None:
        """Clip the gradient to the L2 norm `limit` (None: no clipping). norm: its norm as reported, 0-dim fp32."""
        if limit is not None:
            # Clip by the reported norm instead of computing it again.
            total = torch.as_tensor(norm, dtype=torch.float32, device=self.master.device)
            nn.utils.clip_grads_with_norm_([self.master.weights], limit, total)

    def after_update(self) -> torch.Tensor:
        """The values of `message.updated`, int64 on the device. The sum of a moment that does not exist is 0."""
        moments = [self._state[name] for name in moments_of(self.settings) if name in self._state]
        sums = word_sums([self.weights_of_model(), *moments], finite=False)
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
        if not self._state:
            shaped = {"step": self._count}
            names = sorted(state_names(self.settings))
            self._hold({name: torch.zeros_like(shaped.get(name, self.master.gradient)) for name in names})
        self.optimizer.step()
        self.master.push_weights(self.parameters)
        if not counts_updates(self.settings):
            # Counted on the device: the host does not know yet whether the gate skipped the update.
            self._count += 1.0 if self._closed is None else 1.0 - self._closed

    @property
    def updates(self) -> int:
        """The number of updates, as the optimizer counts them; for SGD, which does not, our own count."""
        return int(self._state.get("step", self._count))

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Flat moments, and the count `step`, by name. Empty before the first update."""
        return dict(self._state)

    def _hold(self, state: Mapping[str, torch.Tensor]) -> None:
        """Make `state` the optimizer's state: each range gets its slice of the moments and a copy of the count."""
        self._state = dict(state)
        for place, each in enumerate(self.master.ranges):
            held = self.optimizer.state[each.weights]
            held.clear()
            for name, value in state.items():
                held[name] = value[each.span] if value.dim() else value.clone() if place else value

    def restore(self, weights: torch.Tensor, optimizer_state: Mapping[str, torch.Tensor], updates: int) -> None:
        """Restore the flat weights, the optimizer's tensors by name, and the count of updates."""
        self.parameters.weights.data.copy_(weights)
        self.master.pull_weights(self.parameters)
        self._count.fill_(updates)
        # Copies, because the optimizer writes into its state.
        self._hold({name: value.to(self.master.device, copy=True) for name, value in optimizer_state.items()})

    def layout_digest(self) -> int:
        """Digest of the names, shapes and offsets of the trainable tensors."""
        text = repr([(slot.name, slot.shape, slot.start) for slot in self.parameters.slots])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def weights_digest(self) -> int:
        return tensor_digest(self.parameters.weights.detach())

    def optimizer_digest(self) -> int:
        return tree_digest(self.optimizer_state())

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
    """Weights as `weights/NAME`, moments as `optimizer/MOMENT/NAME`, scalars as `optimizer/NAME`; sharing storage."""
    flat = replica.parameters
    tensors = {f"{WEIGHTS}/{name}": view for name, view in flat.weight_views().items()}
    for kind, value in replica.optimizer_state().items():
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
        whole = torch.zeros_like(flat.weights.data)
        for name, view in flat.views(whole).items():
            view.copy_(tensors[f"{prefix}/{name}"])
        return whole

    state = {kind: flattened(f"{OPTIMIZER}/{kind}") for kind in sorted(moments)}
    state |= {kind: tensors[f"{OPTIMIZER}/{kind}"] for kind in sorted(kinds - moments)}
    replica.restore(flattened(WEIGHTS), state, updates)
