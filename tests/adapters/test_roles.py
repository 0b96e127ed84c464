"""A cluster over engines that do one half each: two prefill, two decode, and the KV between them is theirs. vLLMs are
asked one after the other, or both at once where their connector takes names; SGLangs both at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
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
from tests.adapters.harness import HALVES, FakeEngine, halves
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, Cluster, running
from tests.eventually import eventually, within

VLLM_ONLY = pytest.mark.parametrize("pairs", ["vllm"], indirect=True)


@pytest.fixture(scope="module", params=list(HALVES))
def pairs(request: pytest.FixtureRequest) -> Iterator[tuple[list[FakeEngine], list[str]]]:
    """Two that prefill, two that decode."""
    with halves(request.param, 2, "--token-us", "100", "--blocks", "4096") as found:
        yield found


@pytest.fixture(scope="module")
def engines(pairs: tuple[list[FakeEngine], list[str]]) -> list[FakeEngine]:
    return pairs[0]


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, pairs: tuple[list[FakeEngine], list[str]]
) -> Iterator[Cluster]:
    flags = pairs[1]
    patient = (*PATIENT, "--worker-wait-s", "600")
    with running(tmp_path_factory.mktemp("fleet"), *flags, "--dtype", "float32", *patient) as one:
        yield one


class Halves(FakeFleet):
    """The names of its engines, by what they do."""

    @property
    def prefill(self) -> list[str]:
        return self.names[:2]

    @property
    def decode(self) -> list[str]:
        return self.names[2:]

    def other(self, at: str) -> str:
        (name,) = {*(self.prefill if at in self.prefill else self.decode)} - {at}
        return name

    def asked_of(self, names: Sequence[str], prompt_tokens: int) -> list[dict[str, Any]]:
        """What these were asked of prompts of so many tokens."""
        asked = [one for name in names for one in self.engines[name].asked()]
        return [one for one in asked if one["prompt"] == prompt_tokens]


@pytest.fixture
async def fleet(cluster: Cluster, engines: list[FakeEngine]) -> AsyncIterator[Halves]:
    nc = await cluster.connect()
    yield Halves(cluster, engines, nc)
    await nc.close()


def told_of(asked: dict[str, Any]) -> dict[str, Any]:
    """Where the prompt's KV is, as the engine that answers was told."""
    body = asked["body"]
    return body.get("kv_transfer_params") or {
        name: each for name, each in body.items() if "bootstrap" in name
    }


def lent(asked: dict[str, Any]) -> dict[str, Any]:
    """The same, by the engine that has computed it."""
    return asked.get("kept") or told_of(asked)


async def asking(fleet: Halves, names: Sequence[str], prompt_tokens: int) -> str:
    """The one of these engines that is busy with a prompt of so many tokens."""

    def found() -> str:
        for at in names:
            asked = fleet.engines[at].asked()
            if any((one["prompt"], one["end"]) == (prompt_tokens, "") for one in asked):
                return at
        return ""

    return await eventually(found, "an engine is asked", every_s=0.05)


async def cancel(fleet: Halves, answering: asyncio.Future[Any]) -> None:
    placed = [
        one.decision for one in await fleet.cluster.decisions() if isinstance(one.decision, StartPrefill)
    ]
    named = msgspec.json.encode({"id": placed[-1].request_id})
    await within(fleet.nc.request(f"{subjects.API}.cancel", named, timeout=100), "the cancel is answered")
    await within(asyncio.gather(answering, return_exceptions=True), "its client is told")


async def test_one_engine_computes_the_prompt_and_another_one_answers(fleet: Halves) -> None:
    ids = prompt(0)
    said = await fleet.ask(ids, 8)
    assert said["token_ids"] == answer(ids, 8)
    assert (said["prefill_worker"] in fleet.prefill, said["decode_worker"] in fleet.decode) == (True, True)
    computed = fleet.engines[said["prefill_worker"]].asked()[-1]
    assert (computed["prompt"], computed["drawn"]) == (PROMPT_TOKENS, 1)
    answered = fleet.engines[said["decode_worker"]].asked()[-1]
    assert (answered["prompt"], answered["drawn"]) == (PROMPT_TOKENS, 8)
    # The one tells the other where the KV is, and that computes the last token of the prompt alone.
    assert told_of(answered) == lent(computed) != {}
    assert answered["cached"] == PROMPT_TOKENS - 1
    assert answered["salt"] == computed["salt"]


async def test_prompts_go_where_their_blocks_are(fleet: Halves) -> None:
    for number in range(1, 4):
        ids, after = prompt(number), await fleet.last_seq()
        cold = await fleet.ask(ids)
        await fleet.stored(after, cold["prefill_worker"], PROMPT_BLOCKS)
        again = await fleet.ask([*ids[:2_570], *prompt(100 + number, 10)])
        assert again["prefill_worker"] == cold["prefill_worker"]
        assert again["usage"]["cached_tokens"] == 2_560
        assert fleet.engines[cold["prefill_worker"]].asked()[-1]["cached"] == 2_560


@VLLM_ONLY
async def test_connectors_that_name_no_place_and_those_that_take_names(fleet: Halves) -> None:
    fleet.fault("connector", on=False)
    said = await fleet.ask(prompt(5))
    assert said["token_ids"] == answer(prompt(5), 4)
    assert "kv_transfer_params" not in fleet.engines[said["decode_worker"]].asked()[-1]["body"]

    # The first prompt shows what kind it is. Then the decode engine has a prompt while the other one computes it.
    fleet.fault("connector", on=True, names=True)
    with fleet.refusing(503, fleet.prefill[1]):
        assert (await fleet.ask(prompt(60)))["token_ids"] == answer(prompt(60), 4)
        fleet.engines[fleet.prefill[0]].fault("hold", after=0)
        ids, after = prompt(61, 2_600), await fleet.last_seq()
        answering = asyncio.ensure_future(fleet.ask(ids, 8))
        at = await asking(fleet, fleet.decode, len(ids))
        assert fleet.engines[fleet.prefill[0]].asked()[-1]["end"] == ""
        assert await fleet.told(after, DecodeStarted, at) == []
        fleet.engines[fleet.prefill[0]].fault("let go")
        said = await within(answering, "it is answered")
    assert (said["token_ids"], said["decode_worker"]) == (answer(ids, 8), at)
    computed, answered = fleet.engines[fleet.prefill[0]].asked()[-1], fleet.engines[at].asked()[-1]
    assert answered["body"]["kv_transfer_params"] == computed["kept"]
    assert computed["body"]["kv_transfer_params"]["halfmoon_order"] == computed["kept"]["halfmoon_order"]
    assert (answered["cached"], answered["drawn"]) == (len(ids) - 1, 8)

    # One that takes names no more: what was promised of the next prompt is not there, and is asked for as usual.
    fleet.fault("connector", on=True)
    with fleet.refusing(503, fleet.prefill[1]):
        said = await fleet.ask(prompt(62))
    assert said["token_ids"] == answer(prompt(62), 4)
    early, again = fleet.engines[said["decode_worker"]].asked()[-2:]
    assert (early["end"], again["cached"]) == ("not fetched", PROMPT_TOKENS - 1)


@VLLM_ONLY
@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_decode_engine_that_refuses_the_place_computes_the_prompt(
    fleet: Halves, status: int, streamed: bool
) -> None:
    after, ids = await fleet.last_seq(), prompt(status + streamed)
    with fleet.refusing(status, *fleet.decode, lent_only=True, streamed=streamed):
        said = await fleet.ask(ids)
    assert said["token_ids"] == answer(ids, 4)
    assert "kv_transfer_params" not in fleet.engines[said["decode_worker"]].asked()[-1]["body"]
    assert await fleet.told(after, DecodeFailed, said["decode_worker"]) == []


async def test_a_decode_engine_that_takes_nothing_now_leaves_it_to_another(fleet: Halves) -> None:
    for number, (busy, free) in enumerate([fleet.decode, fleet.decode[::-1]]):
        with fleet.refusing(503, busy):
            said = await fleet.ask(prompt(6 + number))
        assert (said["decode_worker"], said["token_ids"]) == (free, answer(prompt(6 + number), 4))


async def test_kv_that_is_gone_before_the_other_engine_has_it_is_computed(fleet: Halves) -> None:
    """By the decode engine; of engines that are asked both at once, by another pair."""
    asked: list[dict[str, Any]] = []
    for number, lossy in enumerate(fleet.prefill):
        ids = prompt(9, 2_581 + number)
        fleet.engines[lossy].fault("lose lent", on=True)
        said = await fleet.ask(ids)
        fleet.engines[lossy].fault("lose lent", on=False)
        assert said["token_ids"] == answer(ids, 4)
        asked += fleet.asked_of(fleet.decode, len(ids))
        if fleet.engines[lossy].wire == "vllm" and said["prefill_worker"] == lossy:
            assert "the engine cannot have a prompt's KV" in fleet.cluster.output(said["decode_worker"])
        if fleet.engines[lossy].wire == "sglang":
            assert said["prefill_worker"] != lossy
    ends = [(one["end"], one["drawn"]) for one in asked]
    assert ends.count(("length", 4)) == 2
    lost = {*ends} - {("length", 4)}
    assert lost
    # Of two engines that are asked at once both fail, and who is heard of first has the other one's request aborted.
    aborted = {("aborted", 0)} if "sglang" in {engine.wire for engine in fleet.engines.values()} else set()
    assert lost <= {("not fetched", 0)} | aborted


async def test_a_prefill_engine_that_dies_in_its_half(fleet: Halves) -> None:
    ids, after = prompt(10, 2_590), await fleet.last_seq()
    fleet.fault("hold", after=0)
    answering = asyncio.ensure_future(fleet.ask(ids))
    at = await asking(fleet, fleet.prefill, len(ids))
    fleet.engines[at].kill()
    for other in fleet.engines:
        if other != at:
            fleet.engines[other].fault("let go")
    said = await within(answering, "another one computes it")
    assert (said["token_ids"], said["prefill_worker"]) == (answer(ids, 4), fleet.other(at))
    fleet.engines[at].start()
    await fleet.joined(after, at)


async def test_a_decode_engine_that_dies_in_mid_answer_costs_no_token(fleet: Halves) -> None:
    ids, after = prompt(11, 2_591), await fleet.last_seq()
    fleet.fault("hold", after=5)
    answering = asyncio.ensure_future(fleet.ask(ids, 300))
    at = await fleet.drawing(after)
    assert at in fleet.decode
    other = fleet.engines[fleet.other(at)]
    other.fault("let go")
    fleet.engines[at].kill()
    said = await within(answering, "the answer goes on elsewhere")
    assert (said["token_ids"], said["decode_worker"]) == (answer(ids, 300), fleet.other(at))
    # What its client had was part of the prompt in both halves.
    begun = other.asked()[-1]
    assert begun["prompt"] > len(ids)
    (computed,) = fleet.asked_of(fleet.prefill, begun["prompt"])
    assert told_of(begun) == lent(computed) != {}
    for name in fleet.prefill:
        fleet.engines[name].fault("let go")
    fleet.engines[at].start()
    await fleet.joined(after, at)


async def test_a_decode_adapter_that_is_killed_costs_no_token(fleet: Halves) -> None:
    ids, after = prompt(12, 2_592), await fleet.last_seq()
    for name in fleet.decode:
        fleet.engines[name].fault("hold", after=5)
    answering = asyncio.ensure_future(fleet.ask(ids, 300))
    at = await fleet.drawing(after)
    fleet.cluster.kill(at)
    fleet.engines[fleet.other(at)].fault("let go")
    said = await within(answering, "the answer goes on elsewhere")
    assert said["token_ids"] == answer(ids, 300)
    fleet.engines[at].fault("let go")
    await fleet.joined(after, at)


@pytest.mark.parametrize(
    ("half", "held", "lost"), [("prefill", 0, False), ("decode", 2, False), ("decode", 3, True)]
)
async def test_a_cancelled_request_ends_at_the_engine_that_has_it(
    fleet: Halves, half: str, held: int, lost: bool
) -> None:
    """`lost`: the decode engine did not get the KV, and where it can compute the prompt has been asked once more."""
    both_at_once = fleet.engines[fleet.decode[0]].wire == "sglang"
    lost = lost and not both_at_once
    names = fleet.prefill if half == "prefill" else fleet.decode
    ids, after = prompt(13, 2_610 + held), await fleet.last_seq()

    def ends() -> list[str]:
        return [one["end"] for one in fleet.asked_of(fleet.decode, len(ids))]

    fleet.fault("lose lent", on=lost)
    for name in names:
        fleet.engines[name].fault("hold", after=held)
    answering = asyncio.ensure_future(fleet.ask(ids, 500))
    engine = fleet.engines[await (fleet.drawing(after) if held else asking(fleet, names, len(ids)))]
    if both_at_once and not held:
        await asking(fleet, fleet.decode, len(ids))
    await cancel(fleet, answering)
    await eventually(lambda: engine.asked()[-1]["end"] == "aborted", "the engine drops it")
    assert engine.asked()[-1]["prompt"] == len(ids)
    fleet.fault("let go")
    fleet.fault("lose lent", on=False)
    # The half that had not begun never does, and one that waits for the other does not go on.
    assert (await fleet.ask(prompt(14)))["token_ids"] == answer(prompt(14), 4)
    await eventually(lambda: "" not in ends(), "nothing of it is left where answers are drawn")
    assert ends() == ["not fetched"] * lost + ["aborted"] * (both_at_once or half == "decode")


async def test_the_log_replays_and_no_kv_is_planned_to_move(fleet: Halves, tmp_path: Path) -> None:
    """Last of the module: the log has all of the above."""
    said = await fleet.ask(prompt(50))
    replayed(fleet.cluster, tmp_path)
    text = explained(tmp_path / "run.jsonl.zst", said["id"])
    assert [name for name in fleet.names if name not in text] == [], text
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
