"""Which ranks must agree and when: it depends on what their loop does, on the mesh, and on the device."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.agree import Observation, RankSet
from andon_contracts.laws.law import Seen
from andon_contracts.violation import Violation
from andon_contracts.watch import Watch, updates
from andon_contracts.watch.checks.weights import Reducer, State, Synchrony
from andon_contracts.watch.exchange import Replicas, replicas_of
from falsify.power.planting import patched
from tests.watch.clean import ignore
from tests.watch.clean_communication import backward
from tests.watch.clean_kinds import run_twin, unannounced
from tests.watch.clean_models import LayerNormed
from tests.watch.clean_twins import AT
from tests.watch.small import answers, clauses, net, sgd, watched

STEPS = AT + 6


def _seen(step: int, **by_rank: tuple[int, int]) -> Seen[object]:
    said = [
        Observation(rank, step, step, "", {name: values[rank] for name, values in by_rank.items()}) for rank in (0, 1)
    ]
    return Seen(tuple(said), None)


def _update(synchrony: Synchrony, step: int, what: str = "") -> tuple[frozenset[str], frozenset[str]]:
    """What is not judged before update `step` and after it, in words of which the opposite is otherwise so.

    reduced: it is seen who reduces; left out: and that it is left out. alike: the gradients agree. equal: the weights
    agree after the update; met: before it.
    """
    reducer = Reducer.KNOWN if "reduced" in what else Reducer.LEFT_OUT if "left out" in what else Reducer.UNKNOWN
    alike, equal, met = "alike" in what, "equal" in what, "met" in what
    apart = synchrony.state is not State.TOGETHER and not met
    gradients = {"gradient": (5, 5 + (not alike)), "reduces": (reducer.value,) * 2, "written": (int(met),) * 2}
    before = synchrony.before(_seen(step, weights=(10 * step, 10 * step + apart), norm=(1, 1), **gradients))
    weights = (10 * step + 5, 10 * step + 5 + (not equal))
    after = synchrony.after(_seen(step, weights=weights, optimizer=(1, 1), updates=(step, step)))
    return before, after


def test_weights_that_part_are_suspected_once_and_held_where_they_agree_again() -> None:
    """Local SGD is known by its first synchronisation; one that is long overdue is judged."""
    synchrony = Synchrony()
    for step in (1, 2, 3):
        assert "replicas-agree" in _update(synchrony, step)[1]
        assert synchrony.parted(step) == (step == 1)
    _update(synchrony, 4, "met")
    assert (synchrony.state, synchrony.met, synchrony.longest) == (State.LOCAL, 1, 3)
    assert "1 update that averaged the weights, at most 3 updates apart" in synchrony.closing_line()
    waiting = {step: _update(synchrony, step)[1] for step in range(5, 60)}
    assert min(step for step, clauses in waiting.items() if "replicas-agree" not in clauses) == 4 + 4 * 3 + 16 + 1


def test_a_window_left_out_once_is_certain_at_the_next_reduction() -> None:
    """DDP in `no_sync` for one whole update: suspected there, and judged where gradients are reduced again."""
    synchrony = Synchrony()
    for step in (1, 2, 3):
        _update(synchrony, step, "reduced, alike, equal")
    assert "replicas-agree" in _update(synchrony, 4, "left out")[1]
    assert _update(synchrony, 5, "reduced, alike") == (frozenset(), frozenset())


def _never_together(wrapped: bool) -> list[tuple[str, str]]:
    model: Any = DistributedDataParallel(LayerNormed()) if wrapped else LayerNormed()
    optimizer = sgd(model)
    w = andon.watch(model, optimizer, action="raise")
    for step in range(4):
        optimizer.zero_grad()
        with model.no_sync() if wrapped else contextlib.nullcontext():
            backward(model, step)
        optimizer.step()
    said = [(each.clause, str(each)) for each in w.findings]
    with pytest.raises(Violation, match="did not agree again before the close") as caught:
        w.close()
    return [*said, (caught.value.clause, str(caught.value))]


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_never_comes_together_is_one_suspicion_and_a_violation_at_the_close(wrapped: bool) -> None:
    """Nothing is raised before, since local SGD looks the same; every rank raises then, with the likely cause."""
    for (first, suspicion), (last, said) in answers(2, _never_together, wrapped):
        assert (first, last) == ("replicas-agree", "replicas-agree")
        assert re.search(r"no reduction of gradients was seen in 4 updates\n  likely   is the model outside DDP", said)
        assert "no reduction of their gradients was seen" in suspicion
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
    for said_of in answers(2, _twins, deadline_s=300.0):
        assert [name for name, said in said_of.items() if not said] == []


def _opened_late(local: bool) -> list[tuple[str, bool]]:
    """A watch that opens just before the first update, as that of a script does. local: SGD in `no_sync`, averaged."""
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    rows = torch.full((4, 4), 1.0 + dist.get_rank())
    with model.no_sync() if local else contextlib.nullcontext():
        (model if local else model.module)(rows).square().mean().backward()
        watch = andon.watch(model, optimizer, action=ignore)
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
    assert [said[0] for said in answers(2, _opened_late, local)] == [found, found]


# replicas of shards


def test_ranks_are_held_to_their_own_part() -> None:
    three = Replicas((0, 1, 0, 1, 0, 1))
    assert three.aligned([5, 6, 5, 6, 5, 6]) == (0,) * 6
    assert three.aligned([5, 6, 7, 6, 5, 6]) == (0, 0, 2, 0, 0, 0)
    two = Replicas((0, 1, 0, 1))
    odd = two.aligned([5, 6, 5, 7])
    assert odd[0] == odd[2] == 0 != odd[1] == odd[3]
    assert Replicas((0, 0, 0)).aligned([5, 6, 5]) == (5, 6, 5)
    assert Replicas((0, 1, 2)).aligned([5, 6, 7]) == (0, 0, 0)
    assert [each.any_held_twice for each in (Replicas((0, 1, 2)), Replicas((0, 1), frozenset({3})))] == [False, True]
    assert [each.cut for each in (three, two, Replicas((0, 0)), Replicas((0, 1)), Replicas((0, 0, 1)))] == [
        True, True, False, False, False,
    ]  # fmt: skip


def test_what_is_no_partition_is_refused() -> None:
    assert replicas_of([0, 1, 0, 1], [2, 2, 2, 2]).copies == 2
    with pytest.raises(ValueError, match="rank 1 passed a group of 2, but 1 ranks passed one that begins at 1"):
        replicas_of([0, 1, 0, 3], [2, 2, 2, 2])


def _hybrid(replicas: int, drawn: bool = False) -> tuple[list[tuple[str, int]], int]:
    """What is found where rank 1 flips a bit of its shard before update 3; and how often replicas were compared.

    drawn: every rank puts in a whole layer of its own after sharding.
    """
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replicate", "shard")))
    if drawn:
        torch.manual_seed(dist.get_rank())
        model[1] = nn.Linear(5, 5)

    def flip(step: int) -> None:
        if step == 3 and dist.get_rank() == 1:
            model[0].weight.to_local().data.view(torch.int32)[0, 0] ^= 1 << 20

    rows = torch.full((3, 4), 1.0 + dist.get_rank())
    w = watched(model, sgd(model, 0.01), 4, flip, lambda each: each(rows).square().sum())
    return [(each.clause, each.step) for each in w.findings], w.evaluations.get("replicas-agree", 0)


def _experts() -> list[list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    found = []
    for replicate in (mesh["data"], mesh["data"].get_group(), None):
        torch.manual_seed(mesh["expert"].get_local_rank())
        model = nn.Linear(3, 2)
        optimizer = sgd(model, 0.01)

        def reduce(_: int, model: nn.Module = model) -> None:
            for p in model.parameters():
                dist.all_reduce(p.grad, group=mesh["data"].get_group())

        found.append(clauses(watched(model, optimizer, 2, reduce, replicate=replicate)))
    with pytest.raises(ValueError, match="this mesh is 2-D"):
        andon.watch(model, optimizer, replicate=mesh)
    with pytest.raises(ValueError, match="a process group or a device mesh, not int"):
        andon.watch(model, optimizer, replicate=2)
    return found


def _meshes() -> tuple[object, object, object, object]:
    return _hybrid(2), _hybrid(1), _experts(), _hybrid(2, drawn=True)[0][0]


def test_shards_are_compared_with_their_replicas() -> None:
    """On a 2 x 2 mesh the flipped bit is found after its update; on one dimension only counted writes are compared.

    Parts that are replicated otherwise are named by `replicate=`; without it they are found to differ.
    """
    said = answers(4, _meshes)
    assert all(one == other for one, other in pairwise(said))
    (hybrid, compared), flat, (by_mesh, by_group, untold), own = said[0]
    assert own == ("replicas-agree", 0)
    assert hybrid[:1] == [("replicas-agree", 3)]
    assert compared == 1 + 3 * 4  # before and after each update, and by counted writes
    assert flat == ([], 0)  # 5 and 2 rows are no multiples of 4, so nothing is compared
    assert by_mesh == by_group == []
    assert "replicas-agree" in untold


# updates that are judged before the next one, as with a GPU


LAST = 4


class _Parting(torch.optim.SGD):
    """Moves the weights of rank 1 a little too far in update `at`."""

    made = 0

    def step(self, closure: Callable[[], float] | None = None) -> None:
        super().step()
        self.made += 1
        if self.made == self.at and dist.get_rank() == 1:
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.add_(1e-3)


Work = Callable[[Watch, Callable[[int], tuple[str, int] | None]], Any]


def _late(at: int, work: Work, late: Callable[[object], bool] = lambda subject: True, **settings: Any) -> Any:
    """What `work` gives, with a watch and what makes one update of a loop whose weights part in update `at`, and says
    what that raised. late: whether this rank's device takes the updates."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    wrapped = DistributedDataParallel(model)
    optimizer = _Parting(model.parameters(), lr=0.1)
    optimizer.at = at

    def step(number: int) -> None:
        ids = [100 * number + 10 * dist.get_rank() + row for row in range(3)]
        watch.batch(ids)
        wrapped(torch.randn(3, 4, generator=torch.Generator().manual_seed(ids[0]))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with ExitStack() as stack:
        patched(stack, updates, "_judged_late", late)
        watch = andon.watch(wrapped, optimizer, action="raise", **settings)
        return work(watch, lambda number: _found(lambda: step(number)))


def _found(call: Callable[[], object]) -> tuple[str, int] | None:
    try:
        call()
    except Violation as found:
        return found.clause, found.step
    return None


NEXT, MIXED = "at the next, which is not made", "with ranks on different devices, at once"
# The update in which weights part, what the loop does, and what each part of that raises.
LATE: dict[str, tuple[int, Callable[..., Any], list[tuple[str, int] | None]]] = {
    "at the close, the last": (
        *(LAST, lambda watch, step, _: [*map(step, range(1, LAST + 1)), _found(watch.close)]),
        [None] * LAST + [("replicas-agree", LAST)],
    ),
    NEXT: (*(2, lambda watch, step, _: [*map(step, range(1, LAST))]), [None, None, ("replicas-agree", 2)]),
    "before a save": (
        *(1, lambda watch, step, folder: [step(1), _found(lambda: watch.saved(folder + "/checkpoint.pt"))]),
        [None, ("replicas-agree", 1)],
    ),
    MIXED: (2, lambda watch, step, _: [step(1), step(2)], [None, ("replicas-agree", 2)]),
}


def _judged(name: str, folder: str) -> list[tuple[str, int] | None]:
    at, work, _ = LATE[name]
    late = name != MIXED or dist.get_rank() == 1
    return _late(at, lambda watch, step: work(watch, step, folder), lambda subject: late, folder=folder)


@pytest.mark.parametrize("name", LATE)
def test_a_late_update_is_judged(name: str, tmp_path: Path) -> None:
    """A checkpoint of weights that have parted is none, and what is kept is of the update that was wrong."""
    at, _, expected = LATE[name]
    world = 3 if at == LAST else 2
    assert answers(world, _judged, name, str(tmp_path)) == [expected] * world
    assert list(tmp_path.glob("checkpoint*")) == []
    if name == NEXT:
        (bundle,) = tmp_path.glob("**/rank-1.json")
        assert {each.split()[0] for each in load_file(bundle.with_suffix(".safetensors"))} == {"weights"}
        assert json.loads(bundle.read_text())["ids"] == [210, 211, 212]


def _one_stays(within_s: float) -> tuple[str, int]:
    store = dist.distributed_c10d._get_default_store()

    def work(watch: Watch, step: Callable[[int], object]) -> tuple[str, int]:
        step(1)
        if dist.get_rank() == 1:
            store.wait(["closed"], timedelta(seconds=60))
        with contextlib.redirect_stderr(io.StringIO()) as said:
            watch.close()
        if dist.get_rank() == 0:
            store.set("closed", "yes")
            store.wait(["closed too"], timedelta(seconds=60))
        else:
            store.set("closed too", "yes")
        return said.getvalue(), len(watch.findings)

    with ExitStack() as stack:
        patched(stack, updates, "_AT_THE_CLOSE_S", within_s)
        return _late(LAST, work)


def test_a_rank_that_closes_later_is_not_waited_for_and_nobody_is_blamed() -> None:
    (said, first), (_, second) = answers(2, _one_stays, 0.3)
    assert "  the state after update 1 was not compared: not every rank closed its watch within 0.3 s\n" in said
    assert first == second == 0


def _reduces_and_clips() -> tuple[list[str], list[str], str]:
    """Findings of reductions in different orders, of a sparse one after a clip, and a message on different limits."""
    group, pair = dist.new_group([0, 1]), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sparse, model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2)), DistributedDataParallel(net())
    assert [RankSet([0, 1]).all_in(each) for each in (None, group, dist.new_group([0]))] == [True, True, False]

    def reduce(step: int) -> None:
        for index in (0, 1) if dist.get_rank() else (1, 0):
            dist.all_reduce(pair[index].weight.grad, group=group)

    def clip(step: int) -> None:
        nn.utils.clip_grad_norm_(sparse[1].parameters(), 1e-3)
        dist.all_reduce(sparse[0].weight.grad)

    first = clauses(watched(pair, sgd(pair), 1, reduce, group=group))[:1]
    right = clauses(watched(sparse, sgd(sparse), 2, clip, lambda model: model(torch.tensor([0, 3])).square().sum()))
    limit = 0.1 + 0.1 * dist.get_rank()
    (found,) = watched(model, sgd(model), 1, lambda _: nn.utils.clip_grad_norm_(model.parameters(), limit)).findings
    return first, right, f"{found}{found.finding.seen}"


def test_reductions_are_known_by_the_ranks_of_their_group_and_by_memory() -> None:
    for first, right, message in answers(2, _reduces_and_clips):
        assert (first, right) == (["collectives-agree"], [])
        words = (
            "gradient of 0.weight (4 of 4",
            "likely   the ranks clipped the gradient",
            "passed to the optimizer differ",
        )
        assert all(each in message for each in words)


def test_two_checks_cannot_send_one_name() -> None:
    with pytest.raises(ValueError, match="the same name"):
        updates.merged([{"norm": 1}, {"norm": 2}])
