"""The workers of one model, as they are looked through: in a stable order, at random, or by host."""

from collections.abc import Iterable, Iterator, Sequence
from math import gcd
from random import Random

from kvbus_router.core.workers import Worker


class Roster:
    """Made anew when a worker comes or goes."""

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        self.workers: Sequence[Worker] = tuple(workers)
        self._by_id = {worker.worker_id: worker for worker in self.workers}
        self._by_host: dict[str, list[Worker]] = {}
        for worker in self.workers:
            self._by_host.setdefault(worker.record.host_id, []).append(worker)

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def prefillers(self) -> Iterator[Worker]:
        """Those that may compute prompts for others."""
        return (worker for worker in self.workers if worker.worker.role != "decode" and worker.worker.transfers)

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
