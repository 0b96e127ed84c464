"""Bytes on the socket of a frontend that hardly look like HTTP."""

from __future__ import annotations

import random

from tests.fuzz.http_player import playing_http as playing
from tests.fuzz.mutate import mutated_bytes
from tests.fuzz.targets import http

__all__ = ["DEADLINE_S", "TEST_INPUTS", "make", "playing"]

DEADLINE_S = 60.0
TEST_INPUTS = 60
INPUTS_MEANT = 200_000
_PIECES = [
    b"GET ", b"POST ", b"/", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b"\r\n", b"\r\n\r\n", b"\n", b"\n\n", b"\r", b": ",
    b":", b" ", b"\t", b"host: localhost\r\n", b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n", b"5\r\n",
    b"0\r\n\r\n", b"ffffffff\r\n", b"connection: upgrade\r\n", b"upgrade: websocket\r\n", b"a" * 9000, b"\x00",
    b"expect: 100-continue\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\x81\x05hello",
    b"\xff", b"%00", b"\xe2\x98\xbe",
]  # fmt: skip


def make(draw: random.Random) -> bytes:
    match draw.randrange(4):
        case 0:
            return draw.randbytes(draw.choice((1, 10, 100, 1000, 20_000)))
        case 1:
            return b"".join(draw.choices(_PIECES, k=draw.randint(1, 30)))
        case 2:
            return mutated_bytes(draw, http.make(draw), draw.randint(1, 40))
        case _:
            content = http.make(draw)
            return content[: draw.randint(0, len(content))] + b"".join(
                draw.choices(_PIECES, k=draw.randint(0, 5))
            )
