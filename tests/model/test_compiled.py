"""Which passes are compiled depends on their shape alone, and on nothing that came before."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from andon.config.schema import Adapter
from andon.console.messages import InputError
from andon.model.adapter import attach
from andon.model.build import backbone_of
from andon.model.compiled import CompiledPasses, _room_for, compile_backbone, rewriting_backend, traced
from andon.model.masks import collate, length_step, padded_lengths, shapes_of
from andon.step.plan import GlobalBatch
from tests.model.tiny import adapted, base_of, changed, spec


@given(st.integers(1, 600), st.integers(1, 9), st.integers(1, 600))
def test_every_padded_length_is_one_that_was_announced(longest: int, count: int, length: int) -> None:
    step = length_step(longest, count)
    lengths = padded_lengths(longest, step)
    assert len(lengths) <= count
    assert lengths[-1] == longest
    row = torch.ones(min(length, longest), dtype=torch.int32)  # as token files have them
    ids = collate([row], 0, step, longest)["input_ids"]
    assert (ids.shape[1] in lengths, ids.dtype) == (True, torch.int64)


@given(st.integers(1, 40), st.integers(1, 40))
def test_every_micro_batch_of_a_full_batch_is_compiled(batch_size: int, micro_batches: int) -> None:
    shapes = shapes_of(batch_size, micro_batches, [64])
    parts = GlobalBatch(1, 0, 0, tuple(range(batch_size))).micro_batches(micro_batches)
    assert {(len(part), 64) for part in parts if part} == shapes
    assert len(shapes) <= 2


def test_passes_of_other_shapes_and_without_gradients_run_as_they_are() -> None:
    calls: list[str] = []

    def way(name: str) -> Any:
        return lambda *given, **named: calls.append(name)

    passes = CompiledPasses(way("eager"), way("compiled"), frozenset({(4, 8)}), graphs=False)
    passes(torch.zeros(4, 8))
    passes(input_ids=torch.zeros(4, 8))
    passes(input_ids=torch.zeros(3, 8))
    passes(inputs_embeds=torch.zeros(4, 8, 2))
    with torch.no_grad():
        passes(torch.zeros(4, 8))
    assert calls == ["compiled", "compiled", "eager", "eager", "eager"]
    assert (passes.seen, passes.eager) == ({(4, 8)}, 1)


def test_the_backbone_of_an_adapted_model_is_what_is_compiled() -> None:
    model = adapted()
    ids = torch.ones((2, 8), dtype=torch.int64)
    before = model(input_ids=ids).logits
    passes = compile_backbone(model, "kernels", {(3, 8)})
    assert torch.equal(model(input_ids=ids).logits, before)
    assert passes.eager == 1


def shallow(adapter: Adapter = Adapter(r=2, alpha=16.0, dropout=0.05, targets=("q_proj",))) -> nn.Module:  # noqa: B008 - it is frozen
    """One layer, since tracing takes a time in proportion to them."""
    return attach(base_of(changed(spec(), num_hidden_layers=1)), adapter, seed=3)


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one test traced is not found by another, and the compiler's bar of progress leaves no thread."""
    import torch._dynamo.config as tracing

    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    before = tracing.cache_size_limit, tracing.accumulated_cache_size_limit
    yield
    tracing.cache_size_limit, tracing.accumulated_cache_size_limit = before
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_no_kernel_of_either_pass_is_chosen_by_timing() -> None:
    """What torch keeps on the disk is found again by the names of our functions and a digest of their code."""
    import torch._inductor.config as code

    found: list[tuple[str, bool]] = []

    def looking(graph: torch.fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        found.append((threading.current_thread().name, code.deterministic))
        known = code.unsafe_marked_cacheable_functions
        assert {"andon", "andon.model.compiled.adapted_product"} <= known.keys()
        (digest,) = set(known.values())
        assert len(bytes.fromhex(digest)) == 32

        def run(given: list[Any]) -> Any:
            return graph(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    model = shallow()
    backbone_of(model).forward = traced(model, rewriting_backend({}, inner_compile=looking))
    loss = model(input_ids=torch.ones((2, 8), dtype=torch.int64)).logits.sum()
    thread = threading.Thread(target=loss.backward, name="autograd")
    thread.start()
    thread.join()
    assert ("autograd", True) in found
    assert all(chosen for _, chosen in found)
    assert len(found) == 2


@pytest.mark.usefixtures("fresh_compiler")
def test_every_shape_of_every_backbone_is_compiled() -> None:
    import torch._dynamo.config as tracing

    tracing.cache_size_limit = 3
    graphs: list[str] = []

    def counting() -> Callable[..., Any]:
        """One for each replica, as in a run: torch 2.11 gives replicas that have one backend each other's graphs."""

        def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            graphs.append("one")
            return module.forward

        return backend

    for _ in range(2):
        model = shallow(Adapter(kind="none"))
        backbone_of(model).forward = traced(model, counting(), **_room_for(2))
        for length in (8, 9):
            model(input_ids=torch.ones((2, length), dtype=torch.int64))
    assert len(graphs) == 4


@pytest.mark.parametrize("name", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_SUPPRESS_ERRORS"])
def test_what_would_run_eagerly_without_a_word_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(InputError, match=name):
        compile_backbone(adapted(), "kernels", {(3, 8)})
    monkeypatch.setenv(name, "0")
    compile_backbone(adapted(), "kernels", {(3, 8)})


# What torch keeps of a compilation is found by the next run, and not by one of other code.


_ROOT = Path(__file__).parents[2]
_RUN = """
import json, sys
import torch
from torch._dynamo.utils import counters
from andon.model import compiled
from andon.model.build import backbone_of
from tests.model.tiny import adapted
if sys.argv[1:]:
    compiled._code_of_rewrites = lambda: sys.argv[1]
torch.set_num_threads(1)
model = adapted()
backbone_of(model).forward = compiled.traced(model, compiled.rewriting_backend({}))
loss = model(input_ids=torch.ones((2, 8), dtype=torch.int64)).logits.sum()
loss.backward()
bits = [p.grad.flatten().tolist() for p in model.parameters() if p.grad is not None]
print(json.dumps({"counted": dict(counters["aot_autograd"]), "loss": loss.item(), "bits": bits}))
"""


def _compiled(folder: Path, seed: str, *more: str) -> dict[str, Any]:
    given = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _RUN, *more]
    ended = subprocess.run(command, env=given, cwd=_ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


# By default: what torch keeps of a compilation is named by our code (above, no kernel is chosen by timing).
@pytest.mark.deep
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, as torch does to compile for a CPU")
@pytest.mark.timeout(600)
def test_a_second_run_finds_what_the_first_compiled(tmp_path: Path) -> None:
    first, second, third = _compiled(tmp_path, "1"), _compiled(tmp_path, "2"), _compiled(tmp_path, "3", "other code")
    counted = [
        {name: each["counted"].get(f"autograd_cache_{name}", 0) for name in ("hit", "miss", "bypass")}
        for each in (first, second, third)
    ]
    assert counted == [
        {"hit": 0, "miss": 1, "bypass": 0},
        {"hit": 1, "miss": 0, "bypass": 0},
        {"hit": 0, "miss": 1, "bypass": 0},
    ]
    assert first["bits"] == second["bits"] == third["bits"]
    assert first["loss"] == second["loss"]
