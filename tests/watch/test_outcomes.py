"""What a loop tells at its seams: checkpoints that cannot be read, counts of several optimizers, its own functions."""

from __future__ import annotations

import gc
import json
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
from andon_contracts.watch import Watch
from andon_contracts.watch.discovery import optimizer_of
from tests.support.ranks import run_ranks


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# what only one rank has


def _lost(model: nn.Module) -> Callable[[], Mapping[str, Tensor]]:
    def read() -> Mapping[str, Tensor]:
        if dist.get_rank() == 1:
            raise KeyError("a shard that is not there")
        return dict(model.named_parameters())

    return read


def _saves(folder: str) -> tuple[str, list[str]]:
    """What a save raises of which rank 1 cannot read what is on the disk, and what the next one finds."""
    model = _model()
    log = (lambda _: None) if dist.get_rank() == 0 else None
    with andon.watch(model, _sgd(model), action="raise", log=log) as w:
        with pytest.raises((KeyError, ValueError)) as caught:
            w.saved(Path(folder, "first"), read=_lost(model))
        w.saved(Path(folder, "second"), read=lambda: dict(model.named_parameters()))
    return f"{caught.type.__name__}: {caught.value}", [each.clause for each in w.findings]


def test_what_one_rank_cannot_read_is_refused_on_all_and_a_log_is_a_ranks_own(tmp_path: Path) -> None:
    """Nobody waits for a rank whose `read` raised, and the loop may go on. Rank 0 alone may be given `log=`."""
    others, own = (outcome.get() for outcome in run_ranks(2, _saves, str(tmp_path)))
    assert own == ("KeyError: 'a shard that is not there'", [])
    assert others == ("ValueError: rank 1 was told something wrong; its own message says what", [])


@pytest.mark.parametrize("text", ["[1]", '{"weights": 3}', "3", "{"])
def test_a_file_of_something_else_is_refused_in_words(tmp_path: Path, text: str) -> None:
    """JSON that does not say digests by name is as good as no file."""
    Path(tmp_path, "c.andon.json").write_text(text)
    model = _model()
    with andon.watch(model, _sgd(model)) as w, pytest.raises(ValueError, match="does not say what was saved"):
        w.loaded(tmp_path / "c")


# several optimizers


def _updates(w: Watch) -> list[int]:
    return [probe.updates for probe in w._probes.values()]


def test_each_optimizer_goes_on_with_its_own_count(tmp_path: Path) -> None:
    """Of two optimizers, of which one made an update and the other three, each has its own number after a load."""
    model = _model()
    optimizers = [_sgd(model[0]), _sgd(model[1])]
    with andon.watch(model, optimizers) as w:
        for step in range(3):
            model(torch.ones(1, 3)).sum().backward()
            for optimizer in optimizers if step == 0 else optimizers[1:]:
                optimizer.step()
            model.zero_grad()
        assert _updates(w) == [1, 3]
        w.saved(tmp_path / "c")
    with andon.watch(model, optimizers, action="raise") as w:
        w.loaded(tmp_path / "c")
        assert _updates(w) == [1, 3]
    # A file of before says the first count only.
    body = json.loads((tmp_path / "c.andon.json").read_text())
    del body["updates of optimizer 2"]
    (tmp_path / "c.andon.json").write_text(json.dumps(body))
    with andon.watch(model, optimizers, action="raise") as w:
        w.loaded(tmp_path / "c")
        assert _updates(w) == [1, 1]


@pytest.mark.parametrize("first", [True, False])
def test_which_optimizer_is_found_does_not_depend_on_who_was_made_first(first: bool) -> None:
    """Of several that hold a parameter it is the one that holds most, so that all ranks take the same one."""
    model = _model()
    makers: list[Callable[[], torch.optim.Optimizer]] = [
        lambda: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda: torch.optim.Adam(model[0].parameters(), lr=0.1),
    ]
    gc.collect()
    held = [make() for make in (makers if first else reversed(makers))]
    found = optimizer_of(model.parameters())
    assert isinstance(found, torch.optim.SGD)
    assert any(found is each for each in held)


# the loop's own functions


@pytest.mark.parametrize("late", [False, True])
def test_a_zero_grad_of_the_loops_own_outlives_the_watch(late: bool) -> None:
    """One that was set before the watch, or over it while it was open, is there after it, and still works."""
    model = _model()
    optimizer = _sgd(model)
    calls: list[int] = []

    def patch() -> None:
        original = optimizer.zero_grad

        def counted(set_to_none: bool = True) -> None:
            calls.append(1)
            original(set_to_none)

        optimizer.zero_grad = counted  # type: ignore[method-assign]

    if not late:
        patch()
    w = andon.watch(model, optimizer)
    if late:
        patch()
    w.close()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.zero_grad()
    assert calls == [1]
    assert all(parameter.grad is None for parameter in model.parameters())


# the law


def test_a_gradient_that_is_no_number_is_the_worst_there_is() -> None:
    """One rank's NaN is what the message names, whichever rank has it, and not another rank's small error."""
    for errors in ((0.5, float("nan")), (float("nan"), 0.5)):
        observations = [
            Observation(
                rank,
                3,
                1,
                "audit",
                {
                    "error": bits_of(error),
                    "rest": bits_of(0.0 if error == 0.5 else error),
                    "ratio": bits_of(1.5 if error == 0.5 else error),
                    "tolerance": bits_of(1e-4),
                    "micro-batches": 1,
                },
            )
            for rank, error in enumerate(errors)
        ]
        with pytest.raises(Violation) as caught:
            settle(Judgement(GRADIENT_LAW, Seen(observations, None)))
        assert "off the law by nan of its norm" in caught.value.finding.seen


@pytest.mark.parametrize(
    ("ratio", "rest", "likely"),
    [(2.0, 1e-6, "a factor too much or too few"), (1.003, 0.0627, "some rows are missing or weigh more than others")],
)
def test_what_is_likely_follows_from_what_was_seen(ratio: float, rest: float, likely: str) -> None:
    """A gradient that no factor makes right is not said to have a wrong factor."""
    reals = {"error": 0.0627, "rest": rest, "ratio": ratio, "tolerance": 1e-4}
    values = {name: bits_of(value) for name, value in reals.items()} | {"micro-batches": 1}
    with pytest.raises(Violation) as caught:
        settle(Judgement(GRADIENT_LAW, Seen([Observation(0, 3, 1, "audit", values)], None)))
    assert ("by no factor" in caught.value.finding.seen) == (rest > 1e-3)
    assert f"  likely   {likely}" in message("gradient-law", caught.value.finding, Scene(1))


# evaluations


def _normed(training: Callable[[nn.Sequential], object]) -> list[str]:
    """What is found of an evaluation for which the model was called after `training`, and of one by its rows alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    with andon.watch(model, _sgd(model), action=lambda found: None) as w:
        training(model)
        with torch.no_grad():
            answers = model(torch.eye(3)).argmax(-1)
        w.evaluated([0, 1, 2], answers, answers)
    return [f"{found.clause} {found.finding.seen}" for found in w.findings]


def test_an_evaluation_with_a_batch_norm_in_training_mode_is_named() -> None:
    """Its answers look as good as any, and depend on what was evaluated together; other modes are the loop's affair."""
    (found,) = _normed(lambda model: model.train())
    assert found.startswith("evaluation-once batch norm 1 was in training mode")
    assert _normed(lambda model: model.eval()) == []
    assert _normed(lambda model: model.eval() and model[2].train()) == []
    # As when statistics are taken anew: what counts is how the model was called last.
    assert _normed(lambda model: _called(model.train()).eval()) == []


def _called(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model(torch.eye(3))
    return model
