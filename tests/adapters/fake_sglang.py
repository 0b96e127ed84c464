"""An SGLang that computes nothing: as `fake_engine.py`, with SGLang's words. A program.

It is as strict as SGLang in what differs: `top_k` 0 is a mistake, unknown fields are passed over, a cache is dropped
only while no request runs.
"""

from __future__ import annotations

import asyncio
from typing import Any

import xxhash
from aiohttp import web

from tests.adapters.fake_engine import MODEL, Engine, options


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

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("top_k", -1) == 0:
            error = {"message": "top_k must be -1 (disable) or at least 1, got 0.", "type": "BadRequestError"}
            return web.json_response(self.refusal(error), status=400)
        return await super().complete(request)

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
                "disable_radix_cache": self.args.no_prefix_caching,
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
    asyncio.run(SglangEngine(parser.parse_args()).run())


if __name__ == "__main__":
    main()
