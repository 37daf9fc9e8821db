"""The ledger of a watched loop: what it says is what happened, and the tools that read a run's ledger read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import andon
from andon.run.ledger import read_ledger
from andon_contracts.record import End, Start
from andon_falsify.claims.ledgers import read_run, verify
from andon_falsify.verdict import Outcome
from tests.support.ledger_lines import verify_chain
from tests.support.ranks import run_ranks
from tests.watch.ledger_loop import BATCH, CLIP, RATE, ROWS, STEPS, adam, data, loss_of, model_of, sgd, steps_of, train

pytestmark = pytest.mark.xdist_group("test_ledger")


def expected(optimizer_of: Any, *, clip: bool) -> list[tuple[float, float, float]]:
    """(loss, norm of the gradient before clipping, norm of the weights after) by one process in float64."""
    rows, batches = data()
    model = model_of().double()
    optimizer = optimizer_of(model)
    found = []
    for ids in batches:
        loss = loss_of(model, rows[ids].double()) / len(ids)
        loss.backward()
        norm = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).norm()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).norm()
        found.append((float(loss.detach()), float(norm), float(weights)))
    return found


def name_of(kind: str, optimizer_of: Any, clip: bool) -> str:
    return f"{kind}-{optimizer_of.__name__}{'-clipped' * clip}.jsonl"


def _runs(folder: str) -> None:
    for kind, optimizer_of, clip in CASES[dist.get_world_size()]:
        model = model_of(kind)
        optimizer = optimizer_of(model)
        path = Path(folder, name_of(kind, optimizer_of, clip))
        with andon.watch(model, optimizer, action="raise", ledger=path, rows=ROWS) as w:
            train(w, model, optimizer, clip=clip)


CASES = {
    1: [("plain", adam, True), ("plain", sgd, False)],
    2: [
        ("ddp", adam, True),
        ("ddp", adam, False),
        ("plain", sgd, False),
        ("fsdp", adam, True),
        ("fsdp", sgd, False),
    ],
    3: [("ddp", sgd, False), ("fsdp", adam, True)],
}


@pytest.fixture(scope="module", params=CASES)
def ledgers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """The world, and the folder with the ledgers of its cases."""
    folder = tmp_path_factory.mktemp("ledgers")
    for outcome in run_ranks(request.param, _runs, str(folder)):
        outcome.get()
    return request.param, folder


def test_a_ledger_says_what_happened_at_every_update(ledgers: tuple[int, Path]) -> None:
    """Rows, epoch, rate, loss and both norms of every update are those of one process with the whole batch.

    The norm is that before clipping, and of the whole tensors where ranks hold shards.
    """
    world, folder = ledgers
    for kind, optimizer_of, clip in CASES[world]:
        path = folder / name_of(kind, optimizer_of, clip)
        records = list(read_ledger(path))
        start, *_, end = records
        assert isinstance(start, Start)
        assert (start.world, start.writer, start.plan.rows) == (world, "watch", ROWS)
        assert isinstance(end, End)
        assert (end.step, end.reason, end.violations) == (STEPS, "finished", 0)
        found = steps_of(records)
        assert [step.step for step in found] == list(range(1, STEPS + 1))
        for step, ids, wanted in zip(found, data()[1], expected(optimizer_of, clip=clip), strict=True):
            assert sorted(step.ids) == sorted(ids)
            assert [part.ids for part in step.ranks] == [tuple(ids[rank::world]) for rank in range(world)]
            assert (step.epoch, step.count, step.lr.value) == ((step.step - 1) // 3, len(ids), RATE)
            assert step.position == BATCH * ((step.step - 1) % 3)
            assert step.loss is not None
            assert step.grad_norm is not None
            assert step.weights_norm is not None
            seen = (step.loss.value, step.grad_norm.value, step.weights_norm.value)
            assert seen == pytest.approx(wanted, rel=1e-4), (kind, step.step)
            assert step.gradient_at == (None if clip else "optimizer")


def test_a_ledger_holds_each_ranks_digests_where_ranks_must_agree(ledgers: tuple[int, Path]) -> None:
    """Replicas have one digest, that of the step; shards have none, since no other rank holds them."""
    world, folder = ledgers
    for kind, optimizer_of, clip in CASES[world]:
        for step in steps_of(list(read_ledger(folder / name_of(kind, optimizer_of, clip)))):
            held = {(part.weights, part.gradient, part.optimizer) for part in step.ranks}
            digests = step.digests
            whole = (digests.weights, digests.gradient, digests.optimizer)
            assert held == ({(None, None, None)} if kind == "fsdp" else {whole})


def test_the_gradients_digest_is_of_before_clipping(ledgers: tuple[int, Path]) -> None:
    """The first gradient of a loop has one digest whether the loop clips it or not, and the second has another."""
    world, folder = ledgers
    if world != 2:
        pytest.skip("one world is enough")
    both = [steps_of(list(read_ledger(folder / name_of("ddp", adam, clip)))) for clip in (True, False)]
    first, second = ([step.digests.gradient for step in steps[:2]] for steps in both)
    assert first[0] == second[0]
    assert first[0] != first[1] != second[1]


def test_the_checkers_read_it(ledgers: tuple[int, Path]) -> None:
    """`andon verify` finds the chain, the replicas, the rows and the losses to hold, and leaves nothing unknown."""
    world, folder = ledgers
    for kind, optimizer_of, clip in CASES[world]:
        path = folder / name_of(kind, optimizer_of, clip)
        verify_chain(path.read_bytes().splitlines(keepends=True))
        verdicts = {verdict.claim: verdict.outcome for verdict in verify([read_run(path)])}
        alone = world == 1 or kind == "fsdp"
        assert verdicts["replicas-agree"] is (Outcome.NOT_APPLICABLE if alone else Outcome.HOLDS)
        assert {verdicts[name] for name in ("chain-intact", "samples-once", "loss-finite")} == {Outcome.HOLDS}
        assert set(verdicts.values()) == {Outcome.HOLDS, Outcome.NOT_APPLICABLE}
