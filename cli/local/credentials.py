"""Credentials of a cluster on this machine: a key for each of its processes, new at each start.

They live as long as the cluster. Its nats-server takes nobody without one, and gives each the permissions that its
role has in a cluster of containers: another user of this machine gets no connection, and a process that is taken over
speaks for itself only.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from halfmoon.bus.credentials import make_all
from halfmoon.bus.permissions import Identity, authorization, cluster_identities
from halfmoon.cli.local.engines import adapted_engines
from halfmoon.schemas import subjects
from halfmoon.schemas.roles import WORKER_ROLES


def credentials_of(directory: Path) -> Path:
    """Where in a cluster's state directory they are."""
    return directory / "credentials"


def make_credentials(args: argparse.Namespace, directory: Path) -> str:
    """Make credentials for the processes of `args`; the part of the server's configuration about them."""
    identities = cluster_identities(
        conductors=args.conductors,
        frontends=1,
        workers={role: getattr(args, role) for role in WORKER_ROLES},
        elastic=args.elastic != "off",
        adapters=[engine.name for engine in adapted_engines(args)],
    )
    identities.append(Identity(role="supervisor", name=subjects.SUPERVISOR))
    return authorization(make_all(credentials_of(directory), identities))
