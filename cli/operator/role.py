"""`halfmoon role WORKER ROLE`: a worker finishes its orders and takes another role, its weights loaded as they are.

The wish is an event in the log: conductors place nothing more on the worker from that event on, and order the change.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from halfmoon.bus.connection import Bus
from halfmoon.cli.operator.policy import STORED_S, conductor_status, operator_bus
from halfmoon.cli.options import OptionInvalid, add_bus, add_config
from halfmoon.schemas import subjects
from halfmoon.schemas.events import RoleWanted
from halfmoon.schemas.roles import ELASTIC_ROLES, WORKER_ROLES, WorkerRole
from halfmoon.schemas.status import NodeStatus

#: For the conductors to read the wish.
READ_S = 5.0
LOOK_S = 0.1


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", help="of a cluster whose workers may change: halfmoon up --elastic")
    parser.add_argument("role", choices=ELASTIC_ROLES)
    parser.add_argument(
        "--timeout-s", type=float, default=300.0, help="how long it may take to finish what it has"
    )
    add_bus(parser)
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    """Exit status 0 when the worker takes orders in its new role. Raises OptionInvalid, BusError."""
    started = time.monotonic()
    bus = await operator_bus(args, "role")
    try:
        check(list(_workers((await conductor_status(bus)).nodes).values()), args.worker, args.role)
        wanted = RoleWanted(target_id=args.worker, role=args.role)
        seq = await bus.append(wanted, source_id=subjects.OPERATOR, within_s=STORED_S)
        await _taken(bus, args.worker, args.role, seq)
        await _changed(bus, args.worker, args.role, started + args.timeout_s)
    finally:
        await bus.close()
    print(f"{args.worker} is a {args.role} worker now, after {time.monotonic() - started:.1f} s")
    return 0


def check(workers: list[NodeStatus], worker_id: str, role: WorkerRole) -> None:
    """Raises OptionInvalid, with the reason, when the worker cannot take the role."""
    known = {worker.id: worker for worker in workers}
    if worker_id not in known:
        raise OptionInvalid(
            f"role {worker_id}: there is no such worker; the workers are {', '.join(sorted(known))}"
        )
    worker = known[worker_id]
    if worker.role == role:
        raise OptionInvalid(f"role {worker_id} {role}: it is a {role} worker already")
    if role not in worker.may_become:
        raise OptionInvalid(
            f"role {worker_id} {role}: it was started for one role; start the cluster with --elastic"
        )
    if worker.state == "draining":
        why = f"becomes a {worker.becomes} worker" if worker.becomes else "is leaving"
        raise OptionInvalid(f"role {worker_id} {role}: it {why}")
    there = [one for one in workers if one.role == worker.role and one.state == "ready"]
    if len(there) < 2:
        raise OptionInvalid(f"role {worker_id} {role}: no {worker.role} worker would be left")


def _workers(nodes: list[NodeStatus]) -> dict[str, NodeStatus]:
    return {node.id: node for node in nodes if node.role in WORKER_ROLES}


async def _taken(bus: Bus, worker_id: str, role: WorkerRole, seq: int) -> None:
    """Returns when a conductor has obeyed event `seq`. Raises OptionInvalid where it could not."""
    deadline = time.monotonic() + READ_S
    while (status := await conductor_status(bus)).seq < seq:
        if time.monotonic() > deadline:
            raise OptionInvalid(f"the wish is event {seq} of the log; no conductor has read it yet")
        await asyncio.sleep(LOOK_S)
    worker = _workers(status.nodes).get(worker_id)
    if worker is not None and role not in (worker.role, worker.becomes):
        raise OptionInvalid(
            f"role {worker_id} {role}: the conductors kept it, as no other {worker.role} is left"
        )


async def _changed(bus: Bus, worker_id: str, role: WorkerRole, deadline: float) -> None:
    while True:
        worker = _workers((await conductor_status(bus)).nodes).get(worker_id)
        if worker is not None and worker.role == role and worker.state == "ready":
            return
        if time.monotonic() > deadline:
            at = "is gone" if worker is None else f"has {worker.orders} orders left"
            raise OptionInvalid(f"role {worker_id} {role}: not changed yet, the worker {at}")
        await asyncio.sleep(LOOK_S)
