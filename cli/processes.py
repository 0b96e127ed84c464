"""The processes of a cluster, one command each: `conductor`, `store`, `prefill`, `decode`, `frontend`.

`halfmoon up`, compose and Kubernetes all run these. Each says on standard error what it does, ends on SIGTERM or SIGINT
after draining, with status 0, and with status 1 and one line when it cannot start.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from halfmoon.bus.connection import Bus
from halfmoon.bus.tasks import end_tasks
from halfmoon.bus.telemetry.metrics import process_registry
from halfmoon.cli import model as models
from halfmoon.cli.metrics import add_metrics, shown
from halfmoon.cli.options import (
    OptionInvalid,
    add_bus,
    add_config,
    add_model,
    add_secret,
    bus_config,
    secret,
    stream_limits,
)
from halfmoon.cli.tracing import add_tracing, start_tracing, stop_tracing
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.policy import Policy

HEALTH_S = 1.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def add(subparsers: Any) -> dict[str, Callable[[argparse.Namespace], Awaitable[int]]]:
    """Add the five commands."""
    conductor = subparsers.add_parser(
        "conductor", help="decide where requests run; any number may run at once"
    )
    conductor.add_argument("--id", default=f"conductor-{socket.gethostname()}")
    add_policy(conductor)

    store = subparsers.add_parser("store", help="a node's store agent: its KV pool and its data plane")
    store.add_argument("--node", required=True, help="name of the node")
    add_store(store)
    add_model(store)

    for role in ("prefill", "decode"):
        worker = subparsers.add_parser(role, help=f"a {role} worker, beside a store agent")
        worker.add_argument("--node", required=True, help="name of the node whose pool it maps")
        worker.add_argument("--id", default="", help="default: the node's name")
        add_worker(worker)
        add_model(worker)

    frontend = subparsers.add_parser("frontend", help="the client edge: NATS API and HTTP")
    frontend.add_argument("--id", default=f"frontend-{socket.gethostname()}")
    add_frontend(frontend)
    add_model(frontend)

    for name in ("conductor", "store", "prefill", "decode", "frontend"):
        parser = subparsers.choices[name]
        add_bus(parser)
        add_secret(parser)
        add_config(parser)
        add_metrics(parser)
        add_tracing(parser)
        parser.add_argument(
            "--drain-s", type=float, default=20.0, help="how long to finish what runs, when stopped"
        )
        parser.add_argument(
            "--health-file", metavar="FILE", default="", help="touched every second while all is well"
        )
    return {
        "conductor": run_conductor,
        "store": run_store,
        "prefill": run_worker,
        "decode": run_worker,
        "frontend": run_frontend,
    }


def add_policy(parser: argparse.ArgumentParser) -> None:
    defaults = Policy()
    group = parser.add_argument_group("policy (of a log that is empty; else the log's own is in force)")
    names = ("halfmoon", "mooncake", "local_cache_aware", "least_loaded", "round_robin", "random", "dynamo")
    group.add_argument("--policy", choices=names, default=defaults.name)
    group.add_argument(
        "--admission", choices=("predicted", "early", "late", "none"), default=defaults.admission
    )
    group.add_argument(
        "--fetch-replicas", type=int, default=2, help="other holders named with a fetch; 0: none"
    )
    group.add_argument(
        "--hot-transfers", type=int, default=4, help="copy a prefix that so many read at once; 0: never"
    )
    group.add_argument("--ttft-slo-ms", type=int, default=defaults.ttft_slo_ns // 1_000_000)
    group.add_argument("--tbt-slo-ms", type=int, default=defaults.tbt_slo_ns // 1_000_000)


def policy_of(args: argparse.Namespace) -> Policy:
    return Policy(
        name=args.policy,
        admission=args.admission,
        ttft_slo_ns=args.ttft_slo_ms * 1_000_000,
        tbt_slo_ns=args.tbt_slo_ms * 1_000_000,
        fetch_replicas=args.fetch_replicas,
        hot_transfers=args.hot_transfers,
    )


def add_store(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("store")
    group.add_argument(
        "--pool-mib", type=int, default=512, help="size of the node's KV pool in shared memory"
    )
    group.add_argument(
        "--eviction", choices=("lru", "lfu", "s3fifo"), default="s3fifo", help="which block goes first"
    )
    group.add_argument(
        "--ssd", default="", metavar="PATH", help="SSD tier: a file, or a directory to make it in"
    )
    group.add_argument("--ssd-bytes", type=int, default=16 << 30, metavar="N", help="size of that file")
    group.add_argument(
        "--ssd-hits", type=int, default=0, metavar="K", help="only blocks that were hit so often"
    )
    group.add_argument(
        "--kv-events", default="", metavar="ADDRESS", help="publish KV events (ZMQ, as vLLM does)"
    )
    group.add_argument(
        "--kv-events-replay", default="", metavar="ADDRESS", help="answer who asks for past ones"
    )
    group.add_argument(
        "--quota", action="append", default=[], metavar="TENANT=BYTES", help="of a pool; repeatable"
    )
    group.add_argument(
        "--bind", default="127.0.0.1", help="address of the TCP data plane; with several NICs: A,B"
    )
    group.add_argument(
        "--stripes", type=int, default=0, help="slices of a transfer at once; 0: by the number of cores"
    )
    group.add_argument(
        "--topology", default="", metavar="FILE", help="TOML: NUMA nodes of memory and NICs, over sysfs"
    )
    group.add_argument("--data-port", type=int, default=0, help="its port; 0: any free one")
    group.add_argument("--advertise", default="", help="address that other nodes use, when it is not --bind")
    group.add_argument("--transport", choices=("auto", "shm", "tcp", "rdma"), default="auto")
    group.add_argument(
        "--rdma", default="auto", metavar="DEVICE[:PORT[:GID]]", help="RDMA port; auto, or off"
    )
    group.add_argument("--encryption", choices=("auto", "always", "never"), default="auto")


def add_worker(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("worker")
    group.add_argument(
        "--kv-blocks", type=int, default=0, help="blocks of the worker's own cache; 0: by its role"
    )
    group.add_argument("--batch-max", type=int, default=16, help="sequences in one decode batch")
    group.add_argument("--threads", type=int, default=1, help="torch threads")
    group.add_argument("--attention", choices=("auto", "sdpa", "flash"), default="auto")
    group.add_argument("--chunk-tokens", type=int, default=1024, help="of a prefill chunk in fast numerics")
    group.add_argument(
        "--no-stream-layers", action="store_true", help="push KV after the last layer, to compare"
    )


def add_frontend(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("frontend")
    group.add_argument("--http-host", default="127.0.0.1")
    group.add_argument("--http-port", type=int, default=8000, help="0: any free one")
    group.add_argument("--api-keys-file", default="", metavar="FILE", help="keys of HTTP clients, one a line")
    group.add_argument("--open-requests-max", type=int, default=4096)


async def _connect(args: argparse.Namespace, name: str) -> Bus:
    return await Bus.connect(bus_config(args), name=name, limits=stream_limits(args))


def _settle_memory() -> None:
    """What was loaded stays: the collector need not look at it again, nor run for every 700 small objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _touch(file: str) -> None:
    Path(file).touch()


async def _keep_healthy(bus: Bus, file: str) -> None:
    """What a container's health check looks at: the file is fresh while the event loop turns and NATS is
    there.
    """
    while True:
        if bus.nc.is_connected:
            _touch(file)
        await asyncio.sleep(HEALTH_S)


async def _until_stopped(bus: Bus, health_file: str, *others: asyncio.Future[Any]) -> None:
    """Returns at SIGTERM or SIGINT; raises what one of `others` raised."""
    _settle_memory()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    waiting = asyncio.ensure_future(stop.wait())
    healthy = [asyncio.ensure_future(_keep_healthy(bus, health_file))] if health_file else []
    try:
        done, _ = await asyncio.wait({waiting, *healthy, *others}, return_when=asyncio.FIRST_COMPLETED)
        for future in done - {waiting}:
            future.result()
            raise RuntimeError("a part of the process ended by itself")
    finally:
        await end_tasks(healthy)
        if health_file:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(health_file)


async def run_conductor(args: argparse.Namespace) -> int:
    from halfmoon.conductor.live import shell
    from halfmoon.conductor.live.digest_exchange import Diverged
    from halfmoon.conductor.live.metrics import ConductorMetrics
    from halfmoon.conductor.log_reading import LogUnreadable

    tracing = start_tracing(args, "conductor", args.id)
    bus = await _connect(args, args.id)
    registry = process_registry(bus, role="conductor", process_id=args.id)
    figures: list[ConductorMetrics] = []

    def started(shell: shell.Shell) -> None:
        figures.append(ConductorMetrics(bus, shell.core, shell.tally))
        registry.register(figures[0])

    async def refresh() -> None:
        for each in figures:
            await each.refresh()

    running = shell.run(bus, conductor_id=args.id, policy=policy_of(args), started=started, tracing=tracing)
    task = asyncio.ensure_future(running)
    say(f"conductor {args.id} follows the log")
    try:
        async with shown(args, registry, refresh):
            await _until_stopped(bus, args.health_file, task)
    except (LogUnreadable, Diverged) as problem:
        say(f"halfmoon: error: {problem}")
        return 1
    finally:
        await end_tasks([task])
        await bus.close()
        stop_tracing(tracing)
    return 0


async def run_store(args: argparse.Namespace) -> int:
    from halfmoon.store.agent.agent import StoreAgent
    from halfmoon.store.agent.metrics import StoreMetrics
    from halfmoon.store.config import StoreConfig
    from halfmoon.store.errors import TransferError
    from halfmoon.store.pool.segment import SegmentError

    layout = models.layout_of(args)
    if layout.block_bytes == 0:
        say("this engine has no KVCache: there is nothing to store")
        return 0
    config = StoreConfig(
        cluster=args.cluster,
        node_id=args.node,
        layout=layout,
        pool_bytes=args.pool_mib << 20,
        eviction=args.eviction,
        kv_events=args.kv_events,
        kv_events_replay=args.kv_events_replay,
        ssd_path=_ssd_path(args),
        ssd_bytes=args.ssd_bytes,
        ssd_hits_min=args.ssd_hits,
        quotas=dict(_quota(text) for text in args.quota),
        bind=args.bind,
        stripes=args.stripes,
        topology=args.topology,
        port=args.data_port,
        advertise=args.advertise,
        transport=args.transport,
        encryption=args.encryption,
        rdma=args.rdma,
        cluster_secret=secret(args),
    )
    tracing = start_tracing(args, "store", f"store-{args.node}")
    bus = await _connect(args, f"store-{args.node}")
    agent = StoreAgent(bus, config)
    agent.tracing = tracing
    metrics = StoreMetrics(agent)
    metrics.follow()
    try:
        await agent.start()
    except (SegmentError, TransferError) as problem:
        raise OptionInvalid(str(problem)) from None
    registry = process_registry(bus, role="store", process_id=f"store-{args.node}", node_id=args.node)
    registry.register(metrics)
    say(
        f"store agent {args.node}: {(args.pool_mib << 20) // layout.block_bytes} blocks of {layout.block_bytes} bytes"
    )
    if (tier := agent.tier) is not None and tier.open:
        say(f"store agent {args.node}: SSD tier {agent.config.ssd_path}, {tier.records} blocks, {tier.mode}")
    stopped = asyncio.create_task(_until_stopped(bus, args.health_file))
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


def _ssd_path(args: argparse.Namespace) -> str:
    """Raises OptionInvalid."""
    path = Path(args.ssd)
    if args.ssd and not (path.is_dir() or path.parent.is_dir()):
        raise OptionInvalid(f"--ssd: there is no directory {path.parent}")
    return str(path / f"halfmoon-{args.cluster}-{args.node}.ssd") if args.ssd and path.is_dir() else args.ssd


def _quota(text: str) -> tuple[str, int]:
    tenant, _, size = text.rpartition("=")
    if not tenant or not size.isdecimal():
        raise OptionInvalid(f"--quota: {text!r} is not TENANT=BYTES")
    return tenant, int(size)


async def run_worker(args: argparse.Namespace) -> int:
    from halfmoon.store.agent_client import AgentClient
    from halfmoon.workers.decode.worker import DecodeWorker
    from halfmoon.workers.prefill.worker import PrefillWorker
    from halfmoon.workers.worker import WorkerConfig

    worker_id = args.id or args.node
    layout = models.layout_of(args)
    context = models.context_tokens_max(args)
    per_request = layout.blocks(context)
    kv_blocks = args.kv_blocks or (per_request if args.command == "prefill" else 2 * per_request)
    if layout.layers == 0 and not args.kv_blocks:
        kv_blocks = 1 << 16
    loop = asyncio.get_running_loop()
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # two workers on two cores collapse when idle threads spin
    say(
        f"{args.command} worker {worker_id}: loading {layout.model} ({layout.dtype}, {layout.numerics} numerics)"
    )
    started = loop.time()
    engine = models.build_engine(args, layout, kv_blocks=kv_blocks)
    loaded = loop.time()
    profile = models.measure_profile(engine, layout)
    if warning := models.numerics_warning(engine, layout):
        say(f"{args.command} worker {worker_id}: {warning}")
    took = f"loaded in {loaded - started:.1f} s, measured in {loop.time() - loaded:.1f} s"
    say(f"{args.command} worker {worker_id}: {took}")
    tracing = start_tracing(args, args.command, worker_id)
    bus = await _connect(args, worker_id)
    store = AgentClient(bus, node_id=args.node, worker_id=worker_id) if layout.block_bytes else None
    kind = PrefillWorker if args.command == "prefill" else DecodeWorker
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
        ),
    )
    worker.tracing = tracing
    await worker.start()
    say(f"{args.command} worker {worker_id} takes orders")
    registry = process_registry(bus, role=args.command, process_id=worker_id, node_id=args.node)
    registry.register(worker.metrics)
    try:
        async with shown(args, registry):
            await _until_stopped(bus, args.health_file, worker.failed)
    finally:
        await worker.stop(drain_s=args.drain_s)
        if store is not None:
            await store.close()
        await bus.close()
        stop_tracing(tracing)
    return 0


async def run_frontend(args: argparse.Namespace) -> int:
    from halfmoon.workers.frontend.config import FrontendConfig
    from halfmoon.workers.frontend.frontend import Frontend
    from halfmoon.workers.model.tokenizer import Tokenizer

    layout = models.layout_of(args)
    tokenizer = Tokenizer.load(args.model)
    keys: dict[str, str] = {}
    if args.api_keys_file:
        text = await asyncio.to_thread(Path(args.api_keys_file).read_text)
        keys = {line.strip(): "" for line in text.splitlines() if line.strip()}
    tracing = start_tracing(args, "frontend", args.id)
    bus = await _connect(args, args.id)
    config = FrontendConfig(
        frontend_id=args.id,
        model=layout.model,
        http_host=args.http_host,
        http_port=args.http_port,
        api_keys=keys,
        cluster_secret=secret(args),
        context_tokens=models.context_tokens_max(args),
        open_requests_max=args.open_requests_max,
        drain_ns_max=int(args.drain_s * SECOND_NS),
    )
    frontend = Frontend(bus, config, tokenizer, layout)
    frontend.registry.tracing = tracing
    await frontend.start()
    say(f"frontend {args.id}: http://{args.http_host}:{frontend.http_port}")
    try:
        async with shown(args, frontend.registry.metrics.registry):
            await _until_stopped(bus, args.health_file)
    finally:
        await frontend.stop()
        await bus.close()
        stop_tracing(tracing)
    return 0
