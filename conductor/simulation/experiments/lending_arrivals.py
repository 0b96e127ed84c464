"""Infinite-LLM's gain where requests come when they come: the arrival rate that instances bear."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from math import log, sqrt

from halfmoon.conductor.simulation.capacity import HELD_MIN, Runs
from halfmoon.conductor.simulation.cluster_shape import ClusterShape
from halfmoon.conductor.simulation.experiments.lending import ANSWER_TOKENS, CACHE_TOKENS, PLACED, PROFILE
from halfmoon.conductor.simulation.experiments.runner import MS, Context, S, Section
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.plots import curves
from halfmoon.conductor.simulation.report import Objectives
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.systems.infinite_llm import NOBODY_LENDS, Lending, simulate_infinite_llm
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.schemas.policy import Policy

#: (instances, mean prompt).
SETTINGS = ((2, 1_500), (4, 1_500), (8, 1_500), (4, 4_000))
DEVIATIONS = (0.0, 1.0, 2.0, 4.0)
#: Requests for each instance; the longest takes so much of a cache.
REQUESTS, LONGEST = 100, 0.95
WAIT_S = 10
BAND = (1.35, 1.73)
#: A request waits for room after its first token, which is where the core's decode workers wait: that long a wait is
#: this mean of the longest tenth of its intervals.
CORE_TBT_NS = WAIT_S * S // (ANSWER_TOKENS // 10) + 50 * MS


def rate_s(instances: int, mean_tokens: int) -> float:
    """Requests a second that so many full instances answer where all are of the mean length."""
    sequences = CACHE_TOKENS // (mean_tokens + ANSWER_TOKENS)
    step_s = PROFILE.cost.step_ns(sequences, sequences * (mean_tokens + ANSWER_TOKENS)) / S
    return instances * sequences / (ANSWER_TOKENS * step_s)


def arrivals(instances: int, mean_tokens: int, deviation: float) -> list[Arrival]:
    """A Poisson process (seed 1) of `rate_s`; prompts log-normal with `deviation` means as standard deviation."""
    draw, at_s, found = random.Random(1), 0.0, []
    sigma = sqrt(log(1 + deviation**2))
    longest = int(CACHE_TOKENS * LONGEST) - ANSWER_TOKENS
    for _ in range(instances * REQUESTS):
        at_s += draw.expovariate(rate_s(instances, mean_tokens))
        drawn = round(draw.lognormvariate(log(mean_tokens) - sigma**2 / 2, sigma))
        found.append(
            Arrival(
                at_ns=int(at_s * S),
                prompt_tokens=min(longest, max(32, drawn)),
                output_tokens=ANSWER_TOKENS,
                max_tokens=ANSWER_TOKENS,
            )
        )
    return found


def dealt_capacity(instances: int, requests: list[Arrival], lending: Lending) -> float:
    """The share of `rate_s` at which enough wait `WAIT_S` at most for room; instances are dealt requests in turn."""

    def at(speed: float) -> Mapping[str, Outcome]:
        found: dict[str, Outcome] = {}
        simulate_infinite_llm(
            requests,
            instances,
            CACHE_TOKENS,
            PROFILE,
            lending=lending,
            slo=Objectives(),
            speed=speed,
            outcomes=found,
        )
        return found

    return _capacity(at, Objectives(ttft_ns=WAIT_S * S, tbt_ns=WAIT_S * S))


def core_capacity(instances: int, requests: list[Arrival], *, lend: bool) -> float:
    """As `dealt_capacity`, of the core, which places by load; there are prefill workers in plenty."""
    policy = Policy(
        admission="none",
        ttft_slo_ns=WAIT_S * S,
        tbt_slo_ns=0,
        move_period_ns=S if lend else 0,
        move_answer_ns=300 * S,
        move_step_tokens=16,
    )
    shape = ClusterShape(prefill=4 * instances, decode=instances, lend=lend, block_tokens=64)

    def at(speed: float) -> Mapping[str, Outcome]:
        found: dict[str, Outcome] = {}
        simulate(requests, shape, policy, PROFILE, speed=speed, outcomes=found)
        return found

    return _capacity(at, Objectives(ttft_ns=WAIT_S * S, tbt_ns=CORE_TBT_NS))


def _capacity(at: Callable[[float], Mapping[str, Outcome]], slo: Objectives) -> float:
    return Runs(at).capacity(slo, start=0.8, precision=0.03).speed


def infinite_llm_arrivals(context: Context) -> Section:
    """The gain against the deviation of lengths, and what is left of it where requests are placed by load."""
    rows: list[list[str]] = []
    lines: dict[str, list[tuple[float, float]]] = {}
    shares: list[float] = []
    for instances, mean in SETTINGS:
        for deviation in DEVIATIONS:
            context.say(f"  {instances} instances, prompts of {mean}, deviation {deviation:g}")
            requests = arrivals(instances, mean, deviation)
            alone, lent = (dealt_capacity(instances, requests, one) for one in (NOBODY_LENDS, PLACED))
            ours, ours_lent = (core_capacity(instances, requests, lend=one) for one in (False, True))
            lines.setdefault(f"{instances} instances, {mean:,} tokens", []).append((deviation, lent / alone))
            shares.append(ours_lent / ours)
            rows.append(
                [
                    str(instances),
                    f"{mean:,}",
                    f"{deviation:g}",
                    f"{alone:.2f}",
                    f"{lent:.2f}",
                    f"{lent / alone:.2f}",
                    f"{ours:.2f}",
                    f"{ours_lent:.2f}",
                ]
            )
    rows.append(["**paper**", "traces 0 to 2", "", "", "", f"{BAND[0]} to {BAND[1]}", "", ""])
    gains = {deviation: [line[at][1] for line in lines.values()] for at, deviation in enumerate(DEVIATIONS)}
    plot = curves(
        context.plot("infinite-llm-arrivals"),
        lines,
        xlabel="standard deviation of prompts over their mean",
        ylabel="rate that is borne, over that without lending",
        title="Infinite-LLM: what lending gains with arrivals",
        level=1.0,
    )
    return Section(
        title="Infinite-LLM: the arrival rate that instances bear",
        setting=f"LLaMA2-70B, an instance is 2 × A100-80GB with room for {CACHE_TOKENS:,} tokens. Decode alone. "
        f"{REQUESTS} requests for each instance by a Poisson process, prompts drawn log-normal (seed 1) and cut at "
        f"{LONGEST:.0%} of a cache, answers of {ANSWER_TOKENS} tokens. The rate at which {HELD_MIN:.0%} of the "
        f"requests wait {WAIT_S} s at most for room, within 3 %, over what full instances answer where all lengths are "
        "equal. Dealt: to the instances in turn, new requests borrow. Core: the conductor places by load, with prefill "
        "workers in plenty; with lending, its own planner moves KV of running requests (`halfmoon simulate --lend`).",
        columns=[
            "instances",
            "mean prompt",
            "deviation / mean",
            "dealt, alone",
            "dealt, lending",
            "gain",
            "core, alone",
            "core, lending",
        ],
        rows=rows,
        why=_why(gains, shares),
        plots=[plot.name],
    )


def _why(gains: dict[float, list[float]], shares: list[float]) -> list[str]:
    spans = {deviation: f"{min(found):.2f} to {max(found):.2f}" for deviation, found in gains.items()}
    least, most = BAND
    inside = all(least <= gain <= most for gain in gains[DEVIATIONS[-1]])
    return [
        f"Equal lengths gain {spans[0.0]} (3 % is the precision of a rate); deviations of "
        + ", ".join(f"{deviation:g}: {spans[deviation]}" for deviation in DEVIATIONS[1:])
        + f". The paper's band at the highest deviation: {'MET' if inside else 'NOT MET everywhere'}.",
        "Where requests are dealt in turn, a long one at an instance holds up those behind it while others have room: "
        "that is what loans mend, and why the gain is one of waiting. Tokens a second of instances that are all "
        "overloaded gain next to nothing: none has room to lend.",
        f"The core bears {min(shares):.2f} to {max(shares):.2f} of the rate with lending that it bears without. "
        "It knows every worker's load when it places, so a request seldom waits at one worker while another has"
        " room; it lends for requests that no cache holds alone, which this table has none of, and moves "
        "seldom, to what makes more tokens a second, not to who has waited longest. Where dealt instances that "
        "lend bear more than it does, new requests borrow that could have waited for a cache of their own: the "
        "core has them wait. The paper compares with instances that are dealt requests; how its balancer dealt "
        "them is not said.",
        "The paper's figure is throughput of real instances over traces that it does not publish; ours is the rate at "
        "a bound of waiting, of a profile by data sheets. Only ratios can be compared.",
    ]
