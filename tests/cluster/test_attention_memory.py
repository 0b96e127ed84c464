"""Room for KV bounds a batch: the room of two attention workers carries twice the batch of one worker's own cache."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from halfmoon.schemas.events import DecodeStarted, RequestFinished
from tests.cluster.harness import PATIENT, Cluster, running
from tests.cluster.test_attention_workers import ask
from tests.cluster.test_same_text import Form, written_down

#: Each of these needs one block of 256 tokens, and a cache has three. The first of its tokens are written down.
LENGTHS, TOKENS, WRITTEN, BLOCKS = (10, 17, 40, 100, 200) * 2, 32, 12, 3
ONE_MODEL = ("--dtype", "float32", "--prefill", "1", "--decode", "1", "--admission", "none", *PATIENT)


async def longest_batch(cluster: Cluster) -> int:
    """The most sequences that were in decode at once."""
    running_now = most = 0
    for one in await cluster.events():
        running_now += isinstance(one.event, DecodeStarted)
        running_now -= isinstance(one.event, RequestFinished)
        most = max(most, running_now)
    return most


async def batch_of(path: Path, *flags: str) -> tuple[int, list[list[int]]]:
    """Its length, and all answers: what finds no room waits for it."""
    with running(path, *ONE_MODEL, *flags) as cluster:
        nc = await cluster.connect()
        answers = await asyncio.gather(*(ask(cluster, nc, length, TOKENS) for length in LENGTHS))
        expected = written_down(Form(LENGTHS, WRITTEN))
        assert [tokens[:WRITTEN] for tokens in answers] == [expected[length] for length in LENGTHS]
        await nc.close()
        return await longest_batch(cluster), answers


@pytest.mark.long
@pytest.mark.slow
async def test_two_attention_workers_carry_twice_the_batch_of_one_cache(tmp_path: Path) -> None:
    blocks = str(BLOCKS)
    own, answers = await batch_of(tmp_path / "own", "--decode-kv-blocks", blocks)
    flags = ("--attention", "2", "--attention-kv-blocks", blocks)
    elsewhere, same = await batch_of(tmp_path / "elsewhere", *flags)
    assert (own, elsewhere) == (BLOCKS, 2 * BLOCKS)
    assert answers == same
