"""Clients that ask NATS for more than it has: more bytes in one message, more bytes that wait for who does not read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from pathlib import Path
from typing import Any

import aiohttp
import nats
import orjson
from nats.errors import MaxPayloadError

from halfmoon.schemas import subjects
from tests.cluster.harness import Cluster
from tests.eventually import Late, eventually

#: Long texts take their time on a busy machine.
ANSWER_S = 180.0
#: More bytes of answers than lie between the server and a client that reads nothing.
ANSWERS, WORDS = 6, 400_000
RECEIVE_BUFFER_BYTES = 4096


async def too_large(cluster: Cluster) -> dict[str, Any]:
    """More than a message may have, in each direction and against the rules: each ends in a clear error."""
    said: dict[str, str] = {}
    async with aiohttp.ClientSession() as session:
        body = {"prompt": "moon " * 4_000_000, "max_tokens": 1}
        async with session.post(f"{cluster.http}/v1/completions", json=body) as reply:
            said["HTTP body"] = f"{reply.status} {(await reply.json())['error']['code']}"
    nc = await cluster.connect()
    try:
        prompt = "a " * (nc.max_payload // 4 + WORDS)  # each word is four characters of the answer
        answer = await nc.request(
            f"{subjects.API}.tokenize", orjson.dumps({"prompt": prompt}), timeout=ANSWER_S
        )
        said["answer over NATS"] = orjson.loads(answer.data).get("error", {}).get("code", "none")
        try:
            await nc.publish(f"{subjects.API}.generate", bytes(nc.max_payload + 1))
        except MaxPayloadError:
            said["request over NATS"] = "MaxPayloadError"
    finally:
        await nc.close()
    said["against the rules"] = await _against_the_rules(cluster)
    expected = {
        "HTTP body": "413 body_too_large",
        "answer over NATS": "answer_too_large",
        "request over NATS": "MaxPayloadError",
        "against the rules": "1 connection ended",
    }
    return {"said": [f"{what}: {how}" for what, how in said.items()], "wrong": _differ(said, expected)}


async def _against_the_rules(cluster: Cluster) -> str:
    """What the server says of a client that sends a message of more than max_payload."""
    log = cluster.directory / "nats" / "nats.log"
    before = _count(log, "maximum payload exceeded")
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def failed(problem: Exception) -> None:
        if not told.done():
            told.set_result(str(problem).lower())

    key = cluster.config("client").nkey_seed_file
    nc = await nats.connect(cluster.nats, nkeys_seed=key or None, error_cb=failed, allow_reconnect=False)
    try:
        nc._max_payload = 1 << 30
        await nc.publish(f"{subjects.API}.generate", bytes(16 << 20))
        async with asyncio.timeout(ANSWER_S):
            await told
        return f"{_count(log, 'maximum payload exceeded') - before} connection ended"
    finally:
        await nc.close()


async def pending_bytes(cluster: Cluster) -> dict[str, Any]:
    """A client asks for long answers and reads nothing: the server lets go of it, and of nobody else."""
    log = cluster.directory / "nats" / "nats.log"
    before = _count(log, "slow consumer")
    nc = await cluster.connect()
    try:
        inbox = nc.new_inbox()
        await nc.subscribe(inbox)
        question = orjson.dumps({"prompt": "a " * WORDS})
        await nc.flush()
        assert nc._transport is not None
        transport = nc._transport._io_reader._transport  # type: ignore[attr-defined]
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES
        )
        transport.pause_reading()
        for _ in range(ANSWERS):
            await nc.publish(f"{subjects.API}.tokenize", question, reply=inbox)
        started = time.monotonic()
        with contextlib.suppress(Late):  # then none was dropped
            await eventually(lambda: _count(log, "slow consumer") > before, "who does not read is let go of")
        dropped = _count(log, "slow consumer") - before
    finally:
        nc._reading_task.cancel()  # type: ignore[union-attr]
        await nc.close()
    said = f"slow consumers told by the server: {dropped}, {time.monotonic() - started:.0f} s after the last question"
    return {"said": [said], "wrong": [] if dropped == 1 else [said]}


def _count(log: Path, words: str) -> int:
    return log.read_text(errors="replace").lower().count(words)


def _differ(said: dict[str, str], expected: dict[str, str]) -> list[str]:
    return [f"{what}: {said.get(what)}" for what, how in expected.items() if said.get(what) != how]
