"""The reference computes what torch, transformers and peft compute, and not the same way; our trainer keeps its law."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from andon.tasks.sft import SftTask
from andon_falsify.campaign.trial import LAW, Trial
from andon_falsify.campaign.warm_bench import AndonBench
from andon_falsify.ranks.pool import RankPools
from andon_falsify.ranks.trainer import AndonTrainer
from andon_falsify.reference.models import (
    Decoder,
    Encoder,
    Layers,
    Masks,
    Params,
    canonical,
    canonical_name,
    no_dropout,
)
from andon_falsify.reference.training import Model, Piece, TokenRow, row_gradients, row_losses, token_gradients, train
from andon_falsify.reference.update import AdamW, Sgd, State, UpdateRule, clip, global_norm
from andon_falsify.subjects.assembly import model_of, task_of
from andon_falsify.subjects.case import Case
from andon_falsify.verdict import Outcome
from falsify.power.instructions import PACKED, SFT
from falsify.power.preferences import DPO, PACKED_DPO

ALPHA = 6
RANK = 3
CLASSES = 3


@dataclass(frozen=True)
class Subject:
    model: nn.Module
    config: Mapping[str, object]

    @property
    def params(self) -> dict[str, Tensor]:
        return canonical(self.model.state_dict())

    @property
    def trainable(self) -> list[str]:
        names = (canonical_name(name) for name, weight in self.model.named_parameters() if weight.requires_grad)
        return [name for name in names if name is not None]

    def gradients(self) -> dict[str, Tensor]:
        found = {}
        for name, weight in self.model.named_parameters():
            short = canonical_name(name)
            if weight.grad is not None and short is not None:
                found[short] = weight.grad.double()
        return found


SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "num_labels": CLASSES,
}


def decoder() -> Subject:
    """Qwen3 with grouped queries and LoRA, every trainable weight away from 0."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=6)
    torch.manual_seed(0)
    return _adapted(Qwen3ForSequenceClassification(config), config.to_dict(), ["q_proj", "v_proj", "down_proj"])


def encoder() -> Subject:
    """BERT with LoRA, every trainable weight away from 0."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    torch.manual_seed(0)
    return _adapted(BertForSequenceClassification(config), config.to_dict(), ["query", "value", "dense"])


def pieces(
    seed: int, shapes: tuple[tuple[int, int], ...], *, left: bool = False, classes: int = CLASSES
) -> list[Piece]:
    """Micro-batches of (rows, length) with ragged rows of tokens 1 to 39, padded with 0."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for rows, length in shapes:
        tokens = torch.randint(1, 40, (rows, length), generator=generator)
        sizes = torch.randint(1, length + 1, (rows, 1), generator=generator)
        places = torch.arange(length)
        attention = (places >= length - sizes) if left else (places < sizes)
        labels = torch.randint(0, classes, (rows,), generator=generator)
        found.append(Piece(tokens * attention, attention.long(), labels))
    return found


def _adapted(model: nn.Module, config: Mapping[str, object], targets: list[str]) -> Subject:
    from peft import LoraConfig, TaskType, get_peft_model

    settings = LoraConfig(task_type=TaskType.SEQ_CLS, r=RANK, lora_alpha=ALPHA, target_modules=targets)
    adapted = get_peft_model(model, settings).double()
    generator = torch.Generator().manual_seed(1)
    for weight in adapted.parameters():
        # Norms start at 1 and B at 0: a reference that ignored either would look right.
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        weight.data += 0.1 * noise
    return Subject(adapted, config)


LAST_DIGITS = 1e-12
RATES = (1e-2, 3e-3, 0.0, 5e-2, 1e-3)
LAWS: list[tuple[UpdateRule, Callable[[Iterable[Tensor]], torch.optim.Optimizer]]] = [
    (Sgd(), lambda weights: torch.optim.SGD(weights)),
    (Sgd(0.9, 0.1), lambda weights: torch.optim.SGD(weights, momentum=0.9, weight_decay=0.1)),
    (AdamW(), lambda weights: torch.optim.AdamW(weights)),
    (
        AdamW((0.7, 0.9), 1e-3, 0.3),
        lambda weights: torch.optim.AdamW(weights, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.3),
    ),
    (Sgd(0.9, 0.3, matrices_only=True), lambda weights: torch.optim.SGD(by_rank(weights), momentum=0.9)),
    (AdamW(weight_decay=0.3, matrices_only=True), lambda weights: torch.optim.AdamW(by_rank(weights))),
]


def by_rank(weights: Iterable[Tensor]) -> list[dict[str, Any]]:
    return [{"params": [each], "weight_decay": 0.3 * (each.dim() > 1)} for each in weights]


def tensors(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (2, 3), "b": (3,)}
    return {
        name: scale * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }


@pytest.mark.parametrize(
    ("law", "build"), LAWS, ids=["sgd", "sgd-momentum", "adamw", "adamw-other", "sgd-matrices", "adamw-matrices"]
)
def test_an_update_is_torchs(law: UpdateRule, build: Callable[[Iterable[Tensor]], torch.optim.Optimizer]) -> None:
    weights = tensors(0)
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    optimizer = build(leaves.values())
    state = State()
    for step, lr in enumerate(RATES, start=1):
        gradients = tensors(step)
        if step == 3:
            del gradients["b"]
        for name, leaf in leaves.items():
            leaf.grad = gradients.get(name)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        weights, state = law.step(weights, gradients, state, lr)
        for name, leaf in leaves.items():
            assert torch.allclose(weights[name], leaf.detach(), rtol=LAST_DIGITS, atol=LAST_DIGITS)


@given(st.integers(0, 2**31), st.floats(1e-3, 1e3), st.floats(1e-6, 1e6))
def test_clipping_is_torchs(seed: int, limit: float, scale: float) -> None:
    gradients = tensors(seed, scale)
    leaves = [torch.zeros_like(value).requires_grad_() for value in gradients.values()]
    for leaf, value in zip(leaves, gradients.values(), strict=True):
        leaf.grad = value.clone()
    expected = float(torch.nn.utils.clip_grad_norm_(leaves, limit))
    clipped = clip(gradients, limit)
    assert global_norm(gradients) == pytest.approx(expected, rel=LAST_DIGITS)
    for leaf, value in zip(leaves, clipped.values(), strict=True):
        assert torch.allclose(value, leaf.grad, rtol=LAST_DIGITS, atol=0)
    unlimited = clip(gradients, None)
    assert all(torch.equal(unlimited[name], gradients[name]) for name in gradients)


class Line:
    def logits(self, params: Params, tokens: Tensor, attention: Tensor, masks: Masks = no_dropout) -> Tensor:
        size = attention.sum(-1).double()
        mask = masks("input", tuple(size.shape))
        score = params["w"] * (size if mask is None else size * mask)
        return torch.stack((torch.zeros_like(score), score), dim=-1)


def by_hand(weight: float, batch: list[Piece], class_weights: tuple[float, float]) -> tuple[float, float]:
    loss, slope, rows = 0.0, 0.0, 0
    for piece in batch:
        for size, label in zip(piece.attention.sum(-1).tolist(), piece.labels.tolist(), strict=True):
            chance = 1 / (1 + torch.exp(torch.tensor(-weight * size, dtype=torch.float64)).item())
            own = chance if label else 1 - chance
            loss -= class_weights[label] * torch.log(torch.tensor(own, dtype=torch.float64)).item()
            slope += class_weights[label] * (chance - label) * size
            rows += 1
    return loss / rows, slope / rows


def test_ragged_pieces_are_one_batch() -> None:
    """Pieces of 3, 1, 0 and 2 rows give the weighted sum over 6 rows divided by 6, row by row too: no mean of means."""
    batch = pieces(1, ((3, 5), (1, 4), (2, 3)), classes=2)
    batch.insert(2, Piece(*(torch.zeros(0, 4, dtype=torch.int64),) * 2, torch.zeros(0, dtype=torch.int64)))
    params = {"w": torch.tensor(0.3, dtype=torch.float64)}
    weights = torch.tensor([0.5, 3.0], dtype=torch.float64)
    expected = by_hand(0.3, batch, (0.5, 3.0))
    losses, each = row_gradients(Line(), params, ["w"], batch, weights)
    assert (losses.shape, each["w"].shape) == ((6,), (6,))
    assert (losses.mean().item(), each["w"].mean().item()) == pytest.approx(expected, rel=1e-13)


def test_what_the_loss_does_not_reach_has_gradient_zero() -> None:
    batch = pieces(1, ((2, 3),), classes=2)
    params = {"w": torch.tensor(0.3), "idle": torch.ones(2)}
    assert row_gradients(Line(), params, ["w", "idle"], batch)[1]["idle"].tolist() == [[0.0, 0.0]] * 2
    with pytest.raises(ValueError, match="no rows"):
        row_gradients(Line(), params, ["w"], [])
    with pytest.raises(KeyError, match="absent"):
        row_gradients(Line(), params, ["absent"], batch)


def test_training_steps_at_its_rates_and_clips_once() -> None:
    batches = [*pieces(1, ((3, 5), (0, 4)), classes=2), *pieces(2, ((2, 5),), classes=2)]
    params = {"w": torch.tensor(0.3, dtype=torch.float64)}
    first, empty, last = train(Line(), params, ["w"], batches, Sgd(), (0.1, 0.2, 0.3), clip_norm=0.1)
    weight = 0.3
    for rate, update, batch in ((0.1, first, batches[0]), (0.3, last, batches[2])):
        slope = by_hand(weight, [batch], (1.0, 1.0))[1]
        weight -= rate * slope * min(1.0, 0.1 / (abs(slope) + 1e-6))
        assert update["w"].item() == pytest.approx(weight, rel=1e-12)
    assert empty["w"] == first["w"]


def test_masks_are_those_of_the_piece() -> None:
    batch = pieces(3, ((2, 4), (2, 4)), classes=2)
    asked = []

    def masks(piece: int) -> Masks:
        asked.append(piece)
        return lambda _, shape: torch.full(shape, 1.0 - piece)

    params = {"w": torch.tensor(0.3, dtype=torch.float64)}
    masked, whole = (row_gradients(Line(), params, ["w"], batch, None, each)[1]["w"] for each in (masks, None))
    assert asked == [0, 1]
    assert torch.equal(masked[:2], whole[:2])
    assert masked[2:].tolist() == [0.0, 0.0]


SHAPES = ((3, 7), (1, 4), (2, 12))
ROUNDING = 1e-6  # transformers computes norms, angles and attention in float32 even in a float64 model


def relative(seen: Tensor, expected: Tensor) -> float:
    return float((seen.double() - expected).norm() / expected.norm())


SUBJECTS = [
    pytest.param(decoder, Decoder, False, id="decoder"),
    pytest.param(decoder, Decoder, True, id="decoder-left-padded"),
    pytest.param(encoder, Encoder, False, id="encoder"),
]


@pytest.mark.parametrize(("build", "law", "left"), SUBJECTS)
def test_logits_and_gradients_are_right(build: Callable[[], Subject], law: type[Decoder | Encoder], left: bool) -> None:
    """With LoRA and padding: the scores of every row, and every trainable tensor's gradient over a ragged batch."""
    subject = build()
    subject.model.eval()
    reference: Model = law.from_config(subject.config, ALPHA)
    batch = pieces(5, SHAPES, left=left)
    count = sum(len(piece.labels) for piece in batch)
    for piece in batch:
        seen = subject.model(input_ids=piece.tokens, attention_mask=piece.attention).logits
        torch.autograd.backward(nn.functional.cross_entropy(seen, piece.labels, reduction="sum") / count)
        expected = reference.logits(subject.params, piece.tokens, piece.attention)
        assert expected.dtype == torch.float64
        assert relative(seen.detach(), expected) < ROUNDING
    accused = subject.gradients()
    rows = row_gradients(reference, subject.params, subject.trainable, batch)[1]
    gradients = {name: tensor.mean(0) for name, tensor in rows.items()}
    assert accused.keys() == gradients.keys()
    assert any("lora_A" in name for name in gradients)
    assert [name for name in gradients if relative(accused[name], gradients[name]) >= ROUNDING] == []


def test_masks_act_where_peft_and_attention_drop() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    weight, down, up = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in ((5, 4), (2, 4), (5, 2))
    )
    mask = torch.tensor([0.0, 2.0, 0.0, 2.0]).expand(2, 3, 4)
    asked = []

    def masks(name: str, shape: tuple[int, ...]) -> Tensor:
        asked.append((name, shape))
        return mask

    params = {"m.weight": weight, "m.lora_A.weight": down, "m.lora_B.weight": up}
    seen = Layers(params, 4.0, masks).linear(inputs, "m")
    expected = inputs @ weight.T + 2.0 * ((inputs * mask) @ (up @ down).T)
    assert torch.allclose(seen, expected, rtol=1e-14, atol=1e-14)
    assert asked == [("m.lora_dropout", (2, 3, 4))]


def test_attention_dropout_is_applied_to_probabilities() -> None:
    query, key, value = (torch.randn(1, 1, 3, 4, dtype=torch.float64) for _ in range(3))
    allowed = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    only_last = torch.tensor([0.0, 0.0, 1.0]).expand(1, 1, 3, 3)

    def masks(name: str, shape: tuple[int, ...]) -> Tensor | None:
        return only_last if name == "a.attention_dropout" and shape == (1, 1, 3, 3) else None

    seen = Layers({}, masks=masks).attend(query, key, value, allowed, "a")
    probability = (query @ key.transpose(-1, -2) / 2.0).softmax(-1)[..., 2:]
    assert torch.allclose(seen, probability * value[..., 2:, :], rtol=1e-14, atol=1e-15)


def test_masks_of_another_shape_and_adapters_without_a_scale_are_refused() -> None:
    """A mask that would be broadcast belongs to another place; nobody guesses alpha."""
    with pytest.raises(ValueError, match="mask of place"):
        Layers({}, masks=lambda _, shape: torch.ones(shape[:-1])).dropped(torch.ones(2, 3), "place")
    params = {name: torch.ones(2, 2) for name in ("m.weight", "m.lora_A.weight", "m.lora_B.weight")}
    with pytest.raises(ValueError, match="no alpha"):
        Layers(params).linear(torch.ones(1, 2), "m")


def test_every_place_of_dropout_is_asked_for() -> None:
    for subject, law, hidden in ((decoder(), Decoder, 0), (encoder(), Encoder, 2 + 2 * 2)):
        asked: list[str] = []

        def masks(name: str, shape: tuple[int, ...], asked: list[str] = asked) -> None:
            del shape
            asked.append(name)

        (piece,) = pieces(2, ((2, 5),))
        law.from_config(subject.config, ALPHA).logits(subject.params, piece.tokens, piece.attention, masks)
        adapters = [name for name in subject.params if name.endswith("lora_A.weight")]
        assert len(asked) == len(set(asked)) == len(adapters) + 2 + hidden
        assert {name.removesuffix(".lora_A.weight") + ".lora_dropout" for name in adapters} <= set(asked)


@pytest.mark.parametrize(
    "setting",
    [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"rope_parameters": "default"},
        {"hidden_act": "gelu"},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"head_dim": None},
    ],
    ids=["scaled-angles", "angles-in-words", "activation", "sliding-window", "no-head-size"],
)
def test_a_decoder_that_it_does_not_compute_is_refused(setting: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"only|head_dim"):
        Decoder.from_config({**decoder().config, **setting})


@pytest.mark.parametrize("setting", [{"hidden_act": "relu"}, {"is_decoder": True}, {"num_hidden_layers": None}])
def test_an_encoder_that_it_does_not_compute_is_refused(setting: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"encoder|layers"):
        Encoder.from_config({**encoder().config, **setting})


def test_two_tensors_of_one_name_and_a_label_that_is_no_class_are_refused() -> None:
    """One of the two would be lost in silence; -1 would silently read the last class."""
    with pytest.raises(ValueError, match=r"both m\.weight"):
        canonical({"m.weight": torch.ones(1), "m.base_layer.weight": torch.ones(1)})
    for label in (-1, 2):
        with pytest.raises(ValueError, match="within 0 to 1"):
            row_losses(torch.zeros(1, 2), torch.tensor([label]))


def test_loss_is_the_weighted_sum() -> None:
    logits = torch.tensor([[0.0, 0.0], [2000.0, 0.0]], dtype=torch.float64)
    total = row_losses(logits, torch.tensor([1, 1])).sum()
    assert float(total) == pytest.approx(torch.log(torch.tensor(2.0)).item() + 2000.0)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 3, 0])
    weights = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)
    expected = nn.functional.cross_entropy(logits, labels, weights, reduction="sum")
    assert float(row_losses(logits, labels, weights).sum()) == pytest.approx(float(expected), rel=1e-14)


WHOLE = SFT.but(rank=0, layers=2)


@pytest.fixture(scope="module")
def causal() -> Subject:
    model: Any = model_of(WHOLE)
    return Subject(model, model.config.to_dict())


def test_next_tokens_are_those_of_the_architecture(causal: Subject) -> None:
    law, tokens = Decoder.from_config(causal.config), torch.tensor(WHOLE.rows.tokens[1])
    params = canonical(dict(causal.model.named_parameters()))
    assert "lm_head.weight" not in params
    tied = law.next_token_logits(params, tokens)
    apart = law.next_token_logits({**params, "lm_head.weight": 2 * params["model.embed_tokens.weight"]}, tokens)
    assert relative(causal.model.double()(input_ids=tokens[None]).logits[0].detach(), tied) < ROUNDING
    causal.model.float()
    assert tied.dtype == torch.float64
    assert torch.equal(apart, 2 * tied)


def test_a_batch_of_tokens_is_one_sum_divided_once(causal: Subject) -> None:
    """Of a row with 1 trained token and one with 9: the mean over 10 tokens, which no mean of the rows' means is."""
    decoder, params = Decoder.from_config(causal.config), canonical(dict(causal.model.named_parameters()))

    def law(*rows: TokenRow) -> tuple[float, Tensor]:
        losses, gradients = token_gradients(decoder, params, ["model.norm.weight"], rows)
        return float(losses.mean()), gradients["model.norm.weight"].mean(0)

    rows = [((1, 2, 3), (0.0, 0.0, 1.0)), (tuple(range(4, 14)), (1.0,) * 10)]
    by_hand = 0.0
    for tokens, weights in rows:
        chances = decoder.next_token_logits(params, torch.tensor(tokens)).log_softmax(1)
        by_hand -= sum(
            weight * float(chances[place, token])
            for place, (token, weight) in enumerate(zip(tokens[1:], weights[1:], strict=True))
        )
    loss, together = law(*rows)
    assert loss == pytest.approx(by_hand / 10, rel=1e-12)
    assert relative((law(rows[0])[1] + law(rows[1])[1]) / 2, together) > 1e-2
    one, two = law(rows[0]), law(((1, 2, 3), (5.0, 0.0, 2.0)))
    assert two[0] == 2 * one[0]
    assert torch.equal(two[1], 2 * one[1])
    with pytest.raises(ValueError, match="without a trained token"):
        law(((1, 2), (1.0, 0.0)))


# 17 epochs are the 50 updates that docs/figures.md quotes; by default 3 of them show the law.
@pytest.mark.parametrize("epochs", [1, pytest.param(17, marks=pytest.mark.deep)])
@pytest.mark.parametrize("case", [SFT, PACKED, DPO, PACKED_DPO], ids=["rows", "packed", "pairs", "packed pairs"])
@pytest.mark.parametrize("rank", [2, 0], ids=["lora", "whole"])
def test_our_trainer_keeps_every_claim_of_instruction_and_preference_tuning(case: Case, rank: int, epochs: int) -> None:
    """On 2 and 3 ranks, with the bits of one: gradients within 2e-6 of the law, losses within 1e-6."""
    case = case.but(rank=rank, layers=2, epochs=epochs)
    bench = AndonBench(AndonTrainer(RankPools()))
    for world in (2, 3):
        found = bench.attempt(Trial(LAW, case.but(world=world)))
        assert {verdict.outcome for verdict in found.values()} == {Outcome.HOLDS}, found
        assert {"gradient-law", "losses-close", "norm-law", "update-law", "same-everywhere"} <= found.keys()


def test_the_rows_are_ragged_and_packs_have_several() -> None:
    weights = [PACKED.token_weights(row) for row in range(len(PACKED.rows))]
    assert len({sum(map(bool, row)) for row in weights}) > 5
    assert {*sum(weights, ())} == {0.0, 0.5, 1.0, 2.0}
    for case in (PACKED, PACKED_DPO):
        task = cast(SftTask, task_of(case))
        assert case.items == tuple(task.rows_of(pack) for pack in range(len(task)))
        assert len({len(pack) for pack in case.items}) > 1
