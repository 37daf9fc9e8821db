"""What every peer trains: 48 ragged rows, all of them one global batch, a tiny Qwen3; and what is noted of its run.

The global batch is the whole data set, so that neither the order of rows nor who draws them can part two layouts: only
how the tokens are weighed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.optim.optimizer import register_optimizer_step_post_hook

from andon_falsify.reference.causal import TokenRow

VOCABULARY, PAD, STOP = 33, 32, 31
LONGEST = 32
ROWS, PACKS = 48, 24
UPDATES = 3
RATE = 0.05
WORLDS, ACCUMULATIONS = (1, 2, 3), (1, 2, 4)
IGNORED = -100


@dataclass(frozen=True)
class Layout:
    """One way to train on the global batch. trained: 'answers' or 'all' tokens. packed: by the peer's own means."""

    world: int
    accumulation: int
    packed: bool = False
    trained: str = "answers"

    def local(self, things: int = ROWS) -> int:
        """How many of `things` (rows, or packs) are a rank's micro-batch."""
        return things // (self.world * self.accumulation)


@dataclass
class Seen:
    """What one rank of one run did. forwards: the rows of each micro-batch before the first update. gradient: what its
    optimizer had at the first update; weights: after the last; both by name. error: why there is no more.
    """

    forwards: list[list[int]] = field(default_factory=list)
    gradient: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    updates: int = 0
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        return asdict(self)


@cache
def rows(trained: str = "answers") -> tuple[TokenRow, ...]:
    """24 long rows, no two of which fit into a pack, and 24 short ones that fit beside them: 24 packs, best fit."""
    draw = random.Random(3)
    found = []
    for place in range(ROWS):
        length = draw.randint(18, 24) if place % 2 else draw.randint(3, 8)
        prompt = draw.randint(1, length - 2)
        tokens = (*(draw.randrange(1, STOP) for _ in range(length - 1)), STOP)
        weights = [0.0] * prompt + [1.0] * (length - prompt) if trained == "answers" else [1.0] * length
        found.append(TokenRow(tokens, tuple(weights)))
    return tuple(found)


def features(trained: str) -> list[dict[str, list[int]]]:
    """The rows as every library takes them: input_ids, and labels in which -100 is not trained."""
    return [
        {
            "input_ids": list(row.tokens),
            "labels": [token if weight else IGNORED for token, weight in zip(row.tokens, row.weights, strict=True)],
        }
        for row in rows(trained)
    ]


def model() -> Any:
    """The model before training, the same bits on every call and rank."""
    torch.manual_seed(7)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=2 * LONGEST * ROWS,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=STOP,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return transformers.Qwen3ForCausalLM(config).train()


def optimizer(of: Any) -> torch.optim.Optimizer:
    """SGD, which hides no scale."""
    return torch.optim.SGD(of.parameters(), lr=RATE)


def tokenizer() -> Any:
    """One whose tokens are the numbers of the vocabulary."""
    words = {str(number): number for number in range(VOCABULARY)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")),
        pad_token=str(PAD),
        eos_token=str(STOP),
        unk_token="0",
        padding_side="right",
    )


def collator() -> Any:
    """transformers' own for rows with labels: labels are padded with -100."""
    return transformers.DataCollatorForSeq2Seq(tokenizer())


def rows_of(ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> list[int]:
    """The rows in what a model was given; a line is one row, or where positions begin again several.

    Raises `ValueError` for tokens that are no row.
    """
    places = {row.tokens: place for place, row in enumerate(rows())}
    found = []
    for line in range(len(ids)):
        kept = torch.ones_like(ids[line], dtype=torch.bool) if mask is None else mask[line].bool()
        tokens = ids[line][kept].tolist()
        starts = [0] if positions is None else (positions[line][kept] == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            row = tuple(tokens[start:end])
            if row not in places:
                msg = f"the model was given {row}, which is no row"
                raise ValueError(msg)
            found.append(places[row])
    return found


@contextmanager
def watched(model: Any) -> Iterator[Seen]:
    """Note what is done with `model` inside. The gradient is read behind the first step of any torch optimizer, since
    a closure may compute it within the step.
    """
    seen = Seen()

    def forward(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not seen.updates:
            ids = named["input_ids"] if "input_ids" in named else arguments[0]
            mask = named.get("attention_mask")
            padding = mask if mask is not None and mask.dim() == 2 else None  # others say who sees whom
            seen.forwards.append(rows_of(ids, padding, named.get("position_ids")))

    def stepped(*_: Any) -> None:
        seen.updates += 1
        if seen.updates == 1:
            seen.gradient = {
                name: torch.zeros_like(value) if value.grad is None else value.grad.detach().clone()
                for name, value in model.named_parameters()
            }

    hooks = [model.register_forward_pre_hook(forward, with_kwargs=True), register_optimizer_step_post_hook(stepped)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
        seen.weights = {name: value.detach().clone() for name, value in model.named_parameters()}
