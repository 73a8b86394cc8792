"""Where the blocks of a prompt are, seen from one worker: its own device, and what it can bring there instead of computing it.

    g2, g3     the kvbm of the worker's own host
    g4         the store that the cluster shares; a worker reaches it through the kvbm of its host, whoever put the blocks there
    remote     the device of another worker, where the worker's record says that it can read from there

The rate of each is what the worker has measured; until it has, what kvbm measured when it started (g2), or a prior relative to the
worker's prefill rate.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from heapq import nlargest
from itertools import islice
from operator import itemgetter
from random import Random

from kvbus_router.core.cost import Cached, Source
from kvbus_router.core.limits import Weights
from kvbus_router.core.roster import Roster
from kvbus_router.core.workers import Worker
from kvbus_wire.indexer import Match
from kvbus_wire.records import InstanceRecord

G1, G2, G3, G4, REMOTE = "g1", "g2", "g3", "g4", "remote"


_depth = itemgetter(1)


class Holders:
    """Made once per request from what the index says (``matches``) and what is being computed (``inflight``: blocks by worker)."""

    def __init__(
        self,
        matches: Iterable[Match],
        inflight: Mapping[str, int],
        kvbms: Mapping[str, InstanceRecord],
        weights: Weights,
    ) -> None:
        self._inflight = inflight
        self._speedups = {
            G2: weights.g2_speedup,
            G3: weights.g3_speedup,
            G4: weights.g4_speedup,
            REMOTE: weights.remote_speedup,
        }
        self._g1: dict[str, int] = {}
        self._hosts: dict[str, dict[str, int]] = {}
        self._shared = 0
        self._kvbm_of = {kvbm.host_id: kvbm for kvbm in kvbms.values()}
        self._predicted: dict[str, int] = {}
        for match in matches:
            tier = match.tier
            if match.predicted:
                self._predicted[match.instance_id] = match.depth
            elif tier == G1:
                self._g1[match.instance_id] = match.depth
            elif tier == G4:
                self._shared = max(self._shared, match.depth)
            elif tier in (G2, G3) and (kvbm := kvbms.get(match.instance_id)) is not None:
                tiers = self._hosts.setdefault(kvbm.host_id, {})
                tiers[tier] = max(tiers.get(tier, 0), match.depth)

    @cached_property
    def _deepest(self) -> list[tuple[str, int]]:
        return nlargest(2, self._g1.items(), key=_depth)

    def most_of_it(self, roster: Roster, most: int, rng: Random) -> Iterator[Worker]:
        """Up to ``most`` workers that hold, compute or can fetch from their own host the most leading blocks. Among equals chance
        decides: a prompt of which all hold the same part draws nobody to a few of them."""
        depths = dict(self._g1)
        for part in (self._inflight, self._predicted):
            for worker_id, depth in part.items():
                if depth > depths.get(worker_id, 0):
                    depths[worker_id] = depth
        held: list[tuple[str | Sequence[Worker], int]] = list(depths.items())
        held += [(roster.on_host(host), max(tiers.values())) for host, tiers in self._hosts.items()]
        rotation = rng.randrange(len(held)) if held else 0
        held = sorted(held[rotation:] + held[:rotation], key=_depth, reverse=True)
        named = ((roster.get(who),) if isinstance(who, str) else who for who, _ in held)
        return islice((worker for workers in named for worker in workers if worker is not None), most)

    def depth(self, worker: Worker) -> int:
        """Leading blocks that it holds or computes."""
        worker_id = worker.worker_id
        return max(part.get(worker_id, 0) for part in (self._g1, self._inflight, self._predicted))

    def cached(self, worker: Worker) -> Cached:
        worker_id = worker.worker_id
        g1, inflight = self._g1.get(worker_id, 0), self._inflight.get(worker_id, 0)
        predicted = self._predicted.get(worker_id, 0)
        if worker.worker.kv_events:
            inflight = max(inflight, predicted)
        else:
            # Nobody will ever tell what it holds: what it was sent is all there is to believe.
            g1 = max(g1, predicted)
        return Cached(g1, inflight, self._sources(worker))

    def _sources(self, worker: Worker) -> list[Source]:
        host = worker.record.host_id
        depths = dict(self._hosts.get(host, ()))
        if self._shared and host in self._kvbm_of:
            depths[G4] = self._shared
        if worker.worker.reads_remote:
            depths[REMOTE] = max((depth for other, depth in self._deepest if other != worker.worker_id), default=0)
        return [Source(tier, depth, self._tokens_per_s(worker, tier)) for tier, depth in depths.items() if depth]

    def _tokens_per_s(self, worker: Worker, tier: str) -> float:
        measured = worker.onboard_tokens_per_s(tier)
        if measured > 0:
            return measured
        record, kvbm = worker.worker, self._kvbm_of.get(worker.record.host_id)
        if tier == G2 and kvbm is not None and kvbm.kvbm is not None and record.block_bytes > 0:
            probed = kvbm.kvbm.onboard_bytes_per_s / record.block_bytes * record.model.block_size
            if probed > 0:
                return probed
        return worker.prefill_tokens_per_s * self._speedups[tier]
