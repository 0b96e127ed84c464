"""A vLLM that computes nothing: its HTTP API, its prefix cache, its KV events over real sockets. A program.

    fake_engine.py PORT [--block-tokens 16] [--blocks 512] [--token-us 50] [--no-events] …

The next token is a hash of all before it, so an answer that is begun at one engine and goes on at another is the same
as at one. With `--connector` it keeps the KV of prompts for other engines, and gets it from them, as vLLM's
NixlConnector does (`kv_transfer_params`). `GET /asked` tells what it was asked and what became of it; `POST /fault` has
it lie, forget, fall silent, or hold its answers after some tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import OrderedDict, deque
from typing import Any

import aiohttp
import msgspec
import xxhash
import zmq
import zmq.asyncio
from aiohttp import web

from halfmoon.workers.model.text.tokenizer import Tokenizer

MODEL, EOS = "fake", 2


def next_token(tokens: list[int]) -> int:
    return 1000 + xxhash.xxh64(b"".join(each.to_bytes(4, "little") for each in tokens)).intdigest() % 40_000


def _extra(salt: str, parent: int | None) -> list[str] | None:
    return [salt] if parent is None and salt else None


class Engine:
    """One queue of prompts, all answers side by side."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        #: By hash: what makes it, the least recently used first.
        self.cache: OrderedDict[int, tuple[int | None, list[int], str]] = OrderedDict()
        #: Of the weights, and of those that computed each block: a change of weights leaves the cache as it is.
        self.weights, self.computed_by = "", dict[int, str]()
        #: The cache was dropped, which the next events tell.
        self.dropped = False
        self.asked: list[dict[str, Any]] = []
        self.running = 0
        self.computing = asyncio.Lock()
        self.tokenizer = Tokenizer.load(args.tokenizer) if args.tokenizer else None
        # Faults.
        self.unsent = 0
        self.refuses: dict[str, Any] = {}
        #: Answers stand still after so many tokens, until they are let go.
        self.held_after = 0
        self.let_go = asyncio.Event()
        self.let_go.set()
        self.breaks = 0
        #: KV of prompts that another engine will get, by the request's number here.
        self.lent: dict[str, list[int]] = {}
        self.loses_lent = False
        self.takes_names = False
        # KV events.
        self.seq, self.kept = args.first_seq, deque[tuple[int, bytes]](maxlen=args.kept)
        context = zmq.asyncio.Context()
        self.pub, self.router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        if not args.no_events:
            self.pub.bind(f"tcp://{args.host}:{args.port + 1}")
            self.router.bind(f"tcp://{args.host}:{args.port + 2}")

    # --- KV events ------------------------------------------------------------------------------------------

    def publish(self, events: list[Any]) -> None:
        if not self.args.no_events and events:
            self.publish_raw(msgspec.msgpack.encode([time.time(), events, 0]))

    def publish_raw(self, payload: bytes) -> None:
        self.kept.append((self.seq, payload))
        if self.unsent:
            self.unsent -= 1
        else:
            self.pub.send_multipart([b"", self.seq.to_bytes(8, "big"), payload])
        self.seq += 1

    async def answer_replays(self) -> None:
        while True:
            who, _, start = await self.router.recv_multipart()
            for seq, payload in list(self.kept):
                if seq >= int.from_bytes(start, "big"):
                    await self.router.send_multipart([who, b"", b"", seq.to_bytes(8, "big"), payload])
            await self.router.send_multipart([who, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    def blocks_of(self, tokens: list[int], salt: str) -> list[tuple[int, int | None, list[int]]]:
        """Hash, parent and tokens of each whole block."""
        size, parent, found = self.args.block_tokens, None, []
        for start in range(0, len(tokens) - size + 1, size):
            part = tokens[start : start + size]
            name = xxhash.xxh64(repr((parent, part, salt if parent is None else "")).encode()).intdigest()
            found.append((name, parent, part))
            parent = name
        return found

    def cached(self, tokens: list[int], salt: str) -> int:
        count = 0
        for name, _, _ in self.blocks_of(tokens, salt):
            if name not in self.cache:
                break
            self.cache.move_to_end(name)
            count += 1
        return min(count * self.args.block_tokens, len(tokens) - 1)

    def read_of(self, tokens: list[int], salt: str, cached: int) -> list[str]:
        """Versions of the weights that computed the blocks which are read."""
        blocks = self.blocks_of(tokens, salt)[: -(-cached // self.args.block_tokens)]
        return sorted({self.computed_by[name] for name, _, _ in blocks})

    def store(self, tokens: list[int], salt: str) -> None:
        events: list[Any] = [{"type": "AllBlocksCleared"}] if self.dropped else []
        self.dropped = False
        new = [block for block in self.blocks_of(tokens, salt) if block[0] not in self.cache]
        for _ in range(len(self.cache) + len(new) - self.args.blocks):
            name, _ = self.cache.popitem(last=False)
            events.append({"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0})
        for name, parent, part in new:
            self.cache[name] = (parent, part, salt)
            self.computed_by[name] = self.weights
        if new:
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": [name for name, _, _ in new],
                    "parent_block_hash": new[0][1],
                    "token_ids": [token for _, _, part in new for token in part],
                    "block_size": self.args.block_tokens,
                    "lora_id": None,
                    "medium": "GPU",
                    **self.of_others(new, salt),
                }
            )
        self.publish(events)

    def of_others(self, new: list[tuple[int, int | None, list[int]]], salt: str) -> dict[str, Any]:
        """Fields of an event that other engines do not have."""
        salts = None if self.args.no_salts else [_extra(salt, parent) for _, parent, _ in new]
        return {
            "lora_name": None,
            "extra_keys": salts,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }

    # --- HTTP -----------------------------------------------------------------------------------------------

    def keep(
        self, tokens: list[int], drawn: int, reason: str | None, name: str | None
    ) -> dict[str, Any] | None:
        """Where another engine gets the KV of the prompt; None: it does not. `name`: the asker's, if it has one."""
        if not self.args.connector or reason != "length":
            return None
        name = name or f"kv-{len(self.lent)}"
        self.lent[name] = [] if self.loses_lent else tokens[: len(tokens) - drawn]
        if self.takes_names:
            return {
                "do_remote_prefill": True,
                "halfmoon_order": name,
                "halfmoon_worker": f"engine-{self.args.port}",
            }
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": f"engine-{self.args.port}",
            "remote_request_id": name,
            "remote_block_ids": list(range(len(self.blocks_of(tokens, "")))),
            "remote_host": "127.0.0.1",
            "remote_port": self.args.port,
        }

    async def give(self, request: web.Request) -> web.Response:
        """To another engine, once."""
        name = request.match_info["name"]
        while self.takes_names and name not in self.lent:  # it may ask before the prompt is computed
            await asyncio.sleep(0.01)
        tokens = self.lent.pop(name, None)
        return web.json_response(tokens, status=404 if tokens is None else 200)

    async def fetched(self, params: dict[str, Any], tokens: list[int]) -> bool:
        """Whether another engine had the KV of all these tokens."""
        if "halfmoon_worker" in params:
            port, name = params["halfmoon_worker"].removeprefix("engine-"), params["halfmoon_order"]
        else:
            port, name = params["remote_port"], params["remote_request_id"]
        place = f"http://127.0.0.1:{port}/lent/{name}"
        try:
            async with aiohttp.ClientSession() as session, session.post(place) as response:
                return bool(await response.json() == tokens)
        except aiohttp.ClientError:
            return False

    def has_lender(self, body: dict[str, Any]) -> bool:
        """It names an engine that has computed the prompt."""
        return self.args.connector and (body.get("kv_transfer_params") or {}).get("do_remote_prefill", False)

    def tokens_of(self, body: dict[str, Any]) -> list[int]:
        """Of a prompt in token ids, of a text, or of a chat."""
        prompt = body.get("prompt", body.get("messages"))
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return prompt
        assert self.tokenizer is not None
        return self.tokenizer.encode(prompt if isinstance(prompt, str) else json.dumps(prompt))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        return await self.answer(request, await request.json())

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        params = body.get("kv_transfer_params") or {}
        if (refuses := self.refuses) and (not refuses.get("lent_only") or self.has_lender(body)):
            status, error = refuses["status"], refuses["error"]
            if not refuses.get("streamed"):
                headers = refuses.get("headers")
                return web.json_response(self.refusal(error), status=status, headers=headers)
            line = b"data: " + json.dumps({"error": {**error, "code": status}}).encode() + b"\n\n"
            return web.Response(body=line, content_type="text/event-stream")
        tokens, salt = self.tokens_of(body), body.get("cache_salt", "")
        streams = body.get("stream", False)
        about = {"prompt": len(tokens), "cached": 0, "drawn": 0, "end": "", "salt": salt, "body": body}
        about["weights"] = self.weights
        about["connection"] = request.transport and request.transport.get_extra_info("peername")[1]
        self.asked.append(about)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        if streams:
            await response.prepare(request)
        self.running += 1
        try:
            if not await self.meets(body, tokens):
                return await self.failed(about, response if streams else None)
            async with self.computing:
                about["cached"] = self.cached(tokens, salt)
                about["read"] = self.read_of(tokens, salt, about["cached"])
                if self.has_lender(body):
                    if not await self.fetched(params, tokens):
                        return await self.failed(about, response)
                    about["cached"] = len(tokens) - 1
                await asyncio.sleep((len(tokens) - about["cached"]) * self.args.token_us / 1e6)
                self.store(tokens, salt)
            for drawn in range(1, body["max_tokens"] + 1):
                if drawn > self.held_after:
                    await self.let_go.wait()
                if self.breaks and request.transport is not None:
                    self.breaks -= 1
                    about["end"] = "broken"
                    request.transport.abort()
                    return response
                tokens.append(next_token(tokens))
                about["drawn"] = drawn
                reason = "length" if drawn == body["max_tokens"] else None
                ids = None if self.args.no_token_ids else tokens[-1:] if streams else tokens[-drawn:]
                choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": reason}
                if not streams:
                    if reason is None:
                        continue
                    if not await self.lends(body, tokens, drawn, about):
                        return await self.failed(about, None)
                    about["end"] = reason
                    told = {"kv_transfer_params": about["kept"]} if "kept" in about else {}
                    return web.json_response({"choices": [choice], **told})
                await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            self.store(tokens[:-1], salt)
            about["end"] = "length"
            await asyncio.sleep(0.001)  # the stream ends later than the answer, as with real engines
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            about["end"] = "aborted"
            raise
        finally:
            self.running -= 1
        return response

    async def failed(self, about: dict[str, Any], response: web.StreamResponse | None) -> web.StreamResponse:
        """KV does not come, or does not go. `response`: the stream that tells it; None: there is none."""
        about["end"] = "not fetched"
        error = {"error": {"message": "KV load failure", "code": 500}}
        if response is None:
            return web.json_response(error, status=500)
        await response.write(b"data: " + json.dumps(error).encode() + b"\n\n")
        return response

    async def meets(self, body: dict[str, Any], tokens: list[int]) -> bool:
        """Before the prompt is computed: whether the engine that has the other half of the request is there."""
        return True

    async def lends(self, body: dict[str, Any], tokens: list[int], drawn: int, about: dict[str, Any]) -> bool:
        """A prompt was computed, as a whole answer: whether all is well with its KV."""
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            about["kept"] = self.keep(tokens, drawn, "length", params.get("halfmoon_order"))
        return True

    def refusal(self, error: dict[str, Any]) -> dict[str, Any]:
        return {"error": error}

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        if not self.args.dev_mode:
            return web.Response(status=404)
        if not self.running:  # a block that some request has would keep all
            self.cache.clear()
            self.dropped = True
        return web.Response()

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL, "max_model_len": self.args.context}]})

    async def metrics(self, _: web.Request) -> web.Response:
        info = f'block_size="{self.args.block_tokens}",num_gpu_blocks="{self.args.blocks}"'
        if self.args.no_prefix_caching:
            info += ',enable_prefix_caching="False"'
        lines = [
            f"vllm:cache_config_info{{{info}}} 1.0",
            f'vllm:num_requests_running{{model_name="{MODEL}"}} {self.running}',
            f'vllm:kv_cache_usage_perc{{model_name="{MODEL}"}} 0.25',
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def sources(self, _: web.Request) -> web.Response:
        source = {
            "enable_kv_cache_events": not self.args.no_events,
            "endpoint": f"tcp://*:{self.args.port + 1}",
            "replay_endpoint": f"tcp://*:{self.args.port + 2}",
            "topic": "",
        }
        return web.json_response({"0": source})

    async def tokenize(self, request: web.Request) -> web.Response:
        if self.tokenizer is None:
            return web.json_response({"tokens": [1, 2, 3]})
        return web.json_response({"tokens": self.tokenizer.encode((await request.json())["prompt"])})

    async def tell_asked(self, _: web.Request) -> web.Response:
        return web.json_response(self.asked)

    async def fault(self, request: web.Request) -> web.Response:
        body = await request.json()
        match body["kind"]:
            # The next batches are kept and not published. It tells how many of the ones before are still to come.
            case "unsent":
                left, self.unsent = self.unsent, body["batches"]
                return web.json_response({"left": left})
            case "hold":
                self.held_after = body["after"]
                self.let_go.clear()
            # So many answers break off when they go on.
            case "break":
                self.breaks = body["answers"]
            case "let go":
                self.let_go.set()
            case "lose lent":  # what it keeps for other engines
                self.loses_lent = body["on"]
            case "connector":
                self.args.connector = body["on"]
                self.takes_names = body.get("names", False)
            case "forget":  # nobody can ask for them any more
                self.kept.clear()
            case "clear":
                self.cache.clear()
                self.publish([{"type": "AllBlocksCleared"}])
            case "weights":  # changed in place
                self.weights = body["version"]
            case "dev mode":
                self.args.dev_mode = body["on"]
            case "raw":  # whatever it is
                self.publish_raw(bytes.fromhex(body["payload"]))
            case "events":
                self.publish(body["events"])
            case "refuse":
                self.refuses = body if body["status"] else {}
        return web.json_response({})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    def own_routes(self) -> list[web.RouteDef]:
        """Those that other engines do not have."""
        return [
            web.get("/metrics", self.metrics),
            web.get("/kv_event_sources", self.sources),
            web.get("/health", self.health),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),
        ]

    async def run(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.post("/v1/completions", self.complete),
                web.post("/v1/chat/completions", self.complete),
                web.get("/v1/models", self.models),
                web.post("/tokenize", self.tokenize),
                web.get("/asked", self.tell_asked),
                web.post("/lent/{name}", self.give),
                web.post("/fault", self.fault),
                *self.own_routes(),
            ]
        )
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, self.args.host, self.args.port).start()
        await self.answer_replays()


def main() -> None:
    asyncio.run(Engine(options().parse_args()).run())


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--token-us", type=float, default=50)
    parser.add_argument("--kept", type=int, default=10_000)
    parser.add_argument("--first-seq", type=int, default=0)
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct")
    parser.add_argument("--no-events", action="store_true")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--no-salts", action="store_true")
    parser.add_argument("--no-token-ids", action="store_true")
    parser.add_argument("--connector", action="store_true")
    parser.add_argument("--dev-mode", action="store_true")
    return parser


if __name__ == "__main__":
    main()
