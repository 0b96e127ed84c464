"""The edge for gateways, spoken to within the process, as Envoy speaks. The double is the adapter."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
import pytest
from frontend_double import MODEL, Cluster, Double

from halfmoon.schemas import subjects
from halfmoon.schemas.events import RequestArrived, RequestCancelled
from halfmoon.schemas.tokens import AnswerRelayed, EngineNamed, TakeReply
from halfmoon.workers.frontend.edges.ext_proc_edge import DESTINATION, ExtProcEdge
from halfmoon.workers.frontend.edges.ext_proc_messages import FULL_DUPLEX_STREAMED, ProcessingRequest
from halfmoon.workers.frontend.registry import RequestRegistry
from tests.eventually import eventually

pytestmark = pytest.mark.pure
ENGINE = "10.0.0.7:8000"
FIELDS = {
    "model": "theirs",
    "cache_salt": "s",
    "return_token_ids": True,
    # As long as a prompt has blocks.
    "kv_transfer_params": {"remote_block_ids": list(range(5_000))},
}
BODY = {"model": MODEL, "prompt": "Half moons", "max_tokens": 3, "stream": True, "temperature": 0}
LINES = [b'data: {"choices": [{"index": 0, "te', b'xt": "a", "token_ids": [7]}]}\n\ndata: [DONE]\n\n']


class Gateway:
    """One HTTP request through Envoy: what it says of it, and what it is told."""

    def __init__(self, edge: ExtProcEdge) -> None:
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self.told: AsyncGenerator[Any, None] = edge.process(self._heard())

    async def _heard(self) -> AsyncIterator[Any]:
        while (message := await self._said.get()) is not None:
            yield message

    def say(self, **fields: Any) -> None:
        self._said.put_nowait(ProcessingRequest(**fields))

    def ask(
        self,
        body: Any = BODY,
        path: str = "/v1/completions",
        *,
        method: str = "POST",
        headers: dict[str, str] | None = None,
        mode: int = FULL_DUPLEX_STREAMED,
        subset: str = "",
    ) -> None:
        """Head and body, that in two pieces; `body` None: there is none."""
        names = {":path": path, ":method": method, **(headers or {})}
        metadata = []
        if subset:
            value = {f"{DESTINATION}-subset": subset}
            metadata = [{"key": "envoy.lb.subset_hint", "value": value}]
        head = {"headers": _map(names), "end_of_stream": body is None}
        modes = {"request_body_mode": mode, "response_body_mode": mode}
        self.say(request_headers=head, protocol_config=modes, metadata_context={"filter_metadata": metadata})
        if body is not None:
            raw = body if isinstance(body, bytes) else orjson.dumps(body)
            self.say(request_body={"body": raw[:10]})
            self.say(request_body={"body": raw[10:], "end_of_stream": True})

    def answer(self, status: int, kind: str, *parts: bytes) -> None:
        """As the engine's, all of it."""
        self.say(response_headers={"headers": _map({":status": f"{status}", "content-type": kind})})
        for place, part in enumerate(parts):
            self.say(response_body={"body": part, "end_of_stream": place == len(parts) - 1})

    def leave(self) -> None:
        """Its client, or it, has gone."""
        self._said.put_nowait(None)

    async def hear(self) -> Any:
        return await anext(self.told)

    async def hear_engine(self) -> tuple[dict[str, str], list[str], Any]:
        """Headers that are set, those that are removed, and the body for the engine."""
        head, body = await self.hear(), await self.hear()
        changed = head.request_headers.response.header_mutation
        assert head.dynamic_metadata["envoy.lb"][DESTINATION] == ENGINE
        streamed = body.request_body.response.body_mutation.streamed_response
        assert streamed.end_of_stream
        set_headers = {each.header.key: each.header.raw_value.decode() for each in changed.set_headers}
        assert set_headers["content-length"] == f"{len(streamed.body)}"
        return set_headers, list(changed.remove_headers), orjson.loads(streamed.body)

    async def hear_refusal(self) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON and headers; the exchange is over then."""
        said = (await self.hear()).immediate_response
        headers = {each.header.key: each.header.raw_value.decode() for each in said.headers.set_headers}
        with pytest.raises(StopAsyncIteration):
            await self.hear()
        return said.status.code, orjson.loads(said.body), headers

    async def hear_end(self) -> list[Any]:
        return [each async for each in self.told]


def _map(headers: dict[str, str]) -> Any:
    return {"headers": [{"key": name, "raw_value": value.encode()} for name, value in headers.items()]}


class Adapter:
    """The double's script: the order's worker names its engine, and hears its answer."""

    def __init__(self) -> None:
        self.heard: list[AnswerRelayed] = []
        self.taken: list[TakeReply] = []
        self.named = asyncio.Event()

    async def listen(self, cluster: Cluster) -> None:
        await cluster.double.bus.subscribe(subjects.relay("d1", "*"), AnswerRelayed, self.heard.append)

    async def __call__(self, double: Double, seq: int, arrived: RequestArrived) -> None:
        await self.name(double, arrived, f"{seq}-0")

    async def name(self, double: Double, arrived: RequestArrived, order_id: str) -> None:
        self.taken.append(await double.place(arrived, order_id))
        named = EngineNamed(
            worker_id="d1",
            request_id=arrived.request_id,
            order_id=order_id,
            endpoint=ENGINE,
            fields=orjson.dumps(FIELDS).decode(),
            headers={"authorization": "Bearer theirs"},
        )
        await double.bus.publish(subjects.forward(arrived.frontend_id, "d1"), named)
        self.named.set()


Run = Callable[..., None]
Scenario = Callable[[Cluster, ExtProcEdge, Adapter], Awaitable[None]]


@pytest.fixture
def told(run: Run) -> Run:
    """`told(scenario)`: a cluster whose frontend has the edge, and whose worker is an adapter."""

    def run_scenario(scenario: Scenario, **options: Any) -> None:
        async def main(cluster: Cluster) -> None:
            edge = ExtProcEdge(cluster.frontend.registry)
            await edge.forwarded.start()
            cluster.double.script = adapter = Adapter()
            await adapter.listen(cluster)
            await scenario(cluster, edge, adapter)

        run(main, **options)

    return run_scenario


async def ended(registry: RequestRegistry) -> None:
    await eventually(lambda: not registry.requests, "no request is open")


async def ended_by(adapter: Adapter, cluster: Cluster) -> None:
    """What the adapter makes of an answer ends its request, and nothing else does."""
    assert len(cluster.frontend.registry.requests) == 1
    (arrived,) = await cluster.double.wait_for(RequestArrived)
    order_id = adapter.heard[0].order_id
    await cluster.double.deliver(cluster.double.delivery(arrived, order_id, 0, [7], "stop"))
    await ended(cluster.frontend.registry)
    assert not [each for each in cluster.double.events if isinstance(each, RequestCancelled)]


def test_the_gateway_learns_the_engine_and_its_adapter_the_answer(told: Run) -> None:
    async def scenario(cluster: Cluster, edge: ExtProcEdge, adapter: Adapter) -> None:
        gateway = Gateway(edge)
        # What a client says of KV in engines is left out.
        theirs = {
            "kv_transfer_params": {"remote_block_ids": [1]},
            "bootstrap_host": "6.6.6.6",
            "bootstrap_room": 7,
        }
        gateway.ask(
            {**BODY, **theirs, "stop": ["x"]}, headers={"x-override-bootstrap-room": "7", "x-mine": "1"}
        )
        headers, removed, body = await gateway.hear_engine()
        assert (headers[DESTINATION], headers["authorization"]) == (ENGINE, "Bearer theirs")
        assert removed == ["accept-encoding", "x-override-bootstrap-room"]
        assert body == {**BODY, "stop": ["x"], **FIELDS}
        (taken,) = adapter.taken
        assert taken.forwarded
        (request,) = cluster.frontend.registry.requests.values()
        assert request.answered_elsewhere
        assert taken.max_tokens == 3
        gateway.answer(200, "text/event-stream; charset=utf-8", *LINES)
        head, *parts = await gateway.hear_end()
        assert head.HasField("response_headers")
        passed = [each.response_body.response.body_mutation.streamed_response for each in parts]
        assert [each.body for each in passed] == LINES
        assert [each.end_of_stream for each in passed] == [False, True]
        await eventually(lambda: len(adapter.heard) == 2, "the adapter has heard it")
        assert [(each.number, each.body, each.ended) for each in adapter.heard] == [
            (0, LINES[0], False),
            (1, LINES[1], True),
        ]
        assert all(each.streamed and each.status == 200 for each in adapter.heard)
        assert not request.answered_elsewhere
        await ended_by(adapter, cluster)

    told(scenario)


@pytest.mark.parametrize(("status", "kind"), [(400, "application/json"), (200, "application/json")])
def test_an_answer_that_is_no_stream(told: Run, status: int, kind: str) -> None:
    async def scenario(cluster: Cluster, edge: ExtProcEdge, adapter: Adapter) -> None:
        gateway = Gateway(edge)
        gateway.ask()
        await gateway.hear_engine()
        gateway.answer(status, kind, b"{}")
        assert len(await gateway.hear_end()) == 2
        await eventually(lambda: adapter.heard, "the adapter has heard it")
        (part,) = adapter.heard
        assert (part.status, part.streamed, part.body, part.ended) == (status, False, b"{}", True)
        # It is for the adapter to say what becomes of it.
        assert len(cluster.frontend.registry.requests) == 1
        cluster.frontend.registry.cancel(next(iter(cluster.frontend.registry.requests.values())))

    told(scenario)


def test_a_long_part_goes_in_several_messages(told: Run) -> None:
    async def scenario(cluster: Cluster, edge: ExtProcEdge, adapter: Adapter) -> None:
        long = bytes(range(256)) * 2_500
        gateway = Gateway(edge)
        gateway.ask()
        await gateway.hear_engine()
        gateway.answer(200, "application/json", long, b"")
        await gateway.hear_end()
        await eventually(lambda: adapter.heard and adapter.heard[-1].ended, "the adapter has heard it")
        assert b"".join(each.body for each in adapter.heard) == long
        assert [each.number for each in adapter.heard] == list(range(4))
        assert [each.ended for each in adapter.heard] == [False, False, False, True]
        cluster.frontend.registry.cancel(next(iter(cluster.frontend.registry.requests.values())))

    told(scenario)


@pytest.mark.parametrize(
    ("asked", "status", "code", "said"),
    [
        ({"path": "/v1/embeddings"}, 404, "unknown_url", "/v1/embeddings"),
        ({"method": "GET"}, 405, "method_not_allowed", "wants POST"),
        ({"headers": {"content-encoding": "gzip"}}, 415, "unsupported_media_type", "content-encoding"),
        ({"mode": 2}, 500, "gateway_mode", "FULL_DUPLEX_STREAMED"),
        ({"body": None}, 400, "invalid_json", "body"),
        ({"body": b"[1, 2, 3, 4, 5]"}, 400, "invalid", "object"),
        ({"body": b'{"prompt": "x", '}, 400, "invalid_json", "JSON"),
        ({"body": {**BODY, "max_tokens": "many"}}, 400, "invalid", "max_tokens"),
        ({"body": {**BODY, "prompt": "x" * 5_000}}, 413, "too_large", "4096"),
    ],
)
def test_what_is_wrong_is_refused_before_it_is_placed(
    told: Run, asked: dict[str, Any], status: int, code: str, said: str
) -> None:
    from halfmoon.bus.edge.http_server import HttpLimits

    async def scenario(cluster: Cluster, edge: ExtProcEdge, adapter: Adapter) -> None:
        gateway = Gateway(edge)
        gateway.ask(**asked)
        found, answer, headers = await gateway.hear_refusal()
        assert (found, answer["error"]["code"]) == (status, code)
        assert said in answer["error"]["message"]
        assert headers["content-type"] == "application/json"
        assert not adapter.taken
        assert not cluster.frontend.registry.requests

    told(scenario, http_limits=HttpLimits(body_bytes_max=4_096))


def test_models_are_answered_here(told: Run) -> None:
    async def scenario(cluster: Cluster, edge: ExtProcEdge, _: Adapter) -> None:
        gateway = Gateway(edge)
        gateway.ask(None, "/v1/models", method="GET")
        status, answer, _headers = await gateway.hear_refusal()
        assert (status, answer["data"][0]["id"]) == (200, MODEL)

    told(scenario)


def test_a_key_is_asked_for_and_names_the_tenant(told: Run) -> None:
    async def scenario(cluster: Cluster, edge: ExtProcEdge, adapter: Adapter) -> None:
        for path in ("/v1/completions", "/v1/models"):
            gateway = Gateway(edge)
            gateway.ask(path=path, headers={"authorization": "Bearer wrong"})
            assert (await gateway.hear_refusal())[0] == 401
        gateway = Gateway(edge)
        gateway.ask(headers={"authorization": f"Bearer {'k' * 20}"})
        await gateway.hear_engine()
        assert adapter.taken[0].tenant == "acme"
        gateway.leave()
        assert await gateway.hear_end() == []

    told(scenario, api_keys={"k" * 20: "acme"})


def test_a_refusal_of_the_conductors_is_the_gateways_answer(told: Run) -> None:
    async def rejected(double: Double, seq: int, arrived: RequestArrived) -> None:
        await double.reject(arrived, seq, reason="queue_full", message="full", retry_after_ns=2_000_000_000)

    async def scenario(cluster: Cluster, edge: ExtProcEdge, _: Adapter) -> None:
        cluster.double.script = rejected
        gateway = Gateway(edge)
        gateway.ask()
        status, answer, headers = await gateway.hear_refusal()
        assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "queue_full", "2")

    told(scenario)


def test_an_engine_that_the_gateway_does_not_allow(told: Run) -> None:
    async def scenario(cluster: Cluster, edge: ExtProcEdge, adapter: Adapter) -> None:
        gateway = Gateway(edge)
        gateway.ask(subset=f"10.0.0.8:8000, {ENGINE}")
        await gateway.hear_engine()
        gateway.leave()
        await gateway.hear_end()
        gateway = Gateway(edge)
        gateway.ask(subset="10.0.0.8:8000,10.0.0.9:8000")
        status, answer, _ = await gateway.hear_refusal()
        assert (status, answer["error"]["code"]) == (503, "no_endpoint")
        assert ENGINE in answer["error"]["message"]
        assert len(await cluster.double.wait_for(RequestCancelled, 2)) == 2

    told(scenario)


@pytest.mark.parametrize("when", ["while it waits", "before the answer", "in the answer"])
def test_a_client_that_leaves_ends_its_request(told: Run, when: str) -> None:
    async def never(double: Double, seq: int, arrived: RequestArrived) -> None:
        pass

    async def scenario(cluster: Cluster, edge: ExtProcEdge, adapter: Adapter) -> None:
        gateway = Gateway(edge)
        if when == "while it waits":
            cluster.double.script = never
            gateway.ask()
            hearing = asyncio.ensure_future(gateway.hear_end())
            await cluster.double.wait_for(RequestArrived)
        else:
            gateway.ask()
            await gateway.hear_engine()
            if when == "in the answer":
                gateway.say(response_headers={"headers": _map({":status": "200"})})
                gateway.say(response_body={"body": LINES[0]})
            hearing = asyncio.ensure_future(gateway.hear_end())
        gateway.leave()
        await hearing
        await ended(cluster.frontend.registry)
        (cancelled,) = await cluster.double.wait_for(RequestCancelled)
        assert cancelled.reason == "client gone"

    told(scenario)


@pytest.mark.parametrize(
    ("headers", "parts"),
    [
        ({"content-type": "text/event-stream"}, LINES),
        ({"content-length": "23"}, [b'{"choices": ', b'[{"a": 1}]}']),
    ],
    ids=["by its last line", "by its length"],
)
def test_a_client_that_leaves_with_all_of_its_answer_cancels_nothing(
    told: Run, headers: dict[str, str], parts: list[bytes]
) -> None:
    """The gateway tells of no end then."""

    async def scenario(cluster: Cluster, edge: ExtProcEdge, adapter: Adapter) -> None:
        gateway = Gateway(edge)
        gateway.ask()
        await gateway.hear_engine()
        gateway.say(response_headers={"headers": _map({":status": "200", **headers})})
        for part in parts:
            gateway.say(response_body={"body": part})
        gateway.leave()
        await gateway.hear_end()
        await eventually(lambda: len(adapter.heard) == 2, "the adapter has heard it")
        assert [each.ended for each in adapter.heard] == [False, True]
        await ended_by(adapter, cluster)

    told(scenario)


def test_a_gateway_that_breaks_off_ends_its_request(told: Run) -> None:
    """gRPC cancels the coroutine then."""

    async def scenario(cluster: Cluster, edge: ExtProcEdge, adapter: Adapter) -> None:
        gateway = Gateway(edge)
        gateway.ask()
        await gateway.hear_engine()
        hearing = asyncio.ensure_future(gateway.hear_end())
        await asyncio.sleep(0)
        hearing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await hearing
        await gateway.told.aclose()
        await cluster.double.wait_for(RequestCancelled)
        await ended(cluster.frontend.registry)

    told(scenario)


def test_a_worker_that_answers_itself_is_no_engine(told: Run) -> None:
    async def answers(double: Double, seq: int, arrived: RequestArrived) -> None:
        await double.place(arrived, f"{seq}-0")
        await double.deliver(double.delivery(arrived, f"{seq}-0", 0, double.answer_ids[:1]))

    async def scenario(cluster: Cluster, edge: ExtProcEdge, _: Adapter) -> None:
        cluster.double.script = answers
        gateway = Gateway(edge)
        gateway.ask()
        status, answer, _headers = await gateway.hear_refusal()
        assert (status, answer["error"]["code"]) == (503, "no_engine")
        await cluster.double.wait_for(RequestCancelled)

    told(scenario)


def test_a_request_that_is_placed_again_has_ended_at_the_gateway(told: Run) -> None:
    async def scenario(cluster: Cluster, edge: ExtProcEdge, adapter: Adapter) -> None:
        gateway = Gateway(edge)
        gateway.ask()
        await gateway.hear_engine()
        (arrived,) = await cluster.double.wait_for(RequestArrived)
        await adapter.name(cluster.double, arrived, "999-0")
        (cancelled,) = await cluster.double.wait_for(RequestCancelled)
        assert cancelled.reason == "its engine is gone"
        # The gateway goes on for its client all the same.
        gateway.answer(503, "text/plain", b"no healthy upstream")
        assert len(await gateway.hear_end()) == 2
        assert adapter.heard == []

    told(scenario)


def test_another_worker_cannot_name_the_engine(told: Run) -> None:
    async def scenario(cluster: Cluster, edge: ExtProcEdge, adapter: Adapter) -> None:
        async def lies(double: Double, seq: int, arrived: RequestArrived) -> None:
            await double.place(arrived, f"{seq}-0")
            for worker_id, order_id in (("d2", f"{seq}-0"), ("d1", f"{seq}-1")):
                false = EngineNamed(
                    worker_id=worker_id,
                    request_id=arrived.request_id,
                    order_id=order_id,
                    endpoint="6.6.6.6:666",
                    fields="{}",
                )
                await double.bus.publish(subjects.forward(arrived.frontend_id, worker_id), false)
            await adapter(double, seq, arrived)

        cluster.double.script = lies
        gateway = Gateway(edge)
        gateway.ask()
        headers, _, _ = await gateway.hear_engine()
        assert headers[DESTINATION] == ENGINE
        gateway.leave()
        await gateway.hear_end()

    told(scenario)
