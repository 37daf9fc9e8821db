"""`andon replay`: repeats steps of a run, on any number of workers, and compares them bit by bit with its ledger.

Nothing is written into the run. The state comes from its newest valid checkpoint before the first step, or from its
initial weights. Torch is imported only when steps are computed.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from andon.config.schema import Config
from andon.console.messages import Exit, InputError, Problem
from andon.inspection.difference import OTHER_MACHINE, Comparison, Differences
from andon.inspection.recorded import Recorded, open_recorded
from andon.launch.launcher import launch
from andon.launch.portable import portable_environment
from andon.run.atomic import write_json
from andon.run.folder import RunFolder
from andon.run.ledger import Difference, apart, differing, shown
from andon.run.summary import differences as other_machine
from andon.run.summary import fingerprint
from andon.training.existing import config_at_hand
from andon_contracts.legible import counted

if TYPE_CHECKING:
    from andon.training.run import Session

_RESULT = "replay.json"  # rank 0 of a process group writes the outcome to this file


class ReplayFailed(RuntimeError):
    """The ranks ended before the replay was complete; the message says how."""

    def __init__(self, message: str, ends_with: Exit) -> None:
        super().__init__(message)
        self.ends_with = ends_with


def replay_run(path: Path, steps: str, workers: int | None, backend: str | None) -> Differences:
    """Replay `steps` (A:B) of the run at `path` and report what differs from its ledger.

    workers, backend: None: as in the run, within the limits of this machine (`settings`). Raises `InputError` for a run
    or steps that cannot be replayed, and `ReplayFailed` if the ranks end early.
    """
    recorded = open_recorded(path)
    if recorded.folder is None or not recorded.folder.config.exists():
        raise InputError.at(path, "is only a ledger; replay needs the run folder")
    first, last = read_range(steps, recorded)
    config = settings(recorded.folder, workers, backend)
    if config.run.backend == "inline":
        with portable_environment(config.run):
            return replay(config, path, first, last)
    with portable_environment(config.run), tempfile.TemporaryDirectory(prefix="andon-replay-") as out:
        payload: dict[str, Any] = {"config": config.model_dump(mode="json"), "path": str(path.absolute()), "out": out}
        result = launch(
            "andon.inspection.replay:replay_rank",
            payload | {"first": first, "last": last},
            workers=config.run.workers,
            run_folder=Path(out),
            timeout_s=config.run.grace_s,
        )
        if result.exit is Exit.USAGE and result.report is not None:
            raise InputError.of_text(result.report.message)
        if result.exit is not Exit.OK:
            raise ReplayFailed(result.cause, result.exit)
        outcome = json.loads((Path(out) / _RESULT).read_bytes())
    return Differences(outcome["lines"], Comparison(outcome["result"]))


def read_range(text: str, recorded: Recorded) -> tuple[int, int]:
    """First and last step of `A:B`, `A`, `A:` or `:B`. Raises `InputError` for steps that the ledger does not have."""
    steps = list(recorded.trajectory)
    if not steps:
        raise InputError.at(recorded.ledger, "has no steps to replay")
    match = re.fullmatch(r"(\d*)(:?)(\d*)", text.strip())
    if match is None or not (match[1] or match[2]):
        raise InputError.at("--steps", f"{text!r} is not a range of steps; write A:B, as in 3:7")
    first = int(match[1]) if match[1] else steps[0]
    last = int(match[3]) if match[3] else (steps[-1] if match[2] else first)
    if not steps[0] <= first <= last <= steps[-1]:
        raise InputError.at("--steps", f"{text} is not a range within {steps[0]}:{steps[-1]}, the steps in the ledger")
    return first, last


def settings(folder: RunFolder, workers: int | None, backend: str | None) -> Config:
    """The run's configuration with contracts on and audits off, and with `workers` and `backend` unless None.

    The folder is untrusted, so its number of workers alone never decides how many processes start: without `workers`,
    at most one for each core (or GPU) and each micro-batch. The bits do not depend on it.
    """
    import torch

    flags = {"run.workers": workers, "run.backend": backend}
    chosen = {key: value for key, value in flags.items() if value is not None}
    overrides = ["contracts.enabled=true", "contracts.audit_every=0", *(["run.devices=null"] if chosen else [])]
    config = config_at_hand(folder, overrides, chosen)
    most = min(max(len(os.sched_getaffinity(0)), torch.cuda.device_count()), config.training.micro_batches)
    if workers is not None or config.run.workers <= most:
        return config
    return config_at_hand(folder, [*overrides, "run.devices=null"], {**chosen, "run.workers": most})


def replay(config: Config, path: Path, first: int, last: int) -> Differences:
    """Compute steps `first` to `last` of the run at `path` again on this process's backend and compare them.

    Collective: every rank of a process group calls it and gets the same result. Raises `InputError` if the run's data
    or model has changed, and `Violation` if a step breaks a contract.
    """
    from andon.run.checkpoint import newest_valid
    from andon.training.run import assembled, identity_changes

    recorded, report = open_recorded(path), Differences()
    assert recorded.folder is not None
    with assembled(config, recorded.folder, writing=False) as session:
        # Skips damaged checkpoints; None means the initial weights.
        checkpoint = newest_valid(recorded.folder.checkpoints, before=first)[0]
        problems = [
            Problem(key, f"was {before!r} in the run, and is {now!r} now; replay needs the same")
            for key, before, now in identity_changes(session, checkpoint)
            if key not in ("run.device_kind", "reference")  # the fingerprint reports another machine
        ]
        if problems:
            raise InputError(problems)
        total, backend = session.run.plan.total_steps, session.run.backend
        if last > total:
            raise InputError.at(recorded.ledger, f"has a step {last}, but the run has only {total} steps")
        after = checkpoint.step if checkpoint is not None else 0
        if checkpoint is not None:
            session.run.restore(checkpoint)
        session.run.step.attest_start({"after": after})
        step, fields = _first_difference(session, recorded, after, last)
        source = checkpoint.path.name if checkpoint is not None else "the initial weights"
        workers = counted(backend.world_size, f"{backend.name} worker")
        report.add("from", f"{source}, after step {after}, on {workers}")
        machine = other_machine(recorded.fingerprint(step or last) or {}, fingerprint(session.environment))
        for difference in machine:
            report.add("machine", f"{difference} (in the run, here)")
    if step is None:
        report.add("result", f"steps {first} to {last}: every digest, loss and norm equals the ledger, to the bit")
        return report
    if step == 0:
        report.add("result", "the restored weights differ from the ledger; no step was computed")
    elif step > after + 1:
        report.add("steps", f"{after + 1} to {step - 1} equal the ledger, to the bit")
    for place, each in enumerate(fields):
        at = f"step {step}: " if step else ""
        name = f"{each.name}{' first' if place == 0 else ''}"
        report.add("differs", f"{at}{name}: ledger {shown(each.then)}, now {shown(each.now)}")
    report.result = Comparison.DIFFERENT
    if machine:
        report.add("result", OTHER_MACHINE)
        report.result = Comparison.INCOMPARABLE
    return report


def replay_rank(payload: Mapping[str, Any]) -> int:
    """Entry point of a rank: `replay`. Rank 0 writes the outcome to the folder `out`."""
    import torch.distributed as dist

    config = Config.model_validate(payload["config"])
    report = replay(config, Path(payload["path"]), payload["first"], payload["last"])
    if dist.get_rank() == 0:
        write_json(Path(payload["out"]) / _RESULT, {"lines": report.lines, "result": report.result.value})
    return 0


def _first_difference(
    session: Session, recorded: Recorded, after: int, last: int
) -> tuple[int | None, Sequence[Difference]]:
    from andon.training.trainer import step_record
    from andon_contracts.digest import hex64

    run, start = session.run, recorded.start
    if after:
        then = recorded.trajectory[after].digests.weights if after in recorded.trajectory else None
    else:
        then = start.digests.get("weights") if start is not None else None
    fields = apart("weights", then, hex64(run.primary.weights_digest()))
    if fields:
        return 0, fields
    for step in range(after + 1, last + 1):
        batch = run.plan.batch(step)
        result = run.step(batch, run.schedule.rate(step), step)
        now = step_record(batch, result, run.backend.world_size, run.backend.name)
        if step in recorded.trajectory and (fields := differing(recorded.trajectory[step], now)):
            return step, fields
    return None, ()
