"""`halfmoon up`: a whole cluster on this machine, from one command, gone without a trace at its end."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from halfmoon.bus.credentials import private_directory
from halfmoon.cli.declared import add_options, options_of
from halfmoon.cli.local.credentials import credentials_of
from halfmoon.cli.local.engines import adapted_engines, check_halves
from halfmoon.cli.local.forked import ForkServers
from halfmoon.cli.options import DEFAULT_CLUSTER, OptionInvalid, add_bus, add_config, state_directory
from halfmoon.cli.processes.options import PolicyOptions, policy_of
from halfmoon.cli.run_file import LOCK, RunFile
from halfmoon.cli.shared_options import ModelOptions, SharedOptions
from halfmoon.cli.tracing import check_endpoint
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.roles import ELASTIC_ROLES, ROLES, WORKER_ROLES
from halfmoon.schemas.types import option
from halfmoon.store.options import StoreOptions
from halfmoon.workers.adapters.options import ENGINE_TITLES
from halfmoon.workers.frontend.options import FrontendOptions
from halfmoon.workers.options import WorkerOptions

if TYPE_CHECKING:
    from halfmoon.cli.local.cluster import LocalCluster

if sys.platform != "linux":  # the shared memory segments and the parent's death signal are Linux's
    raise RuntimeError("halfmoon runs on Linux")


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that no process has."""

    attention_split: Annotated[
        Literal["request", "heads", "sequence"],
        option(
            "what each attention worker holds: whole requests, an equal part of the KV heads of all, or "
            "whole requests and segments of those that no single one has room for"
        ),
    ] = "request"
    adapt_vllm: Annotated[
        tuple[str, ...],
        option(
            "a vLLM that runs already serves as a mixed worker; repeatable. The policy is "
            "local_cache_aware then, unless --policy names another than the default",
            "URL",
        ),
    ] = ()
    adapt_vllm_prefill: Annotated[
        tuple[str, ...],
        option("as --adapt-vllm, a prefill worker, whose KV the vLLMs of --adapt-vllm-decode get", "URL"),
    ] = ()
    adapt_vllm_decode: Annotated[tuple[str, ...], option("as --adapt-vllm, a decode worker", "URL")] = ()
    adapt_sglang: Annotated[tuple[str, ...], option("as --adapt-vllm, an SGLang", "URL")] = ()
    adapt_sglang_prefill: Annotated[
        tuple[str, ...], option("as --adapt-vllm-prefill, an SGLang of --disaggregation-mode prefill", "URL")
    ] = ()
    adapt_sglang_decode: Annotated[
        tuple[str, ...], option("as --adapt-vllm-decode, an SGLang of --disaggregation-mode decode", "URL")
    ] = ()
    conductors: Annotated[int, Meta(ge=1)] = 1
    port: Annotated[int, option("HTTP port (default: 8000, or a free one)")] = 0
    metrics_port: Annotated[int, option("serve metrics at ports from this on (default: no)")] = 0
    nats_port: Annotated[int, option("of our nats-server (default: 4222, or a free one)")] = 0


OPTIONS = (
    UpOptions,
    ModelOptions,
    WorkerOptions,
    StoreOptions,
    FrontendOptions,
    PolicyOptions,
    SharedOptions,
)


def add(parser: argparse.ArgumentParser) -> None:
    for role in WORKER_ROLES:
        nodes = ROLES[role].nodes
        parser.add_argument(
            f"--{role}",
            type=int,
            help=f"{role} nodes (default: {nodes}{', with --mixed 0' if role in ELASTIC_ROLES else ''})",
        )
    add_options(parser, *OPTIONS)
    for role in WORKER_ROLES:
        parser.add_argument(
            f"--{role}-kv-blocks",
            type=int,
            default=0,
            help=f"blocks of each {role} worker's own cache; 0: --kv-blocks",
        )
    add_bus(parser, default="one of our own")
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    count_nodes(args)
    if adapted_engines(args) and args.policy == Policy().name:  # which moves KV, and no engine's KV moves
        args.policy = "local_cache_aware"
    for kind in OPTIONS:
        options_of(kind, args)
    policy_of(args)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", args.cluster):
        raise OptionInvalid(f"--cluster {args.cluster}: letters, digits, - and _, at most 64")
    check_endpoint(args)
    directory = state_directory(args.cluster)
    private_directory(directory)
    lock = _lock(directory, args.cluster)
    for name in ("cluster.json", "prometheus.json"):
        (directory / name).unlink(missing_ok=True)  # of one that was killed
    fork_servers = ForkServers()
    fork_servers.start(args, directory)
    # Importing it takes 0.3 s, in which they import as well.
    from halfmoon.cli.local.cluster import LocalCluster
    from halfmoon.cli.processes.lifecycle import raise_open_files_limit

    raise_open_files_limit()
    cluster = LocalCluster(args, directory, fork_servers)
    stop = asyncio.Event()
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        stop.set()
        if signals > 1:
            cluster.kill()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    try:
        starting = asyncio.ensure_future(cluster.start())
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            _print_addresses(cluster, directory)
            await stop.wait()
        else:
            starting.cancel()
        cluster.say("draining; press Ctrl-C again to stop at once")
        return 0
    finally:
        cluster.ready = True
        try:
            await cluster.stop()
        finally:
            cluster.clean()
            lock.close()
        if cluster.bus is not None:
            cluster.say("stopped")


def count_nodes(args: argparse.Namespace) -> None:
    """Set each role's default number of nodes: with mixed workers there need be no others. Raises OptionInvalid."""
    engines = adapted_engines(args)
    whole = bool(args.mixed or engines)
    for role in WORKER_ROLES:
        pair = role in ELASTIC_ROLES
        if getattr(args, role) is None:
            setattr(args, role, 0 if pair and whole else ROLES[role].nodes)
        least = 0 if pair and whole else ROLES[role].nodes_min
        if getattr(args, role) < least:
            raise OptionInvalid(f"--{role}: at least {least}")
    if bool(args.prefill) != bool(args.decode):
        raise OptionInvalid(
            "--prefill and --decode: some of both, or with --mixed or --adapt-… none of either"
        )
    check_halves(args)
    if args.attention and not args.decode:
        raise OptionInvalid("--attention: its KV is that of decode workers, of which there are none")


def _print_addresses(cluster: LocalCluster, directory: Path) -> None:
    args = cluster.args
    metrics = cluster.targets.write(directory / "prometheus.json")
    credentials = "" if cluster.server is None else str(credentials_of(directory))
    RunFile(nats=args.nats, http=cluster.http, pid=os.getpid(), credentials=credentials).write(directory)
    where = "" if args.cluster == DEFAULT_CLUSTER else f" --cluster {args.cluster}"
    attention = f", whose KV lies at {args.attention} attention nodes" if args.attention else ""
    nodes = [f"{args.prefill} prefill and {args.decode} decode nodes{attention}"] if args.decode else []
    if args.mixed:
        nodes.append(f"{args.mixed} mixed node{'s' * (args.mixed > 1)}")
    kinds = Counter(ENGINE_TITLES[engine.kind] for engine in adapted_engines(args))
    nodes += [f"{count} {kind}{'s' * (count > 1)}" for kind, count in kinds.items()]
    cluster.say(f"ready: {', '.join(nodes)}")
    print(
        f"\n  NATS  {args.nats}\n  HTTP  {cluster.http}\n{metrics}\n"
        f'Try, in another terminal:\n\n  halfmoon generate "The moon is"{where}\n\n'
        f"Processes write to {directory / 'output'}. Ctrl-C stops the cluster.",
        flush=True,
    )


def _lock(directory: Path, cluster: str) -> IO[str]:
    lock = (directory / LOCK).open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise OptionInvalid(
            f"a cluster named {cluster!r} runs already; name another with --cluster"
        ) from None
    return lock
