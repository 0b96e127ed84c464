"""A question to the conductors' index of blocks."""

from __future__ import annotations

from halfmoon.schemas.types import BlockKeys, Id, Message


class LocateBlocks(Message, frozen=True):
    """Which nodes, none of `besides`, have these blocks?"""

    block_keys: BlockKeys
    besides: list[Id] = []


class BlocksLocated(Message, frozen=True):
    """Nodes that hold these blocks between them, as far as any node does, those with most of them first, and a few
    replicas behind them. By the log: what a node has since stored or evicted, it says itself.
    """

    nodes: list[Id] = []
