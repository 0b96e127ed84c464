"""Where there are traces, a request that an edge refuses is one span: its status, the error's code, and why."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from frontend_double import MODEL
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from halfmoon.bus.telemetry.tracing import Tracing
from halfmoon.schemas.events import RequestArrived

CLIENT_TRACE, CLIENT_SPAN = 0xA1, 0xB2
TRACEPARENT = {"traceparent": f"00-{CLIENT_TRACE:032x}-{CLIENT_SPAN:016x}-01"}
COMPLETION, CHAT = f"text_completion {MODEL}", f"chat {MODEL}"


class Spans:
    """The spans that were told since the last look."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider)

    def one(self) -> ReadableSpan:
        (told,) = self._exporter.get_finished_spans()
        self._exporter.clear()
        return told

    def none(self) -> bool:
        return not self._exporter.get_finished_spans()


@pytest.fixture
def spans() -> Iterator[Spans]:
    made = Spans()
    yield made
    made.tracing.close()


def check(
    told: ReadableSpan, name: str, status: int, code: str, why: str, *, parent: int = CLIENT_SPAN
) -> None:
    assert told.name == name
    assert told.context is not None
    assert (told.parent.span_id if told.parent else 0) == parent
    assert (told.context.trace_id == CLIENT_TRACE) == bool(parent)
    about = dict(told.attributes or {})
    assert (about["http.response.status_code"], about["error.type"]) == (status, code)
    assert about["halfmoon.frontend"].startswith("f")  # type: ignore[union-attr]
    assert not told.status.is_ok
    assert why in (told.status.description or "")
    assert told.start_time is not None
    assert told.end_time is not None
    assert 0 <= told.end_time - told.start_time < 60e9


@pytest.mark.pure
@pytest.mark.parametrize(
    ("chat", "body", "status", "code", "why"),
    [
        (False, b'{"prompt": "x", "top_p": 3}', 400, "invalid", "top_p"),
        (False, b"{", 400, "invalid_json", "not JSON"),
        (False, b'{"prompt": "x", "model": "other"}', 404, "model_not_found", "other"),
        (True, b'{"messages": []}', 400, "invalid", "messages"),
        (
            True,
            b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 3000}',
            400,
            "context_length_exceeded",
            "2048",
        ),
    ],
)
def test_a_body_that_is_wrong(
    run: Any, spans: Spans, chat: bool, body: bytes, status: int, code: str, why: str
) -> None:
    code = code or "context_length_exceeded"

    async def scenario(cluster: Any) -> None:
        cluster.frontend.registry.intake.tracing = spans.tracing
        path, endpoint, name = (
            ("chat/completions", "chat", CHAT) if chat else ("completions", "generate", COMPLETION)
        )
        assert (await cluster.post(f"/v1/{path}", body, headers=TRACEPARENT))[0] == status
        check(spans.one(), name, status, code, why)
        await cluster.post(f"/v1/{path}", body)
        check(spans.one(), name, status, code, why, parent=0)
        _, answer = await cluster.ask(endpoint, body, TRACEPARENT)
        assert answer["error"]["code"] == code
        check(spans.one(), name, status, code, why)
        off = {"traceparent": TRACEPARENT["traceparent"][:-2] + "00"}
        await cluster.post(f"/v1/{path}", body, headers=off)
        assert spans.none()

    run(scenario)


@pytest.mark.pure
def test_who_has_no_key_and_who_comes_while_it_stops(run: Any, spans: Spans) -> None:
    async def scenario(cluster: Any) -> None:
        cluster.frontend.registry.intake.tracing = spans.tracing
        assert (await cluster.post("/v1/completions", {"prompt": "x"}, headers=TRACEPARENT))[0] == 401
        check(spans.one(), COMPLETION, 401, "invalid_api_key", "no valid API key")
        cluster.frontend.registry.draining = True
        headers = {**TRACEPARENT, "authorization": "Bearer k1"}
        assert (await cluster.post("/v1/completions", {"prompt": "x"}, headers=headers))[0] == 503
        check(spans.one(), COMPLETION, 503, "stopping", "is stopping")
        await cluster.ask("generate", {"prompt": "x"}, TRACEPARENT)
        check(spans.one(), COMPLETION, 503, "stopping", "is stopping")
        cluster.frontend.registry.draining = False

    run(scenario, api_keys={"k1": ""})


@pytest.mark.pure
def test_one_too_many_and_what_the_conductors_refuse(run: Any, spans: Spans) -> None:
    """A request of the cluster has its one span too, with the same words."""
    held = asyncio.Event()

    async def reject_later(double: Any, seq: int, arrived: RequestArrived) -> None:
        await held.wait()
        await double.reject(arrived, seq, reason="ttft_slo", message="too slow")

    async def scenario(cluster: Any) -> None:
        cluster.double.script = reject_later
        cluster.frontend.registry.intake.tracing = spans.tracing
        first = asyncio.create_task(cluster.post("/v1/completions", {"prompt": "x"}, headers=TRACEPARENT))
        await cluster.double.wait_for(RequestArrived)
        for _ in range(2):
            assert (await cluster.post("/v1/completions", {"prompt": "x"}, headers=TRACEPARENT))[0] == 429
            check(spans.one(), COMPLETION, 429, "queue_full", "1 requests are open here already")
        held.set()
        assert (await first)[0] == 429
        check(spans.one(), COMPLETION, 429, "ttft_slo", "too slow")

    run(scenario, open_requests_max=1)
