"""The pool behind a lock, with a clock. The event loop changes it; transport threads ask it (`SlotAccess`) before
they touch a slot.

Also remembers, for one lease's time, orders that were released before they were opened: an order may be cancelled while
its reservation is still on the way, and would otherwise hold memory until its lease ends.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import xxhash

from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.store.errors import OrderUnknown
from halfmoon.store.pool.eviction import EvictionName, make_eviction
from halfmoon.store.pool.fence import Fence
from halfmoon.store.pool.pool import Pool
from halfmoon.store.pool.slots import Change, Counts, Hold, Idle, Owner

WORKER = "worker"
#: The holder of a hold that is ended from outside hears of it by another way (the bus), a moment later. Until then it
#: may copy from the slots, and bytes of another order there would become wrong KV: so they are not given away.
READER_GRACE_NS = 5 * SECOND_NS
#: After a longer pause between two sweeps this process stood still (stopped, or its machine was): no time passed.
STOOD_NS_MIN = 2 * SECOND_NS


def peer_writer(node_id: str) -> str:
    """Name of the writer that an agent is in another agent's pool."""
    return f"node-{node_id}"


def open_pool(slots: int, eviction: EvictionName, quotas: Mapping[str, int]) -> Pool:
    """An empty pool. `quotas`: slots that a tenant may use, by its mark."""
    return Pool(slots, eviction=make_eviction(eviction), quotas=quotas)


class PoolGuard:
    """See the module. Every method may be called from any thread."""

    def __init__(
        self, pool: Pool, *, ttl_ns: int, grace_ns: int, announce: Callable[[list[Change]], None]
    ) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._ttl_ns = ttl_ns
        self._grace_ns = grace_ns
        self._announce = announce
        self._gone: dict[Owner, int] = {}
        self._receiving: Counter[Owner] = Counter()
        self._swept_ns = time.monotonic_ns()

    def fence_by(self, fence: Fence) -> None:
        """The pool's slots have memory from now on: `fence` keeps late writers out of it."""
        self._pool.fence = fence

    def _expiry(self) -> int:
        return time.monotonic_ns() + self._ttl_ns

    def _writer_deadline(self) -> int:
        return time.monotonic_ns() + self._ttl_ns + self._grace_ns

    def open_put(
        self,
        owner: Owner,
        keys: Sequence[bytes],
        blocks: int,
        *,
        writer: str,
        heads: Sequence[bytes] = (),
        tenant: str = "",
    ) -> Hold:
        """As `Pool.open_put`, with `writer` on the reserved slots. `heads`: keys of the chain before `keys`.

        Raises OrderUnknown for an order that was released already.
        """
        self._require_wanted(owner)
        with self._lock:
            hold = self._pool.open_put(owner, keys, blocks, expires_ns=self._expiry(), tenant=tenant)
            hold.heads = list(heads)
            self._pool.open_writer(owner, writer, deadline_ns=self._writer_deadline())
            self._announce(self._pool.take_changes())
            return hold

    def share(self, owner: Owner, to: Owner) -> Hold:
        self._require_wanted(to)
        with self._lock:
            return self._pool.share(owner, to, expires_ns=self._expiry())

    def lease(self, owner: Owner, keys: Sequence[bytes], first_block: int) -> tuple[Hold, list[int]]:
        """The hold, and the checksums of its blocks."""
        self._require_wanted(owner)
        with self._lock:
            hold = self._pool.lease(owner, keys, first_block=first_block, expires_ns=self._expiry())
            return hold, [self._pool.slots[slot].checksum for slot in hold.slots]

    def hold(self, owner: Owner) -> Hold:
        """The hold, renewed: this is activity. Raises OrderUnknown."""
        with self._lock:
            self._pool.renew(owner, expires_ns=self._expiry())
            self._pool.renew_writer(owner, WORKER, deadline_ns=self._writer_deadline())
            return self._pool.hold(owner)

    def renew(self, owner: Owner, writer: str) -> None:
        """Raises OrderUnknown."""
        with self._lock:
            self._pool.renew(owner, expires_ns=self._expiry())
            self._pool.renew_writer(owner, writer, deadline_ns=self._writer_deadline())

    def to_commit(self, owner: Owner, first: int, blocks: int) -> dict[int, int]:
        """Index to slot of those blocks of the range that have a key and are not visible yet. Raises
        OrderUnknown.
        """
        with self._lock:
            hold = self._pool.hold(owner)
            indices = range(first, min(first + blocks, len(hold.slots)))
            return {
                i: hold.slots[i] for i in indices if hold.keys[i] and not self._pool.readable(hold.slots[i])
            }

    def commit(self, owner: Owner, checksums: dict[int, int]) -> list[int]:
        with self._lock:
            done = self._pool.commit(owner, checksums)
            self._announce(self._pool.take_changes())
            return done

    def credit(self, key: bytes, hits: int) -> None:
        """A block that came back from a slower tier brings its hits along."""
        with self._lock:
            if (slot := self._pool.find(key)) is not None:
                self._pool.slots[slot].hits += hits

    def find(self, key: bytes) -> int | None:
        return self._pool.find(key)

    def keys(self) -> list[bytes]:
        return self._pool.keys()

    def mark_spare(self, owner: Owner) -> None:
        """Marks the order's reserved slots as a copy ahead of need. Call it before the order commits."""
        with self._lock:
            hold = self._pool.hold(owner)
            for i, slot in enumerate(hold.slots):
                self._pool.slots[slot].spare = i not in hold.present

    def hottest(self) -> list[tuple[bytes, str]]:
        """Every committed key with its tenant ("": anybody's); blocks in use first, the next victims last."""
        with self._lock:
            idle = self._pool.next_victims(len(self._pool.slots))
            going = {victim.slot.key: None for victim in reversed(idle)}
            slots = self._pool.slots
            held = [key for key in self._pool.keys() if key not in going]  # noqa: SIM118
            keys = [*held, *going]
            found = [(key, self._pool.find(key)) for key in keys]
            return [(key, slots[slot].tenant) for key, slot in found if slot is not None]

    def probe(self, keys: Sequence[bytes], tenant: str) -> list[bool]:
        """Which keys are here, as far as they are for this tenant. Renews nothing."""
        with self._lock:
            found = [self._pool.find(key) for key in keys]
            return [slot is not None and self._pool.slots[slot].tenant in ("", tenant) for slot in found]

    def take(self, owner: Owner, keys: Sequence[bytes], tenant: str) -> tuple[list[int], Hold, list[int]]:
        """Leases those keys that are here: their indices, the hold, the checksums. Raises WrongTenant."""
        with self._lock:
            present = [i for i, key in enumerate(keys) if self._pool.find(key) is not None]
            some = [keys[i] for i in present]
            self._pool.require_tenant(some, tenant)
            hold = self._pool.lease(owner, some, first_block=0, expires_ns=self._expiry())
            return present, hold, [self._pool.slots[slot].checksum for slot in hold.slots]

    def remove(self, keys: Sequence[bytes], tenant: str) -> list[int]:
        """Indices of the keys that were here, idle, and are gone. Raises WrongTenant."""
        with self._lock:
            self._pool.require_tenant(keys, tenant)
            gone = [i for i, key in enumerate(keys) if self._pool.remove(key)]
            self._announce(self._pool.take_changes())
            return gone

    def pin(self, party: str, keys: Sequence[bytes], tenant: str, *, hard: bool, ttl_ns: int) -> None:
        """See `PinBlocks`. Raises BlockMissing, WrongTenant, StoreFull."""
        until_ns = time.monotonic_ns() + ttl_ns if ttl_ns else 0
        with self._lock:
            self._pool.require_tenant(keys, tenant)
            if not hard:
                self._pool.pin(keys, until_ns=until_ns)
                return
            owner = Owner(f"pin-{xxhash.xxh3_128_hexdigest(b''.join(keys))}", party)
            if until_ns and owner in self._pool.holds:
                self._pool.holds[owner].expires_ns = until_ns
            elif until_ns:
                self._pool.pin_hard(owner, keys, until_ns=until_ns)
            else:
                self._pool.release(owner)

    def next_victims(self, ahead: int) -> list[Idle]:
        """Blocks to save so that the next `ahead` slots can be taken without loss: as many as are not free."""
        with self._lock:
            missing = ahead - self._pool.free
            return self._pool.next_victims(missing) if missing > 0 else []

    def still(self, idle: Idle) -> bool:
        with self._lock:
            return self._pool.still(idle)

    def open_writer(self, owner: Owner, name: str, deadline_ns: int) -> None:
        with self._lock:
            self._pool.open_writer(owner, name, deadline_ns=deadline_ns)

    def close_writer(self, owner: Owner, name: str) -> None:
        with self._lock:
            self._pool.close_writer(owner, name)

    def release(self, owner: Owner, *, writers: Sequence[str] = (), remember: bool = False) -> bool:
        """Drops the hold and closes these writers. `remember`: refuse it when it comes after this. False:
        there was none.
        """
        with self._lock:
            for name in writers:
                self._pool.close_writer(owner, name)
            known = self._pool.release(owner)
        if remember and not known:
            self._gone[owner] = self._expiry()
        return known

    def release_order(self, order_id: str) -> None:
        """Ends every hold of the order, leaves its writers, and refuses later requests of it.

        A peer's reservation ends at once: it does not read here. All others stay for `READER_GRACE_NS`.
        """
        expires_ns = time.monotonic_ns() + READER_GRACE_NS
        with self._lock:
            for owner in self._pool.owners(order_id):
                if (owner, owner.party) in self._pool.writers:  # a peer that pushes; see `peer_writer`
                    self._pool.release(owner)
                else:
                    self._pool.retire(owner, expires_ns=expires_ns)
        self._gone[Owner(order_id, "")] = self._expiry()

    def party(self, party: str) -> list[Owner]:
        """Owners of that party which hold something, or may still write."""
        with self._lock:
            return self._pool.party(party)

    def owners(self, order_id: str) -> list[Owner]:
        return self._pool.owners(order_id)

    def sweep(self) -> list[Owner]:
        """Collects expired holds and writers; the owners of holds that nobody had ended."""
        now_ns = time.monotonic_ns()
        stood_ns, self._swept_ns = now_ns - self._swept_ns, now_ns
        if stood_ns > STOOD_NS_MIN:
            # Nobody could renew anything, and a thread of ours may be in the middle of a copy into a slot.
            with self._lock:
                self._pool.postpone(stood_ns)
        for owner in [owner for owner, until_ns in self._gone.items() if until_ns <= now_ns]:
            del self._gone[owner]
        with self._lock:
            return self._pool.sweep(now_ns)

    def counts(self) -> Counts:
        with self._lock:
            return self._pool.counts()

    def check(self) -> None:
        with self._lock:
            self._pool.check()

    def _require_wanted(self, owner: Owner) -> None:
        if owner in self._gone or Owner(owner.order_id, "") in self._gone:
            raise OrderUnknown(f"order {owner.order_id} was released before it was opened")

    # --- SlotAccess: from transport threads -----------------------------------------------------------------

    def begin_write(
        self, order_id: str, party: str, slots: Sequence[int], *, parts: Sequence[int] = ()
    ) -> str:
        owner = Owner(order_id, party)
        with self._lock:
            reason = self._pool.may_write(owner, slots, parts)
            if not reason:
                self._receiving[owner] += 1
                if self._receiving[owner] == 1:
                    # Without a deadline: a thread of this very process writes, and closes it whatever happens.
                    self._pool.open_writer(owner, "tcp", deadline_ns=2**63 - 1)
                self._pool.renew(owner, expires_ns=self._expiry())
            return reason

    def end_write(self, order_id: str, party: str) -> None:
        owner = Owner(order_id, party)
        with self._lock:
            self._receiving[owner] -= 1
            if self._receiving[owner] == 0:
                del self._receiving[owner]
                self._pool.close_writer(owner, "tcp")

    def begin_read(self, order_id: str, slots: Sequence[int]) -> str:
        with self._lock:
            return self._pool.may_read(order_id, slots)
