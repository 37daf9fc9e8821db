"""Every claim that ledgers alone can decide: the checkers, applied to what runs have left.

Where a run folder is given, its configuration gives the schedule, and its checkpoints and summary quote the ledger.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from andon_falsify.checkers import (
    CLAIMS,
    chain_intact,
    halts,
    loss_finite,
    plan_followed,
    replicas_agree,
    resume_equal,
    same_everywhere,
    samples_once,
    schedule,
)
from andon_falsify.history import Event, History, RowId, Unread, read_history
from andon_falsify.verdict import (
    Claim,
    Counterexample,
    Outcome,
    Verdict,
    conclude,
    judge,
    merge,
    not_applicable,
    repeatable,
    unknown,
)

HEADS = Claim(
    "heads-quoted",
    1,
    "Every checkpoint and the summary quote a line of the ledger by its number and digest, and it is that line: "
    "no line was cut off after it was quoted (issue 3).",
)
ALL: tuple[Claim, ...] = (*CLAIMS, HEADS)
"""Every claim that is said something of."""

_ELSEWHERE = "a ledger holds no {} to compare; andon falsify runs the trainer to see"
_OUT_OF_REACH = {
    "losses-close": _ELSEWHERE.format("loss of a reference"),
    "memory-budget": _ELSEWHERE.format("bytes of memory"),
    "layout-equal": _ELSEWHERE.format("layout of tensors"),
    "gradient-law": _ELSEWHERE.format("gradient"),
}


@dataclass(frozen=True)
class Run:
    """One ledger, with the run folder that it lies in where there is one."""

    path: Path
    history: History
    folder: Path | None

    @cached_property
    def settings(self) -> Mapping[str, object]:
        """The configuration that lies in the folder, by dotted key; empty where there is none."""
        config = None if self.folder is None else self.folder / "config.yaml"
        if config is None or not config.exists():
            return {}
        from andon.config.load import load_config

        found = load_config(config).model_dump(mode="json")
        return {
            f"{part}.{key}": each
            for part, keys in found.items()
            if isinstance(keys, dict)
            for key, each in keys.items()
        }


def read_run(path: Path) -> Run:
    """The run at `path`: a folder with a ledger, or a ledger. Raises `OSError` where there is none."""
    folder = path if path.is_dir() else None
    ledger = path / "ledger.jsonl" if folder is not None else path
    return Run(path, read_history(ledger), folder)


def verify(runs: Sequence[Run]) -> tuple[Verdict, ...]:
    """One verdict for each claim of `ALL`, over all `runs`."""
    own: dict[str, Callable[[Run], Verdict]] = {
        replicas_agree.CLAIM.name: _replicas,
        samples_once.CLAIM.name: _samples,
        plan_followed.CLAIM.name: _plan,
        halts.CLAIM.name: _halts,
        chain_intact.CLAIM.name: _chain,
        loss_finite.CLAIM.name: _finite,
        schedule.CLAIM.name: _schedule,
        HEADS.name: _heads,
    }
    command = f"andon verify {' '.join(str(run.path) for run in runs)}"
    found = []
    for claim in ALL:
        if claim.name in _OUT_OF_REACH:
            verdict = not_applicable(claim, _OUT_OF_REACH[claim.name])
        elif claim.name in own:
            verdict = merge(_named(judge(claim, own[claim.name], run), run, runs) for run in runs)
        else:
            verdict = judge(claim, _between if claim is same_everywhere.CLAIM else _resumed, runs)
        found.append(repeatable(verdict, None, command))
    return tuple(found)


def _named(verdict: Verdict, run: Run, runs: Sequence[Run]) -> Verdict:
    """With several runs a counterexample says which of them it is from."""
    if len(runs) == 1 or not verdict.counterexamples:
        return verdict
    named = tuple(replace(each, where=f"{run.path}, {each.where}") for each in verdict.counterexamples)
    return replace(verdict, counterexamples=named)


def _watched(run: Run) -> bool:
    return run.history.start is not None and run.history.start.watched


def _replicas(run: Run) -> Verdict:
    return replicas_agree.check(run.history)


def _samples(run: Run) -> Verdict:
    if _watched(run) and not any(step.ids for step in run.history.steps):
        return not_applicable(samples_once.CLAIM, "the loop told its watch no rows (w.batch)")
    return samples_once.check(run.history)


def _chain(run: Run) -> Verdict:
    verdict = chain_intact.check(run.history)
    cut = [(each.line, each.fields.get("torn")) for each in run.history.of_kind("resume") if each.fields.get("torn")]
    said = [verdict.why] if verdict.why else []
    said += [f"the resume at line {line} had cut off {size} bytes of a torn line" for line, size in cut]
    return replace(verdict, why="; ".join(said))


def _finite(run: Run) -> Verdict:
    return loss_finite.check(run.history)


def _halts(run: Run) -> Verdict:
    acted = [event for event in run.history.of_kind("violation") if event.fields.get("action") in (None, "raised")]
    if acted or not all(step.finite for step in run.history.steps):
        return halts.check(run.history)
    last = run.history.events[-1] if run.history.events else None
    if last is None or last.kind != "end":
        after = f"step {max(run.history.trajectory, default=0)}"
        why = f"no end is recorded after {after}: it was killed, or goes on still, and why it stopped is not known"
        return unknown(halts.CLAIM, why)
    if run.history.of_kind("violation"):
        return not_applicable(halts.CLAIM, "what is recorded was only to be told of, so that nothing had to stop")
    why = "no violation and nothing that is not finite is recorded, so that nothing had to stop"
    reason = last.fields.get("reason", "finished")
    return not_applicable(halts.CLAIM, why if reason == "finished" else f"{why}; it ended with {str(reason)!r}")


def recorded_violations(run: Run) -> tuple[str, ...]:
    """Each finding that the ledger of `run` tells of, as `a violation: gradients-agree at step 2 on rank 1, warned`.

    A claim may hold all the same, as `halt-together` does where all ranks halted for it: no verdict says these.
    """
    return tuple(_broken(event) for event in run.history.of_kind("violation"))


def _broken(event: Event) -> str:
    found = event.fields
    ranks = found.get("ranks")
    named = f" on rank {', '.join(map(str, ranks))}" if isinstance(ranks, Sequence) and ranks else ""
    at = f"at step {event.step}" if event.step else "outside a step"
    action = found.get("action") or "raised"
    kind = "a suspicion" if action == "suspected" else "a violation"
    return f"{kind}: {found.get('clause')} {at}{named}, {action}"


def _plan(run: Run) -> Verdict:
    if not run.settings:
        return not_applicable(plan_followed.CLAIM, "the ledger lies beside no configuration of our trainer")
    if run.settings.get("training.group_by_length"):
        return not_applicable(plan_followed.CLAIM, "rows were grouped by their length, which the ledger does not hold")
    plan, start = planned(run.history), run.history.plan
    if plan is None and (start.seed is None or not start.batch_size or not start.steps or not start.rows):
        why = "the start line lacks a part of the rule: seed, batch size, rows or updates"
        return not_applicable(plan_followed.CLAIM, why)
    if plan is None:
        later = any(event.epoch for event in run.history.steps)
        first = "the first epoch did not visit every planned row" if later else "no epoch was complete"
        return unknown(plan_followed.CLAIM, f"{first}, so that the rows that the rule shuffles are not known")
    return plan_followed.check(run.history, plan)


def planned(history: History) -> Mapping[int, Sequence[RowId]] | None:
    """The rows of every update by the published rule, a shuffle keyed by (seed, epoch), cut into batches.

    The training rows are those that the first epoch visited, where it was complete; None where the rule lacks a part.
    """
    plan = history.plan
    first = [row for event in history.trajectory.values() if event.epoch == 0 for row in event.ids]
    rows = sorted(row for row in first if isinstance(row, int))
    if plan.seed is None or not plan.batch_size or not plan.steps or len(set(rows)) != plan.rows:
        return None
    batches: dict[int, Sequence[RowId]] = {}
    for epoch in range(plan.steps):
        order = list(rows)
        random.Random(f"andon order {plan.seed} {epoch}").shuffle(order)
        for start in range(0, len(order), plan.batch_size):
            if len(batches) == plan.steps:
                return batches
            batches[len(batches) + 1] = order[start : start + plan.batch_size]
    return batches


def _schedule(run: Run) -> Verdict:
    total = run.history.plan.steps
    numbers = [run.settings.get(key) for key in ("optimizer.lr", "schedule.warmup_fraction", "schedule.min_lr")]
    peak, fraction, low = (float(number) if isinstance(number, int | float) else None for number in numbers)
    if peak is None or fraction is None or low is None or not total:
        return schedule.check(run.history, None)
    return schedule.check(run.history, schedule.WarmupCosine(peak, total, fraction, low))


def _between(runs: Sequence[Run]) -> Verdict:
    if len(runs) == 1:
        return not_applicable(same_everywhere.CLAIM, "one ledger; name others of the same run elsewhere")
    if any(_watched(run) for run in runs):
        why = "a watched loop promises no equal bits elsewhere; andon diff says where two of its runs part"
        return not_applicable(same_everywhere.CLAIM, why)
    return same_everywhere.check([run.history for run in runs])


def _resumed(runs: Sequence[Run]) -> Verdict:
    """Each resumed run against itself and, where one is given, against the first that was not resumed."""
    cut = [run for run in runs if any(each.resumed for each in run.history.runs)]
    whole = [run for run in runs if run not in cut]
    if not cut:
        return not_applicable(resume_equal.CLAIM, "no run was resumed")
    found = []
    for run in cut:
        verdict = resume_equal.check(run.history, whole[0].history if whole else None)
        if verdict.outcome is Outcome.UNKNOWN and not verdict.checked and not whole:
            why = "no step was done again; name the uninterrupted run as well, to compare with"
            verdict = not_applicable(resume_equal.CLAIM, why)
        found.append(verdict)
    return merge(found)


def _heads(run: Run) -> Verdict:
    """The heads that the folder quotes against the lines of the ledger."""
    if run.folder is None:
        return not_applicable(HEADS, "a ledger alone is quoted by nothing")
    digests = {number: line.digest for number, line in enumerate(run.history.lines(), start=1) if not _torn(line)}
    found, checked = [], 0
    for place, count, digest in quoted(run.folder):
        checked += 1
        seen = digests.get(count, "no such line") if count else "0" * 16
        if seen != digest:
            found.append(Counterexample(f"{place} quotes another line {count}", f"line {count}", digest, seen))
    return conclude(HEADS, checked, found) if checked else not_applicable(HEADS, "no checkpoint and no summary yet")


def _torn(line: object) -> bool:
    return isinstance(line, Unread) and line.torn


def quoted(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Each (file, count of lines, digest of the last) that a checkpoint's manifest or the summary says."""
    for path in [*sorted(folder.glob("checkpoints/step-*/manifest.json")), folder / "summary.json"]:
        if not path.exists():
            continue
        head = json.loads(path.read_bytes())["ledger"]
        yield str(path.relative_to(folder)), int(head["count"]), str(head["digest"])
