"""The workers of one model, as they are looked through: in a stable order, at random, or by host."""

from collections.abc import Iterable, Iterator, Sequence
from math import gcd
from random import Random

from kvbus_router.core.workers import Worker


class Roster:
    """Made anew when a worker comes, goes, or changes its role."""

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        self.workers: Sequence[Worker] = tuple(workers)
        self._by_id = {worker.worker_id: worker for worker in self.workers}
        movers = [worker for worker in self.workers if worker.worker.transfers]
        self._for_all = tuple(worker for worker in movers if worker.worker.role == "prefill")
        self._for_decode = tuple(worker for worker in movers if worker.worker.role != "decode")
        self._by_host: dict[str, list[Worker]] = {}
        for worker in self.workers:
            self._by_host.setdefault(worker.record.host_id, []).append(worker)

    def __len__(self) -> int:
        return len(self.workers)

    def prefillers(self, role: str) -> Sequence[Worker]:
        """Those that may compute prompts for a worker of this role: among workers that do both nobody computes for another, since
        the router sends the request there, then."""
        return self._for_decode if role == "decode" else self._for_all

    def get(self, worker_id: str) -> Worker | None:
        return self._by_id.get(worker_id)

    def on_host(self, host_id: str) -> Sequence[Worker]:
        return self._by_host.get(host_id, ())

    def at_random(self, rng: Random) -> Iterator[Worker]:
        """All of them, each once; costs only what is taken. From a random start in steps of a random length that has no divisor in
        common with the number of workers, so it meets every one."""
        count = len(self.workers)
        if not count:
            return
        at, step = rng.randrange(count), rng.randrange(count) or 1
        while gcd(step, count) > 1:
            step = rng.randrange(count) or 1
        for _ in range(count):
            yield self.workers[at]
            at = (at + step) % count
