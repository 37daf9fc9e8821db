"""Steps of a run done again, on any number of workers, and compared with its ledger to the bit (issue 3 item 8).

Nothing is written into the run: the state comes from its nearest checkpoint at or before the first step, or from its
initial weights, and what it comes to is only compared.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from andon.config.identity import differences
from andon.config.schema import Config
from andon.console.problems import InputError, Problem
from andon.inspection.difference import Comparison, Differences
from andon.inspection.recorded import Recorded, open_recorded
from andon.run.atomic import write_json
from andon.run.checkpoint import Checkpoint, newest_valid
from andon.run.folder import RunFolder
from andon.run.provenance import differences as other_machine
from andon.run.provenance import fingerprint
from andon.run.repeats import Difference, apart, differing, shown
from andon.training.existing import config_at_hand
from andon.training.history import step_record
from andon.training.resume import identity_at_start, identity_of, run_identity
from andon.training.session import Session, assembled
from andon_contracts.digest import hex64

RESULT = "replay.json"
"""The file in which rank 0 of a process group says what came out."""


@dataclass(frozen=True)
class Replayed:
    """The outcome. `source`: where the state came from, `after` which update; `compared`: steps that are the same.

    apart: the first step that differs (0: the state that was restored), its fields by name with what the ledger has
    and what came out now; None where none differs. machine: how this machine or its versions differ from the run's.
    """

    source: str
    after: int
    compared: int
    apart: int | None = None
    fields: Mapping[str, tuple[str, str]] | None = None
    machine: tuple[str, ...] = ()
    place: str = ""


def read_range(text: str, found: Recorded) -> tuple[int, int]:
    """First and last step of `A:B`, `A`, `A:` or `:B`. Raises `InputError` for steps that the ledger has not."""
    steps = list(found.trajectory)
    if not steps:
        raise InputError([Problem(str(found.ledger), "it has no steps to do again")])
    match = re.fullmatch(r"(\d*)(:?)(\d*)", text.strip())
    if match is None or not (match[1] or match[2]):
        raise InputError([Problem("--steps", f"{text!r} is no range of steps; write A:B, as in 3:7")])
    first = int(match[1]) if match[1] else steps[0]
    last = int(match[3]) if match[3] else (steps[-1] if match[2] else first)
    if not steps[0] <= first <= last <= steps[-1]:
        raise InputError([Problem("--steps", f"{text} is not within {steps[0]}:{steps[-1]}, which the ledger has")])
    return first, last


def settings(folder: RunFolder, workers: int | None, backend: str | None) -> Config:
    """The run's configuration, placed on `workers` and `backend` where they are given, its contracts on.

    The folder may be anybody's, so its number of workers never decides alone how many processes are started: without
    `workers` the run, whose bits do not depend on it, is replayed on at most a worker for each core (or GPU) and each
    micro-batch.
    """
    flags = {"run.workers": workers, "run.backend": backend}
    given = {key: value for key, value in flags.items() if value is not None}
    overrides = ["contracts.enabled=true", "contracts.audit_every=0", *(["run.devices=null"] if given else [])]
    config = config_at_hand(folder, overrides, given)
    most = min(max(len(os.sched_getaffinity(0)), torch.cuda.device_count()), config.training.micro_batches)
    if workers is not None or config.run.workers <= most:
        return config
    return config_at_hand(folder, [*overrides, "run.devices=null"], {**given, "run.workers": most})


def replay(config: Config, path: Path, first: int, last: int) -> Replayed:
    """Do steps `first` to `last` of the run at `path` again on this process's backend and compare them.

    In a process group every rank calls it and gets the same. Raises `InputError` where the run's data or model is no
    longer what it was, and `Violation` where a step breaks its contract.
    """
    found = open_recorded(path)
    assert found.folder is not None
    with assembled(config, found.folder, writing=False) as session:
        # Where the latest is damaged, an older one, or the initial weights, serve as well.
        checkpoint = newest_valid(found.folder.checkpoints, before=first)[0]
        _require_same(session, checkpoint)
        total = session.run.plan.total_steps
        if last > total:
            raise InputError([Problem(str(found.ledger), f"it has a step {last} of a run of {total}")])
        after = checkpoint.step if checkpoint is not None else 0
        if checkpoint is not None:
            session.run.restore(checkpoint)
        session.run.step.attest_start({"after": after})
        return _compared(session, found, checkpoint.path.name if checkpoint else "the initial weights", after, last)


def replay_rank(payload: Mapping[str, Any]) -> int:
    """`replay` as one rank of a process group; rank 0 writes what came out into the folder `out`."""
    config = Config.model_validate(payload["config"])
    result = replay(config, Path(payload["path"]), payload["first"], payload["last"])
    if dist.get_rank() == 0:
        write_json(Path(payload["out"]) / RESULT, asdict(result))
    return 0


def _require_same(session: Session, checkpoint: Checkpoint | None) -> None:
    was = identity_of(checkpoint) if checkpoint is not None else identity_at_start(session)
    changed = differences(was, run_identity(session)) if was is not None else []
    # Another kind of device is another machine: its bits are not comparable, which the fingerprint says.
    changed = [each for each in changed if each[0] != "run.device_kind"]
    if changed:
        raise InputError(
            Problem(key, f"was {before!r} in the run, is {now!r}; only the same can be done again")
            for key, before, now in changed
        )


def _compared(session: Session, found: Recorded, source: str, after: int, last: int) -> Replayed:
    place = f"{session.run.backend.world_size} {session.run.backend.name} workers"
    ours = fingerprint(session.environment)

    def came_to(compared: int, step: int | None, odd: Sequence[Difference] = ()) -> Replayed:
        fields = {each.name: (shown(each.then), shown(each.now)) for each in odd} or None
        machine = other_machine(found.fingerprint(step or last) or {}, ours)
        return Replayed(source, after, compared, step, fields, machine, place)

    start = _state_apart(session, found, after)
    if start:
        return came_to(0, 0, start)
    run = session.run
    for step in range(after + 1, last + 1):
        batch = run.plan.batch(step)
        result = run.step(batch, run.schedule.rate(step), step)
        now = step_record(batch, result, run.backend.world_size, run.backend.name)
        then = found.trajectory.get(step)
        odd = differing(then, now) if then is not None else ()
        if odd:
            return came_to(step - after - 1, step, odd)
    return came_to(last - after, None)


def _state_apart(session: Session, found: Recorded, after: int) -> tuple[Difference, ...]:
    if after:
        record = found.trajectory.get(after)
        then = record.digests.weights if record is not None else None
    else:
        then = found.start.digests.get("weights") if found.start is not None else None
    return apart("weights", then, hex64(session.run.primary.weights_digest()))


def report_of(result: Replayed, first: int, last: int) -> Differences:
    """The outcome for a reader: exit 0 the same, 1 different, 2 not comparable."""
    report = Differences()
    report.add("from", f"{result.source}, after step {result.after}, on {result.place}")
    for difference in result.machine:
        report.add("machine", f"{difference} (the run's, this one's)")
    if result.apart is None:
        report.add("result", f"steps {first} to {last}: every digest, loss and norm is the ledger's, to the bit")
        return report
    fields = dict(result.fields or {})
    if result.apart == 0:
        report.add("result", "the restored weights are not those of the ledger; nothing was done again")
    elif result.compared:
        report.add("steps", f"{result.after + 1} to {result.apart - 1} are the ledger's, to the bit")
    for place, (name, (then, now)) in enumerate(fields.items()):
        step = f"step {result.apart}: " if result.apart else ""
        report.add("differs", f"{step}{name}{' first' if place == 0 else ''}: ledger {then}, now {now}")
    report.result = Comparison.DIFFERENT
    if result.machine:
        report.add("result", "not comparable: other versions or hardware, where other bits are no fault")
        report.result = Comparison.INCOMPARABLE
    return report
