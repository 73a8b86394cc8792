"""The KV events of a pool, in order, with neighbouring removals in one event."""

from collections.abc import Iterable, Iterator

from kvbus_blocks.keys import ROOT
from kvbus_kvbm.core.block import Block
from kvbus_wire.kv_events import KvEvent, Removed, Stored
from kvbus_wire.packing import pack_keys
from kvbus_wire.worker import SnapshotChain

# A model's whole pool may go at once; an event has to fit into a message.
KEYS_PER_EVENT = 8192


class Changes:
    """Collects until `take`. No event names more than ``KEYS_PER_EVENT`` blocks."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []
        self._removed: list[bytes] = []

    def stored(self, blocks: Iterable[Block]) -> None:
        """``blocks`` became present, parents before their children."""
        self._flush_removed()
        self._events += [Stored(parent=parent_key(run[0]), keys=_keys(run)) for run in _runs(blocks)]

    def removed(self, block: Block) -> None:
        """Call for children before their parents."""
        self._removed.append(block.key)
        if len(self._removed) >= KEYS_PER_EVENT:
            self._flush_removed()

    def take(self) -> list[KvEvent]:
        self._flush_removed()
        events, self._events = self._events, []
        return events

    def _flush_removed(self) -> None:
        if self._removed:
            self._events.append(Removed(keys=pack_keys(self._removed)))
            self._removed = []


def chains_of(blocks: Iterable[Block]) -> list[SnapshotChain]:
    """``blocks``, parents before their children, as chains."""
    return [SnapshotChain(parent=parent_key(run[0]), keys=_keys(run)) for run in _runs(blocks)]


def parent_key(block: Block) -> bytes:
    return ROOT if block.parent is None else block.parent.key


def _keys(run: list[Block]) -> bytes:
    return pack_keys(block.key for block in run)


def _runs(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Pieces, as long as they may be, in which each block is the parent of the next."""
    run: list[Block] = []
    for block in blocks:
        if run and (block.parent is not run[-1] or len(run) >= KEYS_PER_EVENT):
            yield run
            run = []
        run.append(block)
    if run:
        yield run
