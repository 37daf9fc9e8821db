"""One optimizer of a watched loop: what is observed of it just before its update and just after."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from andon_contracts.agree import bits_of
from andon_contracts.observe import Look, Observer, extremes, numbers, plain
from andon_contracts.watch.gradient_coverage import GradientCoverage
from andon_contracts.watch.gradient_hooks import GradientHooks, Reductions
from andon_contracts.watch.model_probe import ModelProbe
from andon_contracts.watch.optimizer_state import OptimizerState
from andon_contracts.watch.rows import Rows
from andon_contracts.watch.settings import Settings
from andon_contracts.watch.values import Nest, Text, kept_digest, layout_digest, state_digest

_REREAD = 16
"""The weights are read again before every so many-th update, whatever their versions say."""
_SPARSE = 64
_NOISE = 1e-5
"""Gradients that are so much smaller than the largest are rounding errors of zero, as before a batch norm."""
_version = attrgetter("_version")


class OptimizerProbe:
    """The parameters of one optimizer, the hooks on them, and what the present window of the loop showed."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, subject: ModelProbe, settings: Settings, rows: Rows, world: int
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
        self.taps = GradientHooks(held, self._thrown_away)
        self.presence = GradientCoverage(held, self.names, subject, self.taps)
        self.reductions = Reductions(held)
        self.buffers: int | None = None
        self.gradient_before_clip: list[Tensor] | None = None
        self.audit_due = settings.reference is not None
        self._members = tuple(held)
        self._mine = {id(p) for p in held}
        self._layout = layout_digest(self.parameters)
        self._slot = {name: index for index, name in enumerate(subject.names)}
        self._declared = self._declared_values()
        self._norm: float | None = None
        self._reduced: int | None = None
        self._share = 0.0
        self.moments_equal = False
        """Whether there was an update, and all ranks were seen to keep the same optimizer state after the last one."""
        self._weights = 0
        self._versions: list[int] = []
        self._kept = OptimizerState(optimizer, held)
        self._observers = {"gradient": Observer(), "weights": Observer(stable=True)}
        self._texts = {"present": Text(), "modes": Text()}
        self._nest = Nest()
        self._before: list[Tensor] = []
        self._moving: list[int] = []

    def _declared_values(self) -> list[tuple[int, int, str, Any]]:
        """(index of the parameter, of its group, hyperparameter, value) for what `groups` says of names."""
        place = {id(p): g for g, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        return [
            (self._slot[name], place[id(parameter)], key, value)
            for name, parameter in self.parameters.items()
            for pattern, values in self.settings.groups.items()
            if fnmatch.fnmatchcase(name, pattern)
            for key, value in values.items()
        ]

    @property
    def rate(self) -> float:
        """The learning rate of the first group."""
        return float(self.optimizer.param_groups[0].get("lr", 0.0))

    def gradients(self) -> list[Tensor]:
        """The gradients that are there now, in order."""
        return [p.grad for p in self._members if p.grad is not None]

    def clipping(self, parameters: Sequence[Tensor], norm: Tensor | None) -> None:
        """The loop is about to clip: what there is now is the reduced gradient."""
        if self.taps.muted or not any(id(p) in self._mine for p in parameters):
            return
        if norm is not None and self._norm is None and self.settings.clip is None and not self.settings.recording:
            self._norm = float(norm)
        self.reduced()

    def reduced(self) -> None:
        """What there is now is the reduced gradient, before clipping."""
        if self._norm is None and (self.settings.clip is not None or self.settings.recording):
            seen = self._look_at_gradient(norm=True)
            self._norm = seen.norm
            if self.settings.recording:
                self._reduced = seen.digest
                self._share = self._norm_share(self.gradients(), self._norm)
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
        if self.taps.muted or not (group is None or group is dist.group.WORLD):
            return
        self.reductions.add(tensor)

    def before(self) -> dict[str, int]:
        """What is seen just before an update, as integers; the names and their number never change."""
        step = self.updates + 1
        overflow = getattr(self.optimizer, "found_inf", None)
        skipped = overflow is not None and bool(overflow)
        raw = self.taps.read()
        # The loop's own clipping has said the norm; what is left of it then matters to few.
        told = self._norm
        asked = told is None or bool(raw.nonfinite) or self.settings.clip is not None or self.settings.recording
        gradient = self._look_at_gradient(norm=asked)
        used = gradient.norm if asked or told is None else told
        norm = used if told is None else told
        bad = 0 if skipped else raw.nonfinite
        self.presence.window(raw)
        self._remember(step)
        return {
            "change": self.subject.change(self.optimizer),
            "layout": self._layout,
            "hyperparameters": self._hyperparameters(),
            "rate": bits_of(self.rate),
            "planned": bits_of(self.rate if self.settings.schedule is None else float(self.settings.schedule(step))),
            "ungrouped": self._ungrouped(),
            "modes": self._texts["modes"].digest(self.subject.modes()),
            "buffers": 0 if self.buffers is None else self.buffers,
            "nonfinite": self._place(bad),
            "repaired": int(bad > 0 and used < float("inf")),
            "collectives": self.reductions.digest(),
            "strided": self._place(self.reductions.strided),
            **self._weights_before(step),
            "gradient": gradient.digest,
            **self._recorded(used, skipped=skipped),
            "norm": bits_of(0.0 if skipped else norm),
            "clipped": bits_of(0.0 if skipped else used),
            "stale": self._place(raw.stale),
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

    def hyperparameters_by_key(self) -> dict[str, int]:
        """The digest of each hyperparameter of each group, as it is compared."""
        return {f"{k} of group {i}": kept_digest(v) for i, group in enumerate(self._shown()) for k, v in group.items()}

    def _shown(self) -> list[dict[str, object]]:
        return [
            {
                k: float(v) if isinstance(v, Tensor) and v.numel() == 1 else v
                for k, v in group.items()
                if not k.startswith("param")
            }
            for group in self.optimizer.param_groups
        ]

    def _hyperparameters(self) -> int:
        shown = self._shown()
        return self._nest.digest([shown, [len(g["params"]) for g in self.optimizer.param_groups]])

    def _ungrouped(self) -> int:
        groups = self.optimizer.param_groups
        odd = (index for index, group, key, value in self._declared if groups[group].get(key) != value)
        return next(odd, -1) + 1

    def _weights_before(self, step: int) -> dict[str, int]:
        """The digest of the weights, and whether they were read for it.

        They are where a version says that they were written, and now and then; else it is that of the update before.
        """
        read = self._marks() != self._versions or step % _REREAD == 0
        if read:
            self._weights = self._observers["weights"].look(self._members).digest
        return {"weights": self._weights, "weights read": int(read)}

    def _marks(self) -> list[int]:
        return [*map(_version, self._members), *map(Tensor.data_ptr, self._members)]

    @property
    def untouched(self) -> bool:
        """Whether no version counter of the weights moved since the last update, of which there was one."""
        return self._marks() == self._versions

    def _remember(self, step: int) -> None:
        window = step - self.settings.start
        self._before, self._moving = [], []
        if window <= 4 or window & (window - 1) == 0 or window % _SPARSE == 0:
            self._before = [plain(p).clone() for p in self._members]
            rates = {id(p): float(group.get("lr", 1)) for group in self.optimizer.param_groups for p in group["params"]}
            found = [
                (i, *extremes(p.grad))
                for i, p in enumerate(self._members)
                if p.grad is not None and plain(p.grad).numel() and rates[id(p)]
            ]
            lows, highs = numbers([low for _, low, _ in found]), numbers([high for _, _, high in found])
            sizes = {i: max(abs(low), abs(high)) for (i, _, _), low, high in zip(found, lows, highs, strict=True)}
            least = _NOISE * max(sizes.values(), default=0.0)
            self._moving = [i for i, size in sizes.items() if size > least]

    def after(self) -> dict[str, int]:
        """What is seen just after an update; the count of updates has risen."""
        self.updates += 1
        seen = self._observers["weights"].look(self._members, norm=self.settings.recording)
        kept = self._kept.look()
        self._weights = seen.digest
        self._versions = self._marks()
        share = self._norm_share(self._members, seen.norm) if self.settings.recording else 0.0
        unmoved = [i for i in self._moving if torch.equal(self._before[i], plain(self._members[i]))]
        self._before, self._moving = [], []
        return {
            "weights": self._weights,
            "norm share": bits_of(share),
            "optimizer": kept.digest,
            "updates": self.updates,
            "unmoved": 0 if not unmoved else self._slot[self.names[unmoved[0]]] + 1,
        }

    def state_by_name(self) -> dict[str, int]:
        """The digest of what the optimizer keeps for each parameter."""
        return {name: state_digest(self.optimizer.state.get(p, {})) for name, p in self.parameters.items()}

    def gradients_by_name(self) -> Mapping[str, Tensor]:
        """The gradient of each parameter; an empty tensor where there is none."""
        return {n: torch.empty(0) if p.grad is None else p.grad for n, p in self.parameters.items()}

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
        self.buffers = None
        self._forget_reduced()

    def _forget_reduced(self) -> None:
        self._norm, self._reduced, self.gradient_before_clip = None, None, None
        self.reductions.clear()

    def discard(self) -> None:
        """The gradients were thrown away, perhaps with nothing in them: what the window showed is of no concern."""
        if self.taps.started or self.rows.ids:
            self.taps.discard()
        self._forget_reduced()

    def _thrown_away(self) -> None:
        self.rows.discard()
        self._forget_reduced()

    def close(self) -> None:
        """Take every hook off."""
        self.taps.close()
        self.presence.close()
