"""The adapter trains what it says, starts at zero, and is read back bit for bit."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.pytorch_utils import Conv1D

import andon.model.adapter as adapters
from andon.config.schema import Adapter
from andon.config.source import quiet_loading
from andon.console.messages import InputError
from andon.model.adapter import (
    adapter_tensors,
    attach,
    export_adapter,
    load_adapter,
    read_labels,
    save_base,
    trainable_parameters,
)
from andon.model.build import facts_of
from andon.model.masks import predictions
from andon.step.replica import base_digest
from andon_contracts.digest import tree_digest
from tests.model.tiny import (
    CAUSAL,
    CPU,
    LABELS,
    LORA,
    PAD,
    TINY,
    adapted,
    base_of,
    causal,
    causal_base,
    changed,
    perturbed,
    spec,
    task,
)
from tests.support.memory import peak_bytes

ARCHITECTURES = ("decoder", "encoder")
ROWS = task([[1, 2, 3], [4, 5, 6, 7, 8], [9]], [0, 1, 2])


def logits(model: nn.Module) -> torch.Tensor:
    return predictions(model, ROWS.load([0, 1, 2], CPU))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_adapter_starts_as_no_change(architecture: str) -> None:
    """B is zero and A is not, so the first forward pass is the base model's (seed S10)."""
    model = adapted(architecture)
    lora = {name: value for name, value in trainable_parameters(model).items() if ".lora_" in name}
    assert all(bool(value.eq(0).all()) == (".lora_B." in name) for name, value in lora.items())
    assert torch.equal(logits(model), logits(base_of(spec(architecture))))


def test_the_trainable_weights_are_counted_by_hand() -> None:
    """Per layer and target: r * (in + out); q, o: 16+16, k, v: 16+8, gate, up, down: 16+24; head: 16 * 3."""
    per_layer = 2 * (2 * (16 + 16) + 2 * (16 + 8) + 3 * (16 + 24))
    trainable = trainable_parameters(adapted())
    assert sum(value.numel() for value in trainable.values()) == 2 * per_layer + 48
    assert len(trainable) == 2 * 7 * 2 + 1
    assert list(trainable) == sorted(trainable) == list(trainable_parameters(adapted()))  # F-HET-001


def test_a_is_drawn_from_the_given_seed_alone() -> None:
    before = torch.get_rng_state()
    first, again = adapted(), adapted()
    other = attach(base_of(spec()), LORA, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert tree_digest(trainable_parameters(first)) == tree_digest(trainable_parameters(again))
    assert tree_digest(trainable_parameters(first)) != tree_digest(trainable_parameters(other))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_trainable_weight_gets_a_gradient_and_the_base_none(architecture: str, dtype: str) -> None:
    """The seed's adapters never got one (V28). Trainables are fp32 before a bfloat16 base too, the head as well."""
    model = perturbed(adapted(architecture, dtype))
    before = base_digest(model)
    ROWS.loss_sum(model, ROWS.load([0, 1, 2], CPU)).loss_sum.backward()  # type: ignore[no-untyped-call]
    for name, parameter in trainable_parameters(model).items():
        assert parameter.dtype == torch.float32, name
        assert parameter.grad is not None, name
        assert bool(parameter.grad.ne(0).any()), name
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert base_digest(model) == before


def test_without_an_adapter_every_weight_trains_in_fp32() -> None:
    base, away = base_of(spec("encoder", "bfloat16")), torch.device("meta")
    loaded = sum(parameter.nbytes for parameter in base.parameters())  # on another device they need no memory here
    assert peak_bytes(lambda: attach(base, Adapter(kind="none"), 3, device=away)) <= loaded
    for model in (base, adapted("encoder", "bfloat16", Adapter(kind="none"))):
        assert len(trainable_parameters(model)) == len(list(model.parameters()))
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_proj", "v_prj"), "'v_prj' matches no Linear module; did you mean 'v_proj'"),
        (("zzz",), "'zzz' matches no Linear module; there are down_proj, gate_proj"),
        (("q_norm",), "'q_norm' matches no Linear module"),
        (("_proj",), "'_proj' matches no Linear module"),
        (("q_proj", "score"), "'score' is the classification head"),
        (("all-linear", "q_proj"), "already names every module"),
        (("q_prj", "v_prj", "k_proj"), "(?s)'q_prj' matches.*'v_prj' matches"),
    ],
)
def test_a_target_that_matches_nothing_is_refused(targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        attach(base_of(spec()), LORA.model_copy(update={"targets": targets}), seed=0)


def test_named_targets_are_adapted_and_no_others() -> None:
    model = attach(base_of(spec()), LORA.model_copy(update={"targets": ("q_proj", "1.mlp.up_proj")}), seed=0)
    found = {name.split(".lora_")[0] for name in trainable_parameters(model) if ".lora_" in name}
    prefix = "base_model.model.model.layers"
    assert found == {f"{prefix}.0.self_attn.q_proj", f"{prefix}.1.self_attn.q_proj", f"{prefix}.1.mlp.up_proj"}


POOLED: dict[str, dict[str, Any]] = {
    "bert": {},
    "albert": {"embedding_size": 8},
    "mobilebert": {"embedding_size": 8, "intra_bottleneck_size": 8, "true_hidden_size": 8},
}
"""Families whose pooler lies inside the backbone, with the sizes that they have of their own."""


@pytest.mark.parametrize("family", POOLED)
@pytest.mark.parametrize("head", ["classification", "tokens"])
def test_what_the_checkpoint_lacks_goes_along_with_the_adapter(family: str, head: str, tmp_path: Path) -> None:
    """Most masked language models have no pooler, so one is drawn: stock peft would draw another at each load."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = AutoConfig.for_model(family, vocab_size=33, sep_token_id=2, **(sizes | POOLED[family]))
    with quiet_loading():
        AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if ".pooler." not in name}
    save_file(kept, file, metadata={"format": "pt"})
    wanted = changed(TINY, base=str(tmp_path / "base"), head=head)
    model = perturbed(attach(base_of(wanted), LORA, seed=3))
    drawn = facts_of(model).drawn
    assert len(drawn) == 1 or head == "tokens"
    assert not [name for name in trainable_parameters(model) if ".pooler." in name and ".lora_" in name]
    export_adapter(model, tmp_path / "adapter", "x", LABELS)
    loader = AutoModelForSequenceClassification if head == "classification" else AutoModelForTokenClassification
    stored = AutoConfig.from_pretrained(tmp_path / "adapter" / "classifier.json")
    with quiet_loading():
        base = loader.from_pretrained(tmp_path / "base", config=stored)
        stock = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    batch = ROWS.load([0, 1, 2], CPU)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        torch.testing.assert_close(stock(**inputs).logits, logits(model), atol=1e-5, rtol=1e-5)
        save_base(model, tmp_path / "merged", LABELS, torch.float32)
        with quiet_loading():
            plain, report = loader.from_pretrained(tmp_path / "merged", output_loading_info=True)
        assert not report["missing_keys"] | report["unexpected_keys"]
        torch.testing.assert_close(plain.eval()(**inputs).logits, stock(**inputs).logits, atol=1e-5, rtol=1e-5)


OURS = [(adapted, each) for each in itertools.product(ARCHITECTURES, ("float32", "bfloat16"))]
OURS += [(causal, (family,)) for family in ("qwen3", "llama", "gpt2")]


@pytest.mark.parametrize(("make", "of"), OURS)
def test_our_own_reader_is_exact_for_every_base(make: Any, of: tuple[str, ...], tmp_path: Path) -> None:
    said = logits if make is adapted else next_tokens
    model, loaded = perturbed(make(*of)), make(*of)
    export_adapter(model, tmp_path, "unused", LABELS if make is adapted else ())
    assert not torch.equal(said(loaded), said(model))
    load_adapter(loaded, tmp_path)
    assert torch.equal(said(loaded), said(model))
    assert tree_digest(trainable_parameters(loaded)) == tree_digest(trainable_parameters(model))


def test_an_adapter_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    model = adapted()
    export_adapter(model, tmp_path, "unused", LABELS)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    absent = sorted(tensors)[0]
    del tensors[absent]
    tensors["strange.lora_A.weight"] = torch.zeros(1)
    tensors["base_model.model.score.weight"] = torch.zeros(2, 16)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    before = tree_digest(trainable_parameters(model))
    with pytest.raises(InputError) as caught:
        load_adapter(model, tmp_path)
    text = str(caught.value)
    assert f"has no {absent}" in text
    assert "has strange.lora_A.weight" in text
    assert "is (2, 16), the model's (3, 16)" in text
    assert tree_digest(trainable_parameters(model)) == before


def test_an_adapter_that_is_absent_or_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"adapter_model\.safetensors"):
        load_adapter(adapted(), tmp_path)
    with pytest.raises(InputError, match=r"labels\.json"):
        read_labels(tmp_path)
    model, file = adapted(), tmp_path / "adapter_model.safetensors"
    export_adapter(model, tmp_path, "unused", LABELS)
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("lora_B.weight"))
    tensors[name][1, 0] = float("inf")
    save_file(tensors, file)
    with pytest.raises(InputError, match=rf"adapter_model\.safetensors: the tensor '{name}' is not finite: 1 of its"):
        load_adapter(model, tmp_path)


def test_exports_of_one_state_have_the_same_bytes(tmp_path: Path) -> None:
    """Sets are sorted, since their order depends on the process's hash seed."""
    for place in ("a", "b"):
        export_adapter(perturbed(adapted()), tmp_path / place, "base", LABELS)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors", "classifier.json", "labels.json"]
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(config["target_modules"])
    assert len(config["target_modules"]) == 14
    assert config["modules_to_save"] == ["classifier", "score"]
    assert config["inference_mode"] is True


def test_exported_tensors_are_copies() -> None:
    model = adapted()
    taken = adapter_tensors(model)
    before = tree_digest(taken)
    perturbed(model)
    assert tree_digest(taken) == before
    assert tree_digest(adapter_tensors(model)) != before


@pytest.mark.parametrize("limit", [10**9, 2000])
def test_a_merged_model_in_one_file_or_in_several_is_read_by_transformers(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base in bfloat16, of which each sum is rounded once; the embedding is tied to the head."""
    monkeypatch.setattr(adapters, "LARGEST_FILE", limit)
    model = perturbed(attach(causal_base(dtype="bfloat16"), LORA, seed=3))
    before = tree_digest(dict(model.named_parameters()))
    save_base(model, tmp_path, (), torch.bfloat16)
    assert tree_digest(dict(model.named_parameters())) == before
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 2) == (tmp_path / "model.safetensors.index.json").exists() == (limit == 2000)
    with quiet_loading():
        found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    wanted = layer.base_layer.weight.float() + layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 2.0
    assert torch.equal(found.model.layers[0].mlp.up_proj.weight, wanted.bfloat16())
    assert found.lm_head.weight is found.model.embed_tokens.weight


def test_files_are_those_that_safetensors_writes(tmp_path: Path) -> None:
    tensors = {"ö": torch.randn(3, 4), "b": torch.tensor(1.5), "h": torch.randn(3).bfloat16(), "i": torch.arange(3)}
    adapters.write_tensors(tmp_path / "file", {name: adapters.Stored(each) for name, each in tensors.items()})
    assert (tmp_path / "file").read_bytes() == save(tensors, metadata={"format": "pt"})
    broken = adapters.Stored(tensors["b"], None, lambda weight: weight * float("inf"))
    with pytest.raises(ValueError, match="a merged weight is not finite"):
        adapters.write_tensors(tmp_path / "file", {"b": broken})


def test_saving_the_base_leaves_the_adapter_out(tmp_path: Path) -> None:
    save_base(perturbed(adapted()), tmp_path / "adapted", LABELS)
    save_base(base_of(spec()), tmp_path / "plain", LABELS)
    for name in ("model.safetensors", "config.json", "labels.json"):
        assert (tmp_path / "adapted" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 8},
}


def mixture(family: str, loader: Any) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    named = {"vocab_size": 33, "num_labels": 3, "num_experts_per_tok": 2, "pad_token_id": PAD}
    return loader.from_config(AutoConfig.for_model(family, **named, **sizes, **EXPERTS[family]))


@pytest.mark.parametrize("family", EXPERTS)
def test_what_peft_refuses_is_bad_input(family: str) -> None:
    model = mixture(family, AutoModelForSequenceClassification)
    with pytest.raises(
        InputError, match=r"adapter: peft refuses it for .*lora_dropout != 0; --set adapter\.dropout=0$"
    ):
        attach(model, Adapter(r=2, dropout=0.1), 0)


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("loader", [AutoModelForSequenceClassification, AutoModelForCausalLM])
def test_a_mixture_is_merged_and_saved_with_all_of_its_experts(family: str, loader: Any, tmp_path: Path) -> None:
    """peft wraps experts twice, once for each of their two tensors; stock transformers reads what is written."""
    model = perturbed(attach(mixture(family, loader), LORA, seed=3))
    assert any("experts" in name for name in trainable_parameters(model))
    batch = ROWS.load([0, 1, 2], CPU)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        wanted = model.eval()(**inputs).logits
        save_base(model, tmp_path / "base", ("a", "b", "c"))
        save_base(model, tmp_path / "merged", ("a", "b", "c"), torch.float32)
        for folder, same in (("merged", True), ("base", False)):
            with quiet_loading():
                stock, report = loader.from_pretrained(tmp_path / folder, output_loading_info=True)
            assert not report["unexpected_keys"]
            assert same or not report["missing_keys"] - {"score.weight"}
            found = stock.eval()(**inputs).logits
            assert torch.allclose(found, wanted, atol=1e-5) == same


def next_tokens(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=torch.tensor([[1, 2, 3, 4]])).logits
    return logits


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_a_causal_head_stays_as_it_came(family: str) -> None:
    model: Any = causal(family)
    adapters = {name.split(".lora_")[0] for name in trainable_parameters(model)}
    base = model.get_base_model()
    layers = {
        f"base_model.model.{name.removesuffix('.base_layer')}"
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and name != "lm_head" and ".lora_" not in name
    }
    assert adapters == layers
    assert len(layers) == 2 * {"qwen3": 7, "llama": 7, "gpt2": 4}[family]
    assert all(".lora_" in name for name in trainable_parameters(model))


def test_a_causal_head_is_no_target() -> None:
    with pytest.raises(InputError, match="'lm_head' gives the logits of the vocabulary"):
        causal(adapter=LORA.model_copy(update={"targets": ("q_proj", "lm_head")}))


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "causal"])
def test_stock_peft_reads_the_export_bit_for_bit(architecture: str, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification

    said: Any = logits
    labels, loader, fresh = LABELS, AutoPeftModelForSequenceClassification, adapted
    if architecture == "causal":
        said, labels, loader, fresh = next_tokens, (), AutoPeftModelForCausalLM, lambda _: causal()
    model = perturbed(fresh(architecture))
    save_base(model, tmp_path / "base", labels)
    export_adapter(model, tmp_path / "adapter", str(tmp_path / "base"), labels)
    with quiet_loading():
        loaded = loader.from_pretrained(tmp_path / "adapter")
    assert torch.equal(said(loaded), said(model))
    assert not torch.equal(said(loaded), said(fresh(architecture)))
    if labels:
        assert loaded.config.id2label == dict(enumerate(labels))
        assert read_labels(tmp_path / "adapter") == labels
        return
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("CAUSAL_LM", None)


def test_a_causal_model_without_an_adapter_is_exported_whole(tmp_path: Path) -> None:
    model = perturbed(causal(adapter=Adapter(kind="none")))
    export_adapter(model, tmp_path, "unused", ())
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    with quiet_loading():
        stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = base_of(changed(CAUSAL, base=str(tmp_path), pad_id=PAD))
    assert torch.equal(next_tokens(stock), next_tokens(model))
    assert torch.equal(next_tokens(ours), next_tokens(model))
