"""Errors of the bus, as one tree.

BusError
├── BusUnreachable      no NATS server at the address, or it refuses us
├── PeerUnreachable     nobody answers on a subject
├── PeerError           the peer answered: it could not (has `code` for programs, `message` for people)
├── SubjectInvalid      nothing can be published on such a subject
├── NotStored           a message was not stored in time; it may be later
├── LogMoved            a conditional append came too late
├── StreamRefused       JetStream answered with an error (has its `code`)
├── StreamRecreated     the stream that was being read is gone; another of its name counts from 1
├── SnapshotBroken      a part of a snapshot is missing, or other bytes than were saved
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
    """The peer's own answer: it could not obey the request."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class SubjectInvalid(BusError):
    """Nothing can be published on such a subject: it is empty, or holds a blank, a control character or a wildcard."""


class NotStored(BusError):
    """The server did not acknowledge the message in time. It is sent again until it is stored."""


class LogMoved(BusError):
    """The stream's last sequence is not the expected one."""


class StreamRefused(BusError):
    """JetStream answered with an error: `code` is its own number for it, `status` as in HTTP."""

    def __init__(self, message: str, *, code: int = 0, status: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class StreamRecreated(BusError):
    """The stream that was being read is gone; another of its name counts from 1."""


class SnapshotBroken(BusError):
    """A part is missing, or the bytes are not those that were saved."""


class BusOverloaded(BusError):
    """Too many messages wait for their acknowledgement."""
