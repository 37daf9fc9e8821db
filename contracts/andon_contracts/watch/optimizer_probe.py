"""One optimizer of a watched loop: what is observed of it just before its update and just after."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from andon_contracts.agree import bits_of
from andon_contracts.multi_tensor import bring, bring_later
from andon_contracts.observe import ORDINARY, Look, Observer, plain
from andon_contracts.watch.clipping import Clips
from andon_contracts.watch.gradient_coverage import GradientCoverage
from andon_contracts.watch.gradient_hooks import GradientHooks, Reductions
from andon_contracts.watch.gradient_scale import GradientScale, Passes
from andon_contracts.watch.model_probe import ModelProbe
from andon_contracts.watch.model_state import BufferLooks
from andon_contracts.watch.motion import Motion, Unmoved
from andon_contracts.watch.optimizer_state import OptimizerState
from andon_contracts.watch.rows import Rows
from andon_contracts.watch.settings import Settings
from andon_contracts.watch.synchrony import Reducer, Synchrony
from andon_contracts.watch.values import Nest, Text, kept_digest, layout_digest, rate_of

_REREAD = 16
"""The weights are read again before every so many-th update, whatever their versions say."""
_version = attrgetter("_version")


class OptimizerProbe:
    """The parameters of one optimizer, the hooks on them, and what the present window of the loop showed."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        subject: ModelProbe,
        settings: Settings,
        rows: Rows,
        world: int,
        passes: Passes,
    ) -> None:
        names = subject.name_of()
        held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in names and p.requires_grad]
        self.optimizer = optimizer
        self.subject = subject
        self.settings = settings
        self.rows = rows
        self.parameters: dict[str, torch.nn.Parameter] = {names[id(p)]: p for p in held}
        self.names = tuple(self.parameters)
        self.updates = settings.start
        self.skipped = 0
        """How many updates a loss scaler left out; the plan of rows goes on past them."""
        self.world = world
        self.scale = GradientScale(optimizer, () if subject.sharded else held, passes)
        self.taps = GradientHooks(held, self._thrown_away, (self.scale.place, self.scale.see))
        self.presence = GradientCoverage(held, self.names, subject, self.taps)
        self.reductions = Reductions(held)
        self.looks = BufferLooks(len(subject.homes))
        self.synchrony = Synchrony()
        self._elements_reduced = 0
        self.gradient_before_clip: list[Tensor] | None = None
        self.audit_due = settings.reference is not None
        self._members = tuple(held)
        self.held = frozenset(map(id, held))
        self.longest = max((p.numel() for p in held if p.device.type == "cpu"), default=0)
        """The elements of the largest tensor on a CPU, of which torch's norm is the least exact."""
        self._layout = layout_digest(self.parameters)
        self._slot = {name: index for index, name in enumerate(subject.names)}
        self._declared = _declared_values(optimizer, self.parameters, self._slot, settings)
        self._clips = Clips(held)
        self._norm: float | Tensor | None = None
        """Of the reduced gradient; a tensor where it is a GPU's, which is not waited for while the loop clips."""
        self._reduced: int | None = None
        self._share = 0.0
        self.moments_equal = False
        """Whether there was an update, and all ranks were seen to keep the same optimizer state after the last one."""
        self._weights, self._begun = 0, dict[str, int]()
        self._versions: list[int] = []
        self._kept = OptimizerState(optimizer, held)
        self._observers = {"gradient": Observer(), "weights": Observer(stable=True)}
        self._texts = {"present": Text(), "modes": Text()}
        self._nest = Nest()
        self._motion = Motion(optimizer, held)

    @property
    def rate(self) -> float:
        """The learning rate of the first group."""
        return rate_of(self.optimizer.param_groups[0], 0.0)

    def _planned(self, step: int) -> float:
        """The learning rate planned for update `step`, at the precision in which the optimizer holds its own."""
        if self.settings.schedule is None:
            return self.rate
        planned = float(self.settings.schedule(step))
        return self.rate if _holds(self.optimizer.param_groups[0].get("lr", 0.0), planned) else planned

    def gradients(self) -> list[Tensor]:
        """The gradients that are there now, in order."""
        return [p.grad for p in self._members if p.grad is not None]

    def clipping(self, parameters: Sequence[Tensor], norm: Tensor | None) -> None:
        """The loop is about to clip: what there is now is the reduced gradient."""
        if self.taps.muted or not any(id(p) in self.held for p in parameters):
            return
        if norm is not None and self._norm is None and self.settings.clip is None and not self.settings.recording:
            self._norm = norm.detach() if norm.is_cuda and type(norm) in ORDINARY else float(norm)
        if norm is not None and self.settings.clip is not None and not self.subject.sharded:
            self._clips.add(parameters, norm)
        self.reduced()

    def reduced(self) -> None:
        """What there is now is the reduced gradient, before clipping."""
        self.scale.reduced()
        if self._norm is None and (self.settings.clip is not None or self.settings.recording):
            seen = self._look_at_gradient(norm=True)
            bring(seen.waiting, seen.norms)
            self._norm = seen.norm
            if self.settings.recording:
                self._reduced = seen.digest
                self._share = self._norm_share(self.gradients(), seen.norm)
        if self.audit_due and self.gradient_before_clip is None:
            self.gradient_before_clip = self.dense_gradients()

    def _look_at_gradient(self, *, norm: bool) -> Look:
        """What is found of the gradients that are there; the digest says which parameters have one."""
        gradients = [p.grad for p in self._members]
        there = [g for g in gradients if g is not None]
        present = self._texts["present"].digest([g is not None for g in gradients])
        return self._observers["gradient"].look(there, norm=norm, beside=present)

    def portable(self, portable: bool) -> None:
        """Whether digests must be the same on all kinds of devices, because the ranks' devices differ."""
        for observer in (*self._observers.values(), self._kept.observer):
            observer.portable = portable

    def _norm_share(self, tensors: Sequence[Tensor], norm: float) -> float:
        return self.subject.norm_share(tensors, self.world) if self.subject.sharded else norm

    def dense_gradients(self) -> list[Tensor]:
        """A copy of every gradient, zeros where there is none."""
        return [torch.zeros_like(p) if p.grad is None else plain(p.grad).clone() for p in self._members]

    def reducing(self, tensor: Tensor, group: object) -> None:
        """The loop is about to reduce a tensor over all ranks."""
        if self.taps.muted:
            return
        if group is None or group is dist.group.WORLD:
            self.taps.reducing(gradient=self.reductions.add(tensor))
        if group is None or (isinstance(group, dist.ProcessGroup) and dist.get_world_size(group) == self.world):
            self._elements_reduced += tensor.numel()

    def before(self, also: Sequence[list[Tensor]] = ()) -> dict[str, int]:
        """What is seen just before an update, as integers; the names and their number never change.

        also: what else is to be brought from devices by the one wait for them.
        """
        step = self.updates + 1
        skipped = bool(getattr(self.optimizer, "found_inf", None))
        # The loop's own clipping has said the norm; what is left of it then matters to few.
        asked = self._norm is None or self.settings.clip is not None or self.settings.recording
        gradient = self._look_at_gradient(norm=asked)
        weights = None if self._begun else self._weights_before(step)
        self.scale.reduced()
        of_clip = [self._norm] if isinstance(self._norm, Tensor) else []
        looked = [gradient.waiting, gradient.norms, of_clip, [] if weights is None else weights.waiting, *also]
        arrive = bring_later(*self.taps.waiting(), *self.scale.waiting(), *looked)
        there = {  # what the host says by itself, while a device comes to the rest
            "change": self.subject.change(self.optimizer),
            "layout": self._layout,
            "hyperparameters": self._hyperparameters(),
            "rate": bits_of(self.rate),
            "planned": bits_of(self._planned(step)),
            "ungrouped": self._ungrouped(),
            "modes": self._texts["modes"].digest(self.subject.modes()),
            "modules": self.subject.named,
            "collectives": self.reductions.digest(),
            "strided": self._place(self.reductions.strided),
            "reduces": self._reducer().value,
        }
        arrive()
        told = float(of_clip[0]) if of_clip else self._norm
        assert not isinstance(told, Tensor)
        raw = self.taps.read()
        if raw.nonfinite and not asked:
            asked, gradient = True, self._look_at_gradient(norm=True)
        used = gradient.norm if asked or told is None else told
        apart = None if self.settings.clip is None else self._clips.left(self.settings.clip)
        norm, clipped = apart or (used if told is None else told, used)
        bad = 0 if skipped else raw.nonfinite
        self.presence.window(raw)
        self._motion.remember(step - self.settings.start)
        return {
            **there,
            **self.looks.values(),
            "nonfinite": self._place(bad),
            "repaired": int(bad > 0 and used < float("inf")),
            **(self._begun or self._said_of(weights)),
            "gradient": gradient.digest,
            **self._recorded(used, skipped=skipped),
            "norm": bits_of(0.0 if skipped else norm),
            "clipped": bits_of(0.0 if skipped else clipped),
            "stale": self._place(raw.stale),
            "raw": raw.sign,
            **self.scale.values(),
            "missing": self._place(self.presence.missing()),
            "scale": 0 if self.settings.scaler is None else bits_of(float(self.settings.scaler.get_scale())),
        }

    def _recorded(self, used: float, *, skipped: bool) -> dict[str, int]:
        """What only a ledger needs: digest and norm of the reduced gradient before clipping, where that was seen."""
        share = self._share
        if self.settings.recording and self._reduced is None:
            share = self._norm_share(self.gradients(), used)
        return {
            "reduced seen": int(self._reduced is not None),
            "reduced": self._reduced or 0,
            "norm share": bits_of(share),
            "skipped": int(skipped),
        }

    def _place(self, member: int) -> int:
        """The place among all parameters of a member, each plus one; 0 for 0."""
        return member and self._slot[self.names[member - 1]] + 1

    def _hyperparameters(self) -> int:
        shown = _hyperparameters_of(self.optimizer)
        return self._nest.digest([shown, [len(g["params"]) for g in self.optimizer.param_groups]])

    def _ungrouped(self) -> int:
        groups = self.optimizer.param_groups
        odd = (
            index
            for index, group, key, value in self._declared
            if group >= len(groups) or not _holds(groups[group].get(key), value)  # the loop may remove groups
        )
        return next(odd, -1) + 1

    def _weights_before(self, step: int) -> Look | None:
        """The weights, where a version says that they were written, and now and then; None: they were not read."""
        read = self._marks() != self._versions or step % _REREAD == 0 or self.synchrony.watchful
        return self._observers["weights"].look(self._members) if read else None

    def _said_of(self, look: Look | None) -> dict[str, int]:
        """The digest of the weights, whether they were read for it, and whether they were written since they were left.

        Before the first update nothing is known of what was left.
        """
        left = self._weights
        if look is not None:
            self._weights = look.digest
        written = left not in (0, self._weights)
        return {"weights": self._weights, "weights read": int(look is not None), "written": int(written)}

    def begin_step(self) -> None:
        """A step with a closure begins, which may move the weights, by a rank's own gradient, before it calls that."""
        self._begun = self._said_of(self._weights_before(self.updates + 1))

    def _reducer(self) -> Reducer:
        """Who was seen to reduce the gradients of this window."""
        mine = [each for each in self.subject.reducers if each.holds(self.held)]
        if self.subject.sharded or any(each.reduces for each in mine):
            return Reducer.KNOWN
        there = sum(p.numel() for p in self._members if p.grad is not None)
        if self._elements_reduced and self._elements_reduced >= there / 2:
            return Reducer.KNOWN
        return Reducer.LEFT_OUT if mine else Reducer.UNKNOWN

    def _marks(self) -> list[int]:
        return [*map(_version, self._members), *map(Tensor.data_ptr, self._members)]

    @property
    def untouched(self) -> bool:
        """Whether no version counter of the weights moved since the last update, of which there was one."""
        return self._marks() == self._versions

    def after(self) -> Callable[[], dict[str, int]]:
        """What is seen just after an update; the count of updates has risen. What is returned waits for it."""
        self.updates, self._begun = self.updates + 1, {}
        seen = self._observers["weights"].look(self._members, norm=self.settings.recording)
        kept = self._kept.look()
        arrive = bring_later(seen.waiting, seen.norms, kept.waiting)
        self._versions = self._marks()
        unmoved = self._motion.unmoved()
        first = unmoved[0] if unmoved else Unmoved(-1, 0.0, 0.0)
        updates, place = self.updates, self._place(first.member + 1)

        def found() -> dict[str, int]:
            arrive()
            self._weights = seen.digest
            share = self._norm_share(self._members, seen.norm) if self.settings.recording else 0.0
            said = {"weights": self._weights, "norm share": bits_of(share), "optimizer": kept.digest}
            due = {"unmoved due": bits_of(first.due), "unmoved spacing": bits_of(first.spacing)}
            return said | {"updates": updates, "unmoved": place} | due

        return found

    def turn(self) -> None:
        """The window is over."""
        self.rows.turn()
        updates, reference = self.updates - self.settings.start, self.settings.reference
        self.audit_due = reference is not None and updates % self.settings.every == 0
        self._begin_window()

    def skip(self) -> None:
        """The window is over without an update, because a loss scaler found a gradient that is not finite."""
        self.skipped += 1
        self.rows.pass_over()
        self._begin_window()

    def _begin_window(self) -> None:
        self.taps.reset()
        self.scale.clear()
        self.looks.clear()
        for each in self.subject.reducers:
            each.turn()
        self._forget_reduced()

    def _forget_reduced(self) -> None:
        self._norm, self._reduced, self.gradient_before_clip = None, None, None
        self._elements_reduced = 0
        self.reductions.clear()
        self._clips.clear()

    def discard(self) -> None:
        """The gradients were thrown away, perhaps with nothing in them: what the window showed is of no concern."""
        if self.taps.started or self.rows.ids:
            self.taps.discard()
        self._forget_reduced()

    def _thrown_away(self) -> None:
        self.rows.discard()
        self.scale.clear()
        self._forget_reduced()

    def close(self) -> None:
        """Take every hook off."""
        self.taps.close()
        self.presence.close()


def _declared_values(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    slot: Mapping[str, int],
    settings: Settings,
) -> list[tuple[int, int, str, Any]]:
    """(index of the parameter, of its group, hyperparameter, value) for what `groups` says of names."""
    place = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return [
        (slot[name], place[id(parameter)], key, value)
        for name, parameter in parameters.items()
        for pattern, values in settings.groups.items()
        if fnmatch.fnmatchcase(name, pattern)
        for key, value in values.items()
    ]


def hyperparameters_by_key(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The digest of each hyperparameter of each group, as it is compared."""
    return {
        f"{k} of group {i}": kept_digest(v)
        for i, group in enumerate(_hyperparameters_of(optimizer))
        for k, v in group.items()
    }


def _hyperparameters_of(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """By group, each hyperparameter as it is compared; tensors of one element as numbers."""
    return [
        {
            k: float(v) if isinstance(v, Tensor) and v.numel() == 1 else v
            for k, v in group.items()
            if not k.startswith("param")
        }
        for group in optimizer.param_groups
    ]


def _holds(held: object, value: object) -> bool:
    """Whether `held` is `value`, at the precision of a tensor that holds it."""
    if isinstance(held, Tensor) and held.numel() == 1 and held.is_floating_point() and isinstance(value, float | int):
        return math.isclose(float(held), value, rel_tol=torch.finfo(held.dtype).eps)
    return bool(held == value)
