"""A cluster over engines that do one half each: two prefill, two decode, and the KV between them is theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import (
    AnnounceYourself,
    CancelOrder,
    ReleaseOrder,
    StartDecode,
    StartPrefill,
)
from halfmoon.schemas.events import DecodeFailed, DecodeStarted
from tests.adapters.fake_fleet import PROMPT_BLOCKS, PROMPT_TOKENS, FakeFleet, answer, prompt
from tests.adapters.fleet import explained
from tests.adapters.harness import FakeEngine, fake_engines
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, Cluster, running
from tests.eventually import eventually, within

PREFILL, DECODE = ("vllm-0", "vllm-1"), ("vllm-2", "vllm-3")
OTHER = {"vllm-0": "vllm-1", "vllm-1": "vllm-0", "vllm-2": "vllm-3", "vllm-3": "vllm-2"}


@pytest.fixture(scope="module")
def engines() -> Iterator[list[FakeEngine]]:
    with fake_engines(4, "--token-us", "100", "--blocks", "4096", "--connector") as found:
        yield found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, engines: list[FakeEngine]) -> Iterator[Cluster]:
    flags = [word for engine in engines[:2] for word in ("--adapt-vllm-prefill", engine.url)]
    flags += [word for engine in engines[2:] for word in ("--adapt-vllm-decode", engine.url)]
    patient = (*PATIENT, "--worker-wait-s", "600")
    with running(tmp_path_factory.mktemp("fleet"), *flags, "--dtype", "float32", *patient) as one:
        yield one


async def asking(fleet: FakeFleet, names: tuple[str, ...], prompt_tokens: int) -> str:
    """The one of these engines that is busy with a prompt of so many tokens."""

    def found() -> str:
        for at in names:
            asked = fleet.engines[at].asked()
            if any((one["prompt"], one["end"]) == (prompt_tokens, "") for one in asked):
                return at
        return ""

    return await eventually(found, "an engine is asked", every_s=0.05)


async def cancel(fleet: FakeFleet, answering: asyncio.Future[Any]) -> None:
    placed = [
        one.decision for one in await fleet.cluster.decisions() if isinstance(one.decision, StartPrefill)
    ]
    named = msgspec.json.encode({"id": placed[-1].request_id})
    await within(fleet.nc.request(f"{subjects.API}.cancel", named, timeout=100), "the cancel is answered")
    await within(asyncio.gather(answering, return_exceptions=True), "its client is told")


async def test_one_engine_computes_the_prompt_and_another_one_answers(fleet: FakeFleet) -> None:
    ids = prompt(0)
    said = await fleet.ask(ids, 8)
    assert said["token_ids"] == answer(ids, 8)
    assert (said["prefill_worker"] in PREFILL, said["decode_worker"] in DECODE) == (True, True)
    computed = fleet.engines[said["prefill_worker"]].asked()[-1]
    assert (computed["prompt"], computed["drawn"]) == (PROMPT_TOKENS, 1)
    answered = fleet.engines[said["decode_worker"]].asked()[-1]
    assert (answered["prompt"], answered["drawn"]) == (PROMPT_TOKENS, 8)
    # The one tells the other where the KV is, and that computes the last token of the prompt alone.
    assert answered["body"]["kv_transfer_params"] == computed["kept"]
    assert answered["cached"] == PROMPT_TOKENS - 1
    assert answered["salt"] == computed["salt"]


async def test_prompts_go_where_their_blocks_are(fleet: FakeFleet) -> None:
    for number in range(1, 4):
        ids, after = prompt(number), await fleet.last_seq()
        cold = await fleet.ask(ids)
        await fleet.stored(after, cold["prefill_worker"], PROMPT_BLOCKS)
        again = await fleet.ask([*ids[:2_570], *prompt(100 + number, 10)])
        assert again["prefill_worker"] == cold["prefill_worker"]
        assert again["usage"]["cached_tokens"] == 2_560
        assert fleet.engines[cold["prefill_worker"]].asked()[-1]["cached"] == 2_560


async def test_connectors_that_name_no_place_and_those_that_take_names(fleet: FakeFleet) -> None:
    fleet.fault("connector", on=False)
    said = await fleet.ask(prompt(5))
    assert said["token_ids"] == answer(prompt(5), 4)
    assert "kv_transfer_params" not in fleet.engines[said["decode_worker"]].asked()[-1]["body"]

    # The first prompt shows what kind it is. Then the decode engine has a prompt while the other one computes it.
    fleet.fault("connector", on=True, names=True)
    with fleet.refusing(503, PREFILL[1]):
        assert (await fleet.ask(prompt(60)))["token_ids"] == answer(prompt(60), 4)
        fleet.engines[PREFILL[0]].fault("hold", after=0)
        ids, after = prompt(61, 2_600), await fleet.last_seq()
        answering = asyncio.ensure_future(fleet.ask(ids, 8))
        at = await asking(fleet, DECODE, len(ids))
        assert fleet.engines[PREFILL[0]].asked()[-1]["end"] == ""
        assert await fleet.told(after, DecodeStarted, at) == []
        fleet.engines[PREFILL[0]].fault("let go")
        said = await within(answering, "it is answered")
    assert (said["token_ids"], said["decode_worker"]) == (answer(ids, 8), at)
    computed, answered = fleet.engines[PREFILL[0]].asked()[-1], fleet.engines[at].asked()[-1]
    assert answered["body"]["kv_transfer_params"] == computed["kept"]
    assert computed["body"]["kv_transfer_params"]["halfmoon_order"] == computed["kept"]["halfmoon_order"]
    assert (answered["cached"], answered["drawn"]) == (len(ids) - 1, 8)

    # One that takes names no more: what was promised of the next prompt is not there, and is asked for as usual.
    fleet.fault("connector", on=True)
    with fleet.refusing(503, PREFILL[1]):
        said = await fleet.ask(prompt(62))
    assert said["token_ids"] == answer(prompt(62), 4)
    early, again = fleet.engines[said["decode_worker"]].asked()[-2:]
    assert (early["end"], again["cached"]) == ("not fetched", PROMPT_TOKENS - 1)


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_decode_engine_that_refuses_the_place_computes_the_prompt(
    fleet: FakeFleet, status: int, streamed: bool
) -> None:
    after, ids = await fleet.last_seq(), prompt(status + streamed)
    with fleet.refusing(status, *DECODE, lent_only=True, streamed=streamed):
        said = await fleet.ask(ids)
    assert said["token_ids"] == answer(ids, 4)
    assert "kv_transfer_params" not in fleet.engines[said["decode_worker"]].asked()[-1]["body"]
    assert await fleet.told(after, DecodeFailed, said["decode_worker"]) == []


async def test_a_decode_engine_that_takes_nothing_now_leaves_it_to_another(fleet: FakeFleet) -> None:
    for number, (busy, free) in enumerate([DECODE, DECODE[::-1]]):
        with fleet.refusing(503, busy):
            said = await fleet.ask(prompt(6 + number))
        assert (said["decode_worker"], said["token_ids"]) == (free, answer(prompt(6 + number), 4))


async def test_kv_that_is_gone_before_the_other_engine_has_it_is_computed(fleet: FakeFleet) -> None:
    fleet.fault("lose lent", on=True)
    said = await fleet.ask(prompt(9))
    fleet.fault("lose lent", on=False)
    assert said["token_ids"] == answer(prompt(9), 4)
    assert "the engine cannot have a prompt's KV" in fleet.cluster.output(said["decode_worker"])
    told, again = fleet.engines[said["decode_worker"]].asked()[-2:]
    assert (told["end"], told["drawn"], again["drawn"]) == ("not fetched", 0, 4)


async def test_a_prefill_engine_that_dies_in_its_half(fleet: FakeFleet) -> None:
    ids, after = prompt(10, 2_590), await fleet.last_seq()
    fleet.fault("hold", after=0)
    answering = asyncio.ensure_future(fleet.ask(ids))
    at = await asking(fleet, PREFILL, len(ids))
    fleet.engines[at].kill()
    for other in fleet.engines:
        if other != at:
            fleet.engines[other].fault("let go")
    said = await within(answering, "another one computes it")
    assert (said["token_ids"], said["prefill_worker"]) == (answer(ids, 4), OTHER[at])
    fleet.engines[at].start()
    await fleet.joined(after, at)


async def test_a_decode_engine_that_dies_in_mid_answer_costs_no_token(fleet: FakeFleet) -> None:
    ids, after = prompt(11, 2_591), await fleet.last_seq()
    fleet.fault("hold", after=5)
    answering = asyncio.ensure_future(fleet.ask(ids, 300))
    at = await fleet.drawing(after)
    assert at in DECODE
    other = fleet.engines[OTHER[at]]
    other.fault("let go")
    fleet.engines[at].kill()
    said = await within(answering, "the answer goes on elsewhere")
    assert (said["token_ids"], said["decode_worker"]) == (answer(ids, 300), OTHER[at])
    # What its client had was part of the prompt in both halves.
    begun = other.asked()[-1]
    (computed,) = [
        one
        for name in PREFILL
        for one in fleet.engines[name].asked()
        if one["prompt"] == begun["prompt"] > len(ids)
    ]
    assert begun["body"]["kv_transfer_params"] == computed["kept"]
    for name in PREFILL:
        fleet.engines[name].fault("let go")
    fleet.engines[at].start()
    await fleet.joined(after, at)


async def test_a_decode_adapter_that_is_killed_costs_no_token(fleet: FakeFleet) -> None:
    ids, after = prompt(12, 2_592), await fleet.last_seq()
    for name in DECODE:
        fleet.engines[name].fault("hold", after=5)
    answering = asyncio.ensure_future(fleet.ask(ids, 300))
    at = await fleet.drawing(after)
    fleet.cluster.kill(at)
    fleet.engines[OTHER[at]].fault("let go")
    said = await within(answering, "the answer goes on elsewhere")
    assert said["token_ids"] == answer(ids, 300)
    fleet.engines[at].fault("let go")
    await fleet.joined(after, at)


@pytest.mark.parametrize(
    ("names", "held", "lost", "asked"), [(PREFILL, 0, False, 0), (DECODE, 2, False, 1), (DECODE, 2, True, 2)]
)
async def test_a_cancelled_request_ends_at_the_engine_that_has_it(
    fleet: FakeFleet, names: tuple[str, ...], held: int, lost: bool, asked: int
) -> None:
    """`lost`: the decode engine did not get the KV, and has been asked once more."""
    ids, after = prompt(13, 2_593 + asked), await fleet.last_seq()
    fleet.fault("lose lent", on=lost)
    for name in names:
        fleet.engines[name].fault("hold", after=held)
    answering = asyncio.ensure_future(fleet.ask(ids, 500))
    engine = fleet.engines[await (fleet.drawing(after) if held else asking(fleet, names, len(ids)))]
    await cancel(fleet, answering)
    await eventually(lambda: engine.asked()[-1]["end"] == "aborted", "the engine drops it")
    assert engine.asked()[-1]["prompt"] == len(ids)
    fleet.fault("let go")
    fleet.fault("lose lent", on=False)
    # The half that had not begun never does.
    assert (await fleet.ask(prompt(14)))["token_ids"] == answer(prompt(14), 4)
    decoding = [one for name in DECODE for one in fleet.engines[name].asked()]
    assert sum(one["prompt"] == len(ids) for one in decoding) == asked


async def test_the_log_replays_and_no_kv_is_planned_to_move(fleet: FakeFleet, tmp_path: Path) -> None:
    """Last of the module: the log has all of the above."""
    said = await fleet.ask(prompt(50))
    replayed(fleet.cluster, tmp_path)
    text = explained(tmp_path / "run.jsonl.zst", said["id"])
    assert [name for name in (*PREFILL, *DECODE) if name not in text] == [], text
    orders = [one.decision for one in await fleet.cluster.decisions()]
    halves = [order for order in orders if isinstance(order, StartPrefill)]
    assert halves
    assert [order for order in halves if order.fetches or order.stages or order.reference] == []
    assert {type(order) for order in orders} <= {
        StartPrefill,
        StartDecode,
        CancelOrder,
        ReleaseOrder,
        AnnounceYourself,
    }
