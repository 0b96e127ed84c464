"""Long prompts on two prefill workers together and on one, live: the time, and how much of it each stage computed.

    python benchmarks/stages.py [--rounds N] [--tokens N] [--save NAME]

The built-in model, f32, exact, one thread a worker, every prompt cold. By turns alone (`prefill_group` 1) and together.
All from the events: `StageFinished` says for how long the first stage computed, `PrefillFinished` how long the whole
took and what the last stage waited of it. Bubbles: the share of both workers' time in which they did not compute, from
the first chunk's begin to the last one's end.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import urllib.request
from typing import Any

import msgspec
from clusters import bus_config, cluster, finish, parsed, parser, spread
from simulation_live import read_log

from halfmoon.bus.connection import Bus
from halfmoon.bus.streams import StreamLimits
from halfmoon.schemas import subjects
from halfmoon.schemas.events import ClusterConfigured, PolicyChanged, PrefillFinished, StageFinished

FLAGS = ("--prefill", "2", "--decode", "1", "--prefill-group", "2", "--dtype", "float32", "--pool-mib", "512")
PAUSE_S = 1.0
#: Rounds that there may be for each that is wanted.
ROUNDS_MORE = 4


def ask(http: str, number: int, tokens: int) -> None:
    """A prompt that no other one begins like."""
    prompt = [(i * i * 31 + 17 * i + 1_013 * number) % 40_000 + 20 for i in range(tokens)]
    body = {"model": "", "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{http}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.read()


async def set_group(addresses: dict[str, Any], size: int) -> None:
    """Also where the price says that it hardly pays, as two workers share this machine, and where arrivals find half of
    the workers busy, as prompts that take longer than the pauses do.
    """
    first = next(
        s.event for s in await read_log(bus_config(addresses)) if isinstance(s.event, ClusterConfigured)
    )
    policy = msgspec.structs.replace(
        first.policy,
        prefill_group=size,
        group_from="idle",
        group_gain_percent=1,
        correction_window=0,
        admission="none",
    )
    bus = await Bus.connect(bus_config(addresses), name=subjects.OPERATOR, limits=StreamLimits(replicas=0))
    await bus.append(PolicyChanged(policy=policy), source_id=subjects.OPERATOR)
    await bus.close()


async def measured(addresses: dict[str, Any], rounds: int, tokens: int) -> tuple[list[float], list[Any]]:
    """Seconds of each prompt alone; of those together, both stages' events.

    A worker that a neighbour slowed once is priced as slow, and then its group is not worth its price: so there are
    more rounds, until as many prompts as there should be were computed together.
    """
    alone: list[float] = []
    pairs: list[Any] = []
    for number in range(ROUNDS_MORE * rounds):
        for size in (1, 2):
            await set_group(addresses, size)
            await asyncio.sleep(PAUSE_S)
            await asyncio.to_thread(ask, addresses["http"], 2 * number + size, tokens)
            await asyncio.sleep(PAUSE_S)
        events = [stamped.event for stamped in await read_log(bus_config(addresses))]
        parts = {one.order_id: one for one in events if isinstance(one, StageFinished)}
        whole = [one for one in events if isinstance(one, PrefillFinished) and one.prompt_tokens == tokens]
        alone = [one.compute_ns / 1e9 for one in whole if not one.stages]
        pairs = [(one, parts[one.order_id]) for one in whole if one.stages]
        if len(pairs) >= rounds:
            break
    return alone, pairs


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, default=2_560)
    args = parsed(options, rounds=1)
    with cluster(*FLAGS) as addresses:
        alone, pairs = asyncio.run(measured(addresses, args.rounds, args.tokens))
    if not alone or not pairs:
        raise SystemExit(f"{len(alone)} prompts alone, {len(pairs)} together: nothing to compare")
    shares = [
        {
            "first": part.compute_ns / whole.compute_ns,
            "last": 1 - whole.stage_wait_ns / whole.compute_ns,
        }
        for whole, part in pairs
    ]
    together = [whole.compute_ns / 1e9 for whole, _ in pairs]
    bubbles = [1 - (share["first"] + share["last"]) / 2 for share in shares]
    chunks = -(-args.tokens // 256)
    result = {
        "tokens": args.tokens,
        "alone_s": spread(alone),
        "together_s": spread(together),
        "together_over_alone": round(statistics.median(together) / statistics.median(alone), 3),
        "first_stage_computes": spread([share["first"] for share in shares]),
        "last_stage_computes": spread([share["last"] for share in shares]),
        "bubbles": spread(bubbles),
        "bubbles_of_equal_chunks": round(1 / (chunks + 1), 4),
    }
    lines = [
        f"{args.tokens} tokens alone {result['alone_s']['p50']} s, together {result['together_s']['p50']} s: "  # type: ignore[index]
        f"{result['together_over_alone']} ({len(alone)} and {len(pairs)} prompts)",
        f"of that time the first stage computes {statistics.median(s['first'] for s in shares):.1%}, the last "
        f"{statistics.median(s['last'] for s in shares):.1%}; bubbles {statistics.median(bubbles):.1%} "
        f"({min(bubbles):.1%} to {max(bubbles):.1%}), {1 / (chunks + 1):.1%} with {chunks} equal chunks and free hops",
    ]
    finish(args, result, lines)


if __name__ == "__main__":
    main()
