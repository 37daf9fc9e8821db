"""The gradients: finite as they are computed and reduced, fresh, present, and the same on all replicas."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from andon_contracts.agree import bits_of, real_of
from andon_contracts.laws.law import Law, Observations, Seen, difference
from andon_contracts.observe import DENSE_TYPES, Extremes, Look, Observer, extremes, plain, to_cpu, to_floats
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, Check, Context, Cover, OptimizerProbe, Values, indexed, none_has
from andon_contracts.watch.checks.clipping import UNEVEN, Clipping, alike
from andon_contracts.watch.checks.token_weights import TokenWeights
from andon_contracts.watch.exchange import writes, written_alike
from andon_contracts.watch.gradient_hooks import GradientHooks, RawSummary, Reductions
from andon_contracts.watch.model_probe import ForwardHook
from andon_contracts.watch.values import text_digest

_CALLED = 2  # a parameter without a gradient is reported after its module was called in this number of windows
_PATIENCE = 16  # a parameter that never had a gradient, or only zeros, is reported after this number of windows
_ELEMENTS, _FEWEST = 64, 8
"""Of a shard's gradient about 64 elements are sampled. A factor is known if at least 8 are not zero and agree in it."""


def _raw_finite(seen: Seen[object]) -> Finding | None:
    repaired = ", which the loop made finite before the update" * seen.any("repaired")
    count, arrived = divmod(max(seen.column("nonfinite of")), 1 << 32)
    first = f"; so {'is' if count == 1 else 'are'} {count} of {arrived}, and the backward pass reached this one first"
    return indexed(seen, "nonfinite", f"has a raw local gradient that is not finite{repaired}{first * bool(arrived)}")


def _norm_finite(seen: Seen[object]) -> Finding | None:
    norms = list(map(real_of, seen.column("norm")))
    ranks = [rank for rank, norm in enumerate(norms) if not math.isfinite(norm)]
    shown = ", ".join(f"rank {rank}: {norm!r}" for rank, norm in enumerate(norms))
    what = f"the norm of the gradient is not finite ({shown}); clipping by it gives zero or NaN"
    return Finding(what, seen.step, seen.unless_all(ranks), "gradient") if ranks else None


def _collectives_agree(seen: Seen[object]) -> Finding | None:
    if seen.any("strided"):
        return indexed(seen, "strided", "was passed to a collective although it is not dense in memory")
    if "collectives" in seen.differing:
        return difference(seen, "collectives", "the ranks reduced different tensors, or in a different order")
    return None


_OTHER = "the gradients passed to the optimizer differ"
_CLIPPED_APART = "the ranks clipped the gradient differently, or one copy was changed after its reduction"
_FROZEN = "a parameter was frozen or unfrozen (see parameters-kept), so some gradients were not reduced"


def _gradients_agree(seen: Seen[object]) -> Finding | None:
    if "gradient" not in seen.differing:
        return None
    # The norm of a rank that clips is that before clipping.
    clipped_apart = seen.any("clipping") and alike(list(map(real_of, seen.column("norm"))))
    likely = _FROZEN if seen.any("change") else _CLIPPED_APART if clipped_apart else None
    return replace(difference(seen, "gradient", _OTHER), likely=likely)


_READS = ("gradient", "change", "clipping", "norm")
GRADIENTS_AGREE = Law("gradients-agree/before", _READS, _gradients_agree, by_tensor=("gradient",))
"""Unlike the trainer's law it compares the gradients after clipping, which may be where they parted."""
_STALE = "still had the gradient of the last step when this step began"
_MISSING = "has received no nonzero gradient since the watch opened"


class Gradients(Check):
    """The gradients of one optimizer: raw, reduced, and after clipping.

    A forward pass may skip a layer. So a parameter without a gradient is reported after its module was called in
    `_CALLED` windows, or after `_PATIENCE` windows.
    """

    before_laws = (
        Law("finite/raw", ("nonfinite", "nonfinite of", "repaired"), _raw_finite),
        none_has("gradient-fresh/before", "stale", _STALE, suspicion=True),
        none_has("gradient-present/before", "missing", _MISSING, suspicion=True),
        Law("collectives-agree/before", ("strided", "collectives"), _collectives_agree),
        GRADIENTS_AGREE,
        written_alike("gradients-agree", "gradient", "its reduction"),
        Law("finite/norm", ("norm",), _norm_finite),
    )

    def __init__(self, context: Context, probe: OptimizerProbe, scale: TokenWeights, clip: Clipping | None) -> None:
        super().__init__(context)
        self._probe, self._scale, self._clipping = probe, scale, clip
        self.raw_hooks: GradientHooks
        self._thread = threading.get_ident()
        self._reductions = Reductions(probe.members)
        self.observers = self._observer, self._whole_observer = Observer(), Observer()
        self._look: Look
        self._whole: Look  # of the members that every rank holds whole beside shards
        self._needs_norm = context.settings.clip is not None or context.settings.recording
        self._loop_norm: float | Tensor | None = None
        """The norm by which the loop clipped. A norm on a GPU stays there until `before`."""
        self._arriving: list[Tensor] = []
        """The loop's norm if it is on a GPU, in a list that is copied to the CPU before `before`."""
        self._reduced: Look | None = None  # the gradient before clipping
        self._share = 0.0
        # Members that never had a gradient. A shard without elements on this rank cannot have one.
        self._absent = {index for index, member in enumerate(probe.members) if plain(member).numel()}
        self._zero = set(self._absent)  # the parameters that never had a nonzero gradient
        self._adapter = {index for index, name in enumerate(probe.names) if "lora_" in name}
        self._windows = 0
        self._shards = ShardGradients(self._probe)
        self._writes: int | None = None  # to shards' gradients, when a backward pass of this window last ended
        self._called: set[int] = set()
        self._windows_called: Counter[int] = Counter()
        self._call_hooks: defaultdict[int, list[RemovableHandle]] = defaultdict(list)

    def cover(self) -> Mapping[str, Cover]:
        subject = self.context.subject
        by_ddp = self.context.world > 1 and subject.reducers
        below_python = Cover("degraded", "hooks do not see the reductions of DDP itself")
        unused = "find_unused_parameters=True: checked for LoRA alone, if none of its tensors gets a gradient"
        return {
            "gradients-agree": self.context.between_replicas(),
            "collectives-agree": below_python if by_ddp else self.context.between_ranks(),
            "finite": Cover("degraded", "shards have no raw gradient, only a reduced one") if subject.sharded else LIVE,
            "gradient-fresh": LIVE,
            "gradient-present": Cover("degraded", unused) if subject.unused_expected else LIVE,
        }

    def hooks(self) -> list[Callable[[], None]]:
        context, probe = self.context, self._probe
        observed = self._scale.parameter_index, self._scale.gradient_hook
        self.raw_hooks = GradientHooks(probe.members, probe.gradients_vanished, observed, lambda: context.muted)
        self.raw_hooks.halt = context.halt
        for slot in context.subject.slots if not context.subject.compiled else ():
            index = probe.index.get(id(slot.parameter))
            if index is not None:
                hook = slot.owner.register_forward_pre_hook(ForwardHook(partial(self._module_called, index)))
                self._call_hooks[index].append(hook)
        removals = [hook.remove for hook in chain.from_iterable(self._call_hooks.values())]
        return [self.raw_hooks.close, *removals, _intercept_zero(probe.optimizer, self._zeroed)]

    def _zeroed(self) -> None:
        rows = self.context.rows
        if self.raw_hooks.backward_seen:
            rows.unused = 0
        if self.raw_hooks.started or rows.ids:
            self.raw_hooks.discard()
        else:
            self._probe.discarded()

    def backward(self, loss: Tensor | None) -> None:
        if not self.context.muted:
            self.raw_hooks.gradient_arrived = False
            if self._probe.full:
                self._shards.backward_called()

    def backward_over(self) -> None:
        # `_LoopCalls` is the last listener, so `context.backward` is still the pass that ends.
        if self.context.backward is not None:
            self.raw_hooks.pass_ended()
            if self._probe.full:
                self._shards.backward_ended()
                self._writes = self._count_writes()
            if self.raw_hooks.gradient_arrived:
                self._scale.backward_reached_optimizer()

    def reducing(self, tensor: Tensor, group: object, waits: bool) -> None:
        # Another thread may reduce values of its own over a group of its own, at another time on each rank.
        in_pass = torch._C._current_graph_task_id() != -1
        aside = threading.get_ident() != self._thread and not in_pass
        if self._probe.full and not (aside or self.context.muted) and self.context.exchange.has_all_ranks(group):
            self._reductions.add(tensor)
            if in_pass and any(getattr(each.module, "_comm_hooks", ()) for each in self.context.subject.reducers):
                # Such a hook reduces again when its first reduction is done: in this thread, or in one of the backend.
                self._reductions.calls.pop()

    def clipping(self, parameters: Sequence[Tensor], norm: Tensor | None) -> None:
        if not self._probe.full or self.context.muted or self._probe.held.isdisjoint(map(id, parameters)):
            return
        if norm is not None and self._loop_norm is None and not self._needs_norm:
            self._loop_norm = norm.detach() if norm.is_cuda and type(norm) in DENSE_TYPES else float(norm)
        self._probe.reduced()

    def reduced(self, probe: OptimizerProbe) -> None:
        if self._loop_norm is None and self._needs_norm:
            look = self._look_at_gradient(norm=True)
            to_cpu(look.device_sums, look.norms)
            self._loop_norm = look.norm
            if self.context.settings.recording:
                self._reduced, self._share = look, probe.norm_share(look.norm, gradients=True)

    def _look_at_gradient(self, *, norm: bool) -> Look:
        present = text_digest([each.grad is not None for each in self._probe.members])
        return self._observer.look(self._probe.gradients(), norm=norm, extra=present)

    def look(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        # If the loop's clipping computed the norm, the norm after clipping is seldom needed.
        self._look = self._look_at_gradient(norm=self._loop_norm is None or self._needs_norm)
        self._whole = self._whole_observer.look([p.grad for p in probe.whole if p.grad is not None])
        self._arriving = [self._loop_norm] if isinstance(self._loop_norm, Tensor) else []
        sums = [self._look.device_sums, self._whole.device_sums, *self._shards.waiting()]
        return [*self.raw_hooks.waiting(), *sums, self._look.norms, self._arriving]

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        return {"collectives": text_digest(self._reductions.calls), "strided": probe.place(self._reductions.strided)}

    def _count_writes(self) -> int:
        return writes(p.grad for p in self._probe.even if p.grad is not None)

    def before(self, probe: OptimizerProbe) -> Values:
        look, raw, shards = self._look, self.raw_hooks.read(), self._shards.read()
        nonfinite = raw.nonfinite or shards.nonfinite
        of_all = len(raw.nonfinite) << 32 | len(raw.received)
        unclipped = self._arriving[0] if self._arriving else self._loop_norm
        has_norm = unclipped is None or self._needs_norm
        if nonfinite and not has_norm:
            has_norm, look = True, self._look_at_gradient(norm=True)
        norm = look.norm if has_norm or unclipped is None else float(unclipped)
        share = self._share
        if self.context.settings.recording and self._reduced is None:
            share = probe.norm_share(norm, gradients=True)
        skipped = bool(getattr(probe.optimizer, "found_inf", None))
        norms = self._clipping.norms() if self._clipping is not None else None
        if norms is None:
            norms = (0.0, 0.0) if skipped else (norm if unclipped is None else float(unclipped), norm)
        bad = 0 if skipped or not nonfinite else nonfinite[0] + 1
        self._note_gradients(raw)
        return {
            "nonfinite": probe.place(bad),
            "nonfinite of": of_all * bool(bad and raw.nonfinite),
            "repaired": int(bad > 0 and norm < math.inf),
            "gradient": look.digest,
            "whole gradient": self._whole.digest,
            "reduced seen": int(self._reduced is not None),
            "reduced": 0 if self._reduced is None else self._reduced.digest,
            "norm share": bits_of(share),
            "skipped": int(skipped),
            "norm": bits_of(norms[0]),
            "clipped": bits_of(norms[1]),
            "stale": probe.place(raw.stale or shards.stale),
            "shard factor": bits_of(self._shards.factor()),
            "gradient writes": 0 if self._writes is None else abs(self._count_writes() - self._writes),
            "raw": raw.fingerprint,
            "missing": probe.place(self._first_missing()),
        }

    def align(self, said: Observations) -> Observations:
        # One shard may rightly have no gradient: that of rows of an embedding that no batch uses.
        if not self.context.subject.sharded or len({o.values["missing"] for o in said}) == 1:
            return said
        return tuple(replace(o, values={**o.values, "missing": 0}) for o in said)

    def _module_called(self, index: int) -> None:
        if self._probe.full and torch.is_grad_enabled() and not self.context.muted:
            self._called.add(index)

    def _note_gradients(self, raw: RawSummary) -> None:
        self._windows += 1
        if not self._zero:
            return
        nonzero = raw.nonzero
        now = {index: g for index in self._zero if (g := self._probe.members[index].grad) is not None}
        self._absent -= {*raw.received, *now}
        self._zero -= {*nonzero, *(i for i, g in now.items() if i not in nonzero and plain(g).any())}
        self._windows_called.update(self._called & self._absent)
        self._called.clear()
        for index in [i for i in self._call_hooks if i not in self._absent]:
            for handle in self._call_hooks.pop(index):
                handle.remove()

    def _first_missing(self) -> int:
        """The index + 1 of the first parameter that should have had a gradient by now, else 0."""
        if not self._zero:
            return 0
        late = self._windows >= _PATIENCE
        # Layer drop never leaves out all adapter tensors at once, so one window is enough to report them.
        missing = set(self._adapter) if self._adapter <= self._absent else set()
        if not self.context.subject.unused_expected:
            missing |= {i for i in self._absent if late or self._windows_called[i] >= _CALLED}
            missing |= {i for i in self._zero if late and not self._waits_for_other_half(i)}
        return min(missing, default=-1) + 1

    def _waits_for_other_half(self, index: int) -> bool:
        """LoRA's A has a zero gradient as long as its B is zero."""
        name = self._probe.names[index]
        other = self._probe.parameters.get(name.replace("lora_A", "lora_B"))
        return "lora_A" in name and other is not None and not bool(plain(other).any())

    def new_window(self, probe: OptimizerProbe) -> None:
        self.raw_hooks.reset(reads=probe.full)
        self.discarded(probe)

    def discarded(self, probe: OptimizerProbe) -> None:
        self._loop_norm, self._reduced, self._writes = None, None, None
        self._reductions.clear()
        self._shards.clear()


class ShardGradients:
    """Reads the gradients of shards when the loop's backward passes begin and end, because no hook on a shard runs.

    FSDP reduces them within a pass. When a pass ends, the loop has not changed them yet. Evenly spaced elements of the
    largest member show the factor by which the loop scales them afterwards. All shards of a tensor need one factor.
    """

    def __init__(self, probe: OptimizerProbe) -> None:
        shards = probe.context.subject.shards
        self._members = {index: p for index, p in enumerate(probe.members) if id(p) in shards}
        self._extremes = Extremes()
        self._largest = max(probe.even, key=Tensor.numel, default=None)
        self.clear()

    def clear(self) -> None:
        self._extremes.clear()
        self._begun = False
        self._leftover: list[tuple[int, Tensor, Tensor]] = []
        """The extremes of gradients that were there before the first pass of the window."""
        self._scaled: list[Tensor] = []
        """Elements of the largest member's gradient: as reduced, and as the optimizer gets them."""

    def _present(self) -> dict[int, Tensor]:
        return {i: plain(p.grad) for i, p in self._members.items() if p.grad is not None}

    def _elements(self) -> Tensor:
        gradient = None if self._largest is None else self._largest.grad
        flat = torch.empty(0, device="cpu") if gradient is None else plain(gradient).reshape(-1)
        return flat[:: max(flat.numel() // _ELEMENTS, 1)].float()

    def backward_called(self) -> None:
        if self._begun:  # the loop may have set gradients to None since
            self._leftover = [each for each in self._leftover if self._members[each[0]].grad is not None]
        elif self._members:
            self._begun = True
            self._leftover = [(i, *extremes(each)) for i, each in self._present().items()]

    def backward_ended(self) -> None:
        present = self._present()
        if present:
            for index, gradient in present.items():
                self._extremes.add(index, gradient)
            self._scaled = [self._elements().clone()]

    def waiting(self) -> list[list[Tensor]]:
        """Lists of results on devices, to be copied to the CPU before `read`."""
        self._scaled += [self._elements()] if self._scaled else []
        return [*self._extremes.device_results(), self._scaled]

    def read(self) -> RawSummary:
        seen = self._extremes.read()
        members, *bounds = zip(*self._leftover, strict=True) if self._leftover else ((), (), ())
        before = zip(members, *map(to_floats, bounds), strict=True)
        stale = [each[0] for each in before if any(each[1:]) and each not in seen and each[0] in self._extremes.added]
        return RawSummary(min(stale, default=-1) + 1, seen)

    def factor(self) -> float:
        """By what the loop scaled the largest gradient after the reduction; 0: by no one factor, or unknown."""
        before, after = self._scaled if len(self._scaled) > 1 else [torch.empty(0, device="cpu")] * 2
        used = before != 0
        if len(before) != len(after) or int(used.sum()) < _FEWEST:
            return 0.0
        ratios = after[used] / before[used]
        factor = float(ratios.median())
        return factor if bool(torch.isclose(ratios, ratios.median(), rtol=UNEVEN).all()) else 0.0


def _intercept_zero(optimizer: torch.optim.Optimizer, zeroed: Callable[[], None]) -> Callable[[], None]:
    """Call `zeroed` after each `optimizer.zero_grad`. Returns a function that ends this."""
    original, own = optimizer.zero_grad, vars(optimizer).get("zero_grad")
    watching = [True]

    def zero_grad(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if watching[0]:  # the loop may have stored this function and call it after the watch was closed
            zeroed()

    def restore() -> None:
        watching[0] = False
        # A function that the loop set, before or since, stays.
        if vars(optimizer).get("zero_grad") is zero_grad:
            del vars(optimizer)["zero_grad"]
            vars(optimizer).update({} if own is None else {"zero_grad": own})

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    return restore
