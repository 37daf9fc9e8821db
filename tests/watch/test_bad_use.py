"""What a loop tells: what is wrong is a `ValueError` at the call, on every rank, also where only one was told it."""

from __future__ import annotations

import gc
import math
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.act import Scene, message
from andon_contracts.agree import Observation, bits_of
from andon_contracts.laws.law import Judgement, Seen, enforce
from andon_contracts.legible import log
from andon_contracts.record import LedgerFile
from andon_contracts.violation import Violation
from andon_contracts.watch import Watch
from andon_contracts.watch.checks.audit import GRADIENT_LAW
from andon_contracts.watch.opening import optimizer_of
from tests.watch.small import answers, clauses, loss_of, net, raised_by, sgd


def _open(**told: Any) -> Watch:
    model = net()
    return andon.watch(model, sgd(model), **told)


def _last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


NOWHERE = Path(tempfile.gettempdir()) / "a-checkpoint-that-was-never-saved"


def _saved_and_one_reads_another(w: Watch) -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    path = Path(folder[0]) / "checkpoint"
    w.saved(path)
    dist.barrier()
    w.loaded(NOWHERE if _last() else path)


def _saved_where_nothing_can_be() -> str:
    with _open() as w:
        return raised_by(lambda: w.saved(NOWHERE / "checkpoint"))


def _lazy_on_the_last() -> object:
    model = nn.Sequential(nn.LazyLinear(3) if _last() else nn.Linear(2, 3))
    return andon.watch(model, sgd(model))


def _on_no_device() -> object:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta").requires_grad_(False))
    return andon.watch(model, sgd(model))


def _nothing_is_trained() -> object:
    model = net()
    optimizer = sgd(model)
    return andon.watch(model.requires_grad_(False), optimizer)


def _twice() -> object:
    model = net()
    with andon.watch(model, optimizer := sgd(model)):
        return andon.watch(model, optimizer)


def _alone_with_a_replica() -> object:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = DistributedDataParallel(net())
    return andon.watch(model, sgd(model), group=group)


def _without_the_last_rank() -> object:
    model = DistributedDataParallel(net())
    return andon.watch(model, sgd(model), group=dist.new_group([0, 1]))


CLOSED: dict[str, Callable[[Watch], object]] = {
    "batch": lambda w: w.batch([1]),
    "loss": lambda w: w.loss(1.0, 1),
    "reduced": lambda w: w.reduced(),
    "expect": lambda w: w.expect("dropout", 1, "differ"),
    "evaluated": lambda w: w.evaluated([1], [0], [0]),
    "saved": lambda w: w.saved(NOWHERE),
    "loaded": lambda w: w.loaded(NOWHERE),
    "pull": lambda w: w.pull("why"),
}
TOLD: dict[str, tuple[Callable[[Watch], object], str]] = {
    "evaluation, uneven on one rank": (
        lambda w: w.evaluated([0, 1, 2], [0, 1] if _last() else [0, 1, 1], [0, 1, 1]),
        "different lengths: [3, 2, 3]",
    ),
    "loaded from elsewhere on one rank": (_saved_and_one_reads_another, "cannot read the digests of the checkpoint"),
    "a value with another word": (lambda w: w.expect("seed", 1, "same"), "'agree', 'differ' or 'mean', not 'same'"),
    "content of other rows": (lambda w: w.batch([1, 2, 3], [0, 0]), "content has 2 rows, ids has 3"),
    "nested ids": (lambda w: w.batch([[1, 2]]), "flat sequence"),
}
OPENED: dict[str, tuple[Callable[[], object], str]] = {
    "one of two optimizers of another model": (
        lambda: andon.watch(model := net(), [sgd(model), sgd(net())]),
        "optimizer 2 holds no",
    ),
    "a misspelled name": (lambda: _open(actoin="raise"), "there is no argument 'actoin'; did you mean 'action'?"),
    "a rate for a schedule": (lambda: _open(schedule=0.1), "schedule must be a function, not float"),
    "a number for a scaler": (lambda: _open(scaler=2.0), "scaler must have get_scale()"),
    "a word for a time, on one rank": (lambda: _open(timeout="1" if _last() else 9), "timeout must be seconds above"),
    "no patience": (lambda: _open(patience=0), "patience must be seconds above 0, such as 30, or a datetime.timedelta"),
    "no update": (lambda: _open(updates=3, start=4), "updates must be at least start (4)"),
    "too few": (lambda: _open(start=-1, rows=0), "start must be at least 0, not -1; rows must be at least 1"),
    "a wrong limit on one rank": (lambda: _open(clip=-1.0 if _last() else None), "a number above 0, not -1.0"),
    "a limit of one": (lambda: _open(clip=1.5 if _last() else None), "settings: rank 0: clip=None, rank 1: clip=None"),
    "rows instead of their number, on one rank": (
        lambda: _open(rows=[1, 2] if _last() else None),
        "rows must be a whole number, not list",
    ),
    "a word for a limit": (lambda: _open(clip="1"), "clip must be a number above 0, not '1'"),
    "clauses without a reason": (lambda: _open(allow=["finite"]), "allow must map a clause to a reason, not be a list"),
    "a lazy layer on one rank": (_lazy_on_the_last, "0.bias have no shape yet"),
    "a frozen layer without values": (_on_no_device, "1.bias are on the meta device"),
    "no optimizer": (lambda: andon.watch(net(), []), "an empty list: name at least one"),
    "nothing is trained": (_nothing_is_trained, "no trainable parameter"),
    "watched twice": (_twice, "watched already"),
    "a group of one of three replicas": (_alone_with_a_replica, "the model's DDP group has 3"),
    "a clause that is none": (lambda: _open(allow={"replicas-agre": "x"}), "did you mean 'replicas-agree'"),
    "a group without the last rank": (_without_the_last_rank, ""),
}


def _refusals() -> dict[str, str]:
    closed = _open()
    closed.close()
    found = {name: raised_by(lambda call=call: call(closed)) for name, call in CLOSED.items()}
    for name, (call, _) in TOLD.items():
        with _open() as w:
            found[name] = raised_by(lambda call=call, w=w: call(w))
    return found | {name: raised_by(call) for name, (call, _) in OPENED.items()}


def test_bad_use_is_a_clear_error_on_every_rank() -> None:
    """Each is refused on all of three ranks, at the call, and in words; none hangs."""
    wanted = dict.fromkeys(CLOSED, "this watch is closed") | {
        name: words for name, (_, words) in (*TOLD.items(), *OPENED.items())
    }
    for rank, found in enumerate(answers(3, _refusals)):
        for name, text in found.items():
            assert text.startswith("ValueError: "), f"{name}: {text}"
            assert wanted[name] in text, f"{name}: {text}"
            assert rank == 2 or "rank 2: " in text or not name.endswith("on one rank"), f"{name}: {text}"
        assert ("rank 2 is not in the group" if rank == 2 else "DDP group has 3") in text


def test_a_line_and_its_newline_are_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of a launcher share one standard error."""
    written: list[str] = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.append, flush=lambda: None))
    log("first", "second")
    assert [each for each in written if each] == ["first\nsecond\n"]


def test_a_disk_that_refuses_is_told_to_every_rank() -> None:
    for refused in answers(3, _saved_where_nothing_can_be):
        assert refused.startswith(("FileNotFoundError", "OSError"))


def _contents(ids: Sequence[int]) -> Sequence[int]:
    if dist.get_rank() == 1:
        raise KeyError("a row that is not there")
    return list(ids)


def _fails_at_the_start(folder: str) -> str:
    hook, path = sys.excepthook, Path(folder, f"{dist.get_rank()}.jsonl")
    with pytest.raises((KeyError, andon.Halted)) as caught:
        _open(rows=5, contents=_contents, ledger=path)
    assert sys.excepthook is hook
    assert [each.name for each in threading.enumerate() if each.name.startswith("andon")] == []
    LedgerFile(path, exclusive=True).close()
    return str(caught.value)


def test_an_error_of_the_loops_own_while_a_watch_opens_leaves_nothing_open(tmp_path: Path) -> None:
    other, own = answers(2, _fails_at_the_start, str(tmp_path))
    assert other.startswith(
        "rank 1 of 2 failed at step 1, before its forward pass (not a contract violation): KeyError"
    )
    assert own == "'a row that is not there'"


def test_an_optimizer_of_frozen_parameters_may_come_first() -> None:
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
        loss_of(model).backward()
        optimizer.step()


def _out_of_step(action: str) -> tuple[Violation, list[str]]:
    model = net()
    optimizer = sgd(model)
    w = andon.watch(model, optimizer, action=action)
    with pytest.raises(Violation) as caught:
        _evaluate_on_rank_0_only(w, model, optimizer)
    return caught.value, clauses(w)


@pytest.mark.parametrize("action", ["warn", "raise"])
def test_ranks_that_tell_different_things_halt_and_say_just_that(action: str) -> None:
    for error, found in answers(2, _out_of_step, action):
        assert (error.clause, set(found) - {"halt-together"}) == ("halt-together", set())
        assert "the ranks are not at the same point: rank 0: step " in str(error)
        assert "lr differs" not in str(error)


def test_a_batch_that_was_refused_is_no_new_micro_batch() -> None:
    """The gradient that is there is still of the rows told before: thrown away, they are free to come again."""
    model = net()
    optimizer = sgd(model)
    with andon.watch(model, optimizer, action="raise", hard_stop=False) as w:
        w.batch([0, 1])
        loss_of(model).backward()
        with pytest.raises(ValueError, match="ids"):
            w.batch([0.5])
        optimizer.zero_grad()
        w.batch([0, 1])
        loss_of(model).backward()
        optimizer.step()
        assert w.findings == ()


@pytest.mark.parametrize("text", ["[1]", '{"weights": 3}', "3", "{"])
def test_a_file_of_something_else_is_refused_in_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.andon.json").write_text(text)
    model = net()
    with andon.watch(model, sgd(model)) as w, pytest.raises(ValueError, match="cannot read the digests of"):
        w.loaded(tmp_path / "c")


def _loaded(model: nn.Module, optimizers: list[torch.optim.Optimizer], folder: Path) -> list[int]:
    with andon.watch(model, optimizers, action="raise") as w:
        w.loaded(folder / "c")
        return [probe.updates for probe in w._context.probes]


def test_each_optimizer_goes_on_with_its_own_count(tmp_path: Path) -> None:
    model = net()
    optimizers = [sgd(model[0]), sgd(model[2])]
    with andon.watch(model, optimizers) as w:
        for step in range(3):
            model(torch.ones(1, 4)).sum().backward()
            for optimizer in optimizers if step == 0 else optimizers[1:]:
                optimizer.step()
            model.zero_grad()
        w.saved(tmp_path / "c")
    assert _loaded(model, optimizers, tmp_path) == [1, 3]


@pytest.mark.parametrize("first", [True, False])
def test_which_optimizer_is_found_does_not_depend_on_who_was_made_first(first: bool) -> None:
    """If several optimizers hold a parameter, the one with the most parameters is chosen, the same on all ranks."""
    model = net()
    makers = [lambda: sgd(model), lambda: torch.optim.Adam(model[0].parameters())]
    gc.collect()
    held = [make() for make in (makers if first else reversed(makers))]
    found = optimizer_of(model.parameters())
    assert isinstance(found, torch.optim.SGD)
    assert any(found is each for each in held)


@pytest.mark.parametrize("late", [False, True])
def test_a_zero_grad_of_the_loops_own_outlives_the_watch(late: bool) -> None:
    """One that was set before the watch, or over it while it was open, is there after it, and still works."""
    model = net()
    optimizer = sgd(model)
    calls: list[int] = []

    def patch() -> None:
        original = optimizer.zero_grad

        def counted(set_to_none: bool = True) -> None:
            calls.append(1)
            original(set_to_none)

        optimizer.zero_grad = counted

    if not late:
        patch()
    with andon.watch(model, optimizer):
        if late:
            patch()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.zero_grad()
    assert calls == [1]
    assert all(parameter.grad is None for parameter in model.parameters())


def _gradient_law(*ranks: Mapping[str, float]) -> Violation:
    said = [
        Observation(rank, 3, 1, "audit", {name: bits_of(value) for name, value in reals.items()} | {"micro-batches": 1})
        for rank, reals in enumerate(ranks)
    ]
    with pytest.raises(Violation) as caught:
        enforce(Judgement(GRADIENT_LAW, Seen(said, None)))
    return caught.value


@pytest.mark.parametrize("order", [1, -1])
def test_a_gradient_that_is_no_number_is_the_worst_there_is(order: int) -> None:
    """One rank's NaN is what the message names, whichever rank has it, and not another rank's small error."""
    small = {"error": 0.5, "rest": 0.0, "ratio": 1.5, "tolerance": 1e-4}
    none = dict.fromkeys(small, math.nan) | {"tolerance": 1e-4}
    assert "off the reference by nan of its norm" in _gradient_law(*[small, none][::order]).finding.seen


@pytest.mark.parametrize(
    ("ratio", "rest", "likely"),
    [(2.0, 1e-6, "a division is missing or made twice"), (1.003, 0.0627, "some rows are missing or weigh more")],
)
def test_what_is_likely_follows_from_what_was_seen(ratio: float, rest: float, likely: str) -> None:
    """A gradient that no factor makes right is not said to have a wrong factor."""
    finding = _gradient_law({"error": 0.0627, "rest": rest, "ratio": ratio, "tolerance": 1e-4}).finding
    assert ("no factor explains" in finding.seen) == (rest > 1e-3)
    assert f"  likely   {likely}" in message("gradient-law", finding, Scene(1))


def _normed(train: bool, dropout: bool = False, then_eval: bool = False) -> list[str]:
    """What is found of an evaluation with these modules in training mode. then_eval: only when they were called."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)).train(train)
    model[2].train(train or dropout)
    with andon.watch(model, sgd(model), action=lambda found: None) as w, torch.no_grad():
        answered = model(torch.eye(3)).argmax(-1)
        if then_eval:
            answered = model.eval()(torch.eye(3)).argmax(-1)
        w.evaluated([0, 1, 2], answered, answered)
    return [f"{found.clause} {found.finding.seen}" for found in w.findings]


def test_an_evaluation_with_a_batch_norm_in_training_mode_is_named() -> None:
    """Its answers look as good as any, and depend on what was evaluated together; other modes are the loop's affair."""
    (found,) = _normed(train=True)
    assert found.startswith("evaluation-once batch norm 1 was in training mode")
    assert _normed(train=False) == []
    assert _normed(train=False, dropout=True) == []
    # As when statistics are taken anew: what counts is how the model was called last.
    assert _normed(train=True, then_eval=True) == []
