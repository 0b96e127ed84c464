"""Roles that follow the load, live: `--elastic on` against every split that stays, while the ratio of prompt to answer
changes tenfold every two minutes.

Four workers with the real model. Workers that share two cores would lend each other what one of them leaves: then no
split can be wrong. So each worker has a share of a core of its own, no more and no less, by a control group of Linux
(root; version 1 or 2): four machines, as far as computing goes. The rest of the two cores is for everything else.

What one worker of each role can do is measured first, by closed loops. In each phase arrivals (Poisson) then ask for a
share of what four workers could do if each had the right role. All clusters get the same requests. Goodput: requests
that held both objectives, a second. Parts can be run one by one; `--save` adds each to what is there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop
from clusters import ROOT, beside, bus_config, cluster, finish, parser, spread
from simulation_live import read_log

from halfmoon.bus.config import BusConfig
from halfmoon.cli.bench.clients import NatsTarget, Record
from halfmoon.cli.bench.driver import Driver, Limits
from halfmoon.cli.bench.report import intervals
from halfmoon.cli.bench.workload import DrawnLoad, Lengths, Planned, Texts
from halfmoon.conductor.core.machine import Core
from halfmoon.schemas.decisions import ChangeRole
from halfmoon.schemas.numbers import MS_NS, SECOND_NS
from halfmoon.schemas.roles import ELASTIC_ROLES
from halfmoon.schemas.slo import tbt_ns

WORKERS = 4
SPLITS = ("3 + 1", "2 + 2", "1 + 3")
PARTS = ("capacity", *SPLITS, "elastic")
#: Short, so that a worker of a quarter of a core is not throttled for the length of a step.
PERIOD_US = 20_000
SWING = 10


# --- machines -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def machines(pids: list[int], cores: float) -> Iterator[None]:
    """Each process and all its threads in a control group that has `cores` of a core."""
    made: list[Path] = []
    quota_us = int(cores * PERIOD_US)
    first = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").exists() or Path("/sys/fs/cgroup/cpu/tasks").exists()
    root = Path("/sys/fs/cgroup/cpu") if first else Path("/sys/fs/cgroup")
    if not first:
        (root / "cgroup.subtree_control").write_text("+cpu")
    try:
        for pid in pids:
            group = root / f"halfmoon-{pid}"
            group.mkdir()
            made.append(group)
            if first:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota_us))
                (group / "cpu.shares").write_text(
                    "10240"
                )  # it has its share also when others want to compute
            else:
                (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
                (group / "cpu.weight").write_text("1000")
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for group in made:
            for pid_text in (group / "cgroup.procs").read_text().split():
                (root / "cgroup.procs").write_text(pid_text)
            group.rmdir()


def workers_of(pid: int) -> list[int]:
    """Prefill and decode workers among the children of `halfmoon up`."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
            if set(words[2:5]) & set(ELASTIC_ROLES):
                found.append(int(child))
    return found


@contextlib.contextmanager
def served(args: argparse.Namespace, prefill: int, decode: int, elastic: str) -> Iterator[BusConfig]:
    flags = ["--prefill", str(prefill), "--decode", str(decode), "--elastic", elastic]
    flags += ["--numerics", "fast", "--dtype", "float32", "--pool-mib", "256"]
    flags += ["--ttft-slo-ms", str(args.ttft_slo_ms), "--tbt-slo-ms", str(args.tbt_slo_ms)]
    with cluster(*flags) as addresses:
        pids = workers_of(addresses["pid"])
        assert len(pids) == prefill + decode, pids
        with machines(pids, args.cores):
            yield bus_config(addresses)


# --- load ---------------------------------------------------------------------------------------------------


async def drive(config: BusConfig, plan: Iterator[Planned], limits: Limits, seed: int) -> list[Record]:
    target = NatsTarget(config)
    try:
        model = await target.open()
        driver = Driver(target, Texts(model.vocab_size, seed), plan, limits)
        await driver.run()
        return driver.counted
    finally:
        await target.close()


def closed(args: argparse.Namespace, answer: str) -> Iterator[Planned]:
    """Requests of a closed loop, without end."""
    prompt, output = Lengths.parse(spread_of(args.prompt), "prompt"), Lengths.parse(answer, "answer")
    return DrawnLoad(prompt=prompt, output=output, context=4_096, seed=args.seed).requests()


def spread_of(mean: int) -> str:
    return f"{mean // 2}-{mean + mean // 2}"


def answer_mean(args: argparse.Namespace, phase: int) -> int:
    """Short ones first."""
    mean: int = args.answer * (SWING if phase % 2 else 1)
    return mean


def swinging(args: argparse.Namespace, rates: list[float]) -> Iterator[Planned]:
    draw, at_s, number = random.Random(args.seed), 0.0, 0
    for phase in range(args.phases):
        answer = answer_mean(args, phase)
        while (at_s := at_s + draw.expovariate(rates[phase % 2])) < args.phase_s * (phase + 1):
            prompt = draw.randint(args.prompt // 2, args.prompt + args.prompt // 2)
            yield Planned(
                number=number,
                at_ns=int(at_s * SECOND_NS),
                parts=((b"own-%d" % number, prompt),),
                max_tokens=draw.randint(answer // 2, answer + answer // 2),
            )
            number += 1
        at_s = args.phase_s * (phase + 1)


# --- figures ------------------------------------------------------------------------------------------------


async def capacity(args: argparse.Namespace, config: BusConfig) -> dict[str, Any]:
    """Of one worker of each role: prompts a second, and tokens a second with as many sequences as it is to have."""
    await drive(config, closed(args, "8"), Limits(concurrency=8, requests=30), args.seed)
    records = await drive(
        config, closed(args, "2"), Limits(concurrency=6, requests=50, warmup=6), args.seed + 1
    )
    ends_ns = sorted(record.ended_ns for record in records if record.outcome == "finished")
    prompts_s = (len(ends_ns) - 1) * SECOND_NS / (ends_ns[-1] - ends_ns[0])
    # Long answers to prompts that come seldom.
    answers = f"{args.answer * SWING}"
    limits = Limits(concurrency=args.batch, requests=3 * args.batch, warmup=args.batch)
    records = await drive(config, closed(args, answers), limits, args.seed + 2)
    # Between the first of those that are counted and the last time that all places were taken.
    last_ns = sorted(record.ended_ns for record in records)[-args.batch]
    first_ns = min(record.sent_ns for record in records)
    tokens = sum(first_ns <= at_ns <= last_ns for record in records for at_ns in record.heard_ns)
    tbt = spread([tbt_ns(intervals(record)) / MS_NS for record in records])
    return {
        "prompts_s": round(prompts_s, 3),
        "tokens_s": round(tokens * SECOND_NS / (last_ns - first_ns), 2),
        "batch": args.batch,
        "tbt_ms": tbt,
    }


def rates_of(args: argparse.Namespace, found: dict[str, Any]) -> list[float]:
    """Requests a second of the two kinds of phases."""
    return [
        args.offered * WORKERS / (1 / found["prompts_s"] + answer_mean(args, phase) / found["tokens_s"])
        for phase in range(2)
    ]


def figures(args: argparse.Namespace, records: list[Record]) -> dict[str, Any]:
    by_phase: list[dict[str, Any]] = []
    for phase in range(args.phases):
        begin, end = phase * args.phase_s, (phase + 1) * args.phase_s
        those = [one for one in records if begin <= one.planned.at_ns / SECOND_NS < end]
        good = [one for one in those if one.outcome == "finished" and held(args, one)]
        done = [one for one in those if one.outcome == "finished"]
        by_phase.append(
            {
                "requests": len(those),
                "held": len(good),
                "outcomes": dict(Counter(one.reason or one.outcome for one in those)),
                "ttft_ms": spread([(one.heard_ns[0] - one.due_ns) / MS_NS for one in done] or [0]),
                "tbt_ms": spread([tbt_ns(intervals(one)) / MS_NS for one in done] or [0]),
            }
        )
    good_all = sum(phase["held"] for phase in by_phase)
    return {
        "goodput": round(good_all / (args.phases * args.phase_s), 4),
        "held": round(good_all / len(records), 4),
        "phases": by_phase,
    }


def held(args: argparse.Namespace, record: Record) -> bool:
    ttft_ms = (record.heard_ns[0] - record.due_ns) / MS_NS
    return bool(ttft_ms <= args.ttft_slo_ms and tbt_ns(intervals(record)) / MS_NS <= args.tbt_slo_ms)


async def changes(config: BusConfig) -> list[dict[str, Any]]:
    """Of roles, with the planner's words."""
    core, found, began_ns = Core(), [], 0
    for stamped in await read_log(config):
        began_ns = began_ns or stamped.at_ns
        for decision in core.step(stamped):
            if isinstance(decision, ChangeRole):
                at_s = round((stamped.at_ns - began_ns) / SECOND_NS, 1)
                found.append({"at_s": at_s, "to": decision.role, "reason": decision.reason})
    return found


async def swing(args: argparse.Namespace, config: BusConfig, rates: list[float]) -> dict[str, Any]:
    """Warm up, so that what is predicted is what such a machine takes; then the load."""
    warm = f"{args.answer * 3}"
    await drive(config, closed(args, warm), Limits(concurrency=8, requests=60), args.seed + 3)
    records = await drive(config, swinging(args, rates), Limits(), args.seed + 4)
    return figures(args, records) | {
        "changes": await changes(config),
        "load_average": beside()["load_average"],
    }


# --- parts --------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, known: dict[str, Any]) -> dict[str, Any]:
    """What is `known`, and the parts that are asked for."""
    for part in args.parts:
        if part == "capacity":
            with runner() as loop, served(args, 1, 1, "off") as config:
                known[part] = loop.run(capacity(args, config))
            continue
        rates = rates_of(args, known["capacity"])
        known["rates_s"] = [round(rate, 3) for rate in rates]
        split = "2 + 2" if part == "elastic" else part
        prefill, decode = (int(number) for number in split.split(" + "))
        with runner() as loop, served(args, prefill, decode, "on" if part == "elastic" else "off") as config:
            known[part] = loop.run(swing(args, config, rates))
    return known


def runner() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def lines_of(result: dict[str, Any]) -> list[str]:
    lines = [f"one worker of each role: {result['capacity']}; requests/s by phase: {result.get('rates_s')}"]
    for part in PARTS[1:]:
        if part in result:
            one = result[part]
            phases = ", ".join(f"{phase['held']} of {phase['requests']}" for phase in one["phases"])
            lines.append(
                f"{part:8} goodput {one['goodput']:.3f}/s, held {one['held']:.1%} (by phase {phases}), "
                f"{len(one['changes'])} changes of role"
            )
    if all(part in result for part in PARTS):
        fixed = [result[split]["goodput"] for split in SPLITS]
        ours = result["elastic"]["goodput"]
        result["over_best"], result["over_worst"] = round(ours / max(fixed), 3), round(ours / min(fixed), 3)
        lines.append(f"elastic over the best split {result['over_best']}, the worst {result['over_worst']}")
    return lines


def main() -> None:
    """Measure the parts, print a table, and save it when asked."""
    made = parser(__doc__ or "")
    made.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    made.add_argument("--cores", type=float, default=0.4, help="of a core, that each worker has")
    made.add_argument("--prompt", type=int, default=64, help="mean tokens")
    made.add_argument("--answer", type=int, default=10, help="mean tokens where they are short")
    made.add_argument("--batch", type=int, default=12, help="sequences of a decode worker that is full")
    made.add_argument("--offered", type=float, default=0.85, help="of what the right roles could do")
    made.add_argument("--ttft-slo-ms", type=int, default=4_000)
    made.add_argument("--tbt-slo-ms", type=int, default=500)
    made.add_argument("--phase-s", type=int, default=120)
    made.add_argument("--phases", type=int, default=2)
    made.add_argument("--seed", type=int, default=1)
    args = made.parse_args()
    path = ROOT / "results" / f"{args.save}.json"
    known: dict[str, Any] = json.loads(path.read_text()) if args.save and path.exists() else {}
    result = measure(args, known)
    options = {key: value for key, value in vars(args).items() if key not in ("save", "json", "parts")}
    finish(args, result | {"options": options}, lines_of(result))


if __name__ == "__main__":
    main()
