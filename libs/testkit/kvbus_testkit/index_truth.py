"""What instances really hold, and the stream of what they say, kept as plainly as can be: indexes are compared with this."""

from collections.abc import Iterator, Sequence

from kvbus_testkit.index_events import a_kvbm, a_worker, batch, chunk, load_report
from kvbus_testkit.instances import block_key, block_keys
from kvbus_wire.kv_events import Cleared, KvEvent, KvEvents, Removed, Stored
from kvbus_wire.load import LoadReport
from kvbus_wire.records import InstanceRecord
from kvbus_wire.worker import BlockSnapshotChunk, SnapshotChain

BLOCKS = 63
"""Block k (from 1) has the parent k // 2 (0: the root)."""

_CHUNK_CHAINS = 5
_REPLAY_MESSAGES = 8


def depth_of(chain: Sequence[int], held: frozenset[int]) -> int:
    """How many leading blocks of the chain are held."""
    return next((depth for depth, number in enumerate(chain) if number not in held), len(chain))


class Holder:
    """One life of an instance. ``history``: what it held in each tier after each of its events, number 0 being none."""

    def __init__(self, name: str, incarnation: int, tiers: Sequence[str]) -> None:
        self.name = name
        self.incarnation = incarnation
        self.history = {tier: [frozenset[int]()] for tier in tiers}
        self._events: dict[str, list[KvEvent]] = {tier: [] for tier in tiers}
        self._sent = dict.fromkeys(tiers, 0)

    @property
    def record(self) -> InstanceRecord:
        return a_worker(self.name, self.incarnation) if "g1" in self.history else a_kvbm(self.name, self.incarnation)

    @property
    def report(self) -> LoadReport | None:
        """A kvbm sends none."""
        return load_report(self.seq("g1"), self.name, self.incarnation) if "g1" in self.history else None

    def seq(self, tier: str) -> int:
        """Number of the last event."""
        return len(self.history[tier]) - 1

    def held(self, tier: str) -> frozenset[int]:
        return self.history[tier][-1]

    def ever_held(self, tier: str) -> frozenset[int]:
        return frozenset[int]().union(*self.history[tier])

    def store(self, tier: str, chain: Sequence[int]) -> None:
        event = Stored(_key(chain[0] // 2), block_keys(*chain))
        self._change(tier, event, self.held(tier) | set(chain))

    def remove(self, tier: str, numbers: Sequence[int]) -> None:
        self._change(tier, Removed(block_keys(*numbers)), self.held(tier) - set(numbers))

    def clear(self, tier: str) -> None:
        self._change(tier, Cleared(), frozenset())

    def emit(self, tier: str, again: int = 0) -> KvEvents:
        """What was not sent yet (if there is nothing: an event that changes nothing), and before it the last ``again`` events
        that were."""
        if self.is_all_sent(tier):
            self.remove(tier, ())
        first, self._sent[tier] = max(0, self._sent[tier] - again), self.seq(tier)
        events = self._events[tier][first:]
        return batch(*events, seq=first + 1, worker=self.name, incarnation=self.incarnation, tier=tier)

    def is_all_sent(self, tier: str) -> bool:
        return self._sent[tier] == self.seq(tier)

    def snapshot(self) -> list[BlockSnapshotChunk]:
        """A worker names its only tier, a kvbm those that it has used. What was not sent yet is in it, too."""
        return [part for tier in self.history if tier == "g1" or self.seq(tier) for part in self._chunks(tier)]

    def _chunks(self, tier: str) -> list[BlockSnapshotChunk]:
        chains = [SnapshotChain(_key(n // 2), _key(n)) for n in sorted(self.held(tier), reverse=True)]
        parts = [chains[i : i + _CHUNK_CHAINS] for i in range(0, len(chains), _CHUNK_CHAINS)] or [[]]
        return [
            chunk(self.seq(tier), *part, worker=self.name, incarnation=self.incarnation, tier=tier) for part in parts
        ]

    def _change(self, tier: str, event: KvEvent, held: frozenset[int]) -> None:
        self.history[tier].append(held)
        self._events[tier].append(event)


class Stream:
    """JetStream: messages numbered from 1, of which the first may be gone."""

    def __init__(self, created: str) -> None:
        self.created = created
        self.messages: list[KvEvents] = []
        self.first = 1

    @property
    def last(self) -> int:
        return len(self.messages)

    def read(self, after: int) -> Iterator[tuple[int, KvEvents]]:
        for seq in range(max(after + 1, self.first), self.last + 1):
            yield seq, self.messages[seq - 1]

    def replay(self, instance_id: str, after: int) -> list[tuple[int, KvEvents]]:
        """Some of an instance's messages behind number ``after``, in the order of their events."""
        found = [(seq, b) for seq, b in self.read(after) if b.instance_id == instance_id][:_REPLAY_MESSAGES]
        return sorted(found, key=lambda entry: (entry[1].incarnation, entry[1].first_seq))


def _key(number: int) -> bytes:
    return block_key(number) if number else b""
