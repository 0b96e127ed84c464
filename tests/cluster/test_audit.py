"""`halfmoon audit` on a real cluster: right blocks are right, and a wrong one with a right checksum is found."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfmoon.cli.audit.cached_blocks import CachedBlocks, Chain, in_computing_order, read_events
from halfmoon.cli.audit.command import AuditedBlock, told
from halfmoon.cli.options import OptionInvalid
from halfmoon.schemas import subjects
from halfmoon.schemas.keys import pack_tokens
from halfmoon.schemas.store import RemoveBlocks, Removed
from halfmoon.store.agent.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventBatch
from halfmoon.store.agent_client import AgentClient
from halfmoon.store.client import StoreClient
from halfmoon.store.errors import BlockMissing, BytesCorrupted, StoreError
from tests.cluster.harness import PATIENT, Cluster, running
from tests.eventually import BOUND_S
from tests.workers.made_models import two_layers

#: Small blocks, so that short prompts have several: the made model has room for four of them.
LAYOUT = ("--dtype", "float32", "--block-tokens", "16")
ONE_EACH = ("--prefill", "1", "--decode", "1", "--pool-mib", "16")
#: Two blocks and a part, and another one with what comes after it.
TEXT = [3, 1, 4, 1, 5, 9, 2, 6] * 5
MORE = [5, 3, 5, 8, 9, 7, 9, 3] * 2
BLOCK = 4
A, B, C, D = (letter * 16 for letter in (b"a", b"b", b"c", b"d"))


def stored(keys: list[bytes], parent: bytes | None, tokens: list[int], medium: str = "CPU") -> BlockStored:
    return BlockStored(keys, parent, tokens, BLOCK, None, medium)


def cached(*events: BlockStored | BlockRemoved | AllBlocksCleared) -> CachedBlocks:
    blocks = CachedBlocks()
    for event in events:
        blocks.apply(KvEventBatch(0.0, [event]))
    return blocks


@pytest.mark.pure
def test_blocks_and_their_tokens_are_those_that_the_events_left() -> None:
    first, second = list(range(8)), list(range(8, 12))
    blocks = cached(stored([A, B], None, first), stored([C], B, second), stored([C], B, second, "STORAGE"))
    assert blocks.known() == [A, B, C]
    chain = blocks.chain(C)
    assert chain is not None
    assert (chain.keys, chain.token_ids) == ((A, B, C), ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)))
    blocks.apply(KvEventBatch(0.0, [BlockRemoved([A, C], "CPU")]))
    assert blocks.known() == [B, C]  # C is on the disk still, and what was before B is known
    blocks.apply(KvEventBatch(0.0, [BlockRemoved([C], "STORAGE"), stored([D], C, second)]))
    assert blocks.known() == [B, D]
    chains = [one for key in (D, A, C, B) if (one := blocks.chain(key))]
    assert [one.keys[-1] for one in in_computing_order(chains)] == [A, B, C, D]
    blocks.apply(KvEventBatch(0.0, [AllBlocksCleared()]))
    assert blocks.known() == []
    assert cached(stored([B], A, second)).known() == []  # the event of its parent is lost
    with pytest.raises(OptionInvalid, match="it tells no tokens"):
        cached(stored([A], None, []))


@pytest.mark.pure
@pytest.mark.parametrize(
    ("layers", "problems", "status", "results"),
    [
        ((-1, -1), (), 0, {"right": 2}),
        ((-1, 3), (), 2, {"right": 1, "wrong": 1}),
        ((-1,), (BlockMissing("b"), BytesCorrupted("b")), 0, {"right": 1, "gone": 1, "unreadable": 1}),
        ((3,), (BytesCorrupted("b"),), 2, {"wrong": 1, "unreadable": 1}),
        ((), (BlockMissing("b"),), 1, {"gone": 1}),
        ((), (), 1, {}),
    ],
)
def test_the_exit_status_says_what_was_found(
    layers: tuple[int, ...],
    problems: tuple[StoreError, ...],
    status: int,
    results: dict[str, int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    chain = Chain(keys=(A, B), token_ids=((0,), (1,)))
    audited = [AuditedBlock(chain=chain, layer=layer) for layer in layers]
    audited += [AuditedBlock(chain=chain, problem=problem) for problem in problems]
    assert told(audited, known=9, as_json=True) == status
    wrong = [{"key": B.hex(), "block": 1, "layer": 3}] if 3 in layers else []
    assert json.loads(capsys.readouterr().out) == {"known": 9, "results": results, "wrong": wrong}
    told(audited, known=9, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("; 9 are known by their tokens")
    assert [line.partition(":")[0] for line in lines[:-1]] == [
        each.result for each in audited if each.result in ("wrong", "unreadable")
    ]


def answer(cluster: Cluster, prompt: list[int]) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(f"{cluster.http}/v1/completions", body)
    request.add_header("content-type", "application/json")
    urllib.request.urlopen(request, timeout=BOUND_S).close()


async def audit(
    cluster: Cluster, replay: str, layout: tuple[str, ...], *words: str
) -> tuple[int, dict[str, Any], str]:
    """Exit status, what it said as JSON ({}: nothing), and its standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "halfmoon.cli.main", "audit", "prefill-0", "--kv-events-replay", replay),
        *("--cluster", cluster.name, *layout, "--json", *words),
        env=cluster.environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, json.loads(out or b"{}"), err.decode()


async def store_changed(cluster: Cluster, key: bytes, token_ids: list[int]) -> None:
    """As a worker whose KV is wrong: a first block, under its own key, with a bit changed in the last layer."""
    operator = await cluster.bus()
    async with StoreClient(operator, node_id="prefill-0") as store:
        await store.attach()
        content = np.empty(store.block_bytes, np.uint8)
        await store.get_into(key, content)
        content[-1] ^= 1
        agent = await cluster.bus("store-prefill-0")
        forget = RemoveBlocks(block_keys=key)
        removed = await agent.request(
            subjects.store("prefill-0", "remove"), forget, Removed, timeout_s=BOUND_S
        )
        assert removed.removed == [0]
        await agent.close()
        bus = await cluster.bus("prefill-0")
        worker = AgentClient(bus, node_id="prefill-0", worker_id="prefill-0")
        view = await worker.attach()
        opened = await worker.open_put("wrong", key, blocks=1, token_ids=pack_tokens(token_ids))
        (slot,) = opened.slots
        with view.writing(slot, "wrong"):
            view.blocks[slot].reshape(-1)[:] = content
        await worker.commit("wrong", first_block=0, blocks=1)
        await worker.release("wrong")
        await worker.close()
        await bus.close()
        # A reader who compares with the checksum of the put takes it.
        await store.get_into(key, content, verify=True)
    await operator.close()


async def test_a_wrong_block_that_its_checksum_fits_is_found(tmp_path: Path) -> None:
    events, replay = (f"ipc://{tmp_path}/{name}" for name in ("events", "replay"))
    model = two_layers().write(tmp_path / "model")
    layout = ("--model", str(model), *LAYOUT)
    flags = ("--kv-events", events, "--kv-events-replay", replay, "--kv-events-tokens", *layout)
    with running(tmp_path, *ONE_EACH, *PATIENT, *flags) as cluster:
        for prompt in (TEXT, TEXT + MORE):
            answer(cluster, prompt)
        # Two of them, drawn: the first blocks of a chain are computed though none of them is compared.
        status, found, said = await audit(cluster, replay, layout, "--sample", "2", "--seed", "5")
        assert (status, said) == (0, ""), said
        assert found["known"] >= 3
        assert (found["results"], found["wrong"]) == ({"right": 2}, [])
        blocks = await read_events(replay)
        (first,) = {chain.keys[0] for key in blocks.known() if (chain := blocks.chain(key))}
        chain = blocks.chain(first)
        assert chain is not None
        await store_changed(cluster, first, list(chain.token_ids[0]))
        status, found, _ = await audit(cluster, replay, layout, "--sample", "100")
        assert status == 2
        assert found["results"] == {"right": found["known"] - 1, "wrong": 1}
        assert found["wrong"] == [{"key": first.hex(), "block": 0, "layer": 1}]
        status, found, said = await audit(cluster, replay, layout, "--block-tokens", "32")
        assert (status != 0, found) == (True, {})
        assert said.startswith("halfmoon: the blocks of prefill-0 have block_tokens 16, not 32")
