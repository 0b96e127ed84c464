"""An SGLang that computes nothing: as `fake_engine.py`, with SGLang's words. A program.

It is as strict as SGLang in what differs: `top_k` 0 is a mistake, unknown fields are passed over, a cache is dropped
only while no request runs.

With `--mode prefill` it computes a prompt when an engine with `--mode decode` has asked for the request's room at its
bootstrap server, answers when that one has the KV and the first token, and fails where it does not get them. The other
one has no cache. Nothing tells it that a prefill engine, or the other half of its request there, has been ended: it
waits until its own client hangs up.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import xxhash
from aiohttp import web

from tests.adapters.fake_engine import MODEL, Engine, next_token, options

NOBODY = "2.2.2.2"


class Room:
    """Where the two halves of a request meet: the tokens of the prompt and the first one that was drawn. None: they do
    not come, or nobody takes them any more.
    """

    def __init__(self) -> None:
        self.entered = False  # by the prefill half
        self.wanted = asyncio.Event()
        self.given: asyncio.Future[list[int] | None] = asyncio.get_running_loop().create_future()
        self.taken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()


class SglangEngine(Engine):
    """A block is a page; hashes are signed, and each event tells the salt of all its blocks."""

    def blocks_of(self, tokens: list[int], salt: str) -> list[tuple[int, int | None, list[int]]]:
        size, parent, found = self.args.block_tokens, None, []
        for start in range(0, len(tokens) - size + 1, size):
            part = tokens[start : start + size]
            name = xxhash.xxh64(repr((parent, part, salt)).encode()).intdigest() - (1 << 63)
            found.append((name, parent, part))
            parent = name
        return found

    def of_others(self, new: list[tuple[int, int | None, list[int]]], salt: str) -> dict[str, Any]:
        return {} if self.args.no_salts else {"cache_salt": salt}

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        wrong = ""
        if body.get("top_k", -1) == 0:
            wrong = "top_k must be -1 (disable) or at least 1, got 0."
        elif self.args.mode != "null" and body.get("bootstrap_room") is None:
            wrong = "Invalid request: Disaggregated request received without bootstrap room id."
        if wrong:
            error = {"message": wrong, "type": "BadRequestError"}
            return web.json_response(self.refusal(error), status=400)
        if self.args.mode != "prefill":
            return await super().answer(request, body)
        try:
            response = await super().answer(request, {**body, "max_tokens": 1})
        finally:
            room = self.left(body["bootstrap_room"])
        if room is not None and not room.given.done():
            room.given.set_result(None)
        return response

    # --- one half of a request ------------------------------------------------------------------------------

    async def meets(self, body: dict[str, Any], tokens: list[int]) -> bool:
        if self.args.mode == "null" or body["bootstrap_host"] == NOBODY:
            return True
        if self.args.mode == "decode":
            place = f"http://{body['bootstrap_host']}:{body['bootstrap_port']}/room/{body['bootstrap_room']}"
            handed = await self.handed(place)
            return handed == [*tokens, next_token(tokens)]
        room = self.room_of(body["bootstrap_room"])
        room.entered = True
        await room.wanted.wait()
        return not room.taken.done()

    def room_of(self, number: int) -> Room:
        return self.rooms.setdefault(number, Room())

    async def handed(self, place: str) -> list[int] | None:
        try:
            async with aiohttp.ClientSession() as session, session.post(place) as response:
                handed: list[int] | None = await response.json()
                return handed
        except aiohttp.ClientError:
            await asyncio.Event().wait()  # until its client hangs up
            raise

    async def lends(self, body: dict[str, Any], tokens: list[int], drawn: int, about: dict[str, Any]) -> bool:
        if self.args.mode != "prefill" or body["bootstrap_host"] == NOBODY:
            return True
        room = self.room_of(body["bootstrap_room"])
        room.given.set_result(None if self.loses_lent else list(tokens))
        return await room.taken

    def left(self, number: int) -> Room | None:
        """By the prefill half, one way or the other. One that never was here is waited for."""
        room = self.rooms.get(number)
        return self.rooms.pop(number) if room is not None and room.entered else None

    async def room(self, request: web.Request) -> web.Response:
        """A decode engine wants what is in this one, and waits for it."""
        room = self.room_of(int(request.match_info["room"]))
        room.wanted.set()
        try:
            handed = await asyncio.shield(room.given)
        except asyncio.CancelledError:
            room.taken.set_result(False)
            raise
        room.taken.set_result(handed is not None)
        return web.json_response(handed)

    async def run(self) -> None:
        self.rooms: dict[int, Room] = {}
        if self.args.mode == "prefill":
            app = web.Application()
            app.add_routes([web.post("/room/{room}", self.room)])
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
            await runner.setup()
            await web.TCPSite(runner, self.args.host, self.args.port + 3).start()
        await super().run()

    def cached(self, tokens: list[int], salt: str) -> int:
        return len(tokens) - 1 if self.args.mode == "decode" else super().cached(tokens, salt)

    def read_of(self, tokens: list[int], salt: str, cached: int) -> list[str]:
        return [] if self.args.mode == "decode" else super().read_of(tokens, salt, cached)

    def store(self, tokens: list[int], salt: str) -> None:
        if self.args.mode != "decode":
            super().store(tokens, salt)

    # --- HTTP -----------------------------------------------------------------------------------------------

    def refusal(self, error: dict[str, Any]) -> dict[str, Any]:
        return {"object": "error", **error}

    async def server_info(self, _: web.Request) -> web.Response:
        source = {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": self.args.port + 1,
            "replay_endpoint_port_base": self.args.port + 2,
            "topic": "",
            "block_size": self.args.block_tokens,
            "dp_size": self.args.ranks,
        }
        return web.json_response(
            {
                "page_size": self.args.block_tokens,
                "max_total_num_tokens": self.args.blocks * self.args.block_tokens,
                "disable_radix_cache": self.args.no_prefix_caching or self.args.mode == "decode",
                "disaggregation_mode": self.args.mode,
                "disaggregation_bootstrap_port": self.args.port + 3,
                "enable_hierarchical_cache": False,
                "dp_size": self.args.ranks,
                "max_running_requests": None,
                "chunked_prefill_size": 4096,
                "kv_events": None if self.args.no_events else source,
            }
        )

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"served_model_name": MODEL, "is_generation": True})

    async def loads(self, _: web.Request) -> web.Response:
        return web.json_response({"loads": [{"dp_rank": 0, "token_usage": 0.25}]})

    async def flush_cache(self, _: web.Request) -> web.Response:
        if not self.args.dev_mode:
            return web.Response(status=403)
        if self.running:  # it does not wait, as it may be asked to
            return web.Response(text="Flush cache failed.\n", status=400)
        self.cache.clear()
        self.publish([{"type": "AllBlocksCleared"}])
        return web.Response(text="Cache flushed.\n")

    def own_routes(self) -> list[web.RouteDef]:
        return [
            web.get("/server_info", self.server_info),
            web.get("/model_info", self.model_info),
            web.get("/v1/loads", self.loads),
            web.post("/flush_cache", self.flush_cache),
        ]


def main() -> None:
    parser = options()
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--mode", choices=("null", "prefill", "decode"), default="null")
    asyncio.run(SglangEngine(parser.parse_args()).run())


if __name__ == "__main__":
    main()
