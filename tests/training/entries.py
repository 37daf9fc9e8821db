"""Rank processes in which something goes wrong at a known step, for the tests of the trainer."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from andon.launch.context import RankContext
from andon.launch.rank import preempted
from andon.run import atomic, checkpoint
from andon.step.replica import Replica
from andon.training.start import train_rank

Payload = Mapping[str, Any]
AT = 7  # the step at which it happens


def kill_rank(payload: Payload) -> int:
    return _with_fault(payload, 1, lambda context: os.kill(os.getpid(), signal.SIGKILL))


def ends_in_turn(payload: Payload) -> int:
    """Rank 1 ends as the next line of `ends`, a file beside the run folder, says; without a line nothing happens."""

    def end(context: RankContext) -> None:
        ends = Path(payload["folder"]).with_name("ends")
        way, *later = ends.read_text().split() or [""]
        ends.write_text(" ".join(later))
        if way == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "memory":
            bytearray(1 << 62)
        if way == "error":
            raise LookupError("its own error")

    return _with_fault(payload, 1, end)


def refusing(step: int) -> Callable[..., None]:
    """A writer of files for a disk that is full at the checkpoint of `step`."""
    write = atomic.write_new

    def writing(path: Path, data: bytes) -> None:
        if path.parent.name.startswith(f"step-{step:08d}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    return writing


def full_in_rank(payload: Payload) -> int:
    setattr(checkpoint, "write_new", refusing(6))  # noqa: B010 - not for the type checker
    return train_rank(payload)


def other_host(payload: Payload) -> int:
    """Rank 1 is on another host, with a token cache of its own, whose tokenizer makes another token of one row."""
    if RankContext.from_environment().rank == 1:
        from andon.data.tokens import Tokenizer
        from andon.training import material, run

        patch, encode = pytest.MonkeyPatch(), Tokenizer.encode

        def other(*given: Any, **named: Any) -> Any:
            encoded = encode(*given, **named)
            encoded.tokens[3][0] += Path(payload["folder"]).with_name("differs").exists()
            return encoded

        patch.setattr(Tokenizer, "encode", other)
        patch.setattr(material, "cache_of", lambda config, own: Path(payload["folder"]).with_name("host-b"))
        patch.setattr(run.socket, "gethostname", lambda: "host-b")
    return train_rank(payload)


def kill_launcher(payload: Payload) -> int:
    return _with_fault(payload, 0, lambda context: os.kill(context.launcher_pid, signal.SIGKILL))


def ask_to_end(payload: Payload) -> int:
    """The launcher is asked to end; this rank goes on once it has heard of it."""

    def ask(context: RankContext) -> None:
        os.kill(context.launcher_pid, signal.SIGTERM)
        while not preempted():
            os.sched_yield()

    return _with_fault(payload, 0, ask)


def flip_weight(payload: Payload) -> int:
    return _after_update_of(payload, AT, (1,), lambda replica: replica.parameters.weights.data[3].mul_(-1.0))


def flip_base(payload: Payload) -> int:
    def flip(replica: Replica) -> None:
        frozen = next(p for p in replica.model.parameters() if not p.requires_grad)
        frozen.data.view(-1)[3] *= -1.0

    return _after_update_of(payload, AT + 2, (1,), flip)


def cut_checkpoint(payload: Payload) -> int:
    """What rank 0 writes for the third checkpoint, of step 8, is not what it reads back."""
    parts, started = checkpoint.safetensors_parts, count(1)

    def lose(kinds: Any, data: Any, metadata: Any = None) -> Any:
        lost = next(started) == 3
        return parts(kinds, lambda name: memoryview(bytes(data(name).nbytes)) if lost else data(name), metadata)

    checkpoint.safetensors_parts = lose
    return train_rank(payload)


def _with_fault(payload: Payload, rank: int, fault: Callable[[RankContext], None]) -> int:
    from andon.step.step import TrainingStep

    do = TrainingStep.__call__

    def step(self: TrainingStep, batch: Any, rate: float, updates: int, *, stop: bool = False, **named: Any) -> Any:
        context = RankContext.from_environment()
        if context.rank == rank and batch.step == AT:
            fault(context)
            stop = stop or preempted() is not None
        return do(self, batch, rate, updates, stop=stop, **named)

    TrainingStep.__call__ = step  # type: ignore[method-assign]
    return train_rank(payload)


def after_update(patch: pytest.MonkeyPatch, step: int, act: Callable[[Replica], object], *, each: bool = False) -> None:
    """`act` after update `step` in this process, as a fault or a callback would: of one replica, or of `each`."""
    update, done = Replica.apply, list[Replica]()

    def apply(replica: Replica) -> None:
        update(replica)
        if replica.updates == step and (each or not done):
            done.append(replica)
            act(replica)

    patch.setattr(Replica, "apply", apply)


def _after_update_of(payload: Payload, step: int, ranks: tuple[int, ...], act: Callable[[Replica], object]) -> int:
    if RankContext.from_environment().rank in ranks:
        after_update(pytest.MonkeyPatch(), step, act)
    return train_rank(payload)


def all_leave(payload: Payload) -> int:
    return _after_update_of(payload, AT, (0, 1), lambda replica: sys.exit(0))


def one_leaves(payload: Payload) -> int:
    return _after_update_of(payload, AT, (1,), lambda replica: sys.exit())


def all_vanish(payload: Payload) -> int:
    return _after_update_of(payload, AT, (0, 1), lambda replica: os._exit(0))


def tell_kernels(payload: Payload) -> int:
    """Beside the run folder each rank leaves how torch computed in it, and what the environment says of that."""
    import torch

    ended = train_rank(payload)
    told = {"capability": torch.backends.cpu.get_cpu_capability()}
    told |= {name: os.environ.get(name) for name in ("ATEN_CPU_CAPABILITY", "MKL_CBWR")}
    rank = RankContext.from_environment().rank
    Path(payload["folder"]).with_name(f"rank-{rank}.json").write_text(json.dumps(told))
    return ended
