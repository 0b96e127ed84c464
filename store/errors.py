"""Everything that can go wrong in the store, one tree::

    StoreError
    ├── StoreFull            no room, even after evicting all that may be evicted
    │   └── QuotaExceeded    the tenant's blocks in use are as many as it may have
    ├── WrongTenant          the block belongs to another tenant
    ├── WrongSize            the bytes are not as many as a block has
    ├── OrderUnknown         never opened here, expired, or released
    ├── BlockMissing         a miss: the holder answers, but has not (all of) these blocks
    ├── NotAttached          the worker has not mapped the memory of this incarnation of its agent
    ├── LayoutMismatch       the two sides do not agree on the shape of a block
    ├── AgentUnreachable     the node's own store agent does not answer
    ├── TransferError        bytes did not arrive
    │   ├── HolderUnreachable  no answer: dead, cut off, or never joined
    │   ├── TransferRefused    the other side refused, with a reason
    │   ├── TransferTimeout    the deadline passed, or nothing moved for too long
    │   ├── BytesCorrupted     they arrived, but differ from the committed ones
    │   └── LeaseLost          they were read for so long that other blocks may have taken their place
    └── ChannelError         a channel between two workers
        ├── ChannelRefused     the ends do not fit, or one does not let the other in
        ├── ChannelFull        both ends have sent all they may, and must receive first
        └── ChannelLost        the other end is gone, or silent for too long
            └── ProtocolBroken   it sent a forbidden message

A miss, a failed transfer and an unreachable holder are three different answers: on a miss the index is stale,
on a failed transfer another try may do, on an unreachable holder every block of that node is out of reach.
`code` travels in a `ProcessError`; :func:`from_code` turns it back.
"""

from __future__ import annotations

from typing import ClassVar


class StoreError(Exception):
    """Any failure of the store; `code` travels."""

    code: ClassVar[str] = "store_error"


class StoreFull(StoreError):
    """No room, even after evicting all that may be evicted."""

    code = "store_full"


class QuotaExceeded(StoreFull):
    """The tenant's blocks in use are as many as it may have."""

    code = "quota_exceeded"


class WrongTenant(StoreError):
    """The block belongs to another tenant."""

    code = "wrong_tenant"


class WrongSize(StoreError):
    """The bytes are not as many as a block has."""

    code = "wrong_size"


class OrderUnknown(StoreError):
    """Never opened here, expired, or released."""

    code = "unknown_order"


class BlockMissing(StoreError):
    """`held` blocks, counted from the first one asked for, are at the source."""

    code = "miss"

    def __init__(self, message: str, *, held: int = 0) -> None:
        super().__init__(message)
        self.held = held


class NotAttached(StoreError):
    """The worker has not mapped the memory of this incarnation."""

    code = "not_attached"


class LayoutMismatch(StoreError):
    """The two sides do not agree on the shape of a block."""

    code = "layout_mismatch"


class AgentUnreachable(StoreError):
    """The node's own store agent does not answer."""

    code = "agent_unreachable"


class TransferError(StoreError):
    """Bytes did not arrive."""

    code = "transfer_failed"


class HolderUnreachable(TransferError):
    """No answer: it is dead, cut off, or never joined."""

    code = "peer_unreachable"


class TransferRefused(TransferError):
    """The other side refused, with a reason."""

    code = "transfer_refused"


class TransferTimeout(TransferError):
    """The deadline passed, or nothing moved for too long."""

    code = "transfer_timeout"


class BytesCorrupted(TransferError):
    """They arrived, but differ from the committed ones."""

    code = "corrupted"


class LeaseLost(TransferError):
    """The lease ended while it was read, and the slot was given away: the bytes may be another block's."""

    code = "lease_lost"


class ChannelError(StoreError):
    """A channel between two workers. None of these travels in a `ProcessError`."""

    code = "channel_error"


class ChannelRefused(ChannelError):
    """The ends do not fit, by the name of the field; or one does not let the other in."""

    code = "channel_refused"


class ChannelFull(ChannelError):
    """Both ends have sent all that the other stores. Nothing was sent: receive first."""

    code = "channel_full"


class ChannelLost(ChannelError):
    """The other end is gone, or silent for too long."""

    code = "channel_lost"

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer = peer
        self.reason = reason


class ProtocolBroken(ChannelLost):
    """The other end sent a forbidden message."""

    code = "protocol_broken"


_BY_CODE: dict[str, type[StoreError]] = {
    kind.code: kind
    for kind in (
        StoreFull,
        QuotaExceeded,
        WrongTenant,
        WrongSize,
        OrderUnknown,
        BlockMissing,
        NotAttached,
        LayoutMismatch,
        AgentUnreachable,
        TransferError,
        HolderUnreachable,
        TransferRefused,
        TransferTimeout,
        BytesCorrupted,
        LeaseLost,
    )
}


def from_code(code: str, message: str) -> StoreError:
    """The error that a `ProcessError` of this code stands for; a plain StoreError for a code of a newer
    version.
    """
    kind = _BY_CODE.get(code)
    return kind(message) if kind is not None else StoreError(f"{code}: {message}")
