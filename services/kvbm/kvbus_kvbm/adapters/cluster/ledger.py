"""The log of the blocks that this kvbm answers for, in the store itself."""

import asyncio
from collections.abc import Iterable
from typing import Any

from kvbus_kvbm.adapters.cluster.reaching import Reaching
from kvbus_kvbm.adapters.cluster.store import ClusterStore
from kvbus_kvbm.core.cluster_index import ClusterBlock
from kvbus_kvbm.core.cluster_log import (
    BadLog,
    Kept,
    LogPart,
    SpecRecords,
    decode_log,
    encode_log,
    log_name,
    owner_prefix,
)
from kvbus_kvbm.core.lower import TierCounters
from kvbus_kvbm.core.spec import PoolSpec

_MAX_PART_BYTES = 1 << 30

Changes = dict[tuple[PoolSpec, bytes], ClusterBlock | None]
"""None: the block is gone."""


class Ledger:
    """``life``: larger than that of every earlier kvbm of this owner. ``unix_s``: what to add to times of our clock."""

    def __init__(
        self,
        store: ClusterStore,
        reaching: Reaching,
        counters: TierCounters,
        *,
        owner: str,
        life: int,
        unix_s: float,
        max_parts: int,
        log: Any,
    ) -> None:
        self._store = store
        self._reaching = reaching
        self._counters = counters
        self._owner = owner
        self._life = life
        self._unix_s = unix_s
        self._max_parts = max_parts
        self._log = log
        self._number = 0
        self._names: list[str] = []
        self._records = 0
        self._pending: Changes = {}

    @property
    def pending(self) -> int:
        return len(self._pending)

    def note(self, block: ClusterBlock) -> None:
        """It is new, or its directive has changed."""
        self._pending[block.shelf.spec, block.key] = block

    def note_gone(self, spec: PoolSpec, key: bytes) -> None:
        self._pending[spec, key] = None

    async def load(self) -> tuple[list[tuple[PoolSpec, Kept]], list[tuple[PoolSpec, Kept]]]:
        """All that earlier lives kept, and what of it may not have been written: what the last part says. Raise StoreFailed."""
        names = await self._reaching.call("read", lambda: self._store.names(owner_prefix(self._owner) + "/"))
        self._names = names
        found: dict[tuple[PoolSpec, bytes], Kept] = {}
        last: LogPart | None = None
        for name in names:
            part = await self._part(name)
            if part is None:
                continue
            self._records += sum(len(records.kept) + len(records.gone) for records in part.records)
            if part.whole:
                found.clear()
            for records in part.records:
                for key in records.gone:
                    found.pop((records.spec, key), None)
                for kept in records.kept:
                    found[records.spec, kept.key] = kept
            last = part
        blocks = sorted(((spec, kept) for (spec, _), kept in found.items()), key=lambda entry: entry[1].depth)
        unsure = [] if last is None or last.whole else [(r.spec, kept) for r in last.records for kept in r.kept]
        return blocks, [(spec, kept) for spec, kept in unsure if found.get((spec, kept.key)) is kept]

    async def _part(self, name: str) -> LogPart | None:
        data = await self._reaching.call("read", lambda: self._store.get(name, _MAX_PART_BYTES))
        if data is None:
            return None
        try:
            return await asyncio.to_thread(decode_log, data)
        except BadLog as error:
            self._counters.corrupt += 1
            self._log.warning("g4_log_damaged", name=name, reason=str(error))
            return None

    async def append(self) -> None:
        """Write what is pending. Raise StoreFailed; then it is pending still."""
        if not self._pending:
            return
        taken, self._pending = self._pending, {}
        try:
            await self._write(taken, whole=False)
        except BaseException:
            self._pending = {**taken, **self._pending}
            raise

    def is_due(self, blocks: int) -> bool:
        """Is the log much longer than what it says?"""
        return len(self._names) > self._max_parts or self._records > 2 * blocks + 4096

    async def rewrite(self, blocks: Iterable[ClusterBlock]) -> None:
        """One part that says all, in place of those before. ``blocks``: also those that are still to be deleted.

        Raise StoreFailed."""
        before = list(self._names)
        taken, self._pending = self._pending, {}
        try:
            await self._write({(b.shelf.spec, b.key): b for b in blocks}, whole=True)
        except BaseException:
            self._pending = {**taken, **self._pending}
            raise
        await self._reaching.call("delete", lambda: self._store.delete(before))
        self._names = [name for name in self._names if name not in set(before)]

    async def _write(self, changes: Changes, *, whole: bool) -> None:
        # A hundred thousand records take a second. What a block says may change meanwhile: then it is pending again.
        data = await asyncio.to_thread(lambda: encode_log(self._as_part(changes, whole=whole)))
        self._number += 1
        name = log_name(self._owner, self._life, self._number)
        await self._reaching.call("write", lambda: self._store.put(name, data))
        self._names.append(name)
        self._records = len(changes) if whole else self._records + len(changes)

    def _as_part(self, changes: Changes, *, whole: bool) -> LogPart:
        by_spec: dict[PoolSpec, SpecRecords] = {}
        for (spec, key), block in changes.items():
            records = by_spec.setdefault(spec, SpecRecords(spec, [], []))
            if block is None:
                records.gone.append(key)
            else:
                records.kept.append(block.record(self._unix_s))
        return LogPart(whole, list(by_spec.values()))
