"""The digests of a file's tensors and of its header. They detect damage, not tampering.

The seal of a file is a digest of its own header, stored in that header: the digest of the same bytes with zeros in the
place of the seal.
"""

import xxhash

from modelstate.errors import ChecksumError
from modelstate.spec import Checksum
from modelstate.text_format import quote

BLOCK_BYTES = 4 << 20
"""A tensor has one digest for each block of this size."""
ALGORITHM = "xxh3-128"
HEX = 32
"""Characters of a digest."""
SEAL = "modelstate_seal"
"""The key of `__metadata__` that holds the seal."""
OPEN_SEAL = f"{ALGORITHM}:{'0' * HEX}"


def digest(data: bytes | memoryview) -> str:
    """The hexadecimal XXH3-128 digest of `data`."""
    return xxhash.xxh3_128_hexdigest(data)


def hasher() -> xxhash.xxh3_128:
    """A hash object that computes `digest` incrementally."""
    return xxhash.xxh3_128()


def sealed(data: bytes) -> bytes:
    """Replaces the `OPEN_SEAL` within `data` by the seal."""
    placeholder = OPEN_SEAL.encode()
    assert placeholder in data
    return data.replace(placeholder, f"{ALGORITHM}:{digest(data)}".encode(), 1)


def check_seal(data: bytes, seal: str, where: str) -> None:
    """Raises `ChecksumError` where `seal` is not the seal of `data`, which contains it."""
    text = seal.encode()
    if len(seal) == len(OPEN_SEAL) and text in data:
        computed = digest(data.replace(text, OPEN_SEAL.encode(), 1))
        if seal == f"{ALGORITHM}:{computed}":
            return
    raise ChecksumError(
        "what the file says of its tensors has been damaged, or changed, since it was written",
        where=where,
        expected=f"the digest {seal[:60]}",
        found="another one",
        remedy="get the file again from where it came; if another program has changed it on purpose, have it leave "
        f"out the key {quote(SEAL)}",
    )


def checksum_of(value: object, nbytes: int) -> Checksum:
    """Parses the digests that a manifest stores for a tensor of `nbytes` bytes. Raises `ValueError`."""
    blocks = -(-nbytes // BLOCK_BYTES)
    if type(value) is not str or len(value) != blocks * HEX or not set(value) <= set("0123456789abcdef"):
        raise ValueError(f"no digest of {nbytes:,} bytes: {str(value)[:60]}")
    return Checksum(ALGORITHM, BLOCK_BYTES, value)
