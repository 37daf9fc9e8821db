"""What a user got wrong is a `ValueError` at the call, on every rank, also where only one rank was told it."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.ledger import LedgerFile
from andon_contracts.violation import Violation
from andon_contracts.watch import Watch
from tests.support.ranks import run_ranks


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _open(**told: Any) -> Watch:
    model = _model()
    return andon.watch(model, _sgd(model), **told)


def _only_on_the_last(given: object) -> object:
    return given if dist.get_rank() == dist.get_world_size() - 1 else None


def _after_close(call: Callable[[Watch], object]) -> Callable[[], object]:
    def use() -> object:
        w = _open()
        w.close()
        return call(w)

    return use


def _while_open(call: Callable[[Watch], object]) -> Callable[[], object]:
    def use() -> object:
        with _open() as w:
            return call(w)

    return use


def _path() -> Path:
    """One that does not exist, with the same name on all ranks."""
    return Path(tempfile.gettempdir()) / "a-checkpoint-that-was-never-saved"


def _uneven(w: Watch) -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    w.evaluated([0, 1, 2], [0, 1] if last else [0, 1, 1], [0, 1, 1])


def _saved_and_one_reads_another(w: Watch) -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    path = Path(str(folder[0])) / "checkpoint"
    w.saved(path)
    dist.barrier()
    w.loaded(_path() if dist.get_rank() == dist.get_world_size() - 1 else path)


def _saved_where_nothing_can_be() -> str:
    with _open() as w:
        try:
            w.saved(_path() / "checkpoint")
        except OSError:
            return "refused"
    return "accepted"


def _one_optimizer_of_another_model() -> object:
    model = _model()
    return andon.watch(model, [_sgd(model), _sgd(_model())])


def _lazy_on_the_last() -> object:
    last = dist.get_rank() == dist.get_world_size() - 1
    model = nn.Sequential(nn.LazyLinear(3) if last else nn.Linear(2, 3))
    return andon.watch(model, _sgd(model))


def _on_no_device() -> object:
    model = nn.Sequential(_model(), nn.Linear(3, 3, device="meta").requires_grad_(False))
    return andon.watch(model, _sgd(model))


def _of_another_model() -> object:
    return andon.watch(_model(), _sgd(_model()))


def _nothing_is_trained() -> object:
    model = _model()
    optimizer = _sgd(model)
    return andon.watch(model.requires_grad_(False), optimizer)


def _twice() -> object:
    model = _model()
    optimizer = _sgd(model)
    with andon.watch(model, optimizer):
        return andon.watch(model, optimizer)


def _alone_with_a_replica() -> object:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = _model()
    return andon.watch(DistributedDataParallel(model), _sgd(model), group=group)


def _without_the_last_rank() -> object:
    model = DistributedDataParallel(_model())
    return andon.watch(model, _sgd(model), group=dist.new_group([0, 1]))


CLOSED: dict[str, Callable[[Watch], object]] = {
    "batch": lambda w: w.batch([1]),  # type: ignore[func-returns-value]
    "loss": lambda w: w.loss(1.0, 1),  # type: ignore[func-returns-value]
    "reduced": lambda w: w.reduced(),  # type: ignore[func-returns-value]
    "rng": lambda w: w.rng("dropout", "differ"),  # type: ignore[func-returns-value]
    "evaluated": lambda w: w.evaluated([1], [0], [0]),  # type: ignore[func-returns-value]
    "saved": lambda w: w.saved(_path()),  # type: ignore[func-returns-value]
    "loaded": lambda w: w.loaded(_path()),  # type: ignore[func-returns-value]
    "pull": lambda w: w.pull("why"),
}

# What is done, what the last rank is told of it, and what the others are.
REFUSED: dict[str, tuple[Callable[[], object], str, str]] = {
    **{f"closed: {name}": (_after_close(call), "this watch is closed", "closed") for name, call in CLOSED.items()},
    "evaluation uneven on one rank": (_while_open(_uneven), "have [3, 2, 3] rows", "rank 2 was told something wrong"),
    "loaded without a save": (
        _while_open(lambda w: w.loaded(_path())),  # type: ignore[func-returns-value]
        "does not say what was saved",
        "does not say what was saved",
    ),
    "loaded from elsewhere on one rank": (
        _while_open(_saved_and_one_reads_another),
        "does not say what was saved",
        "rank 2 was told something wrong",
    ),
    "a random stream with another word": (
        _while_open(lambda w: w.rng("dropout", "same")),  # type: ignore[arg-type, func-returns-value]
        "'differ' or 'agree', not 'same'",
        "'differ' or 'agree'",
    ),
    "one of two optimizers of another model": (_one_optimizer_of_another_model, "optimizer 2 holds no", "optimizer 2"),
    "a rate for a schedule": (lambda: _open(schedule=0.1), "schedule must be a function, not float", "schedule"),
    "a number for a scaler": (lambda: _open(scaler=2.0), "scaler must have get_scale()", "scaler"),
    "no update": (lambda: _open(updates=3, start=4), "updates must be at least start (4)", "updates"),
    "a wrong limit on one rank": (
        lambda: _open(clip=_only_on_the_last(-1.0)),
        "clip must be above 0, not -1.0",
        "rank 2 was told something wrong",
    ),
    "a schedule on one rank": (
        lambda: _open(schedule=_only_on_the_last(float)),
        "different settings",
        "different settings",
    ),
    "rows instead of their number, on one rank": (
        lambda: _open(rows=_only_on_the_last([1, 2])),
        "rows must be a whole number, not list",
        "rank 2 was told something wrong",
    ),
    "a word for a limit": (lambda: _open(clip="1"), "clip must be above 0, not '1'", "clip must be above 0"),
    "a lazy layer on one rank": (_lazy_on_the_last, "0.bias have no shape yet", "rank 2 was told something wrong"),
    "a frozen layer without values": (_on_no_device, "1.bias are on the meta device", "on the meta device"),
    "no optimizer": (lambda: andon.watch(_model(), []), "an empty list: name at least one", "an empty list"),
    "nothing is trained": (_nothing_is_trained, "no trainable parameter", "no trainable parameter"),
    "an optimizer of another model": (_of_another_model, "optimizer of another", "optimizer of another"),
    "watched twice": (_twice, "watched already", "watched already"),
    "a group of one of three replicas": (_alone_with_a_replica, "the model's replicas are 3", "replicas are 3"),
    "content of other rows": (
        _while_open(lambda w: w.batch([1, 2, 3], [0, 0])),  # type: ignore[func-returns-value]
        "content has 2 rows, ids has 3",
        "content has 2 rows",
    ),
    "nested ids": (
        _while_open(lambda w: w.batch([[1, 2]])),  # type: ignore[list-item, func-returns-value]
        "flat sequence",
        "flat sequence",
    ),
    "an audit without a reference": (lambda: _open(checks="audit"), "needs reference=", "needs reference="),
    "a clause that is none": (lambda: _open(allow={"replicas-agre": "x"}), "did you mean 'replicas-agree'", "did you"),
    "a group without the last rank": (_without_the_last_rank, "rank 2 is not one of the group", "replicas are 3"),
}


def _refusals() -> list[str]:
    found = []
    for use, _, _ in REFUSED.values():
        try:
            use()
            found.append("accepted")
        except ValueError as error:
            found.append(f"ValueError: {error}")
        except Exception as error:  # noqa: BLE001 - what else it is, the test says
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_bad_use_is_a_clear_error_on_every_rank() -> None:
    """Each is refused on all of three ranks, at the call, and in words; none hangs."""
    for rank, outcome in enumerate(run_ranks(3, _refusals)):
        for (name, (_, last, others)), text in zip(REFUSED.items(), outcome.get(), strict=True):
            wanted = last if rank == 2 else others
            assert text.startswith("ValueError: "), f"{name}: {text}"
            assert wanted in text, f"{name}: {text}"


def test_a_disk_that_refuses_is_told_to_every_rank() -> None:
    """Only rank 0 writes what was saved, and all ranks raise where it cannot."""
    assert [outcome.get() for outcome in run_ranks(3, _saved_where_nothing_can_be)] == ["refused"] * 3


def _contents(ids: Sequence[int]) -> Sequence[int]:
    if dist.get_rank() == 1:
        raise KeyError("a row that is not there")
    return list(ids)


def _fails_at_the_start(folder: str) -> str:
    """What the watch raises on this rank; then nothing of it is left."""
    hook, path = sys.excepthook, Path(folder, f"{dist.get_rank()}.jsonl")
    with pytest.raises((KeyError, andon.Halted)) as caught:
        _open(rows=5, contents=_contents, ledger=path)
    assert sys.excepthook is hook
    assert [each.name for each in threading.enumerate() if each.name.startswith("andon")] == []
    LedgerFile(path, alone=True).close()
    return str(caught.value)


def test_an_error_of_the_loops_own_while_a_watch_opens_leaves_nothing_open(tmp_path: Path) -> None:
    """The rank whose function fails raises its error, the others raise for it; no thread, hook or lock stays."""
    said = [outcome.get() for outcome in run_ranks(2, _fails_at_the_start, str(tmp_path))]
    assert said[0].startswith("rank 1 of 2 failed at step 1, before its forward pass, which is no violation: KeyError")
    assert said[1] == "'a row that is not there'"


def test_an_optimizer_of_frozen_parameters_may_come_first() -> None:
    """It is watched with the others: what is trained is found wherever it is."""
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    optimizers = [torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)]
    with andon.watch(model, optimizers, action="raise") as w:
        model(torch.ones(2, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert w.findings == ()
    assert w.evaluations["finite"] == 4


def _evaluate_on_rank_0_only(w: Watch, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with w:
        if dist.get_rank() == 0:
            w.evaluated([1, 2], [0, 0], [0, 1])
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def _out_of_step(action: Any) -> tuple[Violation, list[str]]:
    model = _model()
    optimizer = _sgd(model)
    w = andon.watch(model, optimizer, action=action)
    with pytest.raises(Violation) as caught:
        _evaluate_on_rank_0_only(w, model, optimizer)
    return caught.value, [each.clause for each in w.findings]


@pytest.mark.parametrize("action", ["warn", "raise"])
def test_ranks_that_tell_different_things_halt_and_say_just_that(action: str) -> None:
    """What one rank answers to another question is judged by nobody: the message says where each rank is."""
    for outcome in run_ranks(2, _out_of_step, action):
        error, clauses = outcome.get()
        assert (error.clause, set(clauses) - {"halt-together"}) == ("halt-together", set())
        assert "the ranks are not at the same point: rank 0: step " in str(error)
        assert "lr differs" not in str(error)


def test_a_batch_that_was_refused_is_no_new_micro_batch() -> None:
    """The gradient that is there is still of the rows told before: thrown away, they are free to come again."""
    model = _model()
    optimizer = _sgd(model)
    with andon.watch(model, optimizer, action="raise", hard_stop=False) as w:
        w.batch([0, 1])
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(ValueError, match="ids"):
            w.batch([0.5])  # type: ignore[list-item]
        optimizer.zero_grad()
        w.batch([0, 1])
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        assert w.findings == ()
