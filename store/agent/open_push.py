"""Begins the push of an order's blocks: reserves room at the decode node, and starts to move."""

from __future__ import annotations

from halfmoon.schemas.keys import join_keys
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.store import DropBlocks, OpenPush, ReserveBlocks, Reserved
from halfmoon.store.agent.context import AgentContext
from halfmoon.store.agent.push import Push, PushTarget
from halfmoon.store.errors import StoreError, TransferError, TransferRefused
from halfmoon.store.pool.slots import Hold, Owner

#: A reservation is renewed four times in its life: a shorter one would be renewed without end.
LEASE_NS_MIN = 10_000_000


async def open_push(context: AgentContext, owner: Owner, request: OpenPush, *, hears_runs: bool) -> None:
    """Raises StoreError or ValueError, with nothing left at the target. A push to the own node moves nothing: its
    decode worker gets a hold on the same slots. `hears_runs`: a decode worker of the own node; the target says it of
    its own.
    """
    hold = context.guard.hold(owner)
    _check_tokens(context.config.layout, hold, request.tokens)
    target: PushTarget | None = None
    if request.target_node_id == context.config.node_id:
        context.guard.share(owner, Owner(request.order_id, request.decode_worker_id))
    else:
        target = await _reserve(context, hold, request)
        hears_runs = target.reserved.hears_runs

    def failed(problem: StoreError) -> None:
        context.peer_failed(request.target_node_id, problem)
        context.spawn(push.end(str(problem)))

    push = Push(
        context.bus, context.config, request, hold, target=target, hears_runs=hears_runs, on_failure=failed
    )
    context.orders.set_push(owner, push)
    await push.start()


def _check_tokens(layout: Layout, hold: Hold, tokens: int) -> None:
    """Raises ValueError when `tokens` is not the length of the order's prompt: a block that is moved in part has no
    key, so that it is never committed.
    """
    if tokens and layout.blocks(tokens) != len(hold.slots):
        raise ValueError(f"tokens: {tokens} are not {len(hold.slots)} blocks of {layout.block_tokens}")
    if tokens % layout.block_tokens and hold.keys[-1]:
        raise ValueError(f"tokens: {tokens} leave the last block in part, and it has a key")


def _require_whole(reserved: Reserved, blocks: int, node_id: str) -> None:
    """Raises TransferRefused for an answer that does not fit the question."""
    whole = len(reserved.slots) == len(reserved.epochs) == blocks
    if not whole or not set(reserved.present) <= set(range(blocks)):
        raise TransferRefused(
            f"{node_id} reserves {len(reserved.slots)} blocks where {blocks} were asked for"
        )
    if reserved.lease_ttl_ns < LEASE_NS_MIN:
        raise TransferRefused(f"{node_id} reserves for {reserved.lease_ttl_ns} ns")


async def _reserve(context: AgentContext, hold: Hold, request: OpenPush) -> PushTarget:
    """Reserve room for the blocks at the target. A failure or a cancellation has the target drop the reservation."""
    node_id = context.config.node_id
    keys = [key for key in hold.keys if key]
    reserve = ReserveBlocks(
        order_id=request.order_id,
        decode_worker_id=request.decode_worker_id,
        writer_node_id=node_id,
        block_keys=join_keys(keys),
        blocks=len(hold.slots),
        tenant=hold.tenant,
        token_ids=context.kv_events.tokens_of(keys),
    )
    drop = DropBlocks(
        order_id=request.order_id, decode_worker_id=request.decode_worker_id, writer_node_id=node_id
    )
    peer = None
    try:
        peer = await context.peers.get(request.target_node_id)
        reserved = await context.peers.ask(peer.node_id, "reserve", reserve, Reserved)
        _require_whole(reserved, len(hold.slots), peer.node_id)
        # It may have restarted between its hello and this answer: the slots are those of the one that answered.
        peer = await context.peers.get(peer.node_id, incarnation=reserved.incarnation)
        return PushTarget(peer, reserved, context.transports.engine_for(peer), context.peers)
    except BaseException as problem:
        if isinstance(problem, StoreError):
            context.peer_failed(request.target_node_id, problem)
        if peer is not None and (isinstance(problem, TransferError) or not isinstance(problem, StoreError)):
            # The reservation may exist although its answer was lost, or came when the caller had gone.
            context.spawn(context.peers.tell(peer.node_id, "drop", drop))
        raise
