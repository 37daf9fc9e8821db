"""The training loops that come with the suite, by name: what each needs, and what is known to be wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Peer:
    """A bundled subject.

    make: `module:function`, as `--subject` takes it. measured: the distributions that it trains with, each with the
    version that it was written for and measured with. expected: the claims that fall, each with its reason; with any
    other version nothing is expected. install: what brings the distributions.
    """

    name: str
    make: str
    measured: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    expected: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    install: str = "andon[falsify]"

    @property
    def missing(self) -> str:
        """Why it cannot be tried here, or "" if it can."""
        absent = [name for name in self.measured if not installed(name)]
        if not absent:
            return ""
        return f"{self.name} needs {', '.join(absent)}; run: pip install '{self.install}'"

    @property
    def version(self) -> str:
        """`accelerate 1.15.0`: what it trains with, as installed; torch where it needs nothing else."""
        return ", ".join(f"{name} {installed(name) or 'missing'}" for name in self.measured or ("torch",))

    @property
    def as_measured(self) -> bool:
        """Whether the installed versions are those that it was measured with."""
        return all(installed(name) == wanted for name, wanted in self.measured.items())

    @property
    def expectations(self) -> dict[tuple[str, str], str]:
        """Reasons by (subject, claim), as a report takes them; none with other versions than those measured."""
        return {(self.name, claim): reason for claim, reason in self.expected.items()} if self.as_measured else {}


def installed(name: str) -> str:
    """The version of a distribution without its local part (`2.13.0` of `2.13.0+cpu`), or "" if it is absent."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return ""


_HERE = "andon_falsify.peers"

PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("plain", f"{_HERE}.plain:make"),
        Peer(
            "ddp",
            f"{_HERE}.ddp:make",
            expected={
                "gradient-law": "the mean of the ranks' means: a row of the rank with fewer rows counts for more",
            },
        ),
    )
}
"""By name, in the order in which reports show them."""
