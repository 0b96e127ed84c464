"""`halfmoon secrets DIR`: certificates, NATS credentials with each role's permissions, and the cluster's
secret.

One directory for each container that is to see it: `nats-0`, ... (configuration and certificate of a server), and for
each role its processes' nkeys, `ROLE/NAME.nk`, beside the authority's certificate `ca.pem` and, where blocks are named
or moved, the cluster's `secret`. Servers hold public keys only.

Existing files stay, so that the command may run at every start; an empty directory is a new cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import secrets as random_bytes
from dataclasses import replace
from pathlib import Path

from halfmoon.bus.credentials import CredentialsBroken, key_file, make_key, public_key, write_private
from halfmoon.bus.permissions import Identity, authorization, cluster_identities
from halfmoon.cli.certificates import make_authority, make_certificate
from halfmoon.cli.declared import add_options
from halfmoon.cli.options import OptionInvalid, add_config
from halfmoon.cli.output import say
from halfmoon.schemas import subjects
from halfmoon.schemas.roles import ROLES, WORKER_ROLES
from halfmoon.workers.options import PoolOptions

#: Of a server that listens in the cluster: 4222 for processes, 6222 for the other servers, 8222 for health
#: (loopback).
_CONFIG = """\
server_name: {name}
listen: "0.0.0.0:4222"
http: "127.0.0.1:8222"
max_payload: 8388608
max_pending: 268435456
ping_interval: "5s"
jetstream {{ store_dir: "{store}", max_file_store: {file_bytes}, max_memory_store: 268435456 }}
tls {{ cert_file: "{here}/server.pem", key_file: "{here}/server.key", ca_file: "{here}/ca.pem" }}
{cluster}include "authorization.conf"
"""
_CLUSTER = """\
cluster {{
  name: halfmoon
  listen: "0.0.0.0:6222"
  routes: [{routes}]
  tls {{ cert_file: "{here}/server.pem", key_file: "{here}/server.key", ca_file: "{here}/ca.pem", verify: true }}
}}
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="where to")
    parser.add_argument("--servers", default="nats-0,nats-1,nats-2", help="host names of the NATS servers")
    parser.add_argument("--conductors", type=int, default=5, help="how many of each there may be at most")
    parser.add_argument("--frontends", type=int, default=4)
    for role in WORKER_ROLES:
        parser.add_argument(f"--{role}", type=int, default=8 if ROLES[role].nodes else 0)
    parser.add_argument("--adapt", type=int, default=0, help="adapters of vLLMs: vllm-0 and on")
    parser.add_argument("--adapt-sglang", type=int, default=0, help="adapters of SGLangs: sglang-0 and on")
    parser.add_argument(
        "--engines", type=int, default=0, help="engines that use a store: engine-0 and on, each with an agent"
    )
    add_options(parser, PoolOptions, only=("elastic",))
    parser.add_argument(
        "--tenants", default="", metavar="NAMES", help="a client's credentials for each, by commas"
    )
    parser.add_argument(
        "--seen-at", default="/run/secrets", help="where a NATS server's container finds its own"
    )
    parser.add_argument("--store-dir", default="/data", help="where a NATS server keeps its streams")
    parser.add_argument("--log-gib-max", type=int, default=32, help="disk that a NATS server may use")
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    least: dict[str, int] = {role: ROLES[role].nodes_min for role in WORKER_ROLES} | {
        "adapt": 0,
        "adapt_sglang": 0,
        "engines": 0,
    }
    counts = "conductors", "frontends", *WORKER_ROLES, "adapt", "adapt_sglang", "engines", "log_gib_max"
    for option in counts:
        if getattr(args, option) < least.get(option, 1):
            raise OptionInvalid(f"--{option.replace('_', '-')}: at least {least.get(option, 1)}")
    await asyncio.to_thread(make, args)
    return 0


def make(args: argparse.Namespace) -> None:
    """Raises OSError, OptionInvalid."""
    place = Path(args.directory)
    place.mkdir(parents=True, exist_ok=True)
    servers = [name.strip() for name in args.servers.split(",") if name.strip()]
    made = _Made()
    authority = place / "authority"
    authority.mkdir(mode=0o700, exist_ok=True)
    if made.missing(authority / "ca.key"):
        make_authority(authority / "ca.key", authority / "ca.pem")
    if made.missing(authority / "secret"):
        write_private(authority / "secret", random_bytes.token_hex(32).encode())
    identities = [_with_key(place / _folder(each), each, made) for each in _wanted(args)]
    needs_secret = {role for role, traits in ROLES.items() if traits.has_secret}
    for role in dict.fromkeys(_folder(each) for each in identities):
        _copy(authority / "ca.pem", place / role)
        if role in needs_secret:
            _copy(authority / "secret", place / role)
    text = authorization(identities)
    for name in servers:
        here = place / name
        here.mkdir(exist_ok=True)
        _copy(authority / "ca.pem", here)
        if made.missing(here / "server.pem"):
            _certificate(here, name, authority)
        write_private(here / "authorization.conf", text.encode())
        write_private(here / "nats.conf", _configuration(args, servers, name).encode())
    say(f"secrets in {place}: {made.count} made, {made.kept} there already")


class _Made:
    """Counts."""

    def __init__(self) -> None:
        self.count = self.kept = 0

    def missing(self, path: Path) -> bool:
        there = path.exists()
        self.kept += there
        self.count += not there
        return not there


def _wanted(args: argparse.Namespace) -> list[Identity]:
    workers = {role: getattr(args, role) for role in WORKER_ROLES}
    return cluster_identities(
        conductors=args.conductors,
        frontends=args.frontends,
        workers=workers,
        tenants=_tenants(args),
        elastic=args.elastic != "off",
        adapters=[
            *(f"vllm-{number}" for number in range(args.adapt)),
            *(f"sglang-{number}" for number in range(args.adapt_sglang)),
        ],
        engines=args.engines,
    )


def _tenants(args: argparse.Namespace) -> list[str]:
    """Raises OptionInvalid."""
    names = [name.strip() for name in args.tenants.split(",") if name.strip()]
    for name in names:
        if not re.fullmatch(subjects.TENANT, name):
            raise OptionInvalid(f"--tenants: {name!r}: letters, digits, - and _, at most 64")
    return list(dict.fromkeys(names))


def _folder(identity: Identity) -> str:
    """A node's store agent and worker are in one container; an engine is not with its node's agent, which has the
    cluster's secret. Each tenant sees its own credentials only.
    """
    if identity.role == "tenant":
        return identity.name
    return identity.beside or identity.role


def _with_key(folder: Path, identity: Identity, made: _Made) -> Identity:
    folder.mkdir(exist_ok=True)
    file = key_file(folder, identity.name)
    if made.missing(file):
        make_key(file)
    try:
        return replace(identity, public_key=public_key(file))
    except CredentialsBroken as problem:
        raise OptionInvalid(str(problem)) from None


def _certificate(here: Path, name: str, authority: Path) -> None:
    """Raises OptionInvalid."""
    try:
        make_certificate(
            name,
            here / "server.key",
            here / "server.pem",
            authority_key=authority / "ca.key",
            authority=authority / "ca.pem",
        )
    except ValueError as problem:
        raise OptionInvalid(f"secrets: {name}: {problem}") from None


def _configuration(args: argparse.Namespace, servers: list[str], name: str) -> str:
    routes = ", ".join(f'"tls://{other}:6222"' for other in servers if other != name)
    cluster = _CLUSTER.format(routes=routes, here=args.seen_at) if len(servers) > 1 else ""
    file_bytes = args.log_gib_max << 30
    return _CONFIG.format(
        name=name, store=args.store_dir, file_bytes=file_bytes, here=args.seen_at, cluster=cluster
    )


def _copy(path: Path, to: Path) -> None:
    write_private(to / path.name, path.read_bytes())
