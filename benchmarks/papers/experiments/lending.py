"""Experiments about instances that lend: Infinite-LLM's gain against the variance of lengths and against instances."""

from __future__ import annotations

import random
from math import log, sqrt

import msgspec

from benchmarks.papers.experiments.runner import Context, Section
from benchmarks.papers.infinite_llm import NOBODY_LENDS, Lending, simulate_infinite_llm
from benchmarks.papers.plots import curves
from benchmarks.papers.report import DecodeReport
from halfmoon.conductor.simulation.profiles import LLAMA2_TWO_A100
from halfmoon.conductor.simulation.report import Objectives
from halfmoon.conductor.simulation.trace import Arrival

PROFILE = LLAMA2_TWO_A100
#: Tokens of one instance's cache.
CACHE_TOKENS = PROFILE.kv_bytes // PROFILE.token_bytes
CLIENTS, FILL, ANSWER_TOKENS, TURNS = 4, 0.9, 200, 40
DEVIATIONS = (0.0, 0.25, 0.5, 1.0, 2.0)
INSTANCES = (2, 4, 8, 16)
#: Where one instance has the long requests: more clients, and the others' requests short.
SKEWED_CLIENTS, SHORT_TOKENS = 16, 200
PLACED = Lending(move_tokens=0)
MOVED = Lending(placed=False, move_tokens=16)
MOVED_FASTER = Lending(placed=False, move_tokens=32)


def requests(count: int, deviation: float, *, longest: int = CACHE_TOKENS * 95 // 100) -> list[Arrival]:
    """Prompts drawn log-normal (seed 1) with `deviation` means as standard deviation, cut at `longest`."""
    draw = random.Random(1)
    mean = FILL * CACHE_TOKENS / CLIENTS - ANSWER_TOKENS
    sigma = sqrt(log(1 + deviation**2))
    return [
        Arrival(
            at_ns=0,
            prompt_tokens=min(
                longest - ANSWER_TOKENS,
                max(32, round(draw.lognormvariate(log(mean) - sigma**2 / 2, sigma))),
            ),
            output_tokens=ANSWER_TOKENS,
        )
        for _ in range(count)
    ]


def _run(context: Context, instances: int, deviation: float, lending: Lending) -> DecodeReport:
    context.say(f"  {instances} instances, deviation {deviation:g}, {lending}")
    return _simulated(requests(instances * CLIENTS * TURNS, deviation), instances, lending)


def skewed(instances: int, long_tokens: int) -> list[Arrival]:
    """Short requests, but every eighth of the first instance's has a prompt of `long_tokens`."""
    return [
        Arrival(
            at_ns=0,
            prompt_tokens=long_tokens if place % (8 * instances) == 0 else SHORT_TOKENS,
            output_tokens=ANSWER_TOKENS,
        )
        for place in range(instances * SKEWED_CLIENTS * TURNS // 2)
    ]


def _skewed_row(instances: int, percent: int) -> list[str]:
    alone, lent = skew_gain(instances, CACHE_TOKENS * percent // 100)
    return [
        f"{instances}, skewed",
        f"long ones {percent} % of a cache",
        f"{alone.pools.tokens_s:.0f}",
        f"{alone.pools.batch:.1f} → {lent.pools.batch:.1f}",
        f"{lent.pools.tokens_s / alone.pools.tokens_s:.2f}",
        "",
        "",
    ]


def skew_gain(instances: int, long_tokens: int) -> tuple[DecodeReport, DecodeReport]:
    """Without lending, and with it."""
    arrivals = skewed(instances, long_tokens)
    alone, lent = (
        _simulated(arrivals, instances, one, clients=SKEWED_CLIENTS) for one in (NOBODY_LENDS, PLACED)
    )
    return alone, lent


def _simulated(
    arrivals: list[Arrival], instances: int, lending: Lending, *, clients: int = CLIENTS
) -> DecodeReport:
    lending = msgspec.structs.replace(lending, clients=clients)
    report = simulate_infinite_llm(
        arrivals, instances, CACHE_TOKENS, PROFILE, lending=lending, slo=Objectives()
    )
    if not report.complete:
        raise KeyboardInterrupt  # half a run is no result
    return report


def infinite_llm(context: Context) -> Section:
    """Tokens a second over those of the same instances without lending, and the longest context."""
    rows: list[list[str]] = []
    lines: dict[str, list[tuple[float, float]]] = {}
    for instances in INSTANCES:
        for deviation in DEVIATIONS:
            alone = _run(context, instances, deviation, NOBODY_LENDS)
            found = [_run(context, instances, deviation, one) for one in (PLACED, MOVED, MOVED_FASTER)]
            gains = [one.pools.tokens_s / alone.pools.tokens_s for one in found]
            batches = [one.pools.batch for one in found]
            lines.setdefault(f"{instances} instances", []).append((deviation, gains[0]))
            rows.append(
                [
                    str(instances),
                    f"{deviation:g}",
                    f"{alone.pools.tokens_s:.0f}",
                    f"{alone.pools.batch:.1f} → {batches[0]:.1f}",
                    *(f"{gain:.2f}" for gain in gains),
                ]
            )
    rows += [_skewed_row(instances, percent) for instances in (2, 3, 4) for percent in (30, 60, 90)]
    rows.append(["**paper**", "traces 0 to 2", "", "", "1.35 to 1.73", "", ""])
    plot = curves(
        context.plot("infinite-llm"),
        lines,
        xlabel="standard deviation of prompts over their mean",
        ylabel="tokens/s over those without lending",
        title="Infinite-LLM: what lending gains",
        level=1.0,
    )
    return Section(
        title="Infinite-LLM: instances that lend",
        setting=f"LLaMA2-70B, an instance is 2 × A100-80GB with room for {CACHE_TOKENS:,} tokens. Decode alone. Each "
        f"instance has {CLIENTS} clients, who send their next request when the last is answered; a mean request takes "
        f"{FILL / CLIENTS:.1%} of a cache. Prompts are drawn log-normal and cut at 95 % of a cache, answers have "
        f"{ANSWER_TOKENS} tokens. Tokens a second once every client has sent a request, over those of the same "
        "instances that do not lend: new requests borrow when they are placed; or only running requests are moved, 16 "
        "or 32 tokens a step (the paper's own figure for 32: -8.6 % speed, which is what a step costs here). Skewed: "
        f"{SKEWED_CLIENTS} clients an instance, all requests short, but every eighth of the first instance's.",
        columns=[
            "instances",
            "deviation / mean",
            "tokens/s alone",
            "batch",
            "gain, placed",
            "gain, moved 16",
            "gain, moved 32",
        ],
        rows=rows,
        why=[*_limits(), *WHY],
        plots=[plot.name],
    )


WHY = [
    "The control: equal lengths gain nothing, whoever lends. The gain grows with the variance of lengths and with the "
    "number of instances. It stays below the paper's band: no batch is larger than the clients.",
    "Lending gains where steps are bound by the weights, so that one more sequence costs little: room is what "
    "lacks. Where attention to a full cache takes longer than the weights do, a lender loses much of what a borrower "
    "gains, and the planner lends less.",
    "Moves of 16 tokens a step take longer than these answers last to free the room that a request needs, and that "
    "room is booked twice meanwhile. In halfmoon a prompt's KV lies in the pool, and lenders fetch it from there: what "
    "is borrowed when a request is placed need not be moved.",
    "Where one of two instances has all the long requests, lending gains what its clients lost, up to a quarter of "
    "all; the more instances have enough room anyway, the less that is of the whole.",
    "The paper's figures are of real instances whose requests come by a trace; how its balancer dealt them, and what "
    "its variances were in units of a cache, is not said. Clients that wait for their answers keep every instance "
    "loaded alike, which is the milder case.",
]


def _limits() -> list[str]:
    """The longest request with and without lending, found by sending it."""
    found = []
    for instances, lending in ((8, NOBODY_LENDS), (8, PLACED)):
        low, high = CACHE_TOKENS // 2, 9 * CACHE_TOKENS
        while high - low > 16:
            middle = (low + high) // 2
            alone = [Arrival(at_ns=0, prompt_tokens=middle - ANSWER_TOKENS, output_tokens=ANSWER_TOKENS)]
            low, high = (
                (middle, high) if _simulated(alone, instances, lending).endings.completed else (low, middle)
            )
        found.append(low / CACHE_TOKENS)
    return [
        f"The longest request of 8 instances: {found[0]:.2f} caches without lending, {found[1]:.2f} with it (a lender "
        f"keeps {PLACED.reserve_percent} % to itself). The paper: 2 to 19 times, on up to 32 GPUs."
    ]
