"""`halfmoon chat`: a conversation on the terminal, streaming.

Each turn sends the whole conversation; the part that it shares with the turn before is found in the KVCache.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import orjson

from halfmoon.bus.errors import BusUnreachable
from halfmoon.cli.client.api_client import ApiClient, ApiFailure, add_tenant, api_client
from halfmoon.cli.client.generate import add_sampling, sampling_body, show
from halfmoon.cli.options import add_bus, add_config

#: Default limit of an answer: a small model may never come to an end by itself.
CHAT_TOKENS = 1024


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", nargs="?", help="say this, print the answer, and end; else a conversation")
    parser.add_argument("--system", default="", metavar="TEXT", help="how the model is to behave")
    add_sampling(parser)
    parser.set_defaults(max_tokens=CHAT_TOKENS)
    parser.add_argument("--json", action="store_true", help="print each whole answer as JSON, at its end")
    add_bus(parser)
    add_tenant(parser)
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    """Exit status 0; 1 with one line on standard error when the cluster is not there."""
    messages = [{"role": "system", "content": args.system}] if args.system else []
    try:
        async with api_client(args, args.nats_tenant) as client:
            if args.message is not None:
                return 0 if await _turn(client, args, messages, args.message) else 1
            return await _converse(client, args, messages)
    except BusUnreachable as problem:
        print(f"halfmoon: {problem}", file=sys.stderr)
        return 1


async def _converse(client: ApiClient, args: argparse.Namespace, messages: list[dict[str, str]]) -> int:
    """Until end of input (Ctrl-D) or `/exit`. After an error the turn can be tried again."""
    terminal = sys.stdin.isatty()
    while True:
        try:
            line = (await asyncio.to_thread(input, "> " if terminal else "")).strip()
        except EOFError:
            return 0
        if line in ("/exit", "/quit"):
            return 0
        if line and not await _turn(client, args, messages, line) and not terminal:
            return 1


async def _turn(
    client: ApiClient, args: argparse.Namespace, messages: list[dict[str, str]], line: str
) -> bool:
    """Say `line`, show the answer, and remember both; False after an error, which is remembered by nobody."""
    said = [*messages, {"role": "user", "content": line}]
    try:
        answer = await show(client, "chat", {"messages": said, **sampling_body(args)}, quiet=args.json)
    except ApiFailure as failure:
        if args.json:
            print(orjson.dumps(failure.body).decode())
        print(f"halfmoon: {failure} ({failure.status})", file=sys.stderr)
        return False
    print(orjson.dumps(answer).decode() if args.json else "", flush=True)
    messages[:] = [*said, {"role": "assistant", "content": answer["text"]}]
    return True
