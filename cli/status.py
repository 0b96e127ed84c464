"""`halfmoon status`: nodes, load, queues, cache and hit rate, as the conductors see them."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

import orjson

from halfmoon.bus.errors import BusUnreachable
from halfmoon.cli.client.api_client import ApiFailure, api_client
from halfmoon.cli.options import add_bus, add_config

WATCH_S = 1.0
_CLEAR = "\x1b[H\x1b[2J"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON; with --watch one line a second")
    parser.add_argument("--watch", action="store_true", help="go on until interrupted")
    add_bus(parser)
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    """Exit status 0 when the cluster is ready to serve, 2 when it is up but not ready, 1 when nobody answers."""
    try:
        async with api_client(args) as client:
            while True:
                status = await client.call("status", {}, timeout_s=5)
                text = orjson.dumps(status).decode() if args.json else describe(status)
                print(_CLEAR + text if args.watch and not args.json else text, flush=True)
                if not args.watch:
                    return 0 if status["ready"] else 2
                await asyncio.sleep(WATCH_S)
    except (BusUnreachable, ApiFailure) as problem:
        print(f"halfmoon: {problem}", file=sys.stderr)
        return 1


def _longest(status: dict[str, Any]) -> str:
    tokens = status.get("request_tokens_max", 0)
    return f", for requests of up to {tokens} tokens" if tokens else ""


def _roles(roles: dict[str, Any]) -> list[str]:
    """The workers that the load asks for, where roles may change by it."""
    if roles.get("elastic", "off") == "off":
        return []
    pools = ", ".join(
        f"{role} {pool['wanted']} ({pool['workers']} there)" for role, pool in roles["pools"].items()
    )
    lines = ["", f"roles by load ({roles['elastic']}): {roles['changes']} changed; workers wanted: {pools}"]
    if advised := roles.get("advised"):
        lines.append(f"advised: halfmoon role {advised['worker']} {advised['role']}: {advised['reason']}")
    return lines


def _nowhere(nodes: list[dict[str, Any]]) -> list[str]:
    """Decode workers whose KV attention workers should hold, and cannot."""
    found = [node for node in nodes if node.get("no_attention")]
    if not found:
        return []
    names = ", ".join(node["id"] for node in found)
    return ["", f"decodes nothing new: {names} ({found[0]['no_attention']})"]


def _cache(cache: dict[str, Any]) -> list[str]:
    """Tokens that were found of prompts, and what stood in for them."""
    cached = cache["cached_local_tokens"] + cache["cached_fetched_tokens"]
    lines = [
        f"cache: {cache['blocks']} blocks; of {cache['prompt_tokens']} prompt tokens {cached} were found "
        f"({100 * cached / max(1, cache['prompt_tokens']):.1f} %), {cache['cached_fetched_tokens']} on other nodes"
    ]
    if requests := cache.get("similar_requests"):
        lines.append(
            f"similar prompts: KV of another stood in for {cache['similar_tokens']} tokens of {requests} requests; "
            f"of these {cache['similar_computed_tokens']} tokens were computed, on the mean over layers"
        )
    return lines


def describe(status: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"{status['model']}: {'ready' if status['ready'] else 'not ready'}"
        + (f" ({problem})" if (problem := status.get("problem")) else "")
        + _longest(status),
        f"NATS {status['nats']}  HTTP {status['http'] or '-'}",
        *(["placements are paused: halfmoon resume"] if status.get("paused") else []),
        *([f"weights: version {version}"] if (version := status.get("weight_version")) else []),
        "",
        f"{'node':<24} {'role':<9} {'state':<10} {'queued':>7} {'running':>8} {'KV used':>10} {'of':>10}",
    ]
    for node in status["nodes"]:
        lines.append(
            f"{node['id']:<24} {node['role']:<9} {node['state']:<10} {node['queued']:>7} {node['running']:>8} "
            f"{node['kv_used']:>10} {node['kv_total']:>10}"
        )
    lenders = [f"{node['id']} {node['kv_lent']}" for node in status["nodes"] if node.get("kv_lent")]
    if lenders:
        lines += ["", f"blocks lent to other workers' requests: {', '.join(lenders)}"]
    moves = status.get("moves", {})
    if moves.get("done") or moves.get("refused"):
        lines.append(
            f"KV moved while decoding: {moves['tokens']} tokens ({moves['bytes']} bytes) in {moves['done']} moves; "
            f"{moves['refused']} refused"
        )
    divided = [
        f"{node['id']} in {node['groups']} groups"
        + "".join(f", {count} by {split}" for split, count in node.get("splits", {}).items())
        for node in status["nodes"]
        if node.get("groups")
    ]
    if divided:
        lines += ["", f"KV at attention workers: {'; '.join(divided)}"]
    lines += _nowhere(status["nodes"])
    slow = [
        f"{node['id']} ({node['slow_wait_ms']} ms of a step, where {node['slow_expected_ms']} were measured)"
        for node in status["nodes"]
        if node.get("slow_wait_ms")
    ]
    if slow:
        lines += ["", f"slow, and avoided for new KV: {', '.join(slow)}"]
    changing = [
        f"{node['id']} becomes a {node['becomes']} worker" for node in status["nodes"] if node.get("becomes")
    ]
    if changing:
        lines += ["", "; ".join(changing)]
    lines += _roles(status.get("roles", {}))
    inexact = [node["id"] for node in status["nodes"] if node.get("exact_numerics") == "not_held"]
    if inexact:
        lines += ["", f"exact numerics: not held on the CPU of {', '.join(inexact)}"]
    if requests := status.get("requests"):
        rejected = sum(requests["rejected"].values())
        lines += [
            "",
            f"requests: {requests['in_flight']} in flight, {requests['parked']} waiting for a worker; "
            f"{requests['finished']} finished, {requests['failed']} failed, {requests['cancelled']} cancelled, "
            f"{rejected} rejected",
        ]
    if cache := status.get("cache"):
        lines += _cache(cache)
    conductors = ", ".join(
        f"{each['id']} at {each['seq']} ({each['digest'][:8]})" for each in status["conductors"]
    )
    lines.append(f"conductors: {conductors or 'none answers'}")
    return "\n".join(lines)
