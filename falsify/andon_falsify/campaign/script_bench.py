"""A script on the bench: each trial is its command on one layout, against the same global batch on one rank."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from andon_falsify import checkers
from andon_falsify.campaign.trial import LAW, RESUME, Trial
from andon_falsify.claims import loss_finite, samples_once
from andon_falsify.claims.evidence import SCRIPT, Evidence
from andon_falsify.claims.layouts import not_seeded, unlike
from andon_falsify.claims.table import judged, judged_by
from andon_falsify.history import History
from andon_falsify.scripts.command import Command
from andon_falsify.scripts.running import Done, run
from andon_falsify.subjects.case import Case, make_rows
from andon_falsify.verdict import Claim, Outcome, Verdict, judge, not_applicable, unknown

_GLOBAL_BATCH = 12
"""Rows of a global batch: it can be dealt to 1, 2, 3, 4 and 6 micro-batches."""
_TIMES = 6
"""A script starts torch anew on every rank, so that a run may take so many times what one of a warm rank may."""
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
"""A script has its own rows, model and seed: of a case only the layout says something to it."""

Layout = tuple[int, int, int]
"""Ranks, rows of a micro-batch, micro-batches of a rank in an update: all that distinguishes two runs of a script."""

ONE_RUN: tuple[Claim, ...] = (
    checkers.replicas_agree.CLAIM,
    samples_once.CLAIM,
    checkers.same_everywhere.CLAIM,
    loss_finite.CLAIM,
    checkers.chain_intact.CLAIM,
)


_ROUNDED = f"to {SCRIPT.norm:g} of them at the first update, and to more later, since differences of rounding grow"
_COMPARED = {
    checkers.same_everywhere.CLAIM.name: "The same global batches on another number of ranks, or in micro-batches of "
    f"another size, give as many updates with the same rates, and the same losses and norms {_ROUNDED}.",
    checkers.resume_equal.CLAIM.name: "A run that was killed and taken up by the command makes the updates of one that "
    f"was not: the same rows and rates, and the same losses and norms {_ROUNDED}.",
}
"""What a command's run is held to where more is claimed of our own trainer."""


def _as_compared(claim: Claim) -> Claim:
    return replace(claim, statement=_COMPARED.get(claim.name, claim.statement))


def open_script(command: str, deadline_s: float) -> ScriptBench:
    """The bench of a command with placeholders, see `Command`. deadline_s: the budget's, for one run of a loop.

    Raises `InputError` for a command that cannot be laid out.
    """
    return ScriptBench(Command.read(command), deadline_s)


class ScriptBench:
    """Runs trials by a user's command. See `Bench`."""

    def __init__(self, command: Command, deadline_s: float) -> None:
        self.subject = command.text
        self.version = ""
        self.words: tuple[str, ...] = ("--script", command.text)
        self.backends: tuple[str, ...] = ("script",)
        self.every_backend: tuple[str, ...] = ("script",)
        self.claims: tuple[Claim, ...] = tuple(map(_as_compared, (*ONE_RUN, checkers.resume_equal.CLAIM)))
        self.kinds: Mapping[str, frozenset[str]] = {
            LAW: frozenset(claim.name for claim in ONE_RUN),
            RESUME: frozenset({checkers.resume_equal.CLAIM.name}),
        }
        self.runs = 0
        self._command = command
        self._deadline_s = _TIMES * deadline_s
        self._known: dict[Layout, Done] = {}
        self._once_more: dict[Layout, Done] = {}
        self._taken_up: dict[Layout, Verdict] = {}

    def suited(self, case: Case) -> Case:
        """See `Bench.suited`: the layout alone, at one global batch for all."""
        accumulation = case.accumulation if self._command.accumulates else 1
        leaves = case.world * accumulation
        batch = _GLOBAL_BATCH if _GLOBAL_BATCH % leaves == 0 else leaves
        return _PLAIN.but(world=case.world, micro_batches=leaves, batch_size=batch)

    def attempt(self, trial: Trial) -> Mapping[str, Verdict]:
        """See `Bench.attempt`."""
        if trial.kind == RESUME:
            return {checkers.resume_equal.CLAIM.name: self._resuming(trial.case)}
        done = self.done(trial.case)
        why = self._fault(done, trial.case)
        if why:
            return {claim.name: unknown(claim, why) for claim in ONE_RUN}
        plain = [claim for claim in ONE_RUN if claim is not checkers.same_everywhere.CLAIM]
        found = judged(_evidence(done.history, {}), plain) | {
            checkers.same_everywhere.CLAIM.name: self._elsewhere(trial.case, done.history)
        }
        return {claim.name: found[claim.name] for claim in ONE_RUN}

    def done(self, case: Case) -> Done:
        """The run on the layout of `case`; each layout is run once."""
        return self._run_once(case, self._known)

    def _run_once(self, case: Case, known: dict[Layout, Done]) -> Done:
        layout = _layout(case)
        if layout not in known:
            with tempfile.TemporaryDirectory(prefix="andon-script-") as folder:
                self.runs += 1
                words = self._command.words(case, str(Path(folder) / "run"))
                known[layout] = run(words, Path(folder), self._deadline_s)
        return known[layout]

    def _fault(self, done: Done, case: Case) -> str:
        if done.error:
            return done.error
        if done.stray:
            return f"it left processes behind, which were ended: {', '.join(done.stray)}"
        if not done.history.steps:
            return "its ledger has no update: the watch saw no step of the optimizer that it was given"
        worlds = {step.world for step in done.history.steps} - {case.world}
        return f"it was asked to train on {case.world} ranks, and its ledger says {worlds.pop()}" if worlds else ""

    def _elsewhere(self, case: Case, history: History) -> Verdict:
        alone = case.but(world=1, micro_batches=1)
        if (case.world, case.accumulation) == (1, 1):
            return not_applicable(
                checkers.same_everywhere.CLAIM, "this is the layout that the others are compared with"
            )
        done = self.done(alone)
        why = self._fault(done, alone)
        if why:
            return unknown(checkers.same_everywhere.CLAIM, f"the run on one rank to compare with: {why}")
        named = replace(history, name=f"{case.world} ranks x {case.accumulation} x {case.local_batch} rows")
        layout = {"world": case.world, "accumulation": case.accumulation}
        found = judged_by(checkers.same_everywhere.CLAIM, _evidence(named, layout, alone=done.history))
        why = "" if found.outcome is Outcome.HOLDS else self._not_seeded(alone, done.history)
        return unknown(checkers.same_everywhere.CLAIM, why) if why else found

    def _not_seeded(self, alone: Case, history: History) -> str:
        """Why nothing can be compared with `history`, the run on one rank: the same once more differs; "" if not."""
        again = self._run_once(alone, self._once_more)
        if why := self._fault(again, alone):
            return f"the run on one rank, once more: {why}"
        apart = unlike(history, again.history)
        return not_seeded("two runs on one rank", apart) if apart else ""

    def _resuming(self, case: Case) -> Verdict:
        """What is said of resuming on the layout of `case`; each layout is tried once."""
        layout = _layout(case)
        if layout not in self._taken_up:
            self._taken_up[layout] = judge(checkers.resume_equal.CLAIM, self._resumed, case)
        return self._taken_up[layout]

    def _resumed(self, case: Case) -> Verdict:
        """The run on this layout, and the same one killed half-way and taken up in the same folder."""
        claim = checkers.resume_equal.CLAIM
        if not self._command.resumes:
            return not_applicable(claim, "the command does not say how it resumes ({resume:WORDS} and {folder})")
        whole = self.done(case)
        why = self._fault(whole, case)
        if why:
            return unknown(claim, why)
        half = -(-len(whole.history.trajectory) // 2)
        for after in (half, 1, 1):  # a short run may be over before it is killed
            cut, again = self._cut_and_taken_up(case, after, len(whole.history.trajectory))
            if again is not None:
                break
        if again is None:
            return unknown(claim, cut.error or "it ended by itself, three times, before it could be killed half-way")
        why = self._fault(again, case)
        if why:
            return unknown(claim, why)
        evidence = _evidence(whole.history, {}, **{"cut": cut.history, "taken up": again.history})
        return judged_by(claim, evidence)

    def _cut_and_taken_up(self, case: Case, after: int, updates: int) -> tuple[Done, Done | None]:
        """A run that is killed once its ledger shows the update `after`, and the one that goes on in its folder.

        None for that where the first had failed, or had made all its `updates`.
        """
        with tempfile.TemporaryDirectory(prefix="andon-script-") as folder:
            base, own = Path(folder), str(Path(folder) / "run")
            self.runs += 1
            cut = run(self._command.words(case, own), base / "cut", self._deadline_s, partial(_reached, after))
            if cut.error or len(cut.history.trajectory) >= updates:
                return cut, None
            self.runs += 1
            return cut, run(self._command.words(case, own, resumed=True), base / "again", self._deadline_s)


def _layout(case: Case) -> Layout:
    return case.world, case.local_batch, case.accumulation


def _reached(step: int, ledger: Path) -> bool:
    try:
        return ledger.read_bytes().count(b'"kind":"step"') >= step
    except FileNotFoundError:
        return False


def _evidence(history: History, layout: Mapping[str, int], **others: History) -> Evidence:
    held = {name: (_evidence(other, {}),) for name, other in others.items()}
    return Evidence(None, history, SCRIPT, others=held, of_script=True, layout=layout)
