"""Judges recorded runs for `andon verify`: ledgers, and the files in their run folders. Nothing is run again."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from andon.console.messages import InputError, Problem, command_line
from andon_falsify.claims import claims_of, judged_by
from andon_falsify.claims.evidence import Evidence
from andon_falsify.history import History, read_history
from andon_falsify.verdict import Claim, Verdict, merge, unknown

if TYPE_CHECKING:
    from andon.config.schema import Config

ALL: tuple[Claim, ...] = claims_of("ledger")
"""The claims that `verify` judges."""
_TOGETHER = ("same-everywhere", "resume-equal")
"""Claims that are judged of all ledgers together."""


@dataclass(frozen=True)
class RecordedRun:
    """A ledger, with its run folder if it has one."""

    path: Path
    history: History
    folder: Path | None

    def config(self) -> Config | None:
        """The configuration in the folder, if there is one. Raises `InputError`."""
        path = None if self.folder is None else self.folder / "config.yaml"
        if path is None or not path.exists():
            return None
        from andon.config.load import load_config

        if path.is_symlink():
            raise InputError([Problem(str(path), "is a symbolic link; replace it with the file itself")])
        return load_config(path)

    def settings(self) -> Mapping[str, object]:
        """The configuration by dotted key; empty without one. Raises `InputError`."""
        found = {} if (config := self.config()) is None else config.model_dump(mode="json")
        parts = {part: keys for part, keys in found.items() if isinstance(keys, dict)}
        return {f"{part}.{key}": each for part, keys in parts.items() for key, each in keys.items()}

    @property
    def evidence(self) -> Evidence:
        return Evidence(None, self.history, "ledger", configuration=self.settings, folder=self.folder)


def read_run(path: Path) -> RecordedRun:
    """The run at `path`: a folder with a ledger, or a ledger. Raises `OSError` if it does not exist."""
    folder = path if path.is_dir() else None
    ledger = path / "ledger.jsonl" if folder is not None else path
    if ledger.exists() and not ledger.is_file():  # opening a pipe would wait for a writer
        raise OSError(errno.EINVAL, "is a pipe or a device, not a file", str(ledger))
    if folder is not None and ledger.is_symlink():
        raise OSError(errno.EINVAL, "is a symbolic link; replace it with the file itself", str(ledger))
    return RecordedRun(path, read_history(ledger), folder)


def verify(runs: Sequence[RecordedRun]) -> tuple[Verdict, ...]:
    """One verdict for each claim of `ALL`, over all `runs`."""
    ours, *others = evidence = [run.evidence for run in runs]
    apart = next(filter(None, (_another_job(runs[0], run) for run in runs[1:])), "")
    command = command_line("andon", "verify", *(run.path for run in runs))

    def named(verdict: Verdict, of: RecordedRun | None = None) -> Verdict:
        """Add the command that repeats the verdict and, with several ledgers, the path of this one."""
        place = f"{of.path}, " if of is not None and others else ""
        found = (replace(each, where=f"{place}{each.where}", repro=command) for each in verdict.counterexamples)
        return replace(verdict, counterexamples=tuple(found))

    verdicts = []
    for claim in ALL:
        if claim.name not in _TOGETHER:
            verdicts.append(merge(named(judged_by(claim, one), run) for run, one in zip(runs, evidence, strict=True)))
        elif apart:
            verdicts.append(unknown(claim, f"not comparable: {apart}"))
        else:
            verdicts.append(named(judged_by(claim, replace(ours, elsewhere=tuple(others)))))
    return tuple(verdicts)


def _another_job(first: RecordedRun, other: RecordedRun) -> str:
    starts = [run.history.start.fields for run in (first, other) if run.history.start is not None]
    if len(starts) < 2:
        return ""
    found = _other_settings(first, other) if starts[0].get("identity") != starts[1].get("identity") else []
    for name, called in (("data", "data"), ("base", "base model")):
        held = [start.get("digests") for start in starts]
        digests = [each.get(name) if isinstance(each, Mapping) else None for each in held]
        if None not in digests and digests[0] != digests[1]:
            found.append(called)
    return f"{first.path} and {other.path} are of different jobs: they differ in {', '.join(found)}" if found else ""


def _other_settings(first: RecordedRun, other: RecordedRun) -> list[str]:
    from andon.config.load import differences, identity

    try:
        known = [identity(config) for config in (first.config(), other.config()) if config is not None]
    except InputError:
        known = []
    if len(known) < 2:
        return ["settings"]
    return [key for key, *_ in differences(known[0], known[1]) if key != "run.device_kind"]


def recorded_violations(run: RecordedRun) -> tuple[str, ...]:
    """The violations and retractions in the ledger, as `a violation: gradients-agree at step 2 on rank 1, warned`."""
    lines = []
    for event in run.history.events:
        found, ranks = event.fields, event.fields.get("ranks")
        if event.kind == "retraction":
            steps = f"steps {(event.step or 0) + 1} to {found.get('last')}"
            lines.append(f"a retraction: {steps} no longer count, for {found.get('clause')}")
        elif event.kind == "violation":
            named = f" on rank {', '.join(map(str, ranks))}" if isinstance(ranks, Sequence) and ranks else ""
            at = f"at step {event.step}" if event.step else "outside a step"
            action = found.get("action") or "raised"
            kind = "a suspicion" if action == "suspected" else "a violation"
            lines.append(f"{kind}: {found.get('clause')} {at}{named}, {action}")
    return tuple(lines)


def standing_violations(run: RecordedRun) -> set[str]:
    """The clauses of recorded violations whose step no later resume made again."""
    kept, clauses = float("inf"), set[str]()
    for event in reversed(run.history.events):
        kept = min(kept, event.step or 0) if event.kind == "resume" else kept
        if event.kind == "violation" and event.fields.get("action") != "suspected" and kept >= (event.step or 1):
            clauses.add(str(event.fields.get("clause")))
    return clauses


def unfinished(run: RecordedRun) -> str:
    """Where the ledger stops, if the run did not finish; "" if it did, or has no first line."""
    last = run.history.events[-1] if run.history.events else None
    if last is None or run.history.runs[-1].finished:
        return ""
    done, planned = max(run.history.trajectory, default=0), run.history.plan.steps
    how = f"ended with {last.fields.get('reason')}" if last.kind == "end" else "without an end in its ledger"
    return f"is not finished: {done} of {planned} steps, {how}" if planned else f"is not finished: {done} steps, {how}"
