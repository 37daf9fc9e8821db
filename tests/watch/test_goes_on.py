"""A watch never ends or changes a run that is right alone: what it cannot look at, it leaves out and says so."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, TensorDataset

import andon
from andon_contracts import legible
from andon_contracts.watch import script
from andon_contracts.watch.intercept import report_unreadable
from tests.support.ranks import run_ranks
from tests.watch.packed import packed
from tests.watch.small import net, sgd


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor | None = None) -> None:
    model(torch.ones(3, 4) if rows is None else rows).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# a gradient that one rank does not have


def _drops(names: list[str], moment: bool) -> list[str]:
    """What is said where rank 1 drops these gradients before its second update, or a moment behind its first."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1) if moment else sgd(model)
    with andon.watch(model, optimizer, action=lambda _: None) as w:
        for step in range(3):
            model(torch.ones(3, 4)).square().sum().backward()
            for name, parameter in model.named_parameters():
                if step == 1 and dist.get_rank() == 1 and name in names:
                    parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()
            if moment and step == 0 and dist.get_rank() == 1:
                optimizer.state[model[2].weight].clear()
    return [str(each) for each in w.findings]


@pytest.mark.parametrize("names", [["2.weight"], ["0.weight", "0.bias", "2.weight", "2.bias"]])
def test_a_gradient_that_one_rank_lacks_is_named_and_the_loop_goes_on(names: list[str]) -> None:
    """All ranks take part in the closer look, also those that have nothing to show; `halt-together` ended the run."""
    ranks = [outcome.get() for outcome in run_ranks(2, _drops, names, False)]
    assert ranks[0] == ranks[1]
    assert ranks[0][0].startswith("gradients-agree broken at step 2")
    assert f"{names[0]} ({len(names)} of 4 tensors), rank 1 has no gradient" in ranks[0][0]


def test_an_optimizer_state_that_one_rank_lacks_is_named_too() -> None:
    for outcome in run_ranks(2, _drops, [], True):
        assert any(each.startswith("optimizers-agree") for each in outcome.get())


# arguments of a step


class _Scaled(torch.optim.SGD):
    """Its `step` takes more than a closure, as some of research do."""

    def step(self, closure: Any = None, scale: float = 1.0, *, told: str = "") -> Any:  # type: ignore[override]
        loss = None if closure is None else closure(2.0) if told else closure()
        self.called = (scale, told)
        return super().step() if loss is None else loss


def test_a_step_with_a_closure_gets_all_other_arguments() -> None:
    """By place and by name, as without a watch; the closure gets those that the optimizer gives it."""
    model = net()
    optimizer = _Scaled(model.parameters(), lr=0.1)
    seen: list[float] = []

    def closure(factor: float = 1.0) -> Tensor:
        seen.append(factor)
        return model(torch.ones(3, 4)).square().sum()

    with andon.watch(model, optimizer, action="raise") as w:
        optimizer.step(closure, 0.5, told="x")
        assert (optimizer.called, seen) == ((0.5, "x"), [2.0])
        optimizer.step(closure=closure, scale=0.25)
        assert (optimizer.called, seen) == ((0.25, ""), [2.0, 1.0])
        optimizer.step(None, 0.125)
        assert optimizer.called == (0.125, "")
    assert w.evaluations["update-applied"] == 3


def test_what_is_no_closure_is_not_taken_for_one() -> None:
    class TakesGradients(torch.optim.SGD):
        def step(self, gradients: Any = None) -> Any:  # type: ignore[override]
            self.called = gradients
            return super().step()

    model = net()
    optimizer = TakesGradients(model.parameters(), lr=0.1)
    given = [torch.ones(2)]
    with andon.watch(model, optimizer, action="raise") as w:
        optimizer.step(given)
    assert optimizer.called is given
    assert w.evaluations["update-applied"] == 1


# ends that are not failures


def _in_a_generator(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
    with andon.watch(model, optimizer):
        while True:
            _update(model, optimizer)
            yield 1


def _leaves(code: object) -> None:
    """Rank 1 leaves first; rank 0 is still inside then, and makes a forward pass before it leaves too."""
    model = net()
    optimizer = sgd(model)
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    steps = _in_a_generator(model, optimizer)
    next(steps)
    if rank == 0:
        store.wait(["left"])
        model(torch.ones(1, 4))
    if code == "generator" or rank == 0:
        steps.close()  # type: ignore[attr-defined]
    else:
        with pytest.raises(SystemExit) as ended:
            steps.throw(SystemExit(code))  # type: ignore[attr-defined]
        assert ended.value.code == code
    store.set("left", "")


@pytest.mark.parametrize("code", [0, None, False, "generator", 3])
def test_leaving_the_block_halts_the_others_only_with_an_exit_code(code: object) -> None:
    """`sys.exit(0)`, `exit()`, and a generator that is closed while it holds the watch are right ways to end."""
    errors = [outcome.error for outcome in run_ranks(2, _leaves, code)]
    if code == 3:
        assert type(errors[0]) is andon.Halted
        assert "SystemExit: 3" in str(errors[0])
    else:
        assert errors == [None, None]


# data that refuses


class _Unsized(Dataset[Any]):
    def __getitem__(self, row: int) -> Tensor:
        return torch.full((4,), float(row))

    def __len__(self) -> int:
        raise NotImplementedError


class _Half(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 8, 2))

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class _Wrapped(Sampler[list[int]]):
    """A sampler of batches around another, as Accelerate has one."""

    def __init__(self, inner: Sampler[list[int]]) -> None:
        self.batch_sampler = inner

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batch_sampler)


def _pairs(rows: list[Tensor]) -> Any:
    return {"x": torch.stack(rows), "odd": _Refusing(), "nested": torch.nested.nested_tensor([rows[0], rows[1][:2]])}


class _Refusing(dict[str, Any]):
    def values(self) -> Any:
        raise KeyError("not now")


LOADERS: dict[str, Any] = {
    "a dataset without a length": lambda: DataLoader(_Unsized(), sampler=[0, 1, 2, 3], batch_size=2),
    "a sampler that refuses": lambda: DataLoader(TensorDataset(torch.ones(8, 4)), sampler=_Half(), batch_size=2),
    "a sampler of batches around one without a length": lambda: DataLoader(
        _Unsized(), batch_sampler=_Wrapped(BatchSampler(_Half(), 2, drop_last=False))
    ),
    "a batch that refuses": lambda: DataLoader(_Unsized(), sampler=[0, 1, 2, 3], batch_size=2, collate_fn=_pairs),
}


@pytest.mark.parametrize("name", LOADERS)
def test_data_that_refuses_to_be_looked_at_ends_no_loop(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    optimizer = sgd(model)
    with andon.watch(model, optimizer, action="raise") as w:
        for _ in range(2):
            for batch in LOADERS[name]():
                rows = batch["x"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch
                _update(model, optimizer, rows)
    assert w.evaluations["update-applied"] == 4
    assert capsys.readouterr().err.count("rows are not checked in this run") <= 1


def test_why_rows_are_not_looked_at_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of each batch has other words, as an index or an address: there is one line all the same."""
    monkeypatch.setattr(legible, "_logged", set())
    for index in range(3):
        report_unreadable("a batch of a data loader", IndexError(f"no row {index}"))
    report_unreadable("the model's inputs", IndexError("no row 3"))
    assert [line.partition(";")[0] for line in capsys.readouterr().err.splitlines()] == [
        "andon.watch: cannot read a batch of a data loader (IndexError: no row 0)",
        "andon.watch: cannot read the model's inputs (IndexError: no row 3)",
    ]


# transforms


def test_a_forward_pass_under_vmap_is_looked_at_as_any_other() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 2)).eval()
    optimizer = sgd(model)
    parameters = dict(model.named_parameters())

    def loss(given: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, given, (row[None],)).square().sum()

    with andon.watch(model, optimizer, action="raise") as w:
        for (rows,) in DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4):
            held = {name: p.detach() for name, p in parameters.items()}
            grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(held, rows)
            for name, parameter in parameters.items():
                parameter.grad = grads[name].mean(0)
            optimizer.step()
            optimizer.zero_grad()
        states = [{**model.state_dict()} for _ in range(2)]
        stacked = {name: torch.stack([each[name] for each in states]) for name in states[0]}

        def member(given: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(model, given, (x,))

        out = torch.func.vmap(member, (0, None))(stacked, rows)
        assert out.shape == (2, 4, 2)
    assert w.evaluations["update-applied"] == 2


# ranks that do different things


def _meets(case: str) -> list[str | None]:
    os.environ["WORLD_SIZE"] = "2"
    script._REPORT_S, script._STUCK_S, script._CONFIRM_S = 0.05, 0.2, 0.5
    script._LONGEST_S = {"late": 0.5, "absent": 0.9}.get(case, 60.0)
    here, rank = script.Rendezvous(), dist.get_rank()
    if case == "together":
        return [here.meet("Adam"), here.meet("SGD")]
    if case == "refused":
        return [here.meet("Adam", "nothing tells them apart" if rank == 1 else ""), here.meet("SGD")]
    if case == "actor":
        found = [here.meet("Adam")] if rank == 0 else []
        dist.broadcast(torch.ones(2), 0)
        return found
    if case in ("ended", "absent"):
        if rank == 1 and case == "ended":
            here.close()
        return [here.meet("Adam")] if rank == 0 else []
    # Rank 0 has an optimizer that rank 1 has not; then both come to one, rank 1 too late for the others of it.
    found = [here.meet("probe")] if rank == 0 else []
    dist.barrier()
    return [*found, here.meet("Adam")]


_ABSENT = "rank 1 did not come to the first update of"


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("together", [[None, None], [None, None]]),
        ("refused", [["nothing tells them apart", None], ["nothing tells them apart", None]]),
        ("actor", [[f"{_ABSENT} Adam (rank 1 waits in a collective, "], []]),
        ("ended", [[f"{_ABSENT} Adam (rank 1 has ended its script)"], []]),
        ("late", [[f"{_ABSENT} probe", None], [None]]),
        ("absent", [["rank 1, 2 did not come to the first update of Adam within 1 s"], [], []]),
    ],
)
def test_ranks_meet_before_a_watch_is_opened(case: str, wanted: list[list[str | None]]) -> None:
    """All open one, or none does for the reason of the one that cannot.

    A rank that waits elsewhere, or has ended, is seen long before the patience is over; an optimizer of one rank does
    not keep the others from being watched. Several absent ranks cost the patience once.
    """
    for outcome, known in zip(run_ranks(len(wanted), _meets, case), wanted, strict=True):
        found = [said and said[: len(why or "")] for said, why in zip(outcome.get(), known, strict=True)]
        assert found == known


# tensors of a loop beside its model


@pytest.mark.parametrize("kind", ["tensors", "parameters", "flat"])
def test_master_weights_are_no_mistake(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """fp32 copies in the optimizer: what stands beside the model is not looked at, which is said, and the rest is."""

    def laid_out(tensors: list[Tensor]) -> list[Tensor]:
        return [torch.cat([each.flatten() for each in tensors])] if kind == "flat" else tensors

    model = net().to(torch.bfloat16)
    copies = laid_out([p.detach().float() for p in model.parameters()])
    masters = [nn.Parameter(each) if kind == "parameters" else each.requires_grad_() for each in copies]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    with andon.watch(model, optimizer, action="raise") as w:
        for _ in range(3):
            model(torch.ones(3, 4, dtype=torch.bfloat16)).square().sum().backward()
            gradients = laid_out([p.grad.float() for p in model.parameters() if p.grad is not None])
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient
            optimizer.step()
            model.zero_grad()
    assert w.findings == ()
    assert w.evaluations["update-applied"] == 3
    said = capsys.readouterr().err.splitlines()
    held = "1 tensor" if kind == "flat" else "4 tensors"
    assert f"  not watched: the updates of {held} in the optimizers that are not parameters of the model" in said


def test_a_group_that_the_loop_removes_ends_no_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """The optimizer is another one then, and what was declared for the group does not hold any more."""
    model = net()
    groups = [{"params": [*model[0].parameters()]}, {"params": [*model[2].parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with andon.watch(model, optimizer, groups={"2.*": {"lr": 0.1}}) as w:
        _update(model, optimizer)
        del optimizer.param_groups[1]
        _update(model, optimizer)
    assert [each.clause for each in w.findings] == ["parameters-kept"]
    assert "also     groups-planned, step 2: 2.weight does not have the" in capsys.readouterr().err


@pytest.mark.parametrize("apart", [True, False])
def test_a_loose_tensor_beside_the_model_is_no_mistake(apart: bool) -> None:
    """With an optimizer of its own, or in that of the model."""
    model, temperature = net(), torch.zeros(1, requires_grad=True)
    held = [[*model.parameters()], [temperature]] if apart else [[*model.parameters(), temperature]]
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in held]
    with andon.watch(model, optimizers, action="raise") as w:
        for _ in range(3):
            (model(torch.ones(3, 4)).square().sum() * temperature.exp()).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert w.findings == ()
    assert temperature.item() != 0


def test_a_parameter_that_is_left_out_is_still_found_beside_a_loose_tensor() -> None:
    """A temperature is too small to be the master weight of a layer."""
    model, temperature = net(), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([*model[0].parameters(), temperature], lr=0.1)
    w = andon.watch(model, optimizer, action=lambda _: None)
    w.close()
    assert [(each.clause, each.tensor) for each in w.findings] == [("parameters-kept", "2.weight")]


def test_a_tensor_that_joins_the_optimizer_alone_has_no_name_of_the_model() -> None:
    model = net()
    with andon.watch(model, optimizer := sgd(model), action=lambda _: None) as w:
        optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
        _update(model, optimizer)
    assert [each.tensor for each in w.findings] == [""]
    assert "a tensor is in the optimizer but not" in str(w.findings[0])


@pytest.mark.parametrize(
    ("change", "found"),
    [(lambda layer: nn.Linear(5, 2), [("parameters-kept", "2.weight")]), (nn.Sequential, [])],
    ids=["another layer", "the layer in a wrapper"],
)
def test_a_layer_that_is_replaced_is_found_and_one_that_is_wrapped_is_none(change: Any, found: list[Any]) -> None:
    model = net()
    optimizer = sgd(model)
    with andon.watch(model, optimizer, action=lambda _: None) as w:
        _update(model, optimizer)
        model[2] = change(model[2])
        _update(model, optimizer)
    assert [(each.clause, each.tensor) for each in w.findings] == found


# tensors and values of odd kinds


class _Own(torch.optim.Optimizer):
    def __init__(self, parameters: Any, keeps: Any = None, **group: Any) -> None:
        super().__init__(parameters, group)
        self.keeps = keeps

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.sub_(parameter.grad.to_dense(), alpha=0.01)
            if self.keeps is not None:
                self.state[parameter]["kept"] = self.keeps(*parameter.shape)


def _with(**held: Tensor) -> nn.Sequential:
    model = net()
    for name, tensor in held.items():
        if name.startswith("frozen"):
            model[0].register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        else:
            model[0].register_buffer(name, tensor)
    return model


class _Proxy:
    """Stands for something that is not there yet: Flask's request, say."""

    @property
    def __class__(self) -> type:
        raise RuntimeError("working outside of a request")


def _itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def _odd_buffers() -> nn.Sequential:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    whole = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    sparse = torch.eye(3).to_sparse_csr()
    return _with(ragged=ragged, whole=whole, sparse=sparse, packed=packed(2, 2), empty=torch.ones(2, device="meta"))


ODD: dict[str, Any] = {
    "no rate, as Adafactor": lambda: (m := net(), _Own(m.parameters(), lr=None)),
    "two rates in one": lambda: (m := net(), _Own(m.parameters(), lr=torch.tensor([0.1, 0.2]))),
    "a group that holds itself": lambda: (m := net(), _Own(m.parameters(), lr=0.1, own=_itself())),
    "quantized moments": lambda: (m := net(), _Own(m.parameters(), keeps=packed, lr=0.1)),
    "quantized frozen weights": lambda: (
        m := _with(frozen=packed(3, 3)),
        _Own((p for p in m.parameters() if p.requires_grad), lr=0.1),
    ),
    "buffers of all kinds": lambda: (m := _odd_buffers(), _Own(m.parameters(), lr=0.1)),
}


def _runs(name: str) -> list[str]:
    model, optimizer = ODD[name]()
    # Of the form of the model, so that they are taken for copies of it until they are looked at.
    proxies = [dict.fromkeys(dict(model.named_parameters()), _Proxy())]
    with andon.watch(model, optimizer, action=lambda _: None, allow={"samples-once": "rows are alike"}) as w:
        for _ in range(3):
            _update(model, optimizer)
        torch.jit.trace(model, (torch.ones(3, 4),))
        _update(model, optimizer)
    del proxies
    return [str(each) for each in w.findings]


def _run_all() -> dict[str, list[str]]:
    return {name: _runs(name) for name in ODD}


def test_tensors_and_values_of_odd_kinds_end_no_loop() -> None:
    for outcome in run_ranks(2, _run_all):
        found = outcome.get()
        quantized = found.pop("quantized frozen weights")
        assert [each for each in quantized if "0.weight" not in each] == []
        assert found == {name: [] for name in found}


def test_a_quantized_weight_that_changes_is_found() -> None:
    """It is read part by part, where its memory is."""
    model = _with(frozen=packed(3, 3))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    model[0].weight.requires_grad_(False)
    model[0].bias.requires_grad_(False)
    with andon.watch(model, optimizer, action=lambda _: None) as w:
        _update(model, optimizer)
        model[0].frozen.whole[0, 0] = 2
        _update(model, optimizer)
    assert [(each.clause, each.tensor) for each in w.findings] == [("base-frozen", "0.frozen")]


# what stays


def _held(root: object) -> int:
    found, waiting, items = {id(root)}, [root], 0
    while waiting:
        each = waiting.pop()
        inside: list[object] = []
        if isinstance(each, Mapping):
            inside = [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset | deque):
            inside = list(each)
        items += len(inside)
        if type(each).__module__.startswith("andon_contracts"):
            names = [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())]
            inside += [*getattr(each, "__dict__", {}).values(), *(getattr(each, name, None) for name in names)]
        for one in inside:
            ours = type(one).__module__.startswith(("andon_contracts", "builtins", "collections", "weakref"))
            if ours and not isinstance(one, type | str | int) and id(one) not in found:
                found.add(id(one))
                waiting.append(one)
    return items


def _batches(loop: str) -> Iterator[tuple[Tensor, Tensor]]:
    loader = DataLoader(TensorDataset(torch.randn(16, 4), torch.arange(16)), batch_size=4, shuffle=True)
    while True:
        yield from [next(iter(loader))] if loop == "next(iter(loader))" else loader


@pytest.mark.parametrize("loop", ["epochs", "next(iter(loader))"])
def test_a_watch_does_not_grow(loop: str) -> None:
    """It holds as much after 192 updates as after 576, both at the same place of all that comes round."""
    model = net()
    optimizer = sgd(model)
    held: list[int] = []
    with andon.watch(model, optimizer, budget=1e-9, allow=dict.fromkeys(("samples-once", "order-renewed"), "1")) as w:
        for step, (rows, _) in enumerate(islice(_batches(loop), 576), 1):
            _update(model, optimizer, rows)
            if step in (192, 576):
                held.append(_held(w))
    assert held[0] == held[1]
