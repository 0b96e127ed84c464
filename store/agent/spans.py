"""Spans of a store agent's work for a traced order: fetching blocks, and moving them to the decode node."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from halfmoon.bus.telemetry.tracing import Tracing, Value
from halfmoon.schemas.store import ClosePush, FetchBlocks, Fetched, Pushed
from halfmoon.schemas.types import Message
from halfmoon.store.agent.context import AgentContext
from halfmoon.store.errors import StoreError
from halfmoon.store.pool.slots import Owner


async def traced(
    context: AgentContext,
    tracing: Tracing,
    answer: Callable[[Any], Awaitable[Message]],
    request: FetchBlocks | ClosePush,
) -> Message:
    """Answers the request within a span: `fetch` spans one request, `transfer` the push that ends with this one."""
    push = context.orders.push_of(Owner(request.order_id, request.worker_id))
    about: dict[str, Value] = {"halfmoon.order_id": request.order_id}
    name, began_ns = "fetch", time.time_ns()
    if isinstance(request, FetchBlocks):
        about |= {"halfmoon.source_node": request.source_node_id, "halfmoon.blocks": request.blocks}
    elif push is not None:
        name, began_ns = "transfer", push.opened_ns
        about |= {"halfmoon.target_node": push.opened.target_node_id, "halfmoon.pushes": request.pushes}
    try:
        answered = await answer(request)
    except StoreError as problem:
        about["error.type"] = problem.code
        tracing.span(name, request.traceparent, began_ns, time.time_ns(), about, error=str(problem))
        raise
    if isinstance(answered, Fetched | Pushed):
        about |= {"halfmoon.bytes": answered.bytes, "halfmoon.moving_ms": answered.elapsed_ns / 1e6}
    if isinstance(answered, Fetched) and answered.source_node_id:
        about["halfmoon.source_node"] = answered.source_node_id
    tracing.span(name, request.traceparent, began_ns, time.time_ns(), about)
    return answered
