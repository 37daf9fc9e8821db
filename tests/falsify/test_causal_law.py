"""The law of token-weighted sums is what it says, and our trainer keeps it: ragged, packed or not, on any ranks."""

from __future__ import annotations

import pytest
import torch

from andon_falsify.reference.causal import TokenRow, mean_of, token_sum
from andon_falsify.reference.decoder import Decoder
from andon_falsify.subjects.causal import CausalCase, CausalLaw, CausalSubject, distances

BOUND = 2e-6
TRANSFORMERS = 1e-6
"""transformers computes norms and angles in float32 even in a float64 model."""


@pytest.fixture(scope="module")
def whole() -> CausalSubject:
    return CausalSubject(CausalCase(world=1, lora=False))


def _law(subject: CausalSubject) -> Decoder:
    return Decoder.from_config(subject.model.config.to_dict())


def test_next_tokens_are_those_of_the_architecture(whole: CausalSubject) -> None:
    exact = whole.model.double()
    tokens = torch.tensor(whole.rows[1].tokens)
    seen = exact(input_ids=tokens[None]).logits[0].detach()
    params = whole.weights()
    assert "lm_head.weight" not in params
    tied = _law(whole).next_token_logits(params, tokens)
    apart = _law(whole).next_token_logits({**params, "lm_head.weight": 2 * params["model.embed_tokens.weight"]}, tokens)
    whole.model.float()
    assert tied.dtype == torch.float64
    assert float((seen - tied).norm() / tied.norm()) < TRANSFORMERS
    assert torch.equal(apart, 2 * tied)


def test_the_law_is_one_sum_divided_once(whole: CausalSubject) -> None:
    """Of a row with 1 trained token and one with 9: the mean over 10 tokens, which no mean of the rows' means is."""
    decoder, params, names = _law(whole), whole.weights(), ["model.norm.weight"]
    rows = [TokenRow((1, 2, 3), (0.0, 0.0, 1.0)), TokenRow(tuple(range(4, 14)), (1.0,) * 10)]
    assert [row.trained for row in rows] == [1, 9]
    by_row = [token_sum(decoder, params, names, row) for row in rows]
    loss, gradients = mean_of(by_row)
    by_hand = 0.0
    for row in rows:
        chances = decoder.next_token_logits(params, torch.tensor(row.tokens)).log_softmax(1)
        by_hand -= sum(
            weight * float(chances[place, token])
            for place, (token, weight) in enumerate(zip(row.tokens[1:], row.weights[1:], strict=True))
        )
    assert loss == pytest.approx(by_hand / 10, rel=1e-12)
    of_means = sum(mean_of([part])[1][names[0]] for part in by_row) / 2
    assert float((of_means - gradients[names[0]]).norm() / gradients[names[0]].norm()) > 1e-2


def test_weights_count_in_the_sum_and_not_in_the_count(whole: CausalSubject) -> None:
    decoder, params, names = _law(whole), whole.weights(), ["model.norm.weight"]
    one = token_sum(decoder, params, names, TokenRow((1, 2, 3), (0.0, 0.0, 1.0)))
    two = token_sum(decoder, params, names, TokenRow((1, 2, 3), (5.0, 0.0, 2.0)))
    assert (two.loss, two.tokens) == (2 * one.loss, one.tokens)
    assert torch.equal(two.gradients[names[0]], 2 * one.gradients[names[0]])


def test_what_has_no_mean_is_refused(whole: CausalSubject) -> None:
    decoder, params, names = _law(whole), whole.weights(), ["model.norm.weight"]
    with pytest.raises(ValueError, match="without a trained token"):
        mean_of([token_sum(decoder, params, names, TokenRow((1, 2), (1.0, 0.0)))])
    with pytest.raises(ValueError, match="2 tokens and 1 weights"):
        token_sum(decoder, params, names, TokenRow((1, 2), (1.0,)))


# 50 updates are what docs/figures.md quotes; by default 2 of them show the law.
@pytest.mark.parametrize("updates", [2, pytest.param(50, marks=pytest.mark.deep)])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "rows"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "whole"])
def test_our_trainer_keeps_the_law(lora: bool, packed: bool, updates: int) -> None:
    """Updates on 1, 2 and 3 ranks: the reduced gradient of every tensor within 2e-6, the loss within 1e-6.

    All three have the weights of the first, to the bit, so that one law is all three's.
    """
    subjects = [CausalSubject(CausalCase(world, packed, lora)) for world in (1, 2, 3)]
    for subject in subjects:
        subject.start()
    law = CausalLaw(subjects[0])
    worst = 0.0
    for step in range(1, updates + 1):
        before = subjects[0].weights()
        batches = [subject.batch(step) for subject in subjects]
        loss, wanted = law(before, subjects[0], batches[0])
        for subject, batch in zip(subjects, batches, strict=True):
            assert all(torch.equal(value, before[name]) for name, value in subject.weights().items())
            found_loss, found = subject.update(batch)
            worst = max(worst, *distances(found, wanted).values())
            assert found_loss == pytest.approx(loss, rel=1e-6)
    assert worst <= BOUND


def test_the_rows_are_ragged() -> None:
    rows = CausalSubject(CausalCase()).rows
    assert len({row.trained for row in rows}) > 5
    assert len({len(row.tokens) for row in rows}) > 5
    assert {weight for row in rows for weight in row.weights} == {0.0, 0.5, 1.0, 2.0}
    assert len(CausalSubject(CausalCase()).task) < len(rows)
