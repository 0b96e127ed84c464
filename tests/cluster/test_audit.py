"""`halfmoon audit` on a real cluster: right blocks are right, and a wrong one with a right checksum is found."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfmoon.bus.embedded import free_port
from halfmoon.cli.audit.cached_blocks import CachedBlocks, in_computing_order, read_events
from halfmoon.cli.options import OptionInvalid
from halfmoon.schemas.keys import pack_tokens
from halfmoon.store.agent.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventBatch
from halfmoon.store.agent_client import AgentClient
from halfmoon.store.client import StoreClient
from tests.cluster.harness import PATIENT, Cluster, running

BLOCK = 4
A, B, C, D = (letter * 16 for letter in (b"a", b"b", b"c", b"d"))


def stored(keys: list[bytes], parent: bytes | None, tokens: list[int], medium: str = "CPU") -> BlockStored:
    return BlockStored(keys, parent, tokens, BLOCK, None, medium)


def cached(*events: BlockStored | BlockRemoved | AllBlocksCleared) -> CachedBlocks:
    blocks = CachedBlocks()
    for event in events:
        blocks.apply(KvEventBatch(0.0, [event]))
    return blocks


def test_blocks_and_their_tokens_are_those_that_the_events_left() -> None:
    first, second = list(range(8)), list(range(8, 12))
    blocks = cached(stored([A, B], None, first), stored([C], B, second), stored([C], B, second, "STORAGE"))
    assert blocks.keys() == [A, B, C]
    chain = blocks.chain(C)
    assert chain is not None
    assert (chain.keys, chain.token_ids) == ((A, B, C), ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)))
    blocks.apply(KvEventBatch(0.0, [BlockRemoved([A, C], "CPU")]))
    assert blocks.keys() == [B, C]  # C is on the disk still, and what was before B is known
    blocks.apply(KvEventBatch(0.0, [BlockRemoved([C], "STORAGE"), stored([D], C, second)]))
    assert blocks.keys() == [B, D]
    chains = [one for key in (D, A, C, B) if (one := blocks.chain(key))]
    assert [one.keys[-1] for one in in_computing_order(chains)] == [A, B, C, D]
    blocks.apply(KvEventBatch(0.0, [AllBlocksCleared()]))
    assert blocks.keys() == []
    assert cached(stored([B], A, second)).keys() == []  # the event of its parent is lost
    with pytest.raises(OptionInvalid, match="it tells no tokens"):
        cached(stored([A], None, []))


def answer(cluster: Cluster, prompt: str) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(f"{cluster.http}/v1/completions", body)
    request.add_header("content-type", "application/json")
    urllib.request.urlopen(request, timeout=300).close()


def audit(cluster: Cluster, replay: str, *words: str) -> tuple[int, dict[str, Any]]:
    line = [sys.executable, "-m", "halfmoon.cli.main", "audit", "prefill-0", "--kv-events-replay", replay]
    line += ["--cluster", cluster.name, "--dtype", "float32", "--json", *words]
    done = subprocess.run(line, env=cluster.environment, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


async def plant(cluster: Cluster, key: bytes, like: bytes, tokens: list[int]) -> None:
    """As a worker whose KV is wrong: a block of `tokens` that has the bits of another one."""
    operator = await cluster.bus()
    store = StoreClient(operator, node_id="prefill-0")
    await store.attach()
    content = np.empty(store.block_bytes, np.uint8)
    await store.get_into(like, content)
    await store.close()
    await operator.close()
    bus = await cluster.bus("prefill-0")
    worker = AgentClient(bus, node_id="prefill-0", worker_id="planter")
    view = await worker.attach()
    opened = await worker.open_put("wrong", key, blocks=1, token_ids=pack_tokens(tokens))
    (slot,) = opened.slots
    with view.writing(slot, "wrong"):
        view.blocks[slot].reshape(-1)[:] = content
    await worker.commit("wrong", first_block=0, blocks=1)
    await worker.release("wrong")
    await worker.close()
    await bus.close()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_wrong_block_that_its_checksum_fits_is_found(tmp_path: Path) -> None:
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    flags = ("--kv-events", events, "--kv-events-replay", replay, "--kv-events-tokens", "--dtype", "float32")
    text = "Here lies the town of Here. " * 100
    with running(tmp_path, "--prefill", "1", "--decode", "1", *PATIENT, *flags) as cluster:
        for prompt in (text, text + "And there, beyond the river, another one. " * 30):
            answer(cluster, prompt)
        status, found = audit(cluster, replay, "--sample", "100")
        assert status == 0, found
        assert found["results"] == {"right": found["known"]}
        assert found["known"] >= 3
        # Two of them, drawn: the first blocks of a chain are computed though none of them is compared.
        assert audit(cluster, replay, "--sample", "2", "--seed", "5")[1]["results"] == {"right": 2}
        like = (await read_events(replay)).keys()[0]
        await plant(cluster, D, like, list(range(1000, 1256)))
        status, found = audit(cluster, replay, "--sample", "100")
        assert status == 2
        assert found["results"] == {"right": found["known"] - 1, "wrong": 1}
        assert found["wrong"] == [{"key": D.hex(), "block": 0, "layer": 0}]
