"""The step on a GPU: the host never waits for the device inside an update, and the device holds a wrong update back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from andon.backend.base import InlineBackend
from andon.config.schema import Contracts, Optimizer
from andon.step.captured import CapturedPasses
from andon.step.micro_batch import Task
from andon.step.replica import Replica
from andon.step.step import TrainingStep
from andon_contracts.laws.update import Reduced, clipped_norm
from andon_contracts.violation import Violation
from tests.support.faults import CULPRIT, FAULTS, SETTINGS, WORLD, PoisonedTask
from tests.support.toy import SEED, Settings, ToyModel, ToyTask, rate, record, trainable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OPTIMIZERS = {"adamw": Optimizer(), "sgd": Optimizer(name="sgd", momentum=0.9), "plain": Optimizer(name="sgd")}


class PinnedTask(ToyTask):
    """Toy rows that already lie on the GPU, so that loading them waits for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y, self.places = self.x.cuda(), self.y.cuda(), torch.arange(len(self.y), device="cuda")

    def load(self, ids: object, device: torch.device) -> dict[str, torch.Tensor]:
        """Rows by slices: an index from the host would have to be waited for."""
        index = torch.stack([self.places[row] for row in ids])  # type: ignore[attr-defined]
        return {"x": self.x[index], "y": self.y[index], "id": index}

    def planned_content(self, ids: object) -> torch.Tensor:
        return ToyTask().planned_content(ids)  # type: ignore[arg-type]


def made(
    world: int,
    settings: Settings,
    task: Task,
    *,
    late: bool | None = None,
    audit_every: int = 0,
    captured: bool = False,
    kind: type[nn.Module] = ToyModel,
) -> tuple[TrainingStep, list[Replica]]:
    device = torch.device("cuda", 0)
    replicas = []
    for _ in range(world):
        torch.manual_seed(0)
        model = kind().to(device)
        passes = CapturedPasses(device) if captured else None
        replicas.append(Replica(model, trainable(model), settings.optimizer, SEED, device, captured=passes))
    backend = InlineBackend([device] * world)
    audit = Contracts(audit_every=audit_every, audit_coverage="all")
    return TrainingStep(backend, replicas, task, settings.micro_batches, settings.clip_norm, audit, late=late), replicas


@pytest.fixture
def without_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("world", [1, 3])
def test_an_update_waits_for_nothing(name: str, world: int, without_waiting: None) -> None:
    settings = Settings(8, clip_norm=0.2, optimizer=OPTIMIZERS[name])
    step, _ = made(world, settings, PinnedTask(), audit_every=1)
    assert step.late
    step.attest_start({})
    first, *rest = settings.batches()
    step(first, rate(1), 1)
    torch.cuda.set_sync_debug_mode("error")
    launched = [step.launch(batch, rate(batch.step), batch.step) for batch in rest]
    results = [each.result() for each in launched]
    assert [result.step for result in results] == [2, 3, 4]
    assert all(result.digests for result in results)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_late_and_at_once_are_one_result(name: str) -> None:
    settings = Settings(8, clip_norm=0.2, optimizer=OPTIMIZERS[name])
    found = []
    for world, late in [(1, True), (3, True)] + ([(1, False)] if name == "adamw" else []):
        step, replicas = made(world, settings, PinnedTask(), late=late)
        found.append([record(step(batch, rate(batch.step), batch.step), replicas) for batch in settings.batches()])
    assert all(records == found[0] for records in found)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_held_back_by_the_device(name: str) -> None:
    step, replicas = made(WORLD, SETTINGS, PinnedTask())
    step.attest_start({})
    first, *rest = SETTINGS.batches()
    step(first, rate(1), 1)
    FAULTS[name].plant(replicas[CULPRIT])
    states = [_state(replicas)]
    launched = []
    for batch in rest:
        launched.append(step.launch(batch, rate(batch.step), batch.step))
        states.append(_state(replicas))
    with pytest.raises(Violation) as caught:
        launched[0].result()
    fault = FAULTS[name]
    assert (caught.value.clause, caught.value.step, caught.value.finding.ranks) == (fault.clause, 2, (CULPRIT,))
    assert not fault.early or states[1] == states[0]
    assert states[2] == states[1]


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_nan_is_held_back_by_the_device(where: str) -> None:
    batch = SETTINGS.batches()[0]
    step, replicas = made(1, SETTINGS, _Poisoned(batch.ids[3], where))
    before = _state(replicas)
    with pytest.raises(Violation, match="finite broken at step 1"):
        step(batch, rate(1), 1)
    assert _state(replicas)[0][0] == before[0][0]
    assert replicas[0].updates == 0


class _Poisoned(PoisonedTask):
    def __init__(self, row: int, where: str) -> None:
        super().__init__(row, where)
        self.load = PinnedTask().load  # type: ignore[method-assign]


def _state(replicas: list[Replica]) -> list[tuple[int, int, int]]:
    return [(r.weights_digest(), r.optimizer_digest(), r.updates) for r in replicas]


class Waiting(ToyModel):
    """Asks for a value in the middle of a pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert float(x.sum()) != 0.5
        return super().forward(x)


class Synchronizing(ToyModel):
    """Waits for the device by a call that torch's debug mode does not see: only the capture fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        return super().forward(x)


class RefusingOne(ToyModel):
    """Waits as `Synchronizing` does, and only for a single row: graphs of other shapes are there by then."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            torch.cuda.synchronize()
        return super().forward(x)


class Interrupted(ToyModel):
    """Ctrl-C comes while a pass is captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise KeyboardInterrupt
        return super().forward(x)


class Leaving(ToyModel):
    """Leaves its hidden layer out now and then, as drawn on the host: layer dropout of transformers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if torch.rand([]) < 0.5 else 2 * x)


def _run(kind: type[nn.Module], world: int, *, captured: bool, audit_every: int = 0) -> tuple[object, list[Replica]]:
    """Six rounds of ragged batches, so that every shape comes often enough to be captured and launched again."""
    settings = Settings(4, sizes=(10, 7, 3, 1) * 6, clip_norm=0.2)
    step, replicas = made(world, settings, PinnedTask(), captured=captured, audit_every=audit_every, kind=kind)
    step.attest_start({})
    batches = Settings(4).batches() * 6
    done = [
        record(step(replace(batch, step=number), rate(number), number), replicas)
        for number, batch in enumerate(batches, 1)
    ]
    return done, replicas


@pytest.mark.parametrize("world", [1, 3])
def test_captured_passes_have_the_bits_of_eager_ones(world: int) -> None:
    eager, _ = _run(ToyModel, 1, captured=False)
    found, replicas = _run(ToyModel, world, captured=True, audit_every=1)
    assert found == eager
    for each in replicas:
        assert each.captured is not None
        assert each.captured.eager == ""
        assert 1 < len(each.captured) <= 3  # micro-batches of 1, 2 and 3 rows, on three ranks not each of them


@pytest.mark.parametrize(
    ("kind", "why"), [(Waiting, "waits"), (Synchronizing, "could not be captured"), (Leaving, "on the host")]
)
def test_what_a_graph_could_not_do_again_stays_eager(kind: type[nn.Module], why: str) -> None:
    eager, _ = _run(kind, 1, captured=False)
    found, (replica,) = _run(kind, 1, captured=True)
    assert found == eager
    assert replica.captured is not None
    assert why in replica.captured.eager
    assert len(replica.captured) == 0


@pytest.mark.parametrize("world", [1, 3])
def test_a_capture_that_fails_late_takes_no_graph_along(world: int) -> None:
    eager, _ = _run(ToyModel, 1, captured=False)
    found, replicas = _run(RefusingOne, world, captured=True, audit_every=1)
    assert found == eager
    for each in replicas:
        assert each.captured is not None
        assert "could not be captured" in each.captured.eager
        assert "\n" not in each.captured.eager
        assert len(each.captured) == 0


def test_an_interrupt_inside_of_a_capture_ends_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        _run(Interrupted, 1, captured=True)
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.rand(3, device="cuda").sum().isfinite()
    eager, _ = _run(ToyModel, 1, captured=False)
    assert _run(ToyModel, 1, captured=True)[0] == eager


def test_a_captured_pass_waits_for_nothing(without_waiting: None) -> None:
    settings = Settings(4, sizes=(8, 8, 8, 8, 8))
    step, (replica,) = made(1, settings, PinnedTask(), captured=True)
    first, second, third, *rest = (replace(SETTINGS.batches()[0], step=number) for number in range(1, 6))
    for batch in (first, second, third):
        step(batch, rate(batch.step), batch.step)
    assert replica.captured is not None
    assert len(replica.captured) > 0
    torch.cuda.set_sync_debug_mode("error")
    launched = [step.launch(batch, rate(batch.step), batch.step) for batch in rest]
    assert [each.result().step for each in launched] == [4, 5]


def test_the_kernel_judges_a_table_as_plain_operations_do() -> None:
    from andon.step.gate_cuda import close_on_device
    from andon.step.message import broken

    draw = torch.Generator().manual_seed(1)
    seen = []
    for turn in range(300):
        world, width = 1 + turn % 4, 2 + turn % 60
        rules = torch.randint(0, 7, (world, width), generator=draw)
        rules[:, 0] = 0
        # What most ranks have is asked of all ranks or of none.
        rules = torch.where(rules[:1] >= 5, rules[:1], torch.where(rules >= 5, 0, rules))
        row = torch.randint(-2, 3, (width,), generator=draw)
        reals = torch.rand(width, generator=draw, dtype=torch.float64)
        clipped = (rules == 5).any(0)
        norm = torch.roll(clipped, -1)
        row = torch.where(clipped | norm | (rules == 3).any(0), reals.view(torch.int64), row)
        limit = None if turn % 3 else 0.25
        left = torch.tensor([clipped_norm(norm, limit) for norm in torch.roll(reals, 1).tolist()], dtype=torch.float64)
        row = torch.where(clipped, left.view(torch.int64), row)
        row = torch.where((rules == 6).any(0), torch.roll(row, 1), row)
        held = row[int(torch.randint(0, width, (1,), generator=draw))]
        rules = torch.where((rules == 4) & (row != held), 2, rules)
        table = row.repeat(world, 1)
        wanted = table.clone()
        if turn % 2:
            at = int(torch.randint(0, world * width, (1,), generator=draw))
            table.view(-1)[at] ^= 1 << int(torch.randint(0, 64, (1,), generator=draw))
        want = Reduced(limit=limit, norm_tolerance=0.5 if turn % 5 else 1e-4)
        closed = torch.zeros((), device="cuda")
        wide = torch.cat([table, table], dim=1).cuda()[:, :width]
        close_on_device(wide, wanted.cuda(), rules.cuda(), held.cuda(), closed, want)
        expected = bool(broken(table, wanted, rules, held, want))
        seen.append(expected)
        assert bool(closed) == expected, (turn, table, rules)
    assert 30 < sum(seen) < 270
