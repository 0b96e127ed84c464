"""The other agents: their identities, the ways to their memory, and requests to them.

Everything is learnt by `hello`, on first need, and learnt again when a peer answers under another incarnation.
The bus's errors about a peer become errors of the store here.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
from collections.abc import Callable
from typing import TypeVar

import msgspec

from halfmoon.bus import errors as bus_errors
from halfmoon.bus.connection import Bus
from halfmoon.schemas import subjects
from halfmoon.schemas.codec import encode
from halfmoon.schemas.store import Done, Hello, QueuePair
from halfmoon.schemas.types import Message
from halfmoon.store.errors import HolderUnreachable, LayoutMismatch, StoreError, TransferRefused, from_code
from halfmoon.store.pool.segment import Geometry
from halfmoon.store.transports.base import Peer

M = TypeVar("M")


def sign(hello: Hello, secret: str) -> Hello:
    """The same hello, with its proof."""
    return msgspec.structs.replace(hello, proof=_proof(hello, secret))


def genuine(hello: Hello, secret: str) -> bool:
    return hmac.compare_digest(hello.proof, _proof(hello, secret))


def _proof(hello: Hello, secret: str) -> str:
    bare = msgspec.structs.replace(hello, proof="")
    return hmac.new(secret.encode(), b"halfmoon hello\0" + encode(bare), hashlib.sha256).hexdigest()


class Peers:
    """`me` makes this agent's own hello."""

    def __init__(
        self,
        bus: Bus,
        *,
        me: Callable[[], Hello],
        secret: str,
        timeout_s: float,
    ) -> None:
        self._bus = bus
        self._me = me
        self._secret = secret
        self._timeout_s = timeout_s
        self._known: dict[str, Peer] = {}
        self.forgotten: list[Callable[[str], None]] = []

    async def get(self, node_id: str, *, incarnation: str = "") -> Peer:
        """The peer. It is asked for its hello again when `incarnation` differs from the known one.

        Raises HolderUnreachable, LayoutMismatch, TransferRefused (it is not of this cluster).
        """
        known = self._known.get(node_id)
        if known is not None and incarnation in ("", known.incarnation):
            return known
        if known is not None:
            self.forget(node_id)
        hello = await self.ask(node_id, "hello", self._me(), Hello)
        return self.accept(hello)

    def accept(self, hello: Hello) -> Peer:
        """Takes a hello, asked for or not. Raises TransferRefused, LayoutMismatch."""
        if not genuine(hello, self._secret):
            raise TransferRefused(f"{hello.node_id} does not know the cluster's secret")
        mine = self._me()
        if hello.layout != mine.layout:
            raise LayoutMismatch(
                f"{hello.node_id} stores {hello.layout.model} {hello.layout.name()} {hello.layout.dtype}"
            )
        peer = Peer(
            node_id=hello.node_id,
            incarnation=hello.incarnation,
            host=hello.host,
            segment=hello.segment,
            geometry=Geometry.of(hello.layout, hello.slots),
            endpoints=tuple(hello.endpoints),
        )
        known = self._known.get(hello.node_id)
        if known is not None and known.incarnation != peer.incarnation:
            self.forget(hello.node_id)
        self._known[hello.node_id] = peer
        return peer

    def forget(self, node_id: str) -> None:
        """It failed, or restarted: the next `get` asks again."""
        if self._known.pop(node_id, None) is not None:
            for callback in self.forgotten:
                callback(node_id)

    async def ask(
        self, node_id: str, verb: str, message: Message, kind: type[M], *, timeout_s: float = 0.0
    ) -> M:
        """A control request to another agent. Raises HolderUnreachable, or the error that it answers."""
        try:
            subject = subjects.store(node_id, verb)
            return await self._bus.request(subject, message, kind, timeout_s=timeout_s or self._timeout_s)
        except bus_errors.PeerError as problem:
            raise from_code(problem.code, f"{node_id}: {problem.message}") from None
        except bus_errors.BusError as problem:
            raise HolderUnreachable(f"store {node_id}: {problem}") from None

    async def connect_pair(self, node_id: str, offer: QueuePair) -> QueuePair:
        """Asks another agent for its end of an RDMA connection. Raises StoreError."""
        return await self.ask(node_id, "pair", offer, QueuePair)

    async def tell(self, node_id: str, verb: str, message: Message) -> None:
        """As `ask`, when nothing can be done about a failure."""
        with contextlib.suppress(StoreError):
            await self.ask(node_id, verb, message, Done)
