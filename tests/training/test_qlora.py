"""Runs on a base in 4 bits: one result on any number of workers, that of stock libraries on the same packed base."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install '.[qlora]'")

from andon.config.load import load_config
from andon.console.messages import InputError
from andon.model.memory import plan_bytes
from andon.model.quantize import quantize, quantized_layers
from andon.run.folder import RunFolder
from andon.step.replica import base_digest, frozen_tensors
from andon.training.build import build_model
from andon.training.inference import evaluate_run, load_run, read_labelled
from andon.training.material import prepare
from tests.support.stock import Stock
from tests.training.runs import Runs, outcome, summary
from tests.training.test_dpo import preference
from tests.training.test_export import chat_base, conversations, exported

SETTINGS = ("task=sft", "model.quantize=nf4", "adapter.dropout=0.2", "optimizer.lr=0.04", "training.epochs=2")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, Path]:
    folder = tmp_path_factory.mktemp("qlora")
    chat_base(folder / "base")
    plain = conversations(folder, "chat")
    runs = Runs(plain.data, (f"model.base={folder / 'base'}", *SETTINGS))
    assert runs.train(folder / "run") == 0
    return runs, folder


def test_a_resume_on_another_number_of_workers_ends_with_the_same_bits(made: tuple[Runs, Path], tmp_path: Path) -> None:
    """The evaluations between must not touch the packed weights, as bitsandbytes does on some CPUs."""
    runs, folder = made
    stopped = runs.stopped(tmp_path / "run", 7)
    assert runs.train(stopped, backend="gloo", workers=3, resume="auto") == 0
    assert outcome(stopped) == outcome(folder / "run")
    packed = json.loads((stopped / "provenance.json").read_text())["digests"]
    assert packed["base"] != packed["quantized base"]


def test_preferences_are_measured_from_the_packed_base(made: tuple[Runs, Path], tmp_path: Path) -> None:
    """`andon eval` computes the reference again, from the model that the run began with."""
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(f"{json.dumps(preference(number))}\n" for number in range(12)))
    settings = ("task=dpo", "optimizer.lr=0.04", f"model.base={made[1] / 'base'}", f"data.eval={data}")
    assert Runs(data, settings).train(tmp_path / "run", "model.quantize=nf4", "training.max_steps=3") == 0
    folder = RunFolder(tmp_path / "run")
    found, own = evaluate_run(load_run(folder), read_labelled(folder, data)).as_dict(), summary(folder.path)["eval"]
    assert found["margin"] == pytest.approx(own["margin"], rel=1e-4)
    assert found["chosen_reward"] == pytest.approx(own["chosen_reward"], rel=1e-4)


def test_a_flipped_bit_changes_the_digest(made: tuple[Runs, Path]) -> None:
    """Of packed weights, and of their scales, codes and offsets, which are neither parameters nor buffers."""
    model = load_run(RunFolder(made[1] / "run")).model
    before, frozen = base_digest(model), frozen_tensors(model)
    state = [name for name in frozen if ".quant_state." in name]
    packed = sorted({name.partition(".quant_state.")[0] for name in state})
    assert len(packed) == 7
    assert len(state) == 5 * 7  # scales, codes, offset, scales and codes of the scales
    for number, name in enumerate([*packed, *state]):
        octets = frozen[name].reshape(-1).view(torch.uint8)
        octets[number % len(octets)] ^= 1 << number % 8
        assert base_digest(model) != before, name
        octets[number % len(octets)] ^= 1 << number % 8
    assert base_digest(model) == before


def test_stock_libraries_compute_the_same_on_the_same_packed_base(made: tuple[Runs, Path], stock: Stock) -> None:
    _, folder = made
    pytest.importorskip("accelerate")
    ids = torch.tensor([[5, 9, 3, 17, 60, 33, 2], [44, 8, 71, 6, 90, 12, 13]])
    with torch.no_grad():
        wanted = load_run(RunFolder(folder / "run")).model(input_ids=ids).logits
    program = f"""
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
how = dict(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32)
nf4 = dict(quantization_config=BitsAndBytesConfig(load_in_4bit=True, **how), dtype=torch.float32, device_map="cpu")
base = AutoModelForCausalLM.from_pretrained({str(folder / "base")!r}, **nf4)
for each in base.modules():
    if hasattr(each, "support_avx512bf16_for_cpu"):
        each.support_avx512bf16_for_cpu = False  # a kernel in bfloat16
model = PeftModel.from_pretrained(base, {str(folder / "run" / "adapter")!r}).eval()
with torch.no_grad():
    print(model(input_ids=torch.tensor({ids.tolist()})).logits.tolist())
"""
    assert torch.allclose(torch.tensor(json.loads(stock.run(program))), wanted, rtol=1e-5, atol=1e-6)


def test_a_merge_starts_from_the_loaded_base(made: tuple[Runs, Path], tmp_path: Path) -> None:
    _, folder = made
    said = exported(folder / "run", tmp_path / "merged", "--merge")
    assert any("the run computes with its base in nf4" in line for line in said)
    assert ", bitsandbytes 0" in (tmp_path / "merged" / "README.md").read_text()
    base, merged, adapter = (
        load_file(each / name)
        for each, name in (
            (folder / "base", "model.safetensors"),
            (tmp_path / "merged", "model.safetensors"),
            (folder / "run" / "adapter", "adapter_model.safetensors"),
        )
    )
    name = "model.layers.0.mlp.down_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{each}.weight"] for each in "AB")
    assert torch.allclose(merged[f"{name}.weight"], base[f"{name}.weight"] + 16.0 * b @ a, atol=1e-6)


def test_a_plan_counts_what_a_replica_holds(made: tuple[Runs, Path]) -> None:
    runs, _ = made
    material = prepare(load_config(None, runs.overrides()))
    model = build_model(material.config, material.interface)
    layers = quantized_layers(model)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    plan = plan_bytes(model, trained, "adamw", 4, 0, packed=[layer.weight for layer in layers.values()])
    assert plan.loaded == sum(each.nbytes for each in frozen_tensors(model).values())
    quantize(model, torch.device("cpu"))
    tables = "quant_state.state2.code"  # one for all layers
    held = {name: each.nbytes for name, each in frozen_tensors(model).items() if not name.endswith(tables)}
    assert plan.base == sum(held.values())


def test_a_missing_library_is_named(made: tuple[Runs, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(InputError, match=r"model.quantize: nf4 needs bitsandbytes; run: pip install '\.\[qlora\]'"):
        load_run(RunFolder(made[1] / "run"))
