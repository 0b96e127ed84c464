"""Which blocks a node holds and of which tokens they are, by its KV events; and the order in which to compute some."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

from halfmoon.cli.options import OptionInvalid
from halfmoon.store.agent.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventBatch
from halfmoon.workers.adapters.kv_event_reader import replayed

ANSWER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A block and all that is before it, from the prompt's head: block i has `keys[i]` and `token_ids[i]`."""

    keys: tuple[bytes, ...]
    token_ids: tuple[tuple[int, ...], ...]


class CachedBlocks:
    """The blocks that are on the node after the batches that were applied."""

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes | None] = {}
        self._token_ids: dict[bytes, tuple[int, ...]] = {}
        self._media: dict[bytes, set[str]] = {}

    def apply(self, batch: KvEventBatch) -> None:
        """Raises OptionInvalid: the batch has no tokens."""
        for event in batch.events:
            match event:
                case AllBlocksCleared():
                    self._media.clear()
                case BlockRemoved(block_hashes=keys, medium=medium):
                    for key in keys:
                        self._media.get(key, set()).discard(medium)
                case BlockStored():
                    self._store(event)

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        if len(event.token_ids) != size * len(event.block_hashes):
            raise OptionInvalid(
                "--kv-events-replay: it tells no tokens: start the store with --kv-events-tokens"
            )
        for number, key in enumerate(event.block_hashes):
            self._parents[key] = parent
            self._token_ids[key] = tuple(event.token_ids[number * size : (number + 1) * size])
            self._media.setdefault(key, set()).add(event.medium)
            parent = key

    def known(self) -> list[bytes]:
        """The keys of the blocks that are there and whose chains are known, in order."""
        after: dict[bytes | None, list[bytes]] = {}
        for key, parent in self._parents.items():
            after.setdefault(parent, []).append(key)
        # From the heads of prompts on: blocks behind a lost one are not reached.
        reached, found = after.get(None, []), list[bytes]()
        while reached:
            key = reached.pop()
            if self._media.get(key):
                found.append(key)
            reached += after.get(key, ())
        return sorted(found)

    def chain(self, key: bytes) -> Chain | None:
        """None: the events of a block before it are lost. Blocks before it need not be on the node any more."""
        keys: dict[bytes, bool] = {}
        at: bytes | None = key
        while at is not None:
            if at not in self._parents or at in keys:
                return None
            keys[at] = True
            at = self._parents[at]
        chain = tuple(reversed(keys))
        return Chain(keys=chain, token_ids=tuple(self._token_ids[one] for one in chain))


def in_computing_order(chains: Iterable[Chain]) -> list[Chain]:
    """Those that begin alike are neighbours, the shorter first: a block is computed once."""
    return sorted(chains, key=lambda chain: chain.keys)


async def read_events(address: str) -> CachedBlocks:
    """The blocks in a node's KV events, asked for again. Raises OptionInvalid: no or no right answer."""
    blocks, decoder = CachedBlocks(), msgspec.msgpack.Decoder(KvEventBatch)
    context = zmq.asyncio.Context()
    try:
        # Closed before its context ends, which waits for the socket.
        async with aclosing(replayed(context, address, 0, ANSWER_S, _refuse)) as batches:
            async for _, payload in batches:
                blocks.apply(decoder.decode(payload))
    except TimeoutError:
        raise OptionInvalid(f"--kv-events-replay {address}: no answer within {ANSWER_S:.0f} s") from None
    except (zmq.ZMQError, msgspec.MsgspecError, ValueError) as problem:
        raise OptionInvalid(f"--kv-events-replay {address}: {problem}") from None
    finally:
        context.term()
    return blocks


def _refuse() -> None:
    raise ValueError("it answers with something else than KV events")
