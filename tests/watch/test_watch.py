"""What a watch says on real ranks, how trees are compared, and what a watch leaves behind."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import andon
from andon_contracts.violation import Violation
from tests.support.ranks import run_ranks


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, *, spoilt: bool = False) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(dist.get_rank())
    model(torch.randn(3, 4, generator=generator)).square().sum().backward()
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad *= 1 + spoilt * dist.get_rank()
    optimizer.step()


# what is said


def _flip(folder: str) -> Violation | None:
    model = _model()
    optimizer = _adam(model)
    with andon.watch(model, optimizer, action="raise", folder=folder):
        _update(model, optimizer)
        if dist.get_rank() == 1:
            model[2].weight.data.view(torch.int32)[1, 3] ^= 1  # type: ignore[index, operator]
        try:
            _update(model, optimizer)
        except Violation as found:
            return found
    return None


def test_a_flipped_bit_is_named_by_rank_tensor_and_element(tmp_path: Path) -> None:
    """Every rank raises the same error: rank 1, tensor 2.weight, element [1, 3]; the bundle says it too.

    The forward pass of step 2 already uses the flipped weight, and only the digest after the update reads it.
    """
    found = [outcome.get() for outcome in run_ranks(3, _flip, str(tmp_path))]
    assert all(isinstance(each, Violation) for each in found)
    assert len({str(each) for each in found}) == 1
    first = found[0]
    assert (first.clause, first.step, first.rank, first.tensor) == ("replicas-agree", 2, 1, "2.weight")
    lines = str(first).splitlines()
    assert lines[0] == "replicas-agree broken after step 2: rank 1 of 3 differs from ranks 0, 2."
    assert "2.weight (1 of 4 tensors), first at [1, 3]: 0x" in lines[1]
    assert "  before   reduced gradient agreed; weights and moments agreed after step 1, not read again since" in lines
    assert any("last state known equal: step 1" in line for line in lines)
    record = json.loads((tmp_path / "2" / "replicas-agree.json").read_text())["record"]
    assert (record["clause"], record["step"], record["ranks"]) == ("replicas-agree", 2, [1])
    assert list(record["details"]) == ["2.weight"]


def _allowed(_: str) -> tuple[list[str], int]:
    model = _model()
    optimizer = _adam(model)
    reasons = dict.fromkeys(("gradients-agree", "replicas-agree", "optimizers-agree"), "a trial")
    with andon.watch(model, optimizer, action="raise", allow=reasons) as w:
        for _step in range(3):
            _update(model, optimizer, spoilt=True)
    return [found.clause for found in w.findings], w.evaluations["gradients-agree"]


def test_an_allowed_clause_is_evaluated_and_silent() -> None:
    """What the user allowed raises nothing and hides no other clause."""
    for outcome in run_ranks(2, _allowed, ""):
        assert outcome.get() == ([], 3)


def _ignore(_: Violation) -> None:
    """Collected by the watch."""


# trees


def _trees() -> list[str]:
    rank = dist.get_rank()
    one = torch.arange(5000.0).view(50, 100)
    one[31, 7] += 1.0 if rank == 1 else 0.0
    trees: list[Any] = [
        {"a": torch.ones(3), "b": [1, "x", None], "c": _model()},
        {"a": torch.ones(3), "big": one},
        {"lr": 0.1 if rank == 2 else 0.2},
        {"names": {"both": 1} | ({"extra": 2} if rank == 1 else {})},
        {"a": torch.ones(2), "b": [1, "x" if rank else "y"]},
        {"a": torch.ones(2 + (rank == 2))},
        {"order": dict.fromkeys(("p", "q") if rank else ("q", "p"), 1)},
        {"text": "=" * 300 + f"{rank}" + "=" * 300},
    ]
    return [_said(tree) for tree in trees]


ZERO, ONE, TWO = (f"rank {a} of 3 differs from ranks {b}, {c}" for a, b, c in ((0, 1, 2), (1, 0, 2), (2, 0, 1)))
ORDERS = "tree['order']['q'] on rank 0, tree['order']['p'] on the others"
TEXTS = ", ".join(f"...{'=' * 20}{rank}{'=' * 39}... on rank {rank}" for rank in range(3))
SAID = (
    (
        ONE,
        "tree['big'] (1 of 2 leaves), first at [31, 7]: 0x45424000 (3108) on rank 1, 0x45423000 (3107) on the others",
    ),
    (TWO, "tree['lr'] (1 of 1 leaves), 0.1 on rank 2, 0.2 on the others"),
    (ONE, "tree['names']['extra'], a leaf on rank 1, nothing on the others"),
    (ZERO, "tree['b'][1] (1 of 3 leaves), 'y' on rank 0, 'x' on the others"),
    (TWO, "tree['a'] (1 of 1 leaves), torch.float32 (3,) on rank 2, torch.float32 (2,) on the others"),
    (ZERO, f"tree, the same leaves in another order: {ORDERS}"),
    ("ranks 0, 1, 2 all differ", f"tree['text'] (1 of 1 leaves), {TEXTS}"),
)
"""Who differs and where, of each of the trees but the first. 3107 and 3108 are 0x45423000 and 0x45424000 in fp32."""


def _said(tree: Any) -> str:
    try:
        andon.assert_same(tree)
    except Violation as found:
        return str(found)
    return "same"


def test_trees_are_compared_leaf_by_leaf() -> None:
    """Equal trees pass; else the rank, the leaf and the first differing element are named, on every rank alike."""
    by_rank = [outcome.get() for outcome in run_ranks(3, _trees)]
    assert by_rank[1] == by_rank[2] == by_rank[0]
    assert by_rank[0][0] == "same"
    assert [said.splitlines() for said in by_rank[0][1:]] == [
        [f"trees-agree broken: {who}.", f"  where    {where}"] for who, where in SAID
    ]


# what it costs to have


def test_watching_needs_only_the_base_install() -> None:
    """`andon.watch` imports neither transformers nor peft, hypothesis or pydantic."""
    heavy = ("transformers", "peft", "hypothesis", "pydantic")
    program = f"import sys, andon; andon.watch; print([n for n in {heavy!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_one_process_is_watched_too() -> None:
    """Without a process group what needs no other rank is looked at, and what does is said to be dark."""
    model = _model()
    optimizer = _adam(model)
    with andon.watch(model, optimizer, action=_ignore) as w:
        for _step in range(2):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    assert [each.clause for each in w.findings] == ["gradient-fresh"]
    assert "replicas-agree" not in w.evaluations


def test_a_closed_watch_leaves_nothing_behind() -> None:
    """Hooks, interceptions and the optimizer are as they were before."""
    model = _model()
    optimizer = _adam(model)
    before = (nn.utils.clip_grad._clip_grads_with_norm_, dist.all_reduce, optimizer.zero_grad)  # type: ignore[attr-defined]
    andon.watch(model, optimizer).close()
    after = (nn.utils.clip_grad._clip_grads_with_norm_, dist.all_reduce, optimizer.zero_grad)  # type: ignore[attr-defined]
    assert before == after
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    held = (weakref.ref(model), weakref.ref(optimizer))
    del model, optimizer, before, after
    gc.collect()
    assert [each() for each in held] == [None, None]


def _threads_and_files() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def _open_and_close() -> list[tuple[int, int]]:
    part = dist.new_group([0, 1])
    counts = []
    for group in (None, part) * 2:
        model = _model()
        with andon.watch(model, _adam(model), group=group) as w:
            w.batch([dist.get_rank()])
        with pytest.raises(ValueError, match="clip must be above 0"):
            andon.watch(model, _adam(model), group=group, clip=-1.0)
        andon.assert_same(model, group=group)
        gc.collect()
        counts.append(_threads_and_files())
    return counts


def test_a_watch_takes_its_threads_and_connections_with_it() -> None:
    """However many are opened, or refused, and trees compared: no more threads and files are open than after the first.

    Over all ranks, and over a group of them, whose name torch would give twice.
    """
    for outcome in run_ranks(2, _open_and_close):
        counts = outcome.get()
        for most, seen in zip(counts[0], zip(*counts, strict=True), strict=True):
            assert max(seen) == most, counts


def test_what_nobody_told_is_not_counted_as_evaluated(capfd: pytest.CaptureFixture[str]) -> None:
    """Clauses of the loss and of random streams run only where a loop tells of them, and the last lines say so."""
    model = _model()
    optimizer = _adam(model)
    for told in (False, True):
        with andon.watch(model, optimizer) as w:
            if told:
                w.loss(1.0, 1)
            model(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        said = capfd.readouterr().err
        idle = next(line for line in said.splitlines() if "never evaluated" in line)
        assert "randomness-declared" in idle
        assert ("loss-reported" in idle) is not told
