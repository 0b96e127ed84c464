"""Ports for programs that must be told theirs beforehand: a server that others know, one that is started again.

A server that can say where it listens binds port 0 instead.
"""

from __future__ import annotations

import contextlib
import socket

#: Beginnings tried before there is said to be no room for so many ports in a row.
DRAWS = 200


class HeldPorts:
    """`count` ports in a row, from `first` on, bound on `host` for as long as this is open.

    A socket that is bound with SO_REUSEADDR and does not listen keeps a port from everyone to whom the kernel gives
    one, and from whoever binds it without that option. A server that binds it with the option, as nearly all do, gets
    it, and gets it again after it ended. Closed where it is forgotten.
    """

    def __init__(self, host: str = "127.0.0.1", count: int = 1) -> None:
        for _ in range(DRAWS):
            with contextlib.ExitStack() as bound:
                try:
                    self.first = _bind(bound, host, 0)
                    for more in range(1, count):
                        _bind(bound, host, self.first + more)
                except (OSError, OverflowError):
                    continue
                self._bound = bound.pop_all()
                return
        raise OSError(f"no {count} ports in a row on {host} in {DRAWS} tries")

    def close(self) -> None:
        self._bound.close()

    def __enter__(self) -> int:
        return self.first

    def __exit__(self, *_: object) -> None:
        self.close()


def _bind(bound: contextlib.ExitStack, host: str, port: int) -> int:
    one = bound.enter_context(socket.socket())
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind((host, port))
    return int(one.getsockname()[1])
