"""Small damages to bytes, as disks, transfers, editors and adversaries cause them. A seed determines each."""

from __future__ import annotations

import random
from collections.abc import Callable

Mutation = Callable[[random.Random, bytes], bytes]

_HOSTILE = (
    *(b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r\n", b"\r", b"\xe2\x80\xa8"),  # encodings, line ends
    *(b'"', b"{", b"}" * 3, b"[" * 4000, b'{"a":' * 3000),  # unbalanced or deep brackets
    *(b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"9" * 5000, b"-0", b"true", b"null"),  # JSON values
    *(b"'", b"&a [*a, *a]", b"!!python/object/apply:os.system [id]", b"<<: *x", b"? ", b": ", b"\t"),  # YAML
    *(b"../../../../etc/passwd", b"\\u0000", b"\\ud800", b"%s%n"),  # for readers of paths, escapes, formats
)


def flip_bit(draw: random.Random, data: bytes) -> bytes:
    if not data:
        return b"\x01"
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


def cut(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.randrange(len(data))] if data else data


def zero_page(draw: random.Random, data: bytes) -> bytes:
    """A stretch of zeros, like a page that was never written."""
    at, size = draw.randrange(len(data) + 1), draw.choice((1, 16, 512, 4096))
    return data[:at] + b"\x00" * min(size, len(data) - at) + data[at + size :]


def insert_hostile(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.choice(_HOSTILE) + data[at:]


def drop_stretch(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + data[at + draw.randint(1, 40) :]


def repeat_stretch(draw: random.Random, data: bytes) -> bytes:
    at, to = draw.randrange(len(data) + 1), draw.randrange(len(data) + 1)
    return data[:to] + data[at : at + draw.randint(1, 200)] + data[to:]


def exchange_lines(draw: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    if len(lines) < 2:
        return data
    one, other = draw.sample(range(len(lines)), 2)
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def change_number(draw: random.Random, data: bytes) -> bytes:
    """Change a digit. The result is often well-formed, which makes the damage hard to notice."""
    digits = [at for at, byte in enumerate(data) if 48 <= byte <= 57]
    if not digits:
        return insert_hostile(draw, data)
    at = draw.choice(digits)
    return data[:at] + bytes([48 + (data[at] - 48 + draw.randint(1, 9)) % 10]) + data[at + 1 :]


def noise(draw: random.Random, data: bytes) -> bytes:
    del data
    return draw.randbytes(draw.choice((0, 1, 7, 8, 9, 100, 5000)))


MUTATIONS: tuple[Mutation, ...] = (
    *(flip_bit, cut, zero_page, insert_hostile, drop_stretch, repeat_stretch),
    *(exchange_lines, change_number, noise),
)


def damaged(draw: random.Random, data: bytes) -> bytes:
    """`data` after one to three mutations."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        data = draw.choice(MUTATIONS)(draw, data)
    return data
