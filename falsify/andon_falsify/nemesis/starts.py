"""Ranks that do not start from the same: another configuration, seed, order, base, tokenizer or library on one."""

from __future__ import annotations

from andon_falsify.nemesis.planting import PLANTS, Planted
from andon_falsify.nemesis.protocol import Nemesis, Option, Plant, Promise


def _other(name: str, how: str, function: str, said: str, number: int = 24, **options: Option) -> Planted:
    return Planted(
        name=name,
        numbers=(number,),
        how=how,
        promise=Promise((70,), ("start-agrees broken|layout-equal broken|content-planned broken", said), 15.0, True),
        plant=Plant.of(f"{PLANTS}:{function}", rank=1, **options),
        guard="contracts.enabled",
        finds="exit 0 instead of 70|exit 71 instead of 70",
        off_settings=("contracts.enabled=false",),
    )


def _config(name: str, key: str, value: Option, said: str = "configuration", number: int = 24) -> Planted:
    return _other(f"other {name}", f"{key}={value} on rank 1", "other_config", said, number, key=key, value=value)


NEMESES: tuple[Nemesis, ...] = (
    _config("learning rate", "optimizer.lr", 0.005),
    _config("seed", "seed", 43),
    _config("adapter rank", "adapter.r", 3, "tensors differ", 20),
    _other("other order of rows", "each batch reversed on rank 1", "other_order", "plan|rows"),
    _other("other base", "one frozen weight + 1 on rank 1", "other_base", "base", 25),
    _other("other tokenizer", "the last token of each text left out on rank 1", "other_tokens", "tokenizer|plan", 25),
    _other("other library", "another version of torch on rank 1", "other_library", "versions", 27),
)
