"""A trial: one case and what is done with it; how trials are written and read (`--case`), and drawn from a seed.

The text is JSON with the fields that differ from the default case, without backend, world size and accumulation, which
have options of their own. Rows that `make_rows` draws are written as `[how many, seed]`.

The same seed draws the same trials on any machine. Rows are sorted by label and drawn at random, so that ranks train on
different data. Batches are ragged by default: the last one of an epoch has fewer rows, and not equally many on each
rank.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from andon_falsify.report.document import misfits
from andon_falsify.subjects.case import Case, Poison, make_rows

LAW, HALT, RESUME, MEMORY = "law", "halt", "resume", "memory"
KINDS = (LAW, HALT, RESUME, MEMORY)
"""law: one run, compared with the reference and with one rank. halt: a run with a planted NaN. resume: a run that is
interrupted and resumed. memory: a run that counts bytes."""

_ROW_SEEDS = 64
_NOT_WRITTEN = ("world", "backend", "folder")
_OF_A_SCRIPT = "batch_size"
"""Apart from the layout, the only field that applies to a script, which has its own rows, model and optimizer."""
_DRAWN = TypeAdapter(tuple[PositiveInt, NonNegativeInt])


@dataclass(frozen=True)
class Trial:
    """A case and what is done with it. seed: what it was drawn from. then_world: ranks of the run that resumes."""

    kind: Annotated[str, Field(pattern=f"^({'|'.join(KINDS)})$")]
    case: Case
    seed: int = 0
    then_world: NonNegativeInt = 0

    @property
    def place(self) -> tuple[str, int, int]:
        """Backend, world size and accumulation."""
        return self.case.backend, self.case.world, self.case.accumulation

    @property
    def title(self) -> str:
        backend, world, accumulation = self.place
        return f"{self.kind} at {backend}, world {world}, accumulation {accumulation}"

    @property
    def lacking(self) -> str:
        """What this machine lacks to run the trial, or ""."""
        from andon_falsify.subjects.placing import why_not

        return why_not(self.case.backend, max(self.case.world, self.then_world))

    @cached_property
    def written(self) -> str:
        """Everything but the place and the seed, as compact JSON."""
        case, plain = asdict(self.case), asdict(Case(micro_batches=self.case.world * self.case.accumulation))
        found: dict[str, Any] = {} if self.kind == LAW else {"kind": self.kind}
        if self.then_world:
            found["then_world"] = self.then_world
        names = [_OF_A_SCRIPT] if self.case.backend == "script" else [name for name in case if name not in _NOT_WRITTEN]
        found |= {name: case[name] for name in names if case[name] != plain[name]}
        if "rows" in found:
            count = len(self.case.rows)
            drawn = ([count, seed] for seed in range(_ROW_SEEDS) if make_rows(count, seed) == self.case.rows)
            found["rows"] = next(drawn, found["rows"])
        return json.dumps(found, separators=(",", ":"))


def read_trial(text: str, *, backend: str, world: int, accumulation: int, seed: int) -> Trial:
    """The trial that `Trial.written` wrote. Raises `ValueError` with everything that is wrong."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"is not JSON: {error}"
        raise ValueError(msg) from None
    if not isinstance(given, dict):
        msg = f"must be a JSON object, not {given!r}"
        raise ValueError(msg)
    known = asdict(Case()).keys() - set(_NOT_WRITTEN)
    unknown = sorted(given.keys() - known - _OF_A_TRIAL)
    wrong = [f"a case has no {name!r}; it has {', '.join(sorted(known))}" for name in unknown]
    of_trial = {name: given.pop(name) for name in _OF_A_TRIAL & given.keys()}
    try:
        if isinstance(given.get("rows"), list):
            given["rows"] = asdict(make_rows(*_DRAWN.validate_python(given["rows"], strict=False)))
        case = {"micro_batches": world * accumulation, **given, "backend": backend, "world": world}
        trial = _TRIAL.validate_json(json.dumps({"kind": LAW, "case": case, "seed": seed, **of_trial}), strict=True)
    except ValidationError as error:
        named = [(where.removeprefix("case."), what) for where, what in misfits(error)]
        wrong += [f"rows{where} {what}" if where[:1] in "[" else f"{where} {what}" for where, what in named]
    else:
        wrong += _contradictions(trial.case)
    if wrong:
        raise ValueError("; ".join(wrong))
    return trial


_TRIAL = TypeAdapter(Trial)
_OF_A_TRIAL = {"kind", "then_world"}


def _contradictions(case: Case) -> list[str]:
    rows, found = case.rows, []
    if not rows.labels or len(rows.tokens) != len(rows.labels) or not all(rows.tokens):
        found.append("rows need a label and at least one token each")
    if not all(0 <= label < rows.classes for label in rows.labels):
        found.append(f"labels of rows must be from 0 to {rows.classes - 1}")
    if case.hidden % case.heads:
        found.append(f"hidden {case.hidden} cannot be divided among {case.heads} heads")
    if case.class_weights is not None and len(case.class_weights) != rows.classes:
        found.append(f"{len(case.class_weights)} class_weights for {rows.classes} classes")
    if case.poison is not None and case.poison.leaf >= case.micro_batches:
        found.append(f"poison in micro-batch {case.poison.leaf}, but there are only {case.micro_batches}")
    if (longest := max(map(len, rows.tokens), default=0)) > case.longest:
        found.append(f"a row has {longest} tokens, but longest is {case.longest}")
    return found


@dataclass(frozen=True)
class Variant:
    """How a case is trained. name: a part of the seed of what is drawn."""

    name: str
    settings: Mapping[str, Any]
    ragged: bool = True


_SGD = {"optimizer": "sgd", "clip_norm": None, "lr": 0.05, "weight_decay": 0.0}
_QUICK = (
    Variant("SGD, no clipping, even batches", _SGD, ragged=False),
    Variant("SGD, no clipping, ragged", _SGD),
    Variant("AdamW, clipped, ragged", {"optimizer": "adamw", "clip_norm": 0.5, "lr": 1e-2, "weight_decay": 0.01}),
)
_ALL = (
    *_QUICK,
    Variant("SGD with momentum, encoder", {**_SGD, "momentum": 0.9, "lr": 0.02, "architecture": "encoder"}),
    Variant("AdamW, every weight", {"rank": 0, "lr": 1e-3, "clip_norm": None, "weight_decay": 0.01}),
    Variant("SGD, class weights, two layers", {**_SGD, "class_weights": (0.5, 1.0, 2.0), "layers": 2}),
    # Such gradients have norms of 0.7 to 3.5: it shows if one is scaled up to the limit.
    Variant("SGD, norms on both sides of the clip, ragged", {**_SGD, "clip_norm": 1.3}),
)


@dataclass(frozen=True)
class Budget:
    """The size of a campaign.

    kinds: of trials; claims that none of them judges are not selected. draws: cases for each layout and variant.
    deadline_s: for one run of a subject. most_late: this many late runs at one world size end the attempts at that
    size. shrink_s: for the search for smaller counterexamples, of all claims together.
    """

    name: str
    kinds: tuple[str, ...]
    worlds: tuple[int, ...]
    accumulations: tuple[int, ...]
    variants: tuple[Variant, ...]
    draws: int
    deadline_s: float
    shrink_s: float
    most_late: int = 2


BUDGETS: Mapping[str, Budget] = {
    "quick": Budget("quick", (LAW, HALT, RESUME), (2, 3), (1, 2), _QUICK, 1, 60.0, 30.0),
    "standard": Budget("standard", (LAW, HALT, RESUME, MEMORY), (2, 3, 4), (1, 2, 3), _ALL, 1, 90.0, 120.0),
    "deep": Budget("deep", (LAW, HALT, RESUME, MEMORY), (1, 2, 3, 4), (1, 2, 3), _ALL, 8, 180.0, 600.0),
}
"""By name, smallest first."""


@dataclass(frozen=True)
class Layouts:
    """Where a subject is tested: all combinations of these."""

    backends: tuple[str, ...]
    worlds: tuple[int, ...]
    accumulations: tuple[int, ...]


def draw(seed: int, budget: Budget, layouts: Layouts, kinds: Collection[str]) -> Iterator[Trial]:
    """The trials of `kinds` that `budget` has for `layouts`; the cheapest and most telling first."""
    places = list(product(layouts.backends, layouts.worlds, layouts.accumulations))
    if LAW in budget.kinds and LAW in kinds:
        for number, variant in product(range(budget.draws), budget.variants):
            for backend, world, accumulation in places:
                yield Trial(LAW, _case(seed, number, variant, world, accumulation).but(backend=backend), seed)
    for kind in budget.kinds:
        if kind == LAW or kind not in kinds:
            continue
        # A run is interrupted and resumed with an optimizer that has state: otherwise its loss would go unnoticed.
        variants = [
            each
            for each in budget.variants
            if kind != RESUME or each.settings.get("optimizer") != "sgd" or each.settings.get("momentum")
        ] or budget.variants
        for (at, (backend, world, accumulation)), number in product(enumerate(places), range(budget.draws)):
            case = _case(seed, number, variants[(at + number) % len(variants)], world, accumulation)
            drawn = random.Random(f"{kind} {seed} {number} {world} {accumulation}")
            yield _special(kind, drawn, case.but(backend=backend), seed, layouts.worlds)


def _case(seed: int, number: int, variant: Variant, world: int, accumulation: int) -> Case:
    drawn = random.Random(f"case {seed} {number} {variant.name} {world} {accumulation}")
    leaves = world * accumulation
    batch = leaves * drawn.randint(2 if leaves == 1 else 1, 3)
    whole = drawn.randint(1, 2)
    rest = drawn.choice([size for size in range(1, batch) if size % leaves or leaves == 1]) if variant.ragged else 0
    while whole * batch + rest < 3:
        whole += 1
    return Case(
        rows=make_rows(whole * batch + rest, drawn.randrange(32)),
        batch_size=batch,
        micro_batches=leaves,
        epochs=2,
        seed=drawn.randrange(1000),
        dropout=drawn.choice([0.0, 0.1]),
        world=world,
        **variant.settings,
    )


def _special(kind: str, drawn: random.Random, case: Case, seed: int, worlds: tuple[int, ...]) -> Trial:
    if kind == HALT:  # in any micro-batch of the first or second update, which have all their rows
        whole, rest = divmod(len(case.rows), case.batch_size)
        longer = case.but(rows=make_rows(max(2, whole) * case.batch_size + rest, drawn.randrange(32)))
        place = drawn.randint(1, 2), drawn.randrange(case.micro_batches)
        return Trial(kind, longer.but(poison=Poison(*place, drawn.choice(["nan", "inf", "gradient"]))), seed)
    if kind == RESUME:  # interrupted between a checkpoint and the last update
        each = case.updates_of_epoch()
        longer = case.but(epochs=max(case.epochs, -(-3 // each)))
        updates = each * longer.epochs
        every = drawn.randint(1, updates - 2)
        after = drawn.randint(every + 1, updates - 1)
        return Trial(kind, longer.but(stop_after=after, checkpoint_every=every), seed, drawn.choice(worlds))
    # MEMORY: a model so large that its gradients weigh more than the fixed costs
    big = case.but(rows=make_rows(40), batch_size=8, micro_batches=8, epochs=1, class_weights=None, layers=1, rank=16)
    counting = {"values": False, "memory": True, "seed": drawn.randrange(1000)}
    return Trial(kind, big.but(hidden=64, inner=128, dropout=0.1, **counting), seed)
