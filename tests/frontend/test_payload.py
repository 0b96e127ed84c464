"""Nothing that the log or the workers must be told is longer than NATS carries: refused by its field before it is
accepted, or cut.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from frontend_double import ANSWER

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.bus.errors import BusOverloaded, BusUnreachable, PeerError
from halfmoon.schemas.codec import encode
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.keys import pack_tokens
from halfmoon.schemas.sampling import Sampling
from halfmoon.schemas.store import LeaseBlocks, Leased, PutOpened
from halfmoon.schemas.tokens import (
    ProcessError,
    ResendReply,
    TakeReply,
    TakeRequest,
    TokensGiven,
    carried_tokens,
)
from halfmoon.schemas.types import BLOCKS_MAX
from tests.eventually import BOUND_S

PAYLOAD = 1 << 20
CONTEXT = 400_000


def prompt(tokens: int) -> list[int]:
    return [7] * tokens


@pytest.mark.pure
@pytest.mark.parametrize("block_tokens", [1, 16, 256, 4096])
@pytest.mark.parametrize("payload", [PAYLOAD, 8 << 20])
def test_a_request_that_fits_fits_in_each_of_its_messages(block_tokens: int, payload: int) -> None:
    tokens = carried_tokens(payload, block_tokens)
    blocks = tokens // block_tokens
    assert blocks <= BLOCKS_MAX
    keys = b"\xff" * 16 * blocks
    slots = list(range(2**31 - 1 - blocks, 2**31 - 1))
    biases = {10_000 + token: -99.123456789012345 for token in range(1024)}
    taken = TakeReply(
        token_ids=pack_tokens(prompt(tokens // 2)),
        output_ids=pack_tokens(prompt(tokens - tokens // 2)),
        block_keys=keys,
        root_key=b"\xff" * 16,
        tenant="t" * 128,
        sampling=Sampling(
            logit_bias=biases, stop_token_ids=list(range(50_000, 50_064)), temperature=0.1234567
        ),
    )
    messages = [
        TokensGiven(frontend_id="f" * 64, order_id="o" * 80, taken=taken),
        LeaseBlocks(order_id="o", party="p", block_keys=keys, first_block=0),
        Leased(incarnation="i", slots=slots, checksums=[2**64 - 1] * blocks),
        PutOpened(slots=slots, epochs=slots, present=slots, incarnation="i", lease_ttl_ns=1),
    ]
    assert max(len(encode(message)) for message in messages) <= payload
    assert carried_tokens(100, block_tokens) == 0


@pytest.mark.pure
def test_a_prompt_that_no_message_would_carry_is_refused_by_its_field(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        carried = carried_tokens(PAYLOAD, 16)
        assert carried < CONTEXT
        _, _, models = await cluster.http_get("/v1/models")
        assert orjson.loads(models)["data"][0]["max_model_len"] == carried
        for body, field in (
            ({"prompt": prompt(carried)}, "prompt"),
            ({"prompt": prompt(300_000)}, "prompt"),
            ({"prompt": prompt(100), "max_tokens": carried}, "max_tokens"),
        ):
            status, _, answer = await cluster.post("/v1/completions", body)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded"), answer
            assert answer["error"]["param"] == field
            assert "max_payload" in answer["error"]["message"]
        status, _, answer = await cluster.post(
            "/v1/completions", {"prompt": prompt(carried - 200), "max_tokens": 200}
        )
        assert (status, answer["choices"][0]["text"]) == (200, ANSWER)
        assert len(await cluster.double.wait_for(RequestArrived, 1)) == 1

    run(scenario, context_tokens=CONTEXT)


@pytest.mark.pure
def test_a_log_that_takes_nothing_more_is_a_503_and_nothing_is_left_open(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        registry = cluster.frontend.registry
        stored = registry.bus.append_soon

        def full(*_: Any, **__: Any) -> None:
            raise BusOverloaded("100000 messages wait for their acknowledgement")

        registry.bus.append_soon = full
        body = {"prompt": "Once", "request_id": "mine"}
        for _ in range(2):  # its name was not taken
            status, headers, answer = await cluster.post("/v1/completions", body)
            assert (status, answer["error"]["code"]) == (503, "log_not_stored")
            assert "retry-after" in headers
        assert not registry.requests
        registry.bus.append_soon = stored
        status, _, _ = await cluster.post("/v1/completions", body)
        assert status == 200

    run(scenario)


@pytest.mark.pure
def test_an_answer_over_nats_that_is_too_large_says_so(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        text = "a " * 450_000
        headers, answer = await cluster.ask("tokenize", {"prompt": text})
        assert (headers["Nats-Service-Error-Code"], answer["error"]["code"]) == ("413", "answer_too_large")
        _, _, answer = await cluster.post("/tokenize", {"prompt": text})
        assert answer["count"] > 400_000

    run(scenario)


@pytest.mark.pure
def test_what_a_process_answers_and_nats_does_not_carry_is_an_error_to_who_asks(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        bus = cluster.double.bus
        await bus.serve(
            "halfmoon.take.f.large", TakeRequest, lambda _: ProcessError(code="x", message="x" * PAYLOAD)
        )
        ask = TakeRequest(request_id="r", order_id="1-0", worker_id="large", role="decode")
        with pytest.raises(PeerError, match="answer_too_large"):
            await bus.request("halfmoon.take.f.large", ask, TakeReply, timeout_s=BOUND_S)

    run(scenario)


@pytest.mark.pure
def test_tokens_that_come_in_parts_are_asked_for_until_all_are_there(run: Any) -> None:
    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        ids, reason = double.output(arrived)
        order_id = f"{seq}-0"

        def part(request: Any) -> ResendReply:
            end = request.index + 5
            delivery = double.delivery(
                arrived, order_id, request.index, ids[request.index : end], reason if end >= len(ids) else ""
            )
            return ResendReply(known=True, delivery=delivery, more=end < len(ids))

        double.resend = part
        await double.place(arrived, order_id)
        await double.deliver(double.delivery(arrived, order_id, 0, ids[:4]))

    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        _, _, answer = await cluster.post("/v1/completions", {"prompt": "Once", "max_tokens": 200})
        assert answer["choices"][0]["text"] == ANSWER
        indices = [request.index for request in cluster.double.resend_requests]
        assert indices == list(range(4, len(cluster.double.answer_ids), 5)), "one silence, then at once"

    run(scenario, resend_after_ns=10**9)


def test_a_server_that_carries_too_little_is_refused_in_one_line(tmp_path: Any) -> None:
    server = EmbeddedServer.start(tmp_path, max_payload_bytes=PAYLOAD - 1)
    try:
        with pytest.raises(BusUnreachable, match="max_payload is 1048575 bytes; it must be at least 1048576"):
            asyncio.run(Bus.connect(BusConfig(url=server.url), name="x"))
    finally:
        server.stop()
