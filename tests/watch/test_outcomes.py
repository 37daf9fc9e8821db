"""What a loop tells at its seams: checkpoints that cannot be read, counts of several optimizers, its own functions."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import andon
from andon_contracts.act import Scene, message
from andon_contracts.agree import Observation, bits_of
from andon_contracts.laws.law import Judgement, Seen, settle
from andon_contracts.laws.loop import GRADIENT_LAW
from andon_contracts.violation import Violation
from andon_contracts.watch.discovery import optimizer_of
from tests.watch.small import answers, clauses, net, sgd

# what only one rank has


def _lost(model: nn.Module) -> Callable[[], Mapping[str, Tensor]]:
    def read() -> Mapping[str, Tensor]:
        if dist.get_rank() == 1:
            raise KeyError("a shard that is not there")
        return dict(model.named_parameters())

    return read


def _saves(folder: str) -> tuple[str, list[str]]:
    """What a save raises of which rank 1 cannot read what is on the disk, and what the next one finds."""
    model = net()
    log = (lambda _: None) if dist.get_rank() == 0 else None
    with andon.watch(model, sgd(model), action="raise", log=log) as w:
        with pytest.raises((KeyError, ValueError)) as caught:
            w.saved(Path(folder, "first"), read=_lost(model))
        w.saved(Path(folder, "second"), read=lambda: dict(model.named_parameters()))
    return f"{caught.type.__name__}: {caught.value}", clauses(w)


def test_what_one_rank_cannot_read_is_refused_on_all_and_a_log_is_a_ranks_own(tmp_path: Path) -> None:
    """Nobody waits for a rank whose `read` raised, and the loop may go on. Rank 0 alone may be given `log=`."""
    assert answers(2, _saves, str(tmp_path)) == [
        ("ValueError: rank 1 was told something wrong; its own message says what", []),
        ("KeyError: 'a shard that is not there'", []),
    ]


@pytest.mark.parametrize("text", ["[1]", '{"weights": 3}', "3", "{"])
def test_a_file_of_something_else_is_refused_in_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.andon.json").write_text(text)
    model = net()
    with andon.watch(model, sgd(model)) as w, pytest.raises(ValueError, match="does not say what was saved"):
        w.loaded(tmp_path / "c")


# several optimizers


def _loaded(model: nn.Module, optimizers: list[torch.optim.Optimizer], folder: Path) -> list[int]:
    """The updates that each optimizer has made by what was saved."""
    with andon.watch(model, optimizers, action="raise") as w:
        w.loaded(folder / "c")
        return [probe.updates for probe in w._probes.values()]


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
    # A file of before says the first count only.
    body = json.loads((tmp_path / "c.andon.json").read_text())
    del body["updates of optimizer 2"]
    (tmp_path / "c.andon.json").write_text(json.dumps(body))
    assert _loaded(model, optimizers, tmp_path) == [1, 1]


@pytest.mark.parametrize("first", [True, False])
def test_which_optimizer_is_found_does_not_depend_on_who_was_made_first(first: bool) -> None:
    """Of several that hold a parameter it is the one that holds most, so that all ranks take the same one."""
    model = net()
    makers = [lambda: sgd(model), lambda: torch.optim.Adam(model[0].parameters())]
    gc.collect()
    held = [make() for make in (makers if first else reversed(makers))]
    found = optimizer_of(model.parameters())
    assert isinstance(found, torch.optim.SGD)
    assert any(found is each for each in held)


# the loop's own functions


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


# the law


def _gradient_law(*ranks: Mapping[str, float]) -> Violation:
    """What an audit raises by these errors of the ranks."""
    said = [
        Observation(rank, 3, 1, "audit", {name: bits_of(value) for name, value in reals.items()} | {"micro-batches": 1})
        for rank, reals in enumerate(ranks)
    ]
    with pytest.raises(Violation) as caught:
        settle(Judgement(GRADIENT_LAW, Seen(said, None)))
    return caught.value


@pytest.mark.parametrize("order", [1, -1])
def test_a_gradient_that_is_no_number_is_the_worst_there_is(order: int) -> None:
    """One rank's NaN is what the message names, whichever rank has it, and not another rank's small error."""
    small = {"error": 0.5, "rest": 0.0, "ratio": 1.5, "tolerance": 1e-4}
    none = dict.fromkeys(small, math.nan) | {"tolerance": 1e-4}
    assert "off the law by nan of its norm" in _gradient_law(*[small, none][::order]).finding.seen


@pytest.mark.parametrize(
    ("ratio", "rest", "likely"),
    [(2.0, 1e-6, "a factor too much or too few"), (1.003, 0.0627, "some rows are missing or weigh more than others")],
)
def test_what_is_likely_follows_from_what_was_seen(ratio: float, rest: float, likely: str) -> None:
    """A gradient that no factor makes right is not said to have a wrong factor."""
    finding = _gradient_law({"error": 0.0627, "rest": rest, "ratio": ratio, "tolerance": 1e-4}).finding
    assert ("by no factor" in finding.seen) == (rest > 1e-3)
    assert f"  likely   {likely}" in message("gradient-law", finding, Scene(1))


# evaluations


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
