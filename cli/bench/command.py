"""`halfmoon bench`: a load on a live cluster, over NATS or HTTP, and its clients' measurements."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from tqdm import tqdm

from halfmoon.cli.bench.clients import Model, NatsTarget, Target
from halfmoon.cli.bench.driver import Driver, Limits
from halfmoon.cli.bench.report import objectives, report, rows, table
from halfmoon.cli.bench.workload import (
    SCALE_MAX,
    DrawnLoad,
    Lengths,
    Planned,
    Texts,
    cut_short,
    fitting_scale,
    traced,
)
from halfmoon.cli.options import OptionInvalid, add_bus, add_config, bus_config
from halfmoon.conductor.simulation.trace import TRACE_BLOCK_TOKENS, first_sessions, read_trace

PROGRESS_S = 0.5
REQUESTS = 100
CONCURRENCY = 8


def add(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "load: a trace, else --rate (open loop), else --concurrency (closed loop)"
    )
    group.add_argument("--trace", metavar="FILE", default="", help="JSON Lines as `simulate` reads them")
    group.add_argument(
        "--speed", type=float, default=1.0, help="how many times as fast the trace is replayed"
    )
    group.add_argument(
        "--scale", type=int, default=0, help="divide its lengths (0: till the longest fits the context)"
    )
    group.add_argument(
        "--sessions",
        type=int,
        default=0,
        metavar="N",
        help="the trace's first N sessions in a closed loop: a turn comes after the answer before it, and its pause",
    )
    group.add_argument("--turns", type=int, default=0, help="of each session, the first so many (0: all)")
    group.add_argument("--rate", type=float, default=0.0, help="requests a second")
    group.add_argument("--arrivals", choices=("poisson", "constant"), default="poisson", help="of --rate")
    group.add_argument(
        "--concurrency",
        type=int,
        default=0,
        help=f"in flight at once (closed loop: {CONCURRENCY}; else no limit)",
    )
    group.add_argument(
        "--requests", type=int, default=0, help=f"to count (0: the trace, all; else {REQUESTS})"
    )
    group.add_argument(
        "--duration", type=float, default=0.0, metavar="S", help="send nothing after so many seconds"
    )
    group.add_argument(
        "--warmup", type=int, default=0, metavar="N", help="the first N requests are not counted"
    )
    group.add_argument("--timeout", type=float, default=300.0, metavar="S", help="of one answer")
    group = parser.add_argument_group("drawn requests")
    lengths = "N, A-B, normal:MEAN,DEVIATION, lognormal:MEDIAN,SIGMA"
    group.add_argument("--prompt-tokens", default="256", metavar="L", help=lengths)
    group.add_argument("--output-tokens", default="32", metavar="L", help="the same")
    group.add_argument(
        "--shared-prefix", type=float, default=0.0, metavar="SHARE", help="of each prompt, 0 to 1"
    )
    group.add_argument("--prefixes", type=int, default=1, help="how many such prefixes there are")
    group.add_argument(
        "--seed", type=int, default=-1, help="of all that is drawn (default: another each time)"
    )
    group = parser.add_argument_group("report")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="objectives, as in ttft:500 tbt:100"
    )
    group.add_argument("--json", action="store_true")
    group.add_argument(
        "--save", metavar="FILE", default="", help="write the report, with each request, as JSON"
    )
    group = parser.add_argument_group("HTTP")
    group.add_argument("--http", metavar="URL", default="", help="go there instead of NATS")
    group.add_argument("--api-key", default="", help="of HTTP")
    group.add_argument(
        "--vocab-size",
        type=int,
        default=0,
        metavar="N",
        help="tokens of the model, for other servers than halfmoon's, which do not tell it",
    )
    add_bus(parser)
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    """Exit status 0; 1 when nothing but errors came back; 130 when interrupted. Raises OptionInvalid,
    BusError.
    """
    slo = objectives(args.goodput.split() if isinstance(args.goodput, str) else args.goodput)
    _check(args)
    save = Path(args.save) if args.save else None
    if save is not None and not save.parent.is_dir():
        raise OptionInvalid(f"--save: there is no directory {save.parent}")
    target = _target(args)
    try:
        model = await target.open()
        vocab_size = args.vocab_size or model.vocab_size
        if not vocab_size:
            raise OptionInvalid("--vocab-size: the server does not tell how many tokens its model has")
        plan, about = planned(args, model)
        driver = Driver(target, Texts(vocab_size, about["seed"]), plan, limits_of(args))
        complete = await _watched(driver, args, about["total"])
    finally:
        await target.close()
    del about["total"]
    about |= {"backend": "http" if args.http else "nats", "model": model.name, "warmup": args.warmup}
    about["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    found = report(driver.counted, slo=slo, complete=complete, about=about)
    if save is not None:
        save.write_bytes(
            orjson.dumps({**found, "each": rows(driver.counted)}, option=orjson.OPT_INDENT_2) + b"\n"
        )
    print(orjson.dumps(found).decode() if args.json else table(found))
    if not complete:
        return 130
    return 1 if found["failed"] and not found["completed"] else 0


def _target(args: argparse.Namespace) -> Target:
    if not args.http:
        return NatsTarget(bus_config(args))
    from halfmoon.cli.bench.http import HttpTarget  # an HTTP client takes a while to import

    return HttpTarget(args.http, args.api_key)


def _check(args: argparse.Namespace) -> None:
    """Raises OptionInvalid."""
    if args.trace and args.rate:
        raise OptionInvalid("--trace and --rate: one of them says when requests come")
    if args.sessions and not args.trace:
        raise OptionInvalid("--sessions: of a trace, which --trace names")
    if args.turns and not args.sessions:
        raise OptionInvalid("--turns: of sessions, which --sessions asks for")
    for option, least, most in (
        ("sessions", 0, 10**9),
        ("turns", 0, 10**9),
        ("speed", 1e-6, 1e6),
        ("timeout", 0.001, 1e6),
        ("rate", 0, 1e6),
        ("duration", 0, 1e7),
        ("shared_prefix", 0, 1),
        ("concurrency", 0, 100_000),
        ("requests", 0, 10**9),
        ("warmup", 0, 10**9),
        ("prefixes", 1, 10**9),
        ("seed", -1, 2**63 - 1),
        ("scale", 0, SCALE_MAX),
        ("vocab_size", 0, 2**31),
    ):
        value = getattr(args, option)
        if not least <= value <= most:
            raise OptionInvalid(f"--{option.replace('_', '-')} {value:g}: {least:g} to {most:g}")
    if args.scale and args.scale & (args.scale - 1):
        raise OptionInvalid(f"--scale {args.scale}: a power of two, so that blocks stay whole")


def limits_of(args: argparse.Namespace) -> Limits:
    requests = args.requests or (0 if args.trace or args.duration else REQUESTS)
    closed = not args.trace and not args.rate
    concurrency = args.concurrency or (CONCURRENCY if closed else 0)
    return Limits(
        concurrency=concurrency,
        requests=requests,
        warmup=args.warmup,
        duration_s=args.duration,
        timeout_s=args.timeout,
        sessions=bool(args.sessions),
    )


def planned(args: argparse.Namespace, model: Model) -> tuple[Iterator[Planned], dict[str, Any]]:
    """The requests, and their description in fields and words (`notes`). Raises OptionInvalid, ValueError, OSError."""
    seed = args.seed if args.seed >= 0 else random.SystemRandom().randrange(2**31)
    limits = limits_of(args)
    about: dict[str, Any] = {
        "load": "",
        "concurrency": limits.concurrency,
        "seed": seed,
        "total": limits.requests,
    }
    if not args.trace:
        drawn = DrawnLoad(
            prompt=Lengths.parse(args.prompt_tokens, "--prompt-tokens"),
            output=Lengths.parse(args.output_tokens, "--output-tokens"),
            context=model.context,
            rate=args.rate,
            poisson=args.arrivals == "poisson",
            shared=args.shared_prefix,
            prefixes=args.prefixes,
            seed=seed,
        )
        drawn.check()
        about |= {"load": args.arrivals if args.rate else "closed", "rate": args.rate}
        how = (
            f"{args.rate:g} requests/s ({args.arrivals})" if args.rate else f"{limits.concurrency} at a time"
        )
        shared = f", {args.shared_prefix:.0%} of each prompt one of {args.prefixes} prefixes" * bool(
            args.shared_prefix
        )
        about["notes"] = [
            f"{model.name}, {how}; prompts of {args.prompt_tokens} tokens, answers of {args.output_tokens}{shared}; "
            f"seed {seed}"
        ]
        return drawn.requests(), about
    arrivals = read_trace(args.trace)
    if args.sessions:
        arrivals = first_sessions(arrivals, args.sessions, args.turns)
        if all(arrival.follows < 0 for arrival in arrivals):
            raise OptionInvalid(f"--sessions: no request of {args.trace} has session_id and think_ms")
    if limits.requests:
        arrivals = arrivals[: limits.warmup + limits.requests]
    if len(arrivals) <= args.warmup:
        raise OptionInvalid(f"--warmup {args.warmup}: the trace has no more requests than that")
    about["total"] = len(arrivals) - args.warmup
    scale = args.scale or fitting_scale(arrivals, model.context)
    short = cut_short(arrivals, scale=scale, context=model.context)
    block = TRACE_BLOCK_TOKENS // scale
    about |= {"load": "trace", "trace": args.trace, "speed": args.speed, "scale": scale, "cut_short": short}
    sessions = f"{args.sessions} sessions of " if args.sessions else ""
    about["notes"] = [
        f"{model.name}, {sessions}{args.trace} at speed {args.speed:g}; seed {seed}",
        f"lengths / {scale} (a block of {TRACE_BLOCK_TOKENS} tokens is one of {block}), for a context of "
        f"{model.context} tokens; {short} of {len(arrivals)} requests cut to it",
    ]
    plan = traced(arrivals, scale=scale, speed=args.speed, context=model.context, closed_loop=limits.sessions)
    return plan, about


async def _watched(driver: Driver, args: argparse.Namespace, total: int) -> bool:
    """Run, with a line of progress where a person looks. False: interrupted (Ctrl-C, SIGTERM)."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, driver.stopped.set)
    quiet = args.json or not sys.stderr.isatty()
    with tqdm(total=total or None, unit=" requests", disable=quiet, leave=False) as shown:
        running = asyncio.create_task(driver.run())
        while not running.done():
            await asyncio.wait({running}, timeout=PROGRESS_S)
            if not quiet:
                ends = Counter(record.outcome for record in driver.counted)
                shown.update(ends.total() - ends[""] - shown.n)
                shown.set_postfix(open=ends[""], rejected=ends["rejected"], failed=ends["failed"])
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        return running.result()
