"""Drives a `PrefillState` by hand: events in, whole lists of actions out, its invariants after each."""

from __future__ import annotations

from array import array
from typing import Any

from halfmoon.schemas.decisions import Fetch, StartPrefill
from halfmoon.schemas.keys import pack_tokens
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.sampling import SampledToken
from halfmoon.schemas.tokens import TakeReply
from halfmoon.workers.machines import Report, TakeTokens, TokensTaken, WorkerFacts
from halfmoon.workers.prefill.actions import Action, ComputePrompt, ReserveSlots, StartPush
from halfmoon.workers.prefill.events import (
    Event,
    FirstTokenDrawn,
    PrefillOrdered,
    PromptComputed,
    PushOpened,
    SlotsReserved,
)
from halfmoon.workers.prefill.state import PrefillState

LAYERS, BLOCK_TOKENS = 2, 10
LAYOUT = Layout(
    model="m",
    model_fingerprint="f",
    layers=LAYERS,
    kv_heads=1,
    head_dim=1,
    block_tokens=BLOCK_TOKENS,
    dtype="float32",
)
#: Three blocks, the last one half full, so that it has no key.
TOKENS = list(range(25))
KEYS = bytes(range(32))
OTHER_KEYS = bytes(range(32, 64))
FIRST = SampledToken(token_id=7)


def order(order_id: str = "1-1", fetches: list[Fetch] | None = None, before: str = "") -> StartPrefill:
    return StartPrefill(
        order_id=order_id,
        request_id=f"r{order_id.partition('-')[0]}",
        frontend_id="f1",
        worker_id="p1",
        decode_worker_id="d1",
        decode_node_id="n2",
        prompt_tokens=len(TOKENS),
        fetches=fetches or [],
        before=before,
    )


def reply(**fields: Any) -> TakeReply:
    return TakeReply(**{"token_ids": pack_tokens(TOKENS), "block_keys": KEYS, "max_tokens": 5, **fields})


def prompt(order_id: str = "1-1", cached: int = 0, **fields: Any) -> ComputePrompt:
    """Everything from block `cached` on."""
    starts = range(cached * BLOCK_TOKENS, len(TOKENS), BLOCK_TOKENS)
    defaults: dict[str, Any] = {
        "token_ids": array("I", TOKENS),
        "chunks": [range(start, min(start + BLOCK_TOKENS, len(TOKENS))) for start in starts],
        "prefix_blocks": cached,
        "fetched_layer": LAYERS - 1,
        "slots": [4, 5, 6],
        "present": list(range(cached)),
    }
    return ComputePrompt(order_id=order_id, **{**defaults, **fields})


def take(order_id: str = "1-1") -> TakeTokens:
    return TakeTokens(order_id=order_id, request_id=f"r{order_id.partition('-')[0]}", frontend_id="f1")


def open_put(order_id: str = "1-1") -> ReserveSlots:
    return ReserveSlots(
        order_id=order_id, block_keys=KEYS, blocks=3, tenant="", token_ids=pack_tokens(TOKENS)
    )


def open_push(order_id: str = "1-1") -> StartPush:
    return StartPush(
        order_id=order_id,
        request_id=f"r{order_id.partition('-')[0]}",
        target_node_id="n2",
        decode_worker_id="d1",
        prompt_tokens=len(TOKENS),
    )


class Script:
    """`now_ns` is the time of the next event; `past` are all actions so far."""

    def __init__(self, **config: Any) -> None:
        self.now_ns = 1_000
        self.past: list[Action] = []
        own = {
            name: config.pop(name)
            for name in ("prepared_max", "chunk_tokens", "stream_layers")
            if name in config
        }
        facts: dict[str, Any] = {"worker_id": "p1", "incarnation": "i1", "layout": LAYOUT, "kv_blocks": 8}
        self.state = PrefillState(WorkerFacts(**{**facts, **config}), **own)

    def __call__(
        self, kind: type[Any], order_id: str = "1-1", after_ns: int = 0, **fields: Any
    ) -> list[Action]:
        self.now_ns += after_ns
        named = {"order_id": order_id} if "order_id" in kind.__struct_fields__ else {}
        return self.hear(kind(at_ns=self.now_ns, **named, **fields))

    def hear(self, event: Event) -> list[Action]:
        actions = self.state.on(event)
        self.state.validate()
        self.past += actions
        return actions

    def receive(
        self, order_id: str = "1-1", fetches: list[Fetch] | None = None, before: str = ""
    ) -> list[Action]:
        return self(PrefillOrdered, order=order(order_id, fetches, before))

    def prepared(self, order_id: str = "1-1", **put: Any) -> list[Action]:
        """From its arrival to its slots; the actions of the last step."""
        fetches, block_keys = put.pop("fetches", None), put.pop("block_keys", KEYS)
        self.receive(order_id, fetches)
        self(TokensTaken, order_id, reply=reply(block_keys=block_keys))
        return self(SlotsReserved, order_id, **{"slots": [4, 5, 6], "present": [], **put})

    def computing(self, order_id: str = "1-1", **put: Any) -> list[Action]:
        self.prepared(order_id, **put)
        return self(PushOpened, order_id)

    def closing(self, order_id: str = "1-1", **put: Any) -> list[Action]:
        """Up to its first token; the actions of the last step."""
        self.computing(order_id, **put)
        self(PromptComputed, order_id, finished_at_ns=99)
        return self(FirstTokenDrawn, order_id, first=FIRST)

    def reports(self) -> list[Any]:
        return [action.event for action in self.past if isinstance(action, Report)]
