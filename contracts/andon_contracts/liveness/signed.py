"""A board of which only values count that a rank of this run has put there: each is signed with the run's secret.

Any client of torch's store may put, take away and list what is in it, so the secret never stands there: rank 0 draws
it, and it goes to the others through the connections of a process group. HMAC-SHA256 (RFC 2104) over a key and its
value; what is signed for one key is no value of another.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed import DistStoreError

from andon_contracts.liveness.store_link import MOST_BYTES, Board, Checked, Read

_WORDS = ("secret 0", "secret 1", "secret 2", "secret 3")
_SECRET = struct.Struct("<4Q")
_SIGNATURE_CHARACTERS = 64
TAKEN_AWAY_S = 5.0
"""The timeout of a board that others reach: a value may be taken away between two questions."""
_NOTHING = "-"
"""Asked for in a comparison with itself, which changes nothing and waits for nothing. No value of ours: unsigned."""
_TRIES = 100
"""How often a value is put in the place of one that is none, before it is put there whatever comes."""


def drawn() -> bytes:
    """A new secret."""
    return secrets.token_bytes(_SECRET.size)


def words_of(secret: bytes) -> dict[str, int]:
    """A secret as integers of 64 bits by name, as ranks gather them."""
    return dict(zip(_WORDS, _SECRET.unpack(secret), strict=True))


def secret_in(values: Mapping[str, int]) -> bytes:
    """The secret that was gathered with these values, which may be signed."""
    return _SECRET.pack(*(values[word] % (1 << 64) for word in _WORDS))


def signed(secret: bytes, key: str, value: str) -> str:
    """The value as it stands on the board under this key."""
    return _signature(secret, key, value.encode()) + value


def _signature(secret: bytes, key: str, value: bytes) -> str:
    return hmac.new(secret, key.encode() + b"\0" + value, hashlib.sha256).hexdigest()


class Signed:
    """A `Board` on which what carries no signature of this run is not there. `checked` counts it.

    No call waits for a value: one that is taken away at any time is not there.
    """

    def __init__(self, board: Board, secret: bytes) -> None:
        """board: one that no other thread uses, with a timeout of `TAKEN_AWAY_S` where others reach it."""
        self.checked = Checked()
        self._board, self._secret = board, secret

    def set(self, key: str, value: str, /) -> None:
        """Put a value in the place of what is there."""
        self._board.set(key, signed(self._secret, key, value))

    def get(self, key: str, /) -> bytes:
        """The value that a rank put there; empty: there is none."""
        return self._verified(key, self._raw(key))

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these are there, put by ranks."""
        return all(self.get(key) for key in keys)

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """The values that ranks put there, by two questions where all are there; empty: there is none."""
        found: Sequence[bytes] = []
        with suppress(DistStoreError):  # somebody has taken one away in between
            found = self._board.multi_get(keys) if self._board.check(keys) else []
        found = found or [self._raw(key) for key in keys]
        return [self._verified(key, raw) for key, raw in zip(keys, found, strict=True)]

    def compare_set(self, key: str, expected: Any, value: str, /) -> bytes:
        """Put a value where there is what is expected ("": nothing that a rank put); what is there afterwards."""
        wanted = expected.decode() if isinstance(expected, bytes) else expected
        desired = signed(self._secret, key, value)
        there: Any = signed(self._secret, key, wanted) if wanted else ""
        for _ in range(_TRIES):
            raw = self._board.compare_set(key, there, desired)
            found = self._verified(key, raw)
            if found or wanted:
                return found
            there = raw  # in the place of what is none
        self.set(key, value)
        return value.encode()

    def read(self, key: str, form: Callable[[object], Read]) -> Read | None:
        """What `form` makes of the JSON that a rank put there; None where there is none."""
        found = self.get(key)
        return self.checked.read(key, found, form) if found else None

    def _raw(self, key: str) -> bytes:
        return self._board.compare_set(key, _NOTHING, _NOTHING)

    def _verified(self, key: str, raw: bytes) -> bytes:
        """What was signed; nothing where it was not."""
        if raw in (b"", _NOTHING.encode()):
            return b""
        signature, value = raw[:_SIGNATURE_CHARACTERS], raw[_SIGNATURE_CHARACTERS:]
        if len(value) <= MOST_BYTES:
            expected = _signature(self._secret, key, value).encode()
            if hmac.compare_digest(signature, expected):
                return value
        self.checked.drop(key, raw)
        return b""
