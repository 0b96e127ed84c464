"""Messages of a change of the model's weights in place, as loops of reinforcement learning make one after another."""

from __future__ import annotations

from halfmoon.schemas.types import Message


class PlacementsPaused(Message, frozen=True):
    """An operator wants nothing to be placed until this comes with `paused` False. Requests wait as they do while no
    worker is there.
    """

    paused: bool = True
    #: Orders that run are taken back; their requests wait too, and go on behind what their clients have.
    abort: bool = False
