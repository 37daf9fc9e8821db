"""A script on the bench: each trial is its command on one layout, against the same global batch on one rank."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from andon_falsify.campaign.bench import Bench
from andon_falsify.campaign.trial import RESUME, Trial
from andon_falsify.claims.evidence import Evidence, RunUnavailable
from andon_falsify.scripts import Command, Done, run
from andon_falsify.subjects.case import Case, make_rows
from andon_falsify.verdict import ExtraRun

_GLOBAL_BATCH = 12
"""Rows of a global batch: it can be dealt to 1, 2, 3, 4 and 6 micro-batches."""
_TIMES = 6
"""A script starts torch on every rank, so a run may take this many times as long as on warm ranks."""
_PLAIN = Case(
    rows=make_rows(3),
    batch_size=_GLOBAL_BATCH,
    max_steps=1,
    optimizer="sgd",
    weight_decay=0.0,
    clip_norm=None,
    hidden=8,
    heads=1,
    inner=8,
    rank=1,
    dropout=0.0,
    backend="script",
)
"""A script receives only the layout of a case: rows, model and seed are its own."""

Layout = tuple[int, int, int]
"""Ranks, rows of a micro-batch, micro-batches of a rank in an update: all that distinguishes two runs of a script."""


def open_script(command: str, deadline_s: float) -> ScriptBench:
    """The bench of a command with placeholders, see `Command`. deadline_s: the budget's, for one run of a loop.

    Raises `InputError` for a command that cannot be laid out.
    """
    return ScriptBench(Command.read(command), deadline_s)


class ScriptBench(Bench):
    """Runs trials by a user's command. Each layout is run once, and resumed once."""

    kind = "script"
    every_backend: tuple[str, ...] = ("script",)

    def __init__(self, command: Command, deadline_s: float) -> None:
        super().__init__(command.text, words=("--script", command.text))
        self._command = command
        self._deadline_s = _TIMES * deadline_s
        self._runs = 0
        self._done: dict[tuple[Layout, bool], Done] = {}
        self._resumed: dict[Layout, Mapping[ExtraRun, Evidence]] = {}

    @property
    def runs(self) -> int:
        return self._runs

    def suited(self, case: Case) -> Case:
        """See `Bench.suited`: the layout alone, at one global batch for all."""
        accumulation = case.accumulation if self._command.accumulates else 1
        leaves = case.world * accumulation
        batch = _GLOBAL_BATCH if _GLOBAL_BATCH % leaves == 0 else leaves
        return _PLAIN.but(world=case.world, micro_batches=leaves, batch_size=batch)

    def inapplicable(self, trial: Trial) -> str:
        """See `Bench.inapplicable`."""
        if trial.kind == RESUME and not self._command.resumes:
            return "the command does not say how it resumes ({resume:WORDS} and {folder})"
        return ""

    def evidence(self, trial: Trial) -> Evidence:
        """See `Bench.evidence`."""
        return replace(self._run(trial.case), further=partial(self._further, trial.case))

    def _further(self, case: Case, name: ExtraRun) -> Mapping[ExtraRun, Evidence]:
        alone = case.but(world=1, micro_batches=1)
        if name == "alone":
            return {name: self._run(alone, what="the run on one rank to compare with: ")}
        if name == "again":
            return {name: self._run(alone, once_more=True, what="the run on one rank, once more: ")}
        if name not in ("cut", "resumed"):
            return {}
        if _layout(case) not in self._resumed:
            self._resumed[_layout(case)] = self._cut_and_resume(case)
        return self._resumed[_layout(case)]

    def _run(self, case: Case, *, once_more: bool = False, what: str = "") -> Evidence:
        key = _layout(case), once_more
        if key not in self._done:
            with tempfile.TemporaryDirectory(prefix="andon-script-") as folder:
                self._runs += 1
                words = self._command.words(case, str(Path(folder) / "run"))
                self._done[key] = run(words, Path(folder), self._deadline_s)
        return _sound(self._done[key], case, what)

    def _cut_and_resume(self, case: Case) -> Mapping[ExtraRun, Evidence]:
        """A run that is killed half-way, and its resumption in the same folder."""
        updates = len(self._run(case).history.trajectory)
        half = -(-updates // 2)
        for after in (half, 1, 1):  # a short run may be over before it is killed
            with tempfile.TemporaryDirectory(prefix="andon-script-") as folder:
                base, own = Path(folder), str(Path(folder) / "run")
                self._runs += 1
                cut = run(self._command.words(case, own), base / "cut", self._deadline_s, partial(_reached, after))
                if not cut.error and len(cut.history.trajectory) < updates:
                    self._runs += 1
                    again = run(self._command.words(case, own, resumed=True), base / "again", self._deadline_s)
                    return {"cut": _evidence(cut, case), "resumed": _sound(again, case)}
        raise RunUnavailable(cut.error or "it ended by itself, three times, before it could be killed half-way")


def _sound(done: Done, case: Case, what: str = "") -> Evidence:
    """The evidence of a run that ended well and has a ledger of its layout. Raises `RunUnavailable`."""
    worlds = {step.world for step in done.history.steps} - {case.world}
    why = done.error
    if not why and done.stray:
        why = f"it left processes behind, which were ended: {', '.join(done.stray)}"
    elif not why and not done.history.steps:
        why = "its ledger has no update: the watch observed no step of its optimizer"
    elif not why and worlds:
        why = f"it was to train on {case.world} ranks, and its ledger says {worlds.pop()}"
    if why:
        raise RunUnavailable(f"{what}{why}")
    return _evidence(done, case)


def _evidence(done: Done, case: Case) -> Evidence:
    name = f"{case.world} ranks x {case.accumulation} x {case.local_batch} rows"
    layout = {"world": case.world, "accumulation": case.accumulation}
    return Evidence(None, replace(done.history, name=name), "script", layout=layout)


def _layout(case: Case) -> Layout:
    return case.world, case.local_batch, case.accumulation


def _reached(step: int, ledger: Path) -> bool:
    try:
        return ledger.read_bytes().count(b'"kind":"step"') >= step
    except FileNotFoundError:
        return False
