"""Messages between the two ends of an RDMA connection: over the bus to connect, in mailboxes afterwards.

A `QueuePair` gives its reader the right to read and write a pool, so that it is proved, addressed and
numbered: without the cluster's secret none can be made, and one that was heard cannot be used again.
A message in a mailbox is only heard by the other end of a connected pair, which the device sees to.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Sequence

import msgspec

from halfmoon.schemas.codec import encode
from halfmoon.schemas.store import QueuePair
from halfmoon.store.transports.base import Run, Slice

#: Limits of one message: bytes of blocks (one layer at least), runs, checksums.
MESSAGE_BYTES = 4 * 1024 * 1024
RUNS_PER_MESSAGE = 32
LAYERS_PER_MESSAGE = 512


class OfferRefused(Exception):
    """`name` counts it, the text is the answer."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


def sign(pair: QueuePair, secret: str) -> QueuePair:
    """The same message, with its proof."""
    return msgspec.structs.replace(pair, proof=_proof(pair, secret))


def _proof(pair: QueuePair, secret: str) -> str:
    bare = msgspec.structs.replace(pair, proof="")
    return hmac.new(secret.encode(), b"halfmoon pair\0" + encode(bare), hashlib.sha256).hexdigest()


class OfferVerifier:
    """Verifies the offers of peers, and numbers the offers to them."""

    def __init__(self, node_id: str, incarnation: str, secret: str) -> None:
        self._node_id = node_id
        self._incarnation = incarnation
        self._secret = secret
        #: The highest number taken of each incarnation of each node: genuine ones only, so that it stays
        #: small.
        self._taken: dict[tuple[str, str], int] = {}
        self._given = 0

    def number(self) -> int:
        self._given += 1
        return self._given

    def admit(self, offer: QueuePair) -> None:
        """Raises OfferRefused for an offer that is not genuine, not meant for this agent, an answer, or repeated."""
        self._check(offer)
        if offer.answer:
            raise OfferRefused("foreign", "that is an answer, and nothing was asked")
        sender = (offer.node_id, offer.incarnation)
        if offer.number <= self._taken.get(sender, 0):
            raise OfferRefused(
                "replayed", f"endpoint message {offer.number} of {offer.node_id} was taken already"
            )
        self._taken[sender] = offer.number

    def check_answer(self, answer: QueuePair, offer: QueuePair) -> None:
        """Raises OfferRefused for a message that is no answer to this offer."""
        self._check(answer)
        if (answer.node_id, answer.incarnation) != (offer.to_node_id, offer.to_incarnation):
            raise OfferRefused(
                "foreign", f"{answer.node_id} answers for {offer.to_node_id}, or was restarted"
            )
        if not answer.answer or answer.number != offer.number:
            raise OfferRefused(
                "replayed", f"{answer.node_id} answers endpoint message {answer.number}, not {offer.number}"
            )

    def _check(self, pair: QueuePair) -> None:
        if not hmac.compare_digest(pair.proof.encode(), _proof(pair, self._secret).encode()):
            raise OfferRefused("proof", f"{pair.node_id} does not know the cluster's secret")
        if (pair.to_node_id, pair.to_incarnation) != (self._node_id, self._incarnation):
            raise OfferRefused("foreign", f"meant for {pair.to_node_id} as it was at {pair.to_incarnation}")


class Arrived(msgspec.Struct, frozen=True, array_like=True):
    """In a mailbox with the last write of a message: these runs are there, and have these checksums (xxh3_64
    of every layer of every run, in order). Answered by WriteVerdict.
    """

    order_id: str
    party: str
    runs: list[Run]
    sums: list[int]


class WriteVerdict(msgspec.Struct, frozen=True, array_like=True):
    """`refusal` is "" when the bytes are readable; `name` is the counter of this refusal."""

    name: str = ""
    refusal: str = ""


arrived_decoder = msgspec.msgpack.Decoder(Arrived)
verdict_decoder = msgspec.msgpack.Decoder(WriteVerdict)
pack = msgspec.msgpack.Encoder().encode


def messages(items: Sequence[Slice], layer_block_bytes: int) -> Iterator[list[Slice]]:
    """`items` cut into messages. Layers that are filled in part count as runs: each has its own work requests."""
    most = min(LAYERS_PER_MESSAGE, max(1, MESSAGE_BYTES // layer_block_bytes))
    message: list[Slice] = []
    held = runs = 0
    for item in items:
        step = min(most, RUNS_PER_MESSAGE) if item.fill else most
        for first in range(item.first_layer, item.first_layer + item.layers, step):
            layers = min(step, item.first_layer + item.layers - first)
            more = layers if item.fill else 1
            if message and (held + layers > most or runs + more > RUNS_PER_MESSAGE):
                yield message
                message, held, runs = [], 0, 0
            message.append(item._replace(first_layer=first, layers=layers))
            held, runs = held + layers, runs + more
    if message:
        yield message
