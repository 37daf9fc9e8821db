"""The ledger of a watched loop: what it says is what happened, what ends it, and what the loop may tell it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import andon
from andon.run.ledger import read_ledger
from andon_contracts.record import Broken, End, Record, Resume, Start, Step
from andon_contracts.violation import Violation
from andon_contracts.watch import Watch
from andon_falsify.claims.ledgers import read_run, verify
from andon_falsify.verdict import Outcome
from tests.support.ledger_lines import verify_chain
from tests.support.ranks import run_ranks

ROWS, BATCH, EPOCHS, RATE, CLIP = 11, 4, 2, 0.05, 0.1
STEPS = EPOCHS * 3


def model_of(kind: str = "plain") -> nn.Module:
    """The same weights on every rank, wrapped as `kind` says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    if kind == "ddp":
        return DistributedDataParallel(model)
    return fully_shard(model) if kind == "fsdp" else model


def data() -> tuple[Tensor, list[list[int]]]:
    """The rows, and the ids of every batch: the last one of an epoch is ragged."""
    rows = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1))
    orders = [torch.randperm(ROWS, generator=torch.Generator().manual_seed(7 + e)).tolist() for e in range(EPOCHS)]
    return rows, [order[at : at + BATCH] for order in orders for at in range(0, ROWS, BATCH)]


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """The sum over `rows`; it has a graph even if `rows` is empty."""
    return model(rows).square().sum()


def train(w: Watch, model: nn.Module, optimizer: torch.optim.Optimizer, *, clip: bool, tell: bool = True) -> None:
    """Every rank takes every world-th row; the gradient is that of the mean over the whole batch."""
    rows, batches = data()
    rank, world = dist.get_rank(), dist.get_world_size()
    averages = not isinstance(model, nn.Sequential) or hasattr(model, "set_requires_gradient_sync")
    for ids in batches:
        mine = ids[rank::world]
        loss = loss_of(model, rows[mine])
        if tell:
            w.batch(mine)
            w.loss(loss.detach(), len(mine))
        (loss * (world if averages else 1) / len(ids)).backward()
        if not averages:
            for p in model.parameters():
                dist.all_reduce(p.grad)  # type: ignore[arg-type]
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def steps_of(records: list[Record]) -> list[Step]:
    return [record for record in records if isinstance(record, Step)]


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


def _all(folder: str) -> dict[str, Any]:
    works = (_broken_loops, _refusals, _full_disk)
    return {work.__name__: work(str(Path(folder, work.__name__))) for work in works}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the ledgers of each loop, with what `_refusals` is to find."""
    found = tmp_path_factory.mktemp("ends")
    refused = found / _refusals.__name__
    for work in (_broken_loops, _refusals, _full_disk):
        (found / work.__name__).mkdir()
    model = model_of()
    with andon.watch(model, sgd(model), ledger=refused / "taken.jsonl"):
        pass
    (refused / "damaged.jsonl").write_text("{}\n")
    (refused / "file").touch()
    return found


@pytest.fixture(scope="module")
def by_rank(folder: Path) -> list[dict[str, Any]]:
    """What the loops said, by rank."""
    return [outcome.get() for outcome in run_ranks(2, _all, str(folder))]


# what goes wrong


def _broken_loops(folder: str) -> list[str]:
    said = []
    for action in ("warn", "raise"):
        for where in ("before", "after"):
            model = model_of()
            optimizer = sgd(model)
            w = andon.watch(model, optimizer, action=action, ledger=Path(folder, f"{action}-{where}.jsonl"))  # type: ignore[arg-type]
            try:
                with w:
                    _lose_a_rank(model, optimizer, where)
                said.append("went on")
            except Violation as found:
                said.append(found.clause)
    return said


def _lose_a_rank(model: nn.Module, optimizer: torch.optim.Optimizer, where: str) -> None:
    """Rank 1's weights part at update 2: by another gradient, or by a write that no version counter shows."""
    for step in (1, 2, 3):
        loss_of(model, data()[0]).backward()
        if step == 2 and dist.get_rank() == 1:
            first = next(model.parameters())
            (first.grad if where == "before" else first.data).view(torch.int32)[0, 0] ^= 1 << 20  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


def test_violations_are_lines_with_what_was_done(folder: Path, by_rank: list[dict[str, Any]]) -> None:
    """A violation that raises before an update leaves no record of that update; one after it does."""
    place = folder / _broken_loops.__name__
    for said in by_rank:
        assert said[_broken_loops.__name__] == ["went on", "went on", "gradients-agree", "replicas-agree"]
    for action, where, steps in (("warn", "before", 3), ("raise", "before", 1), ("raise", "after", 2)):
        *records, end = read_ledger(place / f"{action}-{where}.jsonl")
        broken = [record for record in records if isinstance(record, Broken)]
        first = broken[0]
        assert (first.step, first.action) == (2, "warned" if action == "warn" else "raised")
        assert first.clause == ("gradients-agree" if where == "before" else "replicas-agree")
        assert first.applied is (True if where == "after" else None)
        assert first.tensor == "0.weight"
        assert len(steps_of(records)) == steps
        assert isinstance(end, End)
        violations = [each for each in broken if each.action != "suspected"]
        assert (end.reason, end.violations) == ("finished" if action == "warn" else "violation", len(violations)), (
            broken
        )
    halted = {each.claim: each.outcome for each in verify([read_run(place / "raise-after.jsonl")])}
    assert halted["halt-together"] is Outcome.HOLDS
    assert halted["replicas-agree"] is Outcome.FALSIFIED
    warned = {each.claim: each.outcome for each in verify([read_run(place / "warn-before.jsonl")])}
    assert warned["halt-together"] is Outcome.NOT_APPLICABLE


def test_a_ledger_that_is_cut_off_is_said_and_ends_no_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Log rotation cuts the file to nothing in mid-run: one line names it, and the loop trains on."""
    model, path = model_of(), tmp_path / "l.jsonl"
    optimizer = sgd(model)
    with andon.watch(model, optimizer, ledger=path):
        for step in (1, 2, 3):
            if step == 2:
                os.truncate(path, 0)
            loss_of(model, data()[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
    said = capsys.readouterr().err
    assert said.count(f"since {path}: was truncated by another program while the run wrote to it") == 2
    assert path.stat().st_size == 0


def test_an_update_of_more_rows_than_a_line_takes_ends_no_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A million row ids take more than 16 MiB; here three take more than a line may have."""
    model, path = model_of(), tmp_path / "l.jsonl"
    optimizer = sgd(model)
    with andon.watch(model, optimizer, ledger=path) as w:
        monkeypatch.setattr("andon_contracts.record.MAX_LINE", 100)
        w.batch([0, 1, 2])
        loss_of(model, data()[0]).backward()
        optimizer.step()
    assert "ledger: it ends before its time, since a step record takes" in capsys.readouterr().err


def _refusals(folder: str) -> list[str]:
    taken, damaged = Path(folder, "taken.jsonl"), Path(folder, "damaged.jsonl")
    found = []
    for path in (taken, damaged, Path(folder, "file", "l.jsonl"), Path(folder)):
        model = model_of()
        try:
            andon.watch(model, sgd(model), ledger=path).close()
            found.append("accepted")
        except ValueError as error:
            found.append(str(error))
    with andon.watch(model, sgd(model), ledger=taken, start=6):
        pass
    with andon.watch(model, sgd(model), ledger=Path(folder, "other.jsonl")):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
        with pytest.raises(ValueError, match=r"another process|its own message"):
            andon.watch(model, sgd(model), ledger=Path(folder, "other.jsonl"))
    return found


def test_a_ledger_that_cannot_be_written_is_refused_on_every_rank(folder: Path, by_rank: list[dict[str, Any]]) -> None:
    """Another run's ledger, a damaged file, an impossible path, an open ledger: a ValueError, and no rank hangs.

    With `start=` the watch continues the same ledger, which gets a resume line.
    """
    writer, other = (said[_refusals.__name__] for said in by_rank)
    assert ["holds a run already" in writer[0], ":1: " in writer[1]] == [True, True]
    assert all("cannot be written" in said for said in writer[2:])
    assert all("rank 0 was told something wrong" in said for said in other)
    *_, ended, resumed, end = read_ledger(folder / _refusals.__name__ / "taken.jsonl")
    assert isinstance(ended, End)
    assert isinstance(resumed, Resume)
    assert resumed.step == 6
    assert isinstance(end, End)


def test_a_line_that_another_writer_is_writing_is_not_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second writer is refused before it touches the file, in which the first one's last line is not whole yet."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    path = tmp_path / "l.jsonl"
    with andon.watch(model := model_of(), sgd(model), ledger=path):
        whole = path.read_bytes()
        with path.open("ab") as file:
            file.write(b'{"v":')
        with pytest.raises(ValueError, match="is being written by another process"):
            andon.watch(other := model_of(), sgd(other), ledger=path)
        assert path.read_bytes() == whole + b'{"v":'
        os.truncate(path, len(whole))


def test_the_environment_names_a_ledger_and_a_keyword_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ANDON_LEDGER names a ledger for every watch of a script; each watch gets another file."""
    monkeypatch.setenv("ANDON_LEDGER", str(tmp_path / "named.jsonl"))
    for given in (None, tmp_path / "keyword.jsonl", None):
        with andon.watch(model := model_of(), sgd(model), ledger=given):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keyword.jsonl", "named-2.jsonl", "named.jsonl"]


# what the loop tells, and what it costs


def _full_disk(folder: str) -> tuple[int, int]:
    model = model_of()
    optimizer = sgd(model)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), andon.watch(model, optimizer, ledger=Path(folder, "l.jsonl")) as w:
        if dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
        train(w, model, optimizer, clip=False)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)  # what a rank says may go to a file as well
    return said.getvalue().count("andon.watch: ledger: it ends"), w.evaluations["gradients-agree"]


def test_a_full_disk_ends_the_ledger_and_not_the_loop(folder: Path, by_rank: list[dict[str, Any]]) -> None:
    """The loop makes all its updates, rank 0 says once that the ledger is cut, and what is there is whole."""
    writer, other = (said[_full_disk.__name__] for said in by_rank)
    assert writer == (1, STEPS)
    assert other == (0, STEPS)
    steps = steps_of(list(read_ledger(folder / _full_disk.__name__ / "l.jsonl")))
    assert 0 < len(steps) < STEPS


def test_several_optimizers_have_their_own_lines(tmp_path: Path) -> None:
    """Updates are numbered through, and each says which optimizer's weights it is of."""
    model = model_of()
    first, second = model[0], model[2]  # type: ignore[index]
    optimizers = [sgd(first), sgd(second)]
    with andon.watch(model, optimizers, ledger=tmp_path / "l.jsonl"):
        for step in range(3):
            loss_of(model, data()[0]).backward()
            for optimizer in optimizers[: 1 + step % 2]:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    steps = steps_of(list(read_ledger(tmp_path / "l.jsonl")))
    assert [(step.step, step.optimizer_index) for step in steps] == [(1, 0), (2, 0), (3, 1), (4, 0)]
    norms = [step.weights_norm.value for step in steps if step.weights_norm is not None]
    assert norms[3] == pytest.approx(torch.cat([p.detach().reshape(-1) for p in first.parameters()]).norm().item())
    assert norms[2] == pytest.approx(torch.cat([p.detach().reshape(-1) for p in second.parameters()]).norm().item())


def test_checkpoints_and_evaluations_are_lines(tmp_path: Path) -> None:
    """A save, a load and an evaluation that the loop tells are recorded at their step."""
    model = model_of()
    optimizer = sgd(model)
    with andon.watch(model, optimizer, ledger=tmp_path / "l.jsonl") as w:
        loss_of(model, data()[0]).backward()
        optimizer.step()
        w.saved(tmp_path / "first.pt")
        w.evaluated([0, 1], [1, 1], [1, 0], {"accuracy": 0.5})
        w.loaded(tmp_path / "first.pt")
    lines = [json.loads(line) for line in (tmp_path / "l.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["start", "step", "checkpoint", "eval", "resume", "end"]
    assert [line["step"] for line in lines[1:]] == [1] * 5
    assert (lines[2]["name"], lines[4]["name"]) == ("first.pt", "first.pt")
    assert lines[3]["scores"]["accuracy"]["value"] == 0.5
    verify_chain((tmp_path / "l.jsonl").read_bytes().splitlines(keepends=True))


class Skipping(torch.optim.SGD):
    """As a fused optimizer under a loss scaler: it is called, told of an overflow, and changes nothing."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Nothing."""


def test_a_skipped_update_is_marked(tmp_path: Path) -> None:
    """The line says so, and gives no norm of a gradient that overflowed."""
    model = model_of()
    optimizer = Skipping(model.parameters(), lr=RATE)
    with andon.watch(model, optimizer, action="raise", ledger=tmp_path / "l.jsonl"):
        optimizer.found_inf = torch.ones(1)  # type: ignore[attr-defined]
        (loss_of(model, data()[0]) * float("inf")).backward()
        optimizer.step()
    (step,) = steps_of(list(read_ledger(tmp_path / "l.jsonl")))
    assert (step.skipped, step.grad_norm) == (True, None)


class _Functional(nn.Module):
    """A layer whose inputs are dropped by no module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(nn.functional.dropout(rows, 0.5, self.training))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "evaluating", "said"),
    [
        (nn.Sequential(nn.Dropout(0.25), nn.Linear(4, 3)), False, "dropout in module 0 (p = 0.25)"),
        (_Functional(), False, "functional dropout or other noise"),
        (nn.Sequential(nn.Dropout(0.25), nn.Linear(4, 3)), True, None),
        (nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 3)), False, None),
    ],
)
def test_what_draws_in_a_forward_pass_is_written_down(
    model: nn.Module, evaluating: bool, said: str | None, tmp_path: Path
) -> None:
    """By the random state before and after it, so that dropout without a module is seen too; then by the modules."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model.train(not evaluating)
    with andon.watch(model, optimizer, ledger=tmp_path / "l.jsonl"):
        for _ in range(6):
            rows = torch.randn(2, 4)  # a draw of the loop's, and none of the model's
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    steps = steps_of(list(read_ledger(tmp_path / "l.jsonl")))
    assert [step.draws for step in steps] == [said] * 4 + [None] * 2
