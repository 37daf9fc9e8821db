"""The reference's decoder and encoder compute what transformers and peft compute, and not the same way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from andon_falsify.reference.decoder import Decoder
from andon_falsify.reference.encoder import Encoder
from andon_falsify.reference.params import Layers, Lora, canonical, canonical_name
from andon_falsify.reference.training import Model, Piece, gradient, row_losses
from tests.falsify.models import ALPHA, Subject, decoder, encoder, pieces

SHAPES = ((3, 7), (1, 4), (2, 12))
ROUNDING = 1e-6
"""transformers computes norms, angles and attention in float32 even in a float64 model."""


def relative(seen: Tensor, expected: Tensor) -> float:
    return float((seen.double() - expected).norm() / expected.norm())


def accused_gradients(subject: Subject, batch: list[Piece]) -> dict[str, Tensor]:
    subject.model.zero_grad()
    rows = sum(len(piece.labels) for piece in batch)
    for piece in batch:
        logits = subject.model(input_ids=piece.tokens, attention_mask=piece.attention).logits
        torch.autograd.backward(nn.functional.cross_entropy(logits, piece.labels, reduction="sum") / rows)
    return subject.gradients()


SUBJECTS = [
    pytest.param(decoder, Decoder, False, id="decoder"),
    pytest.param(decoder, Decoder, True, id="decoder-left-padded"),
    pytest.param(encoder, Encoder, False, id="encoder"),
]


@pytest.mark.parametrize(("build", "law", "left"), SUBJECTS)
def test_logits_are_those_of_the_architecture(
    build: Callable[[], Subject], law: type[Decoder | Encoder], left: bool
) -> None:
    """With LoRA and padding, the class scores of every row agree to the rounding of transformers."""
    subject = build()
    subject.model.eval()
    reference = law.from_config(subject.config, Lora(ALPHA))
    for piece in pieces(5, SHAPES, left=left):
        seen = subject.model(input_ids=piece.tokens, attention_mask=piece.attention).logits
        expected = reference.logits(subject.params, piece.tokens, piece.attention)
        assert expected.dtype == torch.float64
        assert relative(seen.detach(), expected) < ROUNDING


@pytest.mark.parametrize(("build", "law", "left"), SUBJECTS)
def test_gradients_are_those_of_the_architecture(
    build: Callable[[], Subject], law: type[Decoder | Encoder], left: bool
) -> None:
    """Every trainable tensor has the accused's gradient over a ragged batch, and none is left out."""
    subject = build()
    subject.model.eval()
    batch = pieces(6, SHAPES, left=left)
    seen = accused_gradients(subject, batch)
    model: Model = law.from_config(subject.config, Lora(ALPHA))
    _, expected = gradient(model, subject.params, subject.trainable, batch)
    assert seen.keys() == expected.keys()
    assert any("lora_A" in name for name in expected)
    assert {name: relative(seen[name], expected[name]) < ROUNDING for name in expected} == dict.fromkeys(expected, True)


def test_gradient_is_the_derivative_of_the_loss() -> None:
    """A central difference along a random direction gives the directional derivative: checked without the accused."""
    subject = decoder()
    model = Decoder.from_config(subject.config, Lora(ALPHA))
    batch = pieces(7, SHAPES)
    params, names = subject.params, subject.trainable
    _, gradients = gradient(model, params, names, batch)
    generator = torch.Generator().manual_seed(1)
    direction = {name: torch.randn(params[name].shape, generator=generator, dtype=torch.float64) for name in names}
    step = 1e-6

    def loss(sign: int) -> float:
        moved = {name: params[name] + sign * step * direction[name] for name in names}
        return gradient(model, params | moved, names, batch)[0]

    slope = sum(float((gradients[name] * direction[name]).sum()) for name in names)
    assert (loss(1) - loss(-1)) / (2 * step) == pytest.approx(slope, rel=1e-7)


def test_grouped_queries_read_their_own_group() -> None:
    """4 query heads on 1 and on 2 key heads agree with transformers: the order of repetition matters."""
    for kv_heads in (1, 2, 4):
        subject = decoder(kv_heads=kv_heads)
        subject.model.eval()
        (piece,) = pieces(8, ((4, 9),))
        seen = subject.model(input_ids=piece.tokens, attention_mask=piece.attention).logits.detach()
        expected = Decoder.from_config(subject.config, Lora(ALPHA)).logits(
            subject.params, piece.tokens, piece.attention
        )
        assert relative(seen, expected) < ROUNDING


def test_padding_changes_nothing() -> None:
    """More padding on the right gives the same scores to float64's last digits: a causal reader cannot see it."""
    subject = decoder()
    model = Decoder.from_config(subject.config, Lora(ALPHA))
    (piece,) = pieces(9, ((3, 8),))
    tokens, attention = (nn.functional.pad(values, (0, 5)) for values in (piece.tokens, piece.attention))
    narrow = model.logits(subject.params, piece.tokens, piece.attention)
    assert relative(model.logits(subject.params, tokens, attention), narrow) < 1e-14


def test_masks_act_where_peft_and_attention_drop() -> None:
    """A LoRA's mask acts on its input only, a mask on attention probabilities after the softmax."""
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
    seen = Layers(params, Lora(4.0), masks).linear(inputs, "m")
    expected = inputs @ weight.T + 2.0 * ((inputs * mask) @ (up @ down).T)
    assert torch.allclose(seen, expected, rtol=1e-14, atol=1e-14)
    assert asked == [("m.lora_dropout", (2, 3, 4))]


def test_attention_dropout_is_applied_to_probabilities() -> None:
    """Dropping every key but one with factor 1 leaves that key's value times its probability."""
    query, key, value = (torch.randn(1, 1, 3, 4, dtype=torch.float64) for _ in range(3))
    allowed = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    only_last = torch.tensor([0.0, 0.0, 1.0]).expand(1, 1, 3, 3)

    def masks(name: str, shape: tuple[int, ...]) -> Tensor | None:
        return only_last if name == "a.attention_dropout" and shape == (1, 1, 3, 3) else None

    seen = Layers({}, masks=masks).attend(query, key, value, allowed, "a")
    probability = (query @ key.transpose(-1, -2) / 2.0).softmax(-1)[..., 2:]
    assert torch.allclose(seen, probability * value[..., 2:, :], rtol=1e-14, atol=1e-15)


def test_every_place_of_dropout_is_asked_for() -> None:
    """The decoder asks for each adapter and each attention once a pass, the encoder for its hidden dropouts too."""
    for subject, law, hidden in ((decoder(), Decoder, 0), (encoder(), Encoder, 2 + 2 * 2)):
        asked: list[str] = []

        def masks(name: str, shape: tuple[int, ...], asked: list[str] = asked) -> None:
            del shape
            asked.append(name)

        (piece,) = pieces(2, ((2, 5),))
        law.from_config(subject.config, Lora(ALPHA)).logits(subject.params, piece.tokens, piece.attention, masks)
        adapters = [name for name in subject.params if name.endswith("lora_A.weight")]
        assert len(asked) == len(set(asked)) == len(adapters) + 2 + hidden
        assert {name.removesuffix(".lora_A.weight") + ".lora_dropout" for name in adapters} <= set(asked)


def test_a_mask_of_another_shape_is_refused() -> None:
    """A mask that would be broadcast belongs to another place."""

    def masks(name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.ones(shape[:-1])

    with pytest.raises(ValueError, match="mask of place"):
        Layers({}, masks=masks).dropped(torch.ones(2, 3), "place")


def test_an_adapter_without_a_scale_is_refused() -> None:
    """Nobody guesses alpha."""
    params = {name: torch.ones(2, 2) for name in ("m.weight", "m.lora_A.weight", "m.lora_B.weight")}
    with pytest.raises(ValueError, match="no alpha"):
        Layers(params).linear(torch.ones(1, 2), "m")


@pytest.mark.parametrize(
    "setting",
    [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"rope_parameters": "default"},
        {"hidden_act": "gelu"},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ],
    ids=["scaled-angles", "angles-in-words", "activation", "sliding-window"],
)
def test_a_decoder_that_it_does_not_compute_is_refused(setting: dict[str, object]) -> None:
    """A reference of something else would be a wrong judge."""
    with pytest.raises(ValueError, match=r"rope|only"):
        Decoder.from_config({**decoder().config, **setting})


def test_a_missing_number_is_named() -> None:
    """The head's width is not guessed from the hidden size: transformers' default is another."""
    with pytest.raises(KeyError, match="head_dim"):
        Decoder.from_config({**decoder().config, "head_dim": None})


@pytest.mark.parametrize("setting", [{"hidden_act": "relu"}, {"is_decoder": True}, {"num_hidden_layers": None}])
def test_an_encoder_that_it_does_not_compute_is_refused(setting: dict[str, object]) -> None:
    """As for the decoder."""
    with pytest.raises(ValueError, match=r"encoder|layers"):
        Encoder.from_config({**encoder().config, **setting})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
            "model.layers.0.self_attn.q_proj.weight",
        ),
        ("base_model.model.m.q_proj.lora_A.default.weight", "m.q_proj.lora_A.weight"),
        ("module.base_model.model.m.q_proj.lora_B.default.weight", "m.q_proj.lora_B.weight"),
        ("base_model.model.score.modules_to_save.default.weight", "score.weight"),
        ("base_model.model.score.original_module.weight", None),
        ("model.default.weight", "model.default.weight"),
    ],
)
def test_canonical_names(name: str, expected: str | None) -> None:
    """PEFT's and DDP's wrapping is taken off, the frozen copy of the head is dropped, the rest stays."""
    assert canonical_name(name) == expected


def test_two_tensors_of_one_name_are_refused() -> None:
    """Otherwise one of them would be lost in silence."""
    with pytest.raises(ValueError, match=r"both m\.weight"):
        canonical({"m.weight": torch.ones(1), "m.base_layer.weight": torch.ones(1)})


def test_loss_is_the_weighted_sum() -> None:
    """Against -log softmax by hand, and with weights against torch's own sum; huge logits do not overflow."""
    logits = torch.tensor([[0.0, 0.0], [2000.0, 0.0]], dtype=torch.float64)
    total = row_losses(logits, torch.tensor([1, 1])).sum()
    assert float(total) == pytest.approx(torch.log(torch.tensor(2.0)).item() + 2000.0)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 3, 0])
    weights = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)
    expected = nn.functional.cross_entropy(logits, labels, weights, reduction="sum")
    assert float(row_losses(logits, labels, weights).sum()) == pytest.approx(float(expected), rel=1e-14)


def test_a_label_that_is_no_class_is_refused() -> None:
    """-1 would silently read the last class."""
    for label in (-1, 2):
        with pytest.raises(ValueError, match="within 0 to 1"):
            row_losses(torch.zeros(1, 2), torch.tensor([label]))
