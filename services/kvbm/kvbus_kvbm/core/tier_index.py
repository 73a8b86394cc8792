"""What a lower tier has told about itself by its events: which blocks of one spec it answers for."""

from collections.abc import Iterator, Sequence

from kvbus_kvbm.core.changes import KEYS_PER_EVENT
from kvbus_wire.kv_events import KvEvent, Removed, Stored
from kvbus_wire.packing import pack_keys, unpack_keys
from kvbus_wire.worker import SnapshotChain


class TierIndex:
    """Follows the events of a tier, so it always agrees with what indexers were told. Parents come before their children."""

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._parents)

    def __contains__(self, key: bytes) -> bool:
        return key in self._parents

    def apply(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            match event:
                case Stored(parent, keys):
                    for key in unpack_keys(keys):
                        # Anew at the end: its parent may have been stored anew after it was stored first.
                        self._parents.pop(key, None)
                        self._parents[key] = parent
                        parent = key
                case Removed(keys):
                    for key in unpack_keys(keys):
                        self._parents.pop(key, None)
                case _:
                    self._parents.clear()

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks of this piece of a chain it has."""
        count = 0
        for key in keys:
            if key not in self._parents:
                break
            count += 1
        return count

    def parent(self, key: bytes) -> bytes | None:
        return self._parents.get(key)

    def chains(self) -> Iterator[SnapshotChain]:
        """All blocks, parents before their children, in pieces as long as they may be."""
        run: list[bytes] = []
        above = b""
        for key, parent in self._parents.items():
            if run and (parent != run[-1] or len(run) >= KEYS_PER_EVENT):
                yield SnapshotChain(parent=above, keys=pack_keys(run))
                run = []
            if not run:
                above = parent
            run.append(key)
        if run:
            yield SnapshotChain(parent=above, keys=pack_keys(run))
