"""The flags that `halfmoon up` hands on to its processes."""

from __future__ import annotations

import argparse
from pathlib import Path

from halfmoon.cli.metrics import Targets
from halfmoon.cli.options import PREFIX
from halfmoon.schemas.roles import WorkerRole

DRAIN_S = 8.0


def common_flags(args: argparse.Namespace, command: str, directory: Path, targets: Targets) -> list[str]:
    """Flags of every process: how to reach NATS, which cluster it belongs to, and which model that serves."""
    common = ["--nats", args.nats, "--cluster", args.cluster, "--secret-file", args.secret_file]
    for flag in ("nkey_file", "credentials", "ca", "cert", "key"):
        if value := getattr(args, f"nats_{flag}"):
            common += [f"--nats-{flag.replace('_', '-')}", value]
    if args.otlp:
        common += ["--otlp", args.otlp]
    for flag in ("nats_replicas", "log_mib_max", "log_hours_max"):
        common += [f"--{flag.replace('_', '-')}", str(getattr(args, flag))]
    common += ["--drain-s", str(DRAIN_S)]
    common += targets.flags(command)
    if command != "conductor":
        common += ["--layout-file", str(directory / "layout.json"), "--model", args.model]
        common += [
            "--engine",
            args.engine,
            "--device",
            args.device,
            "--block-tokens",
            str(args.block_tokens),
        ]
    return common


def secret_environment(args: argparse.Namespace) -> dict[str, str]:
    """Values that are no flags: other users of this machine see the words of a command, but not its environment."""
    names = ("nats_user", "nats_password", "nats_token")
    return {f"{PREFIX}{name.upper()}": getattr(args, name) for name in names}


def policy_flags(args: argparse.Namespace) -> list[str]:
    return [
        "--policy",
        args.policy,
        "--admission",
        args.admission,
        "--ttft-slo-ms",
        str(args.ttft_slo_ms),
        "--tbt-slo-ms",
        str(args.tbt_slo_ms),
        "--fetch-replicas",
        str(args.fetch_replicas),
        "--hot-transfers",
        str(args.hot_transfers),
        "--worker-wait-s",
        str(args.worker_wait_s),
    ]


def store_flags(args: argparse.Namespace) -> list[str]:
    return [
        "--pool-mib",
        str(args.pool_mib),
        "--bind",
        args.bind,
        "--transport",
        args.transport,
        "--encryption",
        args.encryption,
        "--eviction",
        args.eviction,
        "--rdma",
        args.rdma,
        "--ssd",
        args.ssd,
        "--ssd-bytes",
        str(args.ssd_bytes),
        "--ssd-hits",
        str(args.ssd_hits),
        *(flag for quota in args.quota for flag in ("--quota", quota)),
    ]


def worker_flags(args: argparse.Namespace, role: WorkerRole) -> list[str]:
    flags = [
        "--kv-blocks",
        str(getattr(args, f"{role}_kv_blocks") or args.kv_blocks),
        "--batch-max",
        str(args.batch_max),
        "--threads",
        str(args.threads),
    ]
    flags += ["--attention", args.attention, "--chunk-tokens", str(args.chunk_tokens)]
    flags += ["--channel-bind", args.channel_bind, "--channel-encryption", args.channel_encryption]
    flags += [f"--{name.replace('_', '-')}" for name in ("no_stream_layers", "lend") if getattr(args, name)]
    return flags


def frontend_flags(args: argparse.Namespace) -> list[str]:
    flags = []
    for option in (
        "open_requests_max",
        "client_inboxes",
        "silence_s",
        "http_connections_max",
        "http_connections_per_address_max",
        "http_head_s",
        "http_body_s",
        "log_free_mib_min",
    ):
        flags += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    for option in ("api_keys_file", "http_allowed_hosts"):
        if value := getattr(args, option):
            flags += [f"--{option.replace('_', '-')}", value]
    return flags
