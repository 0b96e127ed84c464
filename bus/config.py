"""How a process reaches NATS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any

from halfmoon.bus.errors import BusUnreachable

#: A server that carries less in one message is refused: parts of snapshots and of answers are cut to fit this.
PAYLOAD_BYTES_MIN = 1 << 20


@dataclass(frozen=True, kw_only=True)
class BusConfig:
    """How to reach the NATS server or cluster, and as whom."""

    #: One address or several, separated by commas.
    url: str = "nats://127.0.0.1:4222"
    user: str = ""
    password: str = ""
    token: str = ""
    nkey_seed_file: str = ""
    credentials_file: str = ""
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    connect_timeout_s: float = 10.0

    def options(self) -> dict[str, Any]:
        """For nats-py's `connect`. Raises BusUnreachable: see `tls`."""
        options: dict[str, Any] = {
            "servers": [url.strip() for url in self.url.split(",")],
            "allow_reconnect": True,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": 0.1,
            "ping_interval": 2,
            "max_outstanding_pings": 2,
            "connect_timeout": 2,
            "pending_size": 64 << 20,
            # ours are made of checked ids; a client's reply came from the server
            "skip_subject_validation": True,
            "user": self.user or None,
            "password": self.password or None,
            "token": self.token or None,
            "nkeys_seed": self.nkey_seed_file or None,
            "user_credentials": self.credentials_file or None,
        }
        if (tls := self.tls()) is not None:
            options["tls"] = tls
        return options

    def tls(self) -> ssl.SSLContext | None:
        if not (self.tls_ca_file or self.tls_cert_file):
            return None
        naming = f"TLS authority {self.tls_ca_file}"
        try:
            context = ssl.create_default_context(cafile=self.tls_ca_file or None)
            naming = f"TLS certificate {self.tls_cert_file}"
            if self.tls_cert_file:
                context.load_cert_chain(self.tls_cert_file, self.tls_key_file or None)
        # ssl's error does not name the file.
        except OSError as problem:
            raise BusUnreachable(f"{naming}: {problem}") from None
        return context
