"""The ledger of a watched loop: what it says is what happened, what ends it, and what the loop may tell it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
from functools import partial
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
from andon_contracts.record import Broken, End, Resume, Start, Step
from andon_contracts.violation import Violation
from andon_contracts.watch import Watch
from andon_falsify.claims.ledgers import read_run, verify
from andon_falsify.verdict import Outcome
from tests.support.ledger_lines import verify_chain
from tests.watch.small import Dropping, answers, net, raised_by, sgd, watched

ROWS, BATCH, EPOCHS, RATE, CLIP = 11, 4, 2, 0.1, 0.1
STEPS = EPOCHS * 3


def model_of(kind: str = "plain") -> nn.Module:
    """The same weights on every rank, wrapped as `kind` says."""
    if kind == "ddp":
        return DistributedDataParallel(net())
    return fully_shard(net()) if kind == "fsdp" else net()


def data() -> tuple[Tensor, list[list[int]]]:
    """The rows, and the ids of every batch: the last one of an epoch is ragged."""
    rows = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1))
    orders = [torch.randperm(ROWS, generator=torch.Generator().manual_seed(7 + e)).tolist() for e in range(EPOCHS)]
    return rows, [order[at : at + BATCH] for order in orders for at in range(0, ROWS, BATCH)]


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """The sum over `rows`; it has a graph even if `rows` is empty."""
    return model(rows).square().sum()


def train(w: Watch, model: nn.Module, optimizer: torch.optim.Optimizer, *, clip: bool) -> None:
    """Every rank takes every world-th row; the gradient is that of the mean over the whole batch."""
    rows, batches = data()
    rank, world = dist.get_rank(), dist.get_world_size()
    averages = not isinstance(model, nn.Sequential) or hasattr(model, "set_requires_gradient_sync")
    for ids in batches:
        mine = ids[rank::world]
        loss = loss_of(model, rows[mine])
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


def steps_in(path: Path) -> list[Step]:
    return [record for record in read_ledger(path) if isinstance(record, Step)]


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
    batches = data()[1]
    for kind, optimizer_of, clip in CASES[dist.get_world_size()]:
        model = model_of(kind)
        optimizer = optimizer_of(model)
        path = Path(folder, name_of(kind, optimizer_of, clip))
        os.environ["ANDON_PROBE"] = "0:0"
        with andon.watch(
            model, optimizer, action="raise", ledger=path, rows=ROWS, plan=lambda step: batches[step - 1]
        ) as w:
            train(w, model, optimizer, clip=clip)


CASES = {
    1: [("plain", adam, True), ("plain", sgd, False)],
    2: [("ddp", adam, True), ("ddp", adam, False), ("plain", sgd, False), ("fsdp", adam, True), ("fsdp", sgd, False)],
    3: [("ddp", sgd, False), ("fsdp", adam, True)],
}


@pytest.fixture(scope="module", params=CASES)
def ledgers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """The world, and the folder with the ledgers of its cases."""
    folder = tmp_path_factory.mktemp("ledgers")
    answers(request.param, _runs, str(folder))
    return request.param, folder


def test_a_sketch_is_of_the_whole_gradient_before_clipping_whatever_holds_it(ledgers: tuple[int, Path]) -> None:
    """Its square is that of the gradient, within the error of 4093 sums: no two of these few elements share one."""
    world, folder = ledgers
    for case in CASES[world]:
        found = json.loads((folder / f"{name_of(*case)}.sketch").read_text())
        first, (_, norm, _) = torch.tensor(found["sums"]), expected(sgd, clip=False)[0]
        assert (float(first.norm()), found["bits"]) == (pytest.approx(norm, rel=1e-5), 24)
        other = torch.tensor(json.loads((folder / f"{name_of(*CASES[world][0])}.sketch").read_text())["sums"])
        assert torch.allclose(first, other, rtol=1e-5, atol=1e-6 * norm)


def test_a_ledger_says_what_happened_at_every_update(ledgers: tuple[int, Path]) -> None:
    """All is as of one process with the whole batch; the norm is that before clipping, and of whole tensors where ranks
    hold shards. Replicas have one digest, that of the step; shards have none, since no other rank holds them."""
    world, folder = ledgers
    for kind, optimizer_of, clip in CASES[world]:
        path = folder / name_of(kind, optimizer_of, clip)
        start, *_, end = read_ledger(path)
        assert isinstance(start, Start)
        assert (start.world, start.writer, start.plan.rows) == (world, "watch", ROWS)
        assert isinstance(end, End)
        assert (end.step, end.reason, end.violations) == (STEPS, "finished", 0)
        found = steps_in(path)
        assert [step.step for step in found] == list(range(1, STEPS + 1))
        for step, ids, wanted in zip(found, data()[1], expected(optimizer_of, clip=clip), strict=True):
            assert sorted(step.ids) == sorted(ids)
            assert [part.ids for part in step.ranks] == [tuple(ids[rank::world]) for rank in range(world)]
            assert (step.epoch, step.count, step.lr.value) == ((step.step - 1) // 3, len(ids), RATE)
            assert step.position == BATCH * ((step.step - 1) % 3)
            seen = [each and each.value for each in (step.loss, step.grad_norm, step.weights_norm)]
            assert seen == pytest.approx(wanted, rel=1e-4), (kind, step.step)
            assert step.gradient_at == (None if clip else "optimizer")
            held = {(part.weights, part.gradient, part.optimizer) for part in step.ranks}
            whole = (step.digests.weights, step.digests.gradient, step.digests.optimizer)
            assert held == ({(None, None, None)} if kind == "fsdp" else {whole})


@pytest.mark.parametrize("ledgers", [2], indirect=True)
def test_the_gradients_digest_is_of_before_clipping(ledgers: tuple[int, Path]) -> None:
    both = [steps_in(ledgers[1] / name_of("ddp", adam, clip)) for clip in (True, False)]
    first, second = ([step.digests.gradient for step in steps[:2]] for steps in both)
    assert first[0] == second[0]
    assert first[0] != first[1] != second[1]


def outcomes_of(path: Path) -> dict[str, Outcome]:
    return {verdict.claim: verdict.outcome for verdict in verify([read_run(path)])}


def test_the_checkers_read_it(ledgers: tuple[int, Path]) -> None:
    world, folder = ledgers
    for kind, optimizer_of, clip in CASES[world]:
        path = folder / name_of(kind, optimizer_of, clip)
        verify_chain(path.read_bytes().splitlines(keepends=True))
        verdicts = outcomes_of(path)
        alone = world == 1 or kind == "fsdp"
        assert verdicts["replicas-agree"] is (Outcome.NOT_APPLICABLE if alone else Outcome.HOLDS)
        assert {verdicts[name] for name in ("chain-intact", "samples-once", "loss-finite")} == {Outcome.HOLDS}
        assert set(verdicts.values()) == {Outcome.HOLDS, Outcome.NOT_APPLICABLE}


# what goes wrong


def _flip(model: nn.Module, where: str, step: int) -> None:
    """Rank 1's weights part at update 2: by another gradient, or by a write that no version counter shows."""
    if step == 2 and dist.get_rank() == 1:
        first = next(model.parameters())
        (first.grad if where == "before" else first.data).view(torch.int32)[0, 0] ^= 1 << 20


def _broken_loops(folder: str) -> list[str]:
    said = []
    for action in ("warn", "raise"):
        for where in ("before", "after"):
            model, path = net(), Path(folder, f"{action}-{where}.jsonl")
            try:
                watched(model, sgd(model), 3, partial(_flip, model, where), action=action, ledger=path)
                said.append("went on")
            except Violation as found:
                said.append(found.clause)
    return said


def test_violations_are_lines_with_what_was_done(tmp_path: Path) -> None:
    """A violation that raises before an update leaves no record of that update; one after it does."""
    said = ["went on", "went on", "gradients-agree", "replicas-agree"]
    assert answers(2, _broken_loops, str(tmp_path)) == [said, said]
    for action, where, steps in (("warn", "before", 3), ("raise", "before", 1), ("raise", "after", 2)):
        path = tmp_path / f"{action}-{where}.jsonl"
        *records, end = read_ledger(path)
        broken = [record for record in records if isinstance(record, Broken)]
        first = broken[0]
        assert (first.step, first.action) == (2, "warned" if action == "warn" else "raised")
        assert first.clause == ("gradients-agree" if where == "before" else "replicas-agree")
        assert (first.applied, first.tensor) == (True if where == "after" else None, "0.weight")
        assert len(steps_in(path)) == steps
        assert isinstance(end, End)
        violations = sum(each.action != "suspected" for each in broken)
        assert (end.reason, end.violations) == ("finished" if action == "warn" else "violation", violations), broken
    halted = outcomes_of(tmp_path / "raise-after.jsonl")
    assert (halted["halt-together"], halted["replicas-agree"]) == (Outcome.HOLDS, Outcome.FALSIFIED)
    assert outcomes_of(tmp_path / "warn-before.jsonl")["halt-together"] is Outcome.NOT_APPLICABLE


def test_an_update_of_more_rows_than_a_line_takes_ends_no_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A million row ids take more than 16 MiB; here three take more than a line may have."""
    model = net()
    optimizer = sgd(model)
    with andon.watch(model, optimizer, ledger=tmp_path / "l.jsonl") as w:
        monkeypatch.setattr("andon_contracts.record.MAX_LINE", 100)
        w.batch([0, 1, 2])
        loss_of(model, data()[0]).backward()
        optimizer.step()
    assert "ledger: no further lines are written: a step record takes" in capsys.readouterr().err


def _refusals(folder: str) -> list[str]:
    model, taken, other = net(), Path(folder, "taken.jsonl"), Path(folder, "other.jsonl")
    refused = (taken, Path(folder, "damaged.jsonl"), Path(folder, "file", "l.jsonl"), Path(folder))
    found = [raised_by(lambda path=path: andon.watch(model, sgd(model), ledger=path).close()) for path in refused]
    with andon.watch(model, sgd(model), ledger=taken, start=6):
        pass
    with andon.watch(model, sgd(model), ledger=other):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
        with pytest.raises(ValueError, match=r"another process|its own message"):
            andon.watch(model, sgd(model), ledger=other)
    return found


def test_an_unwritable_ledger_is_refused_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another script's ledger, a damaged file, an impossible path, an open ledger: a ValueError, and no rank hangs.

    With `start=` the watch continues the same ledger, which gets a resume line.
    """
    with monkeypatch.context() as patch:
        patch.setattr("sys.argv", ["other.py"])
        andon.watch(model := net(), sgd(model), ledger=tmp_path / "taken.jsonl").close()
    (tmp_path / "damaged.jsonl").write_text("{}\n")
    (tmp_path / "file").touch()
    writer, other = answers(2, _refusals, str(tmp_path))
    assert ["already contains another run" in writer[0], ":1: " in writer[1]] == [True, True]
    assert all("cannot be written" in said for said in writer[2:])
    assert all("rank 0: " in said for said in other)
    *_, ended, resumed, end = read_ledger(tmp_path / "taken.jsonl")
    assert [type(each) for each in (ended, resumed, end)] == [End, Resume, End]
    assert resumed.step == 6


def test_a_line_that_another_writer_is_writing_is_not_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second writer is refused before it touches the file, in which the first one's last line is not whole yet."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    path = tmp_path / "l.jsonl"
    with andon.watch(model := net(), sgd(model), ledger=path):
        whole = path.read_bytes()
        with path.open("ab") as file:
            file.write(b'{"v":')
        with pytest.raises(ValueError, match="is being written by another process"):
            andon.watch(other := net(), sgd(other), ledger=path)
        assert path.read_bytes() == whole + b'{"v":'
        os.truncate(path, len(whole))


def test_the_environment_names_a_ledger_and_a_keyword_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that is refused does not use the name up."""
    monkeypatch.setenv("ANDON_LEDGER", str(tmp_path / "named.jsonl"))
    assert "every" in raised_by(lambda: andon.watch(net(), sgd(net()), every=-1))
    for given in (None, tmp_path / "keyword.jsonl", None):
        with andon.watch(model := net(), sgd(model), ledger=given):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keyword.jsonl", "named-2.jsonl", "named.jsonl"]


def test_a_violation_that_only_the_close_finds_ends_the_ledger(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    w = andon.watch(model := net(), sgd(model), action="raise", updates=1, ledger=path)
    with pytest.raises(Violation, match="updates-planned"):
        w.close()
    *_, end = read_ledger(path)
    assert isinstance(end, End)
    assert (end.reason, end.violations) == ("violation", 1)


# what the loop tells, and what it costs


def _full_disk(path: str) -> tuple[int, int]:
    model = net()
    optimizer = sgd(model)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), andon.watch(model, optimizer, ledger=path) as w:
        if dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
        train(w, model, optimizer, clip=False)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)  # what a rank says may go to a file as well
    return said.getvalue().count("andon.watch: ledger: no further lines"), w.evaluations["gradients-agree"]


def test_a_full_disk_ends_the_ledger_and_not_the_loop(tmp_path: Path) -> None:
    assert answers(2, _full_disk, str(tmp_path / "l.jsonl")) == [(1, STEPS), (0, STEPS)]
    assert 0 < len(steps_in(tmp_path / "l.jsonl")) < STEPS


def test_several_optimizers_have_their_own_lines(tmp_path: Path) -> None:
    """Updates are numbered through, and each says which optimizer's weights it is of."""
    model = net()
    parts = [model[0], model[2]]
    optimizers = [sgd(part) for part in parts]
    with andon.watch(model, optimizers, ledger=tmp_path / "l.jsonl"):
        for step in range(3):
            loss_of(model, data()[0]).backward()
            for optimizer in optimizers[: 1 + step % 2]:
                optimizer.step()
            model.zero_grad()
    steps = steps_in(tmp_path / "l.jsonl")
    assert [(step.step, step.optimizer_index) for step in steps] == [(1, 0), (2, 0), (3, 1), (4, 0)]
    norms = [torch.cat([p.detach().reshape(-1) for p in part.parameters()]).norm().item() for part in parts]
    assert [step.weights_norm.value for step in steps[:1:-1]] == pytest.approx(norms)


def test_checkpoints_and_evaluations_are_lines(tmp_path: Path) -> None:
    model, path = net(), tmp_path / "l.jsonl"
    optimizer = sgd(model)
    with andon.watch(model, optimizer, ledger=path) as w:
        loss_of(model, data()[0]).backward()
        optimizer.step()
        w.saved(tmp_path / "first.pt")
        w.evaluated([0, 1], [1, 1], [1, 0], {"accuracy": 0.5})
        w.loaded(tmp_path / "first.pt")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["start", "step", "checkpoint", "eval", "resume", "end"]
    assert [line["step"] for line in lines[1:]] == [1] * 5
    assert (lines[2]["name"], lines[4]["name"]) == ("first.pt", "first.pt")
    assert lines[3]["scores"]["accuracy"]["value"] == 0.5
    verify_chain(path.read_bytes().splitlines(keepends=True))


class Skipping(torch.optim.SGD):
    """As a fused optimizer under a loss scaler: it is called, told of an overflow, and changes nothing."""

    found_inf = torch.ones(1)

    def step(self, closure: object = None) -> None:
        """Nothing."""


def test_a_skipped_update_is_marked(tmp_path: Path) -> None:
    model, path = net(), tmp_path / "l.jsonl"
    watched(
        model, Skipping(model.parameters(), lr=RATE), 1, loss=lambda m: m(data()[0]).sum() * float("inf"), ledger=path
    )
    (step,) = steps_in(path)
    assert (step.skipped, step.grad_norm) == (True, None)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Sequential(nn.Dropout(0.25), nn.Linear(4, 3)), "dropout in module 0 (p = 0.25)"),
        (nn.Sequential(Dropping(), nn.Linear(4, 3)), "functional dropout or other noise"),
        (nn.Sequential(nn.Dropout(0.25), nn.Linear(4, 3)).eval(), None),
        (nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 3)), None),
    ],
)
def test_what_draws_in_a_forward_pass_is_written_down(model: nn.Module, said: str | None, tmp_path: Path) -> None:
    """By the random state before and after it, so that dropout without a module is seen too; then by the modules."""

    def loss(model: nn.Module) -> Tensor:
        rows = torch.randn(2, 4)  # a draw of the loop's, and none of the model's
        return model(rows).square().mean()

    watched(model, sgd(model), 6, loss=loss, ledger=tmp_path / "l.jsonl")
    assert [step.draws for step in steps_in(tmp_path / "l.jsonl")] == [said] * 4 + [None] * 2
