"""Our trainer on rows of tokens: its step and its task of conversations, beside the float64 law of the same updates.

The rows are ragged in length and in trained tokens, some tokens count half or twice, and the batches are of 6 to 11
packs or rows, so that a micro-batch has two, one, or none.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from andon.backend.base import InlineBackend
from andon.config.schema import Adapter, Config, Model
from andon.data.chat import EncodedRow
from andon.model.adapter import attach, trainable_parameters
from andon.model.build import ModelInterface, build_base, seeded
from andon.step.plan import GlobalBatch
from andon.step.step import TrainingStep
from andon.tasks.sft import SftTask
from andon.training.build import build_replicas
from andon_falsify.reference.decoder import Decoder
from andon_falsify.reference.params import Lora, canonical, canonical_name

from .causal_law import TokenRow, mean_of, token_sum

VOCABULARY, PAD, STOP = 33, 32, 31
LONGEST = 16
ALPHA = 4.0
MICRO_BATCHES = 8
SIZES = (9, 7, 11, 6)
"""Packs or rows of updates in turn. Of a single row the gradient of queries nearly cancels, and what fp32 leaves of it
is up to 2e-5 off the law in the best of programs."""
_CPU = torch.device("cpu")


def token_rows() -> tuple[TokenRow, ...]:
    """Prompts of 1 to 5 tokens, answers of 1 to 9 and a stop; in every fourth row a token counts 2 and one 0.5."""
    draw = random.Random(0)
    rows = []
    for number in range(48):
        prompt, answer = draw.randint(1, 5), draw.randint(1, 9)
        tokens = (*(draw.randrange(1, STOP) for _ in range(prompt + answer)), STOP)
        weights = [0.0] * prompt + [1.0] * (answer + 1)
        if number % 4 == 3:
            weights[-1], weights[-2] = 2.0, 0.5
        rows.append(TokenRow(tokens, tuple(weights)))
    return tuple(rows)


@dataclass(frozen=True)
class CausalCase:
    """world: ranks, all in this process. packed: whether rows are packed. lora: else every weight trains. family:
    'qwen3' (rotary positions), or 'gpt2' (learned ones), for which there is no law.
    """

    world: int = 2
    packed: bool = True
    lora: bool = True
    family: Literal["qwen3", "gpt2"] = "qwen3"


class CausalSubject:
    """The trainer of a case, ready for its first update; `model` is its first replica's."""

    def __init__(self, case: CausalCase) -> None:
        self.case = case
        self.rows = token_rows()
        encoded = [
            EncodedRow(place, array("i", row.tokens), array("f", row.weights)) for place, row in enumerate(self.rows)
        ]
        task = SftTask(encoded, pad_id=PAD, max_length=LONGEST)
        self.task = task.packed(range(len(encoded))) if case.packed else task
        config, backend = Config(seed=5), InlineBackend([_CPU] * case.world)
        self.replicas = build_replicas(_model(case), config, backend, self.task, 0)
        self.model: Any = self.replicas[0].model
        self._step = TrainingStep(backend, self.replicas, self.task, MICRO_BATCHES, None)
        self._first = 0

    def start(self) -> None:
        """What comes before a first update: all ranks are held to one start, and the model to keeping rows apart.

        Raises `InputError` for a model that does not; updates can be made all the same.
        """
        self._step.attest_start({})
        self.task.require_fit(self.model, _CPU)

    def batch(self, step: int) -> GlobalBatch:
        """The packs of an update (from 1), from where the last ended and round the data."""
        size = SIZES[(step - 1) % len(SIZES)]
        ids = tuple((self._first + place) % len(self.task) for place in range(size))
        self._first += size
        return GlobalBatch(step, 0, 0, ids)

    def weights(self) -> dict[str, Tensor]:
        """All parameters in float64 under canonical names; tied ones once."""
        return canonical(dict(self.model.named_parameters()))

    def update(self, batch: GlobalBatch) -> tuple[float, Mapping[str, Tensor]]:
        """Make one update; its loss, and the gradient that the optimizer of the last rank saw, canonically named."""
        result = self._step(batch, 2e-4, batch.step)
        found = self.replicas[-1].reduced_gradient()
        return result.loss, {_short(name): tensor.clone() for name, tensor in found.items()}

    def law(self, weights: Mapping[str, Tensor], batch: GlobalBatch) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradient of `batch` at `weights` by the law, from the rows as they were before any task had them."""
        decoder = Decoder.from_config(self.model.config.to_dict(), Lora(ALPHA) if self.case.lora else None)
        trained = [_short(name) for name in trainable_parameters(self.model)]
        rows = [self.rows[row] for pack in batch.ids for row in self.task.rows_of(pack)]
        return mean_of(token_sum(decoder, weights, trained, row) for row in rows)


def _short(name: str) -> str:
    short = canonical_name(name)
    assert short is not None, name
    return short


def _model(case: CausalCase) -> nn.Module:
    adapter = Adapter(r=2, alpha=ALPHA, dropout=0.0) if case.lora else Adapter(kind="none")
    model = attach(_base(case.family), adapter, seed=3)
    # An adapter's B begins at 0, and A then has no gradient to compare.
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.05)
    return model


def _base(family: str) -> Any:
    if family == "qwen3":
        settings = Model(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=24,
            dropout=0.0,
            max_length=LONGEST,
        )
        return build_base(settings, ModelInterface("causal", (), VOCABULARY, PAD), seed=7)
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": LONGEST, "vocab_size": VOCABULARY}
    dropped: dict[str, Any] = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    with seeded(7):
        return GPT2LMHeadModel(GPT2Config(**sizes, **dropped, bos_token_id=STOP, eos_token_id=STOP)).train()
