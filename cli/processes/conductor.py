"""`halfmoon conductor`: decides where requests run."""

from __future__ import annotations

import argparse
import asyncio

from halfmoon.bus.tasks import end_tasks
from halfmoon.bus.telemetry.metrics import process_registry
from halfmoon.cli.declared import add_options
from halfmoon.cli.metrics import shown
from halfmoon.cli.options import add_bus, add_config
from halfmoon.cli.output import say
from halfmoon.cli.processes.lifecycle import connect, until_stopped
from halfmoon.cli.processes.options import ConductorOptions, policy_of
from halfmoon.cli.shared_options import ProcessOptions
from halfmoon.cli.tracing import start_tracing, stop_tracing

OPTIONS = (ConductorOptions, ProcessOptions)


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser, *OPTIONS)
    add_bus(parser)
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    from halfmoon.conductor.core.placement.policies import PolicyMissing
    from halfmoon.conductor.live import shell
    from halfmoon.conductor.live.digest_exchange import Diverged
    from halfmoon.conductor.live.metrics import ConductorMetrics
    from halfmoon.conductor.log_reading import LogUnreadable

    policy = policy_of(args)
    tracing = start_tracing(args, "conductor", args.id)
    bus = await connect(args, args.id)
    bus.keep_streams()
    registry = process_registry(bus, role="conductor", process_id=args.id)
    figures: list[ConductorMetrics] = []

    def started(shell: shell.Shell) -> None:
        figures.append(ConductorMetrics(bus, shell.core, shell.tally))
        registry.register(figures[0])

    async def refresh() -> None:
        for each in figures:
            await each.refresh()

    running = shell.run(bus, conductor_id=args.id, policy=policy, started=started, tracing=tracing)
    task = asyncio.ensure_future(running)
    say(f"conductor {args.id} follows the log")
    try:
        async with shown(args, registry, refresh):
            await until_stopped(bus, args.health_file, task)
    except (LogUnreadable, Diverged, PolicyMissing) as problem:
        say(f"halfmoon: error: {problem}")
        return 1
    finally:
        await end_tasks([task])
        await bus.close()
        stop_tracing(tracing)
    return 0
