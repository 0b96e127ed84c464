"""Weights that are changed in place under load: `halfmoon pause`, the trainer's own step, `halfmoon resume`.

The engines keep their caches, and note which weights computed each block and which blocks each request reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halfmoon.schemas.decisions import StartMixed
from halfmoon.schemas.weights import WeightsChanged
from tests.adapters.fake_fleet import PROMPT_BLOCKS, FakeFleet, answer, prompt
from tests.adapters.harness import FakeEngine, fake_engines
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, Cluster, running
from tests.eventually import eventually, within

#: Of a family's prompts the first ten blocks are the same.
FAMILIES, OF_EACH, DRAWN = 4, 4, 12


@pytest.fixture(scope="module")
def engines() -> Iterator[list[FakeEngine]]:
    with fake_engines(
        2, "--token-us", "20", "--blocks", "8192", "--dev-mode", wires=("vllm", "sglang")
    ) as found:
        yield found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, engines: list[FakeEngine]) -> Iterator[Cluster]:
    flags = [word for engine in engines for word in (f"--adapt-{engine.wire}", engine.url)]
    patient = (*PATIENT, "--worker-wait-s", "600")
    with running(tmp_path_factory.mktemp("weights"), *flags, "--dtype", "float32", *patient) as one:
        yield one


def prompts(load: int) -> list[list[int]]:
    """Of all families; no two loads have the same."""
    numbers = range(FAMILIES * OF_EACH)
    return [[*prompt(number % FAMILIES, 2_560), *prompt(100 * load + number, 20)] for number in numbers]


def asked(fleet: FakeFleet) -> list[dict[str, Any]]:
    return [one for engine in fleet.engines.values() for one in engine.asked()]


def loaded(fleet: FakeFleet, load: int) -> list[asyncio.Future[dict[str, Any]]]:
    return [asyncio.ensure_future(fleet.ask(ids, DRAWN)) for ids in prompts(load)]


async def all_said(asking: list[asyncio.Future[dict[str, Any]]], load: int) -> None:
    """None is lost, and each is what an engine alone would say."""
    for ids, said in zip(
        prompts(load), await within(asyncio.gather(*asking), "all are answered"), strict=True
    ):
        assert said["token_ids"] == answer(ids, DRAWN)


@pytest.mark.parametrize("abort", [False, True], ids=["those that run end", "those that run are taken back"])
async def test_no_block_of_the_weights_before_is_read(fleet: FakeFleet, abort: bool) -> None:
    number, version = 10 * abort, f"step-{int(abort) + 1}"
    for ids in prompts(number):  # the caches have all families, by the weights before
        await fleet.ask(ids)
    before = asked(fleet)
    assert any(one["cached"] >= 2_560 for one in before), "without hits it shows nothing"
    if abort:
        fleet.fault("hold", after=DRAWN // 2)
    running_ones = loaded(fleet, number + 1)
    if abort:  # they are in mid answer, all of them
        await eventually(
            lambda: sum(one["drawn"] == DRAWN // 2 for one in asked(fleet)) >= len(running_ones),
            "all are in mid answer",
        )
    pausing = asyncio.ensure_future(fleet.operated("pause", *(["--abort"] if abort else [])))
    await fleet.paused()
    waiting_ones = loaded(fleet, number + 2)
    assert "no worker has an order" in await pausing
    await eventually(lambda: all(one["end"] for one in asked(fleet)), "no engine computes")
    fleet.fault("let go")
    marks = {name: len(engine.asked()) for name, engine in fleet.engines.items()}
    fleet.fault("weights", version=version)
    await fleet.operated("resume", "--weight-version", version)
    await all_said(running_ones, number + 1)
    await all_said(waiting_ones, number + 2)
    after = [one for name, engine in fleet.engines.items() for one in engine.asked()[marks[name] :]]
    assert len(after) >= len(waiting_ones) * (2 if abort else 1)
    assert {one["weights"] for one in after} == {version}
    assert {each for one in after for each in one["read"]} <= {version}, "a block of other weights is read"
    # Keys of the new version find what the new weights have computed.
    ids = prompt(300 + number)
    await found_again(fleet, ids, (await fleet.cold(ids, blocks=PROMPT_BLOCKS))["decode_worker"])


async def found_again(fleet: FakeFleet, ids: list[int], at: str) -> None:
    """The conductors know the prompt's blocks at the worker, and its engine reads them."""
    with fleet.only(at):  # which worker is sooner rests on times that were learned
        said = await fleet.ask(ids)
    # The other engine may have been asked before: it refused, and the request was placed again.
    *_, order = [
        one.decision
        for one in await fleet.cluster.decisions()
        if isinstance(one.decision, StartMixed) and one.decision.request_id == said["id"]
    ]
    assert (order.worker_id, order.local_blocks, said["usage"]["cached_tokens"]) == (at, PROMPT_BLOCKS, 2_560)


async def test_a_cache_that_is_reset_is_empty_at_the_engine_and_in_the_conductors(fleet: FakeFleet) -> None:
    ids = prompt(400)
    await fleet.cold(ids, blocks=PROMPT_BLOCKS)
    assert "halfmoon pause first" in await fleet.operated("reset-prefix-cache", status=1)
    await fleet.operated("pause")
    assert "placements are paused" in await fleet.operated("status")
    fleet.fault("dev mode", on=False)
    for name, needs in (("vllm-0", "VLLM_SERVER_DEV_MODE"), ("sglang-0", "--admin-api-key")):
        assert needs in await fleet.operated("reset-prefix-cache", name, status=1)
    fleet.fault("dev mode", on=True)
    assert "vllm-9: no adapter" in await fleet.operated("reset-prefix-cache", "vllm-9", status=1)
    said = await fleet.operated("reset-prefix-cache")
    assert {line.partition(":")[0] for line in said.splitlines()} == set(fleet.names)
    for each in fleet.names:
        await fleet.known(0, each)
    too_long = await fleet.operated("resume", "--weight-version", "v" * 513, status=1)
    assert "length <= 512" in too_long
    assert (await fleet.cluster.all_conductors(1))[0].paused
    await fleet.operated("resume")
    cold = await fleet.cold(ids, blocks=PROMPT_BLOCKS)
    assert fleet.engines[cold["decode_worker"]].asked()[-1]["cached"] == 0
    # What it stores after it counts, also when its own word of the reset comes late.
    await found_again(fleet, ids, cold["decode_worker"])


async def test_no_order_counts_on_blocks_of_the_weights_before_and_the_log_replays(
    fleet: FakeFleet, tmp_path: Path
) -> None:
    """Last of the module: the log has all of the above."""
    (change, *_) = [one.seq for one in await fleet.cluster.events() if isinstance(one.event, WeightsChanged)]
    orders = [one for one in await fleet.cluster.decisions() if isinstance(one.decision, StartMixed)]
    assert {one.decision.weight_version for one in orders if one.cause_seq < change} == {""}
    assert {one.decision.weight_version for one in orders if one.cause_seq > change} == {"step-1", "step-2"}
    (first, *_) = [one.decision for one in orders if one.cause_seq > change]
    assert first.local_blocks == 0
    replayed(fleet.cluster, tmp_path)
