"""The rules of the core that depend on what a worker does: one function each, matched over every role.

A role that is added is a type error here until each function has an answer for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from halfmoon.conductor.core.candidates import decode_fits, prefill_fits
from halfmoon.conductor.core.cost import Fit, decode_fit, prefill_fit
from halfmoon.conductor.core.load_index import queue_ns
from halfmoon.conductor.core.records import Order, WorkerRecord
from halfmoon.conductor.core.state import State
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.roles import WorkerRole


def first_fit(role: WorkerRole, profile: CostProfile) -> Fit:
    """The fit from which a worker's costs are learned, before anything of it was measured."""
    match role:
        case "prefill":
            return prefill_fit(profile)
        case "decode":
            return decode_fit(profile)
        case _:
            assert_never(role)


def fits(state: State, worker: WorkerRecord, request: RequestArrived) -> bool:
    """Whether the worker, and its node's pool, could hold its half of the request, were they empty."""
    match worker.role:
        case "prefill":
            return prefill_fits(state, worker, request)
        case "decode":
            return decode_fits(state, worker, request)
        case _:
            assert_never(worker.role)


def expected_load(worker: WorkerRecord, orders: Sequence[Order]) -> tuple[int, int, int, int, int]:
    """Reserved time, blocks to compute, blocks of prompts (prefill); KV blocks, context tokens (decode)."""
    match worker.role:
        case "prefill":
            assert all(order.prefill_id == worker.worker_id for order in orders), worker
            return (
                sum(order.reserved_ns for order in orders),
                sum(order.pending_blocks for order in orders),
                sum(order.prompt_blocks for order in orders),
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
        case _:
            assert_never(worker.role)


def waiting_ns(worker: WorkerRecord, now_ns: int) -> int:
    """Predicted wait of a new order, ns. 0 for decode: its requests run side by side."""
    match worker.role:
        case "prefill":
            return queue_ns(worker, now_ns)
        case "decode":
            return 0
        case _:
            assert_never(worker.role)


def predicted_against_slo(worker: WorkerRecord, policy: Policy, now_ns: int) -> tuple[int, int]:
    """The first token, or the time between tokens, predicted of what the worker has; and its SLO. Both ns."""
    match worker.role:
        case "prefill":
            return queue_ns(worker, now_ns), policy.ttft_slo_ns
        case "decode":
            sequences = len(worker.orders)
            step_ns = worker.cost.step_ns(sequences, worker.context_tokens) if sequences else 0
            return step_ns, policy.tbt_slo_ns
        case _:
            assert_never(worker.role)
