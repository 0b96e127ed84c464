"""The HTTP edge against clients that are hostile, broken or slow: bytes on the socket, as they send them."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import resource
import zlib
from typing import Any

import pytest
from frontend_double import Double

from halfmoon.bus.edge.http_server import HttpLimits
from halfmoon.schemas.events import RequestArrived, RequestCancelled
from halfmoon.workers.frontend.edges.nats_service import settled
from tests.eventually import BOUND_S, eventually

POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
SMALL = HttpLimits(
    connections_max=20, connections_per_address_max=20, reserved_max=3, head_s=0.6, body_s=0.6, idle_s=5
)


async def connect(cluster: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = cluster.url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes], bytes]:
    """(status, headers, body) of one answer."""
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines if line)
    }
    body = await reader.readexactly(int(headers.get(b"content-length", 0)))
    return int(status.split()[1]), headers, body


async def exchange(cluster: Any, sent: bytes) -> tuple[int, Any]:
    """(status, JSON) of what the socket answers; it answers or closes, always."""
    reader, writer = await connect(cluster)
    try:
        writer.write(sent)
        async with asyncio.timeout(BOUND_S):
            status, headers, body = await answer_of(reader)
        assert headers[b"content-type"] == b"application/json", headers
        return status, json.loads(body)
    finally:
        writer.close()


def body_of(payload: bytes, *fields: bytes) -> bytes:
    head = POST + b"".join(field + b"\r\n" for field in fields)
    return head + b"content-length: %d\r\n\r\n" % len(payload) + payload


def get(target: bytes, method: bytes = b"GET", *fields: bytes) -> bytes:
    head = method + b" " + target + b" HTTP/1.1\r\nhost: localhost\r\n"
    return head + b"".join(field + b"\r\n" for field in fields) + b"\r\n"


GZIP, DEFLATE = b"content-encoding: gzip", b"content-encoding: deflate"
CHUNKED = POST + b"transfer-encoding: chunked\r\n"
BOMB = b" " * (16 << 20)
MIB = b"a" * (1 << 20)
BROKEN: dict[str, tuple[bytes, int, str]] = {
    "gzip that is none": (body_of(b"{}", GZIP), 400, "bad_body"),
    "gzip cut short": (body_of(gzip.compress(b"{}" * 99)[:-9], GZIP), 400, ""),
    "deflate that is none": (body_of(b"\xff{}", DEFLATE), 400, "bad_body"),
    "an unknown encoding": (body_of(b"{}", b"content-encoding: zip"), 415, "unsupported_encoding"),
    "two encodings": (body_of(b"{}", b"content-encoding: gzip, gzip"), 415, "unsupported_encoding"),
    "brotli": (body_of(b"{}", b"content-encoding: br"), 400, "bad_request"),
    "a bomb": (body_of(gzip.compress(BOMB), GZIP), 413, "body_too_large"),
    "a bomb in deflate": (body_of(zlib.compress(BOMB), DEFLATE), 413, "body_too_large"),
    "chunks of no length": (CHUNKED + b"\r\nzz\r\n{}\r\n0\r\n\r\n", 400, ""),
    "chunks of a huge length": (CHUNKED + b"\r\n" + b"f" * 40 + b"\r\n", 400, ""),
    "chunks and a length": (CHUNKED + b"content-length: 5\r\n\r\n0\r\n\r\n", 400, "bad_request"),
    "two lengths": (POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", 400, "bad_request"),
    "a length that is no number": (POST + b"content-length: 0x5\r\n\r\n{}", 400, "bad_request"),
    "a length below zero": (POST + b"content-length: -5\r\n\r\n{}", 400, "bad_request"),
    "an unknown transfer encoding": (POST + b"transfer-encoding: zip\r\n\r\n{}", 400, ""),
    "an expectation": (body_of(b"{}", b"expect: a-miracle"), 417, "expectation_failed"),
    "no content type": (
        get(b"/v1/completions", b"POST", b"content-length: 2") + b"{}",
        415,
        "unsupported_media_type",
    ),
    "nonsense": (b"nonsense\r\n\r\n", 400, "bad_request"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64, 400, "bad_request"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "bad_request"),
    "HTTP/9": (get(b"/health").replace(b"1.1", b"9.9"), 400, "bad_request"),
    "a NUL in the head": (get(b"/health", b"GET", b"a: \x00"), 400, "bad_request"),
    "a header of a megabyte": (get(b"/health", b"GET", b"a: " + MIB), 431, "bad_request"),
    "a path of a megabyte": (get(b"/" + MIB), 431, "bad_request"),
    "a field's name of a megabyte": (get(b"/", b"GET", MIB + b": 1"), 431, "bad_request"),
    "thousands of headers": (get(b"/", b"GET", *[b"a: b"] * 5000), 400, "bad_request"),
    "a folded header": (get(b"/v2", b"GET", b" b: c"), 400, ""),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400, "bad_request"),
    "two hosts": (get(b"/health", b"GET", b"host: localhost"), 400, "bad_request"),
    "a path of no Unicode": (get(b"/\xff\xfe"), 400, "bad_request"),
    "a path of no Unicode, in percents": (get(b"/%ff%ed%a0%80"), 404, "unknown_url"),
    "a path that climbs": (get(b"/page/../../../etc/passwd"), 404, "unknown_url"),
    "a path that climbs, in percents": (get(b"/page/%2e%2e%2ffeed.py"), 404, "unknown_url"),
    "a file of Python": (get(b"/page/feed.py"), 404, "unknown_url"),
    "an unknown method": (get(b"/health", b"BREW"), 400, ""),
    "CONNECT": (get(b"example.org:443", b"CONNECT"), 404, "unknown_url"),
    "TRACE": (get(b"/health", b"TRACE"), 405, "method_not_allowed"),
    "OPTIONS *": (get(b"*", b"OPTIONS"), 404, "unknown_url"),
    "a websocket": (get(b"/v2", b"GET", b"connection: upgrade", b"upgrade: websocket"), 404, "unknown_url"),
}


@pytest.mark.pure
def test_what_is_broken_is_refused_in_the_apis_form_and_in_few_lines(run: Any, caplog: Any) -> None:
    async def scenario(cluster: Any) -> None:
        for name, (sent, status, code) in BROKEN.items():
            got, answer = await exchange(cluster, sent)
            assert (got, answer["error"]["code"]) == (status, code or answer["error"]["code"]), (name, answer)
            assert set(answer["error"]) == {"message", "type", "param", "code"}, name
            assert answer["error"]["message"].isprintable(), name
        for _ in range(100):
            await exchange(cluster, b"nonsense \x1b[31m\r\n\r\n")
        assert (await cluster.http_get("/health"))[0] == 200

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert not [record for record in caplog.records if record.exc_info]
    lines = [record.getMessage() for record in caplog.records if "http_server" in record.name]
    assert 1 <= len(lines) <= 30, "a line each at most, and then fewer"
    assert all(line.isprintable() for line in lines)


@pytest.mark.pure
def test_a_key_that_is_no_text_is_a_wrong_key(run: Any, caplog: Any) -> None:
    async def scenario(cluster: Any) -> None:
        for key in (b"\xff\xfe", b"k1\xc3", "schlüssel".encode(), b"x" * 8000, b"", b"k1 k1"):
            status, answer = await exchange(cluster, body_of(b"{}", b"authorization: Bearer " + key))
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), key
            assert "k1" not in answer["error"]["message"]

    run(scenario, api_keys={"k1": ""})
    assert not caplog.records


def test_a_head_or_a_body_that_does_not_come_is_answered_and_closed(run: Any) -> None:
    halves = {
        b"": 408,
        b"GET /health HT": 408,
        b"GET /health HTTP/1.1\r\nhost: loc": 408,
        HEALTH[:-2]: 408,
        POST + b"content-length: 100\r\n\r\n{": 408,
        POST + b"transfer-encoding: chunked\r\n\r\n5\r\n{": 408,
    }

    async def scenario(cluster: Any) -> None:
        async def half(sent: bytes, status: int) -> None:
            reader, writer = await connect(cluster)
            writer.write(sent)
            async with asyncio.timeout(BOUND_S):
                got, _, body = await answer_of(reader)
                assert (got, json.loads(body)["error"]["code"]) == (status, "timeout"), sent
                assert await reader.read() == b"", "closed"
            writer.close()

        async def dripped() -> None:
            reader, writer = await connect(cluster)
            writer.write(HEALTH.removesuffix(b"\r\n") + b"x: ")
            answering = asyncio.create_task(answer_of(reader))

            def answered() -> bool:
                """Each byte comes within the time of a head: that is told anew by none of them."""
                writer.write(b"x")
                return answering.done()

            await eventually(answered, "it is answered before the head is whole", every_s=0.05)
            assert (await answering)[0] == 408
            writer.close()

        await asyncio.gather(dripped(), *(half(sent, status) for sent, status in halves.items()))
        assert not cluster.frontend._http._server.room._reserved

    run(scenario, http_limits=SMALL)


@pytest.mark.pure
def test_idle_connections_make_room_and_busy_ones_leave_room_for_health(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        idle = [await connect(cluster) for _ in range(3 * SMALL.connections_max)]
        for _, writer in idle:
            writer.write(b"GET /health HTTP/1.1\r\nhost: ")
        room = cluster.frontend._http._server.room
        await eventually(lambda: len(room.connections) >= SMALL.connections_max, "all room is taken")
        status, _, answer = await cluster.post("/v1/completions", {"prompt": "Once", "max_tokens": 2})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 2), "a half request makes room"
        assert len(room.connections) <= SMALL.connections_max
        for _, writer in idle:
            writer.close()

        async def never(*_: Any) -> None:
            await asyncio.Event().wait()

        cluster.double.script = never
        busy = []
        for _ in range(SMALL.connections_max):
            reader, writer = await connect(cluster)
            writer.write(body_of(b'{"prompt": "Once"}'))
            busy.append((reader, writer))
        await cluster.double.wait_for(RequestArrived, 1 + SMALL.connections_max)
        for _ in range(3 * SMALL.reserved_max):  # connections that say nothing do not take the reserved room
            busy.append(await connect(cluster))
        for path in ("/health", "/ready", "/metrics"):
            head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
            reader, writer = await connect(cluster)
            writer.write(head)
            assert (await answer_of(reader))[0] == 200, path
            writer.close()
        status, answer = await exchange(cluster, body_of(b'{"prompt": "Once"}'))
        assert (status, answer["error"]["code"]) == (503, "too_many_connections")
        assert len(room.connections) <= SMALL.connections_max + SMALL.reserved_max
        for _, writer in busy:
            writer.close()
        await cluster.double.wait_for(RequestCancelled, SMALL.connections_max)

    run(scenario, http_limits=HttpLimits(**{**vars(SMALL), "head_s": BOUND_S, "body_s": BOUND_S}))


@pytest.mark.pure
def test_an_address_has_a_cap_of_its_own(run: Any) -> None:
    limits = HttpLimits(connections_max=20, connections_per_address_max=4)

    async def scenario(cluster: Any) -> None:
        connections = [await connect(cluster) for _ in range(12)]
        room = cluster.frontend._http._server.room
        for reader, writer in connections[-4:]:
            writer.write(HEALTH)
            assert (await answer_of(reader))[0] == 200
        assert len(room.connections) == 4
        assert sum(reader.at_eof() for reader, _ in connections) == 8, "the oldest"
        for _, writer in connections:
            writer.close()

    run(scenario, http_limits=limits)


@pytest.mark.pure
def test_the_cap_fits_the_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        assert HttpLimits().connections_here == 1024 - 128 - 64
        assert HttpLimits(connections_max=100).connections_here == 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def endless(double: Double, seq: int, arrived: RequestArrived) -> None:
    """More than sockets take in unread."""
    order_id = f"{seq}-0"
    await double.place(arrived, order_id)
    for index in range(arrived.max_tokens):
        await double.deliver(double.delivery(arrived, order_id, index, [double.answer_ids[0]]))
        if index % 50 == 0:
            await settled(double.bus.nc)  # the frontend takes them as they come


@pytest.mark.parametrize(
    "options", [{"http_limits": HttpLimits(write_s=0.5)}, pytest.param({}, marks=pytest.mark.slow)]
)
def test_a_stream_that_nobody_reads_is_cancelled_and_waits_in_bounded_memory(
    run: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not options:
        monkeypatch.setattr("halfmoon.workers.frontend.edges.http_answer.UNREAD_BYTES_MAX", 1 << 16)

    async def scenario(cluster: Any) -> None:
        cluster.double.script = endless
        body = {"prompt": "Once", "max_tokens": 30_000, "logprobs": 20, "stream": True}
        reader, writer = await connect(cluster)
        writer.transport.pause_reading()
        writer.write(body_of(json.dumps(body).encode()))
        await cluster.double.wait_for(RequestCancelled)
        assert not cluster.frontend.registry.requests
        writer.close()
        assert reader is not None

    run(scenario, context_tokens=40_000, **options)


def test_answers_that_nobody_reads_end_their_connection(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        reader, writer = await connect(cluster)
        writer.transport.pause_reading()
        room = cluster.frontend._http._server.room
        await eventually(lambda: room.connections, "it is connected")

        def ended() -> bool:
            if not writer.is_closing():  # pipelined, as many as it takes
                writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 100)
            return not room.connections

        await eventually(ended, "it is ended")
        writer.close()
        assert reader is not None

    run(scenario, http_limits=HttpLimits(write_s=0.5))


@pytest.mark.pure
def test_one_connection_is_served_in_order_by_old_and_new_http(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        reader, writer = await connect(cluster)
        completion = body_of(b'{"prompt": "Once", "max_tokens": 1}')
        writer.write(HEALTH + completion + HEALTH + b"GET /v2 HTTP/1.1\r\nhost: localhost\r\n\r\n" + HEALTH)
        assert [(await answer_of(reader))[0] for _ in range(5)] == [200, 200, 200, 404, 200]
        writer.write(HEALTH.replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (await answer_of(reader))[0] == 200
        assert await reader.read() == b"", "HTTP/1.0 ends with its answer"
        writer.close()
        reader, writer = await connect(cluster)
        body = b'{"prompt": "Once", "max_tokens": 3, "stream": true}'
        writer.write(body_of(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        answer = await reader.read()
        assert answer.endswith(b"data: [DONE]\n\n")
        assert b"chunked" not in answer.lower()
        writer.close()

    run(scenario)


@pytest.mark.pure
def test_a_body_is_asked_for_where_the_client_waits_to_be_asked(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        body = b'{"prompt": "Once", "max_tokens": 1}'
        for path, first in ((b"/v1/completions", b"HTTP/1.1 100 Continue\r\n\r\n"), (b"/v2", b"")):
            reader, writer = await connect(cluster)
            head = POST.replace(b"/v1/completions", path)
            writer.write(head + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
            if first:
                assert await reader.readexactly(len(first)) == first
                writer.write(body)
                assert (await answer_of(reader))[0] == 200
            else:
                assert (await answer_of(reader))[0] == 404, "without the body"
            writer.close()

    run(scenario)
