"""When ranks must agree goes by what their loop does; silence about loops that are right is no blindness."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.agree import Observation
from andon_contracts.laws.law import Seen
from andon_contracts.violation import Violation
from andon_contracts.watch.synchrony import Reducer, State, Synchrony
from tests.support.ranks import run_ranks
from tests.watch.clean_communication import backward
from tests.watch.clean_kinds import run_twin, unannounced
from tests.watch.clean_loops import sgd
from tests.watch.clean_models import LayerNormed
from tests.watch.clean_twins import AT

STEPS = AT + 6


def _seen(step: int, **by_rank: tuple[int, int]) -> Seen[object]:
    said = [
        Observation(rank, step, step, "", {name: values[rank] for name, values in by_rank.items()}) for rank in (0, 1)
    ]
    return Seen(tuple(said), None)


def _update(
    synchrony: Synchrony,
    step: int,
    *,
    alike: bool,
    equal: bool,
    reducer: Reducer = Reducer.UNKNOWN,
    met: bool = False,
) -> tuple[frozenset[str], frozenset[str]]:
    """What is not judged before update `step` and after it. met: the weights agree before it."""
    apart = synchrony.state is not State.TOGETHER and not met
    before = synchrony.before(
        _seen(
            step,
            weights=(10 * step, 10 * step + apart),
            gradient=(5, 5 + (not alike)),
            reduces=(reducer.value,) * 2,
            written=(int(met),) * 2,
            norm=(1, 1),
        )
    )
    after = synchrony.after(
        _seen(step, weights=(10 * step + 5, 10 * step + 5 + (not equal)), optimizer=(1, 1), updates=(step, step))
    )
    return before, after


def test_where_it_is_seen_who_reduces_nothing_waits() -> None:
    """A gradient that differs is judged before the update, weights after it."""
    assert _update(Synchrony(), 1, alike=False, equal=False, reducer=Reducer.KNOWN) == (frozenset(), frozenset())


def test_where_it_is_not_seen_the_update_decides() -> None:
    """Gradients that differ are let pass while the weights agree after it; weights that part then are a violation."""
    synchrony = Synchrony()
    for step in (1, 2):
        assert _update(synchrony, step, alike=False, equal=True)[0] == {"gradients-agree"}
    before, after = _update(synchrony, 3, alike=False, equal=False)
    assert (before, after) == ({"gradients-agree"}, frozenset())
    assert synchrony.state is State.TOGETHER


def test_weights_that_part_are_suspected_once_and_held_where_they_agree_again() -> None:
    """Local SGD is known by its first synchronisation; one that is long overdue is judged."""
    synchrony = Synchrony()
    assert "replicas-agree" in _update(synchrony, 1, alike=False, equal=False)[1]
    assert synchrony.parted(1)
    for step in (2, 3):
        assert "replicas-agree" in _update(synchrony, step, alike=False, equal=False)[1]
        assert not synchrony.parted(step)
    _update(synchrony, 4, alike=False, equal=False, met=True)
    assert (synchrony.state, synchrony.met, synchrony.longest) == (State.LOCAL, 1, 3)
    assert "1 times, at most 3 updates apart" in synchrony.closing_line()
    waiting = {step: _update(synchrony, step, alike=False, equal=False)[1] for step in range(5, 60)}
    assert min(step for step, clauses in waiting.items() if "replicas-agree" not in clauses) == 4 + 4 * 3 + 16 + 1


def test_a_window_left_out_once_is_certain_at_the_next_reduction() -> None:
    """DDP in `no_sync` for one whole update: suspected there, and judged where gradients are reduced again."""
    synchrony = Synchrony()
    for step in (1, 2, 3):
        _update(synchrony, step, alike=True, equal=True, reducer=Reducer.KNOWN)
    assert "replicas-agree" in _update(synchrony, 4, alike=False, equal=False, reducer=Reducer.LEFT_OUT)[1]
    assert _update(synchrony, 5, alike=True, equal=False, reducer=Reducer.KNOWN) == (frozenset(), frozenset())


def _never_together() -> list[tuple[str, str]]:
    model = LayerNormed()
    said = []
    optimizer = sgd(list(model.parameters()))
    w = andon.watch(model, optimizer, action="raise")
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    said += [(each.clause, str(each)) for each in w.findings]
    with pytest.raises(Violation, match="never agreed again until the close") as caught:
        w.close()
    return [*said, (str(caught.value.clause), str(caught.value))]


def test_what_never_comes_together_is_one_suspicion_and_a_violation_at_the_close() -> None:
    """Nothing is raised before, since local SGD looks the same; every rank raises then."""
    for outcome in run_ranks(2, _never_together):
        (first, suspicion), (last, _) = outcome.get()
        assert (first, last) == ("replicas-agree", "replicas-agree")
        assert "nothing was seen to reduce" in suspicion
        assert "likely" not in suspicion


SEEN = {
    "plain loop": "weight",
    "step that reduces and deals out slices": "weight",
    "step that deals out parameters, DDP": "gradient",
    "local SGD behind a reduced warm-up": "rate",
    "DDP inside a task, with an average": "weight",
    "two wrapped modules in one, adversaries": "weight",
    "mean teacher in the model": "weight",
    "ReLoRA": "gradient",
    "groups clipped apart": "gradient",
}


def _twins() -> dict[str, tuple[str, ...]]:
    return {name: unannounced(name, run_twin(name, fault, STEPS)) for name, fault in SEEN.items()}


def test_a_fault_in_a_loop_that_is_left_alone_is_seen() -> None:
    """Each kind that was taken for faulty is silent when it is right, and not when it is not."""
    for outcome in run_ranks(2, _twins, deadline_s=300.0):
        assert [name for name, said in outcome.get().items() if not said] == []


def _opened_late(local: bool) -> list[tuple[str, bool]]:
    """A watch that opens just before the first update, as that of a script does. local: SGD in `no_sync`, averaged."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.full((4, 3), 1.0 + dist.get_rank())
    with model.no_sync() if local else contextlib.nullcontext():
        (model if local else model.module)(rows).square().mean().backward()
        watch = andon.watch(model, optimizer, action=lambda _: None)
        for step in range(1, 5):
            optimizer.step()
            optimizer.zero_grad()
            if local and step % 2 == 0:
                with torch.no_grad():
                    for parameter in model.parameters():
                        dist.all_reduce(parameter)
                        parameter /= dist.get_world_size()
            (model if local else model.module)(rows).square().mean().backward()
    watch.close()
    return [(each.clause, watch.violations > 0) for each in watch.findings]


@pytest.mark.parametrize(("local", "found"), [(True, ("replicas-agree", False)), (False, ("gradients-agree", True))])
def test_a_first_window_that_was_not_seen_is_as_the_wrapper_stands(local: bool, found: tuple[str, bool]) -> None:
    """DDP in `no_sync` may be local SGD, and is suspected; calling past DDP is a fault at the first update."""
    for outcome in run_ranks(2, _opened_late, local):
        assert outcome.get()[0] == found
