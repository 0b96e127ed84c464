"""The rules of the core that depend on what a worker does: one function each, matched over every role.

A role that is added is a type error here until each function has an answer for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from halfmoon.conductor.core.placement.candidates import decode_fits, prefill_fits
from halfmoon.conductor.core.placement.prices import rows_of, step_price
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.cost import Fit, decode_fit, prefill_fit
from halfmoon.conductor.core.state.load_index import queue_ns
from halfmoon.conductor.core.state.records import Order, WorkerRecord
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.roles import WorkerRole


def first_fit(role: WorkerRole, profile: CostProfile) -> Fit:
    """The fit from which a worker's costs are learned, before anything of it was measured."""
    match role:
        case "prefill":
            return prefill_fit(profile)
        case "decode" | "attention" | "mixed":
            return decode_fit(profile)
        case _:
            assert_never(role)


def fits(state: State, worker: WorkerRecord, request: RequestArrived) -> bool:
    """Whether the worker, and its node's pool, could hold its half of the request, were they empty."""
    match worker.role:
        case "prefill":
            return prefill_fits(state, worker, request)
        case "decode" | "mixed":
            return decode_fits(state, worker, request)
        case "attention":
            return True  # no half of a request is placed there, so none is too long for it
        case _:
            assert_never(worker.role)


def expected_load(worker: WorkerRecord, orders: Sequence[Order]) -> tuple[int, int, int, int, int]:
    """Reserved time, blocks to compute, blocks of prompts (prefill); KV blocks, context tokens (decode). A mixed
    worker has all of them.
    """
    match worker.role:
        case "prefill":
            own = [order for order in orders if order.prefill_id == worker.worker_id]
            others = [order for order in orders if worker.worker_id in order.staged]
            assert len(own) + len(others) == len(orders), worker
            return (
                sum(order.reserved_ns for order in orders),
                sum(order.pending_blocks for order in own),
                sum(order.prompt_blocks for order in own),
                0,
                0,
            )
        case "decode":
            assert all(order.decode_id == worker.worker_id for order in orders), worker
            return (
                0,
                0,
                0,
                sum(order.reserved_blocks for order in orders),
                sum(order.context_tokens for order in orders),
            )
        case "mixed":
            assert all(order.mixed and order.decode_id == worker.worker_id for order in orders), worker
            prompts = [order for order in orders if order.phase == "prefill"]
            return (
                sum(order.reserved_ns for order in prompts),
                sum(order.pending_blocks for order in prompts),
                sum(order.prompt_blocks for order in prompts),
                sum(order.reserved_blocks for order in orders),
                sum(order.context_tokens for order in orders),
            )
        case "attention":
            assert not orders, worker
            return 0, 0, 0, 0, 0
        case _:
            assert_never(worker.role)


def waiting_ns(worker: WorkerRecord, now_ns: int) -> int:
    """Predicted wait of a new order, ns. 0 for decode: its requests run side by side."""
    match worker.role:
        case "prefill" | "mixed":
            return queue_ns(worker, now_ns)
        case "decode" | "attention":
            return 0
        case _:
            assert_never(worker.role)


def predicted_against_slo(state: State, worker: WorkerRecord) -> tuple[int, int]:
    """The first token, or the time between tokens, predicted of what the worker has; and its SLO. Both ns."""
    policy, now_ns = state.policy, state.at_ns
    match worker.role:
        case "prefill" | "mixed":
            return queue_ns(worker, now_ns), policy.ttft_slo_ns
        case "decode":
            sequences = len(worker.orders)
            rows = rows_of(state, worker)
            step = step_price(state, worker, sequences, worker.context_tokens, rows) if sequences else None
            return step.ns if step is not None else 0, policy.tbt_slo_ns
        case "attention":
            return 0, policy.tbt_slo_ns
        case _:
            assert_never(worker.role)
