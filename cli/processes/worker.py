"""`halfmoon prefill` and `halfmoon decode`: a worker beside a store agent."""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any, assert_never

from halfmoon.bus.telemetry.metrics import process_registry
from halfmoon.cli import model as models
from halfmoon.cli.metrics import shown
from halfmoon.cli.options import OptionInvalid, add_model, secret
from halfmoon.cli.output import say
from halfmoon.cli.processes.lifecycle import connect, until_stopped
from halfmoon.cli.processes.options import add_process, add_worker
from halfmoon.cli.tracing import start_tracing, stop_tracing
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.roles import ROLES, WorkerRole
from halfmoon.schemas.types import ExactNumerics


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--node", required=True, help="name of the node whose pool it maps")
    parser.add_argument("--id", default="", help="default: the node's name")
    add_worker(parser)
    add_model(parser)
    add_process(parser)


async def run(args: argparse.Namespace) -> int:
    from halfmoon.store.agent_client import AgentClient
    from halfmoon.workers.decode.worker import DecodeWorker
    from halfmoon.workers.prefill.worker import PrefillWorker
    from halfmoon.workers.worker import WorkerConfig

    role: WorkerRole = args.command
    worker_id = args.id or args.node
    layout = models.layout_of(args)
    context = models.context_tokens_max(args)
    per_request = layout.blocks(context)
    kv_blocks = args.kv_blocks or ROLES[role].contexts * per_request
    if layout.layers == 0 and not args.kv_blocks:
        kv_blocks = 1 << 16
    loop = asyncio.get_running_loop()
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # two workers on two cores collapse when idle threads spin
    say(f"{role} worker {worker_id}: loading {layout.model} ({layout.dtype}, {layout.numerics} numerics)")
    started = loop.time()
    engine = models.build_engine(args, layout, kv_blocks=kv_blocks)
    loaded = loop.time()
    profile = models.measure_profile(engine, layout)
    took = f"loaded in {loaded - started:.1f} s, measured in {loop.time() - loaded:.1f} s"
    say(f"{role} worker {worker_id}: {took}")
    tracing = start_tracing(args, role, worker_id)
    bus = await connect(args, worker_id)
    store = AgentClient(bus, node_id=args.node, worker_id=worker_id) if layout.block_bytes else None
    kind: type[PrefillWorker | DecodeWorker]
    match role:
        case "prefill":
            kind = PrefillWorker
        case "decode":
            kind = DecodeWorker
        case _:
            assert_never(role)
    worker = kind(
        bus,
        engine,
        store,
        WorkerConfig(
            worker_id=worker_id,
            node_id=args.node,
            layout=layout,
            profile=profile,
            kv_blocks=kv_blocks,
            context_tokens_max=context,
            batch_max=args.batch_max if layout.layers else 1024,
            stream_layers=not args.no_stream_layers,
            chunk_tokens=args.chunk_tokens,
            exact_numerics=_tried(engine, layout, f"{role} worker {worker_id}"),
            lending=_lending(args, worker_id, layout, engine),
        ),
    )
    worker.tracing = tracing
    await worker.start()
    say(f"{role} worker {worker_id} takes orders")
    registry = process_registry(bus, role=role, process_id=worker_id, node_id=args.node)
    registry.register(worker.metrics)
    try:
        async with shown(args, registry):
            await until_stopped(bus, args.health_file, worker.failed)
    finally:
        await worker.stop(drain_s=args.drain_s)
        if store is not None:
            await store.close()
        await bus.close()
        stop_tracing(tracing)
    return 0


def _lending(args: argparse.Namespace, worker_id: str, layout: Layout, engine: Any) -> Any:
    """A `LendingConfig`, or None. Raises OptionInvalid."""
    if not args.lend or args.command != "decode":
        return None
    from halfmoon.bus.telemetry.version import VERSION
    from halfmoon.store.channels.hello import ChannelHello
    from halfmoon.store.channels.options import ChannelOptions, channel_secret
    from halfmoon.workers.worker import LendingConfig

    if not layout.segment_tokens or not layout.block_bytes:
        raise OptionInvalid("--lend: only exact numerics of a real model split attention into segments")
    hello = ChannelHello(
        worker_id=worker_id,
        cluster=args.cluster,
        version=VERSION,
        model=layout.model_fingerprint,
        layers=layout.layers,
        heads=engine.config.heads,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        exact=True,
        segment_tokens=layout.segment_tokens,
        dtype=layout.dtype,
    )
    try:
        options = ChannelOptions(
            secret=channel_secret(secret(args)),
            bind=args.channel_bind,
            port=args.channel_port,
            advertise=args.channel_advertise,
            encryption=args.channel_encryption,
        )
    except ValueError as problem:
        raise OptionInvalid(f"--channel-{problem}") from None
    return LendingConfig(hello=hello, options=options)


def _tried(engine: Any, layout: Layout, who: str) -> ExactNumerics:
    """Whether exact numerics hold here; where they do not, it is said."""
    held, warning = models.exact_numerics(engine, layout)
    if warning:
        say(f"{who}: {warning}")
    return held
