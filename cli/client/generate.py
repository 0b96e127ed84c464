"""`halfmoon generate "text"`: continue a text, streaming."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import orjson

from halfmoon.bus.errors import BusUnreachable
from halfmoon.cli.client.api_client import ApiClient, ApiFailure, add_tenant, api_client
from halfmoon.cli.options import add_bus, add_config

_FIELDS: tuple[str, ...] = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
)
_FIELDS += ("tenant", "cache_salt", "priority")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", help='the prompt; "-" reads it from standard input')
    add_sampling(parser)
    parser.add_argument("--json", action="store_true", help="print the whole answer as JSON, at its end")
    add_bus(parser)
    add_tenant(parser)
    add_config(parser)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Options of `generate` and `chat`; an absent one is left to the frontend."""
    group = parser.add_argument_group("generation")
    group.add_argument("--max-tokens", type=int, metavar="N")
    group.add_argument("--temperature", type=float, metavar="T", help="0: always the likeliest token")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--seed", type=int)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be given repeatedly"
    )
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on to --max-tokens")
    group.add_argument("--tenant", help="whose KVCache may be reused")
    group.add_argument("--cache-salt", help="a secret that sets its KVCache apart")
    group.add_argument("--priority", type=int, help="as vLLM's: smaller is earlier, larger is refused first")
    group.add_argument("--ttft-slo-ms", dest="slo_ttft_ms", type=float, metavar="MS")
    group.add_argument("--tbt-slo-ms", dest="slo_tbt_ms", type=float, metavar="MS")


def sampling_body(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request body that were given."""
    body = {name: getattr(args, name) for name in _FIELDS if getattr(args, name) is not None}
    slo = {"ttft_ms": args.slo_ttft_ms, "tbt_ms": args.slo_tbt_ms}
    slo = {name: value for name, value in slo.items() if value is not None}
    return {**body, "slo": slo} if slo else body


async def run(args: argparse.Namespace) -> int:
    """Exit status 0; 1 with one line on standard error when the answer is an error."""
    prompt = sys.stdin.read() if args.text == "-" else args.text
    try:
        async with api_client(args, args.nats_tenant) as client:
            answer = await show(
                client, "generate", {"prompt": prompt, **sampling_body(args)}, quiet=args.json
            )
    except BusUnreachable as problem:
        print(f"halfmoon: {problem}", file=sys.stderr)
        return 1
    except ApiFailure as failure:
        if args.json:
            print(orjson.dumps(failure.body).decode())
        print(f"halfmoon: {failure} ({failure.status})", file=sys.stderr)
        return 1
    print(orjson.dumps(answer).decode() if args.json else "")
    return 0


async def show(client: ApiClient, name: str, body: dict[str, Any], *, quiet: bool = False) -> dict[str, Any]:
    """Print the answer's text while it comes; returns the answer. Raises ApiFailure."""
    answer: dict[str, Any] = {}
    async for chunk in client.stream(name, body):
        if chunk.get("done"):
            answer = chunk
        elif not quiet and chunk["text"]:
            sys.stdout.write(chunk["text"])
            sys.stdout.flush()
    return answer
