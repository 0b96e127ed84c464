"""Eviction policies compared on the conversation trace, at five capacities, against what no policy can beat.

One pool serves all requests in the order of the trace: each leases what is there of its blocks, reserves and
commits the rest, and is done before the next. Hits are tokens of the longest run of blocks from the first,
over all tokens. The bound is Belady's rule for blocks taken one by one, with the choice not to keep a block
at all (OPT); it knows the future and needs no run from the first block, so every policy is below it.
"""

from __future__ import annotations

import heapq
import sys
import time
from pathlib import Path
from typing import Any

from clusters import finish, parsed, parser

from halfmoon.conductor.simulation.trace import TRACE_BLOCK_TOKENS, read_trace
from halfmoon.store.pool.eviction import EvictionName, make_eviction
from halfmoon.store.pool.pool import Pool
from halfmoon.store.pool.slots import Owner

TRACE = Path(__file__).parent / "traces" / "conversation_trace.jsonl.zst"
CAPACITIES = (1_500, 3_000, 6_000, 12_000, 24_000)
POLICIES: tuple[EvictionName, ...] = ("lru", "lfu", "s3fifo")
Chains = list[tuple[list[bytes], int]]
KEY_BYTES = 16


def chains() -> Chains:
    """(keys of the whole blocks, tokens of the prompt) of each request."""
    return [
        (
            [a.block_keys[i : i + KEY_BYTES] for i in range(0, len(a.block_keys), KEY_BYTES)],
            a.prompt_tokens,
        )
        for a in read_trace(TRACE)
    ]


def run(policy: EvictionName, capacity: int, requests: Chains) -> tuple[float, float]:
    """(share of tokens hit, microseconds a block)."""
    pool = Pool(capacity, eviction=make_eviction(policy))
    hit = 0
    blocks = 0
    started = time.perf_counter()
    for number, (all_keys, _) in enumerate(requests):
        keys = all_keys[:capacity]
        for there in pool.probe(keys):
            if not there:
                break
            hit += TRACE_BLOCK_TOKENS
        owner = Owner(str(number), "worker")
        pool.open_put(owner, keys, len(keys), expires_ns=1)
        pool.commit(owner, dict.fromkeys(range(len(keys)), 0))
        pool.release(owner)
        pool.take_changes()
        blocks += len(keys)
    took = time.perf_counter() - started
    pool.check()
    return hit / sum(tokens for _, tokens in requests), took / blocks * 1e6


def bound(capacity: int, requests: Chains) -> float:
    """OPT: of the blocks held and the one just used, drop the one whose next use is farthest away."""
    uses = [key for keys, _ in requests for key in keys]
    never = len(uses)
    next_use = [never] * never
    seen: dict[bytes, int] = {}
    for at in range(never - 1, -1, -1):
        next_use[at] = seen.get(uses[at], never)
        seen[uses[at]] = at
    held: dict[bytes, int] = {}
    farthest: list[tuple[int, bytes]] = []
    hits = 0
    for at, key in enumerate(uses):
        hits += held.pop(key, None) is not None
        if next_use[at] == never:
            continue
        held[key] = next_use[at]
        heapq.heappush(farthest, (-next_use[at], key))
        while len(held) > capacity:
            when, victim = heapq.heappop(farthest)
            if held.get(victim) == -when:
                del held[victim]
    return hits * TRACE_BLOCK_TOKENS / sum(tokens for _, tokens in requests)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--capacities", type=int, nargs="+", default=CAPACITIES, help="blocks")
    options.add_argument("--requests", type=int, default=None, help="only the first so many of the trace")
    args = parsed(options, capacities=CAPACITIES[:1], requests=1_000)
    requests = chains()[: args.requests]
    rows: list[dict[str, Any]] = []
    lines = [f"{'blocks':>7} {'Mtokens':>8}" + "".join(f"{name:>9}" for name in (*POLICIES, "bound"))]
    for capacity in args.capacities:
        row: dict[str, Any] = {"capacity_blocks": capacity, "bound": round(bound(capacity, requests), 4)}
        for policy in POLICIES:
            hit, cost_us = run(policy, capacity, requests)
            row[policy] = round(hit, 4)
            row[f"{policy}_us_per_block"] = round(cost_us, 2)
        rows.append(row)
        lines.append(
            f"{capacity:>7} {capacity * TRACE_BLOCK_TOKENS / 1e6:>8.2f}"
            + "".join(f"{row[name]:>9.4f}" for name in (*POLICIES, "bound"))
        )
        print(lines[-1], file=sys.stderr)
    finish(args, {"rows": rows, "trace": TRACE.name, "requests": len(requests)}, lines)


if __name__ == "__main__":
    main()
