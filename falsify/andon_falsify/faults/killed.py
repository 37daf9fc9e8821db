"""The twelve mutants that the seed's own tests killed (seed 5.1), most of them in its free functions."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from andon.coordinator import resolve_devices
from andon.gradients import average_gradients, has_non_finite
from andon.step.shard import shard_samples
from andon_falsify.faults.planting import SGD, Fault, around, body_replaced, followers, unsynced
from andon_falsify.subjects.assembly import Parts

# Bodies: they run in the place, and with the globals, of the function that they replace.


def _sum(grads: Any) -> Any:
    return [sum(values) for values in zip(*grads, strict=True)]


def _nan_to_zero(grads: Any) -> Any:
    return [sum(0.0 if v != v else v for v in values) / len(grads) for values in zip(*grads, strict=True)]


def _inf_skipped(grads: Any) -> Any:
    finite = [[v for v in values if abs(v) != float("inf")] for values in zip(*grads, strict=True)]
    return [sum(values) / max(1, len(values)) for values in finite]


def _first_worker_only(grads: Any) -> Any:
    return [values[0] / len(grads) for values in zip(*grads, strict=True)]


def _sees_no_inf(values: Any) -> bool:
    return any(float(value) != float(value) for value in values)


def _sees_only_the_first(values: Any) -> bool:
    return any(not abs(float(value)) < float("inf") for value in values[:1])


def _remainder_dropped(samples: Any, num_workers: int) -> Any:
    size = len(samples) // num_workers
    return [list(samples[at * size : (at + 1) * size]) for at in range(num_workers)]


def _reversed(samples: Any, num_workers: int) -> Any:
    size = len(samples) // num_workers
    shards = [list(samples[at * size : (at + 1) * size]) for at in range(num_workers - 1)]
    return [*shards, list(samples[(num_workers - 1) * size :])][::-1]


def _accepts_no_devices(devices: Any, *, cpu_fallback: bool = False) -> Any:
    return tuple(torch.device("cpu") for _ in devices or ["cpu"])


def _in_average(body: Any) -> Any:
    return lambda _, stack: body_replaced(stack, average_gradients, body)


def _in_search(body: Any) -> Any:
    return lambda _, stack: body_replaced(stack, has_non_finite, body)


def _in_sharding(body: Any) -> Any:
    return lambda _, stack: body_replaced(stack, shard_samples, body)


def _devices(_: object, stack: ExitStack) -> None:
    body_replaced(stack, resolve_devices, _accepts_no_devices)


def _up_unsynced(parts: Parts, _: ExitStack) -> None:
    for replica in followers(parts).values():
        unsynced(replica, lambda name: "lora_B" in name)


def _head_unsynced(parts: Parts, _: ExitStack) -> None:
    for replica in followers(parts).values():
        unsynced(replica, lambda name: "modules_to_save" in name)


def _an_ulp_off(parts: Parts, _: ExitStack) -> None:
    for replica in followers(parts).values():

        def set_gradient(inner: Any, pieces: Any, divisor: int, own: Any = replica) -> None:
            inner(pieces, divisor)
            own.master.gradient.view(torch.int32)[own.master.gradient.abs().argmax()] ^= 1

        around(replica, "set_gradient", set_gradient)


_SOURCE = "seed 5.1, killed"
FAULTS = (
    Fault("average without division", _SOURCE, "average-law", _in_average(_sum), kind="functions"),
    Fault("NaN averaged as 0", _SOURCE, "average-law", _in_average(_nan_to_zero), kind="functions"),
    Fault("Inf skipped in the average", _SOURCE, "average-law", _in_average(_inf_skipped), kind="functions"),
    Fault("only worker 0 averaged", _SOURCE, "average-law", _in_average(_first_worker_only), kind="functions"),
    Fault("has_non_finite ignores Inf", _SOURCE, "non-finite-seen", _in_search(_sees_no_inf), kind="functions"),
    Fault("only the first element", _SOURCE, "non-finite-seen", _in_search(_sees_only_the_first), kind="functions"),
    Fault("remainder dropped", _SOURCE, "shards-law", _in_sharding(_remainder_dropped), kind="functions"),
    Fault("shard order reversed", _SOURCE, "shards-law", _in_sharding(_reversed), kind="functions"),
    Fault("LoRA B not synced", _SOURCE, "replicas-agree", _up_unsynced, SGD),
    Fault("head weight not synced", _SOURCE, "replicas-agree", _head_unsynced, SGD),
    Fault("sync off by an ulp", _SOURCE, "replicas-agree", _an_ulp_off, SGD),
    Fault("empty list of devices accepted", _SOURCE, "coordinator-face", _devices, kind="functions"),
)
