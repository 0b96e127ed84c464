"""Messages of a change of the model's weights in place, as loops of reinforcement learning make one after another."""

from __future__ import annotations

from halfmoon.schemas.types import Blocks, Message, Text


class PlacementsPaused(Message, frozen=True):
    """An operator wants nothing to be placed until this comes with `paused` False. Requests wait as they do while no
    worker is there.
    """

    paused: bool = True
    #: Orders that run are taken back; their requests wait too, and go on behind what their clients have.
    abort: bool = False


class WeightsChanged(Message, frozen=True):
    """An operator has changed the weights of all workers in place. Orders are of this version from the next event on,
    and blocks of another one are no part of them: the version is in the root of the block keys.
    """

    weight_version: Text


class ResetPrefixCache(Message, frozen=True):
    """To the adapter of an engine: have the engine drop its prefix cache."""


class PrefixCacheReset(Message, frozen=True):
    """`blocks`: of the cluster's that were in it."""

    blocks: Blocks
