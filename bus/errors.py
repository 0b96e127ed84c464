"""What can go wrong on the bus.

BusError
├── BusUnreachable      no NATS server at the address, or it refuses us
├── PeerUnreachable     nobody answers on a subject
├── PeerError           the peer answered: it could not (has `code` for programs, `message` for people)
├── LogMoved            a conditional append came too late
└── BusOverloaded       more unacknowledged messages than the bound: the caller must slow down
"""

from __future__ import annotations


class BusError(Exception):
    """Any failure of the bus."""


class BusUnreachable(BusError):
    """No server at the address, or it refuses the credentials."""


class PeerUnreachable(BusError):
    """Nobody serves the subject, or the answer did not come in time."""


class PeerError(BusError):
    """The peer's own answer: it could not do what was asked."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class LogMoved(BusError):
    """The stream's last sequence is not the expected one."""


class StreamAnew(BusError):
    """The stream that was being read is gone; another of its name counts from 1."""


class BusOverloaded(BusError):
    """Too many messages wait for their acknowledgement."""
