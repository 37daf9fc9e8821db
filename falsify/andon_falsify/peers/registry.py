"""The bundled training loops by name, with the libraries that they need and their known defects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from andon.console.messages import install_hint


@dataclass(frozen=True)
class Peer:
    """A bundled subject.

    make: `module:class`, as `--subject` takes it. measured: the libraries that it trains with, each with the version
    that it was measured with. expected: the claims that are falsified with these versions, each with its reason. extra:
    the extras that install the libraries.
    """

    name: str
    make: str
    measured: Mapping[str, str] = field(default_factory=dict)
    expected: Mapping[str, str] = field(default_factory=dict)
    extra: str = "falsify"

    @property
    def missing(self) -> str:
        """Why it cannot be tried here, or ""."""
        absent = ", ".join(name for name in self.measured if not installed(name))
        return f"{self.name} needs {absent}; {install_hint(self.extra)}" if absent else ""

    @property
    def version(self) -> str:
        """The installed libraries: `accelerate 1.15.0`, or torch if it needs nothing else."""
        return ", ".join(f"{name} {installed(name) or 'missing'}" for name in self.measured or ("torch",))

    @property
    def as_measured(self) -> bool:
        """Whether the libraries have the versions with which `expected` was measured."""
        return all(installed(name) == wanted for name, wanted in self.measured.items())


def installed(name: str) -> str:
    """The version of a distribution without its local part (`2.13.0` of `2.13.0+cpu`), or "" if it is absent."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return ""


_HERE = "andon_falsify.peers"

_TWICE = "rows are repeated to fill the last batch of an epoch"
_MEANS = (
    "the means of micro-batches are averaged, so that a row of a small micro-batch has more weight, and a short last "
    "window is divided as a full one"
)
_MASKS = "every rank has the same seed, and so the same dropout masks (huggingface/transformers#31412)"
_DEPENDS = "the repeated rows, and the weight of a row, depend on the number of ranks"
_AS_TAUGHT = {"samples-once": _TWICE, "gradient-law": _MEANS, "same-everywhere": _DEPENDS}
_ACCELERATE = {"accelerate": "1.15.0"}
_TRAINER = {"transformers": "5.23.0", **_ACCELERATE}

PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("plain", f"{_HERE}.plain:PlainLoop"),
        Peer("ddp", f"{_HERE}.ddp:DdpLoop", expected=_AS_TAUGHT),
        Peer("fsdp2", f"{_HERE}.ddp:Fsdp2Loop", expected=_AS_TAUGHT),
        Peer("accelerate", f"{_HERE}.accelerate:AccelerateLoop", _ACCELERATE, _AS_TAUGHT),
        Peer("accelerate_right", f"{_HERE}.accelerate:RightAccelerateLoop", _ACCELERATE),
        Peer("fabric", f"{_HERE}.fabric:FabricLoop", {"lightning": "2.6.6"}, _AS_TAUGHT, "falsify,lightning"),
        Peer(
            "hf_trainer",
            f"{_HERE}.hf_trainer:HfTrainerLoop",
            _TRAINER,
            {
                "samples-once": _TWICE,
                "gradient-law": "a classifier's gradient is multiplied by accumulation x world size",
                "losses-close": "the logged loss is multiplied by accumulation x world size",
                "evaluation-law": "eval_loss is multiplied by the world size",
                "same-everywhere": "the factor depends on the number of ranks",
                "randomness-apart": _MASKS,
            },
        ),
        Peer(
            "hf_trainer_mended",
            f"{_HERE}.hf_trainer:MendedHfTrainerLoop",
            _TRAINER,
            {
                "samples-once": _TWICE,
                "evaluation-law": "eval_loss counts the rows that fill the last batch twice",
                "same-everywhere": _DEPENDS,
                "randomness-apart": _MASKS,
            },
        ),
        Peer(
            "seed",
            f"{_HERE}.seed:SeedLoop",
            expected={
                "replicas-agree": "each worker steps its optimizer with the gradient of its own shard",
                "samples-once": "every epoch has the same order",
                "gradient-law": "only the first worker's gradient is used",
                "same-everywhere": "the first worker's shard depends on the number of workers",
            },
        ),
    )
}
"""By name, in the order in which reports show them."""
