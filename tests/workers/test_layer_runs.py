"""Which layers of a prompt are told of together: what is worth a message, decided by bytes and never by a clock."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from halfmoon.schemas.policy import Layout
from halfmoon.workers.prefill.layer_runs import RUN_BYTES, LayerRun, LayerRuns

LAYERS = 30
#: Of the built-in model in float32: 1,536 bytes of a token in a layer.
LAYOUT = Layout(
    model="m",
    model_fingerprint="f",
    layers=LAYERS,
    kv_heads=3,
    head_dim=64,
    block_tokens=256,
    dtype="float32",
)


def runs(tokens: int) -> list[LayerRun]:
    """Of a prompt of one chunk, whose layers come one after the other."""
    waiting = LayerRuns(LAYOUT, tokens)
    sent = [run for layer in range(LAYERS) for run in waiting.add(layer, 0, LAYOUT.blocks(tokens))]
    assert waiting.rest() == []
    return sent


@pytest.mark.parametrize(
    ("tokens", "messages"), [(2, 1), (22, 1), (23, 1), (24, 2), (128, 5), (256, 10), (683, 30), (4_000, 30)]
)
def test_a_run_is_as_long_as_it_is_worth_a_message(tokens: int, messages: int) -> None:
    sent = runs(tokens)
    assert len(sent) == messages
    layer_bytes = tokens * LAYOUT.token_layer_bytes
    for run in sent[:-1]:
        assert (run.layers - 1) * layer_bytes < RUN_BYTES <= run.layers * layer_bytes
    assert [layer for run in sent for layer in range(run.layer, run.layer + run.layers)] == list(
        range(LAYERS)
    )


def test_layers_that_are_not_streamed_wait_for_the_end() -> None:
    waiting = LayerRuns(LAYOUT, 4_000)
    waiting.begin(streamed=False)
    assert [waiting.add(layer, 0, 1) for layer in range(LAYERS)] == [[]] * LAYERS
    assert waiting.rest() == [LayerRun(layer, 1, 0, 1) for layer in range(LAYERS)]
    assert waiting.rest() == []


@given(st.permutations([(layer, block) for layer in range(6) for block in range(2)]), st.integers(257, 512))
def test_in_whatever_order_layers_come_each_is_sent_once(order: list[tuple[int, int]], tokens: int) -> None:
    """As the layers of a group's stages do, and those of a prefix while others are computed."""
    waiting = LayerRuns(LAYOUT, tokens)
    sent = [run for layer, block in order for run in waiting.add(layer, block, 1)] + waiting.rest()
    told = [(layer, run.first_block) for run in sent for layer in range(run.layer, run.layer + run.layers)]
    assert sorted(told) == sorted(order)
