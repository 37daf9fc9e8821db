"""Every example runs on two ranks: its watch sees all of it, finds nothing, and would find a fault."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_post_hook

import andon
from andon.run.ledger import read_ledger
from andon_contracts.record import Broken, End, Step
from andon_falsify.claims.ledgers import read_run, verify
from andon_falsify.verdict import Outcome
from tests.support.ranks import run_ranks

FOLDER = Path(__file__).parents[2] / "examples" / "watch"
STEPS, FLIPPED = 8, 3
APART = "reference_apart"
NEEDS = {
    "ddp": (),
    "fsdp2": (),
    "accelerate_loop": ("accelerate",),
    "fabric_loop": ("lightning",),
    "lightning_callback": ("lightning",),
    "hf_trainer": ("transformers", "accelerate"),
}
"""Each example, and the packages that it needs."""
TOGETHER = (("ddp", "fsdp2"), ("accelerate_loop",), ("fabric_loop", "lightning_callback"), ("hf_trainer",))
"""Those that share processes, since a library is imported once in each."""
TELLS_ROWS = frozenset(NEEDS) - {"fsdp2"}


def absent(name: str) -> str:
    return ", ".join(package for package in NEEDS[name] if importlib.util.find_spec(package) is None)


def _leave_group() -> None:
    """Leave the group there is, once all ranks are here: one that is still connecting, or reading, would fail."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"is here {dist.get_rank()}", "")
    store.wait([f"is here {rank}" for rank in range(dist.get_world_size())])
    dist.destroy_process_group()


@contextmanager
def launched(port: int, ledger: Path) -> Iterator[None]:
    """What torchrun says to a rank; `port` is that of the launcher's store."""
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    os.environ |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": "0", "MASTER_ADDR": "localhost"}
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "examples"}
    os.environ["ANDON_LEDGER"] = str(ledger)
    if "accelerate.state" in sys.modules:  # it remembers the group of the run before
        state: Any = sys.modules["accelerate.state"]
        state.AcceleratorState._reset_state()
        state.PartialState._reset_state()
    yield
    if dist.is_initialized():
        _leave_group()


def flip() -> torch.utils.hooks.RemovableHandle:
    """Rank 1 loses a bit of its first trained tensor after update FLIPPED, as a faulty memory would."""
    seen: list[object] = []

    def hook(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        seen.append(optimizer)
        if len(seen) == FLIPPED and os.environ["RANK"] == "1":
            first = optimizer.param_groups[0]["params"][0]
            getattr(first, "to_local", lambda: first)().data.view(torch.int32).view(-1)[0] ^= 1 << 20

    return register_optimizer_step_post_hook(hook)


def _run(names: tuple[str, ...], ports: Sequence[int], folder: str) -> None:
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    _leave_group()
    with Path(folder, f"{names[0]}.{os.environ['RANK']}").open("w") as said:
        os.dup2(said.fileno(), 2)
        runs = [(name, broken) for name in names for broken in (False, True)]
        for port, (name, broken) in zip(ports, runs, strict=True):
            with launched(port, Path(folder, f"{name}{'-flipped' * broken}.jsonl")):
                handle = flip() if broken else None
                runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
                if handle is not None:
                    handle.remove()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the end of a rank of ours


def ran(names: tuple[str, ...], folder: Path) -> None:
    # One store for each run: a second group on one store would meet the addresses of the first.
    stores = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in range(2 * len(names))]
    for outcome in run_ranks(2, _run, names, [store.port for store in stores], str(folder)):
        outcome.get()


@pytest.mark.parametrize("names", TOGETHER, ids=lambda names: names[0])
def test_an_example_is_watched_from_its_first_update_to_its_last(names: tuple[str, ...], tmp_path: Path) -> None:
    """The ledger has every update and an end, the watch finds nothing that is not there, and no claim is falsified.

    Without a plan nobody knows the epochs. A bit flipped on one rank is found at the next update, but not in shards.
    """
    if missing := ", ".join(filter(None, map(absent, names))):
        pytest.skip(f"needs {missing}")
    ran(names, tmp_path)
    for name in names:
        *records, end = read_ledger(tmp_path / f"{name}.jsonl")
        # That Trainer multiplies the loss of classes by the number of ranks, which the second update shows.
        told = [(record.clause, record.step) for record in records if isinstance(record, Broken)]
        assert told == [("gradient-scale", 2)] * (name == "hf_trainer")
        steps = [record for record in records if isinstance(record, Step)]
        assert [(step.step, step.world, len(step.ranks)) for step in steps] == [(n, 2, 2) for n in range(1, STEPS + 1)]
        assert isinstance(end, End)
        assert (end.reason, end.step) == ("finished", STEPS)
        assert all(step.gradient_at is None for step in steps), "clipping was not seen"
        verdicts = {verdict.claim: verdict.outcome for verdict in verify([read_run(tmp_path / f"{name}.jsonl")])}
        assert verdicts["replicas-agree"] is (Outcome.NOT_APPLICABLE if name == "fsdp2" else Outcome.HOLDS)
        assert verdicts["samples-once"] is (Outcome.UNKNOWN if name in TELLS_ROWS else Outcome.NOT_APPLICABLE)
        assert Outcome.FALSIFIED not in verdicts.values()
        broken = [each for each in read_ledger(tmp_path / f"{name}-flipped.jsonl") if isinstance(each, Broken)]
        found = [(each.clause, each.step) for each in broken if each.clause != "gradient-scale"]  # as without the bit
        assert found[:1] == ([] if name == "fsdp2" else [("replicas-agree", FLIPPED + 1)])


def test_every_example_is_tried() -> None:
    found = {path.stem for path in FOLDER.glob("*.py")}
    assert found - {APART} == set(NEEDS) == {name for group in TOGETHER for name in group}
    text = "".join(page.read_text(encoding="utf-8") for page in (FOLDER.parents[1] / "docs").glob("*.md"))
    assert [name for name in found if f"examples/watch/{name}.py" not in text] == []


@pytest.mark.parametrize("wrong", [None, "scale", "pooling"])
def test_a_reference_apart_sees_what_one_that_calls_the_model_repeats(wrong: str | None) -> None:
    """A LoRA without its scale, a mean over padding: the model's own loss as a reference finds neither."""
    named = runpy.run_path(str(FOLDER / f"{APART}.py"))
    rows = named["Rows"]()

    def same_code(model: torch.nn.Module, ids: Sequence[int]) -> tuple[torch.Tensor, int]:
        return cross_entropy(model(rows.tokens[ids]), rows.labels[ids], reduction="sum"), len(ids)

    found = {}
    for name, reference in (("apart", lambda model, ids: named["law"](model, rows, ids)), ("same", same_code)):
        torch.manual_seed(0)
        model = named["Classifier"](wrong)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with andon.watch(model, optimizer, action=lambda _: None, reference=reference, every=1) as watch:
            for ids in ([3, 1, 4], [15, 9]):
                watch.batch(ids)
                optimizer.zero_grad()
                cross_entropy(model(rows.tokens[ids]), rows.labels[ids]).backward()
                optimizer.step()
        assert watch.evaluations["gradient-law"] == 2
        found[name] = [(each.clause, each.step) for each in watch.findings]
    assert found == {"apart": [] if wrong is None else [("gradient-law", 1)], "same": []}
