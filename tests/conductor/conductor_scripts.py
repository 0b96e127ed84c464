"""Short names for events, and a core that is driven by them one after another."""

from __future__ import annotations

from typing import Any

from halfmoon.conductor.core.invariants import check
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import Decision, SetTimer
from halfmoon.schemas.events import (
    BlocksStored,
    ClusterConfigured,
    Event,
    FrontendJoined,
    PrefillFinished,
    RequestArrived,
    RequestFinished,
    Stamped,
    StoreJoined,
    WorkerJoined,
)
from halfmoon.schemas.policy import Layout, Policy

MS = 1_000_000
S = 1_000_000_000

#: 100 tokens a block, 1,000 bytes a token (10 layers), so 100,000 bytes a block.
LAYOUT = Layout(
    model="m", model_fingerprint="f", layers=10, kv_heads=1, head_dim=25, block_tokens=100, dtype="bfloat16"
)
NULL_LAYOUT = Layout(
    model="null", model_fingerprint="f", layers=0, kv_heads=0, head_dim=0, block_tokens=100, dtype="none"
)
#: Prefill 10 ms and 0.1 ms a token; a step 10 ms, 1 ms a sequence, and 1 µs a context token.
PROFILE = CostProfile(
    prefill_base_ns=10 * MS,
    prefill_per_token_ps=100_000_000,
    decode_base_ns=10 * MS,
    decode_per_sequence_ns=1 * MS,
    decode_per_context_token_ps=1_000_000,
)


def nothing_reserved(worker: WorkerRecord) -> bool:
    """Of none of its duties is anything left."""
    prompts = worker.prompts.reserved_ns if worker.prompts is not None else 0
    reserved = prompts, worker.context_tokens, worker.reserved_blocks
    return reserved == (0, 0, 0) and not (worker.orders or worker.prefills or worker.lent)


def keys(count: int, seed: int = 1) -> bytes:
    """Keys of a chain of `count` blocks; chains of different seeds share nothing."""
    return b"".join(seed.to_bytes(8, "big") + place.to_bytes(8, "big") for place in range(count))


def prefill(number: int = 0, **fields: Any) -> WorkerJoined:
    return worker(f"p{number}", "prefill", **fields)


def decode(number: int = 0, **fields: Any) -> WorkerJoined:
    return worker(f"d{number}", "decode", **fields)


def worker(worker_id: str, role: Any, **fields: Any) -> WorkerJoined:
    defaults: dict[str, Any] = {
        "node_id": f"n-{worker_id}",
        "incarnation": "i1",
        "layout": LAYOUT,
        "kv_blocks": 1_000,
        "context_tokens_max": 100_000,
        "batch_max": 100,
        "profile": PROFILE,
    }
    return WorkerJoined(worker_id=worker_id, role=role, **{**defaults, **fields})


def store(worker_id: str, incarnation: str = "i1", host: str = "h") -> StoreJoined:
    """The store agent beside a worker."""
    return StoreJoined(
        node_id=f"n-{worker_id}", incarnation=incarnation, host=host, layout=LAYOUT, slots=1_000, endpoints=[]
    )


def stored(worker_id: str, block_keys: bytes, **fields: Any) -> BlocksStored:
    return BlocksStored(node_id=f"n-{worker_id}", incarnation="i1", block_keys=block_keys, **fields)


def arrived(request_id: str = "r1", tokens: int = 1_000, **fields: Any) -> RequestArrived:
    defaults: dict[str, Any] = {"frontend_id": "f1", "max_tokens": 100, "block_keys": keys(tokens // 100)}
    return RequestArrived(request_id=request_id, prompt_tokens=tokens, **{**defaults, **fields})


def prefilled(order_id: str, request_id: str = "r1", worker_id: str = "p0", **fields: Any) -> PrefillFinished:
    defaults: dict[str, Any] = {"queue_ns": 0, "transfer_ns": 0, "compute_ns": 0}
    return PrefillFinished(
        order_id=order_id, request_id=request_id, worker_id=worker_id, **{**defaults, **fields}
    )


def finished(order_id: str, request_id: str = "r1", worker_id: str = "d0", **fields: Any) -> RequestFinished:
    defaults: dict[str, Any] = {"finish_reason": "length", "completion_tokens": 100, "decode_ns": 1 * S}
    return RequestFinished(
        order_id=order_id, request_id=request_id, worker_id=worker_id, **{**defaults, **fields}
    )


class Script:
    """A core under invariants, a sequence and a clock. `after_ns` moves the clock; events happen at it.

    A node's store agent joins just before the node's first worker does (`stores`), an event of its own.
    """

    def __init__(self, *events: Event, stores: bool = True, **policy: Any) -> None:
        self.core = Core(checked=True)
        self.now_ns = 1_000 * S
        self.log: list[Stamped] = []
        self.decided: list[list[Decision]] = []
        self.nodes: list[str] | None = [] if stores else None
        self(ClusterConfigured(code_version="t", log_version=1, policy=Policy(**policy)))
        for event in events:
            self(event)

    def __call__(self, event: Event, after_ns: int = 0) -> list[Decision]:
        """The decisions on `event`."""
        self.now_ns += after_ns
        if isinstance(event, WorkerJoined) and self.nodes is not None and event.node_id not in self.nodes:
            self.nodes.append(event.node_id)
            self(store(event.node_id.removeprefix("n-")))
        stamped = Stamped(seq=self.core.seq + 1, at_ns=self.now_ns, event=event)
        decisions = self.core.step(stamped)
        self.log.append(stamped)
        self.decided.append(decisions)
        check(self.core.state)
        return decisions

    def orders(self, event: Event, after_ns: int = 0) -> list[Decision]:
        """The decisions on `event` that leave the conductor."""
        return [decision for decision in self(event, after_ns) if not isinstance(decision, SetTimer)]


def pair(**policy: Any) -> Script:
    """One prefill and one decode worker with their stores, and a frontend."""
    return Script(prefill(), decode(), FrontendJoined(frontend_id="f1", incarnation="i1"), **policy)
