"""Requests to every path of a frontend: valid ones, made wrong in their bodies, their heads, and their bytes."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from typing import Any

from tests.fuzz.http_player import playing_http as playing
from tests.fuzz.mutate import json_bytes, mutated_bytes, mutated_json
from tests.fuzz.targets.api_bodies import valid_body

__all__ = ["DEADLINE_S", "TEST_INPUTS", "make", "playing"]

DEADLINE_S = 60.0
TEST_INPUTS = 60
INPUTS_MEANT = 200_000
_POSTED = ("/v1/completions", "/v1/chat/completions", "/tokenize")
_GOT = ("/v1/models", "/health", "/ready", "/metrics", "/version", "/status", "/", "/page/app.js", "/page/stream",
        "/page/explain?request=01a1fd24449f555d5bf1f4718d", "/page/explain", "/nothing")  # fmt: skip
_METHODS = (
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "DELETE",
    "OPTIONS",
    "TRACE",
    "PATCH",
    "CONNECT",
    "get",
    "G\x00T",
    "PRI",
)
_FIELDS = [
    "authorization: Bearer xyz", "authorization: Bearer \xff\xfe", "authorization:", "origin: http://evil.example",
    "origin: null", "origin: http://[", "host: evil.example", "host: localhost:99999999", "host: [::1", "host:",
    "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "traceparent: \xed\xa0\x80",
    "content-encoding: gzip", "content-encoding: deflate", "content-encoding: br", "content-encoding: zstd",
    "content-encoding: gzip, gzip", "transfer-encoding: chunked", "transfer-encoding: gzip, chunked",
    "transfer-encoding: identity", "content-length: 0", "content-length: 99999999999999999999", "content-length: -1",
    "content-length: 5", "expect: 100-continue", "expect: x", "connection: close", "connection: keep-alive",
    "connection: upgrade", "upgrade: websocket", "upgrade: h2c", "content-type: text/plain", "content-type:",
    "content-type: multipart/form-data; boundary=x", "content-type: application/json; charset=\x80",
    "sec-fetch-site: cross-site", "sec-fetch-mode: navigate", "if-none-match: *", "range: bytes=0-99999999999",
    "x-request-id: a\tb", " folded", "name without colon", ": no name", "a: " + "b" * 9000, "cookie: " + "a=b;" * 500,
    "\xe9: \xe9", "accept-encoding: gzip;q=NaN", "te: trailers", "forwarded: for=\"[\"", "x: \x00", "x: \x7f",
]  # fmt: skip


def make(draw: random.Random) -> bytes:
    content = b"".join(_request(draw) for _ in range(draw.choice((1, 1, 1, 2, 4))))
    return mutated_bytes(draw, content) if draw.random() < 0.3 else content


def _request(draw: random.Random) -> bytes:
    posts = draw.random() < 0.6
    path = draw.choice(_POSTED if posts else _GOT)
    method = ("POST" if posts else "GET") if draw.random() < 0.9 else draw.choice(_METHODS)
    if draw.random() < 0.05:
        path = draw.choice(
            (
                "*",
                "//",
                "/%00",
                "/%ff",
                "/../x",
                "/page/%2e%2e/feed.py",
                "http://x/",
                "/\xff",
                "?",
                "/" * 9000,
            )
        )
    version = (
        "HTTP/1.1"
        if draw.random() < 0.95
        else draw.choice(("HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/1.10", "HTCPCP/1.0"))
    )
    body = _body(draw) if posts else b""
    fields = ["host: localhost"] if draw.random() < 0.97 else []
    if posts:
        fields.append("content-type: application/json")
    body, packed = _packed(draw, body)
    fields += packed
    while draw.random() < 0.2:
        fields.insert(draw.randint(0, len(fields)), draw.choice(_FIELDS))
    head = "\r\n".join([f"{method} {path} {version}", *fields]).encode("latin-1", "replace")
    return head + b"\r\n\r\n" + body


def _body(draw: random.Random) -> bytes:
    body: Any = valid_body(draw)
    if "max_tokens" not in body or draw.random() < 0.9:
        body["max_tokens"] = draw.randint(1, 3)  # an answer is not what this is about
    if draw.random() < 0.6:
        body = mutated_json(draw, body)
    return json_bytes(draw, body) if draw.random() < 0.8 else json.dumps(body).encode()


def _packed(draw: random.Random, body: bytes) -> tuple[bytes, list[str]]:
    """The body as it is sent, and the fields that say how."""
    chosen = draw.random()
    if chosen < 0.06:
        packed = gzip.compress(body, 1, mtime=0)
        packed = packed if draw.random() < 0.7 else mutated_bytes(draw, packed)
        return packed, ["content-encoding: gzip", f"content-length: {len(packed)}"]
    if chosen < 0.09:
        packed = zlib.compress(body, 1)
        return packed, ["content-encoding: deflate", f"content-length: {len(packed)}"]
    if chosen < 0.2:
        cut = draw.randint(0, len(body))
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:cut], body[cut:]) if part)
        chunks += b"0\r\n\r\n"
        return chunks if draw.random() < 0.7 else mutated_bytes(draw, chunks, 1), [
            "transfer-encoding: chunked"
        ]
    length = len(body) if draw.random() < 0.95 else draw.choice((0, 1, len(body) + 1, len(body) * 2))
    return body, [f"content-length: {length}"] if body or draw.random() < 0.5 else []
