"""A slice of the conversation trace on a real cluster, and the same slice simulated; and how well TTFT and
TBT were predicted, live and simulated: of a prefill and a decode worker, and of two mixed workers.

Lengths are scaled down (a block of 512 tokens of the trace is one of 16 here), so that SmolLM2 on a CPU keeps
up. Every other request calibrates: prefill costs are refitted from those alone, as the conductor does it;
steps are what the conductor's core, replayed over the log, has learned by the end. The simulation takes these
costs and the arrivals as logged, and is compared on the requests that did not calibrate.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import msgspec
import uvloop
from clusters import ROOT, bus_config, cluster, finish, parsed, parser

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.streams import StreamLimits
from halfmoon.cli.bench.clients import NatsTarget
from halfmoon.cli.bench.driver import Driver, Limits
from halfmoon.cli.bench.workload import Texts, traced
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.state.cost import prefill_fit, refit_prefill
from halfmoon.conductor.simulation.options import ClusterShape
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import Profile
from halfmoon.conductor.simulation.report import error
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.trace import Arrival, read_trace
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import StartMixed, StartPrefill
from halfmoon.schemas.events import (
    ClusterConfigured,
    PrefillFinished,
    RequestArrived,
    RequestFinished,
    Stamped,
    StoreJoined,
    WorkerJoined,
)
from halfmoon.schemas.roles import ROLES

SCALE = 32
BLOCK_TOKENS = 512 // SCALE
#: Clusters of as many processes that compute.
SHAPES = {"1 prefill + 1 decode": {"prefill": "1", "decode": "1"}, "2 mixed": {"mixed": "2"}}


async def drive(config: BusConfig, arrivals: list[Arrival], speed: float) -> list[dict[str, Any]]:
    """Send every request at its time; the answers, in the order of the trace."""
    target = NatsTarget(config)
    try:
        model = await target.open()
        plan = traced(arrivals, scale=SCALE, speed=speed, context=model.context)
        driver = Driver(target, Texts(model.vocab_size, 0), plan, Limits())
        await driver.run()
    finally:
        await target.close()
    failed = [record.reason for record in driver.records if record.outcome == "failed"]
    assert not failed, failed
    return [record.answer for record in driver.records if record.outcome == "finished"]


async def read_log(config: BusConfig) -> list[Stamped]:
    bus = await Bus.connect(config, name="operator", limits=StreamLimits(replicas=0))
    last, found = await bus.last_seq(), []
    async for stamped in bus.events():
        found.append(stamped)
        if stamped.seq >= last:
            break
    await bus.close()
    return found


def refitted(
    profile: CostProfile, arrived: list[Stamped], prefilled: dict[str, PrefillFinished]
) -> CostProfile:
    """The worker's own profile after the prefills of these requests."""
    fit, cost = prefill_fit(profile), profile
    for stamped in arrived:
        went = prefilled.get(stamped.event.request_id)
        if went is not None:
            cached = went.cached_local_tokens + went.cached_fetched_tokens
            cost = refit_prefill(fit, cost, stamped.event.prompt_tokens, cached, went.compute_ns)
    return cost


def compare(log: list[Stamped], answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Every other request of the slice, live and simulated."""
    arrived = [stamped for stamped in log if isinstance(stamped.event, RequestArrived)]
    finished = {s.event.request_id: s.event for s in log if isinstance(s.event, RequestFinished)}
    prefilled = {s.event.request_id: s.event for s in log if isinstance(s.event, PrefillFinished)}
    core, predicted = Core(), {}
    for stamped in log:
        for decision in core.step(stamped):
            if isinstance(decision, StartPrefill | StartMixed):
                predicted[decision.request_id] = decision.predicted
    by_id = {answer["id"]: answer for answer in answers}
    world = {
        type(s.event): s.event
        for s in log
        if isinstance(s.event, (ClusterConfigured, StoreJoined, WorkerJoined))
    }
    worker, layout = world[WorkerJoined], world[StoreJoined].layout
    roles = [s.event.role for s in log if isinstance(s.event, WorkerJoined)]
    steps = next(one.cost for one in core.state.workers.values() if "batch" in ROLES[one.role].duties)
    prompts = refitted(worker.profile, arrived[::2], prefilled)
    profile = Profile(
        name="calibrated",
        cost=CostProfile(
            prefill_base_ns=prompts.prefill_base_ns,
            prefill_per_token_ps=prompts.prefill_per_token_ps,
            prefill_per_token2_fs=prompts.prefill_per_token2_fs,
            decode_base_ns=steps.decode_base_ns,
            decode_per_sequence_ns=steps.decode_per_sequence_ns,
            decode_per_context_token_ps=steps.decode_per_context_token_ps,
        ),
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        kv_bytes=worker.kv_blocks * layout.block_bytes,
        pool_bytes=world[StoreJoined].slots * layout.block_bytes,
        context_tokens_max=worker.context_tokens_max,
        batch_max=worker.batch_max,
        link_bytes_s=world[ClusterConfigured].policy.link_bytes_s,
        link_latency_ns=world[ClusterConfigured].policy.link_latency_ns,
        load_bytes_s=10_000_000_000,
    )
    first_ns = arrived[0].at_ns
    arrivals = [
        Arrival(
            at_ns=stamped.at_ns - first_ns,
            prompt_tokens=stamped.event.prompt_tokens,
            output_tokens=finished[stamped.event.request_id].completion_tokens,
            max_tokens=stamped.event.max_tokens,
            block_keys=stamped.event.block_keys,
        )
        for stamped in arrived
        if stamped.event.request_id in finished
    ]
    outcomes: dict[str, Outcome] = {}
    report = simulate(
        arrivals,
        ClusterShape(
            prefill=roles.count("prefill"),
            decode=roles.count("decode"),
            mixed=roles.count("mixed"),
            token_budget=worker.token_budget,
            iteration_ns=worker.iteration_ns,
            block_tokens=layout.block_tokens,
        ),
        world[ClusterConfigured].policy,
        profile,
        outcomes=outcomes,
    )
    done = [stamped.event.request_id for stamped in arrived if stamped.event.request_id in finished]
    simulated_by_id = dict(zip(done, outcomes.values(), strict=True))
    later = [s.event.request_id for s in arrived[1::2] if s.event.request_id in finished]
    live_ttft = [by_id[request_id]["timing_ms"]["ttft"] for request_id in later]
    simulated = [simulated_by_id[request_id] for request_id in later]
    simulated_ttft = [outcome.ttft_ns / 1e6 for outcome in simulated if outcome.end == "finished"]
    live, made_up = statistics.mean(live_ttft), statistics.mean(simulated_ttft)
    live_cached = sum(
        prefilled[one].cached_local_tokens + prefilled[one].cached_fetched_tokens
        for one in later
        if one in prefilled
    )
    return {
        "requests": len(arrived),
        "compared": len(later),
        "mean_ttft_ms": {
            "live": round(live, 1),
            "simulated": round(made_up, 1),
            "off": round(made_up / live - 1, 4),
        },
        "p50_ttft_ms": {
            "live": round(statistics.median(live_ttft), 1),
            "simulated": round(statistics.median(simulated_ttft), 1),
        },
        "mean_tbt_ms": {
            "live": round(statistics.mean(finished[one].tbt_ns for one in later) / 1e6, 1),
            "simulated": round(statistics.mean(outcome.tbt_ns for outcome in simulated) / 1e6, 1),
        },
        "cached_tokens": {
            "live": live_cached,
            "simulated": sum(outcome.local_tokens + outcome.fetched_tokens for outcome in simulated),
        },
        "live_prediction_error": {
            "ttft": error(
                [(predicted[one].ttft_ns, int(by_id[one]["timing_ms"]["ttft"] * 1e6)) for one in later]
            ),
            "tbt": error(
                [(predicted[one].tbt_ns, finished[one].tbt_ns) for one in later if finished[one].tbt_ns]
            ),
        },
        "simulated_prediction_error": {"ttft": report.ttft_error, "tbt": report.tbt_error},
        "calibrated": {name: getattr(profile.cost, name) for name in profile.cost.__struct_fields__},
    }


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--requests", type=int, default=60)
    options.add_argument("--speed", type=float, default=0.1)
    options.add_argument("--runs", type=int, default=1)
    options.add_argument(
        "--every-s", type=float, default=0.0, help="one request in so many seconds, not as in the trace"
    )
    args = parsed(options, requests=10, speed=1.0)
    trace = [
        one for one in read_trace(ROOT / "benchmarks/traces/conversation_trace.jsonl.zst") if one.block_keys
    ]
    slice_ = [one for one in trace if one.prompt_tokens // SCALE < 2_000][: args.requests]
    if args.every_s:
        slice_ = [
            msgspec.structs.replace(arrival, at_ns=int(place * args.every_s * args.speed * 1e9))
            for place, arrival in enumerate(slice_)
        ]
    runs = []
    # By turns, so that both have the machine's good and bad minutes.
    for shape in [shape for _ in range(args.runs) for shape in SHAPES]:
        words = [word for role, count in SHAPES[shape].items() for word in (f"--{role}", count)]
        with (
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            cluster("--block-tokens", str(BLOCK_TOKENS), "--numerics", "fast", *words) as addresses,
        ):
            answers = runner.run(drive(bus_config(addresses), slice_, args.speed))
            runner.run(asyncio.sleep(1.0))  # the last events
            found = compare(runner.run(read_log(bus_config(addresses))), answers)
            runs.append({"cluster": shape, **found})
    lines = []
    for run in runs:
        mean, live = run["mean_ttft_ms"], run["live_prediction_error"]
        lines.append(
            f"{run['cluster']}: mean TTFT of {run['compared']} requests: live {mean['live']:.0f} ms, simulated "
            f"{mean['simulated']:.0f} ms ({mean['off']:+.0%})"
        )
        lines.append(
            f"live predictions off by: TTFT {live['ttft']['p50']:.0%} (p50), {live['ttft']['p90']:.0%} (p90); "
            f"TBT {live['tbt']['p50']:.0%}, {live['tbt']['p90']:.0%}"
        )
    finish(args, {"scale": SCALE, "speed": args.speed, "every_s": args.every_s, "runs": runs}, lines)


if __name__ == "__main__":
    main()
