"""Decode workers lend to each other: a request longer than any one cache is served, with the text it always has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from halfmoon.schemas.decisions import StartDecode
from halfmoon.schemas.events import DecodeStarted, RequestFinished
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, Cluster, running
from tests.cluster.prompts import prompt
from tests.cluster.test_same_text import Form, written_down
from tests.cluster.test_stages import explained
from tests.lengths import by_make_test_attention

#: Blocks of 256 tokens: a worker's cache holds 1,024, which prompts outgrow.
SIZES = ("--decode-kv-blocks", "4", "--prefill-kv-blocks", "4", "--prefill", "1", "--decode", "2")
LENDING = ("--lend", "--dtype", "float32", *SIZES, "--worker-wait-s", "120", *PATIENT)
LONG, TOKENS = 1100, 12


async def ask(cluster: Cluster, nc: Any, **fields: Any) -> dict[str, Any]:
    return await cluster.generate(
        nc, prompt=prompt(LONG), max_tokens=TOKENS, temperature=0, ignore_eos=True, **fields
    )


def wanted() -> list[int]:
    """Transformers' tokens."""
    return written_down(Form((LONG,), TOKENS))[LONG]


async def loans_of(cluster: Cluster) -> list[tuple[str, str, int]]:
    """Decode worker, lender and segments of each order that borrowed."""
    ordered = [one.decision for one in await cluster.decisions()]
    orders = [one for one in ordered if isinstance(one, StartDecode)]
    return [(one.worker_id, loan.worker_id, loan.segments) for one in orders for loan in one.loans]


async def nothing_is_held(cluster: Cluster) -> None:
    """Lenders have given back what they held."""
    async with asyncio.timeout(20):
        while any(
            node.get("kv_used") for node in (await cluster.status())["nodes"] if node["role"] == "decode"
        ):
            await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_a_prompt_longer_than_any_cache_has_its_text(tmp_path: Path) -> None:
    with running(tmp_path, *LENDING) as cluster:
        nc = await cluster.connect()
        answer = await ask(cluster, nc)
        assert answer["token_ids"] == wanted()
        ((decode, lender, segments),) = await loans_of(cluster)
        assert {decode, lender} == {"decode-0", "decode-1"}
        assert segments == 1
        await nothing_is_held(cluster)
        await nc.close()


@pytest.mark.slow
@pytest.mark.parametrize("of", ["lender", "borrower"])
async def test_a_worker_that_dies_in_mid_answer_costs_no_text(tmp_path: Path, of: str) -> None:
    with running(tmp_path, *LENDING) as cluster:
        nc = await cluster.connect()
        asked = asyncio.create_task(ask(cluster, nc))
        async with asyncio.timeout(100):
            while not any(isinstance(one.event, DecodeStarted) for one in await cluster.events()):
                await asyncio.sleep(0.05)
        ((decode, lender, _),) = await loans_of(cluster)
        cluster.kill(lender if of == "lender" else decode)
        answer = await asked
        assert answer["token_ids"] == wanted()
        finished = [one.event for one in await cluster.events() if isinstance(one.event, RequestFinished)]
        assert len(finished) == 1
        assert len(await loans_of(cluster)) > 1  # it was placed again, and borrowed again
        await nothing_is_held(cluster)
        await nc.close()


@pytest.mark.slow
@by_make_test_attention
async def test_what_finds_no_room_to_borrow_waits_for_it_and_what_never_could_is_refused(
    tmp_path: Path,
) -> None:
    """Each of three takes the room of both caches: they are served one after the other, as they came."""
    with running(tmp_path, *LENDING, "--admission", "none") as cluster:
        nc = await cluster.connect()
        fields = {"prompt": prompt(LONG), "temperature": 0, "ignore_eos": True}
        answers = [asyncio.create_task(cluster.generate(nc, max_tokens=TOKENS, **fields)) for _ in range(3)]
        with pytest.raises(AssertionError, match="too_long"):
            await cluster.generate(nc, max_tokens=2_000, **fields)
        found = [await one for one in answers]
        assert [one["token_ids"] for one in found] == [wanted()] * 3
        assert len(await loans_of(cluster)) == 3
        await nothing_is_held(cluster)
        await nc.close()
        assert "identical" in replayed(cluster, tmp_path)
        assert any("waits for room: " in explained(cluster, tmp_path, one["id"]) for one in found)
