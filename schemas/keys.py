"""Block keys: a chain of 128-bit hashes over token ids.

`key_i = xxh3_128(key_{i-1} || token ids of block i, little-endian u32)`. The root hashes all that makes KVCache
interchangeable, and its owner: model fingerprint, layout, dtype, the tenant's salt, the cluster's secret, and the
version of weights that are changed in place. So equal keys mean equal block *and* equal prefix, and a block of another
tenant, or of other weights, cannot be named. Only whole blocks have keys.

Source: Mooncake (FAST'25), section 4 (prefix-hashed block keys).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from struct import unpack

import xxhash

from halfmoon.schemas.types import KEY_BYTES, check_whole_keys

TOKEN_ID_MAX = 2**32 - 1


def root_key(
    *,
    model_fingerprint: str,
    layout: str,
    dtype: str,
    tenant_salt: str,
    cluster_secret: str,
    weight_version: str = "",
) -> bytes:
    """The key before the first block. Each part is length-prefixed, so that no two choices collide by concatenation."""
    state = xxhash.xxh3_128()
    parts = [model_fingerprint, layout, dtype, tenant_salt, cluster_secret]
    # Weights that were never changed have the keys that they had before there was a version.
    for part in [*parts, weight_version] if weight_version else parts:
        raw = part.encode()
        state.update(len(raw).to_bytes(4, "little"))
        state.update(raw)
    return state.digest()


def chain_keys(root: bytes, token_ids: Sequence[int], block_tokens: int) -> bytes:
    """Keys of the whole blocks of `token_ids`, concatenated: `len(token_ids) // block_tokens` times 16 bytes."""
    return chain_keys_packed(root, pack_tokens(token_ids), block_tokens)


def chain_keys_packed(root: bytes, packed: bytes, block_tokens: int) -> bytes:
    """`chain_keys` of tokens as `pack_tokens` has them."""
    tokens = memoryview(packed)
    step = 4 * block_tokens
    keys = bytearray()
    key = root
    for start in range(0, len(tokens) - step + 1, step):
        state = xxhash.xxh3_128(key)
        state.update(tokens[start : start + step])
        key = state.digest()
        keys += key
    return bytes(keys)


def split_keys(keys: bytes) -> list[bytes]:
    """Concatenated keys, one by one. Raises ValueError when the length is no multiple of 16."""
    check_whole_keys(keys)
    # In half the time of a slice for each.
    return list(unpack(f"{KEY_BYTES}s" * (len(keys) // KEY_BYTES), keys))


def common_blocks(one: bytes, other: bytes) -> int:
    """How many blocks two prompts have in common, from the first on, by their concatenated keys."""
    low, high = 0, min(len(one), len(other)) // KEY_BYTES
    # Keys are chained: where one is equal, so are all before it.
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * KEY_BYTES
        if one[end - KEY_BYTES : end] == other[end - KEY_BYTES : end]:
            low = middle
        else:
            high = middle - 1
    return low


def share_block(one: bytes, other: bytes, place: int) -> bool:
    """True where two prompts have the block at `place`, and so all before it, in common."""
    key = one[place * KEY_BYTES : (place + 1) * KEY_BYTES]
    # Keys are chained, so one says it. A prompt without that block has b"" there.
    return key != b"" and key == other[place * KEY_BYTES : (place + 1) * KEY_BYTES]


def join_keys(keys: Sequence[bytes]) -> bytes:
    return b"".join(keys)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32. Raises OverflowError unless all are integers in 0..2**32-1."""
    # An array would take a bool for a number.
    if bool not in set(map(type, token_ids)):
        try:
            return pack_decoded(token_ids)
        except (TypeError, OverflowError):
            pass
    raise OverflowError(f"token_ids: not all are integers in 0..{TOKEN_ID_MAX}")


def pack_decoded(token_ids: Sequence[int]) -> bytes:
    """`pack_tokens` of what a typed decoder or a tokenizer made, in less time: it takes a bool for a number.

    Raises TypeError where one is no integer, OverflowError where one is not in 0..2**32-1.
    """
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The token ids in `packed`. Raises ValueError when the length is no multiple of 4."""
    return token_array(packed).tolist()


def token_array(packed: bytes) -> array[int]:
    """`unpack_tokens` without a number made of each: for prompts, of which most tokens are never looked at alone."""
    if len(packed) % 4:
        raise ValueError(f"token_ids: {len(packed)} bytes is no multiple of 4")
    ids = array("I", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def unpack_last_first(packed: bytes) -> Iterator[int]:
    """The token ids in `packed` from the last on, each unpacked when it is asked for."""
    for at in range(len(packed) - 4, -1, -4):
        yield int.from_bytes(packed[at : at + 4], "little")
