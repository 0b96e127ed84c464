"""Of the block that a prompt ends in its tokens are pushed and no more.

The answers have the tokens and the bits of an engine alone, which no KV was pushed to.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from halfmoon.schemas.events import WorkerJoined
from halfmoon.schemas.kv import KvReady
from halfmoon.schemas.policy import Layout
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import load_model
from tests.cluster.harness import PATIENT, Cluster, running
from tests.cluster.prompts import MODEL, prompt
from tests.cluster.steering import prefill_of

BLOCK_TOKENS = 256
#: The first one leaves bytes of its own in slots and blocks that the others get, who must not read them.
LENGTHS = (2 * BLOCK_TOKENS - 1, 2, BLOCK_TOKENS + 3, 5)
STEPS = 5


@functools.cache
def engine_of(layout: Layout) -> Engine:
    torch.set_num_threads(1)
    return Engine(
        load_model(MODEL, dtype=torch.float32),
        num_blocks=4,
        block_tokens=layout.block_tokens,
        exact=layout.numerics == "exact",
        segment_tokens=layout.segment_tokens,
    )


@functools.cache
def alone(layout: Layout, length: int) -> tuple[list[int], list[str]]:
    """Greedy tokens after the prompt of that length, and the digests of their logits, of one engine alone."""
    engine = engine_of(layout)
    table = engine.allocator.allocate(layout.blocks(length + STEPS))
    ids, size = prompt(length), layout.block_tokens
    for start in range(0, length, size):
        row = engine.prefill_chunk(ids[start : start + size], start, table, want_logits=True)
    tokens: list[int] = []
    digests: list[str] = []
    while True:
        tokens += engine.argmax(row)
        digests.append(engine.logits_digest(row))
        if len(tokens) == STEPS:
            engine.allocator.free(table)
            return tokens, digests
        row = engine.decode(tokens[-1:], [length + len(tokens) - 1], [table])


async def pushes_tokens_only(cluster: Cluster, lengths: Sequence[int]) -> int:
    """Asks prompts that nobody has cached; the bytes that went."""
    joined = [stamped.event for stamped in await cluster.events()]
    layout = next(event.layout for event in joined if isinstance(event, WorkerJoined))
    assert (layout.block_tokens, layout.dtype) == (BLOCK_TOKENS, "float32")
    a_token = layout.layers * 2 * layout.kv_heads * layout.head_dim * 4
    nc = await cluster.connect()
    for length in lengths:
        answer = await cluster.generate(
            nc,
            prompt=prompt(length),
            max_tokens=STEPS,
            temperature=0,
            ignore_eos=True,
            logits_digest=True,
            cache_salt="pushed tokens",
        )
        assert answer["usage"]["prompt_tokens"] == length
        assert (answer["token_ids"], answer["logits_digests"]) == alone(layout, length), length
        went = await prefill_of(cluster, answer["id"])
        assert went.pushed_bytes == length * a_token
        told = [message for _, message in await cluster.kv() if isinstance(message, KvReady)]
        told = [each for each in told if each.order_id == went.order_id]
        assert sum(each.moved_bytes for each in told) == went.pushed_bytes
        assert sum(each.layers * each.blocks for each in told) == layout.layers * layout.blocks(length)
        if length < BLOCK_TOKENS:
            assert len(told) == 1, "all layers of a prompt so short are one message"
    await nc.close()
    return sum(lengths) * a_token


async def test_over_shared_memory(small: Cluster) -> None:
    before = await counted(small, "pushed_bytes")
    went = await pushes_tokens_only(small, LENGTHS)
    assert await counted(small, "pushed_bytes") - before == went


@pytest.mark.slow
@pytest.mark.parametrize("encryption", ["never", "always"])
async def test_over_tcp(tmp_path: Path, encryption: str) -> None:
    flags = ("--prefill", "1", "--decode", "1", "--dtype", "float32", *PATIENT)
    with running(tmp_path, *flags, "--transport", "tcp", "--encryption", encryption) as cluster:
        went = await pushes_tokens_only(cluster, LENGTHS)
        assert await counted(cluster, "pushed_bytes") == went
        assert await counted(cluster, "tcp_written_bytes") == went


async def counted(cluster: Cluster, name: str) -> int:
    """Of all store agents."""
    return sum(store.counters.get(name, 0) for store in (await cluster.stores()).values())
