"""Mixed load on a live cluster: both APIs, streams and whole answers, prefixes used again, long prompts, cancellations.

Each greedy text is known before anything is disturbed; how every request ended is counted, and what is wrong is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
import nats
import orjson
from nats.errors import Error as NatsError

from halfmoon.bus.tasks import end_tasks
from halfmoon.schemas import subjects
from tests.cluster.harness import Cluster
from tests.cluster.prompts import text_ids
from tests.eventually import BOUND_S, within

#: (prompt tokens, where its text begins): those that begin alike share the blocks of their prefix.
PROMPTS = ((30, 0), (120, 500), (300, 0), (520, 0), (520, 900), (1_100, 0))
#: One in so many clients asks for the longest prompt, which occupies a prefill worker for seconds.
LONG = (2_400, 300)
LONG_SHARE = 0.03
TOKENS = 12
CANCELLED_SHARE = 0.1
#: A request that has not ended by then counts as one that never ends. What it was placed on may stand still twice for
#: longer than a lease.
SILENCE_S = 600.0
WRONG = ("never ended", "wrong text", "no clear error", "lost though the frontend was well")
#: A client over NATS that hears nothing for so long, not even a sign of life, though the frontend was disturbed, gives
#: its request up. It may be wrong, which is no finding.
GONE_S = 30.0
#: Between two looks whether a frontend that was disturbed answers again.
LOOK_S = 0.2
LEARN_TRIES = 5
Prompt = tuple[int, int]


class Load:
    """Clients that ask one request after another."""

    def __init__(self, cluster: Cluster, draw: random.Random, clients: int, *, steady: bool = False) -> None:
        """`steady`: over HTTP alone, and nobody gives up; else every third asks over NATS."""
        self._steady = steady
        self.ended: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.slowest_s = 0.0
        #: The frontend, or the server between it and a NATS client, was last disturbed then.
        self.frontend_hit_at = -1e9
        #: Such disturbances that last and have yet to be undone.
        self.lasting = 0
        #: The newest question that was begun while nothing lasted, and was answered: when it was begun and answered.
        self._asked_at, self._well_at = -1e8, -1e9
        self.now: Callable[[], float] = time.monotonic
        self._cluster, self._draw, self._clients = cluster, draw, clients
        self._texts: dict[Prompt, str] = {}
        self._stop = False

    async def learn(self) -> None:
        """What each prompt is answered with in peace."""
        async with aiohttp.ClientSession() as session:
            for prompt in (*PROMPTS, LONG):
                for _ in range(LEARN_TRIES):  # a machine that does other things may be too slow for a while
                    how, text = await self._over_http(session, prompt, stream=False)
                    if how == "finished":
                        break
                assert how == "finished", (how, text)
                self._texts[prompt] = text

    async def run(self) -> None:
        looking = asyncio.create_task(self._look_after_disturbances())
        try:
            await asyncio.gather(
                *(self._client(not self._steady and number % 3 == 2) for number in range(self._clients))
            )
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking  # a mistake in it is not passed over

    def disturbed(self, since: float) -> bool:
        """The frontend, or the server between it and a NATS client, was not well at some time since `since`: from when
        it was hit until a request that was begun later was answered.
        """
        return bool(self.lasting) or self.frontend_hit_at >= self._asked_at or since < self._well_at

    async def _look_after_disturbances(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                if self.frontend_hit_at >= self._asked_at and not self.lasting:
                    asked_at = self.now()
                    if await self._answers(session) and self.frontend_hit_at < asked_at and not self.lasting:
                        self._asked_at, self._well_at = asked_at, self.now()
                await asyncio.sleep(LOOK_S)

    async def _answers(self, session: aiohttp.ClientSession) -> bool:
        """A short request comes to an end by each API that the clients use; a refusal is an answer too."""
        asks = [self._over_http(session, PROMPTS[0], stream=False)]
        if not self._steady:
            asks.append(self._over_nats(PROMPTS[0], stream=False))
        try:
            async with asyncio.timeout(BOUND_S):
                ends = await asyncio.gather(*asks)
        except TimeoutError:
            return False
        return not any(how in ("connection lost", "nobody listens") for how, _ in ends)

    def stop(self) -> None:
        self._stop = True

    def again(self) -> Load:
        """The same clients once more, with the texts that are known and nothing counted."""
        other = Load(self._cluster, self._draw, self._clients, steady=self._steady)
        other._texts = self._texts
        return other

    async def probe(self, session: aiohttp.ClientSession) -> str:
        """One short request; "" when its answer is right."""
        how, text = await self._over_http(session, PROMPTS[0], stream=False)
        return "" if (how, text) == ("finished", self._texts[PROMPTS[0]]) else f"a request: {how} {text}"

    async def _client(self, over_nats: bool) -> None:
        draw = self._draw
        async with aiohttp.ClientSession() as session:
            while not self._stop:
                prompt = LONG if draw.random() < LONG_SHARE else draw.choice(PROMPTS)
                stream = draw.random() < 0.5
                cancelled = draw.random() < CANCELLED_SHARE and not self._steady
                started = time.monotonic()
                ask = (
                    self._over_nats(prompt, stream=stream)
                    if over_nats
                    else self._over_http(session, prompt, stream=stream)
                )
                if cancelled:
                    ask = _given_up(ask, draw.uniform(0.02, 2.0))
                try:
                    async with asyncio.timeout(SILENCE_S):
                        how, text = await ask
                except TimeoutError:
                    how, text = "never ended", ""
                self._note(how, text, prompt, started, f"{'NATS' if over_nats else 'HTTP'}, stream {stream}")
                if how != "finished":
                    await asyncio.sleep(0.2)

    def _note(self, how: str, text: str, prompt: Prompt, started: float, about: str) -> None:
        took_s = time.monotonic() - started
        if how == "connection lost" and not self.disturbed(started):
            how = "lost though the frontend was well"
        if how == "finished":
            self.slowest_s = max(self.slowest_s, took_s)
            if text != self._texts[prompt]:
                how = "wrong text"
        if how in WRONG:
            self.wrong.append(f"{how} after {took_s:.1f} s, {prompt[0]} tokens, {about}: {text[:200]!r}")
        self.ended[how] += 1

    async def _over_http(
        self, session: aiohttp.ClientSession, prompt: Prompt, *, stream: bool
    ) -> tuple[str, str]:
        """How it ended, and the text or what was said instead."""
        try:
            url, body = f"{self._cluster.http}/v1/completions", _body(prompt, stream=stream)
            async with session.post(url, json=body) as reply:
                if reply.status != 200:
                    return _refusal(f"{reply.status}", await reply.read())
                if not stream:
                    return "finished", orjson.loads(await reply.read())["choices"][0]["text"]
                return await _streamed(reply)
        except aiohttp.ClientConnectorError:
            return "nobody listens", ""
        except (aiohttp.ClientError, ConnectionError) as problem:
            return "connection lost", str(problem)

    async def _over_nats(self, prompt: Prompt, *, stream: bool) -> tuple[str, str]:
        """As `_over_http`. A client of its own for each request, as programs that start and end are."""
        try:
            nc = await within(self._cluster.connect("client"), "NATS takes a client")
        except (NatsError, OSError, TimeoutError):
            return "nobody listens", ""
        try:
            inbox = nc.new_inbox()
            replies = await nc.subscribe(inbox)
            body = orjson.dumps(_body(prompt, stream=stream))
            await nc.publish(f"{subjects.API}.generate", body, reply=inbox)
            return await _told(replies, self)
        except NatsError as problem:
            return "connection lost", str(problem)
        finally:
            with contextlib.suppress(NatsError, OSError):
                await nc.close()


async def _told(replies: Any, load: Load) -> tuple[str, str]:
    """What comes of a request over NATS. Who is cut off while its answer ends hears nothing of it, and asks again."""
    started = heard = time.monotonic()
    chunks: list[dict[str, Any]] = []
    while True:
        try:
            message = await replies.next_msg(timeout=5.0)
        except nats.errors.TimeoutError:
            # While a request is open something comes every 0.4 s. Its subscription may have been away for a moment
            # with the server: then it was cancelled, and nobody can tell the client so.
            if time.monotonic() - heard > GONE_S and load.disturbed(heard):
                return "connection lost", "nothing comes since the server or the frontend was disturbed"
            continue
        heard = time.monotonic()
        if not message.data:
            if message.headers:
                return "nobody listens", "no responders"
            continue  # a sign of life
        chunk = orjson.loads(message.data)
        if "error" in chunk:
            return _refusal("over NATS", message.data)
        if not chunk.get("done"):
            chunks.append(chunk)
            continue
        gap_allowed = load.disturbed(started)
        if chunks and (wrong := contradiction(chunks, chunk, gap_allowed=gap_allowed)):
            return "wrong text", wrong
        return "finished", chunk["text"]


def contradiction(chunks: list[dict[str, Any]], last: dict[str, Any], *, gap_allowed: bool) -> str:
    """How the chunks of a NATS stream contradict its last message; "" where they do not.

    Core NATS delivers at most once: what was under way when a connection broke never comes. Such a gap shows in
    `index`, and the last message has all.
    """
    whole, expected = last["token_ids"], 0
    for chunk in chunks:
        index, tokens = chunk["index"], chunk["token_ids"]
        if not tokens:
            continue  # a sign of life; it may know of tokens whose text is not complete yet
        if index < expected or tokens != whole[index : index + len(tokens)]:
            return f"index {index} after {expected} tokens: {tokens}, and at last {whole}"
        if index > expected and not gap_allowed:
            return f"nothing was disturbed, but tokens {expected} to {index} are missing: {chunks}"
        expected = index + len(tokens)
    text = "".join(chunk["text"] for chunk in chunks)
    complete = sum(len(chunk["token_ids"]) for chunk in chunks) == len(whole)
    if not complete and not gap_allowed:
        return f"nothing was disturbed, but {text!r} is all that came"
    return f"{text!r}, and at last {last['text']!r}" if complete and text != last["text"] else ""


async def _given_up(ask: Any, after_s: float) -> tuple[str, str]:
    """The client goes away after a while, unless the answer has come."""
    asking, leaving = asyncio.ensure_future(ask), asyncio.create_task(asyncio.sleep(after_s))
    try:
        await asyncio.wait({asking, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            how, text = asking.result()
            return how, text
    finally:
        await end_tasks([asking, leaving])
    return "given up", ""


def _body(prompt: Prompt, *, stream: bool) -> dict[str, Any]:
    length, start = prompt
    return {
        "prompt": list(text_ids()[start : start + length]),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


def _refusal(status: str, body: bytes) -> tuple[str, str]:
    with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError):
        error = orjson.loads(body)["error"]
        if error["message"]:
            return f"error {status} {error.get('code') or error['type']}", error["message"]
    return "no clear error", f"{status} {body!r}"


async def _streamed(reply: aiohttp.ClientResponse) -> tuple[str, str]:
    text = ""
    async for raw in reply.content:
        line = raw.decode().strip()
        if line == "data: [DONE]":
            return "finished", text
        if line.startswith("data: "):
            chunk = orjson.loads(line[6:])
            if "error" in chunk:
                return f"error in stream {chunk['error'].get('code')}", chunk["error"]["message"]
            text += "".join(choice.get("text", "") for choice in chunk["choices"])
    return "connection lost", text
