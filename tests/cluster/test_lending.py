"""Decode workers lend to each other: a request longer than any one cache is served, with the text it always has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from halfmoon.schemas.decisions import StartDecode
from halfmoon.schemas.events import RequestFinished
from halfmoon.workers.hold_points import DECODE_STEP
from tests.cluster.harness import PATIENT, Cluster, running
from tests.cluster.holding import Holds, running_with_holds
from tests.cluster.prompts import prompt
from tests.cluster.steering import patient_with_restarts
from tests.cluster.test_same_text import Form, written_down
from tests.eventually import BOUND_S, eventually

#: Blocks of 256 tokens: a worker's cache holds 1,024, which prompts outgrow.
SIZES = ("--decode-kv-blocks", "4", "--prefill-kv-blocks", "4", "--prefill", "1", "--decode", "2")
LENDING = ("--lend", "--dtype", "float32", *SIZES, "--worker-wait-s", "120", *PATIENT)
LONG, TOKENS = 1100, 12


async def ask(cluster: Cluster, nc: Any, **fields: Any) -> dict[str, Any]:
    request = {"prompt": prompt(LONG), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **fields}
    return await cluster.generate(nc, timeout=2 * BOUND_S, **request)  # a worker's restart may be part of it


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

    async def none() -> bool:
        nodes = (await cluster.status())["nodes"]
        return not any(node.get("kv_used") for node in nodes if node["role"] == "decode")

    await eventually(none, "nothing is held", every_s=0.1)


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
    with running_with_holds(tmp_path, *LENDING) as cluster:
        nc, holds = await cluster.connect(), Holds(cluster)
        await patient_with_restarts(cluster)
        holds.arm(DECODE_STEP, TOKENS // 2)
        asked = asyncio.create_task(ask(cluster, nc))
        await holds.held(DECODE_STEP)
        ((decode, lender, _),) = await loans_of(cluster)
        cluster.kill(lender if of == "lender" else decode)
        holds.go_on()
        answer = await asked
        assert answer["token_ids"] == wanted()
        finished = [one.event for one in await cluster.events() if isinstance(one.event, RequestFinished)]
        assert len(finished) == 1
        assert len(await loans_of(cluster)) > 1  # it was placed again, and borrowed again
        await nothing_is_held(cluster)
        await nc.close()
