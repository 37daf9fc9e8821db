"""Packed or not, the gradient is that of each row alone, and what would make it another is seen."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPTJConfig, GPTJForCausalLM

import andon.model.causal
from andon.config.schema import Adapter
from andon.console.messages import InputError
from andon.model.adapter import attach, mean_row, trainable_parameters
from andon.model.build import seeded, without_adapter
from andon.model.causal import Row, check_packing_isolation, collate_packs, content, generate, loss_sum, row_outputs
from andon.model.memory import StorageWatch
from andon.step.micro_batch import LeafLoss
from tests.model.tiny import CAUSAL, CPU, LORA, PAD, TINY, base_of, causal, causal_base, changed, perturbed

WHOLE = Adapter(kind="none")
FAMILIES = ("qwen3", "llama", "gpt2")
STOP = 31


def row(tokens: list[int], prompt: int) -> Row:
    """A prompt of `prompt` tokens that are not trained, and an answer that is."""
    return torch.tensor(tokens), torch.tensor([0.0] * prompt + [1.0] * (len(tokens) - prompt))


ROWS = (
    row([1, 2, 3, 4, 5, 6, STOP], 3),
    row([9, 8, STOP], 1),
    row([7, 7, 7, 12, 13, 14, 15, 16, 17, 18, STOP], 8),
    (torch.tensor([20, 21, 22, STOP]), torch.tensor([0.0, 0.5, 0.0, 2.0])),
    row([5, 6, 9, STOP], 0),
)
"""Ragged; the last would train its first token too, which nothing predicts."""
TERMS = 4 + 2 + 3 + 2 + 3
PACKED = [[ROWS[0], ROWS[1]], [ROWS[2]], [ROWS[3], ROWS[4]]]
SEPARATE = [[each] for each in ROWS]


def moved(model: nn.Module) -> nn.Module:
    """Every trainable weight moved, and no further than fp32 can follow."""
    return perturbed(model, by=0.05)


def batch_of(packs: list[list[Row]], multiple: int = 8) -> dict[str, torch.Tensor]:
    return dict(collate_packs(packs, PAD, multiple, None))


def wanted(model: nn.Module, rows: Iterable[Row] = ROWS) -> tuple[float, dict[str, torch.Tensor]]:
    """In float64: each row alone, by the model's own forward, token by token; rows of new tokens by peft's own code."""
    exact: Any = copy.deepcopy(model).double().eval()
    for module in exact.modules():
        module.__dict__.pop("forward_adapters", None)
    total = torch.zeros((), dtype=torch.float64)
    for tokens, weights in rows:
        logits = exact(input_ids=tokens[None]).logits[0]
        for place in range(1, len(tokens)):
            total = total - weights[place].double() * logits[place - 1].log_softmax(0)[tokens[place]]
    total.backward()  # type: ignore[no-untyped-call]
    return float(total.detach()), {name: value.grad for name, value in trainable_parameters(exact).items()}  # type: ignore[misc]


def distances(found: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> dict[str, float]:
    assert found.keys() == exact.keys()
    return {name: float((found[name].double() - value).norm() / value.norm()) for name, value in exact.items()}


def terms_of(loss: LeafLoss) -> int:
    assert loss.terms is not None
    return int(loss.terms)


def gradients(model: nn.Module, loss: LeafLoss | torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    total = loss.loss_sum if isinstance(loss, LeafLoss) else loss
    total.backward()  # type: ignore[no-untyped-call]
    return {name: value.grad.clone() for name, value in trainable_parameters(model).items()}  # type: ignore[union-attr]


@pytest.mark.parametrize("packs", [PACKED, SEPARATE], ids=["packed", "separate"])
@pytest.mark.parametrize("adapter", [LORA, WHOLE], ids=["lora", "whole"])
@pytest.mark.parametrize(("family", "eager"), [("qwen3", False), ("qwen3", True), ("llama", False), ("gpt2", False)])
def test_the_gradient_is_that_of_a_float64_loop(
    family: str, eager: bool, adapter: Adapter, packs: list[list[Row]]
) -> None:
    model = moved(causal(family, adapter, eager=eager))
    total, exact = wanted(model)
    found = loss_sum(model, batch_of(packs))
    assert terms_of(found) == TERMS
    assert float(found.loss_sum.detach()) == pytest.approx(total, rel=1e-6)
    assert found.loss_sum.dtype == torch.float32
    assert max(distances(gradients(model, found), exact).values()) <= 2e-6


@pytest.mark.parametrize("new", [(), (33, 34)], ids=["known", "new tokens"])
@pytest.mark.parametrize("adapter", [LORA, WHOLE], ids=["lora", "whole"])
def test_the_gradient_of_log_probabilities_is_that_of_a_float64_loop(
    adapter: Adapter, new: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row has another coefficient; logits are computed in chunks of three tokens."""
    monkeypatch.setattr(andon.model.causal, "_LOGITS", {"cpu": 3 * 33})
    model = moved(attach(causal_base("llama"), adapter, 3, new))
    packs = with_new(PACKED) if new else PACKED
    counted = torch.arange(4) < torch.tensor([[len(each)] for each in packs])
    table = torch.linspace(-1.5, 2, counted.numel(), dtype=torch.float64).view(counted.shape) * counted
    rows = zip(itertools.chain(*packs), table[counted].tolist(), strict=True)
    total, exact = wanted(model, ((tokens, -weight * weights) for (tokens, weights), weight in rows))
    batch, library = batch_of(packs), andon.model.causal
    found = (library.row_log_probs(model, library.hidden_of(model, batch), batch, 4) * table).sum()
    assert float(found.detach()) == pytest.approx(total, rel=1e-6)
    assert max(distances(gradients(model, found), exact).values()) <= 2e-6


ONE = torch.ones(1).view(torch.int32).long()  # the bits of a weight of 1.0
MUTANTS: dict[str, Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "prompt tokens trained": lambda batch: {"weights": ONE.where(batch["positions"] > 0, 0)},
    "mask off by one": lambda batch: {"weights": batch["weights"].roll(-1, 1)},
    "stop token not trained": lambda batch: {"weights": batch["weights"].where(batch["input_ids"] != STOP, 0)},
    "padded tokens counted": lambda batch: {"weights": ONE.where(batch["rows"] == 0, batch["weights"])},
    "cross-row attention by a mask of ones": lambda batch: {"rows": torch.ones_like(batch["rows"])},
    "positions that do not restart": lambda batch: {
        "positions": torch.arange(batch["rows"].shape[1]).expand_as(batch["rows"]).contiguous()
    },
}


def _trained(weights: torch.Tensor) -> torch.Tensor:
    places, packs = weights.flatten().nonzero().flatten(), weights.shape[0]
    dealt = torch.zeros(packs * -(-places.numel() // packs), dtype=torch.int64)
    dealt[: places.numel()] = places
    return dealt.view(packs, -1)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_float64_loop_tells(name: str) -> None:
    """Rotary positions are relative: one that does not restart moves a row as a whole, which only others could see."""
    model = moved(causal("gpt2", WHOLE))
    _, exact = wanted(model)
    batch = batch_of(PACKED)
    batch |= MUTANTS[name](batch)
    batch["trained"] = _trained(batch["weights"])
    assert max(distances(gradients(model, loss_sum(model, batch)), exact).values()) > 1e-2


def test_a_pack_is_its_rows_end_to_end() -> None:
    batch = batch_of([[row([1, 2, 3], 1), row([4, 5], 0)], [row([6, 7], 1)]], multiple=4)
    one = 0x3F800000
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[1, 2, 3, 4, 5, PAD, PAD, PAD], [6, 7, *[PAD] * 6]],
        "positions": [[0, 1, 2, 0, 1, 0, 0, 0], [0, 1, *[0] * 6]],
        "rows": [[1, 1, 1, 2, 2, 0, 0, 0], [1, 1, *[0] * 6]],
        "weights": [[0, one, one, 0, one, 0, 0, 0], [0, one, *[0] * 6]],
        "trained": [[1, 2], [4, 9]],
    }
    assert {value.dtype for value in batch.values()} == {torch.int64}


def test_trained_places_are_dealt_out_to_few_counts_where_lengths_are_few() -> None:
    """3 and 1 trained tokens are 2 a pack, and 32 with lengths that are multiples of 32; place 0 has no weight."""
    packs = [[row([1, 2, 3, 4], 1)], [row([6, 7], 1)]]
    assert batch_of(packs, multiple=4)["trained"].tolist() == [[1, 2], [3, 5]]
    assert batch_of(packs, multiple=32)["trained"].flatten().tolist() == [1, 2, 3, 33, *[0] * 60]


def test_a_pack_ends_at_the_limit_and_weights_go_with_tokens() -> None:
    assert collate_packs([[row([1, 2, 3, 4, 5], 1)]], PAD, 4, 6)["input_ids"].shape == (1, 6)
    with pytest.raises(ValueError, match="3 tokens and 2 weights"):
        collate_packs([[(torch.tensor([1, 2, 3]), torch.ones(2))]], PAD, 4, None)


def test_the_digest_is_of_what_the_model_is_given() -> None:
    narrow, wide = batch_of(PACKED, 1), batch_of(PACKED, 64)
    assert torch.equal(content(narrow), content(wide))
    assert torch.equal(content(narrow)[1:2], content(batch_of(PACKED[1:2])))
    for name in ("input_ids", "positions", "rows", "weights"):
        changed = {**narrow, name: narrow[name].clone()}
        changed[name][0, 2] += 1
        assert (content(changed) != content(narrow)).tolist() == [True, False, False], name
    joined = content(batch_of([[ROWS[0], ROWS[1]]]))
    assert not torch.equal(joined, content(batch_of([[ROWS[1], ROWS[0]]])))


@pytest.mark.parametrize("adapter", [LORA, WHOLE], ids=["lora", "whole"])
def test_few_logits_are_held_at_a_time(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    model = moved(causal("qwen3", adapter))
    batch = batch_of(PACKED)
    whole = loss_sum(model, batch)
    exact = gradients(model, whole)
    monkeypatch.setattr(andon.model.causal, "_LOGITS", {"cpu": 2 * 33})
    rows: list[int] = []
    head = without_adapter(model).get_submodule("lm_head")
    with head.register_forward_hook(lambda _, __, logits: rows.append(logits.shape[0])):
        chunked = loss_sum(model, batch)
        found = gradients(model, chunked)
    assert rows == [2] * 7 + [1]
    assert max(distances(found, exact).values()) <= 2e-6
    assert (int(chunked.correct), terms_of(chunked)) == (int(whole.correct), TERMS)
    assert row_outputs(model, batch)[:, 1:].sum(0).tolist() == [int(whole.correct), TERMS]


@pytest.mark.parametrize("adapter", [LORA, WHOLE], ids=["lora", "whole"])
def test_logits_take_a_small_part_of_what_all_of_them_take(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = changed(CAUSAL, vocab_size=8192, max_length=320, num_hidden_layers=1)
    model: Any = attach(base_of(spec), adapter, seed=3)
    ids = torch.arange(320)
    batch = batch_of([[(ids, torch.ones(320))]])
    for parameter in trainable_parameters(model).values():
        parameter.grad = torch.zeros_like(parameter)

    def naive() -> None:
        logits = model(input_ids=ids[None]).logits[0, :-1].float()
        nn.functional.cross_entropy(logits, ids[1:], reduction="sum").backward()  # type: ignore[no-untyped-call]

    def chunked() -> None:
        loss_sum(model, batch).loss_sum.backward()  # type: ignore[no-untyped-call]

    monkeypatch.setattr(andon.model.causal, "_LOGITS", {"cpu": 20 * 8192})
    extras = []
    for way in (naive, chunked):
        known = [*model.parameters(), *(value.grad for value in trainable_parameters(model).values())]
        with StorageWatch(ignored=known) as watch:
            way()
        extras.append(watch.peak)
    assert extras[1] <= 0.15 * extras[0]


def test_each_pack_gives_its_own_sums() -> None:
    model = moved(causal("gpt2", dropout=0.5))
    found = row_outputs(model, batch_of(PACKED))
    assert (found.dtype, found.requires_grad, model.training) == (torch.float64, False, True)
    assert found[:, 2].tolist() == [6.0, 3.0, 5.0]
    for pack, sums in zip(PACKED, found, strict=True):
        loss = loss_sum(model.eval(), batch_of([pack]))
        assert float(loss.loss_sum.detach()) == pytest.approx(float(sums[0]), rel=1e-6)
        assert [int(loss.correct), terms_of(loss)] == sums[1:].tolist()
    assert float(found[:, 0].sum()) == pytest.approx(wanted(model)[0], rel=1e-6)


def test_a_batch_without_a_trained_token_has_no_loss_and_no_gradient() -> None:
    model = moved(causal())
    batch = batch_of([[row([1, 2, 3], 3)]])
    loss = loss_sum(model, batch)
    assert (float(loss.loss_sum.detach()), int(loss.correct), terms_of(loss)) == (0.0, 0, 0)
    assert all(bool(value.eq(0).all()) for value in gradients(model, loss).values())
    assert row_outputs(model, batch).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("family", FAMILIES)
def test_decoders_that_keep_rows_apart_are_taken(family: str) -> None:
    for eager in (False, True):
        check_packing_isolation(causal(family, eager=eager), CPU)


def _built(kind: str, **settings: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 33}
    config = AutoConfig.for_model(kind, **(sizes | settings))
    with seeded(7):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("rwkv", {"attention_hidden_size": 16}, "gives packed rows other logits than each row alone"),
        ("mamba", {"state_size": 4}, "has layers of linear_attention"),
        ("bloom", {"n_layer": 2, "n_head": 2}, "cannot be given packs of rows"),
        ("granite", {"intermediate_size": 24, "logits_scaling": 4.0}, "changes its logits behind its head"),
        ("mistral", {"intermediate_size": 24, "num_key_value_heads": 2, "sliding_window": 8}, "sliding_window 8"),
    ],
)
def test_a_model_that_cannot_keep_rows_apart_is_refused(kind: str, settings: dict[str, Any], message: str) -> None:
    """A state that runs on, places counted by the mask, logits that are not the head's, a limit to sight."""
    with pytest.raises(InputError, match=rf"model\.base: .*{message}"):
        check_packing_isolation(_built(kind, **settings), CPU)


@pytest.mark.parametrize("way", ["a mask of ones", "a default cache", "positions that run on"])
def test_rows_that_see_each_other_are_refused(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers has it where it is given a mask of tokens, or keeps a cache: it says nothing."""
    model: Any = moved(causal("gpt2"))
    backbone = without_adapter(model).transformer
    own = backbone.forward

    def forward(*ids: torch.Tensor, **given: Any) -> Any:
        if given.get("position_ids") is not None and way == "a mask of ones":
            given["attention_mask"] = torch.ones_like(given["input_ids"])
        elif given.get("position_ids") is not None and way == "a default cache":
            given |= {"attention_mask": None, "use_cache": True}
        elif given.get("position_ids") is not None:
            given["position_ids"] = None
        return own(*ids, **given)

    check_packing_isolation(model, CPU)
    monkeypatch.setattr(backbone, "forward", forward)
    with pytest.raises(InputError, match="gives packed rows other logits than each row alone"):
        check_packing_isolation(model, CPU)


PROMPTS = ([4, 5, 6], [7], [9, 10, 11, 12, 13], [8, 3])


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_a_batch_get_the_largest_logit_that_each_has_alone(family: str) -> None:
    model: Any = moved(causal(family))
    expected = [[*ids] for ids in PROMPTS]
    for ids, _ in itertools.product(expected, range(8)):
        logits = model.eval()(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    model.train()
    answers = [ids[len(prompt) :] for ids, prompt in zip(expected, PROMPTS, strict=True)]
    assert generate(model, PROMPTS, (), [8] * len(PROMPTS)) == answers
    assert generate(model, PROMPTS, (), [8, 0, 3, 5]) == [answers[0], [], answers[2][:3], answers[3][:5]]
    assert model.training


def test_generation_ends_where_it_must_and_takes_over_no_settings() -> None:
    model: Any = moved(causal())
    (found,) = generate(model, [[4, 5, 6]], (), [8])
    stop = found[3]
    ended = found[: found.index(stop) + 1]
    assert generate(model, [[4, 5, 6], [7]], (stop,), [8, 1])[0] == ended
    model.generation_config.update(max_length=4, do_sample=True, repetition_penalty=9.0, eos_token_id=found[0])
    assert generate(model, [[4, 5, 6]], (), [8]) == [found]
    assert model.generation_config.repetition_penalty == 9.0
    assert [*map(len, generate(model, [[4, 5, 6], [1] * 16, [2] * 15], (), [50] * 3))] == [13, 0, 1]
    with pytest.raises(ValueError, match="a prompt has no tokens"):
        generate(model, [[4], []], (), [8, 8])


def test_a_batch_of_prompts_stays_within_positions_and_memory() -> None:
    found = [*andon.model.causal._prompt_batches([3, 9, 8, 1, 8], [13, 3, 4, 2, 0], 16, 26)]
    assert found == [[1, 2], [0], [3]]


# New tokens have rows of their own that start alike and train; no other row changes a bit.


KNOWN = 33
NEW = (33, 34)
NEW_ROWS = (row([1, 33, 3, 34, 5, 33, 31], 2), row([34, 34, 8, 31], 1))  # read and written, in prompts and in answers


def tables(model: nn.Module) -> list[torch.Tensor]:
    base: Any = without_adapter(model)
    layers = [base.get_input_embeddings(), base.get_output_embeddings()]
    return [getattr(layer, "original_module", layer).weight.detach() for layer in layers]


def with_new(of: list[list[Row]]) -> list[list[Row]]:
    """`of`, with rows of new tokens packed to its first pack, and one alone."""
    return [[*of[0], NEW_ROWS[0]], *of[1:], [NEW_ROWS[1]]]


@pytest.mark.parametrize("of", [PACKED, SEPARATE], ids=["packed", "separate"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_new_tokens_is_that_of_a_float64_loop(family: str, of: list[list[Row]]) -> None:
    model = moved(attach(causal_base(family), LORA, 3, NEW))
    given = with_new(of)
    total, exact = wanted(model, (each for pack in given for each in pack))
    loss = loss_sum(model, batch_of(given))
    assert float(loss.loss_sum.detach()) == pytest.approx(total, rel=1e-6)
    assert max(distances(gradients(model, loss), exact).values()) <= 2e-6
    rows = [tuple(value.shape) for name, value in exact.items() if "trainable_tokens" in name]
    assert rows == [(2, 16)] * (2 if family == "llama" else 1)
    check_packing_isolation(model, CPU)


@pytest.mark.parametrize("adapter", [LORA, WHOLE], ids=["lora", "whole"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_start_as_the_mean_of_the_others_which_keep_their_bits(family: str, adapter: Adapter) -> None:
    before = tables(causal_base(family))
    state = torch.get_rng_state()
    for seed in (3, 4):
        found = tables(attach(causal_base(family), adapter, seed, NEW))
        for was, now in zip(before, found, strict=True):
            assert now.shape == (35, 16)
            assert torch.equal(now[:KNOWN], was)
            mean = was.double().mean(0).float()
            assert all(torch.allclose(now[id_], mean, rtol=1e-6, atol=1e-9) for id_ in NEW)
            assert torch.equal(now[33], now[34])
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_that_are_there_already_are_taken() -> None:
    """Vocabularies are often larger than their tokenizers: nothing grows, and other rows to spare stay as they are."""
    before = tables(causal_base("llama", words=40))
    for was, now in zip(before, tables(attach(causal_base("llama", words=40), LORA, 3, NEW)), strict=True):
        other = (was != now).any(1).nonzero().flatten().tolist()
        assert (now.shape, other) == (was.shape, [33, 34])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_rows_of_new_tokens_are_trained_of_a_vocabulary(dtype: str) -> None:
    model = attach(causal_base("llama", dtype=dtype), LORA, 3, NEW)
    trained = {name: value for name, value in trainable_parameters(model).items() if ".lora_" not in name}
    assert [name.split(".")[-2] for name in trained] == ["trainable_tokens_delta"] * 2
    assert all(value.dtype == torch.float32 for value in trained.values())
    found = gradients(model, loss_sum(model, batch_of(with_new(SEPARATE))))
    assert all((found[name] != 0).any(1).all() for name in trained)


def test_a_mean_is_of_all_rows_in_one_order() -> None:
    rows = torch.randn(10_001, 3, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 1e-3, 1e6])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        once = mean_row(rows)
        torch.set_num_threads(2)
        assert torch.equal(mean_row(rows), once)
    finally:
        torch.set_num_threads(threads)
    assert torch.allclose(once, rows.double().mean(0), rtol=1e-12, atol=0)


def test_models_without_such_rows_are_refused() -> None:
    with pytest.raises(InputError, match=r"model.new_tokens: Qwen3ForSequenceClassification is not a causal language"):
        attach(base_of(TINY), LORA, 3, NEW)
    biased = GPTJConfig(vocab_size=KNOWN, n_embd=16, n_layer=1, n_head=2, rotary_dim=4, n_positions=32)
    with pytest.raises(InputError, match=r"model.new_tokens: the logits of GPTJForCausalLM have a bias"):
        attach(GPTJForCausalLM(biased), LORA, 3, NEW)
    whole: Any = attach(GPTJForCausalLM(biased), WHOLE, 3, NEW)
    assert whole.lm_head.bias.shape == (35,)
