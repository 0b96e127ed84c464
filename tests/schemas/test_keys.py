"""Block keys: a chain over tokens, from a root over all that makes KVCache interchangeable."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.schemas.keys import (
    chain_keys,
    join_keys,
    pack_decoded,
    pack_tokens,
    root_key,
    split_keys,
    token_array,
    unpack_last_first,
    unpack_tokens,
)

ROOT: dict[str, str] = {
    "model_fingerprint": "smol-135m-q4_1",
    "layout": "30x2x256x3x64-exact",
    "dtype": "float32",
    "tenant_salt": "tenant-a",
    "cluster_secret": "s3cret",
}
TOKEN_IDS = st.integers(0, 2**32 - 1)
KEYS = st.binary(min_size=16, max_size=16)
#: Computed by `reference_root` and `reference_keys` below. A change of these strands every stored block.
ROOT_HEX = "4ec3787739daa1474d8528c06d71c6ee"
KEYS_HEX = ["5a007c346945a138e20ac19a1a78d501", "38eebcbdd20ab24762a96eb04c7327c9"]
EMPTY_ROOT_HEX = "9098098c9951f3d716773ceb7fe497b1"


def reference_root(*parts: str) -> bytes:
    """The rule again, in one call: each part after its length as little-endian u32."""
    return xxhash.xxh3_128_digest(b"".join(struct.pack("<I", len(p.encode())) + p.encode() for p in parts))


def reference_keys(root: bytes, token_ids: list[int], block_tokens: int) -> list[bytes]:
    keys: list[bytes] = []
    for block in range(len(token_ids) // block_tokens):
        tokens = token_ids[block * block_tokens : (block + 1) * block_tokens]
        keys.append(
            xxhash.xxh3_128_digest((keys[-1] if keys else root) + struct.pack(f"<{block_tokens}I", *tokens))
        )
    return keys


def test_keys_are_pinned() -> None:
    root = root_key(**ROOT)
    assert root.hex() == ROOT_HEX
    assert root_key(**dict.fromkeys(ROOT, "")).hex() == EMPTY_ROOT_HEX
    chain = chain_keys(root, [0, 1, 2, 3, 2**32 - 1, 49151, 7, 8, 9], 4)
    assert [key.hex() for key in split_keys(chain)] == KEYS_HEX


def test_the_pinned_keys_are_those_of_the_rule() -> None:
    root = reference_root(*ROOT.values())
    assert root.hex() == ROOT_HEX
    assert reference_root("", "", "", "", "").hex() == EMPTY_ROOT_HEX
    keys = reference_keys(root, [0, 1, 2, 3, 2**32 - 1, 49151, 7, 8, 9], 4)
    assert [key.hex() for key in keys] == KEYS_HEX


def test_hashes_are_written_big_endian_as_xxhash_defines_them() -> None:
    """The canonical form of the specification, so that a key is the same bytes on any platform."""
    state = xxhash.xxh3_128(b"halfmoon")
    assert state.digest() == state.intdigest().to_bytes(16, "big")


@given(token_ids=st.lists(TOKEN_IDS, max_size=64), block_tokens=st.integers(1, 20), root=KEYS)
def test_chain_keys_follow_the_rule(token_ids: list[int], block_tokens: int, root: bytes) -> None:
    assert split_keys(chain_keys(root, token_ids, block_tokens)) == reference_keys(
        root, token_ids, block_tokens
    )


@given(
    prefix=st.lists(TOKEN_IDS, max_size=24),
    tail=st.lists(TOKEN_IDS, max_size=24),
    other=st.lists(TOKEN_IDS, max_size=24),
    block_tokens=st.integers(1, 8),
)
def test_an_equal_prefix_has_equal_keys(
    prefix: list[int], tail: list[int], other: list[int], block_tokens: int
) -> None:
    root = root_key(**ROOT)
    shared = 16 * (len(prefix) // block_tokens)
    one, two = (chain_keys(root, prefix + rest, block_tokens) for rest in (tail, other))
    assert one[:shared] == two[:shared] == chain_keys(root, prefix, block_tokens)


@given(data=st.data(), token_ids=st.lists(TOKEN_IDS, min_size=1, max_size=32), block_tokens=st.integers(1, 8))
def test_a_changed_token_changes_its_key_and_all_later_ones(
    data: Any, token_ids: list[int], block_tokens: int
) -> None:
    changed = data.draw(st.integers(0, len(token_ids) - 1))
    value = data.draw(TOKEN_IDS.filter(lambda token: token != token_ids[changed]))
    root = root_key(**ROOT)
    before = split_keys(chain_keys(root, token_ids, block_tokens))
    after = split_keys(
        chain_keys(root, [*token_ids[:changed], value, *token_ids[changed + 1 :]], block_tokens)
    )
    first = changed // block_tokens
    assert before[:first] == after[:first]
    assert not set(before[first:]) & set(after[first:])


@pytest.mark.parametrize("part", ROOT)
@given(text=st.text(max_size=20))
def test_a_changed_part_of_the_root_changes_every_key(part: str, text: str) -> None:
    token_ids = list(range(12))
    changed = {**ROOT, part: text if text != ROOT[part] else text + "x"}
    before = split_keys(chain_keys(root_key(**ROOT), token_ids, 4))
    after = split_keys(chain_keys(root_key(**changed), token_ids, 4))
    assert not set(before) & set(after)


@given(
    texts=st.lists(st.text("ab", max_size=3), min_size=5, max_size=5),
    cuts=st.lists(st.integers(0, 15), min_size=4, max_size=4),
)
def test_parts_that_only_concatenate_to_the_same_text_are_told_apart(
    texts: list[str], cuts: list[int]
) -> None:
    whole = "".join(texts)
    ends = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    others = [whole[start:end] for start, end in itertools.pairwise(ends)]
    roots = {root_key(**dict(zip(ROOT, parts, strict=True))) for parts in (texts, others)}
    assert len(roots) == (1 if texts == others else 2)


def test_a_length_is_in_bytes_and_not_in_characters() -> None:
    assert root_key(**{**ROOT, "tenant_salt": "é"}) == reference_root(*{**ROOT, "tenant_salt": "é"}.values())
    assert root_key(**{**ROOT, "tenant_salt": "é"}) != root_key(**{**ROOT, "tenant_salt": "e\u0301"})


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 0), (255, 0), (256, 1), (257, 1), (511, 1), (512, 2)]
)
def test_only_whole_blocks_have_keys(tokens: int, blocks: int) -> None:
    assert len(chain_keys(root_key(**ROOT), range(tokens), 256)) == 16 * blocks


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="zero"):
        chain_keys(root_key(**ROOT), [1, 2], 0)


@given(token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=32))
def test_lists_and_arrays_of_any_integer_type_and_byte_order_give_the_same_bytes(
    token_ids: list[int],
) -> None:
    expected = struct.pack(f"<{len(token_ids)}I", *token_ids)
    assert pack_tokens(token_ids) == pack_tokens(tuple(token_ids)) == pack_decoded(token_ids) == expected
    for dtype in ("<u4", ">u4", "<i8", ">i8", "<u8", "<i4"):
        assert pack_tokens(np.array(token_ids, dtype=dtype)) == expected
    assert pack_tokens(np.repeat(np.array(token_ids, dtype="<i8"), 2)[::2]) == expected
    assert unpack_tokens(expected) == list(token_array(expected)) == token_ids
    assert list(unpack_last_first(expected)) == token_ids[::-1]


BAD_IDS = [[-1], [2**32], [2**63], [2**64], [1, -1], [1.5], [1.0], ["1"], [None], [True], [2**63, -1]]


@pytest.mark.parametrize("bad", BAD_IDS, ids=str)
@pytest.mark.parametrize("make", [list, np.array], ids=["a list", "an array"])
def test_what_is_no_token_id_is_refused_and_not_wrapped(bad: list[Any], make: Any) -> None:
    with pytest.raises(OverflowError):
        pack_tokens(make(bad))


@pytest.mark.parametrize("bad", [bad for bad in BAD_IDS if bad != [True]], ids=str)
def test_what_is_no_token_id_is_refused_of_a_decoded_list_too(bad: list[Any]) -> None:
    with pytest.raises((OverflowError, TypeError)):
        pack_decoded(bad)


def test_packed_tokens_and_keys_of_odd_lengths_are_refused() -> None:
    for unpack in (unpack_tokens, token_array):
        with pytest.raises(ValueError, match="5 bytes"):
            unpack(b"12345")
    with pytest.raises(ValueError, match="17 bytes"):
        split_keys(b"x" * 17)


@given(keys=st.lists(KEYS, max_size=8))
@settings(max_examples=50)
def test_keys_split_as_they_were_joined(keys: list[bytes]) -> None:
    assert split_keys(join_keys(keys)) == keys
    assert [key.hex() for key in split_keys(join_keys(keys))] == [key.hex() for key in keys]


def test_a_version_of_weights_makes_another_root_and_none_the_one_that_there_was() -> None:
    assert root_key(**ROOT, weight_version="").hex() == ROOT_HEX
    roots = {root_key(**ROOT, weight_version=version) for version in ("", "1", "2", "12")}
    assert len(roots) == 4
