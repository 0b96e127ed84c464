"""KV of one order on its way from slots of the node's pool into the engine's cache, layer by layer of each block."""

from __future__ import annotations

from halfmoon.schemas.kv import KvReady, TransferOpened

_COPIED, _ELSEWHERE = 1, 2


class KvArrival:
    """A layer of a block is *readable* in the pool, then *started* (being copied), then *copied*.

    Without layers there is no KV, and all of it is here from the start. The first `away` blocks of the prompt do not
    come here: others fetch them from the pool once they are readable.
    """

    def __init__(self, layers: int, away: int = 0) -> None:
        self._layers = layers
        self.away = away
        self.opened = False
        #: The first so many blocks have KV that comes; None: all.
        self._expected: int | None = None
        #: `slots[i]` of the pool holds prompt block i, in its epoch `epochs[i]`.
        self.slots: list[int] = []
        self.epochs: list[int] = []
        #: (layer, block) that were heard of and not started; one may stand here more than once.
        self.readable: list[tuple[int, int]] = []
        #: `started[layer * blocks + block]` is 1 from the start of its copy on, 2 where there will be none.
        self.started = bytearray()
        #: Copy instructions under way, and layers of blocks that were copied.
        self.copying = 0
        self.copied = 0

    @property
    def complete(self) -> bool:
        """Everything is in the engine's cache."""
        return self._layers == 0 or (self.opened and self.copied == self._layers * (self.blocks - self.away))

    @property
    def blocks(self) -> int:
        """That come, or are away; 0 before the transfer is open."""
        return len(self.slots) if self._expected is None else min(len(self.slots), self._expected)

    def expect(self, blocks: int) -> None:
        """No more than the first so many blocks come; none of the others was readable."""
        self._expected = blocks

    @property
    def announced(self) -> bool:
        """Everything was heard to be readable in the node's pool, copied or not."""
        if not self.opened:
            return False
        fresh = {place for place in self.readable if self._is_fresh(*place)}
        return len(self.started) - self.started.count(0) + len(fresh) == self._layers * self.blocks

    def note(self, message: TransferOpened | KvReady) -> None:
        """Note the layers that the message makes readable. It may come again at any time: the bus repeats messages."""
        match message:
            case TransferOpened():
                if self.opened:
                    return  # an order's KV has one place; what was copied from there stays copied
                self.opened = True
                self.slots, self.epochs = list(message.slots), list(message.epochs)
                self.started = bytearray(self._layers * len(message.slots))
                for block in message.present:
                    self.readable += [(layer, block) for layer in range(self._layers)]
            case KvReady():
                blocks = range(message.first_block, message.first_block + message.blocks)
                layers = range(message.layer, min(message.layer + message.layers, self._layers))
                self.readable += [(layer, block) for layer in layers for block in blocks]

    def start(self) -> list[tuple[int, int]]:
        """(layer, block) of everything readable that was not started before; it counts as started now."""
        begun = []
        blocks = len(self.slots)
        for layer, block in self.readable:
            if self._is_fresh(layer, block):
                away = block < self.away
                self.started[layer * blocks + block] = _ELSEWHERE if away else _COPIED
                if not away:
                    begun.append((layer, block))
        self.readable = []
        return begun

    def take_back(self) -> None:
        """Forget the copies: the pool still holds the blocks, and they are copied again later."""
        assert self.copying == 0, self.copying
        blocks = len(self.slots)
        self.readable += [divmod(place, blocks) for place, begun in enumerate(self.started) if begun]
        self.started = bytearray(len(self.started))
        self.copied = 0

    def _is_fresh(self, layer: int, block: int) -> bool:
        blocks = len(self.slots)
        return layer < self._layers and block < blocks and not self.started[layer * blocks + block]
