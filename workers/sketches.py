"""The sketch of a prompt (`halfmoon.schemas.similar`), made once, where its tokens are.

Source: Broder, On the resemblance of documents (1997); Li, Owen, Zhang, One Permutation Hashing (2012).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halfmoon.schemas.similar import NO_SAMPLE, SAMPLES

#: Tokens of a shingle: fewer and unrelated texts share some; more and every edit costs many.
SHINGLE_TOKENS = 4
#: Odd, with bits all over: one for each token of a shingle, then for the end.
_MIXERS = tuple(
    np.uint64(one)
    for one in (
        0x9E37_79B9_7F4A_7C15,
        0xC2B2_AE3D_27D4_EB4F,
        0x1656_67B1_9E37_79F9,
        0x2748_F5A1_27B3_C0D3,
        0xD6E8_FEB8_6659_FD93,
    )
)
_SHIFT, _HALF = np.uint64(29), np.uint64(32)


def sketch_of(root_key: bytes, token_ids: Sequence[int] | np.ndarray) -> bytes:
    """The sketch of a prompt under a root key; b"" for a prompt shorter than a shingle."""
    ids = np.asarray(token_ids, dtype=np.uint64)
    count = len(ids) - SHINGLE_TOKENS + 1
    if count < 1:
        return b""
    hashes = np.full(count, int.from_bytes(root_key[:8], "little"), dtype=np.uint64)
    for place in range(SHINGLE_TOKENS):
        hashes ^= ids[place : place + count] + np.uint64(1)
        hashes *= _MIXERS[place]
        hashes ^= hashes >> _SHIFT
    hashes *= _MIXERS[-1]
    samples = np.full(SAMPLES, NO_SAMPLE, dtype="<u4")
    np.minimum.at(samples, (hashes % np.uint64(SAMPLES)).astype(np.int64), (hashes >> _HALF).astype("<u4"))
    return samples.tobytes()
