"""The end that decodes, or computes a prompt: asks the holders of its sequences' segments, layer by layer, while it
attends to its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.schemas.lending import KvPart
from halfmoon.workers.attention.remote_places import RemotePlaces, by_place
from halfmoon.workers.model.attention.states import StateStack


class RemoteSegments(RemotePlaces):
    """The parts of a batch that are elsewhere, as `ExactAttention` asks for them (`Elsewhere`)."""

    def begin(self, parts: Sequence[Sequence[KvPart]], *, chunk_rows: int = 0) -> None:
        """Set the batch of the next steps: the parts of each row elsewhere; or, with `chunk_rows`, chunks of that many
        tokens of one prompt, whose parts stand first. Call it again only when the batch changes.
        """
        if chunk_rows == 1:  # a token is attended to as in decode
            chunk_rows = 0
        held = by_place((row, part) for row, some in enumerate(parts) for part in some)
        self._say([self._states_of(name, some, chunk_rows=chunk_rows) for name, some in held.items()])

    def collect(self, states: StateStack) -> None:
        """Writes the answers to their parts of `states`. Raises ChannelLost and PartRefused."""
        for one in self._hear_all():
            assert one.states is not None
            one.states.write(states)
