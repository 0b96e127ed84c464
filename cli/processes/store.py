"""`halfmoon store`: a node's store agent."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from msgspec.structs import asdict

from halfmoon.bus.tasks import end_tasks
from halfmoon.bus.telemetry.metrics import process_registry
from halfmoon.cli import model as models
from halfmoon.cli.declared import add_options, options_of
from halfmoon.cli.metrics import shown
from halfmoon.cli.options import OptionInvalid, add_bus, add_config, secret
from halfmoon.cli.output import say
from halfmoon.cli.processes.lifecycle import connect, until_stopped
from halfmoon.cli.shared_options import ModelOptions, ProcessOptions
from halfmoon.cli.tracing import start_tracing, stop_tracing
from halfmoon.schemas.policy import Layout
from halfmoon.store.options import StoreOptions, StoreProcessOptions

OPTIONS = (StoreProcessOptions, ModelOptions, ProcessOptions)


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser, *OPTIONS)
    add_bus(parser)
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    from halfmoon.store.agent.agent import StoreAgent
    from halfmoon.store.agent.metrics import StoreMetrics
    from halfmoon.store.config import StoreConfig
    from halfmoon.store.errors import TransferError
    from halfmoon.store.pool.segment import SegmentError

    options = options_of(StoreOptions, args)
    layout = _layout(args)
    if layout.block_bytes == 0:
        say("this engine has no KVCache: there is nothing to store")
        return 0
    config = StoreConfig(
        **asdict(options) | {"ssd": _ssd_path(args)},
        cluster=args.cluster,
        node_id=args.node,
        layout=layout,
        cluster_secret=secret(args),
    )
    tracing = start_tracing(args, "store", f"store-{args.node}")
    bus = await connect(args, f"store-{args.node}")
    agent = StoreAgent(bus, config, tracing=tracing)
    metrics = StoreMetrics(agent.context)
    metrics.follow()
    try:
        await agent.start()
    except (SegmentError, TransferError) as problem:
        raise OptionInvalid(str(problem)) from None
    registry = process_registry(bus, role="store", process_id=f"store-{args.node}", node_id=args.node)
    registry.register(metrics)
    say(f"store agent {args.node}: {config.slot_count} blocks of {layout.block_bytes} bytes")
    if (tier := agent.context.tier) is not None and tier.open:
        say(f"store agent {args.node}: SSD tier {config.ssd}, {tier.records} blocks, {tier.mode}")
    stopped = asyncio.create_task(until_stopped(bus, args.health_file))
    drained = asyncio.create_task(agent.drained.wait())
    try:
        async with shown(args, registry):
            await asyncio.wait([stopped, drained], return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            stopped.result()
    finally:
        await end_tasks([stopped, drained])
        await agent.stop(reason="drained" if agent.drained.is_set() else "stopped")
        await bus.close()
        stop_tracing(tracing)
    return 0


def _layout(args: argparse.Namespace) -> Layout:
    """The layout of the model, or the one of blocks of any engine. Raises OptionInvalid."""
    if not args.block_bytes:
        if args.block_layers != 1:
            raise OptionInvalid("--block-layers: it is of another engine's blocks, which --block-bytes names")
        return models.layout_of(args)
    if args.layout_file or args.kv_events_tokens:
        other = "--layout-file" if args.layout_file else "--kv-events-tokens"
        raise OptionInvalid(f"--block-bytes: {other} is of a model's blocks; give one of the two")
    if not 1 <= args.block_layers <= 10_000:
        raise OptionInvalid(f"--block-layers: {args.block_layers} is not in 1..10000")
    try:
        return Layout.opaque(args.block_bytes, args.block_layers)
    except ValueError as problem:
        raise OptionInvalid(f"--block-bytes: {problem}") from None


def _ssd_path(args: argparse.Namespace) -> str:
    """Raises OptionInvalid."""
    path = Path(args.ssd)
    if args.ssd and not (path.is_dir() or path.parent.is_dir()):
        raise OptionInvalid(f"--ssd: there is no directory {path.parent}")
    return str(path / f"halfmoon-{args.cluster}-{args.node}.ssd") if args.ssd and path.is_dir() else args.ssd
