"""The peers by name: where their loop is, which libraries they are, and what they can pack."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.causal_peers.job import ACCUMULATIONS, Layout


@dataclass(frozen=True)
class Peer:
    """A loop `module:function`, the packages whose versions it stands for, and whether it packs by means of its own."""

    name: str
    loop: str
    packages: tuple[str, ...]
    packs: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """The packages that are not here."""
        return tuple(package for package in self.packages if _version(package) is None)

    @property
    def versions(self) -> str:
        """`trl 1.16.0, transformers 5.23.0`."""
        return ", ".join(f"{package} {_version(package)}" for package in self.packages)

    def load(self) -> Callable[[Any, Layout], None]:
        """The loop. Raises `ImportError` where its library is missing."""
        module, function = self.loop.split(":")
        loop: Callable[[Any, Layout], None] = getattr(
            importlib.import_module(f"benchmarks.causal_peers.{module}"), function
        )
        return loop

    def layouts(self, world: int) -> list[Layout]:
        """All that are tried on so many ranks."""
        return [
            Layout(world, accumulation, packed, trained)
            for packed in ((False, True) if self.packs else (False,))
            for trained in ("answers", "all")
            for accumulation in ACCUMULATIONS
        ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


PEERS = {
    peer.name: peer
    for peer in (
        Peer("hf_trainer", "hf_trainer:train", ("transformers", "accelerate"), packs=True),
        Peer("trl_sft", "trl_sft:train", ("trl", "transformers", "accelerate", "datasets"), packs=True),
        Peer("accelerate", "accelerate_loops:accumulate", ("accelerate", "transformers")),
        Peer("accelerate_by_count", "accelerate_loops:by_count", ("accelerate", "transformers")),
        Peer("lightning", "lightning_module:train", ("lightning", "transformers")),
    )
}
PLANTED = {
    peer.name: peer
    for peer in (
        Peer("right", "planted:right", ("torch",)),
        Peer("mean_of_means", "planted:mean_of_means", ("torch",)),
        Peer("twice", "planted:twice", ("torch",)),
        Peer("leaking", "planted:leaking", ("torch",)),
    )
}
