"""A pool of equal slots for the blocks of one layout: who owns a slot, which blocks can be read, what goes when room is needed.

Blocks form a tree by their parents. A block is *present* (readable, announced by a Stored event) exactly when it was committed
and its parent is present, so "block i is present" implies its whole prefix. Life of a slot:

    free -> reserved (a write lease) -> written -> present -> [pinned by read leases] -> evicted or dropped -> free
                 |                         \\ an ancestor's lease failed: dropped -> free
                 \\ the lease expired or its owner left: quarantine for `quarantine_s` -> free

A slot whose write lease ended without a word from the writer is quarantined: the writer may still be copying. It must stop at
``lease_s`` after it asked; the quarantine covers one that is late. A writer later than both can still spoil a slot of somebody
else: readers verify the checksum after their copy, so that costs a miss, never wrong data. The same holds for a reader that is
slower than its lease. A block that is dropped while it is pinned or written keeps its slot until the last user has gone.
"""

# ruff: noqa: S101 (check_integrity asserts)

from collections.abc import Sequence

from kvbus_blocks.keys import KEY_BYTES, ROOT
from kvbus_blocks.retention import PLAIN, Directive, effective
from kvbus_kvbm.core.accounts import PoolCounters, PoolLimits, PoolUsage
from kvbus_kvbm.core.block import Block, State
from kvbus_kvbm.core.changes import Changes, chains_of
from kvbus_kvbm.core.errors import InvalidRequest, TooManyKeys
from kvbus_kvbm.core.integrity import check_tree, check_users
from kvbus_kvbm.core.keeping import Keeping, directives_of
from kvbus_kvbm.core.leases import Lease, LeaseTable
from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.moves import Moves
from kvbus_kvbm.core.slot_table import SlotTable
from kvbus_wire.kv_events import KvEvent
from kvbus_wire.kvbm import BlockDirective, PinnedBlocks, ReservedBlocks, Retained, Slot
from kvbus_wire.packing import unpack_keys
from kvbus_wire.worker import SnapshotChain

__all__ = ["Pool", "PoolCounters", "PoolLimits", "PoolUsage"]

_CHECKSUM_END = 1 << 64


class Pool:
    """See the module. All times are of one monotonic clock, in seconds. Raises the errors of `core.errors`."""

    def __init__(self, pool_id: str, slots: int, limits: PoolLimits) -> None:
        self.pool_id = pool_id
        self.slots = slots
        self.limits = limits
        self.counters = PoolCounters()
        self.moves = Moves(self)
        self._root = Block.root()
        self._blocks: dict[bytes, Block] = {}
        self._slots = SlotTable(slots)
        self._leases = LeaseTable(pool_id, limits.lease_s, limits.max_leases_per_instance)
        self._keeping = Keeping(lambda: len(self._blocks), slots, limits.pin_share, lru=limits.lru)
        self._changes = Changes()
        self._now_s = 0.0
        self._present = 0
        self._reserved = 0
        self._pinned = 0

    def reserve(
        self,
        instance_id: str,
        parent: bytes,
        keys: bytes,
        now_s: float,
        directives: Sequence[BlockDirective] = (),
    ) -> ReservedBlocks:
        """Slots for the blocks of a chain that are not there yet, as far as there is room.

        Nothing is handed out below a parent that is unknown here. Below a parent that is only reserved it is: those blocks become
        present when the parent does.
        """
        self.expire(now_s)
        chain = self._chain(keys)
        said = directives_of(directives, len(chain), now_s)
        self._leases.check_room(instance_id)
        above = self._root if parent == ROOT else self._blocks.get(parent)
        blocks: list[Block | None] = [None] * len(chain)
        if above is None:
            self.counters.refused += len(chain)
        else:
            self._check_parents(above, chain)
            blocks = self._take_missing(above, chain, said)
        slots = tuple(None if b is None else Slot(index=b.slot, generation=b.generation) for b in blocks)
        if not any(slots):
            return ReservedBlocks(lease_id="", lease_s=0.0, slots=slots)
        lease = self._grant(instance_id, now_s, is_write=True, blocks=blocks)
        return ReservedBlocks(lease_id=lease.lease_id, lease_s=self.limits.lease_s, slots=slots)

    def commit(self, lease_id: str, checksums: Sequence[int | None], now_s: float) -> None:
        """End a reservation: blocks with a checksum are written, the others are dropped with all that is below them.

        A commit that was carried out before is a no-op. Raise LeaseGone: nothing of it is stored.
        """
        self.expire(now_s)
        lease = self._leases.writing(lease_id)
        if lease is None:
            return
        if len(checksums) != len(lease.blocks):
            raise InvalidRequest(f"{len(checksums)} checksums for {len(lease.blocks)} blocks")
        if any(checksum is not None and not 0 <= checksum < _CHECKSUM_END for checksum in checksums):
            raise InvalidRequest("a checksum is no unsigned 64-bit integer")
        self._leases.end(lease, committed=True)
        written: list[Block] = []
        for block, checksum in zip(lease.blocks, checksums, strict=True):
            if block is None:
                continue
            self._end_writing(block)
            if checksum is None:
                self._drop(block)
            elif not block.detached:
                block.checksum = checksum
                block.state = State.WRITTEN
                written.append(block)
        for block in written:
            if block.state is State.WRITTEN and not block.detached and _is_present(block.parent):
                self._promote(block)

    def pin(self, instance_id: str, keys: bytes, now_s: float, *, again: bool = False) -> PinnedBlocks:
        """Keep the leading blocks of a chain that are present readable until the lease ends.

        The chain may begin anywhere: the prefix of a present block is present, too. ``again``: the question has waited for blocks
        that were not here, and was counted before.
        """
        self.expire(now_s)
        chain = self._chain(keys)
        self._leases.check_room(instance_id)
        run: list[Block] = []
        # The chain may begin anywhere, since a reader has the beginning already: a key names its whole prefix.
        first = self._blocks.get(chain[0])
        above = self._root if first is None else first.parent
        for key in chain:
            block = self._blocks.get(key)
            if block is None or block.state is not State.PRESENT or block.parent is not above:
                break
            run.append(block)
            above = block
        if not again:
            self.counters.hits += len(run)
            self.counters.misses += len(chain) - len(run)
        if not run:
            return PinnedBlocks(lease_id="", lease_s=0.0, slots=())
        self._keeping.order.begin_use()
        for block in run:
            self._keeping.order.use(block)
            self.take_pin(block)
        lease = self._grant(instance_id, now_s, is_write=False, blocks=run)
        return PinnedBlocks(
            lease_id=lease.lease_id,
            lease_s=self.limits.lease_s,
            slots=tuple(Slot(index=b.slot, generation=b.generation, checksum=b.checksum) for b in run),
        )

    def release(self, lease_id: str, corrupt: Sequence[int], now_s: float) -> int:
        """End a lease early; an ended one is ignored. Return how many blocks were dropped as corrupt.

        ``corrupt``: positions whose checksum did not hold; they are dropped with all that is below them. A write lease that is
        released is an abort: its owner has stopped writing.
        """
        self.expire(now_s)
        lease = self._leases.get(lease_id)
        if lease is None:
            return 0
        if any(not 0 <= position < len(lease.blocks) for position in corrupt):
            raise InvalidRequest(f"a corrupt position is outside of the lease's {len(lease.blocks)} blocks")
        found = 0
        if not lease.is_write:
            for position in corrupt:
                block = lease.blocks[position]
                if block is not None and not block.detached:
                    found += 1
                    self._drop(block)
        self.counters.corrupt += found
        self._end(lease, abandoned=False)
        return found

    def retain(self, keys: bytes, directives: Sequence[BlockDirective], now_s: float) -> Retained:
        """Note what is now known of blocks that are here; those of which something is said count as just used."""
        self.expire(now_s)
        chain = self._chain(keys)
        self._keeping.order.begin_use()
        unpinned: list[int] = []
        for position, said in enumerate(directives_of(directives, len(chain), now_s)):
            block = self._blocks.get(chain[position]) if said is not None else None
            if block is None or said is None:
                continue
            self._keeping.order.touch(block)
            if self._keeping.said(block, said, now_s):
                unpinned.append(position)
        self.counters.unpinned += len(unpinned)
        return Retained(unpinned=tuple(unpinned))

    def drop_blocks(self, keys: bytes, now_s: float) -> int:
        """Free blocks that nobody needs any more, but not those in use or with others below them. How many were freed.

        Blocks that only kvbm itself holds, since they are written to lower tiers, go too: their slots when it is done.
        """
        self.expire(now_s)
        blocks = [self._blocks[key] for key in set(self._chain(keys)) if key in self._blocks]
        freed = 0
        for block in sorted(blocks, key=lambda b: (-b.depth, b.key)):
            in_use = block.pins > self.moves.holds(block)
            if block.state is State.PRESENT and not in_use and not block.children:
                self._drop(block)
                freed += 1
        self.counters.freed += freed
        return freed

    def drop_instance(self, instance_id: str, now_s: float) -> int:
        """End all leases of an instance that is gone, or was started anew. Return how many there were.

        Its reservations go to quarantine: it may only have lost the bus, and write on.
        """
        self.expire(now_s)
        leases = self._leases.of_instance(instance_id)
        for lease in leases:
            self._end(lease, abandoned=True, now_s=now_s)
        return len(leases)

    def clear(self) -> None:
        """Drop all blocks, before the pool is given up."""
        for block in sorted(self._root.children, key=lambda b: b.key):
            self._drop(block)

    def expire(self, now_s: float) -> None:
        """Do what is due. Every other method does it first, so a late timer is harmless."""
        for lease in self._leases.expired(now_s):
            self.counters.leases_expired += 1
            self._end(lease, abandoned=True, now_s=now_s)
        self._slots.expire(now_s)
        self._now_s = max(self._now_s, now_s)

    def next_due_s(self) -> float | None:
        """When `expire` has something to do next."""
        due = [self._leases.next_deadline_s(), self._slots.next_due_s()]
        return min((time_s for time_s in due if time_s is not None), default=None)

    def find(self, key: bytes) -> Block | None:
        return self._blocks.get(key)

    @property
    def root(self) -> Block:
        return self._root

    def take_events(self) -> list[KvEvent]:
        """What has happened since the last call, in order: Stored below a present parent, Removed children first."""
        return self._changes.take()

    def chains(self) -> list[SnapshotChain]:
        """All present blocks, parents before their children."""
        return chains_of(block for block in self._root.subtree()[1:] if block.state is State.PRESENT)

    def keys(self) -> list[bytes]:
        """Of all blocks, also of those that are not present yet."""
        return list(self._blocks)

    def usage(self) -> PoolUsage:
        return PoolUsage(
            slots=self.slots,
            free=self._slots.free,
            present=self._present,
            reserved=self._reserved,
            pinned=self._pinned,
            quarantined=self._slots.quarantined,
            leases=len(self._leases),
            retained=len(self._keeping.caps),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken. For tests: it looks at everything."""
        self._slots.check_integrity()
        held = set(self._slots.held())
        check_tree(self._root, self._blocks, held)
        check_users(held, list(self._leases), *self.moves.check_integrity())
        assert self._present == sum(block.state is State.PRESENT for block in self._blocks.values())
        assert self._reserved == sum(block.writing for block in held)
        assert self._pinned == sum(block.pins > 0 for block in held)
        self._keeping.check_integrity(self._blocks, held, self._now_s)
        self._leases.check_integrity()

    def _chain(self, keys: bytes) -> list[bytes]:
        if len(keys) % KEY_BYTES or not keys:
            raise InvalidRequest(f"{len(keys)} bytes are no keys of {KEY_BYTES} bytes")
        count = len(keys) // KEY_BYTES
        if count > self.limits.max_keys_per_request:
            raise TooManyKeys(f"{count} keys in one request", limit=self.limits.max_keys_per_request)
        chain = unpack_keys(keys)
        if len(set(chain)) != count:
            raise InvalidRequest("a key occurs twice in a chain")
        return chain

    def _check_parents(self, above: Block, chain: list[bytes]) -> None:
        """A key names its whole prefix, so a known block has one parent for ever, and an unknown one no known child."""
        for key in chain:
            block = self._blocks.get(key)
            if block is not None and block.parent is not above:
                raise InvalidRequest(f"block {key.hex()} does not follow {above.key.hex() or 'the root'}")
            above = block or _NOWHERE

    def _take_missing(self, above: Block, chain: list[bytes], said: list[Directive | None]) -> list[Block | None]:
        """New blocks for the unknown keys, up to the first one without room; the known ones count as used."""
        self._keeping.order.begin_use()
        taken: list[Block | None] = []
        for key, one in zip(chain, said, strict=True):
            known = self._blocks.get(key)
            block = known or self.new_block(key, above)
            if block is None:
                break
            self._keeping.order.use(block)
            unpinned = self._keeping.said(block, one or PLAIN, self._now_s, is_new=known is None)
            self.counters.unpinned += unpinned
            taken.append(None if known else block)
            above = block
        missing = len(chain) - len(taken)
        self.counters.refused += missing
        return taken + [None] * missing

    def new_block(self, key: bytes, above: Block, *, spare_pinned: bool = False) -> Block | None:
        """A reserved block below ``above`` in a free slot; room is made by eviction, but not of ``above``, nor (``spare_pinned``)
        of what directives pin."""
        if not self._slots.free:
            victim = self._keeping.order.pop(self._now_s, above, spare_pinned=spare_pinned)
            if victim is None:
                return None
            self._count_eviction(victim)
            self._drop(victim)
        block = self._slots.new_block(key, above)
        self._blocks[key] = block
        above.children.add(block)
        self._reserved += 1
        return block

    def _count_eviction(self, victim: Block) -> None:
        match self._keeping.order.kind(victim):
            case "ephemeral":
                self.counters.evicted_ephemeral += 1
            case "normal":
                self.counters.evicted_normal += 1
            case "pinned":
                self.counters.evicted_pinned += 1

    def take_pin(self, block: Block) -> None:
        block.pins += 1
        self._pinned += block.pins == 1

    def give_pin_back(self, block: Block) -> None:
        block.pins -= 1
        self._pinned -= block.pins == 0
        self._slots.free_if_unused(block)
        self._keeping.order.offer(block)

    def adopt(self, blocks: Sequence[Block], metas: Sequence[BlockMeta], failed: Sequence[Block]) -> int:
        """Blocks that kvbm itself has written (see `Moves.fill`); ``failed`` ones are dropped. How many became present.

        They bring their directives along; a pin counts against its tenant's share here, too, and one that has expired is none.
        """
        self._keeping.order.begin_use()
        before = self._present
        for block in [*blocks, *failed]:
            self._end_writing(block)
        for block in failed:
            self._drop(block)
            self._slots.free_if_unused(block)
        for block, meta in zip(blocks, metas, strict=True):
            if block.detached:
                continue
            block.checksum = meta.checksum
            self._keeping.order.touch(block)
            said_meanwhile = block.directive
            self._keeping.said(block, effective(meta.directive, self._now_s), self._now_s, is_new=True)
            if not said_meanwhile.is_plain:
                self._keeping.said(block, said_meanwhile, self._now_s)
            block.state = State.WRITTEN
        for block in blocks:
            if block.state is State.WRITTEN and not block.detached and _is_present(block.parent):
                self._promote(block)
        return self._present - before

    def _grant(self, instance_id: str, now_s: float, *, is_write: bool, blocks: Sequence[Block | None]) -> Lease:
        self.counters.leases_granted += 1
        return self._leases.grant(instance_id, now_s, is_write=is_write, blocks=blocks)

    def _end(self, lease: Lease, *, abandoned: bool, now_s: float = 0.0) -> None:
        """End a lease that was not committed. ``abandoned``: the writer did not say that it has stopped."""
        self._leases.end(lease)
        for block in lease.held():
            if lease.is_write:
                # In this order: the slot must not come free before it is known whether it has to rest.
                self._drop(block)
                self._end_writing(block, rest_until_s=now_s + self.limits.quarantine_s if abandoned else None)
            else:
                self.give_pin_back(block)

    def _end_writing(self, block: Block, rest_until_s: float | None = None) -> None:
        block.writing = False
        self._reserved -= 1
        self._slots.free_if_unused(block, rest_until_s)

    def _promote(self, block: Block) -> None:
        """Make a written block below a present one present, and all written ones below it."""
        promoted: list[Block] = []
        stack = [block]
        while stack:
            block = stack.pop()
            block.state = State.PRESENT
            promoted.append(block)
            stack += sorted((b for b in block.children if b.state is State.WRITTEN), key=lambda b: b.key)
        self._present += len(promoted)
        self.counters.stored += len(promoted)
        self._changes.stored(promoted)
        for block in promoted:
            self._keeping.order.offer(block)

    def _drop(self, block: Block) -> None:
        """Take a block and all below it out of the index. Slots come free as soon as nobody reads or writes them."""
        if block.detached:
            return
        above = block.parent
        for gone in reversed(block.subtree()):
            gone.detached = True
            del self._blocks[gone.key]
            self._keeping.forget(gone)
            if gone.parent is not None:
                gone.parent.children.discard(gone)
            if gone.state is State.PRESENT:
                self._present -= 1
                self._changes.removed(gone)
            self._slots.free_if_unused(gone)
        if above is not None:
            self._keeping.order.offer(above)


# Stands for the parent of a block whose prefix is not here.
_NOWHERE = Block.root()


def _is_present(block: Block | None) -> bool:
    return block is not None and block.state is State.PRESENT
