"""Options of the TCP transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.types import Encryption
from halfmoon.store.transports.tcp.streams import CLEAR, ENCRYPTED, Protection


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpOptions:
    """Where to listen, and how links are protected. The fields are those of `StoreConfig`."""

    cluster_secret: str
    #: Addresses to listen on, separated by commas.
    bind: str = "127.0.0.1"
    #: 0: any free port.
    port: int = 0
    #: Address that peers connect to, when it is not `bind`; without a port.
    advertise: str = ""
    encryption: Encryption = "auto"
    #: A peer from which nothing comes for this long is unreachable.
    stall_ns_max: int = 3 * SECOND_NS
    #: One message of a peer takes no longer, however often a byte of it comes.
    transfer_ns_max: int = 20 * SECOND_NS

    def protection(self, *, same_host: bool) -> Sequence[Protection]:
        """Ways that a link may take, best first."""
        if self.encryption == "auto" and same_host:
            return (*CLEAR, *ENCRYPTED)
        return CLEAR if self.encryption == "never" else ENCRYPTED
