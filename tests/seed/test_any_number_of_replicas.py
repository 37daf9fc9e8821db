"""The central property over the space of inputs: the number of replicas and the backend are not in the result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from andon.pipeline import SafetySample
from andon.step.optimizer import OptimizerSpec
from tests.seed.subject import ANDON, CONFIG, SMALL, state, states

SAMPLES = st.lists(
    st.builds(SafetySample, st.text(st.characters(max_codepoint=0x17F), min_size=1, max_size=12), st.integers(0, 1)),
    max_size=9,
)


@settings(max_examples=12)
@given(
    batches=st.lists(SAMPLES, min_size=1, max_size=3),
    replicas=st.integers(2, 5),
    micro_batches=st.integers(1, 6),
    backend=st.sampled_from(["inline", "threads"]),
    weights=st.sampled_from([None, (0.25, 1.75)]),
    seed=st.integers(0, 2**31),
)
def test_the_bits_do_not_depend_on_the_replicas(
    batches: list[list[SafetySample]],
    replicas: int,
    micro_batches: int,
    backend: str,
    weights: tuple[float, float] | None,
    seed: int,
) -> None:
    """N1, N2, N6, D1 to D7, D10: any batches (empty, few, ragged), any G, M, seed, class weights, dropout, backend.

    Results are equal, and weights, base, moments and counts of every replica are those of a single one.
    """
    config = replace(CONFIG, class_weights=weights)
    options: dict[str, Any] = {
        "seed": seed,
        "micro_batches": micro_batches,
        "optimizer": OptimizerSpec(),
        "model_config": replace(SMALL, dropout=0.2),
    }
    with (
        ANDON.replicas(1, config, **options) as one,
        ANDON.replicas(replicas, config, backend=backend, **options) as several,
    ):
        for samples in batches:
            assert one.train_batch_parallel(samples) == several.train_batch_parallel(samples)
        assert set(states(several)) == {state(one.primary_pipeline)}
        assert one.updates == sum(bool(samples) for samples in batches)
