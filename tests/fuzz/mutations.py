"""Ways to damage bytes and JSON, by chance or as somebody with bad intentions would. Imports nothing but the standard library."""

from __future__ import annotations

import random
import struct

EXTREMES = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
HOSTILE = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, -1e308, 1e308, float("nan"), float("inf"), "", "\0", "../../etc/passwd",
    "a" * 10_000, "os:system", "__import__", [], [[]], [1] * 1000, {}, {"a": None}, [["bn1", "batchnorm", -1]],
)  # fmt: skip


def mutate(data: bytes, rng: random.Random) -> bytes:
    """The bytes after one to three accidents."""
    content = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        rng.choice((_flip, _overwrite, _truncate, _delete, _insert, _repeat, _number))(content, rng)
    return bytes(content)


def _place(content: bytearray, rng: random.Random) -> int:
    # Headers are where the harm is done.
    return rng.randrange(min(len(content), rng.choice((16, 64, 512, 10**9))) or 1)


def _flip(content, rng):
    for _ in range(rng.randint(1, 8)):
        if content:
            content[_place(content, rng)] ^= 1 << rng.randrange(8)


def _overwrite(content, rng):
    at = _place(content, rng)
    content[at : at + rng.randint(1, 32)] = rng.randbytes(rng.randint(1, 32))


def _truncate(content, rng):
    del content[_place(content, rng) :]


def _delete(content, rng):
    at = _place(content, rng)
    del content[at : at + rng.randint(1, 200)]


def _insert(content, rng):
    at = _place(content, rng)
    content[at:at] = rng.choice((rng.randbytes(rng.randint(1, 64)), bytes(rng.randint(1, 5000))))


def _repeat(content, rng):
    at = _place(content, rng)
    content[at:at] = content[at : at + rng.randint(1, 300)] * rng.randint(1, 20)


def _number(content, rng):
    """Write an extreme number where a length or a size may be."""
    kind = rng.choice(("<H", ">H", "<I", ">I", "<Q", ">Q"))
    at, size = _place(content, rng), struct.calcsize(kind)
    content[at : at + size] = struct.pack(kind, rng.choice(EXTREMES) & ((1 << (8 * size)) - 1))


def mutate_json(value: object, rng: random.Random) -> object:
    """The value with something in it replaced, dropped or doubled."""
    if rng.random() < 0.25 or not isinstance(value, (dict, list)) or not value:
        return rng.choice(HOSTILE)
    if isinstance(value, dict):
        key = rng.choice(sorted(value))
        changed = dict(value)
        if rng.random() < 0.15:
            del changed[key]
        else:
            changed[key] = mutate_json(value[key], rng)
        return changed
    at = rng.randrange(len(value))
    return [
        *value[:at],
        *([] if rng.random() < 0.15 else [mutate_json(value[at], rng)]),
        *value[at + rng.randint(0, 1) :],
    ]
