"""Ablations: where figures differ from the papers', or may rest on the trace, one thing is changed at a time."""

from __future__ import annotations

import random

import msgspec

from benchmarks.papers.experiments.load import ADMISSIONS
from benchmarks.papers.experiments.runner import MS, Context, S, Section
from halfmoon.conductor.simulation.options import ClusterShape
from halfmoon.conductor.simulation.profiles import LLAMA2_A800, LLAMA3_A800, Profile
from halfmoon.conductor.simulation.report import Objectives
from halfmoon.conductor.simulation.trace import TRACE_BLOCK_TOKENS, Arrival
from halfmoon.schemas.policy import PolicyName


def scaled(profile: Profile, part: str, percent: int) -> Profile:
    """`profile` with all costs whose names start with `part` at `percent` of themselves."""
    cost = profile.cost
    fields = {
        name: getattr(cost, name) * percent // 100 for name in cost.__struct_fields__ if name.startswith(part)
    }
    return msgspec.structs.replace(profile, cost=msgspec.structs.replace(cost, **fields))


def ttft_by_speed(context: Context) -> Section:
    """`random` against the papers' rule, were the engine's prefill slower."""
    rows = []
    for percent in (80, 100, 115, 130):
        profile = scaled(LLAMA3_A800, "prefill", percent)
        reports = {name: context.run(name, profile=profile) for name in ("mooncake", "random")}
        rule, by_chance = (reports[name].service.ttft_ms.mean / 1e3 for name in ("mooncake", "random"))
        busy = reports["random"].devices.prefill_busy
        rows.append(
            [
                f"× {percent / 100:g}",
                "0",
                f"{rule:.2f}",
                f"{by_chance:.2f}",
                f"{by_chance / rule:.1f}",
                f"{busy:.0%}",
            ]
        )
    for seed in (1, 2, 3):
        rule = context.run("mooncake").service.ttft_ms.mean / 1e3
        report = context.run("random", seed=seed)
        by_chance = report.service.ttft_ms.mean / 1e3
        rows.append(
            [
                "× 1",
                str(seed),
                f"{rule:.2f}",
                f"{by_chance:.2f}",
                f"{by_chance / rule:.1f}",
                f"{report.devices.prefill_busy:.0%}",
            ]
        )
    return Section(
        title="Why `random` is further off than in the paper",
        setting="As in mean TTFT by policy; only what a prefill takes is changed, then only what chance draws.",
        columns=[
            "prefill time",
            "seed",
            "papers' rule, s",
            "random, s",
            "ratio (paper: 6.4)",
            "prefill busy, random",
        ],
        rows=rows,
        why=[
            f"The ratio is {rows[0][4]}, {rows[1][4]}, {rows[2][4]}, {rows[3][4]} as prefills get longer: it "
            "follows how busy the workers are. Chance leaves a queue at one worker while another idles, and "
            "such queues grow without bound towards 100 %. With prefills a fifth shorter than our profile's "
            "(the papers give none) it would be within the tolerance; the profile was not changed for it. "
            "What chance draws moves the ratio by a sixth.",
        ],
    )


def admissions(context: Context) -> Section:
    """The paper's overload setting, were decode steps longer."""
    rows = []
    for percent in (100, 300, 400):
        for admission in ADMISSIONS:
            profile = scaled(LLAMA2_A800, "decode", percent)
            slo = Objectives(ttft_ns=30 * S, tbt_ns=100 * MS)
            report = context.run("mooncake", admission, profile=profile, slo=slo, speed=2.0)
            refused = sum(report.endings.rejected.values())
            lost = round((1 - report.service.effective_capacity) * report.endings.requests)
            row = [
                f"× {percent / 100:g}",
                admission,
                str(refused),
                str(report.endings.wasted_prefills),
                str(lost),
            ]
            rows.append([*row, f"{report.service.tbt_ms.p50:.0f} / {report.service.tbt_ms.p99:.0f}"])
    return Section(
        title="Why the three admissions agree in the paper's overload setting",
        setting="8 + 8 workers, speed 2, TBT 100 ms, LLaMA2-70B on 8×A800, the papers' placement rule; only "
        "what a decode step takes is changed.",
        columns=["step", "admission", "refused", "wasted prefills", "lost", "TBT p50 / p99, ms"],
        rows=rows,
        why=[
            "With the profile's steps decode never comes near 100 ms, so that only TTFT refuses, alike under "
            "all three. They part when steps are so long that decode is overloaded too, as it must have been "
            "in the paper: then `late` wastes most prefills and loses most requests, and between the other "
            "two there is little.",
        ],
    )


def decode_speed(context: Context) -> Section:
    """The split of 16 nodes, were decode steps longer."""
    splits = (7, 8, 9, 10, 12, 13)
    rows = []
    for percent in (100, 200, 300, 400):
        profile = scaled(LLAMA3_A800, "decode", percent)
        held = []
        for prefill in splits:
            cluster = ClusterShape(prefill=prefill, decode=16 - prefill)
            slo = Objectives(ttft_ns=10 * S, tbt_ns=100 * MS)
            report = context.run("halfmoon", "none", cluster=cluster, profile=profile, slo=slo, speed=1.5)
            held.append(f"{report.service.effective_capacity:.3f}")
        rows.append([f"× {percent / 100:g}", *held])
    return Section(
        title="Why the best split has fewer decode workers than in the paper",
        setting="As in P:D split of 16 nodes; only what a decode step takes is changed. Share that holds both limits.",
        columns=["step", *(f"{prefill}:{16 - prefill}" for prefill in splits)],
        rows=rows,
        why=[
            "With longer steps the fall comes earlier: at three times the profile's 9:7 is best and its "
            "neighbours are close, at four times 8:8. So what differs is how much of a decode worker a "
            "request takes, which the papers do not give.",
        ],
    )


def elsewhere(context: Context) -> Section:
    """Our policy against the papers' rule on requests that no constant was chosen on."""
    half = len(context.arrivals) // 2
    started_ns = context.arrivals[half].at_ns
    second = [msgspec.structs.replace(one, at_ns=one.at_ns - started_ns) for one in context.arrivals[half:]]
    data = {
        "second half of the trace": (second, 3.7),
        "drawn sessions of agents with tools": (agents(1), 3.0),
    }
    rows = []
    for what, (arrivals, start) in data.items():
        slo = Objectives(ttft_ns=30 * S, tbt_ns=100 * MS)
        names: tuple[PolicyName, ...] = ("mooncake", "halfmoon")
        runs = {
            name: context.runs(name, "predicted", arrivals=arrivals, noise_percent=5, seed=1)
            for name in names
        }
        speeds = {name: runs[name].capacity(slo, start=start, precision=0.02).speed for name in names}
        p90 = [
            context.run(
                name, "predicted", arrivals=arrivals, noise_percent=5, seed=1, speed=speeds["mooncake"]
            ).service.ttft_ms.p90
            / 1e3
            for name in names
        ]
        gain = speeds["halfmoon"] / speeds["mooncake"] - 1
        row = [
            what,
            str(len(arrivals)),
            f"{speeds['mooncake']:.2f}",
            f"{speeds['halfmoon']:.2f}",
            f"{gain:+.1%}",
        ]
        rows.append([*row, *(f"{seconds:.1f}" for seconds in p90)])
    return Section(
        title="The same, where nothing was chosen",
        setting="As above, 8 + 8 workers, seed 1; bisected to 2 %.",
        columns=[
            "requests",
            "count",
            "papers' rule",
            "ours",
            "capacity gain",
            "p90 TTFT s, papers'",
            "p90 TTFT s, ours",
        ],
        rows=rows,
        why=[
            "The rule that refuses large prompts first has one constant (half of the TTFT SLO at the mean "
            "prompt) that was chosen on the whole trace. On its second half alone and on requests that are "
            f"drawn, not recorded, it gains {rows[0][4]} and {rows[1][4]}; +10 % was asked for. p90 TTFT is a "
            "third or less in both.",
        ],
    )


def agents(seed: int, count: int = 4_000) -> list[Arrival]:
    """Sessions that begin with one of forty long texts (tools), then grow by what tools answer; answers are
    short.
    """
    draw = random.Random(seed)
    made: list[Arrival] = []
    at_ns = 0
    while len(made) < count:
        at_ns += int(draw.expovariate(1 / 1.2) * S)
        tools, begun = draw.randrange(40), at_ns
        shared = 2_048 + 512 * (tools % 16)
        tokens, name = shared, draw.getrandbits(60)
        for _ in range(draw.choice([1, 1, 2, 3, 5, 8])):
            tokens += int(draw.lognormvariate(6.8, 1.2)) + 16
            if tokens > 120_000:
                break
            keys = b"".join(
                (tools if place * TRACE_BLOCK_TOKENS < shared else 1_000 + name).to_bytes(8, "big")
                + place.to_bytes(8, "big")
                for place in range(tokens // TRACE_BLOCK_TOKENS)
            )
            answer = min(2_000, int(draw.lognormvariate(4.5, 0.9)) + 1)
            made.append(Arrival(at_ns=begun, prompt_tokens=tokens, output_tokens=answer, block_keys=keys))
            tokens += answer
            begun += int((2 + draw.expovariate(1 / 15)) * S)
    made.sort(key=lambda one: one.at_ns)
    return made[:count]
