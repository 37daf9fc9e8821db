"""Frozen weights, buffers, optimizer states, weights that an update left alone, and faults that hide below torch."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.agree import Observation, bits_of
from andon_contracts.laws.law import Judgement, Seen
from andon_contracts.watch.checks.frozen import ROUND, Frozen, FrozenBase
from andon_contracts.watch.checks.optimizer import Applied, OptimizerState, Unmoved
from tests.watch.packed import packed
from tests.watch.small import answers, clauses, loss_of, net, sgd, watched

# frozen weights


def _digest(base: FrozenBase) -> int:
    base.look()
    return base.digest()


@pytest.mark.parametrize("sizes", [[3], [5, 700_000, 2], [10] * 200])
def test_a_frozen_weight_that_changes_below_torch_is_seen_within_a_round(sizes: list[int]) -> None:
    """No version counter moves; every weight is read again within `ROUND` looks, wherever the round is."""
    for late in (0, 7):
        frozen = [nn.Parameter(torch.ones(size), requires_grad=False) for size in sizes]
        base = FrozenBase(frozen)
        assert all(_digest(base) == base.first for _ in range(ROUND + late))
        frozen[-1].data.view(torch.int32)[-1] ^= 1
        assert [_digest(base) for _ in range(ROUND)][-1] != base.first


def _in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[0] += 1


def _replaced(weight: nn.Parameter) -> None:
    weight.data = weight.data + 1


@pytest.mark.parametrize("change", [_in_place, _replaced])
def test_a_frozen_weight_that_torch_changes_is_seen_at_once(change: Callable[[nn.Parameter], None]) -> None:
    frozen = [nn.Parameter(torch.ones(size), requires_grad=False) for size in (4, 400_000)]
    base = FrozenBase(frozen)
    before = frozen[1].data.clone()
    change(frozen[1])
    assert _digest(base) != base.first
    frozen[1].data = before
    assert _digest(base) == base.first


def test_any_difference_in_what_an_optimizer_keeps_is_seen() -> None:
    """A moment, a count, a name: each is another digest, as is nothing at all; the order of insertion is not."""
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    optimizer = torch.optim.AdamW(parameters)
    kept = OptimizerState(optimizer, parameters)
    empty = kept.look().digest
    sum(p.sum() for p in parameters).backward()
    optimizer.step()
    first = kept.look().digest
    state = optimizer.state[parameters[1]]
    optimizer.state[parameters[1]] = dict(reversed(copy.deepcopy(state).items()))
    assert kept.look().digest == first
    found = {empty, first}
    for name, value in (("exp_avg", torch.zeros(2, 2)), ("step", torch.tensor(2.0)), ("more", 1), ("step", 1.0)):
        optimizer.state[parameters[1]] = {**state, name: value}
        found.add(kept.look().digest)
    optimizer.state[parameters[1]] = {"steps" if name == "step" else name: value for name, value in state.items()}
    found.add(kept.look().digest)
    assert len(found) == 7


def _touched_before(update: int) -> list[tuple[str, int]]:
    """What is found where all ranks change a frozen weight alike, just before the forward pass of `update`."""
    model, steps = net(), [0]
    model[0].requires_grad_(False)

    def loss(wrapped: nn.Module) -> Tensor:
        if len(steps) == update:
            with torch.no_grad():
                model[0].weight.mul_(1.5)
        return wrapped(torch.randn(3, 4)).square().sum()

    torch.manual_seed(dist.get_rank())
    watch = watched(DistributedDataParallel(model), sgd(model[2]), 3, steps.append, loss)
    return [(found.clause, found.step) for found in watch.findings]


@pytest.mark.parametrize("update", [1, 2])
def test_a_base_that_changes_alike_without_a_merge_is_seen_from_the_first_update_on(update: int) -> None:
    """A merge writes what is trained as well; before the first update nothing was left that could be written over."""
    assert answers(2, _touched_before, update) == [[("base-frozen", update)]] * 2


def test_a_model_that_is_saved_whole_under_a_watch_loads_without_a_word_of_it(tmp_path: Path) -> None:
    """Also where andon is not installed, and here with `weights_only`."""
    model, rows = nn.Linear(3, 2), torch.ones(4, 3)
    optimizer = sgd(model)
    with andon.watch(model, optimizer):
        loss_of(model).backward()
        optimizer.step()
        torch.save(model, tmp_path / "model.pt")
        with torch.serialization.safe_globals([nn.Linear]):
            loaded = torch.load(tmp_path / "model.pt", weights_only=True)
        assert torch.equal(loaded(rows), model(rows))
        hidden = "import sys, torch; sys.modules['andon_contracts'] = sys.modules['andon'] = None"
        shown = "print(torch.load(sys.argv[1], weights_only=False)(torch.ones(4, 3)).tolist())"
        command = [sys.executable, "-c", f"{hidden}; {shown}", tmp_path / "model.pt"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.stdout, done.returncode) == (f"{model(rows).tolist()}\n", 0), done.stderr


class _Contrast(nn.Module):
    """Two encoders alike; the second follows the first before each forward pass, and is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(3, 2), nn.Linear(3, 2)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            for own, trained in zip(self.key.parameters(), self.query.parameters(), strict=True):
                own.data = own.data * 0.9 + trained.data * 0.1
        return (self.query(rows) - self.key(2 * rows)).square().mean()


@pytest.mark.parametrize("which", ["all", "trained"])
def test_a_momentum_encoder_that_the_optimizer_was_given_too_follows_all_the_same(which: str) -> None:
    """Optimizers pass over what has no gradient, so loops give them `model.parameters()`, as MoCo's does."""
    model = _Contrast()
    optimizer = sgd(model if which == "all" else model.query)
    assert clauses(watched(model, optimizer, 4, loss=lambda model: model(torch.ones(2, 3)))) == []


def _repaired(gradient: Tensor) -> Tensor:
    return gradient.nan_to_num(0.0, 0.0, 0.0)


@pytest.mark.parametrize("first", [True, False])
def test_a_hook_that_repairs_a_gradient_hides_nothing(first: bool) -> None:
    """Whether the loop's hook was there before the watch or came after it; and the hooks still do what they do."""
    model = net()
    optimizer = sgd(model)
    if first:
        handles = [p.register_hook(_repaired) for p in model.parameters()]
    watch = andon.watch(model, optimizer, action=lambda found: None)
    if not first:
        handles = [p.register_hook(_repaired) for p in model.parameters()]
    (loss_of(model) * float("nan")).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    watch.close()
    assert [(found.clause, found.tensor) for found in watch.findings] == [("finite", "2.bias")]
    for handle in handles:
        handle.remove()
    optimizer.zero_grad()
    (loss_of(model) * float("nan")).backward()
    assert all(p.grad.isnan().all() for p in model.parameters())


def _frozen_run(end: Callable[[nn.Sequential], object]) -> andon.Watch:
    model = net()
    model[0].requires_grad_(False)
    return watched(model, torch.optim.AdamW(model[2].parameters(), lr=1e-2), 3, end=end, action="warn")


def _written_below_torch(model: nn.Sequential) -> None:
    model[0].weight.data.mul_(1.5)


def test_a_base_that_changed_in_a_short_run_is_found_at_the_close() -> None:
    (found,) = _frozen_run(_written_below_torch).findings
    assert (found.clause, found.step) == ("base-frozen", 3)
    assert "at the close" in str(found)
    held = _frozen_run(lambda model: None)
    assert not held.findings
    rows = sum(law.clause == "base-frozen" for law in Frozen.before_laws)
    assert held.evaluations["base-frozen"] == 3 * rows + 1


def _merged(model: nn.Sequential) -> None:
    model[0].merged = True
    _written_below_torch(model)


@torch.no_grad()
def _merged_by_hand(model: nn.Sequential) -> None:
    model[0].weight += 1.0


@pytest.mark.parametrize(
    "end", [_merged, lambda model: model.__setitem__(0, nn.Linear(4, 5)), nn.Module.half, _merged_by_hand]
)
def test_what_is_done_with_a_trained_model_is_no_fault(end: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert not _frozen_run(end).findings
    assert "base-frozen: not read again at the close, because" in capsys.readouterr().err


def _clipping_loop(where: str) -> list[str]:
    """Ranks whose gradients have one direction and other lengths: the mean of what each clips has the norm allowed."""
    model = net()

    def reduce(_: int) -> None:
        if where == "local":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        if where == "reduced":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    watch = watched(model, sgd(model), 2, reduce, lambda m: loss_of(m) * (1.0 + 9.0 * dist.get_rank()), clip=0.01)
    return [f"{found.clause}: {found}" for found in watch.findings]


def test_a_clip_of_each_ranks_own_gradient_is_seen_by_its_norms() -> None:
    """The optimizer gets the limit's norm either way; only the norms by which the ranks clipped say it."""
    assert answers(2, _clipping_loop, "reduced") == [[], []]
    local, other = answers(2, _clipping_loop, "local")
    assert local == other
    # That the call is misplaced (`clip-placed`) stands under it.
    assert [said.partition(":")[0] for said in local] == ["clip-once"]
    assert "each clipped its own gradient, before the reduction" in local[0]


def _rounds(odd: str | None) -> list[str]:
    """Two turns of each optimizer with the other one's parameters frozen; in the second `odd` is toggled too."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"maker": nn.Linear(4, 4), "judge": nn.Linear(4, 1), "base": nn.Linear(2, 2)})
    model["base"].requires_grad_(False)
    pairs = [(model[each], torch.optim.Adam(model[each].parameters())) for each in ("maker", "judge")]
    watch = andon.watch(model, [optimizer for _, optimizer in pairs], action=lambda found: None)
    for turn in range(2):
        for (_, optimizer), (other, _) in (pairs, pairs[::-1]):
            other.requires_grad_(False)
            model["judge"](model["maker"](torch.ones(3, 4))).mean().backward()
            if turn and odd is not None:
                model[odd].requires_grad_(not model[odd].weight.requires_grad)
            optimizer.step()
            optimizer.zero_grad()
            other.requires_grad_(True)
    watch.close()
    return clauses(watch)


@pytest.mark.parametrize(("odd", "found"), [(None, []), ("maker", ["parameters-kept"]), ("base", ["parameters-kept"])])
def test_what_waits_for_the_turn_of_its_optimizer_may_be_frozen(odd: str | None, found: list[str]) -> None:
    """Adversaries take turns; what steps now, and what no optimizer holds, must stay as it was."""
    assert _rounds(odd) == found


def test_a_weight_that_is_thawed_is_no_frozen_one() -> None:
    """The change of the set is one finding; that the thawed weight is trained is no second one."""
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-2)

    def thaw(step: int) -> None:
        if step == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters())})

    watch = watched(model, optimizer, 4, thaw)
    assert (clauses(watch), watch.violations) == (["parameters-kept"], 0)


def _toggling(how: str) -> tuple[list[str], int]:
    """A layer is unfrozen, or frozen, behind the first update: what was found, and how much of it is certain."""
    model = net()
    model[0].requires_grad_(how == "frozen")
    wrapped = DistributedDataParallel(model) if how == "wrapped" else model
    updates = []

    def loss(wrapped: nn.Module) -> Tensor:
        if updates and (how != "one rank" or dist.get_rank() == 1):
            model[0].requires_grad_(how != "frozen")
        return loss_of(wrapped)

    watch = watched(wrapped, sgd(model[2] if how == "no optimizer" else model, 1e-2), 2, updates.append, loss)
    return clauses(watch), watch.violations


@pytest.mark.parametrize("how", ["wrapped", "one rank", "no optimizer", "frozen"])
def test_what_is_unfrozen_and_nobody_reduces_or_trains_is_a_violation(how: str) -> None:
    """What all ranks freeze alike a loop may mean, which makes it a suspicion."""
    for found, violations in answers(2, _toggling, how):
        assert found[0] == "parameters-kept"
        assert (violations > 0) == (how != "frozen")


def _cached(lengths: tuple[int, int]) -> list[str]:
    """A cache of a length of the rank's own after update 1; with equal ones, a gradient that differs at update 2."""
    model = net()
    model.register_buffer("cache", torch.zeros(1))

    def part(step: int) -> None:
        model.cache = torch.ones(lengths[dist.get_rank()])
        if step == 2 and lengths == (1, 1):
            model[0].weight.grad.add_(dist.get_rank())

    return [str(found) for found in watched(model, sgd(model), 2, part, action="warn").findings]


def test_a_message_says_shapes_and_what_was_applied() -> None:
    """A buffer of another length is named as that, after the update that left it; under "warn" the loop goes on."""
    (shapes,) = answers(2, _cached, (2, 3))[0]
    lines = shapes.splitlines()
    assert lines[0] == "buffers-agree broken after step 1: ranks 0 and 1 differ."
    assert "do not have the same shape on all ranks" in lines[2]
    assert not any(line.startswith("  likely") for line in lines)
    assert {"  where    cache", "  state    step 1 was applied; last state known equal: step 1"} <= set(lines)
    gradient = answers(2, _cached, (1, 1))[0][0]
    assert "  state    step 2 was not applied yet, and the loop goes on; last state known equal: step 1" in gradient


def _expected() -> list[list[str]]:
    def generator(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    found = []
    for must, *values in (
        ("agree", generator(4), generator(4)),
        ("agree", generator(4), generator(5)),
        ("agree", 0.5, torch.tensor(2)),
        ("differ", "seven", "seven"),
        ("agree", 8, None),
    ):
        model, value = net(), values[dist.get_rank()]
        with andon.watch(model, optimizer := sgd(model), action=lambda found: None) as watch:
            if value is not None:
                watch.expect("augmentation", value, must)
            loss_of(model).backward()
            optimizer.step()
        lines = [line for each in watch.findings for line in str(each).splitlines()]
        found.append([line for line in lines if line.split()[0] in ("where", "seen", "likely")])
    return found


def test_a_value_is_named_and_shown_by_rank() -> None:
    """Equal seeds agree although the generators are two. A random state has no text, and causes of its own."""
    agree = "the values differ between ranks, but must agree"
    differ = "the values of ranks 0, 1 are equal, but must differ"
    own = "each rank computes the value from its own rows, settings or random numbers"
    cases = (
        (agree, "one seed on all ranks, or a random draw on one rank only"),
        (f"{agree} (rank 0: 0.5, rank 1: 2)", own),
        (f"{differ} (rank 0: 'seven', rank 1: 'seven')", "the value does not depend on the rank"),
        (f"{agree} (rank 0: 8, rank 1: no value was reported)", own),
    )
    wanted = [
        ["  where    augmentation", f"  seen     {what}", f"  likely   {likely}  [inference, not proof]"]
        for what, likely in cases
    ]
    assert answers(2, _expected) == [[[], *wanted]] * 2


def _tagged() -> list[str]:
    model = net()
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "tag": f"rank {dist.get_rank()}"}], lr=0.1)
    return [str(found) for found in watched(model, optimizer, 1).findings]


def test_the_hyperparameter_that_differs_is_named() -> None:
    (found,) = answers(2, _tagged)[0]
    assert "the hyperparameters of the optimizers are not the same: tag of group 0 (rank 0:" in found


@pytest.mark.parametrize(("elements", "suspicions"), [(0, []), (1, ["gradient-present"])])
def test_a_parameter_without_elements_needs_no_gradient(elements: int, suspicions: list[str]) -> None:
    model = net()
    model[0].register_parameter("spare", nn.Parameter(torch.zeros(elements)))
    assert clauses(watched(model, sgd(model), 3)) == suspicions


# weights that an update left as they were: rounded away rightly, or not updated at all


Make = Callable[[Sequence[nn.Parameter], float], torch.optim.Optimizer]


class Lars(torch.optim.Optimizer):
    """An optimizer that torch does not have: matrices move by a thousandth of their norm, times the rate."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad + 1e-6 * p
                if p.dim() > 1:
                    update = update * (1e-3 * p.norm() / update.norm())
                held = self.state[p].setdefault("mu", torch.zeros_like(p))
                held.mul_(0.9).add_(update)
                p.sub_(held, alpha=group["lr"])


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "SGD, decay": lambda p, lr: torch.optim.SGD(p, lr=lr, weight_decay=1e-4),
    "SGD, momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "SGD, Nesterov, decay": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "SGD, upwards": lambda p, lr: torch.optim.SGD(p, lr=lr, maximize=True, weight_decay=1e-4),
    "Adam": lambda p, lr: torch.optim.Adam(p, lr=lr, weight_decay=1e-2),
    "AdamW": lambda p, lr: torch.optim.AdamW(p, lr=lr),
    "AdamW, rate in a tensor": lambda p, lr: torch.optim.AdamW(p, lr=torch.tensor(lr), foreach=False),
    "AdamW, AMSGrad, fused": lambda p, lr: torch.optim.AdamW(p, lr=lr, amsgrad=True, fused=True),
    "NAdam": lambda p, lr: torch.optim.NAdam(p, lr=lr),
    "RAdam": lambda p, lr: torch.optim.RAdam(p, lr=lr),
    "Adamax": lambda p, lr: torch.optim.Adamax(p, lr=lr),
    "Adagrad": lambda p, lr: torch.optim.Adagrad(p, lr=lr),
    "RMSprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr, momentum=0.9, centered=True),
    "Adadelta": lambda p, lr: torch.optim.Adadelta(p, lr=lr),
    "Adafactor": lambda p, lr: torch.optim.Adafactor(p, lr=lr),
    "LARS": Lars,
}
KNOWN = [name for name in OPTIMIZERS if name.startswith(("SGD", "Adam", "AdamW")) and name != "Adamax"]


def parameters() -> list[nn.Parameter]:
    """The weights of a norm, all 1.0, those of a matrix, and a norm that starts at 0."""
    drawn = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)) / 4
    return [nn.Parameter(torch.ones(16)), nn.Parameter(drawn), nn.Parameter(torch.zeros(16))]


def _remembered(optimizer: torch.optim.Optimizer, members: Sequence[nn.Parameter]) -> Applied:
    probe: Any = SimpleNamespace(optimizer=optimizer, members=members, context=None)
    applied = Applied(probe.context, probe)
    applied.remember(sampled=True)
    return applied


def unmoved(make: Make, rate: float, sizes: Sequence[float], lost: int | None = None) -> list[list[int]]:
    """The members that are reported in each of eight updates with gradients of these sizes, of which `lost` is undone.

    Every fourth update has a rate of a ten-thousandth, as a warm-up or the end of a schedule has.
    """
    members = parameters()
    optimizer = make(members, rate)
    applied, generator = _remembered(optimizer, members), torch.Generator().manual_seed(1)
    found = []
    for window in range(1, 9):
        for p, size in zip(members, sizes, strict=True):
            p.grad = torch.randn(p.shape, generator=generator) * size
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 if window % 4 else 1e-4)
        kept = members[0].detach().clone() if lost is None else members[lost].detach().clone()
        applied.remember(sampled=window <= 4 or window == 8)
        optimizer.step()
        if lost is not None:
            with torch.no_grad():
                members[lost].copy_(kept)
        found.append([each.member for each in applied.unmoved()])
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_that_is_rounded_away_is_right(name: str) -> None:
    """Whatever the optimizer, its rate and the sizes of gradients: what it does by itself is never reported."""
    for rate in (1e-12, 1e-10, 4e-8, 1e-6, 1e-4, 1e-2):
        for sizes in ((1.0, 1.0, 1.0), (1e-3, 1.0, 1e-2), (1e-6, 1e-2, 1e-4), (1e-4, 1e-8, 1e-4)):
            assert not any(unmoved(OPTIMIZERS[name], rate, sizes)), (rate, sizes)


@pytest.mark.parametrize("lost", range(3))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_weight_that_is_not_updated_is_found(name: str, lost: int) -> None:
    assert unmoved(OPTIMIZERS[name], 1e-2, (1.0, 1.0, 1.0), lost)[0] == [lost]


@pytest.mark.parametrize("name", KNOWN)
def test_an_update_of_known_arithmetic_is_held_to_the_spacing_of_its_weights(name: str) -> None:
    """A norm of gradients of 1e-3, whose weights of 1.0 are 1.2e-7 apart: found where the rate moves it by more."""
    assert unmoved(OPTIMIZERS[name], 1e-2, (1e-3, 1.0, 1.0), 0)[0] == [0]
    assert not any(unmoved(OPTIMIZERS[name], 4e-9, (1e-3, 1.0, 1.0), 0))


def test_a_line_search_that_finds_no_better_place_is_right() -> None:
    """LBFGS stays where it is, though its gradient is not zero, once a step gains next to nothing."""
    weight = nn.Parameter(torch.linspace(1e-4, 1e-3, 16))
    optimizer = torch.optim.LBFGS([weight], lr=1.0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = 1e-6 * weight.sum()
        loss.backward()
        return loss

    before = weight.detach().clone()
    closure()
    applied = _remembered(optimizer, [weight])
    optimizer.step(closure)
    assert torch.equal(weight, before)
    assert applied.unmoved() == []


@pytest.mark.parametrize(
    ("rate", "expected"), [(1e-4, [Unmoved(0, pytest.approx(1e-4, rel=0.01), 2.0**-7)]), (1e-9, [])]
)
def test_what_16_bits_lose_is_found_and_what_float32_would_lose_too_is_not(rate: float, expected: object) -> None:
    """A step from weights of 1.0, of which bfloat16 has none nearer than 0.0078."""
    optimizer = torch.optim.SGD([weight := _full(1.0, torch.bfloat16)], lr=rate)
    applied = _remembered(optimizer, [weight])
    optimizer.step()
    assert applied.unmoved() == expected


@pytest.mark.parametrize(
    ("due", "seen", "likely"),
    [
        (1e-4, "0.0078 apart there, so the update is rounded away", "the precision is too low"),
        (0.5, "0.0078 apart there", "the optimizer holds other parameters than the model"),
    ],
)
def test_the_message_says_which_of_both_causes_it_is(due: float, seen: str, likely: str) -> None:
    values = {"unmoved": 1, "unmoved due": bits_of(due), "unmoved spacing": bits_of(2.0**-7)}
    law = Applied.after_laws[0]
    found = Judgement((law,), Seen((Observation(0, 3, 9, "here", values),), None, ("head",))).violation(law).finding
    kept = f"head did not change, although its gradient and learning rate call for an update of about {due:.2g};"
    assert kept in found.seen
    assert found.seen.endswith(seen)
    assert found.likely.startswith(likely)


class _Idle(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        """No update."""


def _full(value: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    parameter = nn.Parameter(torch.full((16,), value, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def test_a_state_that_is_no_table_says_nothing() -> None:
    """An optimizer may keep whatever it likes for a parameter; that it moved nothing is seen all the same."""
    optimizer = _Idle([weight := _full(1.0)])
    optimizer.state[weight] = [torch.ones(16)]
    assert [each.member for each in _remembered(optimizer, [weight]).unmoved()] == [0]


def test_a_weight_whose_elements_are_not_stored_one_by_one_is_not_looked_at() -> None:
    """A quantized weight that is trained: its parts may stay as they are while rounding takes small updates away."""
    weight = nn.Parameter(packed(4, 4))
    weight.grad = torch.ones(4, 4)
    assert _remembered(torch.optim.SGD([weight], lr=1.0), [weight]).unmoved() == []
