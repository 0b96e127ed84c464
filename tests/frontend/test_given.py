"""The frontend hears where its requests are placed and gives both workers the tokens before they ask."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from halfmoon.bus.errors import PeerError
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import Ordered, StartDecode, StartPrefill
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.keys import unpack_tokens
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.sampling import Sampling
from halfmoon.schemas.tokens import DecodeGiven, TakeReply, TakeRequest, TokensGiven, TokensSampled
from halfmoon.workers import token_inbox
from halfmoon.workers.frontend import token_exchange
from halfmoon.workers.frontend.edges.nats_service import settled
from halfmoon.workers.token_inbox import TokenInbox
from tests.eventually import BOUND_S, eventually

BODY = {"prompt": "Once upon a time", "max_tokens": 5}
LONG_TOKENS = 1100


def placement(arrived: RequestArrived, order_id: str) -> StartPrefill:
    return StartPrefill(
        order_id=order_id,
        request_id=arrived.request_id,
        frontend_id=arrived.frontend_id,
        worker_id="p1",
        decode_worker_id="d1",
        decode_node_id="n2",
        prompt_tokens=arrived.prompt_tokens,
    )


async def place(double: Any, arrived: RequestArrived, seq: int) -> None:
    ordered = Ordered(cause_seq=seq, position=0, decision=placement(arrived, f"{seq}-0"))
    await double.bus.order(ordered, target_id="p1")


@pytest.mark.pure
def test_both_workers_of_a_placement_are_given_the_tokens_once(run: Any) -> None:
    given: list[tuple[str, TokensGiven]] = []

    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        for worker_id in ("p1", "d1"):
            await double.bus.subscribe(
                subjects.give(worker_id, arrived.frontend_id),
                TokensGiven,
                lambda m, w=worker_id: given.append((w, m)),
            )
        await double.bus.last_seq()  # an answered request: the server has the subscriptions
        await place(double, arrived, seq)
        await place(double, arrived, seq)  # another conductor's copy
        await eventually(lambda: len(given) == 2, "both are given tokens")
        await double.deliver(double.delivery(arrived, f"{seq}-0", 0, double.answer_ids[:5], "length"))

    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        status, _, answer = await cluster.post("/v1/completions", BODY)
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 5
        assert sorted(worker_id for worker_id, _ in given) == ["d1", "p1"]
        (arrived,) = await cluster.double.wait_for(RequestArrived)
        for _, message in given:
            assert len(unpack_tokens(message.taken.token_ids)) == arrived.prompt_tokens
            assert message.taken.max_tokens == 5
            assert not message.taken.gone

    run(scenario)


@pytest.mark.pure
def test_keys_are_given_for_the_weights_of_the_order_and_those_that_follow_are_of_them(run: Any) -> None:
    given: list[TokensGiven] = []
    versions = iter(["", "v2", "v2"])

    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        if not given:
            await double.bus.subscribe(subjects.give("p1", arrived.frontend_id), TokensGiven, given.append)
            await double.bus.last_seq()
        had, order = len(given), placement(arrived, f"{seq}-0")
        order = msgspec.structs.replace(order, weight_version=next(versions))
        await double.bus.order(Ordered(cause_seq=seq, position=0, decision=order), target_id="p1")
        await eventually(lambda: len(given) > had, "tokens are given")
        await double.deliver(double.delivery(arrived, f"{seq}-0", 0, double.answer_ids[:5], "length"))

    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        for _ in range(3):
            status, _, _ = await cluster.post("/v1/completions", {**BODY, "prompt": list(range(600))})
            assert status == 200
        arrived = await cluster.double.wait_for(RequestArrived, 3)
        assert [one.weight_version for one in arrived] == ["", "", "v2"]
        taken = [one.taken for one in given]
        assert [one.weight_version for one in taken] == ["", "v2", "v2"]
        # The second one's own keys were of the weights before; it was given those that the third one came with.
        assert arrived[0].block_keys == arrived[1].block_keys == taken[0].block_keys
        assert taken[1].block_keys == taken[2].block_keys == arrived[2].block_keys != taken[0].block_keys
        assert taken[1].root_key == taken[2].root_key != taken[0].root_key

    run(scenario)


@pytest.mark.pure
@pytest.mark.parametrize(("penalty", "named"), [(1.0, False), (1.5, False), (1.0, True)])
def test_a_long_prompts_tokens_go_to_the_decode_worker_only_where_it_needs_them(
    run: Any, penalty: float, named: bool
) -> None:
    """`named`: it names the blocks that it generates by all tokens before them."""
    given: dict[str, TokensGiven | DecodeGiven] = {}

    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        for worker_id in ("p1", "d1"):
            await double.bus.subscribe(
                subjects.give(worker_id, arrived.frontend_id),
                TokensGiven | DecodeGiven,
                lambda message, worker_id=worker_id: given.update({worker_id: message}),
            )
        await double.bus.last_seq()
        await place(double, arrived, seq)
        await eventually(lambda: len(given) == 2, "both are given what they need")
        asked = await double.take(arrived, f"{seq}-0", "decode", "d1")
        assert asked == given["p1"].taken, "who asks gets all"
        await double.deliver(double.delivery(arrived, f"{seq}-0", 0, double.answer_ids[:5], "length"))

    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        cluster.frontend.registry.exchange._prompts_to_decode = named
        prompt = [1 + number % 50 for number in range(LONG_TOKENS)]
        body = {"prompt": prompt, "max_tokens": 5, "repetition_penalty": penalty}
        status, _, _ = await cluster.post("/v1/completions", body)
        assert status == 200
        whole = given["p1"]
        assert unpack_tokens(whole.taken.token_ids) == prompt
        without = msgspec.structs.replace(whole.taken, token_ids=b"")
        needs = named or penalty != 1.0
        assert given["d1"] == (
            whole
            if needs
            else DecodeGiven(frontend_id=whole.frontend_id, order_id=whole.order_id, taken=without)
        )

    run(scenario)


@pytest.mark.pure
def test_a_decode_worker_that_goes_on_is_given_the_tokens_and_what_the_client_has(run: Any) -> None:
    given: list[TokensGiven] = []

    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        await double.bus.subscribe(subjects.give("d2", arrived.frontend_id), TokensGiven, given.append)
        await double.place(arrived, f"{seq}-0")
        await double.deliver(double.delivery(arrived, f"{seq}-0", 0, double.answer_ids[:2]))
        order = StartDecode(
            order_id=f"{seq + 1}-0",
            request_id=arrived.request_id,
            frontend_id=arrived.frontend_id,
            worker_id="d2",
            prefill_worker_id="p1",
            prompt_tokens=arrived.prompt_tokens,
            max_tokens=5,
            tbt_slo_ns=0,
            resumes=f"{seq}-0",
        )
        await double.bus.order(Ordered(cause_seq=seq + 1, position=0, decision=order), target_id="d2")
        await eventually(lambda: given, "tokens are given")
        # Nothing is computed anew, and who is gone has no more to say.
        with pytest.raises(PeerError) as caught:
            await double.take(arrived, f"{seq + 1}-0", "prefill", "p1")
        assert caught.value.code == "not_placed"
        await double.deliver(double.delivery(arrived, f"{seq}-0", 2, double.answer_ids[5:8], "length"))
        last = double.delivery(arrived, f"{seq + 1}-0", 2, double.answer_ids[2:5], "length")
        await double.deliver(last, worker_id="d2")

    async def scenario(cluster: Any) -> None:
        await is_answered(cluster, script)
        assert unpack_tokens(given[0].taken.output_ids) == cluster.double.answer_ids[:2]

    run(scenario)


@pytest.mark.pure
def test_after_a_second_placement_the_first_is_given_nothing_more(run: Any) -> None:
    given: list[TokensGiven] = []

    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        await double.bus.subscribe(subjects.give("p1", arrived.frontend_id), TokensGiven, given.append)
        await double.bus.last_seq()
        await place(double, arrived, seq + 7)
        await eventually(lambda: given, "tokens are given")
        await place(double, arrived, seq)  # older
        await place(double, arrived, seq + 8)
        await eventually(lambda: len(given) == 2, "both are given tokens")
        assert [message.order_id for message in given] == [f"{seq + 7}-0", f"{seq + 8}-0"]
        assert (await double.take(arrived, f"{seq + 7}-0", "prefill", "p1")).gone
        await double.deliver(double.delivery(arrived, f"{seq + 8}-0", 0, double.answer_ids[:5], "length"))

    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        status, _, _ = await cluster.post("/v1/completions", BODY)
        assert status == 200
        assert len(given) == 2

    run(scenario)


@pytest.mark.pure
def test_a_worker_takes_what_was_given_early_or_late_and_asks_for_what_was_not(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(cluster: Any) -> None:
        bus = cluster.double.bus
        inbox = TokenInbox(bus, "p9")
        await inbox.open()
        await bus.last_seq()
        early = TakeReply(token_ids=b"\1\0\0\0", max_tokens=1)
        late = TakeReply(token_ids=b"\2\0\0\0", max_tokens=2)

        async def give(order_id: str, taken: TakeReply, frontend_id: str, as_id: str) -> None:
            given = TokensGiven(frontend_id=frontend_id, order_id=order_id, taken=taken)
            await cluster.client.publish(subjects.give("p9", as_id), given)

        await give("1-0", early, "nobody", "nobody")
        # Another frontend's credentials: it may say what it likes, in its own name.
        forged = TakeReply(token_ids=b"\4\0\0\0", max_tokens=4)
        for order_id in ("1-0", "2-0"):
            await give(order_id, forged, "f8", "f8")
            await give(order_id, forged, "nobody", "f8")
        await eventually(lambda: len(inbox._early) == 3, "three came early")
        assert await inbox.take("nobody", "r1", "1-0", "prefill") == early
        with monkeypatch.context() as patient:
            patient.setattr(token_inbox, "GIVE_S", BOUND_S)
            taking = asyncio.create_task(inbox.take("nobody", "r2", "2-0", "prefill"))
            await eventually(lambda: inbox._awaited, "it waits for what is given")
            await give("2-0", forged, "f8", "f8")
            await give("2-0", late, "nobody", "nobody")
            assert await taking == late
        assert bus.invalid == 2
        bus.invalid = 0

        asked = TakeReply(token_ids=b"\3\0\0\0", max_tokens=3)
        order: list[str] = []
        settle = token_inbox._settle

        def noted(awaited: asyncio.Future[TakeReply | None], taken: TakeReply | None) -> None:
            order.append("given" if taken is not None else "given up")
            settle(awaited, taken)

        def answer(_: object) -> TakeReply:
            order.append("asked for")
            return asked

        monkeypatch.setattr(token_inbox, "_settle", noted)
        await cluster.client.serve(subjects.take("f9", "p9"), object, answer)
        await cluster.client.last_seq()
        assert await inbox.take("f9", "r3", "3-0", "prefill") == asked
        assert order == ["given up", "asked for"]
        assert await inbox.take("nobody", "r4", "4-0", "decode") is None

    run(scenario)


@pytest.mark.pure
def test_who_needs_a_prompts_tokens_and_is_given_none_asks_at_once(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_inbox, "GIVE_S", BOUND_S)
    plain, penalty = TakeReply(max_tokens=1), TakeReply(sampling=Sampling(repetition_penalty=1.5))
    whole = TakeReply(token_ids=b"\3\0\0\0", max_tokens=3)

    async def scenario(cluster: Any) -> None:
        bus = cluster.double.bus
        await cluster.client.serve(subjects.take("f9", "*"), object, lambda _: whole)

        async def took(
            worker_id: str, inbox: TokenInbox, given: TakeReply, *, early: bool
        ) -> TakeReply | None:
            message = DecodeGiven(frontend_id="f9", order_id="1-0", taken=given)
            if early:
                await cluster.client.publish(subjects.give(worker_id, "f9"), message)
                await eventually(lambda: inbox._early, "it came before the order")
            taking = asyncio.create_task(inbox.take("f9", "r1", "1-0", "decode"))
            if not early:
                await eventually(lambda: inbox._awaited, "it waits for what is given")
                await cluster.client.publish(subjects.give(worker_id, "f9"), message)
            taken = await taking
            assert not inbox._early
            return taken

        for worker_id, needs_prompts in (("d8", False), ("d9", True)):
            inbox = TokenInbox(bus, worker_id, needs_prompts=needs_prompts)
            await inbox.open()
            await bus.last_seq()
            for early in (False, True):
                expected = whole if needs_prompts else plain
                assert await took(worker_id, inbox, plain, early=early) == expected
                assert await took(worker_id, inbox, penalty, early=early) == whole

    run(scenario)


async def is_answered(cluster: Any, script: Any) -> None:
    """A request gets the first five tokens of the double's answer."""
    cluster.double.script = script
    status, _, answer = await cluster.post("/v1/completions", BODY)
    assert status == 200
    assert answer["choices"][0]["text"] == cluster.double.tokenizer.decode(cluster.double.answer_ids[:5])


@pytest.mark.pure
def test_a_worker_that_no_conductor_named_is_told_nothing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stolen credential of a worker knows request ids: they are in the orders that every worker may read."""
    refused: list[str] = []

    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        order_id = f"{seq}-0"
        await double.place(arrived, order_id)
        monkeypatch.setattr(token_exchange, "_PLACED_NS_MAX", 0)  # whatever will be, was heard
        for order, role, thief in (
            (order_id, "decode", "d2"),
            (order_id, "prefill", "d1"),
            (order_id, "prefill", "p2"),
            (f"{seq + 1000}-0", "decode", "d2"),  # as if it were a newer placement
            (f"{seq + 1000}-0", "prefill", "p1"),
        ):
            with pytest.raises(PeerError) as caught:
                await double.take(arrived, order, role, thief)
            refused.append(caught.value.code)
        for thief in ("d2", "p1"):
            await double.deliver(
                double.delivery(arrived, order_id, 0, double.answer_ids[5:10], "length"), worker_id=thief
            )
        await double.deliver(double.delivery(arrived, order_id, 0, double.answer_ids[:5], "length"))

    async def scenario(cluster: Any) -> None:
        await is_answered(cluster, script)
        assert refused == ["not_placed"] * 3 + ["order_unknown"] * 2

    run(scenario)


@pytest.mark.pure
def test_a_worker_speaks_under_its_own_name_only(run: Any) -> None:
    """Who publishes is what NATS checks: a body that names another is dropped."""

    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        order_id = f"{seq}-0"
        await double.place(arrived, order_id)
        forged = TokensSampled(
            worker_id="d1",
            deliveries=[double.delivery(arrived, order_id, 0, double.answer_ids[5:10], "length")],
        )
        await double.bus.publish(subjects.tokens(arrived.frontend_id, "d2"), forged)
        ask = TakeRequest(request_id=arrived.request_id, order_id=order_id, worker_id="d1", role="decode")
        with pytest.raises(PeerError) as caught:
            await double.bus.request(
                subjects.take(arrived.frontend_id, "d2"), ask, TakeReply, timeout_s=BOUND_S
            )
        assert caught.value.code == "invalid_request"
        await double.deliver(double.delivery(arrived, order_id, 0, double.answer_ids[:5], "length"))

    async def scenario(cluster: Any) -> None:
        await is_answered(cluster, script)
        assert cluster.frontend.registry.bus.invalid == 2

    run(scenario)


@pytest.mark.pure
def test_a_worker_that_asks_before_the_frontend_has_heard_waits(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conductors tell both at once, and their messages may come by different servers."""
    monkeypatch.setattr(token_exchange, "_PLACED_NS_MAX", int(BOUND_S) * SECOND_NS)

    async def script(double: Any, seq: int, arrived: RequestArrived) -> None:
        asking = asyncio.create_task(double.take(arrived, f"{seq}-0", "prefill", "p1"))
        # Asked after it by the same connection, and answered at once.
        stranger = msgspec.structs.replace(arrived, request_id="nobody")
        assert (await asyncio.create_task(double.take(stranger, f"{seq}-0", "prefill", "p1"))).gone
        await settled(double.bus.nc)
        assert not asking.done()
        await place(double, arrived, seq)
        assert len(unpack_tokens((await asking).token_ids)) == arrived.prompt_tokens
        await double.deliver(double.delivery(arrived, f"{seq}-0", 0, double.answer_ids[:5], "length"))

    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        status, _, _ = await cluster.post("/v1/completions", BODY)
        assert status == 200

    run(scenario)
