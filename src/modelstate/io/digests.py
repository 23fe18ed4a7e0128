"""Digests that our files keep of their tensors and of themselves. They find damage, not tampering.

A file is sealed by a digest of its own header, which stands in that header: it is that of the same bytes with zeros in
the seal's place.
"""

from typing import Any

import xxhash

from modelstate.errors import ChecksumError
from modelstate.spec import Checksum
from modelstate.text_format import quote

BLOCK_BYTES = 4 << 20
"""A tensor has a digest for every so many bytes."""
ALGORITHM = "xxh3-128"
HEX = 32
"""Characters of a digest."""
SEAL = "modelstate_seal"
"""The key of `__metadata__` under which the seal stands."""
OPEN_SEAL = f"{ALGORITHM}:{'0' * HEX}"


def digest(data: bytes | memoryview) -> str:
    """XXH3-128, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def hasher() -> xxhash.xxh3_128:
    """The same, of what it is given bit by bit."""
    return xxhash.xxh3_128()


def sealed(data: bytes) -> bytes:
    """`data`, which has `OPEN_SEAL` in it, with the seal in its place."""
    opened = OPEN_SEAL.encode()
    assert opened in data
    return data.replace(opened, f"{ALGORITHM}:{digest(data)}".encode(), 1)


def check_seal(data: bytes, seal: str, where: str) -> None:
    """Raises `ChecksumError` where `data` is not what was sealed."""
    text = seal.encode()
    if len(seal) == len(OPEN_SEAL) and text in data:
        found = digest(data.replace(text, OPEN_SEAL.encode(), 1))
        if seal == f"{ALGORITHM}:{found}":
            return
    raise ChecksumError(
        "what the file says of its tensors has been damaged, or changed, since it was written",
        where=where,
        expected=f"the digest {seal[:60]}",
        found="another one",
        remedy="get the file again from where it came; if another program has changed it on purpose, have it leave "
        f"out the key {quote(SEAL)}",
    )


def checksum_of(value: Any, nbytes: int) -> Checksum:
    """What a manifest has for a tensor of so many bytes. Raises `ValueError` where it is not that."""
    blocks = -(-nbytes // BLOCK_BYTES)
    if type(value) is not str or len(value) != blocks * HEX or not set(value) <= set("0123456789abcdef"):
        raise ValueError(f"no digest of {nbytes:,} bytes: {str(value)[:60]}")
    return Checksum(ALGORITHM, BLOCK_BYTES, value)
