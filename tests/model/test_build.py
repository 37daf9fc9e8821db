"""The same spec gives the same bits, and what does not fit is said before anything is trained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from andon.config.source import quiet_loading
from andon.console.messages import InputError
from andon.data.hub import at_hand
from andon.data.tokens import byte_tokenizer, pretrained_tokenizer
from andon.model.adapter import save_base
from andon.model.build import facts_of, head_names, labels_in_own_order, vocabulary_head
from andon_contracts.digest import tree_digest
from tests.model.tiny import CAUSAL, LABELS, PAD, TINY, Shape, base_of, changed, hollow_base, spec

ARCHITECTURES = ("decoder", "encoder")


def digest(model: nn.Module) -> int:
    return tree_digest(dict(model.named_parameters()) | dict(model.named_buffers()))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_spec_gives_the_same_bits(architecture: str, dtype: str) -> None:
    state = torch.get_rng_state()
    first = base_of(spec(architecture, dtype))
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    again = base_of(spec(architecture, dtype))
    other = base_of(changed(spec(architecture, dtype), seed=8))
    assert digest(first) == digest(again)
    assert digest(first) != digest(other)
    assert {parameter.dtype for parameter in first.parameters()} == {getattr(torch, dtype)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_folder_gives_back_what_was_saved(architecture: str, tmp_path: Path) -> None:
    model = base_of(spec(architecture))
    save_base(model, tmp_path / "base", LABELS)
    loaded: Any = base_of(changed(spec(architecture), base=str(tmp_path / "base"), seed=99))
    assert digest(loaded) == digest(model)
    assert loaded.config.id2label == dict(enumerate(LABELS))
    assert loaded.config.pad_token_id == PAD
    assert head_names(model) == ({"decoder": "score", "encoder": "classifier"}[architecture],)


def test_the_tokenizers_padding_id_wins(tmp_path: Path) -> None:
    """A decoder pools the last token that is not padding; padded with 5, the logits are those of token 1 alone."""
    save_base(base_of(spec()), tmp_path, LABELS)
    model = base_of(changed(TINY, base=str(tmp_path), pad_id=5)).eval()
    padded = model(input_ids=torch.tensor([[1, 5, 5]]), attention_mask=torch.tensor([[1, 0, 0]])).logits
    alone = model(input_ids=torch.tensor([[1]]), attention_mask=torch.tensor([[1]])).logits
    torch.testing.assert_close(padded, alone)


HEADS = [("decoder", "classification"), ("encoder", "multi-label"), ("encoder", "tokens")]


@pytest.mark.parametrize(("architecture", "head"), HEADS)
def test_a_head_of_other_classes_is_drawn_as_if_there_were_none(architecture: str, head: str, tmp_path: Path) -> None:
    model = base_of(changed(spec(architecture), head=head))
    wanted = changed(spec(architecture), head=head, base=str(tmp_path), seed=99)
    for names, said in ((("a", "b", "c"), r"names other classes \(a, b, c\)"), ((), "has 3 outputs without names")):
        save_base(model, tmp_path, names)
        if not names:
            change_config(tmp_path, id2label={str(n): f"LABEL_{n}" for n in range(3)}, label2id=None)
        found = base_of(wanted)
        (note,) = facts_of(found).notes
        assert re.fullmatch(f"head: drawn anew, since the base's own {said}", note)
        tensors = load_file(tmp_path / "model.safetensors")
        output = "score.weight" if "score.weight" in tensors else "classifier.weight"
        assert not torch.equal(found.get_parameter(output), tensors[output])
        save_file(
            {name: value for name, value in tensors.items() if not name.startswith(("score.", "classifier."))},
            tmp_path / "model.safetensors",
            metadata={"format": "pt"},
        )
        assert digest(found) == digest(base_of(wanted)) != digest(base_of(changed(wanted, seed=98)))
        assert facts_of(base_of(wanted)).notes == ()


@pytest.mark.parametrize(("architecture", "head"), HEADS)
def test_a_head_of_the_same_classes_is_kept_in_its_own_order(architecture: str, head: str, tmp_path: Path) -> None:
    model = base_of(changed(spec(architecture), head=head))
    save_base(model, tmp_path, [name.upper() for name in LABELS])
    labels = labels_in_own_order(str(tmp_path), head, sorted(LABELS))
    assert labels == LABELS
    found = base_of(changed(spec(architecture), head=head, base=str(tmp_path), seed=99))
    assert digest(found) == digest(model)
    assert facts_of(found).notes == (
        "head: the base's own is kept, since it names the same classes; numbered as there: safe, needs-quoting, unsafe",
    )
    for others in (("safe", "unsafe", "other"), ("safe", "unsafe")):
        assert labels_in_own_order(str(tmp_path), head, others) == others


def test_classes_that_differ_only_in_case_are_told_apart_by_it(tmp_path: Path) -> None:
    model = base_of(changed(spec("encoder"), labels=("Yes", "yes")))
    save_base(model, tmp_path, ("Yes", "yes"))
    for labels, kept in ((("Yes", "yes"), True), (("YES", "yes"), False), (("yes", "Yes"), False)):
        wanted = changed(spec("encoder"), base=str(tmp_path), labels=labels, seed=99)
        assert ("is kept" in facts_of(base_of(wanted)).notes[0]) == kept


def test_a_head_of_another_kind_of_model_is_drawn_anew(tmp_path: Path) -> None:
    """Both kinds of BERT call their output layer `classifier`; that for tokens says nothing of a text."""
    model = base_of(changed(spec("encoder"), head="tokens"))
    save_base(model, tmp_path, LABELS)
    found = base_of(changed(spec("encoder"), base=str(tmp_path), seed=99))
    assert not torch.equal(found.get_parameter("classifier.weight"), model.get_parameter("classifier.weight"))
    assert facts_of(found).notes[0].endswith("since the base's own is that of BertForTokenClassification")


@pytest.mark.parametrize(
    ("problem", "kept"), [("regression", True), (None, True), ("multi_label_classification", False)]
)
def test_a_head_of_one_number_is_kept_for_numbers(problem: str | None, kept: bool, tmp_path: Path) -> None:
    """One output has no order; that of one label of several is a logit and not a number."""
    one = changed(spec("encoder"), head="regression", labels=("value",))
    model = base_of(one)
    save_base(model, tmp_path, ("toxic",))
    change_config(tmp_path, problem_type=problem)
    found = base_of(changed(one, base=str(tmp_path), seed=99))
    assert torch.equal(found.get_parameter("classifier.weight"), model.get_parameter("classifier.weight")) == kept
    assert ("is kept" in facts_of(found).notes[0]) == kept


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"AutoModelForSequenceClassification": "own.OwnModel"}, "own.OwnModel"),
        ({"AutoModel": "own.Backbone", "AutoConfig": "own.Config"}, "own.Backbone, own.Config"),
        ({"AutoTokenizer": "own.Tokenizer"}, ""),
        ({}, ""),
    ],
)
def test_code_that_a_base_names_is_not_run_and_is_named(named: Any, said: str, tmp_path: Path) -> None:
    save_base(base_of(spec("encoder")), tmp_path / "base", LABELS)
    change_config(tmp_path / "base", auto_map=named)
    model = base_of(changed(spec("encoder"), base=str(tmp_path / "base")))
    assert bool(facts_of(model).own_code) == bool(said)
    assert said in facts_of(model).own_code
    assert "not run: this is the BertForSequenceClassification" in facts_of(model).own_code or not said
    save_base(model, tmp_path / "written", LABELS)
    assert "auto_map" not in (tmp_path / "written" / "config.json").read_text()


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("shape", [TINY, CAUSAL], ids=["classifier", "causal"])
def test_a_folder_that_lacks_part_of_its_backbone_is_refused(shape: Shape, tmp_path: Path) -> None:
    save_base(base_of(shape), tmp_path, shape.interface.labels)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks weights.*layers\.1\.mlp\.up_proj\.weight"):
        base_of(changed(shape, base=str(tmp_path)))


def torn(folder: Path) -> None:
    save_base(base_of(spec()), folder, LABELS)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def a_file(folder: Path) -> None:
    folder.rmdir()
    folder.write_text("x")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (torn, "cannot load"),
        (a_file, "is a file"),
        (lambda folder: None, r"no config\.json, so it is not a model$"),
        (
            lambda folder: (folder / "adapter_config.json").write_text("{}"),
            "holds an adapter: give its base model, or merge it",
        ),
        # Of text and images: which of them is meant is not said.
        (lambda folder: AutoConfig.for_model("gemma3").save_pretrained(folder), "is several models in one"),
    ],
    ids=["torn weights", "a file", "an empty folder", "an adapter", "several models"],
)
def test_a_folder_that_is_no_model_is_refused(made: Any, message: str, tmp_path: Path) -> None:
    made(tmp_path)
    with pytest.raises(InputError, match=message):
        base_of(changed(TINY, base=str(tmp_path)))


@pytest.mark.parametrize("name", ["./absent", "/absent/folder", "a/b/c", "~/absent-folder"])
def test_an_absent_folder_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(InputError, match="does not exist"):
        base_of(changed(TINY, base=name))


def test_a_revision_names_which_weights_of_the_hub_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a cache of the hub with two revisions; where the configuration of a revision is absent, it is refused."""
    kept = tmp_path / "models--me--tiny"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    wanted = {}
    for seed, name in enumerate(("main", "v1")):
        commit = f"{seed:040}"
        (kept / "refs").mkdir(parents=True, exist_ok=True)
        (kept / "refs" / name).write_text(commit)
        model: Any = base_of(changed(TINY, seed=seed))
        save_base(model, kept / "snapshots" / commit, LABELS if name == "v1" else LABELS[::-1])
        byte_tokenizer().save(kept / "snapshots" / commit)
        wanted[name] = digest(model.model)
    of = changed(TINY, base="me/tiny")
    loaded: list[Any] = [base_of(changed(of, revision=name)) for name in (None, "v1")]
    assert [digest(each.model) for each in loaded] == [wanted["main"], wanted["v1"]]
    assert wanted["main"] != wanted["v1"]
    ordered = [labels_in_own_order("me/tiny", of.interface.head, LABELS, revision) for revision in (None, "v1")]
    assert ordered == [LABELS[::-1], LABELS]
    assert at_hand("me/tiny", "v1") == str(kept / "snapshots" / f"{1:040}")
    assert pretrained_tokenizer("me/tiny", local_only=False, revision="v1").vocab_size
    with pytest.raises(InputError, match="no model of that name at revision 'v2' in the hub's cache"):
        pretrained_tokenizer("me/tiny", local_only=False, revision="v2")
    with pytest.raises(InputError, match="fetch it first: hf download me/tiny --revision v2"):
        at_hand("me/tiny", "v2")
    with pytest.raises(InputError, match=r"model\.revision: is of a base on the hub, and .* is a folder; leave it out"):
        base_of(changed(of, base=str(kept / "snapshots" / f"{1:040}"), revision="v1"))


def test_a_tokenizer_with_more_ids_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """The seed gave such ids a zero embedding and a warning (seed S3)."""
    save_base(base_of(spec()), tmp_path, LABELS)
    with pytest.raises(InputError, match="34 ids, the model's vocabulary 33"):
        base_of(changed(TINY, base=str(tmp_path), vocab_size=34))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_base_and_name(tmp_path: Path, value: float, dtype: str) -> None:
    """The loss would be NaN at step 1 and the message would blame the rows. The embedding's row need not be used. The
    largest finite weights are no fault."""
    save_base(base_of(spec()), tmp_path, LABELS)
    file, name = tmp_path / "model.safetensors", "model.embed_tokens.weight"
    tensors = load_file(file)
    tensors[name][7, 3], tensors["score.weight"][:] = value, torch.finfo(torch.bfloat16).max
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError) as caught:
        base_of(changed(spec("decoder", dtype), base=str(tmp_path)))
    count = tensors[name].numel()
    what = f"the tensor '{name}' is not finite: 1 of its {count} values are NaN or infinite"
    assert str(caught.value) == f"{tmp_path}: {what} (the first, {value}, is at [7, 3]); get an undamaged copy"


LENGTHS: dict[str, tuple[dict[str, Any], int | None]] = {
    "bert": ({}, 16),
    "opt": ({"ffn_dim": 16, "word_embed_proj_dim": 16}, 16),
    "gpt2": ({"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}, 16),
    "roberta": ({}, 14),
    "deberta": ({"relative_attention": True, "position_biased_input": False, "pos_att_type": "c2p|p2c"}, None),
}
"""Families with 16 positions in their configuration and padding id 1, and how long a row may be; None: without limit.

Positions of some begin behind the padding id; some look at distances alone.
"""


@pytest.mark.parametrize("family", LENGTHS)
def test_the_longest_row_that_is_named_can_be_given(family: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    settings, most = LENGTHS[family]
    named = {"vocab_size": 33, "max_position_embeddings": 16, "pad_token_id": 1, "num_labels": 3, "sep_token_id": 2}
    config = AutoConfig.for_model(family, **(sizes | named | settings))
    with quiet_loading():
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    wanted = changed(TINY, base=str(tmp_path), pad_id=1)
    for build in (base_of, hollow_base) if most is not None else ():
        with pytest.raises(InputError, match=f"model.max_length={most} is the most"):
            build(changed(wanted, max_length=most + 1))
    longest = 40 if most is None else most
    hollow_base(changed(wanted, max_length=longest))
    model = base_of(changed(wanted, max_length=longest))
    ids = torch.full((1, longest), 3)
    assert model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.shape == (1, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": ("a",)}, "at least 2"),
        ({"labels": (), "vocab_size": 4, "pad_id": 9}, "(?s)0 classes.*padding id 9 is outside"),
        (
            {"head": "causal", "labels": (), "architecture": "encoder"},
            "'encoder' reads both ways and cannot write the next token",
        ),
    ],
)
def test_rows_and_tokenizers_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        base_of(changed(TINY, **change))


@pytest.mark.parametrize("kind", ["modernbert", "distilbert", "esm", "deberta-v2"])
def test_a_folder_of_any_family_is_loaded(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    if kind == "distilbert":
        sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24}
    config = AutoConfig.for_model(kind, vocab_size=33, pad_token_id=5, max_position_embeddings=64, **sizes)
    saved = AutoModelForSequenceClassification.from_config(config)
    with quiet_loading():
        saved.save_pretrained(tmp_path)
    loaded = base_of(changed(TINY, base=str(tmp_path)))
    backbone = dict(saved.base_model.named_parameters())
    assert backbone
    for name, parameter in loaded.base_model.named_parameters():
        assert torch.equal(parameter, backbone[name]), name
    assert (loaded.config.num_labels, loaded.config.pad_token_id) == (3, TINY.interface.pad_id)


def test_a_causal_model_is_the_decoder_with_its_own_head() -> None:
    model: Any = base_of(CAUSAL)
    backbone = dict(base_of(TINY).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, backbone[name]), name
    assert vocabulary_head(model) is model.lm_head
    assert vocabulary_head(base_of(TINY)) is None
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {p.shape for p in hollow_base(CAUSAL).parameters()} == {p.shape for p in model.parameters()}


def test_the_padding_id_of_a_causal_model_is_an_id_like_any_other() -> None:
    """Its embedding gets the gradient of where it is read: a stop token may have the same id."""
    model: Any = base_of(changed(CAUSAL, pad_id=3))
    model(input_ids=torch.tensor([[1, 3, 4]])).logits[0, 2, 4].backward()
    assert bool(model.model.embed_tokens.weight.grad[3].ne(0).any())


@pytest.mark.parametrize(
    ("kind", "tied"), [("llama", True), ("llama", False), ("gpt2", True), ("gpt_neox", False), ("mistral", False)]
)
def test_a_folder_must_have_a_causal_models_head(kind: str, tied: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    sizes |= {"num_key_value_heads": 1} if kind == "mistral" else {}
    config = AutoConfig.for_model(kind, vocab_size=33, tie_word_embeddings=tied, **sizes)
    saved = AutoModelForCausalLM.from_config(config)
    wanted = changed(CAUSAL, base=str(tmp_path))
    with quiet_loading():
        saved.save_pretrained(tmp_path)
    assert digest(base_of(wanted)) == digest(saved)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tied == (tensors.pop("embed_out.weight" if kind == "gpt_neox" else "lm_head.weight", None) is None)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if tied:
        assert digest(base_of(wanted)) == digest(saved)
        return
    with pytest.raises(InputError, match=r"lacks weights that a causal language model needs: lm_head\.weight"):
        base_of(wanted)


@pytest.mark.parametrize("kind", ["bert", "modernbert", "t5"])
def test_an_encoder_cannot_write(kind: str, tmp_path: Path) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    for build in (base_of, hollow_base):
        with pytest.raises(InputError, match=rf"is an encoder \({kind}\), which cannot write"):
            build(changed(CAUSAL, base=str(tmp_path)))


def test_a_decoder_that_does_not_know_how_to_begin_is_refused(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    AutoConfig.for_model("t5", vocab_size=33, **sizes).save_pretrained(tmp_path)
    base = changed(TINY, base=str(tmp_path))
    with pytest.raises(InputError, match=r"has a decoder \(t5\), .* add decoder_start_token_id"):
        hollow_base(base)
    AutoConfig.for_model("t5", vocab_size=33, decoder_start_token_id=0, **sizes).save_pretrained(tmp_path)
    assert hollow_base(base)
