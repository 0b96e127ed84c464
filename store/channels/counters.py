"""Messages and bytes of one direction of a channel, by op."""

from __future__ import annotations

from halfmoon.store.channels.header import HEADER_BYTES, Op

_OPS_MAX = max(Op) + 1


class MessageCounts:
    """Counts since the channel began. Payload and headers are apart, so that payload equals formulas exactly."""

    def __init__(self) -> None:
        self._messages = [0] * _OPS_MAX
        self._payload_bytes = [0] * _OPS_MAX

    def count(self, op: Op, payload_bytes: int) -> None:
        """One message more."""
        self._messages[op] += 1
        self._payload_bytes[op] += payload_bytes

    def messages(self, op: Op) -> int:
        return self._messages[op]

    def payload_bytes(self, op: Op) -> int:
        return self._payload_bytes[op]

    def header_bytes(self, op: Op) -> int:
        return self._messages[op] * HEADER_BYTES

    def by_op(self) -> dict[str, tuple[int, int, int]]:
        """Name of each op that was used: messages, payload bytes, header bytes."""
        return {
            op.name: (self.messages(op), self.payload_bytes(op), self.header_bytes(op))
            for op in Op
            if self._messages[op]
        }
