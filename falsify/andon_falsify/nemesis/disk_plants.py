"""Protections of the run folder that a control switches off, and a rank that dies while it saves. Each is a plant."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from andon_falsify.nemesis.planting import Planting


def unverified(plan: Planting) -> None:
    """A checkpoint is loaded as it is: nothing is held against its manifest."""
    from safetensors.torch import load

    from andon.run import checkpoint
    from andon.run.sealed import MANIFEST, STATE, TENSORS, Sealed

    hex_join, digests = checkpoint.hex_join, checkpoint._digests  # one that is missing is missing at once

    def believe(folder: Path) -> Sealed:
        plan.acted()
        manifest = json.loads((folder / MANIFEST).read_bytes())
        tensors = load((folder / TENSORS).read_bytes())
        digest = hex_join(digests(tensors))
        head = manifest["ledger"]["count"], manifest["ledger"]["digest"]
        step = int(folder.name.removeprefix("step-"))
        return Sealed(step, digest, head, tensors, json.loads((folder / STATE).read_bytes()))

    setattr(checkpoint, "read_sealed", believe)  # noqa: B010 - not for the type checker


def forgiven(plan: Planting) -> None:
    """What the disk refuses is passed over: a checkpoint, a line, a result, an fsync."""
    from andon.problems import InputError
    from andon.run.ledger import LedgerWriter
    from andon.training import closing, journal, outputs

    original = journal.FolderJournal.checkpoint

    def saving(self: Any, *given: Any, **named: Any) -> bool:
        try:
            return original(self, *given, **named)
        except InputError:
            plan.acted()
        return True

    setattr(journal.FolderJournal, "checkpoint", saving)  # noqa: B010
    setattr(journal.MetricsWriter, "write", _quiet(plan, journal.MetricsWriter.write))  # noqa: B010
    setattr(LedgerWriter, "append", _quiet(plan, LedgerWriter.append))  # noqa: B010
    setattr(closing, "write_adapter", _quiet(plan, outputs.write_adapter))  # noqa: B010
    setattr(closing, "write_results", _quiet(plan, outputs.write_results))  # noqa: B010
    os.fsync = _quiet(plan, os.fsync)


def no_fsync(plan: Planting) -> None:
    """Nothing is ever synced."""
    os.fsync = lambda fd: plan.acted()


def dies_while_saving(plan: Planting) -> None:
    """Rank 0 is killed as it gives the checkpoint of the option `step`, or a later one, its name."""
    from andon.run import checkpoint

    original = checkpoint._put_in_place

    def dying(temporary: Path, final: Path) -> None:
        step = int(final.name.removeprefix("step-"))
        if step >= plan.options["step"]:
            plan.struck(step - 1, f"SIGKILL to rank 0 before {temporary.name} became {final.name}")
            os.kill(os.getpid(), signal.SIGKILL)
        original(temporary, final)

    setattr(checkpoint, "_put_in_place", dying)  # noqa: B010


def saves_in_place(plan: Planting) -> None:
    """Checkpoints are written under their final name, the manifest first; rank 0 is killed within the next file."""
    from andon.run import atomic, checkpoint

    write = atomic.write_new

    def dying(path: Path, data: bytes) -> None:
        step = int(path.parent.name.removeprefix("step-"))
        if step >= plan.options["step"]:
            write(path, data[: len(data) // 2])
            plan.struck(step - 1, f"SIGKILL to rank 0 within {path.parent.name}/{path.name}")
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, data)

    setattr(checkpoint, "temporary_beside", lambda path: path)  # noqa: B010
    setattr(checkpoint, "_put_in_place", lambda temporary, final: None)  # noqa: B010
    setattr(checkpoint, "write_new", dying)  # noqa: B010


def _quiet(plan: Planting, original: Callable[..., Any]) -> Callable[..., Any]:
    """The same without an error of the disk."""
    from andon.problems import InputError

    def quiet(*given: Any, **named: Any) -> Any:
        try:
            return original(*given, **named)
        except (OSError, InputError):
            plan.acted()
        return None

    return quiet
