"""Where the blocks of a prompt are, seen from one worker: its own device, and what it can bring there instead of computing it.

    g2, g3     the kvbm of the worker's own host
    g4         the store that the cluster shares; a worker reaches it through the kvbm of its host, whoever put the blocks there
    remote     the device of another worker, where the worker's record says that it can read from there

The rate of each is what the worker has measured; until it has, what kvbm measured when it started (g2), or a prior relative to the
worker's prefill rate.
"""

from collections.abc import Iterable, Mapping

from kvbus_router.core.cost import Cached, Source
from kvbus_router.core.limits import Weights
from kvbus_router.core.workers import Worker
from kvbus_wire.indexer import Match
from kvbus_wire.records import InstanceRecord

G1, G2, G3, G4, REMOTE = "g1", "g2", "g3", "g4", "remote"


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
            if match.predicted:
                self._predicted[match.instance_id] = match.depth
            elif match.tier == G1:
                self._g1[match.instance_id] = match.depth
            elif match.tier == G4:
                self._shared = max(self._shared, match.depth)
            elif match.tier in (G2, G3) and (kvbm := kvbms.get(match.instance_id)) is not None:
                tiers = self._hosts.setdefault(kvbm.host_id, {})
                tiers[match.tier] = max(tiers.get(match.tier, 0), match.depth)
        self._deepest = sorted(self._g1.items(), key=lambda item: -item[1])[:2]

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
