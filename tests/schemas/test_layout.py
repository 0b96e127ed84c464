"""Layout arithmetic, against shapes counted by numpy."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.schemas.policy import Layout

SMOL: dict[str, Any] = {
    "model": "smol", "model_fingerprint": "f", "layers": 30, "kv_heads": 3, "head_dim": 64, "block_tokens": 256,
    "dtype": "float32",
}  # fmt: skip


def test_the_bytes_of_a_real_layout() -> None:
    layout = Layout(**SMOL)
    assert layout.token_layer_bytes == 1536
    assert layout.layer_block_bytes == 393_216
    assert layout.block_bytes == 11_796_480


@given(
    layers=st.integers(1, 5),
    kv_heads=st.integers(1, 5),
    head_dim=st.integers(1, 9),
    block_tokens=st.integers(1, 33),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
def test_a_block_has_the_bytes_of_its_array(
    layers: int, kv_heads: int, head_dim: int, block_tokens: int, dtype: Any
) -> None:
    shape = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "block_tokens": block_tokens}
    layout = Layout(**{**SMOL, **shape, "dtype": dtype})
    block = np.zeros((layers, 2, block_tokens, kv_heads, head_dim), "f4" if dtype == "float32" else "f2")
    assert layout.block_bytes == block.nbytes
    assert layout.layer_block_bytes == block[0].nbytes
    assert layout.token_layer_bytes == block[0, :, 0].nbytes


def test_a_layout_of_no_dtype_takes_no_room() -> None:
    """As the simulator's workers have it."""
    assert Layout(**{**SMOL, "dtype": "none"}).block_bytes == 0


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (255, 1), (256, 1), (257, 2), (512, 2), (2**31 - 1, 2**23)]
)
def test_the_last_block_may_be_partly_full(tokens: int, blocks: int) -> None:
    assert Layout(**SMOL).blocks(tokens) == blocks


@given(tokens=st.integers(0, 2**31 - 1), block_tokens=st.integers(1, 65536))
def test_blocks_are_as_few_as_hold_the_tokens(tokens: int, block_tokens: int) -> None:
    blocks = Layout(**{**SMOL, "block_tokens": block_tokens}).blocks(tokens)
    assert (blocks - 1) * block_tokens < tokens <= blocks * block_tokens or (tokens, blocks) == (0, 0)


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim", "block_tokens", "numerics"])
def test_the_name_tells_every_shape_apart(field: str) -> None:
    other = "fast" if field == "numerics" else SMOL[field] + 1
    assert Layout(**SMOL).name() == "30x2x256x3x64-exact"
    assert Layout(**{**SMOL, field: other}).name() != Layout(**SMOL).name()


def test_a_layout_is_a_value() -> None:
    assert Layout(**SMOL) == Layout(**SMOL)
    with pytest.raises(AttributeError, match="immutable"):
        Layout(**SMOL).layers = 1  # type: ignore[misc]
    with pytest.raises(msgspec.ValidationError, match="block_tokens"):
        msgspec.convert({**SMOL, "block_tokens": 0}, Layout)
