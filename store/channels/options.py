"""Options of the channels of one worker."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from halfmoon.schemas.types import Encryption


def channel_secret(cluster_secret: str) -> str:
    """The secret of the channels, which a worker may know: from it nobody learns the cluster's, which reads blocks."""
    return hmac.digest(cluster_secret.encode(), b"halfmoon channels", "sha256").hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelOptions:
    """Where to listen, and how channels between hosts are protected: as the blocks' TCP links are (`TcpOptions`).
    Raises ValueError, naming the field.
    """

    #: `channel_secret` of the cluster's.
    secret: str = field(repr=False)
    #: Addresses to listen on for other hosts, separated by commas; "": for this host alone.
    bind: str = "127.0.0.1"
    #: 0: any free port.
    port: int = 0
    #: Address that peers connect to, when it is not `bind`; without a port.
    advertise: str = ""
    #: Between hosts. "never": headers are sealed, and payload is neither encrypted nor proved.
    encryption: Encryption = "auto"
    #: Default of every wait for the other end, seconds; a peer that owes a message for longer is lost.
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if not self.secret:
            raise ValueError("secret: must not be empty")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s: {self.timeout_s} is not above 0")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: {self.port} is not in 0..65535")
