"""A store on which only values count that a rank of this run has put there: each is signed with the run's secret.

Any client of torch's store may put, delete and list its values, so the secret is never stored there. Rank 0 draws it
and gathers it to the others through a process group. The signature is HMAC-SHA256 (RFC 2104) over the key and the
value, so a value that was signed for one key is not valid for another.
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

from andon_contracts.liveness.store_link import MOST_BYTES, KeyValueStore, Read, StrictReader

_WORDS = ("secret 0", "secret 1", "secret 2", "secret 3")
_SECRET = struct.Struct("<4Q")
_SIGNATURE_CHARACTERS = 64
STORE_TIMEOUT_S = 5.0  # the timeout for a store that others reach: anybody may delete a value between two requests
_NOTHING = "-"
"""Comparing a value with this, and setting it to this, reads it without waiting for it. Unsigned, so never ours."""
_TRIES = 100  # how often a forged value is replaced by comparison, before it is overwritten


def new_secret() -> bytes:
    return secrets.token_bytes(_SECRET.size)


def secret_to_ints(secret: bytes) -> dict[str, int]:
    """A secret as unsigned integers of 64 bits by name, for a gather."""
    return dict(zip(_WORDS, _SECRET.unpack(secret), strict=True))


def secret_from_ints(values: Mapping[str, int]) -> bytes:
    """The secret among these gathered values, whose integers may be signed."""
    return _SECRET.pack(*(values[word] % (1 << 64) for word in _WORDS))


def _signature(secret: bytes, key: str, value: bytes) -> str:
    return hmac.new(secret, key.encode() + b"\0" + value, hashlib.sha256).hexdigest()


class SignedStore:
    """A `KeyValueStore` that shows only values with a signature of this run; `checked` counts the others.

    No call waits for a value: one that was deleted, at any time, is missing (`get` gives b""). store: used by no other
    thread, with a timeout of `STORE_TIMEOUT_S` if others reach it.
    """

    def __init__(self, store: KeyValueStore, secret: bytes) -> None:
        self.reader = StrictReader()
        self._store, self._secret = store, secret

    def set(self, key: str, value: str, /) -> None:
        self._store.set(key, self._signed(key, value))

    def get(self, key: str, /) -> bytes:
        return self._verified(key, self._raw(key))

    def check(self, keys: list[str], /) -> bool:
        return all(self.get(key) for key in keys)

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        found: Sequence[bytes] = []  # by two requests, if all are there
        with suppress(DistStoreError):  # somebody deleted one in between
            found = self._store.multi_get(keys) if self._store.check(keys) else []
        found = found or [self._raw(key) for key in keys]
        return [self._verified(key, raw) for key, raw in zip(keys, found, strict=True)]

    def compare_set(self, key: str, expected: Any, value: str, /) -> bytes:
        """Set the value if `expected` is there ("": no value of a rank). Returns the value afterwards."""
        wanted = expected.decode() if isinstance(expected, bytes) else expected
        there: Any = self._signed(key, wanted) if wanted else ""
        for _ in range(_TRIES):
            raw = self._store.compare_set(key, there, self._signed(key, value))
            found = self._verified(key, raw)
            if found or wanted:
                return found
            there = raw  # replace the forged value
        self.set(key, value)
        return value.encode()

    def read(self, key: str, form: Callable[[object], Read]) -> Read | None:
        """What `form` makes of the JSON that a rank put there; None if there is none."""
        found = self.get(key)
        return self.reader.read(key, found, form) if found else None

    def _signed(self, key: str, value: str) -> str:
        return _signature(self._secret, key, value.encode()) + value

    def _raw(self, key: str) -> bytes:
        return self._store.compare_set(key, _NOTHING, _NOTHING)

    def _verified(self, key: str, raw: bytes) -> bytes:
        if raw in (b"", _NOTHING.encode()):
            return b""
        signature, value = raw[:_SIGNATURE_CHARACTERS], raw[_SIGNATURE_CHARACTERS:]
        if len(value) <= MOST_BYTES and hmac.compare_digest(signature, _signature(self._secret, key, value).encode()):
            return value
        self.reader.drop(key, raw)
        return b""
