"""A node's block slots: the block in each, its holders, and the order of eviction. No I/O; time comes in as `now_ns`.

A slot is in one of four states::

    free ──reserve──▶ reserved ──commit──▶ committed ──evict──▶ free
                         └─release while a writer may still write──▶ condemned ──writer closed, or its deadline──▶ free

- A slot is given away only when nobody copies into it any more: `fence`. A condemned slot may have to wait for that.
- A put has two phases. Reserved slots belong to their holders alone; a key is found only after `commit`.
- A *hold* is the reserved slots of one party of one order, and its leases on committed ones. It expires. Leased blocks
  are never evicted. Looking whether a key exists (`probe`) changes nothing.
- A *writer* is another process that may write into the reserved slots of a hold: the node's own worker, or a peer that
  pushes. A writer never writes after its deadline. A slot that loses its last holder while a writer is on it is
  condemned until the writer closes or its deadline passes, so that a late write never hits another order's bytes.
- Keys are chained, but the pool does not know parents: it takes the order in which keys are listed, head first.

Source: Mooncake (FAST'25), section 4; leases and condemned slots are ours.
"""

# The paper's store writes by RDMA into memory of another machine, and is silent on a writer that is late. Here that is
# the main question: workers write into shared memory themselves, a process may stand still for any time, and no
# deadline stops a copy that has begun. Hence three guards. Leases and deadlines handle the process that dies, condemned
# slots the one that is slow, and the fence the one that stood still in the middle of a copy.
#
# Turned down:
# - Copying through the agent, which alone would own the memory: simple and safe, and every byte copied once more.
# - Counting references without a time: a reader that dies would keep its blocks for ever.
# - Parents of blocks in the pool: the order of keys evicts tails first as well.
#
# In doubt: a lease cannot keep a block for a reader that stands still. So readers compare epochs after their copy.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from halfmoon.store.errors import (
    BlockMissing,
    OrderUnknown,
    QuotaExceeded,
    StoreError,
    StoreFull,
    WrongTenant,
)
from halfmoon.store.pool import audit
from halfmoon.store.pool.eviction import Eviction, LeastRecentlyUsed
from halfmoon.store.pool.fence import Fence, NoFence
from halfmoon.store.pool.idle_queues import IdleQueues
from halfmoon.store.pool.slots import Change, Counts, Hold, Idle, Owner, Slot, SlotState, Writer

#: Hard pins may hold one slot in this many, so that puts go on.
PINNED_SHARE = 2


class Pool:
    """See the module. Not thread safe; `PoolGuard` is."""

    def __init__(
        self,
        slots: int,
        *,
        eviction: Eviction | None = None,
        quotas: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`quotas`: slots that a tenant may use; a tenant without a quota may use all."""
        assert slots > 0, slots
        self.slots = [Slot() for _ in range(slots)]
        self.holds: dict[Owner, Hold] = {}
        self.writers: dict[tuple[Owner, str], Writer] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._by_key: dict[bytes, int] = {}
        self._idle = IdleQueues(eviction if eviction is not None else LeastRecentlyUsed())
        self._quotas = dict(quotas)
        #: Slots that are not free, by tenant.
        self._used: Counter[str] = Counter()
        self._pinned: set[int] = set()
        self._changes: list[Change] = []
        #: Set by the owner of the slots' memory.
        self.fence: Fence = NoFence()
        #: Condemned slots without a writer, into which a copy is still under way.
        self._lingering: set[int] = set()

    # --- put ------------------------------------------------------------------------------------------------

    def open_put(
        self, owner: Owner, keys: Sequence[bytes], blocks: int, *, expires_ns: int, tenant: str = ""
    ) -> Hold:
        """Leases the `keys` that are here, reserves slots for the others and for `blocks - len(keys)` without a key.

        All or nothing. Raises StoreFull, QuotaExceeded, WrongTenant, or StoreError when the owner has a hold already.
        """
        assert blocks >= len(keys), (blocks, len(keys))
        if owner in self.holds:
            raise StoreError(f"order {owner.order_id} is open for {owner.party} already")
        found = [self._by_key.get(key) for key in keys]
        present = [i for i, slot in enumerate(found) if slot is not None]
        here = {slot for slot in found if slot is not None}
        if len(here) != len(present):
            raise StoreError(f"order {owner.order_id} names a block twice")
        self.require_tenant(keys, tenant)
        needed = blocks - len(present)
        # Blocks of this very put are about to be held, so that they cannot make room for it.
        idle = len(self._idle) - sum(1 for slot in here if slot in self._idle)
        if needed > len(self._free) + idle:
            raise StoreFull(
                f"{needed} blocks wanted, {len(self._free)} free and {idle} evictable of {len(self.slots)}"
            )
        self._make_room_in_quota(tenant, needed, here)
        # Held before a slot is taken: taking one may evict, and must not evict these.
        for number in here:
            self._hold_slot(number)
            self.slots[number].hits += 1
        taken: list[int] = []
        for i in range(blocks):
            slot = found[i] if i < len(keys) else None
            if slot is None:
                slot = self._take_free()
                self.slots[slot] = Slot(
                    SlotState.RESERVED, keys[i] if i < len(keys) else b"", holders=1, tenant=tenant
                )
                self._used[tenant] += 1
                self.fence.admit(slot, owner.order_id)
            taken.append(slot)
        self.holds[owner] = Hold(
            taken,
            [*keys, *([b""] * (blocks - len(keys)))],
            expires_ns,
            present,
            self._epochs(taken),
            tenant=tenant,
        )
        return self.holds[owner]

    def share(self, owner: Owner, to: Owner, *, expires_ns: int) -> Hold:
        """Gives `to` a hold on the same slots: a push whose target is this very node moves nothing."""
        source = self.hold(owner)
        if to in self.holds:
            raise StoreError(f"order {to.order_id} is open for {to.party} already")
        for slot in source.slots:
            self._hold_slot(slot)
        shared = Hold(
            list(source.slots),
            list(source.keys),
            expires_ns,
            list(source.present),
            list(source.epochs),
            tenant=source.tenant,
        )
        self.holds[to] = shared
        return shared

    def commit(self, owner: Owner, checksums: dict[int, int]) -> list[int]:
        """Makes blocks visible: `checksums` maps indices of the hold to checksums. Returns indices that became visible.

        Blocks without a key, committed ones, and ones that another order committed meanwhile stay as they are.
        """
        hold = self.hold(owner)
        done = []
        for i in sorted(checksums):
            slot = self.slots[hold.slots[i]]
            if slot.state is not SlotState.RESERVED or not slot.key:
                continue
            if slot.key in self._by_key:
                # Another order committed the same block first. This copy stays with its holder and is found by nobody
                # else, or one key would have two slots.
                slot.key = b""
                continue
            # Others may read the block from now on, so nobody may write it any more.
            self.fence.withdraw(hold.slots[i])
            slot.state = SlotState.COMMITTED
            slot.checksum = checksums[i]
            self._by_key[slot.key] = hold.slots[i]
            self._changes.append(Change("stored", slot.key))
            done.append(i)
        return done

    # --- leases ---------------------------------------------------------------------------------------------

    def lease(self, owner: Owner, keys: Sequence[bytes], *, first_block: int, expires_ns: int) -> Hold:
        """Holds the blocks `keys[first_block:]`; those before count as used, so that heads stay newer than tails.

        Raises BlockMissing (with how many are here) and holds nothing when one is not committed here.
        """
        if owner in self.holds:
            raise StoreError(f"order {owner.order_id} is open for {owner.party} already")
        slots = self._all_here(keys[first_block:])
        for slot in slots:
            self._hold_slot(slot)
            self.slots[slot].hits += 1
        hold = Hold(
            slots,
            list(keys[first_block:]),
            expires_ns,
            list(range(len(slots))),
            self._epochs(slots),
            heads=list(keys[:first_block]),
        )
        self.holds[owner] = hold
        return hold

    def hold(self, owner: Owner) -> Hold:
        """Raises OrderUnknown, for a retired one too."""
        hold = self.holds.get(owner)
        if hold is None or hold.retired:
            raise OrderUnknown(f"order {owner.order_id} holds nothing here for {owner.party}")
        return hold

    def renew(self, owner: Owner, *, expires_ns: int) -> None:
        """The hold lives until `expires_ns` at least. Raises OrderUnknown."""
        hold = self.hold(owner)
        if not hold.pin:
            hold.expires_ns = max(hold.expires_ns, expires_ns)

    def retire(self, owner: Owner, *, expires_ns: int) -> None:
        """Ends a hold whose holder does not know yet and may be reading: its slots are nobody else's until it
        releases them, or until `expires_ns`. For every other purpose the hold is gone. Raises OrderUnknown.
        """
        hold = self.hold(owner)
        hold.expires_ns, hold.retired = min(hold.expires_ns, expires_ns), True

    def release(self, owner: Owner) -> bool:
        """Drops a hold: its leases end, its reserved slots become free or condemned. False: there is no such hold."""
        hold = self.holds.pop(owner, None)
        if hold is None:
            return False
        # Last block first: policies evict the slot that became idle first, and a chain is of use only from its head.
        for slot in reversed(hold.slots):
            self.slots[slot].holders -= 1
            self._settle(slot)
        for key in reversed(hold.heads):
            if (head := self._by_key.get(key)) is not None:
                self._idle.touch(head)
        return True

    def owners(self, order_id: str) -> list[Owner]:
        return [owner for owner in self.holds if owner.order_id == order_id]

    def party(self, party: str) -> list[Owner]:
        """Owners of that party which hold something, or may still write."""
        found = [*self.holds, *(owner for owner, _ in self.writers)]
        return sorted({owner for owner in found if owner.party == party})

    def probe(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are committed here. Renews nothing."""
        return [key in self._by_key for key in keys]

    def find(self, key: bytes) -> int | None:
        """The slot that holds `key`. Renews nothing."""
        return self._by_key.get(key)

    @property
    def free(self) -> int:
        return len(self._free)

    def readable(self, slot: int) -> bool:
        return self.slots[slot].state is SlotState.COMMITTED

    # --- pins, removal, idle blocks -------------------------------------------------------------------------

    def require_tenant(self, keys: Iterable[bytes], tenant: str) -> None:
        """Raises WrongTenant when one of the blocks that are here is another tenant's."""
        for key in keys:
            if (slot := self._by_key.get(key)) is not None and self.slots[slot].tenant not in ("", tenant):
                raise WrongTenant(f"block {key.hex()} belongs to another tenant")

    def pin(self, keys: Sequence[bytes], *, until_ns: int) -> None:
        """Softly: until then these go only when nothing else is idle. 0: no longer.

        Raises BlockMissing (with how many are here) and pins nothing then.
        """
        slots = self._all_here(keys)
        for number in reversed(slots):
            slot = self.slots[number]
            if until_ns <= 0:
                self._unpin(number)
                continue
            slot.pinned_until_ns = max(slot.pinned_until_ns, until_ns)
            if number not in self._pinned:
                self._pinned.add(number)
                if number in self._idle:
                    self._idle.discard(number)
                    self._idle.add(number, slot.key, pinned=True)

    def pin_hard(self, owner: Owner, keys: Sequence[bytes], *, until_ns: int) -> None:
        """Leases the blocks until then; activity does not prolong it. Raises BlockMissing; StoreFull when too much
        of the pool would be pinned."""
        slots = self._all_here(keys)
        pinned = {slot for hold in self.holds.values() if hold.pin for slot in hold.slots}
        if len(pinned.union(slots)) > len(self.slots) // PINNED_SHARE:
            raise StoreFull(
                f"{len(pinned)} of {len(self.slots)} slots are pinned, and no more than half may be"
            )
        self.lease(owner, keys, first_block=0, expires_ns=until_ns).pin = True

    def remove(self, key: bytes) -> bool:
        """Forgets an idle block. False: it is not here, or is held."""
        slot = self._by_key.get(key)
        if slot is None or slot not in self._idle:
            return False
        self._empty(slot)
        return True

    def next_victims(self, count: int) -> list[Idle]:
        """Blocks that will be evicted next, in about that order."""
        return [Idle(number, self.slots[number]) for number in self._idle.first(count, lambda _: True)]

    def still(self, idle: Idle) -> bool:
        """True: the block has been there, unchanged, since `next_victims` named it."""
        # Identity is enough: a slot that is taken or freed gets a new `Slot`.
        return self.slots[idle.number] is idle.slot and idle.slot.state is SlotState.COMMITTED

    # --- writers --------------------------------------------------------------------------------------------

    def open_writer(self, owner: Owner, name: str, *, deadline_ns: int) -> None:
        """`name` may write into the reserved slots of the hold until `deadline_ns`. Raises OrderUnknown."""
        hold = self.hold(owner)
        assert (owner, name) not in self.writers, (owner, name)
        # Committed slots are left out: nobody may write into a block that others read.
        slots = [slot for slot in hold.slots if self.slots[slot].state is SlotState.RESERVED]
        for slot in slots:
            self.slots[slot].writers += 1
        self.writers[owner, name] = Writer(deadline_ns, slots)

    def renew_writer(self, owner: Owner, name: str, *, deadline_ns: int) -> None:
        """No effect when it is closed."""
        writer = self.writers.get((owner, name))
        if writer is not None:
            # Never shortened: the writer counts on the deadline that it has.
            writer.deadline_ns = max(writer.deadline_ns, deadline_ns)

    def close_writer(self, owner: Owner, name: str) -> None:
        """`name` will not write again. Idempotent."""
        writer = self.writers.pop((owner, name), None)
        if writer is None:
            return
        for slot in reversed(writer.slots):
            self.slots[slot].writers -= 1
            self._settle(slot)

    def may_write(self, owner: Owner, slots: Sequence[int], parts: Sequence[int] = ()) -> str:
        """ "" when `owner` has all of `slots` reserved, and none of `parts` of them has a key; otherwise why not."""
        hold = self.holds.get(owner)
        if hold is None or hold.retired:
            return "no reservation"
        held = set(hold.slots)
        for slot in slots:
            if slot not in held:
                return f"slot {slot} is not reserved for this order"
            if self.slots[slot].state is not SlotState.RESERVED:
                return f"slot {slot} is {self.slots[slot].state.value}"
        # A slot written in part keeps bytes of its previous order, and a block with a key is read by others.
        keyed = [slot for slot in parts if self.slots[slot].key]
        return f"slot {keyed[0]} has a key and is written in part" if keyed else ""

    def may_read(self, order_id: str, slots: Sequence[int]) -> str:
        """ "" when some party of the order leases every one of `slots`, otherwise why not."""
        held: set[int] = set()
        for owner in self.owners(order_id):
            if not self.holds[owner].retired:
                held.update(self.holds[owner].slots)
        for slot in slots:
            if slot not in held or self.slots[slot].state is not SlotState.COMMITTED:
                return f"slot {slot} is not leased for this order"
        return ""

    # --- time, reports, invariant ---------------------------------------------------------------------------

    def sweep(self, now_ns: int) -> list[Owner]:
        """Collects holds that expired by `now_ns`, and writers past their deadline. Returns the owners of holds that
        nobody had ended: those that were retired are not among them.
        """
        expired = [owner for owner, hold in self.holds.items() if hold.expires_ns <= now_ns]
        left = [owner for owner in expired if not self.holds[owner].retired]
        for owner in expired:
            self.release(owner)
        for owner, name in [at for at, writer in self.writers.items() if writer.deadline_ns <= now_ns]:
            self.close_writer(owner, name)
        for number in [number for number in self._pinned if self.slots[number].pinned_until_ns <= now_ns]:
            self._unpin(number)
        for number in sorted(self._lingering):
            self._settle(number)
        return left

    def postpone(self, by_ns: int) -> None:
        """Every hold, and every writer's deadline, ends `by_ns` later."""
        for hold in self.holds.values():
            hold.expires_ns += by_ns
        for writer in self.writers.values():
            writer.deadline_ns += by_ns

    def take_changes(self) -> list[Change]:
        """Blocks that became readable or were evicted since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def keys(self) -> list[bytes]:
        """All committed keys, in the order of commit."""
        return list(self._by_key)

    def counts(self) -> Counts:
        return audit.counts(self.slots, len(self.holds))

    def check(self) -> None:
        """The invariant: every slot is accounted for exactly once. Raises AssertionError with its values."""
        audit.check_slots(self.slots, self.holds, self.writers, self._free, self._idle, self._lingering)
        free, committed = SlotState.FREE, SlotState.COMMITTED
        used = Counter([slot.tenant for slot in self.slots if slot.state is not free])
        assert used == +self._used, ("I50 slots of tenants", used, self._used)
        over = [tenant for tenant, quota in self._quotas.items() if used[tenant] > quota]
        assert not over, ("I51 over their quotas", over, used)
        readable = 0
        for number, slot in enumerate(self.slots):
            assert (slot.pinned_until_ns > 0) == (number in self._pinned), ("I52 pinned", number, slot)
            if slot.state is committed:
                readable += 1
                assert self._by_key.get(slot.key) == number, ("I53 found by its key", number, slot)
        assert len(self._by_key) == readable, ("I53 keys of no block", len(self._by_key), readable)

    # --- inside ---------------------------------------------------------------------------------------------

    def _epochs(self, slots: Sequence[int]) -> list[int]:
        return [self.fence.epoch(slot) for slot in slots]

    def _all_here(self, keys: Sequence[bytes]) -> list[int]:
        slots: list[int] = []
        for key in keys:
            slot = self._by_key.get(key)
            if slot is None:
                raise BlockMissing(f"{len(slots)} of {len(keys)} blocks are here", held=len(slots))
            slots.append(slot)
        return slots

    def _make_room_in_quota(self, tenant: str, needed: int, keep: set[int]) -> None:
        quota = self._quotas.get(tenant)
        if quota is None or (over := self._used[tenant] + needed - quota) <= 0:
            return
        own = self._idle.first(over, lambda slot: self.slots[slot].tenant == tenant and slot not in keep)
        if len(own) < over:
            raise QuotaExceeded(
                f"{needed} blocks wanted; the tenant may have {quota} and uses {self._used[tenant]}"
            )
        for slot in own:
            self._empty(slot)

    def _hold_slot(self, number: int) -> None:
        self._idle.remove(number)
        self.slots[number].holders += 1

    def _settle(self, number: int) -> None:
        """Puts a slot where it belongs after a holder or a writer went."""
        slot = self.slots[number]
        if slot.holders:
            return
        if slot.state is SlotState.COMMITTED:
            if not slot.writers:
                self._idle.add(
                    number, slot.key, pinned=number in self._pinned, spare=slot.spare and not slot.hits
                )
        elif slot.state is not SlotState.FREE:
            # A write may still arrive: given to another order, the slot would take bytes of this one.
            unwritten = self.fence.withdraw(number)
            self._lingering.discard(number)
            if unwritten and not slot.writers:
                self._free_slot(number)
                return
            slot.state, slot.key = SlotState.CONDEMNED, b""
            if not slot.writers:
                self._lingering.add(number)

    def _take_free(self) -> int:
        if not self._free:
            self._empty(self._idle.victim())
        return self._free.pop()

    def _empty(self, number: int) -> None:
        """Forgets the block of a slot that was idle."""
        self._idle.discard(number)
        key = self.slots[number].key
        del self._by_key[key]
        self._changes.append(Change("evicted", key))
        self._free_slot(number)

    def _free_slot(self, number: int) -> None:
        self._used[self.slots[number].tenant] -= 1
        self._pinned.discard(number)
        self.slots[number] = Slot()
        self._free.append(number)

    def _unpin(self, number: int) -> None:
        slot = self.slots[number]
        slot.pinned_until_ns = 0
        self._pinned.discard(number)
        # An idle slot moves between the queues of idle slots; one that is held enters its queue when it is released.
        if number in self._idle:
            self._idle.discard(number)
            self._idle.add(number, slot.key, pinned=False)
