"""A connection to a real nats-server that checks nothing of what it sends, with a process's credentials or none."""

from __future__ import annotations

import base64
import json
import socket
from pathlib import Path

import nkeys

#: The server waits for the rest of a command that says that it is longer than it is: then the socket is closed.
CLOSED_S = 0.2


class RawConnection:
    """Made anew when the server has closed it. `nkey_seed_file`: whose; "" for a server that asks for none."""

    def __init__(self, url: str, nkey_seed_file: str = "", *, patience_s: float = CLOSED_S) -> None:
        host, _, port = url.removeprefix("nats://").rpartition(":")
        self._address, self._seed_file, self._patience_s = (host, int(port)), nkey_seed_file, patience_s
        self._socket: socket.socket | None = None

    def send(self, content: bytes) -> str:
        """The commands in `content`: "taken" once the server has read past them, "closed" where it closed instead.

        Raises OSError where it does not let this connection in.
        """
        if self._socket is None:
            self._socket = socket.create_connection(self._address, timeout=self._patience_s)
            greeting = json.loads(self._line().removeprefix(b"INFO "))
            self._socket.sendall(b"CONNECT %b\r\nPING\r\n" % json.dumps(self._hello(greeting)).encode())
            if self._until(b"PONG\r\n") == "closed":
                raise ConnectionRefusedError(
                    f"the server refuses {self._seed_file or 'a connection without a key'}"
                )
        try:
            self._socket.sendall(content + b"PING\r\n")
            outcome = self._until(b"PONG\r\n")
        except OSError:
            outcome = "closed"
        if outcome == "closed":
            self.close()
        return outcome

    def _hello(self, greeting: dict[str, str]) -> dict[str, object]:
        hello: dict[str, object] = {
            "verbose": False,
            "pedantic": False,
            "headers": True,
            "no_responders": True,
        }
        if self._seed_file:
            pair = nkeys.from_seed(bytearray(Path(self._seed_file).read_bytes().strip()))
            signature = base64.b64encode(pair.sign(greeting["nonce"].encode()))
            hello |= {"nkey": pair.public_key.decode(), "sig": signature.decode()}
        return hello

    def _line(self) -> bytes:
        assert self._socket is not None
        heard = b""
        while not heard.endswith(b"\r\n"):
            part = self._socket.recv(1 << 16)
            if not part:
                raise ConnectionResetError("the server closed before it said who it is")
            heard += part
        return heard

    def _until(self, word: bytes) -> str:
        assert self._socket is not None
        heard = b""
        while word not in heard:
            if b"PING\r\n" in heard:
                heard = heard.replace(b"PING\r\n", b"")
                self._socket.sendall(b"PONG\r\n")
            part = self._socket.recv(1 << 16)
            if not part or b"-ERR" in part:
                return "closed"
            heard = heard[-10:] + part
        return "taken"

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
