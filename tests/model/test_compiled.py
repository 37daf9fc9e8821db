"""Which passes are compiled depends on their shape alone, and on nothing that came before. None is compiled twice."""

from __future__ import annotations

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
from andon.model.compiled import CompiledPasses, _room_for, adapted_product, compile_backbone, rewriting_backend, traced
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
    import torch._inductor.config as code

    found: list[tuple[str, bool]] = []

    def looking(graph: torch.fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        found.append((threading.current_thread().name, code.deterministic))

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
@pytest.mark.parametrize("ours", [True, False])
def test_a_compiled_graph_is_found_again_unless_our_code_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    """As torch counts it. Products need no kernel of inductor's, and so no C++ compiler."""
    from torch._dynamo.utils import counters

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        for node in module.graph.find_nodes(op="call_function", target=torch.mm) if ours else ():
            node.target, node.args = adapted_product, (*node.args, *node.args, 2.0)
        return rewriting_backend({})(module, inputs)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counted = []
    for run in range(3):
        if run == 2:
            monkeypatch.setattr("andon.model.compiled._code_of_rewrites", lambda: "of another version")
        torch.compiler.reset()
        before = counters["aot_autograd"].copy()
        compiled = torch.compile(lambda x: torch.mm(x, x), dynamic=False, backend=backend)
        assert torch.equal(compiled(torch.ones((3, 3))), torch.full((3, 3), 3.0 + 2.0 * 3.0 * ours))
        counted.append({name: n for name, n in (counters["aot_autograd"] - before).items() if "cache" in name})
    assert counted == [{"autograd_cache_miss": 1, "autograd_cache_saved": 1}, {"autograd_cache_hit": 1}, counted[0]]


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
