"""`halfmoon prefill`, `halfmoon decode`, `halfmoon mixed` and `halfmoon attention`: a worker beside a store agent."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import time
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from halfmoon.bus.telemetry.metrics import process_registry
from halfmoon.cli import model as models
from halfmoon.cli.declared import add_options, options_of
from halfmoon.cli.metrics import shown
from halfmoon.cli.options import OptionInvalid, add_bus, add_config
from halfmoon.cli.output import say
from halfmoon.cli.processes.attention import (
    channels,
    decode_attention,
    heads_of_part,
    stage_channels,
)
from halfmoon.cli.processes.lifecycle import connect, healthy, say_takes_orders, stop_signal, until_stopped
from halfmoon.cli.processes.mixed import IterationBounds, iteration_bounds
from halfmoon.cli.shared_options import ModelOptions, ProcessOptions
from halfmoon.cli.tracing import start_tracing, stop_tracing
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.roles import ELASTIC_ROLES, ROLES, WorkerRole
from halfmoon.schemas.types import ExactNumerics
from halfmoon.workers.options import WorkerOptions, WorkerProcessOptions

if TYPE_CHECKING:
    from halfmoon.workers.worker import Worker, WorkerConfig

#: The end of a prompt that is no whole block goes through them, on its way to attention workers.
TAIL_BLOCKS = 8

OPTIONS = (WorkerProcessOptions, ModelOptions, ProcessOptions)


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser, *OPTIONS)
    add_bus(parser)
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    from halfmoon.workers.worker import WorkerConfig

    role: WorkerRole | None = args.command
    assert role is not None
    options = options_of(WorkerOptions, args)
    worker_id = args.id or args.node
    if not args.layout_file:  # else `halfmoon up` has done it
        models.check_texts(args.model)
    layout = models.layout_of(args)
    duties = ROLES[role].duties
    elsewhere = duties == {"batch"} and decode_attention(args) == "remote"
    may_become = roles_of(args, role, elsewhere=elsewhere)
    context = models.context_tokens_max(args)
    kv_blocks = args.kv_blocks or max(
        _kv_blocks(each, layout, context, elsewhere=elsewhere) for each in (role, *may_become)
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    # Two workers on two cores collapse when idle threads spin.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    say(f"{role} worker {worker_id}: loading {layout.model} ({layout.dtype}, {layout.numerics} numerics)")
    first_kv_head, kv_heads = heads_of_part(args, layout, worker_id) if "holds" in duties else (0, 0)
    lending = channels(args, worker_id, layout)
    stages = stage_channels(
        args, worker_id, layout, prefills=any(ROLES[one].duties == {"prompts"} for one in (role, *may_become))
    )
    engine, held, profile = _engine(
        args,
        layout,
        f"{role} worker {worker_id}",
        kv_blocks=kv_blocks,
        kv_heads=kv_heads,
        elsewhere=elsewhere,
    )
    mixed = duties >= {"prompts", "batch"}
    bounds = iteration_bounds(args, options, layout) if mixed else IterationBounds(0, 0)
    follows: dict[str, Any] = {
        "kv_blocks": kv_blocks,
        "batch_max": options.batch_max if layout.layers else 1024,
        **bounds._asdict(),
        "decode_groups": 0 if options.decode_groups == "auto" else options.decode_groups,
    }
    config = WorkerConfig(
        **asdict(options) | follows,
        worker_id=worker_id,
        node_id=args.node,
        layout=layout,
        profile=profile,
        context_tokens_max=context,
        exact_numerics=held,
        lending=lending,
        stage_channels=stages,
        cache_elsewhere=elsewhere,
        first_kv_head=first_kv_head,
        kv_heads=kv_heads,
        holds_segments="holds" in duties and args.attention_segments,
        may_become=may_become,
    )
    stop = stop_signal()
    while role is not None:
        role = await _serve(args, role, engine, config, stop)
    return 0


async def _serve(
    args: argparse.Namespace, role: WorkerRole, engine: Any, config: WorkerConfig, stop: asyncio.Event
) -> WorkerRole | None:
    """The worker's life in one role; its next role, None: it was stopped.

    A connection and a store client of its own for each role, so that nothing of one is heard in the other.
    """
    from halfmoon.store.agent_client import AgentClient

    worker_id = config.worker_id
    tracing = start_tracing(args, role, worker_id)
    bus = await connect(args, worker_id)
    store = AgentClient(bus, node_id=args.node, worker_id=worker_id) if config.layout.block_bytes else None
    worker = class_of(role)(bus, engine, store, config)
    worker.tracing = tracing
    # An iteration of a mixed worker is neither a prefill nor a step of the profile's.
    if config.layout.layers and ROLES[role].duties in ({"prompts"}, {"batch"}):
        own_steps = config.lending is None and not config.cache_elsewhere
        worker.profile_check = models.profile_check(
            engine, config.profile, lambda why: say(f"{role} worker {worker_id}: {why}"), steps=own_steps
        )
    await worker.start()
    await say_takes_orders(bus, f"{role} worker {worker_id}")
    registry = process_registry(bus, role=role, process_id=worker_id, node_id=args.node)
    registry.register(worker.metrics)
    try:
        async with shown(args, registry):
            await until_stopped(bus, args.health_file, worker.failed, stop=stop, over=worker.next_role)
            if not stop.is_set():  # a container that changes its role is well all the while
                async with healthy(bus, args.health_file):
                    await worker.stop(drain_s=args.drain_s)
    finally:
        await worker.stop(drain_s=args.drain_s)
        if store is not None:
            await store.close()
        await bus.close()
        stop_tracing(tracing)
    return None if stop.is_set() else worker.next_role.result()


def roles_of(args: argparse.Namespace, role: WorkerRole, *, elsewhere: bool) -> tuple[WorkerRole, ...]:
    """Those that the process may take with `--elastic`; (): it keeps its own. Raises OptionInvalid."""
    if args.elastic == "off" or role not in ELASTIC_ROLES:
        return ()
    if elsewhere:
        raise OptionInvalid("--elastic: a decode worker whose KV lies at attention workers cannot prefill")
    return ELASTIC_ROLES


def class_of(role: WorkerRole) -> type[Worker]:
    """The class in the role's record. Its module is imported."""
    module, name = ROLES[role].worker
    kind: type[Worker] = getattr(importlib.import_module(module), name)
    return kind


def _engine(
    args: argparse.Namespace, layout: Layout, who: str, *, kv_blocks: int, kv_heads: int, elsewhere: bool
) -> tuple[Any, ExactNumerics, CostProfile]:
    """An engine (of an attention worker: a cache of `kv_heads` and the operator), whether exact numerics hold, and its
    cost profile.
    """
    if kv_heads:
        operator = models.build_attention(args, layout, kv_blocks=kv_blocks, kv_heads=kv_heads)
        return operator, "", models.measure_attention(operator)
    started = time.monotonic()
    engine = models.build_engine(args, layout, kv_blocks=kv_blocks, cache_elsewhere=elsewhere)
    loaded = time.monotonic()
    held = _tried(engine, layout, who)  # before the profile: it finds out how many rows a product needs
    profile = models.measure_profile(engine, layout)
    say(f"{who}: loaded in {loaded - started:.1f} s, measured in {time.monotonic() - loaded:.1f} s")
    return engine, held, profile


def _kv_blocks(role: WorkerRole, layout: Layout, context: int, *, elsewhere: bool) -> int:
    """Default number of blocks of the worker's own cache."""
    if layout.layers == 0:
        return 1 << 16
    if elsewhere:
        return TAIL_BLOCKS
    return ROLES[role].contexts * layout.blocks(context)


def _tried(engine: Any, layout: Layout, who: str) -> ExactNumerics:
    """Whether exact numerics hold here; where they do not, a line reports it."""
    held, warning = models.prepare_numerics(engine, layout)
    if warning:
        say(f"{who}: {warning}")
    return held
