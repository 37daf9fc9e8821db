"""The mutants of the seed's file, of which its tests let 12 of 24 live, and more: each dies, by a named test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.seed import mutants as m
from tests.seed import test_t01_to_t25 as t
from tests.seed import test_v01_to_v10 as v1
from tests.seed import test_v11_to_v21 as v2
from tests.seed import test_v22_to_v31 as v3
from tests.seed.seed_behaviour import OverlappingShards, SeedCoordinator, SeedPipeline
from tests.seed.subject import ANDON, Subject
from tests.seed.test_seed_fails import CAUGHT, first_parameters

HEAD = "classifier.modules_to_save.default.weight"
Case = tuple[Subject, Callable[..., None]]


def coordinator(kind: type[Any], killer: Callable[..., None]) -> Case:
    """A mutant of the coordinator, and the test that it fails."""
    return replace(ANDON, coordinator=kind), killer


SURVIVED: dict[str, Case] = {
    "train_batch_parallel returns zeros": coordinator(m.ReturnsZeros, v1.test_v01_every_sample_moves_the_weights),
    "no sync after the step": coordinator(
        m.patched(m.no_replica_updated), v1.test_v05_moments_and_counts_are_the_same_on_every_replica
    ),
    "loss is the mean of shard means": coordinator(m.MeanOfMeans, v1.test_v08_uneven_shards_weigh_by_their_samples),
    "last shard not trained": coordinator(
        m.LastShardUntrained, v3.test_v27_what_replicas_train_on_partitions_the_batch
    ),
    "overlapping internal shards": coordinator(
        OverlappingShards, v3.test_v27_what_replicas_train_on_partitions_the_batch
    ),
    "sync skips the bias": coordinator(
        m.patched(m.tensor_kept("default.bias")), t.test_t19_all_layers_and_the_bias_are_equal_after_training
    ),
    "sync only the first replica": coordinator(
        m.patched(m.only_first_replica_updated), t.test_t19_all_layers_and_the_bias_are_equal_after_training
    ),
    "fallback at n <= G": coordinator(m.Fallback, v1.test_v03_fewer_samples_than_replicas_update_all_of_them),
    "fallback trains nothing": coordinator(
        m.FallbackTrainsNothing, v1.test_v03_fewer_samples_than_replicas_update_all_of_them
    ),
    "primary is the last replica": coordinator(m.PrimaryIsLast, t.test_t03_the_accessors_give_the_primary),
    "replicas with a tenfold rate": coordinator(
        m.patched(m.tenfold_rate), v1.test_v05_moments_and_counts_are_the_same_on_every_replica
    ),
    "grad_norm always 0": coordinator(m.NormIsZero, v1.test_v06_the_norm_is_that_of_the_whole_batch),
}
"""Those that all of the seed's 25 tests let pass."""

KILLED: dict[str, Case] = {
    "average without division": (replace(ANDON, average_gradients=m.no_division), t.test_t13_the_mean_is_the_mean),
    "NaN to zero": (replace(ANDON, average_gradients=m.nan_to_zero), t.test_t10_nan_propagates_through_the_mean),
    "Inf skipped": (replace(ANDON, average_gradients=m.inf_skipped), t.test_t11_inf_propagates_through_the_mean),
    "only worker 0": (replace(ANDON, average_gradients=m.first_worker_only), t.test_t13_the_mean_is_the_mean),
    "has_non_finite ignores Inf": (
        replace(ANDON, has_non_finite=m.sees_only_nan), t.test_t23_nan_and_inf_together_are_seen,
    ),
    "has_non_finite looks at one": (
        replace(ANDON, has_non_finite=m.sees_only_the_first), t.test_t12_what_is_not_finite_is_seen,
    ),
    "remainder dropped": (
        replace(ANDON, shard_samples=m.remainder_dropped), t.test_t09_the_last_shard_takes_the_remainder,
    ),
    "shards reversed": (replace(ANDON, shard_samples=m.shards_reversed), t.test_t08_no_sample_is_lost_or_duplicated),
    "sync skips B": coordinator(
        m.patched(m.tensor_kept("lora_B")), t.test_t19_all_layers_and_the_bias_are_equal_after_training
    ),
    "sync skips the head": coordinator(
        m.patched(m.tensor_kept(HEAD)), t.test_t19_all_layers_and_the_bias_are_equal_after_training
    ),
    "sync off by an ulp": coordinator(
        m.patched(m.off_by_an_ulp), t.test_t19_all_layers_and_the_bias_are_equal_after_training
    ),
    "no devices accepted": coordinator(m.NoDevicesAccepted, t.test_t02_no_devices_are_an_error),
}  # fmt: skip
"""Those that the seed's tests kill."""

ADDED: dict[str, Case] = {
    "unweighted mean on uneven shards": coordinator(
        m.UnweightedMean, v1.test_v08_uneven_shards_weigh_by_their_samples
    ),
    "clipped by shard": coordinator(m.ClippedByShard, v1.test_v07_clipping_comes_once_and_after_the_reduction),
    "NaN masked": coordinator(m.NanMasked, v1.test_v09_a_nan_in_any_shard_stops_everybody),
    "moments not synced": coordinator(
        m.patched(m.moments_of_their_own), v1.test_v05_moments_and_counts_are_the_same_on_every_replica
    ),
    "stale fallback": coordinator(SeedCoordinator, v1.test_v03_fewer_samples_than_replicas_update_all_of_them),
    "double step": coordinator(m.DoubleStep, v1.test_v01_every_sample_moves_the_weights),
    "sum instead of mean": coordinator(
        m.patched(m.gradient_scaled(m.sum_instead_of_mean)), v1.test_v01_every_sample_moves_the_weights
    ),
    "divided by the replicas too": coordinator(
        m.patched(m.gradient_scaled(m.mean_over_replicas_too)), v1.test_v01_every_sample_moves_the_weights
    ),
    "a rank ignores its shard": coordinator(m.ShardIgnored, v1.test_v01_every_sample_moves_the_weights),
    "LoRA detached": (replace(ANDON, pipeline=SeedPipeline), v3.test_v28_both_halves_of_the_adapter_learn),
    "loss computed after the step": coordinator(m.LossAfterTheStep, v1.test_v04_a_loss_is_of_one_set_of_weights),
    "fp32 overflow in averaging": (
        replace(ANDON, average_gradients=m.sum_in_fp32), v2.test_v11_finite_gradients_have_a_finite_mean,
    ),
    "no sync, no judge": coordinator(
        m.without_judges(m.no_replica_updated), v1.test_v05_moments_and_counts_are_the_same_on_every_replica
    ),
    "moments not synced, no judge": coordinator(
        m.without_judges(m.moments_of_their_own), v1.test_v05_moments_and_counts_are_the_same_on_every_replica
    ),
}  # fmt: skip
"""Those that a data-parallel trainer can have beside these; the last ones are caught without Andon's contracts."""

MUTANTS = SURVIVED | KILLED | ADDED
PARAMETERS: dict[str, dict[str, Any]] = {
    "has_non_finite looks at one": {"bad": float("nan"), "place": 2},
    "fallback at n <= G": {"count": 4},
    "shards reversed": {"workers": 3},
}
"""Where the first case of a test is not the one that kills."""


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_dies(name: str) -> None:
    """The named test, which passes on Andon, fails on the mutant."""
    mutant, killer = MUTANTS[name]
    with pytest.raises(CAUGHT):
        killer(mutant, **PARAMETERS.get(name, first_parameters(killer)))


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_chosen_cases_pass_on_andon(name: str) -> None:
    """A control: with the parameters above, which no test of its own may have, Andon passes."""
    MUTANTS[name][1](ANDON, **PARAMETERS[name])


def test_every_mutant_is_planted() -> None:
    """Of the seed's file 12 that survived and 12 that were killed."""
    assert (len(SURVIVED), len(KILLED)) == (12, 12)
