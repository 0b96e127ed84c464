"""A decode machine with a clock of the test's own. After every event its invariants are checked."""

from __future__ import annotations

from typing import Any

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import StartDecode
from halfmoon.schemas.keys import pack_tokens
from halfmoon.schemas.kv import KvReady, PrefillResult, TransferOpened
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.sampling import SampledToken, Sampling
from halfmoon.schemas.tokens import TakeReply
from halfmoon.workers.decode.actions import Action
from halfmoon.workers.decode.events import DecodeOrdered, Event, KvHeard
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.decode.state import DecodeState
from halfmoon.workers.machines import TokensTaken

MS = 1_000_000
#: Two layers, blocks of four tokens.
LAYOUT = Layout(
    model="m", model_fingerprint="f", layers=2, kv_heads=1, head_dim=4, block_tokens=4, dtype="float32"
)
NULL_LAYOUT = Layout(
    model="m", model_fingerprint="f", layers=0, kv_heads=0, head_dim=0, block_tokens=4, dtype="none"
)
#: A step takes 10 ms, and 1 ms more for each sequence.
PROFILE = CostProfile(decode_base_ns=10 * MS, decode_per_sequence_ns=1 * MS)
#: When prefill ended, by the wall clock.
FINISHED_NS = 1_000 * MS


def order(number: int = 1, placement: int = 1, **fields: Any) -> StartDecode:
    """Number 1 is request r1, order 1-1, of frontend f1."""
    defaults: dict[str, Any] = {
        "order_id": f"{number}-{placement}",
        "request_id": f"r{number}",
        "frontend_id": "f1",
        "worker_id": "d0",
        "prefill_worker_id": "p0",
        "prefill_node_id": "p0",
        "prompt_tokens": 6,
        "max_tokens": 3,
        "tbt_slo_ns": 0,
        "placement": placement,
    }
    return StartDecode(**{**defaults, **fields})


def reply(prompt: int = 6, **fields: Any) -> TakeReply:
    """Tokens of a prompt; greedy, and no token ends the text unless `sampling` says so."""
    fields = {"sampling": Sampling(temperature=0.0, ignore_eos=True), **fields}
    return TakeReply(token_ids=pack_tokens(list(range(1, prompt + 1))), **fields)


def opened(order_id: str, *slots: int, present: tuple[int, ...] = ()) -> TransferOpened:
    """The slots of the node's pool."""
    return TransferOpened(
        order_id=order_id, request_id="r", slots=list(slots), epochs=[1] * len(slots), present=list(present)
    )


def ready(order_id: str, layer: int, first_block: int = 0, blocks: int = 2) -> KvReady:
    """One layer of some blocks."""
    return KvReady(order_id=order_id, request_id="r", layer=layer, first_block=first_block, blocks=blocks)


def result(order_id: str, first: int = 100) -> PrefillResult:
    """The first token."""
    return PrefillResult(
        order_id=order_id,
        request_id="r",
        first=SampledToken(token_id=first),
        queue_ns=1,
        transfer_ns=2,
        compute_ns=3,
        cached_tokens=4,
        finished_at_ns=FINISHED_NS,
    )


class Script:
    """One machine. Each event comes one millisecond after the last; both clocks show `now_ns`."""

    def __init__(self, **config: Any) -> None:
        defaults: dict[str, Any] = {"layout": LAYOUT, "kv_blocks": 16, "batch_max": 4, "profile": PROFILE}
        self.state = DecodeState(worker_id="d0", incarnation="i1", **{**defaults, **config})
        self.now_ns = FINISHED_NS

    def on(self, kind: type[Event], **fields: Any) -> list[Action]:
        """The actions that follow."""
        self.now_ns += MS
        actions = self.state.on(kind(**fields, at_ns=self.now_ns, wall_ns=self.now_ns))
        self.state.validate()
        return actions

    def hear(self, *messages: Any, author_id: str = "p0") -> list[Action]:
        """KV messages, one after the other; of the prefill worker and its node, which have one name."""
        return [
            action
            for message in messages
            for action in self.on(KvHeard, author_id=author_id, message=message)
        ]

    def give(self, given: StartDecode | None = None, taken: TakeReply | None = None) -> list[Action]:
        """An order and its tokens."""
        given = given or order()
        actions = self.on(DecodeOrdered, order=given)
        return actions + self.on(TokensTaken, order_id=given.order_id, reply=taken or reply())

    def sequence(self, order_id: str = "1-1") -> DecodeSequence:
        """An order that is open."""
        return self.state.orders.open[order_id]
