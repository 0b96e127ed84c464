"""KvLink: how KV gets into and out of the pool of an engine's node: its store agent, and who wants KV or sends it.

It stands in the cluster as a worker does: the agent knows it by its name, and so do the connectors of other engines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import msgspec

from halfmoon.bus.connection import Bus
from halfmoon.schemas import subjects
from halfmoon.schemas.kv import KvMessage, WantKv
from halfmoon.schemas.store import Done
from halfmoon.schemas.tokens import ProcessError
from halfmoon.schemas.types import ID_PATTERN
from halfmoon.store.adapters.link import ClientLink, LinkOptions, WrongBlocks
from halfmoon.store.adapters.pages import ALIGNED_BYTES
from halfmoon.store.agent_client import AgentClient
from halfmoon.store.errors import StoreError

#: Of a connector's name. That of an order, and a rank's number behind either, are not much longer.
NAME_LETTERS_MAX = 48


class KvOptions(LinkOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A connector's options. See docs/vllm.md."""

    title: ClassVar[str] = "connector"

    #: The connector's name in the cluster, which no other engine's has; "": its node's.
    worker: Annotated[str, msgspec.Meta(max_length=NAME_LETTERS_MAX, pattern=rf"{ID_PATTERN}|^$")] = ""
    #: KV that was computed and that nobody has asked for is given up after this time.
    kept_s: float = 30.0
    #: The first KV of a prompt comes within this time, or the engine computes it: the queue of the other engine counts.
    wait_s: float = 120.0

    @property
    def name(self) -> str:
        return self.worker or self.node

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.name) > NAME_LETTERS_MAX:
            raise ValueError(
                f"worker: give a name of at most {NAME_LETTERS_MAX} letters, the node's has more"
            )
        for name in ("kept_s", "wait_s"):
            if not 0 < getattr(self, name) <= 3_600:
                raise ValueError(f"{name}: {getattr(self, name)} is not in 0..3600")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """An engine's KV: `layers` of blocks, `layer_bytes` of each. `name`: equal where bytes mean the same."""

    layers: int
    layer_bytes: int
    name: str

    @property
    def block_bytes(self) -> int:
        """A block's length in the store, where each layer begins at a page."""
        return self.layers * (-(-self.layer_bytes // ALIGNED_BYTES) * ALIGNED_BYTES)


class KvDoor(NamedTuple):
    """The bus and the agent, while they are there."""

    bus: Bus
    agent: AgentClient


class KvLink(ClientLink[KvDoor]):
    """See the module. Its sender and its receiver say what is called on the loop, before it starts."""

    #: Somebody wants KV. Raises StoreError.
    on_want: Callable[[WantKv], None]
    #: Word of KV that comes here.
    on_kv: Callable[[KvMessage], None]
    #: Orders to keep alive.
    kept: Callable[[], list[str]]

    def __init__(self, options: KvOptions, shape: KvShape, *, me: str) -> None:
        """`me`: the name under which other connectors know it."""
        super().__init__(options, block_bytes=shape.block_bytes, me=me)
        self.options = options
        self.shape = shape

    async def open(self, bus: Bus, stack: contextlib.AsyncExitStack) -> KvDoor:
        agent = AgentClient(bus, node_id=self.options.node, worker_id=self.me)
        stack.push_async_callback(agent.close)
        await agent.attach()
        layout, shape = agent.layout, self.shape
        if (layout.layers, layout.block_bytes) != (shape.layers, shape.block_bytes):
            raise WrongBlocks(
                f"node: the store agent of {self.options.node} holds blocks of {layout.layers} layers and "
                f"{layout.block_bytes} bytes, this engine's have {shape.layers} and {shape.block_bytes}: "
                f"halfmoon store --node NAME --block-bytes {shape.block_bytes} --block-layers {shape.layers}"
            )
        agent.kept_too.append(self.kept)
        # Not from the stream, which only a cluster's conductors make: where a message is lost the engine computes.
        await bus.subscribe(subjects.kv_for(self.me), KvMessage, self.on_kv)
        await bus.serve(subjects.want(self.me, "*"), WantKv, self._answer, author="worker_id")
        return KvDoor(bus, agent)

    def _answer(self, request: WantKv) -> Done | ProcessError:
        try:
            if request.layout != self.shape.name:
                raise StoreError("layout: the KV of this engine is laid out in another way")
            self.on_want(request)
        except StoreError as problem:
            return ProcessError(code=problem.code, message=str(problem))
        return Done()
